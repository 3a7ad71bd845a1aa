"""Which time limit applies to a rank at a moment, when an overdue rank hangs, and which limits are learned.

A rank is either in a section or in none, and one rule applies:

| the rank                                             | rule           | its clock |
|------------------------------------------------------|----------------|-----------|
| has not completed a step of this attempt             | initial        | since the last sign of life |
| the same, in `setup` or `loading` with a limit       | section        | the section's own |
| is in a section that has a limit                     | section        | the section's own |
| is in a section without one, or never used sections  | heartbeat      | since the last sign of life |
| is in no section                                     | out_of_section | since it left the last one |
| has left its loop, and is in no section with a limit | exiting        | since the last sign of life |
| has left its loop, in a section with a limit         | exiting        | the section's own |

A section's own clock stands still while another section is open inside it, so that a hang in the inner one is
found by the inner one's limit. After the first step a limit that a person has given to a section applies to
the whole of it as well, however often others open and close inside it (`Limits.whole`): those without a limit
count in full, and each of the others with the time that it took beyond its own. A limit of 0 is switched off.

An overdue rank by itself is not a hang: it may be waiting for another rank, and a rank that waits for one
that is in time is itself in time (`hanging`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

SETUP, LOADING, STEP, CHECKPOINTING = "setup", "loading", "step", "checkpointing"
BEFORE_TRAINING = (SETUP, LOADING)
"""Sections that exist only before the first step, and therefore keep their own limit there."""
EXITING = "exiting"
"""The rule for a rank that has left its loop."""

SAFETY_FACTOR = 5.0
"""A learned limit is this many times the longest duration seen."""
SMOOTHING = 0.5
"""The weight of what an attempt saw, against what was learned before it."""
ENOUGH = {SETUP: 1, CHECKPOINTING: 1, STEP: 16}
ENOUGH_OF_OTHERS = 3
"""How many samples of one rank are enough to learn a limit; gaps between sections need as many as steps."""
FLOORS = {SETUP: 120.0, CHECKPOINTING: 60.0}
FLOOR = 30.0
"""Seconds below which no limit is learned: a busy machine or a slow disk must not look like a hang."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits in seconds, as configured for one rank; 0 means off."""

    initial: float = 1800.0
    heartbeat: float = 300.0
    sections: dict[str, float] = {}
    out_of_section: float = 300.0
    exiting: float = 3600.0
    """From the end of the loop to the end of the process."""
    whole: dict[str, float] = {}
    """For a section with all that is inside it, where a person has set one; learning never changes these."""
    given: list[str] = []
    """Which of the limits a person has set: learned limits never exceed those."""


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """Limits learned from what was seen; empty or 0 where not enough was seen."""

    sections: dict[str, float] = {}
    out_of_section: float = 0.0
    initial: float = 0.0
    """Never learned, because a cold cache makes any start slow; but it may be imported."""
    heartbeat: float = 0.0


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """How often something ended on one rank, and the longest it took, in seconds."""

    count: int = 0
    longest: float = 0.0


class OpenSection(msgspec.Struct, array_like=True):
    """A section that a rank is in."""

    name: str
    since: float
    """When its clock last started to run; without meaning while another section is open inside it."""
    spent: float = 0.0
    """How many seconds its clock had run before that."""
    at_least: float = 0.0
    """This time, its limit is at least this, because what happens in it has a deadline of its own."""
    began: float = 0.0
    """When it was entered."""
    inside: dict[str, float] = {}
    """Seconds that sections inside it took, by name, each without those inside it; those still open are not
    counted yet, and those with a deadline of their own never are."""


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank last reported about itself; times are those of the machine's monotonic clock."""

    sign: float
    """Its last sign of life."""
    left: float
    """When it last left all sections; if it is in none, it has been in none since then."""
    step: int = 0
    """The last step it completed; 0 if not known."""
    trained: bool = False
    """Whether it completed a step in this attempt (or gave a beat, if it uses no sections)."""
    sectioned: bool = False
    """Whether it has ever used sections."""
    sections: tuple[OpenSection, ...] = ()
    """The open ones, outermost first."""
    done: bool = False
    """Whether it said good-bye: from then on only its process is watched."""
    exiting: bool = False
    """Whether it has left its loop; its process has yet to end."""

    @property
    def section(self) -> str:
        return self.sections[-1].name if self.sections else ""

    @property
    def progress(self) -> int:
        """How far it has got, for comparison: one that has left its loop is ahead of those that have not."""
        return self.step + 1 if self.exiting else self.step


class Ruling(msgspec.Struct, frozen=True):
    """The one limit that applies, and how much of it is used up."""

    rule: str
    """initial, section, heartbeat, out_of_section or exiting."""
    section: str
    limit: float
    """0 if no limit applies."""
    seconds: float

    @property
    def overdue(self) -> bool:
        return self.limit > 0 and self.seconds > self.limit


def ruling(state: RankState, limits: Limits, now: float, fresh: float = 0.0) -> Ruling:
    """The limit that applies to a rank at `now`. Clocks count from `fresh` at the earliest."""
    if state.done:
        return Ruling("none", "", 0.0, 0.0)
    rules = _innermost(state, limits, now, fresh)
    if rules.overdue or not (state.trained or state.exiting):
        return rules
    for depth, outer in enumerate(state.sections[:-1]):
        limit = _raised(limits.whole.get(outer.name, 0.0), outer)
        seconds = _whole(state.sections[depth:], limits, now, fresh)
        around = Ruling(EXITING if state.exiting else "section", outer.name, limit, seconds)
        if around.overdue:
            return around
    return rules


def _innermost(state: RankState, limits: Limits, now: float, fresh: float) -> Ruling:
    """The limit that follows from the innermost section that a rank is in, or from its being in none."""
    silent = max(0.0, now - max(state.sign, fresh))
    if not state.sections:
        if state.exiting:
            return Ruling(EXITING, "", limits.exiting, silent)
        if not state.trained:
            return Ruling("initial", "", limits.initial, silent)
        if not state.sectioned:
            return Ruling("heartbeat", "", limits.heartbeat, silent)
        return Ruling("out_of_section", "", limits.out_of_section, max(0.0, now - max(state.left, fresh)))
    inner = state.sections[-1]
    own = limits.sections.get(inner.name)
    if not (state.trained or state.exiting) and not (own and inner.name in BEFORE_TRAINING):
        return Ruling("initial", inner.name, _raised(limits.initial, inner), silent)
    if own is None:
        rule, limit = (EXITING, limits.exiting) if state.exiting else ("heartbeat", limits.heartbeat)
        return Ruling(rule, inner.name, _raised(limit, inner), silent)
    seconds = _own(inner, now, fresh)
    if inner.name == LOADING:
        return Ruling("section", LOADING, own, seconds)  # it has no default: whoever sets a limit means it
    return Ruling(EXITING if state.exiting else "section", inner.name, _raised(own, inner), seconds)


def _own(inner: OpenSection, now: float, fresh: float) -> float:
    """Seconds on the clock of the innermost section."""
    spent = inner.spent if inner.since >= fresh else 0.0
    return spent + max(0.0, now - max(inner.since, fresh))


def _whole(sections: Sequence[OpenSection], limits: Limits, now: float, fresh: float) -> float:
    """Seconds that count against the first of these and all that is inside it; the last is the innermost."""
    outer, *within = sections
    inside = dict(outer.inside)
    for one in within:
        if not one.at_least:
            seconds = _own(one, now, fresh) if one is within[-1] else one.spent
            inside[one.name] = inside.get(one.name, 0.0) + seconds
    counted = outer.spent
    for name, seconds in inside.items():
        counted += max(0.0, seconds - limits.whole.get(name, 0.0))
    return min(counted, max(0.0, now - max(outer.began, fresh)))


def _raised(limit: float, section: OpenSection) -> float:
    return max(limit, section.at_least) if limit else 0.0


# --- when it is a hang --------------------------------------------------------------------------------------

SETTLE = 1.0
"""Seconds for which a rank must be seen overdue while others are in time, because their reports about
themselves are not from the same moment."""


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that has used up its limit."""

    rank: int
    step: int
    """The last step it completed, plus one after its loop; 0 if it has not completed any in this attempt."""
    limit: float
    stopped: bool = False
    """Whether its process was stopped by a signal: it waits for nobody."""
    told: str = ""
    """What it is late with, in words."""


class StillRunning(msgspec.Struct, frozen=True, kw_only=True):
    """What one node knows about its ranks that still run and have not said good-bye."""

    node: str = ""
    late: list[Late] = []
    in_time: int | None = None
    """The lowest step that a rank in time has completed; None if none is, save stopped ones."""


def hanging(
    standings: Iterable[StillRunning], until: Mapping[int, float], now: float
) -> tuple[list[tuple[str, Late]], dict[int, float]]:
    """The ranks of a whole group that hang, each with its node, and what to pass as `until` the next time.

    Whom a rank waits for is not known: it may wait in a collective, in a store, on a file. But it never waits
    for one that has completed more steps than itself, since that one has passed whatever it could wait for.
    So a late rank is excused while any rank that is not ahead of it is in time. When those have gone ahead
    (and have not become late themselves), it gets its whole limit once more, for what it could not do before,
    and counts as in time for those that wait for it. A rank whose process is stopped waits for nobody and is
    not excused, nor is it in time for others. `until`: for each rank that was late the last time, until when
    it has such time.

    So no group counts as hung as long as some rank that the others may wait for is in time; and a group in
    which no rank goes on is found when the last of its ranks has used up its own limit.
    """
    standings = list(standings)
    lowest = min((one.in_time for one in standings if one.in_time is not None), default=None)
    late = [(standing.node, one) for standing in standings for one in standing.late]
    # Ranks that others may have waited for and that are late now: they have not gone ahead, but used up their
    # time.
    failed = min((one.step for _, one in late if one.rank not in until), default=None)
    soon = now if lowest is None else now + SETTLE
    kept: dict[int, float] = {}
    for _, one in late:
        if lowest is not None and lowest <= one.step and not one.stopped:
            kept[one.rank] = now + one.limit
        elif one.rank not in until:
            kept[one.rank] = soon
        elif failed is not None and failed <= one.step:
            kept[one.rank] = min(until[one.rank], soon)
        else:
            kept[one.rank] = until[one.rank]
    given = min((one.step for _, one in late if kept[one.rank] > now), default=None)

    def waits(one: Late) -> bool:
        return kept[one.rank] > now or (given is not None and given <= one.step and not one.stopped)

    return [found for found in late if not waits(found[1])], kept


HELLO = "hello"
"""The rule for a rank that has not said hello to its agent."""
HELLO_FACTOR = 2.0
"""A rank may take this many times as long to say hello as the slowest one took before."""


def hello_limit(initial: float, longest: float) -> float:
    """Seconds from the start of the workers to a rank's hello, if the script is known to say it. 0 means off.

    `longest`: what a rank took before, because a script that prepares its data for an hour will do so again.
    """
    return max(initial, HELLO_FACTOR * longest) if initial else 0.0


# --- what is learned ----------------------------------------------------------------------------------------


def learn(
    sections: Mapping[str, Observed], out_of_section: Observed, earlier: Learned | None = None
) -> Learned:
    """Limits from what one attempt saw (the longest over its ranks), smoothed with those learned before."""
    earlier = earlier or Learned()
    found = dict(earlier.sections)
    for name, seen in sections.items():
        if seen.count >= ENOUGH.get(name, ENOUGH_OF_OTHERS):
            found[name] = _smoothed(seen, found.get(name, 0.0), FLOORS.get(name, FLOOR))
    out = earlier.out_of_section
    if out_of_section.count >= ENOUGH[STEP]:
        out = _smoothed(out_of_section, out, FLOOR)
    return Learned(sections=found, out_of_section=out, initial=earlier.initial, heartbeat=earlier.heartbeat)


def _smoothed(seen: Observed, earlier: float, floor: float) -> float:
    wanted = SAFETY_FACTOR * seen.longest
    if earlier > 0:
        wanted = SMOOTHING * wanted + (1 - SMOOTHING) * earlier
    return round(max(wanted, floor), 3)


def longest_of(learned: Sequence[Learned]) -> Learned:
    """The longest of each limit that several nodes learned: a limit must suit the slowest."""
    sections: dict[str, float] = {}
    for one in learned:
        for name, value in one.sections.items():
            sections[name] = max(value, sections.get(name, 0.0))
    return Learned(
        sections=sections,
        out_of_section=max((one.out_of_section for one in learned), default=0.0),
        initial=max((one.initial for one in learned), default=0.0),
        heartbeat=max((one.heartbeat for one in learned), default=0.0),
    )


def apply(learned: Learned, limits: Limits) -> Limits:
    """The limits that apply, given what was learned.

    A limit that a person set is a bound that learning only ever lowers; one that is off stays off. A mere
    default is replaced, up or down, by what was learned, up to the initial timeout. A section without a limit
    gets one only where that is tighter than the limit that applies without it.
    """
    sections = dict(limits.sections)
    for name, value in learned.sections.items():
        if name in sections:
            sections[name] = _bounded(value, sections[name], limits, "sections")
        else:
            without = limits.initial if name in BEFORE_TRAINING else limits.heartbeat
            if 0 < value < without:
                sections[name] = value
    return Limits(
        initial=_bounded(learned.initial, limits.initial, limits, "initial"),
        heartbeat=_bounded(learned.heartbeat, limits.heartbeat, limits, "heartbeat"),
        sections=sections,
        out_of_section=_bounded(learned.out_of_section, limits.out_of_section, limits, "out_of_section"),
        exiting=limits.exiting,
        whole=limits.whole,
        given=limits.given,
    )


def _bounded(learned: float, configured: float, limits: Limits, what: str) -> float:
    if not learned or not configured:
        return configured
    if what in limits.given:
        return min(learned, configured)
    return min(learned, max(configured, limits.initial))


# --- whether the limits fit each other ----------------------------------------------------------------------


class Value(msgspec.Struct, frozen=True):
    """A timeout, and how a message names it: key, value and where it came from."""

    seconds: float
    shown: str
    given: bool = True
    """Whether a person has set it; if a default of ours is masked, nobody's wish is."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """All timeouts that a launch has, to be judged together. None for one that is not known."""

    initial: Value
    heartbeat: Value
    sections: Mapping[str, Value]
    save: Value
    """checkpoint.timeout."""
    stop_grace: Value
    decision: Value
    """control.decision_timeout; that it exceeds the lease is checked wherever settings are loaded."""
    collective_watchdog: Value | None = None
    """TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, where it is set."""


REPORT_SLACK = 10.0
"""How many seconds beyond the stop grace the leading agent waits for the others' reports."""


def contradictions(all_of: Timeouts) -> list[str]:
    """Pairs in which one timeout would hide the other, with the right order. [] if all is well."""
    found: list[str] = []
    step = all_of.sections.get(STEP)
    for other in (step, all_of.heartbeat):
        if other is not None and hides(all_of.initial, other, ties=False):
            found.append(
                f"{all_of.initial.shown} with {other.shown}: the first step of an attempt compiles and warms "
                "up, and so needs at least as long as any later one; the right order is initial ≥ step and "
                "initial ≥ heartbeat"
            )
    saving = all_of.sections.get(CHECKPOINTING)
    if saving is not None and all_of.save.given and hides(saving, all_of.save):
        found.append(
            f"{all_of.save.shown} with {saving.shown}: a slow save would be ended as a hang before it can "
            f"fail as a save and training go on; the right order is checkpoint.timeout < the limit of "
            f"{CHECKPOINTING}"
        )
    waiting = all_of.sections.get(SETUP)
    waiting = waiting if waiting is not None and waiting.seconds else all_of.initial
    if hides(waiting, all_of.decision):
        found.append(
            f"{all_of.decision.shown} with {waiting.shown}: ranks wait for the group's decision during "
            f"{SETUP}, and would be ended as hung before they can say that none came; the right order is "
            f"control.decision_timeout < the limit of {SETUP}"
        )
    watchdog = all_of.collective_watchdog
    for other in (step, all_of.heartbeat) if watchdog is not None else ():
        assert watchdog is not None
        if other is not None and hides(watchdog, other):
            found.append(
                f"{watchdog.shown} with {other.shown}: NCCL's watchdog would end every rank of a hung "
                "collective before the hung one is found and its stacks are kept; the right order is "
                "monitor's limits < the watchdog"
            )
    if 0 < all_of.decision.seconds <= all_of.stop_grace.seconds + REPORT_SLACK:
        found.append(
            f"{all_of.decision.shown} with {all_of.stop_grace.shown}: after a failure the other nodes wait "
            "for the decision while workers still have their grace, and would give up first; the right order "
            f"is launch.stop_grace + {REPORT_SLACK:g} < control.decision_timeout"
        )
    return found


def hides(shorter: Value, longer: Value, *, ties: bool = True) -> bool:
    """Whether `shorter` would fire first although it should not; if either is off, nothing is hidden."""
    if not shorter.seconds or not longer.seconds:
        return False
    return shorter.seconds < longer.seconds or (ties and shorter.seconds == longer.seconds)
