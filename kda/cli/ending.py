"""How a command ends: its exit code, and one line on stderr where the user or the machine ends it early.

A bug is left alone: an exception that no user and no machine can cause keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import torch

from kda.cli.options import UsageError, first_line

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come; a command winds up as after Ctrl-C."""


def exit_code(name: str, work: Callable[[], int]) -> int:
    """What `work` returns; 2 if it could not be done as asked for, 128 + the signal's number if a signal ended it.

    A reader of stdout that has gone counts as SIGPIPE, and says nothing.
    """
    try:
        with _terminable():
            try:
                return work()
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # here and not at Python's own end, where nobody could catch what it raises
    except UsageError as error:
        return _ended(f"{name}: error: {error}", 2)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _ended(f"{name}: error: {first_line(error) or 'out of memory'}", 2)
    except Terminated:
        return _ended(f"{name}: terminated", 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        return _ended(f"{name}: interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:
        _forget(1)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _forget(1)
        return _ended(f"{name}: error: cannot write: {error.strerror}", 2)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated`, unless who started the process has it ignored."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ended(message: str, code: int) -> int:
    """Say it, if anybody still reads stderr, and return the code."""
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        _forget(2)
    return code


def _forget(descriptor: int) -> None:
    """Send what is still to be written nowhere, so that Python does not stumble over it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
