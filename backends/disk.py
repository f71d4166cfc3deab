"""Files that a backend builds once and keeps on disk: whole or not there, and built by one at a time.

A kept file ends with the SHA-256 of all that stands before it, so that one which was cut short or written over is seen
before it is loaded: a broken shared library may end the process. Loaders of shared libraries do not look that far.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

_DIGEST = hashlib.sha256().digest_size

_substitutes: dict[Path, Path] = {}
_substituting = threading.Lock()


class Cache(NamedTuple):
    """Where a backend keeps what it has built, and how much that is."""

    folder: Path
    variable: str  # of the environment: it moves the folder
    files: int
    size: int  # of these files, in bytes


def root(variable: str, default: str) -> Path:
    """The folder that the environment's `variable` names, or else the default; it starts with ~ if there is no home."""
    path = os.path.expanduser(os.environ.get(variable) or default)
    return Path(path if path.startswith("~") else os.path.abspath(path))


def measured(folder: Path, variable: str, pattern: str = "*.so") -> Cache:
    """The cache whose files in `folder` match the pattern; one that is not there yet is empty."""
    sizes = []
    for file in folder.glob(pattern):
        with contextlib.suppress(OSError):  # somebody may be clearing it
            sizes.append(file.stat().st_size)
    return Cache(folder, variable, len(sizes), sum(sizes))


def whole(path: Path) -> bool:
    """Is the file there, and as `keep` left it?"""
    try:
        content = memoryview(path.read_bytes())
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def keep(path: Path, content: bytes) -> None:
    """Keep a file with this content and its digest. Raises OSError where it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        with unfinished.open("wb") as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)  # at once and after the data, so that no process ever sees half a file
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside there is no other thread or process that locks the same path; one that dies gives its lock back.

    Where files cannot be locked nobody waits, and what is kept may be built more than once.
    """
    lock = path.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(_locked_file(lock))
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a process forked meanwhile has the file open as well
            stack.callback(lock.unlink, missing_ok=True)
        yield


def _locked_file(path: Path) -> IO[bytes]:
    while True:
        file = path.open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()  # whoever had the lock has removed the file


def writable(folder: Path, variable: str) -> Path:
    """`folder`; where it cannot be written a temporary one, with one warning, until this process ends.

    `variable` of the environment is the one that moves the folder. Raises RuntimeError where nothing can be written.
    """
    try:
        if not folder.is_absolute():
            raise FileNotFoundError("there is no home directory")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        return _substitute(folder, variable, f"{folder} cannot be written ({type(error).__name__}: {error})")


@functools.cache
def scratch() -> Path:
    """A temporary folder for the life of this process. Raises OSError where there can be none."""
    folder = Path(tempfile.mkdtemp(prefix="kda-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that it has forked
        shutil.rmtree(folder, ignore_errors=True)


def _substitute(folder: Path, variable: str, reason: str) -> Path:
    with _substituting:
        if folder not in _substitutes:
            try:
                substitute = Path(tempfile.mkdtemp(dir=scratch()))
            except OSError as error:
                raise RuntimeError(
                    f"{reason}, and no temporary folder either ({error}): let {variable} or TMPDIR name one that can"
                ) from error
            _substitutes[folder] = substitute
            warnings.warn(
                f"kda: {reason}; what is compiled stays in {substitute} until this process ends. "
                f"Let {variable} name a folder that can be written",
                RuntimeWarning,
                stacklevel=4,
            )
        return _substitutes[folder]
