"""The writer sends what was committed locally to the peers, and no save ever waits for that."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import holdfast
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.server import PeerServer
from holdfast.checkpoint.copies.tier import LocalTier, RankPlace, Where
from holdfast.checkpoint.save.handoff import PeerTarget, UsePeers
from holdfast.checkpoint.save.local import SUPERSEDED, LocalCommit, ReplicaSender
from holdfast.journal.events import CopyQuarantined, CopyReplicated, ReplicaFailed, SaveFailed
from holdfast.journal.writer import JournalWriter
from holdfast.record.directory import ControlDirectory
from kit.harness import wait_until
from kit.nodes.local_tier import committed, is_sound, local, place, settle
from kit.ranks.writers import forked_writers
from kit.runs import events_in
from kit.tiny import train


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def target(listener: socket.socket, tier: str = "0" * 12) -> PeerTarget:
    return PeerTarget(place=tier, node="other", host="127.0.0.1", port=listener.getsockname()[1])


@contextlib.contextmanager
def peer(run_dir: Path, directory: Path, listener: socket.socket) -> Iterator[LocalTier]:
    """Another place, with its server."""
    control = ControlDirectory.open(run_dir)
    tier = LocalTier.open(directory, control.run_id, node="other", run_dir=control.path)
    server = PeerServer(listener, control, tier, keep=2)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield tier
    finally:
        server.stop()
        thread.join(10)


def test_what_is_committed_locally_is_sent_to_the_peers_and_confirmed(tmp_path: Path, shm: Path) -> None:
    run_dir, there = tmp_path / "run", shm / "there"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening())
        tiers: list[LocalTier] = []

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 1:
                tiers.append(stack.enter_context(peer(run_dir, there, listener)))
                mine = place(shm / "here").place
                where = Where(
                    ranks=[RankPlace(mine, "here", [tiers[0].place])],
                    nodes={mine: "here", tiers[0].place: "other"},
                )
                run._session.saving.use_peers([target(listener, tiers[0].place)], where)
            if step in (3, 5, 7):  # one after the other, so that none is superseded
                settle(run)
                wait_until(
                    lambda: any(record.name.step == step - 1 for record in tiers[0].records()),
                    10,
                    f"the replica of step {step - 1} is there",
                )

        with forked_writers():
            train(run_dir, until=7, at_step=at_step, **local(shm / "here", checkpoint_save_at_end=False))
        control = ControlDirectory.open(run_dir)
        replicas = {record.name.step: record for record in tiers[0].records()}
        assert set(replicas) == {4, 6}, "the peer keeps two"
        own = {record.name.step: record for record in place(shm / "here").records()}
        for step, record in replicas.items():
            assert record.kind == "replica"
            assert record.manifest == own[step].manifest
            assert is_sound(tiers[0], control, record)
            folder = local_manifest.folder(control, record.name)
            wait_until((folder / "replicas" / f"0.{tiers[0].place}").exists, 5, "it is confirmed")
            found = local_manifest.read_where(control, record.name)
            assert found is not None
            assert found.ranks[0].targets == [tiers[0].place]
    assert events_in(run_dir, ReplicaFailed, SaveFailed) == []
    wait_until(lambda: len(events_in(run_dir, CopyReplicated)) == 3, 5, "each replica is told")
    assert [(one.step, one.rank) for one in events_in(run_dir, CopyReplicated)] == [(2, 0), (4, 0), (6, 0)]
    assert committed(run_dir) == {"local": [2, 4, 6], "global": [6]}


def test_a_peer_that_stalls_or_is_gone_holds_up_nothing_and_is_told(tmp_path: Path, shm: Path) -> None:
    """The older of two that wait is superseded; every save is committed; the end waits for no replica."""
    run_dir = tmp_path / "run"
    with listening() as listener, socket.create_server(("127.0.0.1", 0)) as closed:
        absent = target(closed)
        closed.close()

        def at_step(step: int, run: holdfast.Run) -> None:
            if step == 1:
                run._session.saving.use_peers([absent, target(listener)])
            settle(run)

        started = time.monotonic()
        with forked_writers():
            train(
                run_dir,
                until=9,
                at_step=at_step,
                **local(shm, checkpoint_save_at_end=False, checkpoint_replication_timeout=60.0),
            )
            assert time.monotonic() - started < 30
    assert committed(run_dir) == {"local": [2, 4, 6, 8], "global": [6]}
    assert events_in(run_dir, SaveFailed) == []
    failed = events_in(run_dir, ReplicaFailed)
    assert SUPERSEDED in {event.error for event in failed}
    assert {event.node for event in failed} == {"other"}


def test_a_copy_that_was_altered_before_it_was_sent_is_quarantined_and_never_becomes_a_replica(
    tmp_path: Path, shm: Path
) -> None:
    """Case nvidia-resiliency-ext#349, at the sender: its digests were taken before."""
    run_dir = tmp_path / "run"
    with forked_writers():
        train(run_dir, until=2, **local(shm / "here"))
    control, tier = ControlDirectory.open(run_dir), place(shm / "here")
    (record,) = tier.records()
    manifest = local_manifest.read(control, record.name, record.manifest)
    with tier.image(record).open("r+b") as file:
        file.seek(200)
        file.write(b"\xa5\x5a\xa5")
    journal = JournalWriter(control.journal, "test", 1)
    with listening() as listener, peer(run_dir, shm / "there", listener) as other:
        sender = ReplicaSender(control, tier, journal)
        sender.use(UsePeers(targets=[target(listener)], timeout=20.0))
        sender.send(LocalCommit(manifest=manifest, record=record, files=manifest.files[:-1]))
        sender.close(20.0)
        assert other.records() == []
        assert list(other.images.glob("[0-9]*")) == []
    assert tier.records() == []
    assert [event.checkpoint for event in events_in(run_dir, CopyQuarantined)] == [record.checkpoint]
    assert len(events_in(run_dir, ReplicaFailed)) == 1
