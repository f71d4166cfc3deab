"""Building ahead: which kernels a call needs, and many of them built side by side.

TileLang compiles one kernel at a time in a process, so each worker is a process of its own. It leaves its kernels on
disk (`kept`), from where later calls load them.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kda.backends import environment
from kda.backends.call import KdaCall

from . import backward, chunk, recurrent
from .build import Spec, build, collecting
from .host import differentiated_in_bf16
from .kept import make_writable

_SERVE = f"from {__name__} import serve; serve()"
_ROOT = Path(__file__).parents[3]  # where the package lies


class Failure(NamedTuple):
    """A kernel that could not be built, and why."""

    spec: Spec
    reason: str


def wanted(call: KdaCall) -> list[Spec]:
    """The kernels that the call needs, in the order in which it asks for them; none is built and none runs.

    Those of its gradients are among them where autograd would record it. Its tensors may be fake ones.
    """
    if call.B * call.T == 0:
        return []
    call = replace(call, memo={})  # one that is thrown away: it would remember kernels that do nothing
    with collecting() as specs:
        if call.op == "chunk_kda" and call.recorded:
            _make_launches(call)
        elif call.op == "chunk_kda":
            chunk.make_launch(call)
        else:
            recurrent.make_launch(call, gaps=call.initial_state is not None and _has_gaps(call.initial_state))
    return list(dict.fromkeys(specs))


def build_all(specs: Iterable[Spec], workers: int | None = None) -> list[Failure]:
    """Build the kernels that are not on disk yet in so many processes, by default one for each CPU of this process.

    Returns those that could not be built. No GPU is used.
    """
    return _begin(specs, workers or _cpus())()


def build_ahead(calls: Iterable[KdaCall], workers: int | None = None) -> Callable[[], list[Failure]]:
    """Begin to build the kernels of calls to come, and leave one CPU to this process.

    The function that is returned waits for the end, as `build_all` does. Whatever is not built when this process ends
    is left.
    """
    return _begin((spec for call in calls for spec in wanted(call)), workers or max(_cpus() - 1, 1))


def serve() -> None:
    """A worker: builds what is asked for on stdin, a line each, and answers on stdout with what went wrong, or null."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TileLang and nvcc print is no answer
    for line in sys.stdin:
        target, builder, parameters = json.loads(line)
        try:
            build(target, builder, **dict(parameters))
            reason = None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        print(json.dumps(reason), file=answers, flush=True)


def _make_launches(call: KdaCall) -> None:
    """Of the call and its gradients. autograd hands out a gradient of every output; which are wanted is known."""
    low = differentiated_in_bf16(call)
    chunk.make_launch(call, with_ainv=environment.keeping_table() and not low)
    if low:  # of q, only shape, dtype and device count
        call = replace(call, q=call.q.new_empty((), dtype=torch.bfloat16).expand(call.q.shape))
    initial = call.initial_state is not None and call.initial_state.requires_grad
    backward.make_launch(call, has_d_final_state=call.output_final_state, has_d_initial_state=initial)


def _has_gaps(state: Tensor) -> bool:
    if isinstance(state, FakeTensor):  # it has no address, but its memory would begin at a good one
        memory = torch.empty(state.untyped_storage().nbytes(), dtype=torch.uint8, device="meta").view(state.dtype)
        state = memory.as_strided(state.shape, state.stride(), state.storage_offset())
    return recurrent.quads_of(state) is None


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _begin(specs: Iterable[Spec], workers: int) -> Callable[[], list[Failure]]:
    make_writable()
    pending = deque(spec for spec in dict.fromkeys(specs) if not spec.kept().exists())
    failures: list[Failure] = []
    processes: list[subprocess.Popen[str]] = []
    arguments = (pending, failures, processes)
    threads = [threading.Thread(target=_work, args=arguments, daemon=True) for _ in range(min(len(pending), workers))]
    for thread in threads:
        thread.start()
    atexit.register(_end, pending, processes, os.getpid())

    def wait() -> list[Failure]:
        for thread in threads:
            thread.join()
        return failures + [Failure(spec, "no worker could be started") for spec in pending]

    return wait


def _end(pending: deque[Spec], processes: list[subprocess.Popen[str]], owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that it has forked
        pending.clear()
        for process in processes:
            process.kill()
            process.wait()


def _work(pending: deque[Spec], failures: list[Failure], processes: list[subprocess.Popen[str]]) -> None:
    """Build what is pending, in one process after another if they die."""
    while pending:
        with tempfile.TemporaryFile() as log, _start(log) as process:
            processes.append(process)
            while process.poll() is None and (spec := _next(pending)) is not None:
                if reason := _ask(process, spec, log):
                    failures.append(Failure(spec, reason))


def _start(log: IO[bytes]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment
    )


def _next(pending: deque[Spec]) -> Spec | None:
    try:
        return pending.popleft()
    except IndexError:
        return None


def _ask(process: subprocess.Popen[str], spec: Spec, log: IO[bytes]) -> str | None:
    """What went wrong in building `spec`, or None."""
    assert process.stdin is not None and process.stdout is not None
    try:
        print(json.dumps(spec), file=process.stdin, flush=True)
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if answer:
        return json.loads(answer)
    code = process.wait()
    log.seek(0)
    return f"its process ended with exit code {code}: {log.read()[-500:].decode(errors='replace')}"
