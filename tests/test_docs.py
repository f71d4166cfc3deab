"""The pages tell the truth: the README's Python runs, links lead somewhere, and no argument goes unnamed."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from pathlib import Path

import pytest

import kda
from kda.gates import command

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
NAMES = [page.name for page in PAGES]


def test_the_readmes_python_runs_in_order() -> None:
    found = re.findall(r"^```python\n(.*?)^```", TEXT[ROOT / "README.md"], re.DOTALL | re.MULTILINE)
    assert len(found) >= 4
    names: dict[str, object] = {}
    for number, block in enumerate(found, 1):
        exec(compile(block, f"README.md, Python block {number}", "exec"), names)
        assert names["o"].isfinite().all() and names["o"].shape == names["v"].shape, f"block {number}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_files_exist(page: Path) -> None:
    text = TEXT[page]
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    files = re.findall(r"`((?:tests|docs|kda|golden|backends)/[\w/.]+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [file for file in files if not (ROOT / file).exists()]
    assert not missing


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_signatures_as_written(operator) -> None:
    signature = inspect.signature(operator)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    plain = str(inspect.Signature(parameters))
    flat = re.sub(r"\s+", " ", TEXT[ROOT / "docs" / "abi.md"])
    assert f"kda.{operator.__name__}{plain} -> (o, final_state)" in flat


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "abi.md"], ids=["README.md", "abi.md"])
def test_every_argument_is_named(page: Path) -> None:
    named = set(re.findall(r"`(\w+)(?:=\w+)?`", TEXT[page]))
    assert set(inspect.signature(kda.fused_recurrent_kda).parameters) <= named


def test_backends_and_variables_are_named() -> None:
    text = TEXT[ROOT / "docs" / "abi.md"]
    read = set()
    for folder in ("kda", "backends"):
        for file in (ROOT / folder).rglob("*.py"):
            read |= set(re.findall(r"\"(KDA_[A-Z]+)\"", file.read_text(encoding="utf-8")))
    assert {"KDA_BACKEND", "KDA_CHECK"} <= read
    assert all(f"`{name}`" in text for name in (*read, *kda.backends.NAMES))


def test_gate_commands_parse() -> None:
    lines = re.findall(r"^python -m kda gate(.*)$", TEXT[ROOT / "README.md"], re.MULTILINE)
    assert len(lines) >= 4
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for line in lines:
        arguments = parser.parse_args(line.split("#")[0].split())
        assert set(arguments.cases or ()) <= set(command.CASES)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", TEXT[ROOT / "README.md"], re.MULTILINE)) <= targets
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
