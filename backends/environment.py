"""The environment variables that the package reads. Each is read at every call, so a process may change it."""

from __future__ import annotations

import os

VARIABLES = {
    "KDA_BACKEND": "auto (default), tilelang, pypto or torch; the argument backend= wins over it",
    "KDA_EMULATE": "1: let backend=tilelang and backend=pypto run their kernels on CPU tensors, slowly",
    "KDA_CHECK": "1: also check argument values (cu_seqlens order, g <= 0, finite inputs)",
}
"""Every variable, with what it does."""


def backend_name() -> str:
    """KDA_BACKEND: who computes where a call doesn't say."""
    return os.environ.get("KDA_BACKEND") or "auto"


def emulating() -> bool:
    """KDA_EMULATE: may kernels run on CPU tensors?"""
    return os.environ.get("KDA_EMULATE") == "1"


def checking() -> bool:
    """KDA_CHECK: are values checked too?"""
    return os.environ.get("KDA_CHECK") == "1"
