"""What several test files share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kda import backends
from kda.backends import environment

pytest.register_assert_rewrite(
    "calls", "decode_calls", "fake_backends", "golden_calls", "process_modes", "pypto_process", "torch_calls"
)


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes run the tests side by side (`-n`), they and their children share the processors."""
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        threads = max(1, len(os.sched_getaffinity(0)) // int(workers))
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests whose tensors are small: on a busy machine, threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the package's variables is set."""
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def register() -> Iterator[Callable[..., Any]]:
    """`backends.register` until the test ends; it returns the backend."""
    names: list[str] = []

    def until_the_end(name: str, backend: Any, **options: str) -> Any:
        backends.register(name, backend, **options)
        names.append(name)
        return backend

    yield until_the_end
    for name in names:
        with contextlib.suppress(KeyError):  # a test may have done it
            backends.unregister(name)
