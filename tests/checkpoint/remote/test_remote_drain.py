"""The drain process copies beside the training, outlives its trainer, is replaced, ends; nothing blocks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import CheckpointName, CheckpointRoot
from holdfast.checkpoint.remote.copies import open_remote
from holdfast.checkpoint.remote.drain import REPLACEMENTS, Drain, Outcome
from holdfast.journal import Event
from holdfast.journal.events import CopyDeleted, CopyDrained, DrainFailed, Warned
from holdfast.journal.writer import JournalWriter
from holdfast.record.attempts import HeadRecord, write_head
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, claim
from holdfast.record.lineage import CommitRecord, DeletedRecord, record_commit, record_deleted, record_done
from kit.checkpoints import make_checkpoint, small_state
from kit.harness import is_alive, wait_until
from kit.nodes.s3server import Proxy, S3Server, proxy
from kit.runs import events_in
from kit.tiny import forked


class Lab:
    """A run directory with committed checkpoints, and drains for it."""

    def __init__(self, folder: Path) -> None:
        self.control, _ = ControlDirectory.open_or_create(folder / "run")
        self.root = CheckpointRoot(folder / "run" / "checkpoints")
        self.url = f"file://{folder}/remote"
        self.drains: list[Drain] = []
        self.records: dict[str, CommitRecord] = {}
        self.attempt = 0
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self.attempt += 1
        self.fence = Fence(self.control, claim(self.control, "x", 5.0).epoch)
        newest = list(self.records.values())[-1] if self.records else None
        head = HeadRecord(
            attempt=self.attempt,
            checkpoint=newest.id if newest else None,
            step=newest.step if newest else 0,
            source="",
        )
        write_head(self.control, self.fence, head)

    def commit(self, step: int, *, floats: int = 10) -> str:
        name = CheckpointName(step, f"{step:08x}")
        state = {**small_state(step), "big": torch.randn(floats)}
        directory = make_checkpoint(
            self.root.path, step=step, id=name.id, state=state, run=self.control.run_id
        )
        digest = manifests.read(directory)[1]
        record = CommitRecord(id=name.id, step=step, parent=None, attempt=self.attempt, manifest=digest)
        record_commit(self.control, self.fence, record)
        record_done(self.control, record)
        self.records[str(name)] = record
        return str(name)

    def delete(self, name: str) -> None:
        record = self.records[name]
        why = DeletedRecord(id=record.id, step=record.step, reason="x", epoch=self.fence.epoch, at=0.0)
        record_deleted(self.control, record, why)
        os.rename(self.root.path / name, self.root.path.parent / f"gone-{name}")

    def drain(self, *, linger: float = 20.0, retry_seconds: float = 5.0) -> Drain:
        made = Drain(
            control=self.control,
            root=self.root,
            remote_url=self.url,
            epoch=self.fence.epoch,
            attempt=self.attempt,
            journal=JournalWriter(self.control.journal, "rank-0", self.attempt),
            retry_seconds=retry_seconds,
            linger=linger,
        )
        self.drains.append(made)
        made.start()
        return made

    def there(self) -> list[str]:
        return [str(name) for name in open_remote(self.url, retry_seconds=5.0).names()]

    def events(self, kind: type[Event]) -> list[Any]:
        return events_in(self.control.path, kind)

    def log(self) -> str:
        return "".join(path.read_text() for path in self.control.attempts.glob("*/drain.log"))


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    for drain in made.drains:
        if drain._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(drain.pid, signal.SIGKILL)
            drain._child.process.wait(10)
    assert "Traceback" not in made.log(), made.log()


@pytest.fixture
def s3(lab: Lab, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The lab's remote is a bucket now, behind a proxy."""
    bucket = f"bucket-{os.urandom(4).hex()}"
    server.client().create_bucket(Bucket=bucket)
    with proxy(server.port) as standing:
        monkeypatch.setenv("AWS_ENDPOINT_URL", standing.endpoint)
        lab.url = f"s3://{bucket}/runs/a"
        yield standing


def outcomes_of(drain: Drain, count: int, timeout: float = 20.0) -> list[Outcome]:
    found: list[Outcome] = []

    def enough() -> bool:
        found.extend(drain.poll())
        return len(found) >= count

    wait_until(enough, timeout, f"{count} outcomes")
    return found


def test_what_is_pushed_gets_a_copy_what_is_deleted_loses_it_and_the_process_ends(lab: Lab) -> None:
    drain = lab.drain()
    first, second = lab.commit(3), lab.commit(6)
    drain.push(first)
    drain.push(second)
    outcomes = outcomes_of(drain, 2)
    assert [(outcome.job, outcome.name, outcome.problem) for outcome in outcomes] == [
        ("push", first, ""),
        ("push", second, ""),
    ]
    assert lab.there() == [second, first]
    lab.delete(first)
    drain.delete([first])
    assert [outcome.job for outcome in drain.close(20)] == ["delete"]
    assert lab.there() == [second]
    assert drain._child is not None
    assert drain._child.code == 0
    assert [event.checkpoint for event in lab.events(CopyDrained)] == [first, second]
    assert [event.checkpoint for event in lab.events(CopyDeleted)] == [first]
    assert lab.events(Warned) == []


def test_it_goes_on_with_what_it_was_told_when_its_trainer_is_killed_and_then_ends(
    lab: Lab, s3: Proxy, tmp_path: Path
) -> None:
    """Scenario: everything dies right after a commit; the copy is made all the same."""
    names = [lab.commit(3), lab.commit(6)]
    s3.delay = 0.05

    def trainer() -> None:
        drain = lab.drain()
        for name in names:
            drain.push(name)
        (tmp_path / "pid").write_text(str(drain.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(trainer) == -signal.SIGKILL
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())), 20, "the drain process ends")
    assert lab.there() == names[::-1]
    assert len(lab.events(CopyDrained)) == 2


def test_its_time_after_the_trainer_is_bounded(lab: Lab, s3: Proxy, server: S3Server, tmp_path: Path) -> None:
    name = lab.commit(3)

    def trainer() -> None:
        drain = lab.drain(linger=0.5, retry_seconds=60.0)
        drain.push(name)
        (tmp_path / "pid").write_text(str(drain.pid))

    server.pause()
    try:
        assert forked(trainer) == 0
        began = time.monotonic()
        pid = int((tmp_path / "pid").read_text())
        wait_until(lambda: not is_alive(pid), 12, "the drain process ends")
        assert time.monotonic() - began < 8
    finally:
        server.go_on()


def test_one_that_is_killed_is_replaced_and_told_again(lab: Lab) -> None:
    drain = lab.drain()
    name = lab.commit(3)
    assert drain.pid is not None
    os.kill(drain.pid, signal.SIGSTOP)
    drain.push(name)
    os.kill(drain.pid, signal.SIGKILL)
    outcome = outcomes_of(drain, 1)[0]
    assert (outcome.name, outcome.problem) == (name, "")
    drain.close(20)
    assert lab.there() == [name]
    assert any("started anew, 1 of 3" in event.message for event in lab.events(Warned))


def test_one_that_is_killed_again_and_again_is_given_up_and_training_goes_on(lab: Lab) -> None:
    drain = lab.drain()
    for _ in range(REPLACEMENTS + 1):
        assert drain._child is not None
        os.kill(drain._child.pid, signal.SIGKILL)
        drain._child.process.wait(10)
        drain.poll()
    drain.push(lab.commit(3))
    assert drain.poll() == []
    assert drain.close(1) == []
    assert lab.there() == []
    assert any("nothing more is copied" in event.message for event in lab.events(Warned))


def test_a_cut_off_attempts_process_stops_and_leaves_the_rest_to_the_next(lab: Lab) -> None:
    first = lab.commit(3)
    old = lab.drain()
    assert outcomes_of(old, 1)[0].name == first  # found missing, without being told
    lab.begin_attempt()
    second = lab.commit(6)
    old.push(second)
    wait_until(lambda: not is_alive(old.pid), 20, "the old drain process ends")
    old.poll()
    assert lab.there() == [first]
    assert any("refused to copy checkpoints" in event.message for event in lab.events(Warned))
    new = lab.drain()
    new.close(20)
    assert lab.there() == [second, first]


@pytest.mark.drill
def test_the_next_start_makes_up_for_what_was_not_copied_and_not_deleted(lab: Lab, s3: Proxy) -> None:
    kept, gone, lost = lab.commit(3), lab.commit(6), lab.commit(9)
    drain = lab.drain()
    drain.push(kept)
    drain.push(gone)
    outcomes_of(drain, 3)
    assert drain.pid is not None
    os.kill(drain.pid, signal.SIGKILL)
    lab.delete(gone)  # nobody tells the remote
    open_remote(lab.url).delete(CheckpointName(9, lost[14:]))
    lab.begin_attempt()
    lab.drain().close(20)
    assert lab.there() == [lost, kept]


def test_uploads_that_a_killed_one_left_are_aborted_and_other_peoples_are_not(
    lab: Lab, s3: Proxy, server: S3Server
) -> None:
    name = lab.commit(3, floats=5_000_000)  # more than one part
    client, bucket = server.client(), lab.url.split("/")[2]
    foreign = client.create_multipart_upload(Bucket=bucket, Key="runs/a/step_00000003-ffffffff/x")["UploadId"]

    def uploads() -> list[str]:
        return [upload["UploadId"] for upload in client.list_multipart_uploads(Bucket=bucket)["Uploads"]]

    drain = lab.drain()
    wait_until(lambda: any("partNumber" in line for line in s3.requests), 20, "a part is under way")
    assert drain.pid is not None
    os.kill(drain.pid, signal.SIGKILL)
    assert len(uploads()) == 2
    assert lab.there() == []
    lab.begin_attempt()
    lab.drain().close(30)
    assert uploads() == [foreign]
    assert lab.there() == [name]
    assert any("aborted 1 unfinished upload" in event.message for event in lab.events(Warned))


def test_a_remote_that_is_gone_is_told_and_made_up_for_when_it_is_back(
    lab: Lab, s3: Proxy, server: S3Server
) -> None:
    drain = lab.drain(retry_seconds=0.5)
    first = lab.commit(3)
    drain.push(first)
    assert not outcomes_of(drain, 1)[0].problem
    s3.fault = lambda head: b""  # every connection is reset
    second = lab.commit(6)
    drain.push(second)
    failed = outcomes_of(drain, 1)[0]
    assert "cannot look at" in failed.problem
    assert [event.checkpoint for event in lab.events(DrainFailed)] == [second]
    s3.fault = lambda head: None
    third = lab.commit(9)
    drain.push(third)
    outcomes_of(drain, 2)
    drain.close(20)
    assert lab.there() == [third, second, first]


def test_a_bad_local_checkpoint_is_not_copied_and_told(lab: Lab) -> None:
    name = lab.commit(3)
    shard = lab.root.path / name / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[-50] ^= 1
    shard.write_bytes(data)
    drain = lab.drain()
    assert "other bytes than were saved" in outcomes_of(drain, 1)[0].problem
    drain.close(20)
    assert lab.there() == []
    assert "other bytes" in lab.events(DrainFailed)[0].error


def test_nothing_blocks_when_the_process_is_stuck_or_the_server_does_not_answer(lab: Lab) -> None:
    drain = lab.drain()
    assert drain.pid is not None
    os.kill(drain.pid, signal.SIGSTOP)
    slowest = 0.0
    for step in range(3000):
        began = time.monotonic()
        drain.push(f"step_{step:08d}-{step:08x}")
        drain.poll()
        slowest = max(slowest, time.monotonic() - began)
    assert drain.waiting == 3000
    assert drain._unsent  # more than fits in its inbox
    assert slowest < 5  # a call that blocks would never return; the machine may be busy, though
    os.kill(drain.pid, signal.SIGCONT)
    outcomes_of(drain, 3000)
    assert drain.waiting == 0
    drain.close(20)


def test_a_closed_one_does_not_wait_longer_than_asked(lab: Lab) -> None:
    drain = lab.drain(linger=1.0)
    assert drain.pid is not None
    os.kill(drain.pid, signal.SIGSTOP)
    drain.push(lab.commit(3))
    began = time.monotonic()
    drain.close(0.3)
    assert time.monotonic() - began < 8
    assert any("not done after 0.3 s" in event.message for event in lab.events(Warned))
