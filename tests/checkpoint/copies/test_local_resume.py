"""Resuming from local copies: what nodes really hold decides, shard by shard; a bad copy costs only itself.

The copies are made here, byte by byte from a checkpoint of the global tier, so that each test can have them
lie, and be wrong, exactly as it wants. `test_local_tier_end_to_end.py` has them made by saves.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.tier import CopyFile, CopyRecord, LocalTier
from holdfast.checkpoint.format.manifest import MANIFEST, METADATA
from holdfast.checkpoint.format.manifest import read as read_manifest
from holdfast.errors import ExitCode
from holdfast.health.node import TryOutcome
from holdfast.journal.events import (
    CopyQuarantined,
    CopyReplaced,
    DecisionMade,
    Resumed,
    RungRejected,
    SaveCommitted,
    StorageAlarm,
    Warned,
)
from holdfast.record.standing import Standing, StandingBook
from holdfast.train.membership import Membership
from kit.harness import wait_until
from kit.nodes.local_tier import memory
from kit.ranks.local_ranks import Nodes, name_of
from kit.tiny import checkpoints

NODES = ["a", "b", "c", "d"]
STEP, END = 4, 6


def localise(
    nodes: Nodes, held: dict[str, list[int]], *, step: int = STEP, keep_global: bool = False
) -> None:
    """Make local copies of a global checkpoint: `held` has the ranks whose shards each node holds."""
    (directory,) = [path for path in checkpoints(nodes.run_dir) if name_of(path).step == step]
    manifest, digest = read_manifest(directory)
    folder = local_manifest.open_folder(nodes.control, name_of(directory))
    shutil.copy(directory / METADATA, folder)
    shutil.copy(directory / MANIFEST, folder)
    for number, (node, ranks) in enumerate(held.items()):
        control = nodes.control
        tier = LocalTier.open(nodes.directory(node), control.run_id, node=node, run_dir=control.path)
        for rank in ranks:
            image, files, start = f"{rank:05d}.{step:x}{number}", [], 0
            with (tier.images / image).open("wb") as out:
                for entry in manifest.files:
                    if entry.path.startswith(f"__{rank}_"):
                        out.write((directory / entry.path).read_bytes())
                        files.append(CopyFile(entry.path, start, entry.size, entry.digest))
                        start += entry.size
            kind: Any = "own" if NODES.index(node) == rank else "replica"
            tier.commit(
                CopyRecord(
                    checkpoint=directory.name,
                    manifest=digest,
                    rank=rank,
                    image=image,
                    files=files,
                    kind=kind,
                    at=0.0,
                )
            )
    if not keep_global:
        shutil.rmtree(directory)


def pairs(nodes: list[str]) -> dict[str, list[int]]:
    """As replication_factor 2 lays them out: two nodes hold each other's."""
    return {node: [rank, rank ^ 1] for rank, node in enumerate(nodes)}


def flip(nodes: Nodes, node: str, rank: int, at: int = 700) -> None:
    (image,) = nodes.place(node).glob(f"images/{rank:05d}.*")
    data = bytearray(image.read_bytes())
    data[at] ^= 0x40
    image.write_bytes(data)


def resumed(nodes: Nodes) -> int:
    return int(nodes.events(Resumed)[-1].step)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Four ranks have trained to step 4, with checkpoints of steps 2 and 4 in the global tier."""
    with memory() as where:
        nodes = Nodes(tmp_path_factory.mktemp("trained") / "four", where)
        nodes.shared.mkdir()
        plain = {"checkpoint_async_save": False, "checkpoint_non_persistent_ckpt_type": "none"}
        assert nodes.train(NODES, STEP, checkpoint_interval=2, **plain) == [0] * 4
        reference = nodes.copy("reference")
        assert reference.train(NODES, END, checkpoint_interval=0, **plain) == [0] * 4
        nodes.reference = reference.steps()
        yield nodes


@pytest.fixture
def four(trained: Nodes, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with trained.aside(request.node.name) as made:
        yield made


def as_never_interrupted(nodes: Nodes, trained: Nodes) -> bool:
    return nodes.steps() == trained.reference


@pytest.mark.drill
def test_every_node_has_its_own_copy_and_nothing_is_asked_of_others(four: Nodes, trained: Nodes) -> None:
    localise(four, {node: [rank] for rank, node in enumerate(NODES)})
    assert four.train(NODES, END) == [0] * 4
    assert resumed(four) == STEP
    assert as_never_interrupted(four, trained)
    assert not four.events(CopyQuarantined)


@pytest.mark.parametrize("lost", [pytest.param(("a",), marks=pytest.mark.drill), ("b", "c")])
def test_what_replicas_cover_is_resumed_from_memory(
    lost: tuple[str, ...], four: Nodes, trained: Nodes
) -> None:
    """Node loss: spares with empty directories take the places, and get their shards from the survivors."""
    localise(four, pairs(NODES))
    for node in lost:
        four.lose(node)
    assert four.train(NODES, END) == [0] * 4
    assert resumed(four) == STEP
    assert as_never_interrupted(four, trained)


@pytest.mark.parametrize("lost", [("a", "b"), pytest.param(("a", "b", "c"), marks=pytest.mark.drill)])
def test_what_they_do_not_cover_falls_to_the_global_tier(
    lost: tuple[str, ...], four: Nodes, trained: Nodes
) -> None:
    localise(four, pairs(NODES))
    for node in lost:
        four.lose(node)
    assert four.train(NODES, END) == [0] * 4
    assert resumed(four) == 2
    assert as_never_interrupted(four, trained)
    (rejected,) = four.events(RungRejected)
    assert any("on all nodes" in reason for reason in rejected.reasons)


def test_a_flipped_byte_in_a_replica_is_never_loaded(four: Nodes, trained: Nodes) -> None:
    """Scenario 1, cases Megatron-LM#5281 and nvidia-resiliency-ext#349: a node dies, its replica is bad."""
    localise(four, pairs(NODES))
    four.lose("a")
    flip(four, "b", 0)
    name = four.local()[0]
    assert four.train(NODES, END) == [0] * 4
    assert resumed(four) == 2, "the only copy of rank 0's shards is bad: the rung below"
    assert as_never_interrupted(four, trained)
    (bad,) = four.events(CopyQuarantined)
    assert (bad.node, bad.kind) == ("b", "replica")
    assert "altered" in bad.reasons[0]
    decisions = [d for d in four.events(DecisionMade) if d.about == "resume"]
    assert len(decisions) == 2, "one for the training before, one for all ranks here"
    tier = LocalTier.at(four.place("b"))
    assert not [record for record in tier.records() if record.rank == 0 and record.name == name]
    assert list(tier.quarantined.glob("*.json"))


def test_a_bad_copy_is_replaced_by_a_good_one_of_the_same_step(four: Nodes, trained: Nodes) -> None:
    """One bad copy is quarantined, not the whole step. Scenario 10."""
    localise(four, pairs(NODES))
    flip(four, "a", 0)
    flip(four, "d", 2)

    def wait(step: int, run: holdfast.Run) -> None:
        if step == STEP + 1:
            wait_until(lambda: len(four.events(CopyReplaced)) == 2, 30, "both are made again")

    assert four.train(NODES, END, at_step={0: wait}) == [0] * 4
    assert resumed(four) == STEP
    assert as_never_interrupted(four, trained)
    assert sorted((bad.node, bad.kind) for bad in four.events(CopyQuarantined)) == [
        ("a", "own"), ("d", "replica"),
    ]  # fmt: skip
    assert sorted((one.node, one.kind, one.rank) for one in four.events(CopyReplaced)) == [
        ("a", "own", 0), ("d", "replica", 2),
    ]  # fmt: skip


def test_a_node_without_its_directory_reads_what_the_others_hold(
    four: Nodes, trained: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a restart: from memory all the same. Saves go to the root, since a local one would lack a node."""
    monkeypatch.setattr(Membership, "is_restart", True)
    localise(four, pairs(NODES))
    four.lose("b")
    four.directory("b").write_text("a file, not a directory")
    assert four.train(NODES, END) == [0] * 4
    assert resumed(four) == STEP
    assert as_never_interrupted(four, trained)
    assert any("rank 1 on b: the local tier cannot use" in told.message for told in four.events(Warned))
    assert not [save for save in four.events(SaveCommitted) if save.tier == "local"]
    assert END in [name_of(path).step for path in checkpoints(four.run_dir)]


def test_copies_that_only_such_a_node_may_hold_stand_against_a_fresh_start(
    four: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Membership, "is_restart", True)
    for path in checkpoints(four.run_dir):
        record = next(four.run_dir.glob(f"attempts/*/commits/*-{name_of(path).id}.json"))
        record.with_suffix(".done").unlink()
    localise(four, {"b": [0, 1, 2, 3]})
    shutil.rmtree(checkpoints(four.run_dir)[0])
    four.lose("b")
    four.directory("b").write_text("a file, not a directory")
    assert four.train(NODES, END) == [ExitCode.NO_VALID_RUNG] * 4


def test_shards_come_from_nodes_and_the_global_tier_together(four: Nodes, trained: Nodes) -> None:
    localise(four, {"a": [0], "c": [2]}, keep_global=True)
    (directory,) = [path for path in checkpoints(four.run_dir) if name_of(path).step == STEP]
    for rank in (0, 2):  # what the nodes hold is bad there: each shard comes from where it is good
        for path in directory.glob(f"__{rank}_*"):
            data = bytearray(path.read_bytes())
            data[900] ^= 1
            path.write_bytes(data)
    assert four.train(NODES, END) == [0] * 4
    assert resumed(four) == STEP
    assert as_never_interrupted(four, trained)


@pytest.mark.drill
def test_copies_of_another_step_under_this_ones_name_do_not_count(four: Nodes, trained: Nodes) -> None:
    """Case dlrover#1146 and its kind: a file name decides nothing."""
    localise(four, pairs(NODES))
    localise(four, {"a": [0]}, step=2, keep_global=True)
    tier = LocalTier.at(four.place("a"))
    new, old = (next(r for r in tier.records() if r.rank == 0 and r.name.step == s) for s in (STEP, 2))
    shutil.copy(tier.image(old), tier.image(new))
    assert four.train(NODES, END) == [0] * 4
    assert resumed(four) == STEP, "node b has a good one"
    assert as_never_interrupted(four, trained)
    assert [bad.node for bad in four.events(CopyQuarantined)] == ["a"]


def test_a_condemned_checkpoint_is_not_taken_from_memory_either(four: Nodes, trained: Nodes) -> None:
    localise(four, pairs(NODES))
    name = four.local()[0]
    number = StandingBook(four.control)._folder(name.id)
    number.mkdir(parents=True)
    (number / f"000001-{Standing.CONDEMNED}.json").write_text("{}")
    assert four.train(NODES, END) == [0] * 4
    assert resumed(four) == 2
    assert as_never_interrupted(four, trained)


@pytest.mark.parametrize(("world", "lost"), [(2, "cd"), pytest.param(3, "a", marks=pytest.mark.drill)])
def test_fewer_nodes_reshard_from_what_the_others_hold(
    world: int, lost: str, four: Nodes, trained: Nodes
) -> None:
    """Scenario 21, 4→2 and 4→3, from the local tier: no sample repeated or skipped."""
    held = pairs(NODES) if world == 3 else {"a": [0, 2], "b": [1, 3], "c": [2, 0], "d": [3, 1]}
    localise(four, held)
    for node in lost:
        four.lose(node)
    left = [node for node in NODES if node not in lost]
    shutil.rmtree(four.shared / "log")
    assert four.train(left, END) == [0] * world
    assert resumed(four) == STEP
    wanted = {step: _samples(ranks) for step, ranks in trained.reference.items() if step > STEP}
    assert {step: _samples(ranks) for step, ranks in four.steps().items()} == wanted


def test_more_nodes_reshard_from_fewer(trained: Nodes, four: Nodes) -> None:
    """Scenario 21, 2→4: the new nodes hold nothing and get all they need from the others."""
    localise(four, {"a": [0, 1], "b": [2, 3]})
    assert four.train([*NODES, "e", "f"], END) == [0] * 6
    assert resumed(four) == STEP
    assert _samples(four.steps()[END]) == _samples(trained.reference[END])


@pytest.mark.drill
def test_a_node_that_comes_back_with_old_copies_is_judged_by_the_lineage(four: Nodes, trained: Nodes) -> None:
    """Scenario 27: the run went back below step 4 and on another way; the old step 4 is nobody's rung."""
    localise(four, pairs(NODES))
    old = four.local()[0]
    kept = {node: four.directory(node).rename(four.memory / f"away-{node}") for node in NODES}
    assert four.train(NODES, 3, checkpoint_interval=0, checkpoint_save_at_end=True) == [0] * 4
    for node, path in kept.items():
        shutil.rmtree(four.directory(node), ignore_errors=True)
        path.rename(four.directory(node))
    assert four.train(NODES, END) == [0] * 4
    assert resumed(four) == 3
    assert as_never_interrupted(four, trained)
    chosen = [d for d in four.events(DecisionMade) if d.about == "resume"][-1]
    assert any("abandoned" in why for r in chosen.rejected if r.option == str(old) for why in r.why)


@pytest.mark.drill
def test_all_copies_lost_is_no_reason_to_refuse_a_fresh_start(four: Nodes) -> None:
    """What only the local tier had was never meant to last; what the global tier had was."""
    for path in checkpoints(four.run_dir):
        record = next(four.run_dir.glob(f"attempts/*/commits/*-{name_of(path).id}.json"))
        record.with_suffix(".done").unlink()
    localise(four, pairs(NODES))
    shutil.rmtree(checkpoints(four.run_dir)[0])
    for node in NODES:
        four.lose(node)
    assert four.train(NODES, 1) == [0] * 4
    assert resumed(four) == 0
    chosen = [d for d in four.events(DecisionMade) if d.about == "resume"][-1]
    assert any("lost: only the local tier had it" in why for r in chosen.rejected for why in r.why)


def test_two_bad_checkpoints_in_a_row_make_the_storage_suspect(four: Nodes, trained: Nodes) -> None:
    """Scenario 23, where the storage itself is well: an alarm, a probe, and what is left is tried.

    Whatever is wrong with them: one lacks a shard, the other has other bytes.
    """
    for number, path in enumerate(checkpoints(four.run_dir)):
        shard = next(iter(sorted(path.glob("__1_*"))))
        if not number:
            shard.unlink()
            continue
        data = bytearray(shard.read_bytes())
        data[800] ^= 8
        shard.write_bytes(data)
    codes = four.train(NODES, END, checkpoint_non_persistent_ckpt_type="none")
    assert codes == [ExitCode.NO_VALID_RUNG] * 4
    (alarm,) = four.events(StorageAlarm)
    assert len(alarm.checkpoints) == 2
    assert alarm.probe == ""


def test_storage_that_fails_the_probe_is_not_read_any_further(
    four: Nodes, trained: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 23: refuse to continue blindly, though a third checkpoint might do."""
    tried = TryOutcome(problem="it gives back other bytes")
    monkeypatch.setattr("holdfast.checkpoint.choose.resume.try_storage", lambda *_: tried)
    assert (
        four.train(NODES, END, checkpoint_interval=2, checkpoint_non_persistent_ckpt_type="none") == [0] * 4
    )
    for path in checkpoints(four.run_dir)[:2]:
        next(iter(sorted(path.glob("__1_*")))).write_bytes(b"")
    codes = four.train(NODES, END + 2, checkpoint_non_persistent_ckpt_type="none")
    assert codes == [ExitCode.NO_VALID_RUNG] * 4
    (alarm,) = four.events(StorageAlarm)
    assert alarm.probe == "it gives back other bytes"
    assert max(four.steps()) == END, "nothing was trained"


def _samples(ranks: list[str]) -> list[int]:
    """A step's samples, of all ranks together."""
    return sorted(int(i) for text in ranks for i in text.split(" ", 1)[1].strip("[]").split(","))
