"""The JSON report is whole at any time, and what cannot be replaced is written once."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from kda.cli.report import is_plain, write_report


def test_a_report_grows_and_is_never_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    write_report(file, {"cases": [1]}, complete=False)
    assert json.loads(file.read_text()) == {"complete": False, "cases": [1]}
    real = Path.write_text

    def interrupted(path: Path, text: str) -> None:
        real(path, text[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(file, {"cases": [1, 2]})
    monkeypatch.undo()
    assert json.loads(file.read_text())["cases"] == [1] and os.listdir(tmp_path) == ["x.json"]
    write_report(file, {"cases": [1, 2]})
    assert json.loads(file.read_text()) == {"complete": True, "cases": [1, 2]}
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_link_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    assert is_plain(target) and not is_plain(link) and not is_plain(Path(os.devnull))
    write_report(link, {"n": 1}, complete=False)
    assert not target.exists()
    write_report(link, {"n": 1})
    assert link.is_symlink() and json.loads(target.read_text())["n"] == 1
    write_report(Path(os.devnull), {"n": 1})
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
