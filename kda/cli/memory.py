"""How much memory a device has free."""

from __future__ import annotations

import torch


def free_memory(device: torch.device) -> int | None:
    """Bytes that a process can still get on the device; None where nothing tells."""
    if device.type == "cpu":
        return _available()
    info = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    return None if info is None else info(device)[0]


def _available() -> int | None:
    """Linux's own estimate: free pages alone would leave out the file cache, which gives way."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = dict(line.split(":") for line in file)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
