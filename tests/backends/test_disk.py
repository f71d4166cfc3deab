"""Files that are built once: seen to be whole, built by one at a time, and kept where they can be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from kda.backends import disk

UNWRITABLE = Path("/dev/null/cache")
"""Even root cannot make it."""


def run(code: str, *arguments: object, **variables: str) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


# ---- whole


def test_a_file_is_whole_as_it_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "library.so"
    assert not disk.whole(path)
    for content in (b"", b"one", bytes(100_000)):
        disk.keep(path, content)
        assert disk.whole(path) and path.read_bytes().startswith(content)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "broken", [b"", b"\x7fELF", b"a library"[:5], b"a library", b"a librarz" + bytes(32)], ids=lambda b: repr(b[:12])
)
def test_a_file_that_was_cut_short_or_written_over_is_not(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(broken)
    assert not disk.whole(path)


def test_every_byte_counts(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    disk.keep(path, b"a library")
    content = path.read_bytes()
    for i in range(len(content)):
        path.write_bytes(content[:i])
        assert not disk.whole(path)
        path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        assert not disk.whole(path)


def test_what_cannot_be_kept_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "library.so").mkdir()
    with pytest.raises(OSError):
        disk.keep(tmp_path / "library.so", b"a library")
    assert [path.name for path in tmp_path.iterdir()] == ["library.so"]


# ---- locked


def test_one_thread_at_a_time(tmp_path: Path) -> None:
    inside, most = [], []

    def work() -> None:
        with disk.locked(tmp_path / "new" / "library.so"):
            inside.append(1)
            time.sleep(0.01)
            most.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == [1] * 8
    assert not list(tmp_path.rglob("*.lock"))


HOLDS = """
import sys, time
from pathlib import Path
from kda.backends import disk
with disk.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(100)
"""


def test_a_process_waits_for_another_but_not_for_a_dead_one(tmp_path: Path) -> None:
    path, entered = tmp_path / "library.so", threading.Event()

    def wait() -> None:
        with disk.locked(path):
            entered.set()

    with subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not entered.wait(0.3)
        holder.send_signal(signal.SIGKILL)
        assert entered.wait(10)
        waiting.join()


def test_where_nothing_can_be_locked_nobody_waits() -> None:
    with disk.locked(UNWRITABLE / "library.so"):
        pass


# ---- where


def test_the_folder_is_the_variables_or_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for value, expected in (("", tmp_path / "x"), ("/a", Path("/a")), ("b", tmp_path / "b"), ("~/c", tmp_path / "c")):
        monkeypatch.setenv("SOME_CACHE", value)
        assert disk.root("SOME_CACHE", "~/x") == expected
    monkeypatch.delenv("SOME_CACHE")
    assert disk.root("SOME_CACHE", "~/x") == tmp_path / "x"


def test_a_cache_is_measured(tmp_path: Path) -> None:
    assert disk.measured(tmp_path / "none", "SOME_CACHE") == (tmp_path / "none", "SOME_CACHE", 0, 0)
    for name, size in (("a.so", 10), ("b.so", 5), ("b.lock", 7)):
        (tmp_path / name).write_bytes(bytes(size))
    assert disk.measured(tmp_path, "SOME_CACHE") == (tmp_path, "SOME_CACHE", 2, 15)


def test_a_folder_that_can_be_written_is_taken_as_it_is(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert disk.writable(tmp_path / "new" / "one", "SOME_CACHE") == tmp_path / "new" / "one"
    assert not list((tmp_path / "new" / "one").iterdir())


SUBSTITUTE = """
import os, sys, warnings
from pathlib import Path
from kda.backends import disk
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    folder = disk.writable(Path(sys.argv[1]), "SOME_CACHE")
    assert disk.writable(Path(sys.argv[1]), "SOME_CACHE") == folder
    assert disk.writable(Path(sys.argv[1], "other"), "SOME_CACHE") != folder
disk.keep(folder / "library.so", b"a library")
first, second = (str(w.message) for w in caught)
assert sys.argv[1] in first and "SOME_CACHE" in first and str(folder) in first, first
if (child := os.fork()) == 0:
    sys.exit()  # the folder is not the child's to remove
os.waitpid(child, 0)
assert disk.whole(folder / "library.so")
print(folder)
"""


@pytest.mark.parametrize("folder", [UNWRITABLE, "/proc/nope", "~/without/a/home"])
def test_elsewhere_a_temporary_folder_takes_its_place_with_one_warning(folder: object) -> None:
    assert not Path(run(SUBSTITUTE, folder)).exists(), "it goes with its process"


NOWHERE = """
import sys, tempfile
from pathlib import Path
from kda.backends import disk
tempfile.tempdir = sys.argv[1]
try:
    disk.writable(Path(sys.argv[1]), "SOME_CACHE")
except RuntimeError as error:
    print(error)
"""


def test_where_nothing_at_all_can_be_written_the_error_names_both_variables() -> None:
    text = run(NOWHERE, UNWRITABLE)
    assert str(UNWRITABLE) in text and "let SOME_CACHE or TMPDIR name one that can" in text
