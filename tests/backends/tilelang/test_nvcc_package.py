"""The extra `cuda` brings an nvcc, with which a machine that has no CUDA toolkit compiles the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("tilelang")

COMPILE = """
import tilelang.env
from kda.backends.tilelang import build, detect
assert detect.missing_compilers(nvcc=True) is None
build.build("sm_90a", "kda.backends.tilelang.kernels.plan.plan", HV=2, V=64, dtype="bfloat16", cu_dtype="int32")
print(tilelang.env.CUDA_HOME)
"""


def extra(distribution: str, name: str) -> list[Requirement]:
    """What an extra of an installed distribution adds."""
    found = [Requirement(text) for text in requires(distribution) or ()]
    return [
        r for r in found if r.marker and r.marker.evaluate({"extra": name}) and not r.marker.evaluate({"extra": ""})
    ]


def test_the_extra_asks_tilelang_for_it() -> None:
    asked = {(r.name, *r.extras) for r in extra("kda-ops", "cuda")}
    assert asked == {("kda-ops", "tilelang"), ("tilelang", "nvcc")}
    assert "nvidia-cuda-nvcc" in {r.name for r in extra("tilelang", "nvcc")}


@pytest.mark.slow
def test_a_machine_without_a_toolkit_compiles(tmp_path: Path) -> None:
    packages, cache = tmp_path / "packages", tmp_path / "cache"
    wanted = [f"{r.name}{r.specifier}" for r in extra("tilelang", "nvcc") if r.name != "torch"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(packages), *wanted], check=True)
    path = [folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "nvcc").exists()]
    environment = {name: x for name, x in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")}
    environment |= {"PATH": os.pathsep.join(path), "TILELANG_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join([str(packages), *sys.path])
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.splitlines()[-1]).is_relative_to(packages)
