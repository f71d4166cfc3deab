"""PyPTO's calculator: what building it takes, and what a build that fails says."""

from __future__ import annotations

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kda
from kda.backends import disk
from kda.backends.pypto import calculator, detect
from kda.golden import inputs


def calculator_in(cache: Path) -> Path:
    versions = f"pypto-{version('pypto')}-torch-{torch.__version__}-{platform.machine()}"
    return cache / "kda-ops" / versions / calculator.LIBRARY


@pytest.mark.usefixtures("undetected")
@pytest.mark.parametrize(
    "tool, named", [("cmake", "cmake .`pip install cmake`."), ("make", "make"), ("c++", "a C[+][+] compiler")]
)
def test_without_the_tools_to_build_the_interpreter_it_says_so(monkeypatch, tmp_path, tool, named):
    pytest.importorskip("pypto", reason="its version names the cache")
    absent = {"cmake": {"cmake"}, "make": {"make", "gmake"}, "c++": {"c++", "g++", "clang++"}}[tool]
    monkeypatch.setenv("KDA_EMULATE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name in absent else f"/usr/bin/{name}")
    with pytest.raises(NotImplementedError, match=f"has to be built once, and PATH lacks {named}$"):
        kda.chunk_kda(**inputs.stable(1, 10, 1), backend="pypto")
    library = calculator_in(tmp_path)
    library.parent.mkdir(parents=True)
    library.touch()
    assert calculator.missing_tools() is not None, "what is broken has to be built again"
    disk.keep(library, b"a library")
    assert calculator.missing_tools() is None, "what is built needs no tools"


def test_a_build_that_fails_shows_the_compilers_words(monkeypatch, tmp_path):
    pytest.importorskip("pypto")
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    cmake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match=r"could not be built.*\n.*out of luck"):
        calculator.load.__wrapped__()  # without what functools.cache remembers of a calculator that is loaded
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.fixture
def built(monkeypatch, tmp_path) -> list[str]:
    """The libraries that are built and loaded instead of PyPTO's, in an empty cache."""
    pytest.importorskip("pypto")
    events: list[str] = []

    def build(library: Path) -> None:
        events.append("built")
        disk.keep(library, b"a library")

    def load(path: str, mode: int) -> None:
        assert disk.whole(Path(path))
        events.append("loaded")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calculator, "_build", build)
    monkeypatch.setattr(calculator.ctypes, "CDLL", load)
    monkeypatch.setattr("pypto._utils.BuildOnlineManager", SimpleNamespace)
    return events


def test_it_is_built_once_and_again_if_it_is_broken(built, tmp_path):
    for _ in range(2):
        calculator.load.__wrapped__()
    assert built == ["built", "loaded", "loaded"]
    assert calculator.cache() == (tmp_path / "kda-ops", "XDG_CACHE_HOME", 1, len(b"a library") + 32)
    library = calculator_in(tmp_path)
    library.write_bytes(library.read_bytes()[:5])
    calculator.load.__wrapped__()
    assert built[3:] == ["built", "loaded"]


def test_threads_build_it_once(built):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: calculator.load.__wrapped__(), range(8)))
    assert built.count("built") == 1 and built.count("loaded") == 8


def test_where_it_cannot_be_kept_it_is_built_into_a_temporary_folder(built, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/x")
    with pytest.warns(RuntimeWarning, match=r"/dev/null/x/kda-ops cannot be written .* Let XDG_CACHE_HOME name"):
        calculator.load.__wrapped__()
    assert built == ["built", "loaded"]
