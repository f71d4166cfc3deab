"""Fresh environments of Python for the packaging tests, made within a second: their dependencies are links to ours."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement


def run(*command: object, cwd: Path) -> str:
    """The command's output, where nothing but its folder leads to a package."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def new_environment(folder: Path, *dependencies: str) -> Path:
    """The interpreter of an environment in which these distributions, and what they need, are all there is."""
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    for distribution in _with_what_they_need(dependencies):
        for name in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            link = site / name
            if not link.exists():
                link.symlink_to(distribution.locate_file(name))
    return folder / "venv" / "bin" / "python"


def pip_install(python: Path, *arguments: object, cwd: Path) -> None:
    """Install into an environment that has no pip of its own, and nothing beyond what is named."""
    command = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    run(*command, *arguments, cwd=cwd)


def _with_what_they_need(names: tuple[str, ...]) -> list[importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        requirements = (Requirement(text) for text in found[name].requires or ())
        wanted += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return list(found.values())
