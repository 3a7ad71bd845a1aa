"""The agreement on where to stop, and its policy: pretended ranks in every order, without processes."""

from __future__ import annotations

import functools
import random
import re
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import HashStore

from holdfast.errors import DecisionTimeoutError
from holdfast.policy.requests import (
    MARGIN,
    MOST_MARGIN,
    REPEATED,
    Agreed,
    Grace,
    Promised,
    Source,
    StopRequest,
    agree,
    closer_by,
    deadline,
    does_not_fit,
    grace_of,
    is_repeated,
    say_grace,
    sooner,
    stop_step,
)
from holdfast.stop.agreement import Alone, Board, LastStep, OverStore, RankStop, StopAgreement
from kit.harness import wait_until

LIMIT = 60.0

# --- the policy -------------------------------------------------------------------------------------------

seconds = st.floats(0, 1e7, allow_nan=False)


@given(seconds, st.none() | st.floats(-1e4, 1e7))
def test_the_deadline_is_the_shorter_of_the_setting_and_the_schedulers_lead(
    timeout: float, lead: float | None
) -> None:
    """E1: min(shutdown_timeout_sec, the scheduler's lead − margin); 0 is no limit of ours."""
    found = deadline(timeout, lead)
    assert found.why
    if lead is not None and lead <= 0:
        assert found == deadline(timeout, None), "at its limit Slurm sends SIGTERM and leaves KillWait"
        return
    if timeout == 0 and lead is None:
        assert found.seconds is None
        return
    assert found.seconds is not None
    assert found.seconds >= 0
    if timeout > 0:
        assert found.seconds <= timeout
    if lead is not None:
        assert found.seconds <= lead
        assert found.seconds <= max(lead - MARGIN, lead * (1 - MOST_MARGIN))
    assert found.seconds in (timeout, max((lead or 0) - MARGIN, (lead or 0) * (1 - MOST_MARGIN)))


@given(st.none() | seconds, st.none() | st.floats(-1e4, 1e7))
def test_a_deadline_only_ever_comes_closer(left: float | None, lead: float | None) -> None:
    found = sooner(left, lead)
    if found is None:
        assert lead is None or lead <= 0 or left is not None
        return
    assert found.seconds is not None
    assert lead is not None
    assert found == deadline(0.0, lead)
    assert left is None or found.seconds < left
    assert sooner(found.seconds, lead) is None, "it is told once"


@pytest.mark.parametrize(
    ("grace", "save", "told"),
    [
        (grace_of(5.0, 0.0, "low"), 12.0, r"5 s .*\(KillWait\).*took 12.0 s: it does not fit"),
        (grace_of(5.0, None, "low"), 4.5, "does not fit"),
        (grace_of(5.0, None, "low"), 3.0, "3.0 s and fits"),
        (grace_of(5.0, 60.0, "low"), 12.0, r"60 s .*\(GraceTime of partition low\).*and fits"),
        (grace_of(5.0, 0.0, "low"), None, "no save was measured yet"),
    ],
)
def test_the_start_says_whether_a_save_fits(grace: Grace | None, save: float | None, told: str) -> None:
    assert grace is not None
    assert re.search(told, say_grace(grace, save))
    assert does_not_fit(grace, save) == ("not fit" in told)


def test_what_a_stop_promises_is_not_more_than_slurm_leaves() -> None:
    """It is not known at once whether Slurm sent the signal; both are named."""
    term = StopRequest(source=Source.SIGNAL, detail="SIGTERM to rank 0", signal="SIGTERM")
    killed = Grace(5.0, "KillWait")
    limit = deadline(600.0, None)
    assert closer_by(killed, term, limit) == "; within 4 s if it is Slurm that ends the job (KillWait = 5 s)"
    assert not closer_by(None, term, limit)
    assert not closer_by(killed, term, deadline(3.0, None))
    assert not closer_by(killed, msgspec.structs.replace(term, signal="SIGUSR1"), limit)
    assert grace_of(None, 0.0, "low") is None


@given(st.lists(st.integers(0, 10**9), min_size=1))
def test_no_rank_is_past_the_step_that_is_named(promises: list[int]) -> None:
    step = stop_step(promises)
    assert step in promises
    assert all(promise <= step for promise in promises)


@given(st.floats(0, 1e9), st.floats(0, 1e6))
def test_a_later_signal_is_a_new_request_for_ever(first: float, more: float) -> None:
    assert is_repeated(first, first + REPEATED * 0.9)
    assert not is_repeated(first, first + REPEATED * 1.1 + more)


# --- the agreement: pretended ranks, in every order -------------------------------------------------------


class PretendedRank:
    """A rank's loop and its thread, cut into the moves between which another's may come."""

    def __init__(self, begin_at: int) -> None:
        self.counter = begin_at
        self.first = begin_at
        self.begun = False
        self.raised = True
        """Whether the counter was raised and `asked` not yet read."""
        self.stopped: int | None = None
        self.promise: int | None = None
        self.meanwhile: Iterator[None] = iter(())
        self.stopping = LastStep(self._read)

    def _read(self) -> int:
        """Where the thread has set `asked` and is about to read the counter: the loop may move here too."""
        next(self.meanwhile, None)
        value = self.counter
        next(self.meanwhile, None)
        return value

    def raise_counter(self) -> None:
        self.counter += 1
        self.raised = True

    def look(self) -> bool:
        """The boundary: True if the loop got past it, to begin a step or to stop; False if it has to wait."""
        if not self.begun:
            self.stopping.begin()
        if self.stopping.asked:
            try:
                if self.stopping.reached(self.counter, 0.0):
                    self.stopped = self.counter
                    return True
            except DecisionTimeoutError:
                return False
        self.begun = True
        self.raised = False
        return True


class PretendedWorld:
    """Ranks that meet in a collective in every step: none completes a step that another will not do."""

    def __init__(self, size: int, begin_at: int) -> None:
        self.ranks = [PretendedRank(begin_at) for _ in range(size)]

    def move(self, index: int, kind: int, extra: int) -> None:
        rank = self.ranks[index % len(self.ranks)]
        if kind == 0:
            self.loop(rank)
        elif kind == 1 and rank.promise is None:
            # The loop's moves fall between the two reads and writes of its own thread.
            moves = [extra & 1, extra & 2]
            rank.meanwhile = self.amid(rank, moves)
            rank.promise = rank.stopping.prepare("asked")
        elif kind == 2:
            self.name_step(rank)

    def amid(self, rank: PretendedRank, moves: list[int]) -> Iterator[None]:
        for wanted in moves:
            if wanted:
                self.raise_amid(rank)
            yield

    def raise_amid(self, rank: PretendedRank) -> None:
        """While its thread holds the lock, a loop can complete a step, and begin one if nobody has asked."""
        if rank.stopped is None and not rank.raised and self.all_in(rank.counter + 1):
            rank.raise_counter()
        if rank.raised and not rank.stopping.asked:
            rank.look()

    def loop(self, rank: PretendedRank) -> None:
        if rank.stopped is not None:
            return
        if rank.raised:
            rank.look()
        elif self.all_in(rank.counter + 1):
            rank.raise_counter()

    def all_in(self, step: int) -> bool:
        """Whether every rank has begun this step, or done it: the collective comes to its end."""
        return all(
            other.counter >= step or (other.counter == step - 1 and not other.raised) for other in self.ranks
        )

    def name_step(self, rank: PretendedRank) -> None:
        promises = [other.promise for other in self.ranks]
        if None not in promises:
            rank.stopping.agreed(stop_step([p for p in promises if p is not None]))


@given(
    size=st.integers(1, 4),
    begin_at=st.sampled_from([0, 120]),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), max_size=80),
)
@example(size=2, begin_at=0, moves=[(0, 0, 0), (1, 0, 0), (0, 1, 1)])
@example(size=2, begin_at=0, moves=[(0, 0, 0), (1, 0, 0), (0, 1, 2)])
def test_all_ranks_stop_after_the_same_step_whoever_moves_first(
    size: int, begin_at: int, moves: list[tuple[int, int, int]]
) -> None:
    """Lightning#20806: a request that ranks see at different times; no deadlock, no two different steps."""
    world = PretendedWorld(size, begin_at)
    for move in moves:
        world.move(*move)
    for rank in world.ranks:  # from here on everything that can happen does
        if rank.promise is None:
            rank.meanwhile = iter(())
            rank.promise = rank.stopping.prepare("asked")
    most = max(rank.counter for rank in world.ranks)
    for _ in range(200):
        for rank in world.ranks:
            world.loop(rank)
            world.name_step(rank)
    stopped = {rank.stopped for rank in world.ranks}
    assert len(stopped) == 1, f"ranks stopped after {stopped}"
    (step,) = stopped
    assert step is not None, "a rank waits for ever"
    assert most <= step <= most + 1


def test_ranks_on_threads_stop_together_whenever_they_are_asked() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        size = chance.choice([1, 2, 3])
        counters = [0] * size
        stoppings = [LastStep(functools.partial(counters.__getitem__, rank)) for rank in range(size)]
        meet = threading.Barrier(size)
        stopped: dict[int, int] = {}

        def loop(
            rank: int,
            stoppings: list[LastStep] = stoppings,
            counters: list[int] = counters,
            meet: threading.Barrier = meet,
            stopped: dict[int, int] = stopped,
        ) -> None:
            stoppings[rank].begin()
            while not (stoppings[rank].asked and stoppings[rank].reached(counters[rank], LIMIT)):
                meet.wait(LIMIT)
                counters[rank] += 1
            stopped[rank] = counters[rank]

        threads = [threading.Thread(target=loop, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        time.sleep(chance.random() * 0.005)
        promises = []
        for stopping in stoppings:
            promises.append(stopping.prepare("asked"))
            time.sleep(chance.random() * 0.002)
        for stopping in stoppings:
            stopping.agreed(stop_step(promises))
        for thread in threads:
            thread.join(LIMIT)
        assert set(stopped) == set(range(size))
        assert len(set(stopped.values())) == 1


def test_a_rank_that_never_learns_the_step_does_not_choose_one() -> None:
    stopping = LastStep(lambda: 7)
    stopping.begin()
    assert stopping.prepare("SIGTERM") == 8
    assert stopping.prepare("again") == 8
    assert not stopping.reached(7, 0.0)
    with pytest.raises(DecisionTimeoutError, match=r"SIGTERM.*after step 8"):
        stopping.reached(8, 0.02)


def parties(count: int, board: Board | None = None) -> list[StopAgreement[StopRequest]]:
    board = board or OverStore(HashStore())
    return [StopAgreement(board, party, count, StopRequest) for party in range(count)]


@given(st.permutations(range(4)), st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_the_first_request_counts_and_the_step_is_named_once_all_have_promised(
    order: list[int], promises: list[int]
) -> None:
    """Whoever moves first: the rule of the agreement, which ranks and agents share."""
    found = parties(4)
    asked = [StopRequest(source=Source.SIGNAL, detail=f"SIGTERM to {party}") for party in order]
    assert [found[party].ask(mine) for party, mine in zip(order, asked, strict=True)] == [asked[0]] * 4
    for party in order:
        assert all(one.named() is None for one in found), f"{party} has not promised"
        found[party].say(Promised(step=promises[party]))
    assert [one.named() for one in found[1:]] == [None] * 3, "party 0 names it"
    assert [one.named() for one in found] == [Agreed(step=max(promises))] * 4
    found[order[0]].say(Promised(step=99))
    assert [one.named() for one in found] == [Agreed(step=max(promises))] * 4


def test_a_party_that_is_gone_is_not_waited_for_and_has_no_say() -> None:
    leader, lost, other, silent = parties(4, Alone())
    leader.say(Promised(step=3))
    lost.say(Promised(step=9))
    assert leader.named() is None
    assert leader.silent(8) == silent.silent(8)[-2:] == [2, 3]
    other.say(Promised(step=4))
    assert leader.named({1: "it is cut off"}) is None
    assert leader.named({1: "it is cut off", 3: "it too"}) == other.named() == Agreed(step=4)


def test_a_party_that_is_alone_asks_promises_and_names_by_itself() -> None:
    alone = StopAgreement(None, 0, 1, StopRequest)
    asked = StopRequest(source=Source.STOP_FILE, detail="a file \udcff", at=time.time(), lead=0.1)
    assert alone.ask(None) is None
    assert alone.ask(asked) == asked
    assert alone.named() is None
    alone.say(Promised(step=0, mute=1))
    assert alone.named() == agree([Promised(step=0, mute=1)])


def test_each_sooner_end_is_learnt_once() -> None:
    leader, other = parties(2)
    for seconds in (20.0, 10.0):
        assert other.sooner(float) is None
        leader.hasten(seconds)
        assert other.sooner(float) == seconds
    assert (leader.hastened, other.hastened) == (2, 2)


@pytest.mark.parametrize(("rank", "named"), [(0, "rank 2"), (1, "rank 0")])
def test_a_rank_that_never_promises_is_named_after_a_bounded_wait(rank: int, named: str) -> None:
    """Of three ranks one is gone, and nobody else would end those that wait for it."""
    told: list[str] = []
    agreed: list[int] = []
    store = HashStore()
    store.set(f"stop/word/{1 if rank == 0 else 2}", '{"step":7}')
    over = RankStop(
        LastStep(lambda: 6),
        store,
        rank,
        3,
        heard=lambda request: None,
        agreed=agreed.append,
        unanswered=told.append,
        hastened=lambda seconds: None,
        every=0.01,
        answers=0.2,
    )
    over.wish(StopRequest(source=Source.SIGNAL, detail="SIGTERM"))
    wait_until(lambda: told, LIMIT, "it is told who did not answer")
    over.close(6, failed=True)
    assert told == [f"{named} did not answer within 0.2 s"]
    assert not agreed


class CountingStore(HashStore):
    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return bool(super().check(keys))


def test_what_rank_0_learns_of_the_jobs_end_is_minded_by_all() -> None:
    told: list[float] = []
    store = HashStore()
    over = [
        RankStop(
            LastStep(lambda: 6),
            store,
            rank,
            2,
            heard=lambda request: None,
            agreed=lambda step: None,
            unanswered=lambda who: None,
            hastened=told.append,
            every=0.01,
        )
        for rank in (0, 1)
    ]
    over[1].wish(StopRequest(source=Source.SIGNAL, detail="SIGTERM"))
    over[0].hasten(20.0)
    assert told == [20.0], "rank 0 minds it at once"
    wait_until(lambda: told[1:], LIMIT, "rank 1 is told")
    for one in over:
        one.close(6)
    assert [round(seconds) for seconds in told] == [20, 20]


def test_the_one_rank_of_thousands_that_does_not_answer_is_found_in_few_questions() -> None:
    """Every rank looks for it, in a store that all of them ask at once."""
    told: list[str] = []
    store = CountingStore()
    for rank in range(2000):
        if rank != 1500:
            store.set(f"stop/word/{rank}", '{"step":7}')
    over = RankStop(
        LastStep(lambda: 6),
        None,
        1,
        2000,
        heard=lambda request: None,
        agreed=lambda step: None,
        unanswered=told.append,
        hastened=lambda seconds: None,
    )
    over.close(6, failed=True)
    agreement = StopAgreement(OverStore(store), 1, 2000, StopRequest)
    assert over._who_is_missing(agreement).startswith("rank 1500 did not answer")
    assert store.asked < 300
