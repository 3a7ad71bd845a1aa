"""The local tier from save to resume: nodes that save, replicate, die, and are replaced or missed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.copies.tier import LocalTier
from holdfast.errors import ExitCode
from holdfast.journal.events import CopyQuarantined, DecisionMade, Resumed, SaveCommitted
from holdfast.observe.status import status_of
from kit.nodes.local_tier import memory
from kit.ranks.local_ranks import Nodes, killed_after_saves
from kit.tiny import checkpoints

NODES = ["a", "b", "c", "d"]
LAST, END = 4, 8
"""The newest step with a local copy when everybody dies; the last step."""


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Four nodes saved locally every two steps, replicated, and were killed before step 5."""
    with killed_after_saves(tmp_path_factory.mktemp("died") / "four", NODES, LAST, END) as nodes:
        yield nodes


@pytest.fixture
def four(died: Nodes, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with died.aside(request.node.name) as made:
        yield made


def test_what_was_saved_lies_on_two_nodes_each(died: Nodes) -> None:
    held = {node: LocalTier.at(died.place(node)).records() for node in NODES}
    newest = {node: {(r.rank, r.kind) for r in found if r.name.step == LAST} for node, found in held.items()}
    assert newest == {
        "a": {(0, "own"), (1, "replica")}, "b": {(1, "own"), (0, "replica")},
        "c": {(2, "own"), (3, "replica")}, "d": {(3, "own"), (2, "replica")},
    }  # fmt: skip
    committed = [(save.step, save.tier) for save in died.events(SaveCommitted)]
    assert committed == [(2, "local"), (4, "local")]
    assert not checkpoints(died.run_dir)
    status = status_of(died.control)
    assert status.save is None
    assert status.local_save is not None
    assert status.local_save.step == LAST


@pytest.mark.parametrize(
    "lost", ["a", "bc", *(pytest.param(lost, marks=pytest.mark.drill) for lost in ("", "d"))]
)
def test_a_run_goes_on_from_memory_bitwise_whatever_node_is_lost(lost: str, four: Nodes, died: Nodes) -> None:
    """Node loss with spares in their place; the global tier has nothing at all yet."""
    for node in lost:
        four.lose(node)
    assert four.train(NODES, END) == [0] * 4
    assert four.events(Resumed)[-1].step == LAST
    assert four.steps() == died.reference
    committed = [(save.step, save.tier) for save in four.events(SaveCommitted)]
    assert committed[2:] == [(6, "local"), (6, "global"), (8, "local"), (8, "global")]


@pytest.mark.drill
def test_the_same_manifest_judges_the_copies_of_both_tiers(four: Nodes) -> None:
    assert four.train(NODES, 6) == [0] * 4
    for node in NODES:
        four.lose(node)
    assert four.train(NODES, END) == [0] * 4
    assert four.events(Resumed)[-1].step == 6, "from the global tier"


def test_three_nodes_go_on_where_there_were_four(four: Nodes, died: Nodes) -> None:
    """Scenario 21, 4→3 from what saves have left; and the shrunk world replicates again."""
    four.lose("d")
    shutil.rmtree(four.shared / "log")
    assert four.train(["a", "b", "c"], END) == [0] * 3
    assert four.events(Resumed)[-1].step == LAST
    told = [d for d in four.events(DecisionMade) if d.about == "resume"][-1]
    assert any("on peers only" in text for text in told.evidence), told.evidence


def test_a_byte_flipped_in_memory_costs_a_copy_and_nothing_else(four: Nodes, died: Nodes) -> None:
    tier = LocalTier.at(four.place("c"))
    record = next(r for r in tier.records() if r.name.step == LAST and r.kind == "own")
    with tier.image(record).open("r+b") as image:
        image.seek(1000)
        byte = image.read(1)[0]
        image.seek(1000)
        image.write(bytes([byte ^ 2]))
    assert four.train(NODES, END) == [0] * 4
    assert four.events(Resumed)[-1].step == LAST
    assert four.steps() == died.reference
    assert [(bad.node, bad.kind) for bad in four.events(CopyQuarantined)] == [("c", "own")]


def test_a_directory_that_cannot_be_used_stops_a_first_start_only(tmp_path: Path) -> None:
    with memory() as where:
        nodes = Nodes(tmp_path / "two", where)
        nodes.shared.mkdir()
        (where / "b").write_text("a file, not a directory")
        assert nodes.train(["a", "b"], 2) == [ExitCode.USAGE] * 2
        assert not list(where.glob("a/*/images/*")), "nothing was staged"
