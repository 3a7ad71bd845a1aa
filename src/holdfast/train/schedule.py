"""When the next scheduled save is due: at the same steps on every rank.

A fixed interval needs no agreement. With "auto" rank 0 chooses (policy/upkeep.py) and the others follow: at
the start through a durable decision, made from what earlier attempts measured; and again right after every
scheduled save, where the ranks are together anyway, through one key of the store. Between saves nothing is
exchanged and the loop compares one integer.

Saves to the local tier have their own interval. Where both are due, one save serves both. With "auto" that
interval too is rank 0's choice, from what local saves cost training beside it; the others hear of it in the
exchange that every save makes anyway, so that it costs nothing, however often it is. Steps that do not save
exchange nothing.

What earlier attempts measured is read once, by rank 0, at an attempt's start. Reading it never fails: what
cannot be read is reported and left out, because a run must not end for want of an estimate. Only the ends of
the newest journals are read, so a long history costs no more than a short one.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from holdfast.base import plural
from holdfast.errors import ControlError
from holdfast.journal import REPORTER, Event, JournalLine, JournalWriter, read_tail
from holdfast.journal.events import CadenceChosen, SaveCommitted, StepsDone, Warned
from holdfast.policy import (
    AUTO,
    DEFAULT_RESTART,
    GROWTH,
    LOCAL_PROBE_STEPS,
    LOCAL_SHARE,
    NOTABLE_CHANGE,
    PROBE_STEPS,
    Cadence,
    Costs,
    LocalCosts,
    LocalPace,
    choose_interval,
    choose_local,
    concerns,
    mtbf_of,
    slowdown_of,
)
from holdfast.record import (
    AttemptRecord,
    ControlDirectory,
    Decisions,
    DecisionStore,
    EndRecord,
    HeadRecord,
    ends_of,
    read_key,
    read_record,
    within,
)

log = logging.getLogger("holdfast")

NEVER = sys.maxsize
RECENT_SAVES = 9
"""How many saves the median is taken of: a process's first is often slower than the rest."""
ENOUGH_SAVES = 3
"""How many saves it takes before their cost is complained about."""
ENOUGH_STEPS = 5
"""How many steps of this attempt it takes before those of earlier attempts are left out."""
ATTEMPTS_READ = 3
TAIL_BYTES = 256 * 1024
RECENT_STEPS = 64
LOCAL_STEPS = 16
"""How many steps of each kind, beside a local save and without one, are compared."""
LOOK_AGAIN = 32
"""After so many local saves without a step that had none beside it, one is made a step later."""
_OTHER_RANK = re.compile(r"-rank-[1-9][0-9]*-[0-9]+\.jsonl$")


@dataclass
class Measured:
    """What a run's earlier attempts measured; empty if it has none."""

    steps: list[float] = field(default_factory=list)
    """Seconds of recent steps."""
    local_interval: int = 0
    """Steps between local saves, as chosen last; 0 if none was."""
    saves: list[tuple[float, float]] = field(default_factory=list)
    """Recent saves to the root: seconds for which training was held up, and seconds to the commit."""
    running: float = 0.0
    """Seconds that all attempts ran together."""
    failures: int = 0
    restart: float = 0.0
    """Seconds from the last failure until now, if this launch restarted by itself; else 0."""
    problems: list[str] = field(default_factory=list)


class CadenceDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Made once per attempt, before any rank trains."""

    interval: int
    evidence: list[str]
    local: int = 0
    """Steps until the first local save, where that is chosen; else 0."""


class LocalMeter:
    """What local saves cost, as rank 0 sees it, and the interval that follows from that."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._pace = LocalPace(interval=LOCAL_PROBE_STEPS)
        self._saves: deque[tuple[float, float]] = deque(maxlen=RECENT_SAVES)
        self._seen = 0
        """Local saves that were committed in this attempt."""
        self._under_way: deque[tuple[float, float]] = deque()
        """Of those not known to have ended: when they began, and for how long they held the loop up."""
        self._drains = 0
        """Saves to the root that are under way: the steps beside them say nothing about local saves."""
        self._clear: deque[float] = deque(maxlen=LOCAL_STEPS)
        self._beside: deque[float] = deque(maxlen=LOCAL_STEPS)
        self._since_clear = 0
        """How many local saves were made since there was a step without one beside it."""
        self._nbytes = 0
        self._asked: float | None = None
        """When the local save began that the loop is in; None if it is in none."""
        self._mark = 0.0
        self._kind: deque[float] | None = None
        """Which of the two the step that is being done belongs to; None: neither."""

    @property
    def interval(self) -> int:
        return self._pace.interval

    def start(self, earlier: int) -> int:
        """How many steps until the first save; `earlier`: the interval that the last attempt had chosen."""
        self._pace = LocalPace(interval=earlier or LOCAL_PROBE_STEPS)
        self.mark()
        return self._pace.interval

    # --- what is measured -----------------------------------------------------------------------------------

    def stepped(self) -> None:
        """A step is done, and whatever belongs to it."""
        now = time.perf_counter()
        if self._kind is not None:
            self._kind.append(now - self._mark)
        if self._kind is self._clear:
            self._since_clear = 0

    def mark(self) -> None:
        """The next step begins."""
        self._kind = None
        if not self._drains:
            self._kind = self._beside if self._under_way else self._clear
        self._mark = time.perf_counter()

    def made(self) -> None:
        """The save that was due is made, as far as the loop waits for it."""
        if self._asked is not None and self._under_way:
            began, _ = self._under_way.pop()
            self._under_way.append((began, time.perf_counter() - self._mark))
        self._asked = None

    def begun(self, *, local_only: bool, nbytes: int) -> None:
        if local_only:
            self._nbytes = nbytes
            self._since_clear += 1
            self._asked = time.monotonic()
            self._under_way.append((self._asked, 0.0))
        else:
            self._drains += 1

    def ended(self, *, local_only: bool, blocked: float = 0.0, commit: float = 0.0) -> None:
        """`commit`: seconds to the commit; 0 if the save failed."""
        if not local_only:
            self._drains = max(0, self._drains - 1)
            return
        held = self._under_way.popleft()[1] if self._under_way else 0.0
        if commit:
            self._seen += 1
            if self._seen > 1:  # the first of a process pays for the plan, the proof and the memory
                self._saves.append((max(held, blocked), commit))

    # --- what follows ---------------------------------------------------------------------------------------

    def next(self) -> tuple[int, CadenceChosen | None]:
        """Steps until the local save after the one that is now due; an event if the interval is another."""
        chosen = self._choose()
        event = None
        if chosen is not None and chosen[0] != self._pace.interval:
            event = chosen[1]
        if chosen is not None:
            self._pace = chosen[2]
        few = len(self._clear) < ENOUGH_STEPS
        again = self._since_clear >= (2 if few else LOOK_AGAIN)
        return self._pace.interval + again, event

    def _choose(self) -> tuple[int, CadenceChosen, LocalPace] | None:
        costs = self.costs()
        if costs is None:
            return None
        found = choose_local(costs, self._share, self._pace)
        every = found.pace.interval
        event = CadenceChosen(
            interval=every,
            seconds=every * costs.step,
            overhead=found.share,
            mtbf=0.0,
            evidence=found.evidence,
            tier="local",
        )
        return every, event, found.pace

    def costs(self) -> LocalCosts | None:
        """None as long as too little is known."""
        steps = self._clear if len(self._clear) >= ENOUGH_STEPS else [*self._clear, *self._beside]
        if len(steps) < ENOUGH_STEPS or not self._saves:
            return None
        commit = median(commit for _, commit in self._saves)
        if len(self._under_way) > 1:  # they are piling up
            commit = max(commit, time.monotonic() - self._under_way[0][0])
        return LocalCosts(
            step=median(steps),
            blocked=median(blocked for blocked, _ in self._saves),
            slowdown=slowdown_of(self._beside, self._clear),
            commit=commit,
            nbytes=self._nbytes,
        )


class SaveSchedule:
    """One rank's view of when to save."""

    def __init__(
        self,
        interval: int | Literal["auto"],
        mtbf_hours: float,
        local_interval: int | Literal["auto"] = 0,
        local_share: float = LOCAL_SHARE,
    ) -> None:
        self.next_step = NEVER
        """The step after which the next scheduled save to the checkpoint root is due."""
        self.next_local = NEVER
        """The step after which the next scheduled save to the local tier is due."""
        self._auto_local = local_interval == AUTO
        self._local_interval = local_interval if isinstance(local_interval, int) else 0
        self._local = LocalMeter(local_share)
        self._auto = interval == AUTO
        self._interval = interval if isinstance(interval, int) else 0
        self._given_mtbf = mtbf_hours * 3600
        self._saves: deque[tuple[float, float]] = deque(maxlen=RECENT_SAVES)
        self._noted = 0
        """How many saves of this attempt were noted."""
        self._earlier = Measured()
        self._began = time.monotonic()
        self._leads = False
        self._store: DecisionStore | None = None
        self._timeout = 0.0
        self._journal: JournalWriter | None = None
        self._serial = 0
        self._told = 0
        self._concerns: set[str] = set()

    def start(
        self,
        step: int,
        *,
        leads: bool,
        earlier: Callable[[], Measured],
        store: DecisionStore,
        decisions: Decisions,
        journal: JournalWriter,
        timeout: float,
    ) -> None:
        """The run is at `step` and about to train. `earlier` is called on the rank that leads only."""
        self._leads, self._store, self._timeout, self._journal = leads, store, timeout, journal
        self._began = time.monotonic()
        if leads and (self._auto or self._auto_local or self._interval):
            self._earlier = earlier()
            self._saves.extend(self._earlier.saves)
        if self._auto or self._auto_local:
            if leads:
                decided = decisions.decide("cadence", CadenceDecision, self._first)
            else:
                decided = decisions.await_decision("cadence", CadenceDecision, timeout)
            self._interval = decided.interval
            if self._auto_local:
                self._local_interval = decided.local
        if leads and not self._auto:
            known = self._costs([])
            if self._earlier.restart and known is not None and len(self._saves) >= ENOUGH_SAVES:
                # It was said before, and right after a restart it would read as if related to that.
                self._concerns |= set(concerns(self._interval, known[0])) - {"exposed"}
            self._judge([])
        self._advance(step)

    @property
    def chooses_locally(self) -> bool:
        """Whether the interval of local saves is chosen here."""
        return self._auto_local

    def due(self, step: int) -> Literal["", "local", "global"]:
        """Which save is due after this step; one to the root serves the local tier too.

        To be called once a step.
        """
        if self._auto_local and self._leads:
            self._local.stepped()
            self._local.mark()
        if step >= self.next_step:
            return "global"
        return "local" if step >= self.next_local else ""

    def _advance_local(self, step: int) -> None:
        every = self._local_interval
        if self._auto_local:
            self.next_local = step + every
            if self._leads:
                self._local.made()
                self._local.mark()
        else:
            self.next_local = (step // every + 1) * every if every else NEVER

    # --- local saves: what rank 0 tells, and what all hear --------------------------------------------------

    def word(self) -> int:
        """How many steps the local save that is due is before the next one: rank 0's word to the others."""
        if not (self._auto_local and self._leads):
            return 0
        steps, event = self._local.next()
        if event is not None:
            self._write(event)
        return steps

    def heard(self, steps: int) -> None:
        """What rank 0 said in the exchange of a save; 0 if there was none."""
        if self._auto_local and steps:
            self._local_interval = steps

    def begun(self, *, local_only: bool, nbytes: int) -> None:
        """A save is under way."""
        self._local.begun(local_only=local_only, nbytes=nbytes)

    def ended(self, *, local_only: bool, blocked: float = 0.0, commit: float = 0.0) -> None:
        """It is over; `commit` is 0 if it failed."""
        self._local.ended(local_only=local_only, blocked=blocked, commit=commit)

    def note(self, *, blocked: float, commit: float) -> None:
        """A save was committed, at this cost. Only what the leading rank notes is used."""
        self._noted += 1
        self._saves.append((blocked, commit))

    def last_commit(self) -> float | None:
        """Seconds that the last save took until it was committed; None if none was measured yet."""
        return self._saves[-1][1] if self._saves else None

    def after_save(self, step: int, step_seconds: Sequence[float], due: str = "global") -> None:
        """A scheduled save was made, or failed, at the same step on all ranks: agree on the next one."""
        if due == "local":
            self._advance_local(step)
            return
        self._serial += 1
        if self._auto:
            assert self._store is not None
            store, key, what = self._store, f"cadence/{self._serial}", "the interval until the next save"
            if self._leads:
                self._interval = interval = self._again(step_seconds)
                within(lambda: store.set(key, str(interval)), self._timeout, what)
            else:
                self._interval = _interval(read_key(store, key, self._timeout, what))
        elif self._leads:
            self._judge(step_seconds)
        self._advance(step)

    def _advance(self, step: int) -> None:
        if not self._interval:
            self.next_step = NEVER
        elif self._auto:
            self.next_step = step + self._interval
        else:
            self.next_step = (step // self._interval + 1) * self._interval
        self._advance_local(step)

    # --- the rank that leads --------------------------------------------------------------------------------

    def _costs(self, own: Sequence[float]) -> tuple[Costs, str] | None:
        """What is known of this run's costs, and the source of its MTBF; None before a step and a save were
        measured."""
        steps = own if len(own) >= ENOUGH_STEPS else [*self._earlier.steps, *own]
        if not steps or not self._saves:
            return None
        running = self._earlier.running + time.monotonic() - self._began
        mtbf = mtbf_of(running, self._earlier.failures, self._given_mtbf)
        costs = Costs(
            step=median(steps),
            blocked=median(blocked for blocked, _ in self._saves),
            commit=median(commit for _, commit in self._saves),
            mtbf=mtbf.seconds,
            restart=self._earlier.restart or DEFAULT_RESTART,
        )
        return costs, mtbf.source

    def _first(self) -> CadenceDecision:
        local = 0
        if self._auto_local:
            earlier = self._earlier.local_interval
            local = self._local.start(earlier)
            why = "as the attempt before chose" if earlier else "what local saves cost was not measured yet"
            first = f"the first local save comes after {plural(local, 'step')}: {why}"
            self._write(
                CadenceChosen(
                    interval=local, seconds=0.0, overhead=0.0, mtbf=0.0, evidence=[first], tier="local"
                )
            )
        if not self._auto:
            return CadenceDecision(interval=self._interval, evidence=[], local=local)
        return msgspec.structs.replace(self._first_for_root(), local=local)

    def _first_for_root(self) -> CadenceDecision:
        known = self._costs([])
        if known is None:
            mtbf = mtbf_of(self._earlier.running, self._earlier.failures, self._given_mtbf)
            evidence = [
                *self._earlier.problems,
                f"no steps and saves were measured yet: the first save comes after {PROBE_STEPS} steps",
                f"MTBF {mtbf.seconds / 3600:.3g} h ({mtbf.source})",
            ]
            event = CadenceChosen(
                interval=PROBE_STEPS, seconds=0.0, overhead=0.0, mtbf=mtbf.seconds, evidence=evidence
            )
            self._tell(event)
            return CadenceDecision(interval=PROBE_STEPS, evidence=evidence)
        chosen = choose_interval(*known)
        self._concerns = set(concerns(chosen.interval_steps, known[0]))
        evidence = [*self._earlier.problems, *chosen.evidence]
        self._tell(_event(chosen, evidence))
        return CadenceDecision(interval=chosen.interval_steps, evidence=evidence)

    def _again(self, step_seconds: Sequence[float]) -> int:
        known = self._costs(step_seconds)
        if known is None:
            return self._interval
        chosen = choose_interval(*known, at_most=GROWTH * self._interval)
        found = set(concerns(choose_interval(*known).interval_steps, known[0]))
        changed = abs(chosen.interval_steps - self._told) > NOTABLE_CHANGE * self._told
        if changed or found - self._concerns:
            self._tell(_event(chosen, chosen.evidence))
        self._concerns |= found
        return chosen.interval_steps

    def _tell(self, event: CadenceChosen) -> None:
        self._told = event.interval
        self._write(event)
        if self._earlier.restart and not self._noted and "exposed" not in self._concerns:
            return  # as with an interval that was given
        for warning in event.warnings:
            log.warning("holdfast: %s", warning)

    def _judge(self, step_seconds: Sequence[float]) -> None:
        """Say, once, what is wrong with an interval that was given."""
        known = self._costs(step_seconds) if self._interval else None
        if known is None:
            return
        for word, text in concerns(self._interval, known[0]).items():
            if word not in self._concerns and (word == "exposed" or len(self._saves) >= ENOUGH_SAVES):
                self._concerns.add(word)
                mtbf = f" (MTBF {known[1]})" if word == "exposed" else ""
                self._write(Warned(message=text + mtbf))
                log.warning("holdfast: %s%s", text, mtbf)

    def _write(self, event: Event) -> None:
        assert self._journal is not None
        self._journal.write(event)


def _event(chosen: Cadence, evidence: list[str]) -> CadenceChosen:
    return CadenceChosen(
        interval=chosen.interval_steps,
        seconds=chosen.interval_seconds,
        overhead=chosen.expected_overhead,
        mtbf=chosen.mtbf,
        evidence=evidence,
        warnings=chosen.warnings,
    )


def _interval(raw: bytes) -> int:
    text = raw.decode(errors="replace")
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ControlError(
            f"the store's value for the interval until the next save is {text!r:.100}, not a count of steps. "
            "Something else writes to this store; start the run again"
        )
    return int(text)


def measured_before(control: ControlDirectory, attempt: int, launch: str) -> Measured:
    """What the attempts before this one left behind."""
    found = Measured()
    try:
        history = [
            (record, end)
            for record, end in ends_of(control)
            if record.number < attempt
            and read_record(control.attempt(record.number) / "head.json", HeadRecord) is not None
        ]  # an attempt without a head never trained: its end says nothing about training
    except ControlError as error:
        found.problems.append(f"the history of earlier attempts could not be read: {error}")
        return found
    for index, (record, end) in enumerate(reversed(history)):
        lines = _last_lines(control.journal, record.number) if index < ATTEMPTS_READ or end is None else []
        _count(found, record, end, lines)
        if index < ATTEMPTS_READ:
            _take(found, lines)
    if history:
        record, end = history[-1]
        if end is not None and end.outcome == "failed" and record.launch == launch:
            found.restart = max(0.0, time.time() - end.at)
    return found


def _count(found: Measured, record: AttemptRecord, end: EndRecord | None, lines: list[JournalLine]) -> None:
    """Add one attempt's running time, and its end if that was a failure."""
    last = end.at if end is not None else max((line.at for line in lines), default=record.started)
    found.running += max(0.0, last - record.started)
    found.failures += end is None or end.outcome in ("failed", "lost")


def _take(found: Measured, lines: list[JournalLine]) -> None:
    """Add an older attempt's steps and saves, in front of the newer ones already there."""
    steps = [
        seconds
        for line in lines
        if isinstance(line.body, StepsDone) and line.who == REPORTER
        for seconds in line.body.seconds
    ]
    committed = [line.body for line in lines if isinstance(line.body, SaveCommitted)]
    # A save to both tiers is journalled twice, with the time it blocked only the first time.
    blocked = {save.checkpoint: save.blocked_seconds for save in committed if save.tier == "local"}
    saves = [
        (max(save.blocked_seconds, blocked.get(save.checkpoint, 0.0)), save.seconds)
        for save in committed
        if save.tier == "global"
    ]
    chosen = [line.body for line in lines if isinstance(line.body, CadenceChosen)]
    local = [event.interval for event in chosen if event.tier == "local"]
    found.local_interval = found.local_interval or (local[-1] if local else 0)
    found.steps = [*steps, *found.steps][-RECENT_STEPS:]
    found.saves = [*saves, *found.saves][-RECENT_SAVES:]


def _last_lines(journal: Path, attempt: int) -> list[JournalLine]:
    """The ends of an attempt's journals, without those of ranks other than 0."""
    lines: list[JournalLine] = []
    for path in sorted(journal.glob(f"{attempt:06d}-*.jsonl")):
        if not _OTHER_RANK.search(path.name):
            lines.extend(read_tail(path, TAIL_BYTES))
    return sorted(lines, key=lambda line: line.at)
