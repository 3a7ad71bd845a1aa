"""What we sweep is ours: no link leads a removal anywhere else, and nothing that may block is waited for."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import time
from pathlib import Path

import pytest

from holdfast.base import files
from holdfast.base.bounded import Bounded
from holdfast.checkpoint import commit as commits
from holdfast.checkpoint import retention
from holdfast.checkpoint.copies import tier
from holdfast.checkpoint.copies.tier import LocalTier
from holdfast.checkpoint.format.manifest import PARTS, STAGING, TRASH, CheckpointName, CheckpointRoot
from holdfast.checkpoint.remote.copies import QUARANTINE, Remote, open_store, pull
from holdfast.checkpoint.remote.store import Budget, RemoteError
from holdfast.errors import UsageError
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, claim
from holdfast.record.lineage import CommitRecord, commits_of, record_commit, shelve
from holdfast.record.standing import BESIDE, RootBook
from holdfast.restart.keeper import SOCKET
from holdfast.restart.keeper_process import DIRECTORY, sweep_stale
from kit.checkpoints import ID, RUN, STEP, make_checkpoint
from kit.tiny import tree

NAME = CheckpointName(STEP, ID)
OLD = 0.0


class Scene:
    """A checkpoint root, a run, and somebody's own directory beside it that must stay as it is."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = CheckpointRoot(tmp_path / "root")
        self.control, _ = ControlDirectory.open_or_create(tmp_path / "run")
        self.fence = Fence(self.control, claim(self.control, "x", 30.0).epoch)
        self.owner = commits.Owner(run=self.control.run_id, attempt=1, epoch=0)
        self.theirs = tmp_path / "theirs"
        (self.theirs / "deep" / PARTS).mkdir(parents=True)
        for path in ("precious", "x.owner", ".x.owner.a.tmp", "deep/precious", f"deep/{PARTS}/precious"):
            (self.theirs / path).write_text("precious")
            os.utime(self.theirs / path, (OLD, OLD))
        self.before = tree(self.theirs)

    def check(self) -> None:
        assert tree(self.theirs) == self.before, "something outside the root was removed"


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("folder", [TRASH, STAGING, BESIDE])
def test_a_sweep_follows_no_link(scene: Scene, folder: str) -> None:
    scene.root.path.mkdir()
    (scene.root.path / folder).symlink_to(scene.theirs, target_is_directory=True)
    with (
        pytest.raises(OSError, match="a symbolic link where a directory of its own has to be")
        if (folder != BESIDE)
        else pytest.MonkeyPatch.context()
    ):
        commits.sweep_staging(scene.root, scene.control.run_id, scene.fence, now=time.time())
    scene.check()


def test_a_link_in_the_trash_or_in_staging_goes_and_what_it_points_to_stays(scene: Scene) -> None:
    commits.open_root(scene.root)
    scene.root.trash.mkdir()
    (scene.root.trash / "a").symlink_to(scene.theirs)
    (scene.root.staging / str(NAME)).symlink_to(scene.theirs)
    (scene.root.trash / "whole").mkdir()
    (scene.root.trash / "whole" / "link").symlink_to(scene.theirs / "deep")
    commits.replace_atomic(
        commits._owner_path(scene.root, str(NAME)), commits.msgspec.json.encode(scene.owner)
    )
    assert commits.sweep_staging(scene.root, scene.control.run_id, scene.fence) == [str(NAME)]
    scene.check()
    assert sorted(path.name for path in scene.root.path.rglob("*")) == [".holdfast-root", STAGING, TRASH]


def test_a_save_is_refused_where_staging_is_a_link(scene: Scene) -> None:
    scene.root.path.mkdir()
    scene.root.staging.symlink_to(scene.theirs)
    with pytest.raises(OSError, match=r"\.staging.*|symbolic link"):
        commits.open_root(scene.root)
    scene.root.marker.touch()
    with pytest.raises(OSError, match="symbolic link"):
        commits.open_staged(scene.root, NAME, scene.owner)
    scene.check()


def test_a_staged_directory_that_became_a_link_is_neither_emptied_nor_committed(scene: Scene) -> None:
    commits.open_root(scene.root)
    (scene.root.staging / str(NAME)).symlink_to(scene.theirs / "deep")
    with pytest.raises(OSError, match="symbolic link"):
        commits.open_staged(scene.root, NAME, scene.owner, again=True)
    record = CommitRecord(id=NAME.id, step=NAME.step, parent=None, attempt=1, manifest="0" * 32)
    with pytest.raises(OSError, match="symbolic link"):
        commits.commit(scene.root, NAME, scene.fence, scene.control, record)
    commits.drop_staged(scene.root, str(NAME))
    scene.check()
    assert not scene.root.committed(NAME).exists()


def test_retention_moves_nothing_through_a_link(scene: Scene) -> None:
    commits.open_root(scene.root)
    scene.root.trash.symlink_to(scene.theirs)
    retention.empty([scene.root.trash / "deep", scene.root.trash / "precious"])
    commits.drop_staged(scene.root, "deep")
    RootBook(scene.root.path).forget(str(NAME))
    scene.check()


def test_what_the_control_directory_forgets_lies_in_it(scene: Scene) -> None:
    (scene.control.path / tier.LOCAL).symlink_to(scene.theirs)
    (scene.theirs / str(NAME)).mkdir()
    (scene.theirs / str(NAME) / "precious").write_text("precious")
    scene.before = tree(scene.theirs)
    tier.forget(scene.control, NAME)
    scene.check()


def test_a_remote_copy_is_fetched_and_removed_through_no_link(scene: Scene, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "other")
    store = tmp_path / "remote"
    remote = Remote(open_store(f"file://{store}"), Budget(attempts=1, seconds=2.0))
    remote.push(checkpoint)
    owner = commits.Owner(run=RUN, attempt=1, epoch=1)
    for folder in (STAGING, QUARANTINE):
        scene.root.path.mkdir(exist_ok=True)
        (scene.root.path / folder).symlink_to(scene.theirs)
        with pytest.raises(OSError, match="symbolic link"):
            pull(remote, NAME, scene.root, fence=scene.fence, owner=owner)
        (scene.root.path / folder).unlink()
    os.rename(store / str(NAME), tmp_path / "moved")
    (store / str(NAME)).symlink_to(tmp_path / "moved")
    moved = tree(tmp_path / "moved")
    with pytest.raises(RemoteError, match="symbolic link"):
        remote.delete(NAME)
    assert tree(tmp_path / "moved") == moved
    scene.check()


def test_a_local_place_with_a_link_in_it_is_refused(scene: Scene, tmp_path: Path) -> None:
    place = tmp_path / "local" / "0123456789ab"
    place.mkdir(parents=True)
    (place / "images").symlink_to(scene.theirs)
    with pytest.raises(UsageError, match="it is a link"):
        LocalTier.open(tmp_path / "local", "0123456789ab", node="n", run_dir=tmp_path)
    scene.check()


def test_the_names_that_are_removed_are_names_and_not_paths(scene: Scene) -> None:
    scene.root.path.mkdir()
    for names in (("..", "theirs"), ("a/../../theirs",), (".",), ("",)):
        with pytest.raises(OSError, match=r"not the name of an entry|Invalid|Not a directory|refuses"):
            files.remove(scene.root.path, *names, "deep")
    files.remove(scene.root.path, "missing", "deep")
    scene.check()


# --- what may block or fill up ------------------------------------------------------------------------------


def test_a_keepers_sweep_waits_for_nobodys_socket(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody listens there, takes no connection, and has no room for another one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"{DIRECTORY}busy"
    place.mkdir()
    linked = tmp_path / f"{DIRECTORY}linked"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(place / SOCKET))
        listening.listen(0)
        waiting = []
        while True:
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            channel.setblocking(False)
            waiting.append(channel)
            try:
                channel.connect(str(place / SOCKET))
            except BlockingIOError:
                break
        os.utime(place, (OLD, OLD))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(scene.theirs / SOCKET))
        linked.symlink_to(scene.theirs)
        os.utime(linked, (OLD, OLD), follow_symlinks=False)
        swept = Bounded(sweep_stale, "sweep")
        ended = swept.ended(5.0)
        for channel in waiting:
            channel.close()
    assert ended, "the sweep waits"
    assert place.exists()
    assert linked.is_symlink(), "a link is not what a keeper leaves"
    (scene.theirs / SOCKET).unlink()
    scene.check()


def test_a_fifo_or_a_device_in_a_copy_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "root")
    remote = Remote(open_store(f"file://{tmp_path}/remote"), Budget(attempts=1, seconds=2.0))
    remote.push(checkpoint)
    for shard in ("holdfast.json", "__0_0.distcp"):
        path = tmp_path / "remote" / str(NAME) / shard
        kept = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        read = Bounded(
            lambda path=path: remote._store.read(f"{NAME}/{path.name}", 0, 10, remote._tries()), "x"
        )
        assert read.ended(5.0), f"it waits for {shard}"
        with pytest.raises(RemoteError, match="not a regular file"):
            read.result()
        path.unlink()
        path.write_bytes(kept)


def test_a_commit_that_is_shelved_on_a_full_disk_keeps_its_own_file(scene: Scene) -> None:
    """A limit on the size of a file ends a write in the middle, as a full disk does."""
    records = [
        CommitRecord(id=f"{number:016x}", step=number, parent=None, attempt=1, manifest="0" * 32)
        for number in range(1, 4)
    ]
    scene.control.attempt(1).mkdir(parents=True)
    for record in records:
        record_commit(scene.control, scene.fence, record)
    shelve(scene.control, scene.fence, records[0])
    shelf = scene.control.attempt(1) / "commits" / "shelf.jsonl"
    whole = shelf.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            shelve(scene.control, scene.fence, records[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert shelf.read_bytes() == whole, "half a line was left"
    assert commits_of(scene.control, 1) == records
    shelve(scene.control, scene.fence, records[2])
    assert commits_of(scene.control, 1) == records
    shelf.unlink()
    os.mkfifo(shelf)
    read = Bounded(lambda: commits_of(scene.control, 1), "shelf")
    assert read.ended(5.0), "it waits for a FIFO"
    with pytest.raises(Exception, match="not a regular file"):
        read.result()
