"""Who may import whom: the golden stands alone, a backend knows no other, and `import kda` stays light."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"kda": ROOT / "kda", "kda.backends": ROOT / "backends", "kda.golden": ROOT / "golden"}
REGISTRY = ("kda.backends", "kda.backends.call", "kda.backends.environment")
SHARED = ("kda.golden.constants", *(f"kda.backends.{name}" for name in ("call", "disk", "environment", "pool")))
LADDER = "kda.ladder.kernels"
FRAMEWORKS = ("tilelang", "tvm", "pypto", "torch_npu")


def modules() -> dict[str, Path]:
    """Import name -> file of everything in the package."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = file
    return found


MODULES = modules()


def imported(module: str, source: str, *, is_package: bool) -> set[str]:
    """Full names of what a module imports, anywhere in it: `from a import b` counts as a.b where that is a module."""
    found = set()
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
    return found


def imports_of(module: str) -> set[str]:
    file = MODULES[module]
    return imported(module, file.read_text(encoding="utf-8"), is_package=file.name == "__init__.py")


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_the_reader_of_imports() -> None:
    source = "import os.path\nfrom . import call\nfrom ..golden import constants\ndef f():\n    from .torch import run"
    names = {"os.path", "kda.backends.call", "kda.golden.constants", "kda.backends.torch"}
    assert imported("kda.backends", source, is_package=True) == names
    assert {"kda.checks", "kda.backends.call", "kda.golden", "kda.backends.torch"} <= set(MODULES)
    assert "kda.backends.call" in imports_of("kda.checks")


@pytest.mark.parametrize("module", [name for name in MODULES if inside(name, "kda.golden")])
def test_golden_imports_torch_alone(module: str) -> None:
    for name in imports_of(module):
        assert inside(name, "torch", "kda.golden") or name.split(".")[0] in sys.stdlib_module_names, name


@pytest.mark.parametrize("module", [name for name in MODULES if inside(name, "kda.backends")])
def test_backends_know_no_other_backend_and_no_front_end(module: str) -> None:
    own = ".".join(module.split(".")[:3])  # kda.backends.<name>
    for name in imports_of(module):
        if inside(name, "kda"):
            allowed = (*SHARED, own)
            assert inside(name, *allowed) and name != "kda.backends", f"{module} imports {name}"


@pytest.mark.parametrize("module", [name for name in MODULES if not inside(name, "kda.backends", "kda.golden", LADDER)])
def test_the_front_end_reaches_backends_through_the_registry(module: str) -> None:
    for name in imports_of(module):
        assert not inside(name, "kda.backends") or name in REGISTRY, name
        assert not inside(name, *FRAMEWORKS), f"{module} imports {name}"


@pytest.mark.parametrize("module", [name for name in MODULES if inside(name, LADDER)])
def test_the_ladders_kernels_know_how_tilelang_builds_and_no_more(module: str) -> None:
    """What the backend's kernels are made of they may use too: its stages, not its hosts."""
    parts = ("kda.golden.constants", *(f"kda.backends.tilelang.{name}" for name in ("build", "host", "kernels")))
    for name in imports_of(module):
        assert not inside(name, "kda") or inside(name, *parts, LADDER), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_a_command_line(module: str) -> None:
    assert not imports_of(module) & {"kda.__main__", "kda.golden.__main__"}


def test_import_kda_is_light() -> None:
    code = "import torch, sys; before = set(sys.modules); import kda; kda.backends.status()"
    code += "; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"kda.ops", "kda.checks", "kda.backends.torch"} <= loaded
    assert not {name.split(".")[0] for name in loaded} & {"rich", "matplotlib", "numpy", *FRAMEWORKS}
    assert not [name for name in loaded if inside(name, "kda.gates", "kda.nn", "kda.cli", "kda.__main__")]
