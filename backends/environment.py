"""The environment variables that the package reads.

Each is read at every call, so a process may change it; KDA_FLA alone is read when torch is imported, by `kda_autoload`.
"""

from __future__ import annotations

import os

VARIABLES = {
    "KDA_BACKEND": "auto (default), tilelang, pypto or torch; the argument backend= wins over it",
    "KDA_EMULATE": "1 (true, yes, on): let backend=tilelang and backend=pypto run their kernels on CPU tensors, slowly",
    "KDA_KEEP_TABLE": "1 (true, yes, on): a forward pass of tilelang keeps its chunk table for the backward pass",
    "KDA_SPLIT": "auto (default), off, or a number of chunks: the segments that tilelang cuts long sequences into",
    "KDA_CHECK": "1 (true, yes, on): also check argument values (cu_seqlens order, g <= 0, finite inputs)",
    "KDA_FLA": "1 (true, yes, on), when torch is imported: join flash-linear-attention's dispatch once it is imported",
}
"""Every variable, with what it does."""


_LONGEST = 2**25  # chunks: more than a call may have tokens for

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def backend_name() -> str:
    """KDA_BACKEND: who computes where a call doesn't say."""
    return os.environ.get("KDA_BACKEND") or "auto"


def emulating() -> bool:
    """KDA_EMULATE: may kernels run on CPU tensors?"""
    return _is_on("KDA_EMULATE")


def keeping_table() -> bool:
    """KDA_KEEP_TABLE: does a forward pass keep what would save the backward pass work, beside the inputs?"""
    return _is_on("KDA_KEEP_TABLE")


def chunks_of_a_segment() -> int | None:
    """KDA_SPLIT: how long are the segments that sequences are cut into? 0: they stay whole; None: as long as pays."""
    text = os.environ.get("KDA_SPLIT", "").lower()
    if text in ("", "auto"):
        return None
    if text == "off":
        return 0
    if text.isascii() and text.isdigit() and 0 < int(text) <= _LONGEST:
        return int(text)
    raise ValueError(f"KDA_SPLIT: expected auto, off or a number of chunks from 1 to {_LONGEST}, got {text!r}")


def checking() -> bool:
    """KDA_CHECK: are values checked too?"""
    return _is_on("KDA_CHECK")


def _is_on(name: str) -> bool:
    text = os.environ.get(name)
    if not text:
        return False
    if (on := _SWITCH.get(text.lower())) is None:
        raise ValueError(f"{name}: expected one of {', '.join(_SWITCH)} or nothing, got {text!r}")
    return on
