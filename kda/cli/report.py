"""The JSON report of a command: the file holds what there is so far, and never half of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_report(path: Path, report: dict[str, Any], *, complete: bool = True) -> None:
    """Write the report, and whether it is complete, into a file beside `path` that then takes its name.

    A pipe, a device or a link cannot be replaced: it is written to itself, once, when the report is complete.
    """
    text = json.dumps({"complete": complete, **report}, indent=1) + "\n"
    if not is_plain(path):
        if complete:
            path.write_text(text)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def is_plain(path: Path) -> bool:
    """Is there a regular file, or nothing yet?"""
    return not path.is_symlink() and (path.is_file() or not path.exists())
