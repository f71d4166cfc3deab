"""The pages tell the truth: their Python runs, their commands parse, their links lead somewhere."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kda
from kda import backends, golden
from kda.backends import environment
from kda.bench.cases import CASES as BENCH_CASES
from kda.cli import COMMANDS
from kda.gates.command import CASES as GATES
from kda.nn import KimiDeltaAttention

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(ROOT.glob("docs/*.md"))]
TEXT = {page.name: page.read_text(encoding="utf-8") for page in PAGES}

PYTHON = {name: re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for name, text in TEXT.items()}
COMMAND_LINES = [
    (name, words)
    for name, text in TEXT.items()
    for words in re.findall(r"(?:^|`|=\w+ )python -m kda ([a-z][^`#\n]*)", text, re.MULTILINE)
]
SHORT_PATHS = {"golden.md": "golden", "performance.md": "backends/tilelang/kernels"}
"""Pages that name the files of one folder without it."""


def plain_names(text: str) -> set[str]:
    """What stands between backticks by itself, `name` or `name=value`."""
    return set(re.findall(r"`(\w+)(?:=\w+)?`", text))


@pytest.mark.parametrize("name", [name for name, blocks in PYTHON.items() if blocks])
@pytest.mark.usefixtures("one_thread")
def test_a_pages_python_runs_in_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_BACKEND", raising=False)
    torch.manual_seed(0)
    known, names = backends.names(), dict[str, Any]()
    for number, block in enumerate(PYTHON[name], 1):
        exec(compile(block, f"{name}, Python block {number}", "exec"), names)
        if name == "README.md" and "chunk_kda(" in block:
            assert names["o"].isfinite().all() and names["o"].shape == names["v"].shape, f"block {number}"
    assert backends.names() == known, "a page takes away again what it registers"


def test_which_pages_have_python() -> None:
    """README's first calls, the proofs, the ladder and the layer: none of them may lose its program unnoticed."""
    counts = {name: len(blocks) for name, blocks in PYTHON.items() if blocks}
    assert (
        set(counts) == {"README.md", "fla.md", "golden.md", "known_limits.md", "ladder.md", "layer.md", "training.md"}
        and counts["README.md"] >= 5
    )


@pytest.mark.parametrize("name", TEXT)
def test_links_and_files_exist(name: str) -> None:
    page, text = next(page for page in PAGES if page.name == name), TEXT[name]
    missing = [link for link in re.findall(r"\]\(([^)#]+)", text)
               if not link.startswith("http") and not (page.parent / link).exists()]  # fmt: skip
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    named = re.findall(rf"[`=\s]((?:{folders})/[\w/.]+)", text)
    missing += [file for file in named if not (ROOT / file.rstrip(".")).exists()]
    if folder := SHORT_PATHS.get(name):
        missing += [file for file in re.findall(r"`([\w/]+\.py)`", text)
                    if not (ROOT / folder / file).exists() and not (ROOT / file).exists()]  # fmt: skip
    assert not missing


@pytest.mark.parametrize("name", TEXT)
def test_pages_name_what_a_reader_can_call(name: str) -> None:
    private = re.findall(r"`(?:\w+\.)*(_[a-z]\w*)(?:\(\))?`", TEXT[name])
    assert set(private) <= {"_no_weight_decay"}, "names with a leading underscore, but for one that optimisers look for"


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_signatures_as_written(operator: Any) -> None:
    signature = inspect.signature(operator)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    plain = str(inspect.Signature(parameters))
    flat = re.sub(r"\s+", " ", TEXT["abi.md"])
    assert f"kda.{operator.__name__}{plain} -> (o, final_state)" in flat


def test_the_interface_names_every_argument_backend_and_variable() -> None:
    named = plain_names(TEXT["abi.md"])
    assert set(inspect.signature(kda.fused_recurrent_kda).parameters) <= named
    assert {*backends.names(), "auto"} <= named
    read = set(environment.VARIABLES)
    for folder in ("kda", "backends"):
        for file in (ROOT / folder).rglob("*.py"):
            read |= set(re.findall(r"\"(KDA_[A-Z]+)\"", file.read_text(encoding="utf-8")))
    assert {"KDA_BACKEND", "KDA_CHECK"} <= read <= named


def test_the_layers_page_names_every_argument_and_parameter() -> None:
    layer = KimiDeltaAttention(8, 1, 4)
    arguments = set(inspect.signature(KimiDeltaAttention).parameters) | set(inspect.signature(layer.forward).parameters)
    assert arguments - {"x", "cache"} <= plain_names(TEXT["layer.md"])
    table = {name: x.shape for name, x in layer.state_dict().items()}
    assert {name for name in table if f"`{name}`" in TEXT["layer.md"]} == set(table)


def test_the_goldens_page_names_every_tensor_and_what_a_backend_has() -> None:
    text = TEXT["golden.md"]
    assert {name for names in golden.STAGES.values() for name in names} <= plain_names(text)
    protocol = {name for name in (*backends.Backend.__annotations__, *vars(backends.Backend)) if name[0] != "_"}
    assert {"about", "takes", "refuses", "stages"} <= protocol
    assert all(re.search(rf"`{name}[`(]", text) for name in protocol)


def test_commands_parse() -> None:
    assert {words.split()[0] for _, words in COMMAND_LINES} == set(COMMANDS)
    for name, words in COMMAND_LINES:
        command, *options = words.replace(";", " ").split()
        parser = argparse.ArgumentParser(f"{name}: kda {command}", exit_on_error=False)
        importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
        if "..." in options:
            continue
        arguments = parser.parse_args(options)
        known = {"gate": GATES, "bench": BENCH_CASES}.get(command, {})
        assert set(getattr(arguments, "cases", None) or ()) <= set(known), (name, words)


def test_pytest_is_given_paths_that_exist() -> None:
    lines = [line for text in TEXT.values() for line in re.findall(r"python -m pytest ([^`#\n]*)", text)]
    paths = [word for line in lines for word in line.split() if word.startswith("tests")]
    assert paths and all((ROOT / path.partition("::")[0]).exists() for path in paths)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test", "check", "gate", "clean"} <= targets
    named = {target for text in TEXT.values() for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)}
    assert {"demo", "test", "check", "gate"} <= named <= targets


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "make test" in script.read_text(encoding="utf-8")
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
