"""One program for all kernels of a process: one that fails leaves no trace, and a forked process is told at once."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from pypto_process import in_its_own_process
from torch import Tensor

import kda
from kda.backends import disk
from kda.golden import inputs


def results() -> list[Tensor]:
    """Of two small calls, one of each kernel."""
    call = inputs.stable(2, 3, 1, 64, initial_state=True)
    return [*kda.chunk_kda(**call, backend="pypto"), *kda.fused_recurrent_kda(**call, backend="pypto")]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(x, y) and bool(x.any()) for x, y in zip(left, right, strict=True))


def fail_while_traced() -> None:
    """The body of a kernel raises halfway."""
    from kda.backends.pypto.kernels import chunk

    def store_state(*_: object) -> None:
        raise ValueError("out of luck")

    with patch.object(chunk, "store_state", store_state):
        kda.chunk_kda(**inputs.stable(1, 3, 1, 64), backend="pypto")


def fail_while_interpreted() -> None:
    """The kernel is traced, and then writes outside of its states."""
    from kda.backends.pypto import recurrent

    def run(body: object, tensors: list[Tensor], outputs: list[Tensor], config: object) -> None:
        *rest, target = tensors
        launch(body, [*rest, target + 100], outputs, config)

    launch = recurrent.run
    with patch.object(recurrent, "run", run):
        kda.fused_recurrent_kda(**inputs.stable(2, 3, 1, 64, initial_state=True), backend="pypto")


def fail_while_compiled() -> None:
    """PyPTO's compiler, which has a thread of its own, gives up on a kernel for an NPU."""
    import pypto

    from kda.backends.pypto import build, chunk
    from kda.backends.pypto.kernels import activation
    from kda.backends.pypto.program import tracing

    def run(body: object, tensors: list[Tensor], outputs: list[Tensor], config: object) -> None:
        options = build.npu_options(config) | {"runtime_options": {"run_mode": pypto.RunMode.SIM}}
        with tracing("chunk_kda"):
            pypto.frontend.jit(**options)(body)(*tensors, *outputs, config)

    os.environ["TILE_FWK_OUTPUT_DIR"] = str(disk.scratch())
    too_large = patch.object(activation, "use_tiles", lambda: pypto.set_vec_tile_shapes(1024, 128))
    with too_large, patch.object(chunk, "run", run):
        kda.chunk_kda(**inputs.stable(1, 3, 1, 64), backend="pypto")


@pytest.mark.parametrize("failure", ["fail_while_traced", "fail_while_interpreted", "fail_while_compiled"])
@in_its_own_process
def test_after_a_failed_call_others_are_right(failure: str) -> None:
    said = {"fail_while_traced": "out of luck", "fail_while_interpreted": "out of bounds", "fail_while_compiled": ""}
    before = results()
    for _ in range(2):  # and a second failure says what the first one said
        with pytest.raises(RuntimeError, match=f"PyPTO failed in kernel (?s:.*){said[failure]}"):
            globals()[failure]()
        for _ in range(2):
            assert same(results(), before)


@in_its_own_process
def test_a_failure_that_cannot_be_undone_is_told_then_and_later() -> None:
    from kda.backends.pypto import program

    with patch.object(program, "_throw_away", side_effect=AttributeError("ClearStashFuncQueue")):
        for call in (fail_while_traced, results):
            with pytest.raises(
                RuntimeError, match="chunk_kda and cannot recover in this process, start another: Clear"
            ):
                call()


def in_a_fork() -> str:
    """What the results are in a process that is forked now, if it comes to any: `same`, `other`, or an error."""
    disk.scratch()  # this process removes it; a child that ends like this would leave its own
    readable, writable = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(60)
        try:
            text = "same" if same(results(), results()) else "other"
        except RuntimeError as error:
            text = str(error)
        os.write(writable, text.encode())
        os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    return os.read(readable, 10_000).decode()


@in_its_own_process
def test_a_forked_process_works_or_says_at_once_that_it_cannot() -> None:
    torch.set_num_threads(1)
    assert in_a_fork() == "same"
    before = results()
    expected = f"PyPTO has run kernels in process {os.getpid()} before this one was forked from it"
    assert in_a_fork().startswith(expected)

    from kda.backends.pypto import program

    with program._lock:  # another thread is at it
        assert in_a_fork().startswith(expected)
    assert same(results(), before)


@in_its_own_process
def test_threads_take_turns() -> None:
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda _: results(), range(4))
    assert all(same(first, other) for other in others) and same(first, results())
    assert threading.active_count() == 1
