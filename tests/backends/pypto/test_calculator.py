"""PyPTO's calculator: what building it takes, and what a build that fails says."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version

import pytest
import torch

import kda
from kda.backends.pypto import calculator, detect
from kda.golden import inputs


@pytest.mark.usefixtures("undetected")
@pytest.mark.parametrize("tool, named", [("cmake", "cmake .`pip install cmake`."), ("c++", "a C[+][+] compiler")])
def test_without_the_tools_to_build_the_interpreter_it_says_so(monkeypatch, tmp_path, tool, named):
    pytest.importorskip("pypto", reason="its version names the cache")
    absent = {"cmake"} if tool == "cmake" else {"c++", "g++"}
    monkeypatch.setenv("KDA_EMULATE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name in absent else f"/usr/bin/{name}")
    with pytest.raises(NotImplementedError, match=f"has to be built once, and PATH lacks {named}$"):
        kda.chunk_kda(**inputs.stable(1, 10, 1), backend="pypto")
    pair = f"pypto-{version('pypto')}-torch-{torch.__version__}"
    library = tmp_path / "kda-ops" / pair / calculator.LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
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
