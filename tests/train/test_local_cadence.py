"""Local saves as often as their cost allows, down to every step: the same steps on all ranks, little lost."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

import holdfast
from holdfast.checkpoint.copies import tier
from holdfast.checkpoint.format import CheckpointName
from holdfast.journal.events import CadenceChosen, CopyReplicated, Resumed, SaveCommitted
from holdfast.journal.reader import read_journal
from holdfast.journal.writer import JournalWriter
from holdfast.record.decisions import Decisions
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, claim
from holdfast.train.schedule import LocalMeter, Measured, SaveSchedule
from kit.nodes.local_tier import memory
from kit.ranks.local_ranks import AtStep, Nodes

EVERY_STEP = {
    "checkpoint_non_persistent_save_interval": "auto",
    "checkpoint_non_persistent_save_share": 0.5,  # two ranks share a core or two with other tests
    "checkpoint_interval": 0,
    "checkpoint_save_at_end": False,
}
STEP = 0.1
"""Seconds that a step takes at least."""


def killed_in(step: int, after: float) -> AtStep:
    """Killed that many seconds after the step began."""

    def at_step(now: int, run: holdfast.Run) -> None:
        if now == step:
            threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        time.sleep(STEP)

    return at_step


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with memory() as where:
        found = Nodes(tmp_path / "nodes", where)
        found.shared.mkdir()
        yield found


def reference(nodes: Nodes, until: int) -> dict[int, list[str]]:
    """What the steps give if nothing disturbs them."""
    plain = nodes.copy("reference")
    settings = {"checkpoint_async_save": False, "checkpoint_non_persistent_ckpt_type": "none"}
    assert plain.train(["a", "b"], until, checkpoint_interval=0, **settings) == [0, 0]
    return plain.steps()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.drill) for seed in range(2, 8))])
def test_whoever_is_killed_at_any_moment_loses_two_steps_at_most(nodes: Nodes, seed: int) -> None:
    """A save at every step, and SIGKILL to both ranks at a random moment of a random step."""
    chance, until = random.Random(seed), 34
    wanted = reference(nodes, until)
    end = killed_in(22 + chance.randrange(10), chance.uniform(0.0, STEP))
    codes = nodes.train(["a", "b"], until, at_step={0: end, 1: end}, **EVERY_STEP)
    assert codes == [-signal.SIGKILL] * 2
    done, chosen = max(nodes.steps()), nodes.events(CadenceChosen)
    assert nodes.train(["a", "b"], until, **EVERY_STEP) == [0, 0]
    begin = nodes.events(Resumed)[-1].step
    every = chosen[-1].interval  # 1, unless others take so much of the machine that a commit outlasts a step
    assert done - every - 1 <= begin <= done, f"{done} steps done, resumed from {begin}: {chosen}"
    assert nodes.steps() == wanted
    assert {event.tier for event in chosen} == {"local"}
    assert chosen[0].interval == 5
    assert every < 5


@pytest.mark.drill
def test_a_lost_node_costs_no_more_than_the_steps_since_the_last_replica(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending takes as long as many steps. No two ranks send different checkpoints, and what was sent last is
    kept by those that saved it, so it is whole when a node is gone with all its newer copies."""
    from holdfast.train import saves

    monkeypatch.setattr(saves, "LOOK", 0.01)
    wanted = reference(nodes, 40)
    monkeypatch.setattr(saves, "confirmed_replicas", slow_network())
    end = killed_in(34, STEP / 2)
    codes = nodes.train(["a", "b"], 40, at_step={0: end, 1: end}, **EVERY_STEP)
    assert codes == [-signal.SIGKILL] * 2
    replicated = {event.step for event in nodes.events(CopyReplicated)}
    committed = {event.step for event in nodes.events(SaveCommitted)}
    assert max(committed) - max(replicated) >= 4, "there are newer ones that only their own nodes have"
    nodes.lose("b")
    assert nodes.train(["a", "c"], 40, **EVERY_STEP) == [0, 0]
    assert nodes.events(Resumed)[-1].step in replicated
    assert nodes.events(Resumed)[-1].step >= sorted(replicated)[-2]
    assert nodes.steps() == wanted


def slow_network() -> Callable[..., int]:
    """As if all replicas were there only a while after they really are."""
    seen: dict[str, float] = {}

    def confirmed(control: ControlDirectory, name: CheckpointName) -> int:
        found = tier.confirmed_replicas(control, name)
        return found if time.monotonic() > seen.setdefault(str(name), time.monotonic()) + 0.8 else 0

    return confirmed


# --- one rank's view ----------------------------------------------------------------------------------------


class Rank:
    """One rank's schedule, with what it needs around it."""

    def __init__(self, control: ControlDirectory, fence: Fence, store: HashStore, number: int) -> None:
        self.leads = number == 0
        self.journal = JournalWriter(control.journal, f"rank-{number}", 1)
        self.schedule = SaveSchedule(0, 0.0, "auto", 0.05)
        self.decisions, self.store = Decisions(control, fence, 1, store), store

    def start(self, step: int, earlier: Measured | None = None) -> None:
        self.schedule.start(
            step,
            leads=self.leads,
            earlier=lambda: earlier or Measured(),
            store=self.store,
            decisions=self.decisions,
            journal=self.journal,
            timeout=5.0,
        )


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    fence, store = Fence(control, claim(control, "launch", 5.0).epoch), HashStore()
    both = [Rank(control, fence, store, number) for number in range(2)]
    yield both
    for rank in both:
        rank.journal.close()


def live(
    ranks: list[Rank], steps: int, *, take: float, blocked: float, commit: float, begin: int = 0
) -> list[int]:
    """The steps at which all save, as their schedules and one exchange in each save have it."""
    saved, ends = [], 0
    for step in range(begin + 1, begin + steps + 1):
        time.sleep(take)
        if ends and step >= ends:  # it was committed during the step
            ranks[0].schedule.ended(local_only=True, blocked=blocked, commit=commit)
            ends = 0
        due = {rank.schedule.due(step) for rank in ranks}
        assert len(due) == 1, f"step {step}: {due}"
        if due == {"local"}:
            saved.append(step)
            said = sum(rank.schedule.word() for rank in ranks)
            ranks[0].schedule.begun(local_only=True, nbytes=1000)
            ends = step + 1
            for rank in ranks:
                rank.schedule.heard(said)
                rank.schedule.after_save(step, [], "local")
    return saved


def test_ranks_save_locally_at_the_same_steps_without_asking_the_store(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.start(0)
    keys = ranks[0].store.num_keys()
    saved = live(ranks, 60, take=0.005, blocked=0.0001, commit=0.002)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0, *saved])]
    assert gaps[0] == gaps[1] == 5, "a few steps at first"
    assert gaps[-8:].count(1) >= 7, "then every step, and now and then one without a save beside it"
    assert max(gaps[8:]) <= 2
    assert ranks[0].store.num_keys() == keys


def test_dear_saves_become_rarer_and_cheap_ones_frequent_again(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.start(0)
    first = live(ranks, 30, take=0.005, blocked=0.0001, commit=0.002)
    dear = live(ranks, 120, take=0.005, blocked=0.004, commit=0.004, begin=30)
    cheap = live(ranks, 400, take=0.002, blocked=0.00001, commit=0.001, begin=150)
    assert first[-1] - first[-2] <= 2
    assert dear[-1] - dear[-2] >= 10
    assert cheap[-1] - cheap[-2] <= 2


def test_a_restart_goes_on_with_the_interval_of_the_attempt_before(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.start(100, Measured(local_interval=3))
        assert rank.schedule.next_local == 103
    (told,) = (
        line.body
        for line in read_journal(ranks[0].journal.path.parent)
        if isinstance(line.body, CadenceChosen)
    )
    assert (told.interval, told.tier) == (3, "local")
    assert "as the attempt before chose" in told.evidence[0]


def test_a_save_that_says_nothing_leaves_the_interval(ranks: list[Rank]) -> None:
    """It failed before the ranks met in it."""
    for rank in ranks:
        rank.start(0)
        rank.schedule.heard(0)
        rank.schedule.after_save(5, [], "local")
        assert rank.schedule.next_local == 10


def test_a_save_to_the_root_serves_the_local_tier_and_its_interval_begins_anew(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.start(0)
        rank.schedule.after_save(3, [], "global")
        assert rank.schedule.next_local == 8


def test_saves_that_pile_up_count_as_long_as_they_have_been_under_way() -> None:
    meter = LocalMeter(0.01)
    meter.start(1)
    for _ in range(6):
        meter.stepped()
        meter.mark()
    for _ in range(2):
        meter.begun(local_only=True, nbytes=1)
        meter.ended(local_only=True, blocked=0.001, commit=0.002)
    costs = meter.costs()
    assert costs is not None
    assert costs.commit == 0.002
    meter.begun(local_only=True, nbytes=1)
    meter.begun(local_only=True, nbytes=1)
    time.sleep(0.05)
    costs = meter.costs()
    assert costs is not None
    assert costs.commit >= 0.05


def test_a_failed_save_and_the_first_of_a_process_are_no_measure() -> None:
    meter = LocalMeter(0.01)
    meter.start(1)
    for _ in range(6):
        meter.stepped()
        meter.mark()
    meter.begun(local_only=True, nbytes=1)
    meter.ended(local_only=True, blocked=9.0, commit=9.0)
    meter.begun(local_only=True, nbytes=1)
    meter.ended(local_only=True, blocked=5.0)
    assert meter.costs() is None
    meter.begun(local_only=True, nbytes=1)
    meter.ended(local_only=True, blocked=0.001, commit=0.002)
    costs = meter.costs()
    assert costs is not None
    assert costs.blocked == 0.001


def test_steps_beside_a_save_to_the_root_say_nothing() -> None:
    meter = LocalMeter(0.01)
    meter.start(1)
    meter.begun(local_only=False, nbytes=1)
    meter.mark()
    for _ in range(8):
        meter.stepped()
        meter.mark()
    assert not meter._clear
    assert not meter._beside
    meter.ended(local_only=False, commit=1.0)
    meter.mark()
    meter.stepped()
    assert len(meter._clear) == 1
