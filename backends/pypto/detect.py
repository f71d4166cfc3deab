"""Whether this machine has what the kernels need: PyPTO and an NPU, or what PyPTO's interpreter needs on a CPU.

PyPTO and CANN come in pairs: PyPTO 0.2 belongs to CANN 9.0, and later CANN brings a PyPTO of its own, which Python
finds first. Looked up once, in the order from cheap to dear. Nothing here raises, and torch_npu is not imported before
a device node is seen: without CANN its import fails and would take torch's with it. PyPTO is imported by
`import_failure` alone.
"""

from __future__ import annotations

import functools
import glob
import importlib
import importlib.util
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PYPTO, CANN = "0.2", "9.0"
"""The releases that the kernels were written for; with others nothing was tried, not even the interpreter."""

_failed_import: str | None = None


def missing_pypto() -> str | None:
    """Why there is no PyPTO, or None; what an import has told is remembered."""
    return _missing_distribution() or _failed_import


@functools.cache
def _missing_distribution() -> str | None:
    try:
        found = version("pypto")
    except PackageNotFoundError:  # a folder of that name on the path is not PyPTO
        return "pypto is not installed (the extra `pypto`; wheels exist for Linux and Python 3.9 to 3.12)"
    spec = importlib.util.find_spec("pypto")
    if spec is None or spec.origin is None:
        where = "nowhere" if spec is None else f"as a folder, {list(spec.submodule_search_locations or ())}"
        return f"pypto is installed, but Python finds it {where}"
    if not _is(found, PYPTO):
        return f"the kernels, and the way to PyPTO's interpreter, are for PyPTO {PYPTO} with CANN {CANN}, got {_pair()}"
    return None


def cann() -> str | None:
    """The release of the CANN toolkit whose environment is set up, if any; `unknown` if it does not tell its own."""
    if not (home := os.environ.get("ASCEND_HOME_PATH")):
        return None
    for file in sorted(Path(home).glob("*-linux/ascend_toolkit_install.info")):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("version="):
                return line.removeprefix("version=").strip()
    return "unknown"


def _pair() -> str:
    return f"PyPTO {version('pypto')} with {f'CANN {found}' if (found := cann()) else 'no CANN'}"


def _is(release: str, wanted: str) -> bool:
    return f"{release}.".startswith(f"{wanted}.")


def import_failure() -> str | None:
    """Why PyPTO cannot be imported, or None. This imports it.

    It sets the root logger up to print everything, which is not for it to decide.
    """
    global _failed_import
    if _failed_import is None and "pypto" not in sys.modules:
        root = logging.getLogger()
        level, handlers = root.level, root.handlers[:]
        try:
            importlib.import_module("pypto")
        except (Exception, SystemExit) as error:
            _failed_import = f"pypto cannot be imported: {type(error).__name__}: {error}"
        finally:
            root.setLevel(level)
            root.handlers[:] = handlers
    return _failed_import


@functools.cache
def missing_npu() -> str | None:
    """Why no NPU can be used, or None."""
    if not glob.glob("/dev/davinci[0-9]*"):
        return "there is no NPU: no /dev/davinci* (KDA_EMULATE=1 runs the kernels on CPU tensors, slowly)"
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (the extra `npu`)"
    if (release := cann()) is None:
        return "CANN is not set up: ASCEND_HOME_PATH is not set (source CANN's set_env.sh first)"
    if release != "unknown" and not _is(release, CANN):
        return f"the kernels are for PyPTO {PYPTO} with CANN {CANN}, got CANN {release}"
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
