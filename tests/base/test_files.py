"""Durable file operations, under races, full disks and hostile paths."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

import pytest

from holdfast.base import files
from holdfast.base.files import (
    create_exclusive,
    explain_os_error,
    make_dirs,
    read_regular,
    replace_atomic,
    write_durable,
)
from holdfast.errors import ControlError
from kit.harness import finish, job, python, wait_until

RACER = """
import sys, time
from pathlib import Path
from holdfast.base.files import create_exclusive, make_dirs

place, me, rounds, size = Path(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3]), int(sys.argv[4])
(place / f"ready-{sys.argv[2]}").touch()
deadline = time.monotonic() + 20
while not (place / "go").exists():
    assert time.monotonic() < deadline
wins = 0
for number in range(rounds):
    path = place / "a" / str(number) / "b" / "file"
    make_dirs(path.parent)
    wins += create_exclusive(path, me * size)
    seen = path.read_bytes()
    assert len(seen) == size and len(set(seen)) == 1, "a partial or mixed file was visible"
print(wins)
"""


def test_of_eight_racing_processes_exactly_one_creates_and_nobody_sees_a_partial_file(tmp_path: Path) -> None:
    script = tmp_path / "racer.py"
    script.write_text(RACER)
    rounds, size, names = 25, 50_000, "abcdefgh"
    place = tmp_path / "place"
    place.mkdir()
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(job(python(script, str(place), me, str(rounds), str(size)), cwd=tmp_path))
            for me in names
        ]
        wait_until(lambda: len(list(place.glob("ready-*"))) == len(names), 20, "every racer is ready")
        (place / "go").touch()
        results = [running.wait(30) for running in jobs]
    assert [result.code for result in results] == [0] * len(names), results
    assert sum(int(result.out) for result in results) == rounds
    assert not list(place.rglob("*.tmp"))


WRITER = """
import sys
from pathlib import Path
from holdfast.base.files import replace_atomic

path = Path(sys.argv[1])
for number in range(400):
    replace_atomic(path, str(number % 10).encode() * 30_000, durable=number % 4 == 0)
"""


def test_a_reader_of_a_file_that_is_being_replaced_sees_only_whole_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_atomic(path, b"0" * 30_000)
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    seen = set()
    with job(python(script, str(path)), cwd=tmp_path) as running:
        while running.process.poll() is None:
            data = path.read_bytes()
            assert len(data) == 30_000
            assert len(set(data)) == 1
            seen.add(data[:1])
        assert running.wait(20).code == 0
    assert len(seen) > 2, "the reader did not overlap the writer"
    assert not list(tmp_path.glob(".*.tmp"))


FULL = """
import os, resource, signal, sys
from pathlib import Path
from holdfast.base.files import create_exclusive, replace_atomic, write_durable

place = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for act in (create_exclusive, write_durable):
    try:
        act(place / "new", b"x" * 10_000)
    except OSError as error:
        print(act.__name__, error.errno)
try:
    replace_atomic(place / "old", b"x" * 10_000)
except OSError as error:
    print("replace_atomic", error.errno)
"""


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing_behind_and_loses_nothing(tmp_path: Path) -> None:
    """A write fails half way, as on a full disk (here by RLIMIT_FSIZE, so EFBIG stands for ENOSPC)."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "old").write_bytes(b"precious")
    script = tmp_path / "full.py"
    script.write_text(FULL)
    result = finish(python(script, str(place)), cwd=tmp_path)
    assert result.out.split("\n")[:-1] == [
        f"{name} {errno.EFBIG}" for name in ("create_exclusive", "write_durable", "replace_atomic")
    ], result.text
    assert os.listdir(place) == ["old"]
    assert (place / "old").read_bytes() == b"precious"


def test_write_durable_refuses_to_overwrite_and_does_not_remove_what_it_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write_durable(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_file_system_without_hard_links_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: object, target: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OSError, match="no hard links"):
        create_exclusive(tmp_path / "file", b"x")
    assert os.listdir(tmp_path) == []


def test_a_link_whose_reply_was_lost_still_counts_as_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats the request and then reports EEXIST for the file it has just made."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert create_exclusive(tmp_path / "file", b"x") is True
    assert create_exclusive(tmp_path / "file", b"y") is False
    assert (tmp_path / "file").read_bytes() == b"x"
    assert os.listdir(tmp_path) == ["file"]


def test_make_dirs_makes_every_level_and_refuses_a_path_through_a_file(tmp_path: Path) -> None:
    make_dirs(tmp_path / "a" / "b" / "c")
    make_dirs(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / "dangling"):
        with pytest.raises((NotADirectoryError, FileExistsError)):
            make_dirs(path)
    assert not (tmp_path / "nowhere").exists()


CLOSED_PARENT = """
import os, sys
from pathlib import Path
from holdfast.base.files import make_dirs

parent = Path(sys.argv[1])
(parent / "mine").mkdir()
if os.geteuid() == 0:
    os.chown(parent / "mine", 65534, 65534)
parent.chmod(0o311)
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    os.listdir(parent)
except PermissionError:
    make_dirs(parent / "mine" / "a" / "b")
    make_dirs(parent / "mine")
    print("made")
"""


def test_make_dirs_works_below_a_directory_whose_parent_may_not_be_read(tmp_path: Path) -> None:
    script = tmp_path / "closed.py"
    script.write_text(CLOSED_PARENT)
    with tempfile.TemporaryDirectory() as parent:  # tmp_path itself is closed to other users
        result = finish(python(script, parent), cwd=tmp_path)
        Path(parent).chmod(0o700)
    assert result.out == "made\n", result.text


def test_read_regular_refuses_what_is_not_a_small_regular_file(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.write_bytes(b"12345")
    assert read_regular(whole, 5) == b"12345"
    (tmp_path / "link").symlink_to(whole)
    os.mkfifo(tmp_path / "fifo")
    refused = {
        tmp_path / "link": "symbolic link",
        tmp_path / "fifo": "not a regular file",  # and does not wait for a writer
        tmp_path: "not a regular file",
        Path("/dev/zero"): "not a regular file",
    }
    for path, reason in refused.items():
        with pytest.raises(OSError, match=reason):
            read_regular(path, 100)
    with pytest.raises(OSError, match="5 bytes, more than the 4 allowed"):
        read_regular(whole, 4)
    with pytest.raises(OSError, match="more than the 10 bytes allowed"):
        read_regular(Path("/proc/self/status"), 10)  # says it has 0 bytes
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing", 5)


def test_read_regular_looks_again_when_nfs_says_the_file_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    stale = [OSError(errno.ESTALE, "Stale file handle")]
    real = files._read_regular

    def once(path: Path, limit: int) -> bytes:
        if stale:
            raise stale.pop()
        return real(path, limit)

    monkeypatch.setattr(files, "_read_regular", once)
    assert read_regular(tmp_path / "file", 5) == b"x"


def test_an_explained_error_names_the_path_the_reason_and_the_remedy(tmp_path: Path) -> None:
    error = explain_os_error(OSError(errno.ENOSPC, "No space left on device"), "write", tmp_path / "x")
    assert isinstance(error, ControlError)
    for part in (str(tmp_path / "x"), "No space left on device", "free some space"):
        assert part in str(error)
