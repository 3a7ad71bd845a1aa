"""The meeting of the nodes as a pure state machine: any order of arrivals, ends and rounds."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.policy import placement
from holdfast.policy.placement import Meeting, Member

AGENTS = [f"agent{number}" for number in range(6)]
OPERATIONS = st.one_of(
    st.tuples(st.just("arrive"), st.sampled_from(AGENTS), st.sampled_from(["", "", "", "excluded: sick"])),
    st.tuples(st.just("remove"), st.sampled_from(AGENTS), st.just("")),
    st.tuples(st.just("form"), st.sampled_from(["", "enough"]), st.just("")),
)


def arrive_all(meeting: Meeting, *agents: str) -> Meeting:
    for agent in agents:
        meeting = placement.arrive(meeting, agent, f"node-{agent}")
    return meeting


@settings(max_examples=300)
@given(st.lists(OPERATIONS, max_size=40), st.integers(1, 3), st.integers(0, 3))
def test_whatever_happens_a_round_is_one_that_may_be(
    operations: list[tuple[str, str, str]], low: int, more: int
) -> None:
    high = low + more
    meeting = Meeting()
    for what, who, why in operations:
        before = meeting
        if what == "arrive":
            # One host for all of them: names must still differ.
            meeting = placement.arrive(meeting, who, "host", unfit=why)
        elif what == "remove":
            meeting = placement.remove(meeting, {who: "lost"})
        else:
            formed = placement.form(meeting, min_nodes=low, max_nodes=high, enough=who == "enough")
            if formed is None:
                continue
            meeting = formed
            chosen = [m.agent for m in meeting.members]
            assert meeting.round == before.round + 1
            assert low <= len(chosen) <= high
            assert len(set(chosen)) == len(chosen)
            assert not set(chosen) & set(meeting.gone)
            assert not set(chosen) & set(meeting.here)
            assert all(not m.unfit for m in meeting.members)
            assert not placement.awaited(before), "everybody of the round before was back or gone"
            assert len(chosen) == high or who == "enough"
        names = [m.node for m in [*meeting.here.values(), *meeting.members] if m.agent not in meeting.gone]
        by_agent = {m.agent: m.node for m in [*meeting.here.values(), *meeting.members]}
        assert len({by_agent[agent] for agent in by_agent if agent not in meeting.gone}) == len(
            {agent for agent in by_agent if agent not in meeting.gone}
        ), names
        assert not set(meeting.here) & set(meeting.gone)
        assert msgspec.json.decode(msgspec.json.encode(meeting), type=Meeting) == meeting


@settings(max_examples=200)
@given(st.lists(OPERATIONS, max_size=30), st.integers(1, 3))
def test_if_the_living_come_back_and_suffice_the_round_forms(
    operations: list[tuple[str, str, str]], low: int
) -> None:
    meeting = Meeting()
    for what, who, why in operations:
        if what == "arrive":
            meeting = placement.arrive(meeting, who, who, unfit=why)
        elif what == "remove":
            meeting = placement.remove(meeting, {who: "lost"})
        else:
            meeting = placement.form(meeting, min_nodes=low, max_nodes=6, enough=True) or meeting
    living = [agent for agent in AGENTS if agent not in meeting.gone]
    for agent in living:
        meeting = placement.arrive(meeting, agent, agent)
    meeting = placement.remove(meeting, {agent: "lost" for agent in AGENTS if agent not in living})
    formed = placement.form(meeting, min_nodes=low, max_nodes=6, enough=True)
    assert (formed is not None) == (len(living) >= low)


def test_old_members_keep_their_order_and_spares_come_after_them() -> None:
    meeting = arrive_all(Meeting(), "b", "a", "c", "d")
    first = placement.form(meeting, min_nodes=3, max_nodes=3, enough=False)
    assert first is not None
    assert [m.agent for m in first.members] == ["b", "a", "c"]
    assert [m.agent for m in placement.spares(first)] == ["d"]
    assert "spare" in placement.parked(first, "d")
    again = arrive_all(placement.remove(first, {"b": "killed"}), "c", "a")
    second = placement.form(again, min_nodes=3, max_nodes=3, enough=False)
    assert second is not None
    assert [m.agent for m in second.members] == ["a", "c", "d"]
    assert placement.spares(second) == []


def test_a_round_waits_for_its_old_members_even_if_there_are_enough_others() -> None:
    """Else a node that only takes longer to end its workers would lose its place to a spare."""
    first = placement.form(arrive_all(Meeting(), "a", "b"), min_nodes=2, max_nodes=2, enough=False)
    assert first is not None
    meeting = arrive_all(first, "a", "c")
    assert placement.form(meeting, min_nodes=2, max_nodes=2, enough=True) is None
    assert [m.agent for m in placement.awaited(meeting)] == ["b"]


def test_who_was_declared_gone_cannot_come_back_under_the_same_name() -> None:
    meeting = placement.remove(arrive_all(Meeting(), "a"), {"a": "silent"})
    assert arrive_all(meeting, "a") == meeting
    assert arrive_all(meeting, "b").here["b"].node == "node-b"


def test_nobody_joins_what_is_over_and_the_first_word_counts() -> None:
    meeting = placement.finish(placement.finish(arrive_all(Meeting(), "a"), 0, "finished"), 1, "failed")
    assert meeting.over == placement.Over(code=0, why="finished")
    assert arrive_all(meeting, "b") == meeting
    assert placement.form(meeting, min_nodes=1, max_nodes=1, enough=True) is None


def test_ranks_follow_the_order_of_the_nodes_by_role() -> None:
    members = [
        Member(agent="a", node="a", ticket=1, slots=2, role="trainer"),
        Member(agent="b", node="b", ticket=2, slots=1, role="reader"),
        Member(agent="c", node="c", ticket=3, slots=3, role="trainer"),
    ]
    ranks = placement.ranks_of(members, 2)
    assert (ranks.first, ranks.world_size, ranks.first_of_role, ranks.role_world_size) == (3, 6, 2, 5)
