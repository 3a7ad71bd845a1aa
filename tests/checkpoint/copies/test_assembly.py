"""From what places hold to where each file of a checkpoint comes from (A5, A7)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.copies.rules import (
    GLOBAL,
    Assembly,
    assemble,
    describe_assembly,
    order,
    replicate,
    share,
    survives,
)
from holdfast.checkpoint.format.manifest import saver_of

FILES = [f"__{rank}_{shard}.distcp" for rank in range(4) for shard in range(2)]
NODES = {"a": "node-a", "b": "node-b", "c": "node-c", "d": "node-d"}
SAVED_AT = {path: "abcd"[rank // 2] for rank, path in enumerate(FILES)}


def files_of(*ranks: int) -> list[str]:
    return [path for path in FILES if int(path[2]) in ranks]


# --- examples -----------------------------------------------------------------------------------------------


def test_each_file_comes_from_whoever_holds_it() -> None:
    found = assemble(FILES, {"b": files_of(1, 0), "a": files_of(0, 1), "c": files_of(2, 3)}, in_global=False)
    assert found.complete
    assert found.sources["__0_0.distcp"] == ["a", "b"]
    assert found.sources["__3_1.distcp"] == ["c"]


def test_a_node_that_is_gone_with_all_that_held_its_shards_leaves_files_missing() -> None:
    found = assemble(FILES, {"a": files_of(0, 1), "b": files_of(0, 1, 2)}, in_global=False)
    assert not found.complete
    assert found.missing == files_of(3)


def test_the_global_tier_has_what_no_place_has() -> None:
    """Node losses that the replication does not cover fall to the global tier."""
    found = assemble(FILES, {"a": files_of(0)}, in_global=True)
    assert found.complete
    assert order(found, "__0_1.distcp", "a", 0) == ["a", GLOBAL]
    assert order(found, "__3_0.distcp", "a", 0) == [GLOBAL]


def test_files_that_the_checkpoint_does_not_have_count_for_nothing() -> None:
    """A place that comes back with other copies claims what it likes."""
    found = assemble(["x"], {"a": ["y", "../x", "x ", ""], "b": ["y", "x", "x"]}, in_global=False)
    assert found == Assembly({"x": ["b"]}, False, [])


@given(
    places=st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=8),
    held=st.dictionaries(st.sampled_from("abcd"), st.sets(st.sampled_from(FILES)), max_size=4),
    verified=st.booleans(),
    saved_world=st.integers(1, 8),
)
def test_what_no_place_has_read_is_read_by_exactly_one_rank(
    places: list[str], held: dict[str, set[str]], verified: bool, saved_world: int
) -> None:
    """A rung counts only if every byte of it was read in this resume, also what nobody needs to load."""
    found = assemble(FILES, held, in_global=True, verified=verified)
    shares = [
        share(found, places, rank, saver=saver_of, saved_world=saved_world) for rank in range(len(places))
    ]
    read = sorted(path for mine in shares for path in mine)
    assert read == [path for path in FILES if not (verified and found.sources[path])]
    if saved_world == len(places) == 4 and not verified:
        assert shares == [files_of(rank) for rank in range(4)], "who saved it needs most of it anyway"


def test_in_another_world_a_file_is_read_to_its_end_where_it_lies() -> None:
    found = assemble(FILES, {"a": files_of(0, 2), "b": files_of(1, 3)}, in_global=False, verified=False)
    shares = [share(found, ["b", "a"], rank, saver=saver_of, saved_world=4) for rank in range(2)]
    assert shares == [files_of(1, 3), files_of(0, 2)]


def test_whoever_holds_nothing_asks_its_peers_in_turn() -> None:
    """A spare with an empty directory; four ranks of it do not all ask the same peer."""
    found = assemble(["x"], {place: ["x"] for place in "abc"}, in_global=True)
    assert [order(found, "x", "spare", rank) for rank in range(4)] == [
        ["a", "b", "c", GLOBAL],
        ["b", "c", "a", GLOBAL],
        ["c", "a", "b", GLOBAL],
        ["a", "b", "c", GLOBAL],
    ]
    assert order(found, "x", "b", 7) == ["b", "c", "a", GLOBAL]


def test_a_file_that_is_not_in_the_checkpoint_has_no_order() -> None:
    with pytest.raises(KeyError, match="y"):
        order(assemble(["x"], {}, in_global=True), "y", "a", 0)


def test_the_evidence_says_from_where_and_what_is_missing() -> None:
    whole = {place: files_of("abcd".index(place)) for place in "abcd"}
    assert describe_assembly(assemble(FILES, whole, in_global=True), NODES, SAVED_AT) == [
        "8 of 8 files on the node that saved them"
    ]
    replaced = {"a": files_of(0, 1), "c": files_of(2, 3), "d": files_of(3)}
    assert describe_assembly(assemble(FILES, replaced, in_global=False), NODES, SAVED_AT) == [
        "6 of 8 files on the node that saved them, 2 on peers only",
        "no longer held where they were saved: node-b (2 files)",
    ]
    assert describe_assembly(assemble(FILES, {"a": files_of(0)}, in_global=False), NODES, SAVED_AT) == [
        "2 of 8 files on the node that saved them, 6 nowhere",
        "no longer held where they were saved: node-b (2 files), node-c (2 files), node-d (2 files)",
        "no copy anywhere: __1_0.distcp, __1_1.distcp, __2_0.distcp, __2_1.distcp and 2 more",
    ]
    assert describe_assembly(
        assemble(FILES, {"e": files_of(0)}, in_global=True), {}, {"__0_0.distcp": "a"}
    ) == [
        "0 of 8 files on the node that saved them, 2 on peers only, 6 in the global tier only",
        "no longer held where they were saved: a (1 file)",
    ]


# --- properties ---------------------------------------------------------------------------------------------

PATHS = st.sampled_from("uvwxyz")
HELD = st.dictionaries(st.sampled_from("abcde"), st.lists(PATHS, max_size=8))


@settings(max_examples=300, deadline=None)
@given(st.lists(PATHS, unique=True), HELD, st.booleans(), st.randoms())
def test_a_file_has_a_source_exactly_where_one_holds_it(
    files: list[str], held: dict[str, list[str]], in_global: bool, random: Any
) -> None:
    found = assemble(files, held, in_global=in_global)
    assert list(found.sources) == files
    for path in files:
        assert found.sources[path] == sorted(place for place in held if path in held[place])
    assert found.missing == [path for path in files if not found.sources[path] and not in_global]
    assert found.complete == (in_global or all(found.sources.values()))
    answered = list(held.items())
    random.shuffle(answered)
    shuffled = {place: random.sample(paths, len(paths)) for place, paths in answered}
    assert assemble(files, shuffled, in_global=in_global) == found, "in whatever order they answered"


@given(st.lists(PATHS, unique=True, min_size=1), HELD, st.booleans(), st.sampled_from("abcdef"))
def test_the_own_place_comes_first_the_global_tier_last_and_every_peer_is_first_for_somebody(
    files: list[str], held: dict[str, list[str]], in_global: bool, here: str
) -> None:
    found = assemble(files, held, in_global=in_global)
    for path in files:
        peers = [place for place in found.sources[path] if place != here]
        firsts = set()
        for rank in range(12):
            asked = order(found, path, here, rank)
            assert sorted(asked) == sorted(found.sources[path] + [GLOBAL] * in_global), "each once"
            assert (asked[:1] == [here]) == (here in found.sources[path])
            assert (asked[-1:] == [GLOBAL]) == in_global
            firsts.add(next((place for place in asked if place in peers), None))
        assert firsts == set(peers) or not peers
        assert bool(asked) == (path not in found.missing)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 4), st.booleans())
def test_what_replication_covers_can_be_put_together_again_and_only_that(
    ranks: list[int], factor: int, in_global: bool
) -> None:
    """For every layout and every subset of nodes that is lost (A7)."""
    places = [f"{node:012x}" for node, count in enumerate(ranks) for _ in range(count)]
    replication = replicate(places, factor=factor, jump=0)
    files = [f"__{rank}_0.distcp" for rank in range(len(places))]
    held: dict[str, list[str]] = {place: [] for place in places}
    for own, targets, path in zip(places, replication.targets, files, strict=True):
        for place in (own, *targets):
            held[place].append(path)
    for count in range(len(ranks) + 1):
        for lost in combinations(held, count):
            left = {place: paths for place, paths in held.items() if place not in lost}
            found = assemble(files, left, in_global=in_global)
            assert found.complete == (in_global or survives(replication, places, lost))
            assert count >= replication.factor or found.complete


# --- cost ---------------------------------------------------------------------------------------------------


class Counted(list[str]):
    """Says how often its items were looked at."""

    looked = 0

    def __iter__(self) -> Iterator[str]:
        for item in super().__iter__():
            Counted.looked += 1
            yield item


def test_each_claim_is_looked_at_once() -> None:
    """Ten thousand ranks, two copies, four files each: linear, whatever the clock says."""
    files = [f"__{rank}_{shard}.distcp" for rank in range(10_000) for shard in range(4)]
    claims = [Counted(files[at : at + 64]) for at in range(0, len(files), 32)]
    held = {f"{place:012x}": claimed for place, claimed in enumerate(claims)}
    Counted.looked = 0
    assert assemble(files, held, in_global=False).complete
    assert Counted.looked == sum(len(claimed) for claimed in claims)
