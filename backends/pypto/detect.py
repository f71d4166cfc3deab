"""Whether this machine has what the kernels need: PyPTO and an NPU, or what PyPTO's interpreter needs on a CPU.

Looked up once, in the order from cheap to dear. Nothing here raises, and torch_npu is not imported before a device
node is seen: without CANN its import fails and would take torch's with it.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
from importlib.metadata import PackageNotFoundError, version


@functools.cache
def missing_pypto() -> str | None:
    """Why there is no PyPTO, or None."""
    try:
        version("pypto")
    except PackageNotFoundError:
        return "pypto is not installed (the extra `pypto`; wheels exist for Linux and Python 3.9 to 3.12)"
    return None


@functools.cache
def missing_npu() -> str | None:
    """Why no NPU can be used, or None."""
    if not glob.glob("/dev/davinci[0-9]*"):
        return "there is no NPU: no /dev/davinci* (KDA_EMULATE=1 runs the kernels on CPU tensors, slowly)"
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (the extra `npu`)"
    try:
        import torch
        import torch_npu  # noqa: F401

        available = torch.npu.is_available()  # type: ignore[attr-defined]  # torch_npu adds it
        return None if available else "torch.npu.is_available() is False: is CANN set up?"
    except BaseException as error:  # whatever a half-installed CANN raises, the other backends must go on working
        return f"torch_npu does not work: {type(error).__name__}: {error}"


@functools.cache
def missing_interpreter() -> str | None:
    """Why kernels cannot be executed on CPU tensors, or None."""
    if missing_pypto():
        return None  # said there
    from .calculator import missing_tools

    return missing_tools()
