"""PyPTO's program: the one state of a process into which every kernel is traced, by one thread at a time.

An error in the midst of a kernel leaves half of it there, and every later kernel would fail or end the process, so it
is thrown away. What PyPTO offers for that forgets too little: beside its `reset`, a flag of its Python part says that a
function is being recorded, and a queue of its C++ part names functions that are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pypto
from pypto._controller import Controller

_lock = threading.Lock()
_process: int | None = None  # the one that has traced
_spoiled = ""  # why no kernel can be traced any more

_HOST_MACHINE = "_ZN3npu8tile_fwk11HostMachine"


@contextlib.contextmanager
def tracing(name: str) -> Iterator[None]:
    """Inside, the program belongs to kernel `name`; an error there is a RuntimeError that leaves no trace of it.

    Raises RuntimeError at once in a process forked after PyPTO has traced: its compiler's threads stayed behind.
    """
    global _process, _spoiled
    if _process not in (None, os.getpid()):
        raise RuntimeError(
            f"PyPTO has run kernels in process {_process} before this one was forked from it, and would hang here: "
            "fork earlier, or start processes by spawn"
        )
    _process = os.getpid()
    with _lock:
        if _spoiled:
            raise RuntimeError(_spoiled)
        try:
            yield
        except BaseException as error:
            try:
                _throw_away()
            except Exception as reason:
                _spoiled = f"PyPTO failed in kernel {name} and cannot recover in this process, start another: {reason}"
                raise RuntimeError(_spoiled) from error
            if isinstance(error, Exception):
                raise RuntimeError(f"PyPTO failed in kernel {name}: {error}") from error
            raise


def _throw_away() -> None:
    Controller.end_function()
    library = ctypes.CDLL(str(Path(pypto.__file__).parent / "lib" / "libtile_fwk_interface.so"))
    instance = library[f"{_HOST_MACHINE}11GetInstanceEv"]
    instance.restype = ctypes.c_void_p
    machine = ctypes.c_void_p(instance())
    library[f"{_HOST_MACHINE}19ClearStashFuncQueueEv"](machine)
    library[f"{_HOST_MACHINE}13DestroyThreadEv"](machine)  # one that met an error has ended; they start again
