"""Free memory: of the machine what Linux holds available, of a device what torch says, else nothing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kda.cli.memory import free_memory
from kda.cli.options import UsageError, check_memory


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_the_machines() -> None:
    assert 0 < free_memory(torch.device("cpu")) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 4 << 30))
    assert free_memory(torch.device("cuda", 1)) == 3 << 30
    check_memory(torch.device("cuda"), 3 << 30, "take less")
    with pytest.raises(UsageError, match=r"^needs about 4 GiB of free memory on cuda, has 3: take less$"):
        check_memory(torch.device("cuda"), 4 << 30, "take less")


def test_where_nothing_tells_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mps", SimpleNamespace())
    assert free_memory(torch.device("mps")) is None
    check_memory(torch.device("mps"), 1 << 60, "take less")
    monkeypatch.setattr("builtins.open", lambda *given, **options: (_ for _ in ()).throw(FileNotFoundError()))
    assert free_memory(torch.device("cpu")) is None
