"""What a rejected step turned out to be: what is open, what a replay says, what to do about it. Pure.

Guarantee: a device is found guilty only if the fault followed it from one rank to another. A checkpoint
becomes suspect only inside its probation, because of results that are not numbers or that do not continue
from where it was, and only if that was seen before: from it, or in the very process that saved it. There must
be a rung below it, and nothing else becomes suspect except what was saved from it. The checkpoint that it was
itself saved from, and a rung that fails once in a trial, are passed over and not blamed.
What is suspect is acquitted as soon as a lower rung fails at the same step. At most `MAX_LOWER_RUNGS` rungs
are left behind for one incident. A finite result, however large, is never evidence against a checkpoint. What
only the work is to blame for is settled once, for all attempts: a finite step is accepted, and so is a shift
of the level; a step that is not finite is left to the user's `nan_policy`. Each judgement says what it rests
on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.policy.budgets import RERUNS, PastAttempt
from holdfast.policy.placement import (
    MAX_LOWER_RUNGS,
    MAX_ROTATIONS,
    Cluster,
    Exclusion,
    Fit,
    arrangements,
    fit,
    keep_out,
    layout,
)
from holdfast.policy.results import (
    Findings,
    How,
    Kind,
    Place,
    RankResult,
    Rejection,
    Rerun,
    Settled,
    Trial,
    settled_as,
)
from holdfast.policy.signs import Action
from holdfast.policy.trial import LOOK_BACK

# Where the ranks of an attempt ran, and how far the run had got, as far as records tell. Pure.


_PLACED = re.compile(r"(.*)\[(.*)\]")


def bad_places(attempt: PastAttempt) -> dict[int, Place]:
    """Where the ranks with bad results of their own ran."""
    places = places_of(attempt)
    found = attempt.rejection.bad if attempt.rejection is not None else []
    return {one.rank: places.get(one.rank, Place(one.node, one.device)) for one in found}


def places_of(attempt: PastAttempt) -> Mapping[int, Place]:
    """Where each rank ran: as the launcher placed it, or as the rank itself says."""
    found: dict[int, Place] = {}
    placed = attempt.placement.split()
    for text in placed:
        match = _PLACED.fullmatch(text)
        each = max(1, attempt.world_size // len(placed))
        devices = match[2].split(",") if match else [""] * each
        found.update(enumerate((Place(match[1] if match else text, one) for one in devices), len(found)))
    results = attempt.rejection.ranks if attempt.rejection is not None else []
    found.update({one.rank: Place(one.node, one.device) for one in results if one.node})
    return found


def guilty_places(
    then: Mapping[int, Place], bad: Mapping[int, Place], now: Mapping[int, Place]
) -> tuple[set[int], set[Place]]:
    """The ranks that were bad in one place and are well in another, and the places that the fault therefore
    follows.

    `then` and `bad`: where the ranks with bad results ran, before and now; `now`: where each rank runs.
    """
    well = {rank for rank, place in then.items() if rank not in bad and now.get(rank, place) != place}
    guilty = {place for place in bad.values() if place in {then[one] for one in well}}
    if well and set(bad.values()) == set(then.values()):
        guilty = set(bad.values())  # several at once, and one rank went from one to the other
    return well, guilty


def describe_place(place: Place) -> str:
    return f"device {place.device} of {place.node}" if place.device else place.node


def list_ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"


def step_of(checkpoint: str) -> int:
    """The step in a checkpoint's name; 0 if there is none."""
    found = re.search(r"\d+", checkpoint)
    return int(found[0]) if found else 0


# What earlier rejections have left open, as read from the run's history. Pure.
#
# None of it is kept in the memory of a process, so it is found again after an attempt that ended for another
# reason, after the death of a leader, and in a new launch of the same run.


DEVICE, REPRODUCIBLE = "device", "reproducible"
"""Verdicts on a rejected step; the third one, transient, is given by the ranks themselves."""


def open_trial(attempts: Iterable[PastAttempt]) -> Trial | None:
    """Checkpoints that became suspect and are neither acquitted nor, as far as the history tells, condemned.

    Ranks condemn them, and operators may acquit them: a caller that knows their standing must leave out those
    that are no longer suspect.
    """
    suspects: set[str] = set()
    until = 0
    for attempt in _in_order(attempts):
        if attempt.decided.suspect:
            suspects |= set(attempt.decided.suspect)
            ordered = attempt.decided.trial.until if attempt.decided.trial is not None else 0
            rejected = attempt.rejection.step if attempt.rejection is not None else 0
            until = max(until, ordered or rejected)
        suspects -= set(attempt.decided.acquit)
        until = until if suspects else 0
    return Trial(suspects=sorted(suspects), until=until) if suspects else None


def open_rerun(attempts: Iterable[PastAttempt]) -> Rerun | None:
    """The step that an attempt was meant to repeat, as long as no attempt is known to have got past it."""
    found: Rerun | None = None
    for attempt in _in_order(attempts):
        if found is not None and _done(attempt) >= found.step + (LOOK_BACK if found.breach else 0):
            found = None
        if attempt.rejection is not None and attempt.action:
            found = attempt.decided.rerun
    return found


def open_rejections(attempts: Iterable[PastAttempt], *, forgiven: int = 0) -> list[PastAttempt]:
    """The attempts whose rejected step no later attempt is known to have got past, oldest first.

    A device that was found guilty, data that are left out, or a finished attempt settle everything before.
    """
    found: list[PastAttempt] = []
    for attempt in _in_order(attempts):
        if attempt.number <= forgiven:
            continue
        found = [one for one in found if _step(one) > _done(attempt)]
        if attempt.rejection is not None and attempt.rejection.kind is Kind.STEP:
            found.append(attempt)
        decided = attempt.decided
        if decided.verdict == DEVICE or decided.skip is not None or attempt.outcome == "finished":
            found.clear()
    return found


def failed_in_probation(
    attempts: Iterable[PastAttempt], rung: str, *, forgiven: int = 0
) -> list[PastAttempt]:
    """The attempts that failed inside the probation of this checkpoint, oldest first, unless a later one from
    the same checkpoint is known to have got past that: what passes the second time is not held against it."""
    found: list[PastAttempt] = []
    for attempt in _in_order(attempts):
        if attempt.number <= forgiven or attempt.rung != rung:
            continue
        found = [one for one in found if _done(attempt) < _step(one) + _slack(one)]
        rejection = attempt.rejection
        if rejection is None or rejection.finite or not rejection.in_probation:
            continue
        if rejection.kind in (Kind.STEP, Kind.PROBATION):
            found.append(attempt)
    return found


def _slack(attempt: PastAttempt) -> int:
    """A discontinuity belongs to no single step: it may show a little later the next time."""
    breach = attempt.rejection is not None and attempt.rejection.kind is Kind.PROBATION
    return LOOK_BACK if breach else 0


def lowered_for(attempts: Iterable[PastAttempt], trial: Trial | None) -> int:
    """How many rungs were left behind on account of these suspects."""
    suspects = set(trial.suspects) if trial is not None else set()
    return sum(bool(suspects & set(attempt.decided.suspect)) for attempt in attempts)


def _done(attempt: PastAttempt) -> int:
    """The last step that it is known to have completed: before a step is rejected, all earlier ones are."""
    return max(attempt.last_step or 0, _step(attempt) - 1)


def _step(attempt: PastAttempt) -> int:
    return attempt.rejection.step if attempt.rejection is not None else 0


def _in_order(attempts: Iterable[PastAttempt]) -> list[PastAttempt]:
    return sorted(attempts, key=lambda attempt: attempt.number)


# What it means when a rejected step comes up again, and is accepted this time, or bad once more. Pure.
#
# *Accepted.* The work is the same, and the group is the same; what may differ is the device of each rank, and
# the state that the step began from. So for each rank that was bad:
#
# * the same state, another device: only the device differs, so the **device** it was on is at fault;
# * the same state, the same device: it passes, so the fault was **transient**;
# * another state: the first was damaged in the memory of that process, which is gone: **transient** too;
# * a state that is not known, or no rank known to have been bad: **transient**, as nothing more is shown.
#
# *Bad once more*, and not a number: `settle` says whether the ranks know enough to go on by themselves. What
# was loaded is acquitted if a lower rung fails at the very step at which it failed. Where there is no lower
# rung, the same one is tried twice, on other devices if there are any. After that the step is left to the
# user's `validation.nan_policy`, as if nothing had been loaded, which costs no restart. That is safe, because
# a bad state makes the steps after it fail as well, and `validation.max_consecutive` of them in a row end the
# run or take it back; bad data fail only in their own step.


class ReplayFinding(msgspec.Struct, frozen=True, kw_only=True):
    verdict: str
    """device or transient."""
    place: Place | None
    """Where it happened; None if no rank is known to have been bad."""
    evidence: str


def judge_replay(
    rerun: Rerun, now: Mapping[int, Place], same: Mapping[int, bool | None]
) -> list[ReplayFinding]:
    """One finding for each rank that was bad; `same`: whether a rank's state was equal, None if not known."""
    findings = []
    for one in rerun.bad:
        old, place = Place(one.node, one.device), now.get(one.rank)
        where = _named(old)
        failure = f"rank {one.rank} failed step {rerun.step} on {where}"
        if place is None:
            findings.append(_transient(old, f"{failure}; that rank no longer exists, and the step passes"))
        elif same.get(one.rank) is None:
            findings.append(_transient(old, f"{failure}, from a state that is not known, and passes now"))
        elif not same[one.rank]:
            findings.append(
                _transient(
                    old,
                    f"{failure} and passes from another state: what it began from was damaged in the memory "
                    "of that process",
                )
            )
        elif place == old:
            findings.append(_transient(old, f"{failure} and passes there now, from the same state"))
        else:
            evidence = f"{failure} and passes on {_named(place)}: the same work from the same state"
            findings.append(ReplayFinding(verdict="device", place=old, evidence=evidence))
    if not rerun.bad:
        evidence = f"step {rerun.step} was rejected, on a rank that is not known, and passes now"
        findings.append(ReplayFinding(verdict="transient", place=None, evidence=evidence))
    return findings


class Settling(msgspec.Struct, frozen=True, kw_only=True):
    """Why the ranks go on by themselves with a step that is not finite."""

    why: str
    acquit: list[str] = []
    """Checkpoints that are no longer suspect."""
    shown: bool = False
    """Whether it was compared with something, now or before: then too many in a row are the work's fault."""
    here: bool = False
    """Whether this attempt found it out."""


def settle(
    step: int,
    results: Sequence[RankResult],
    *,
    rung: str,
    rerun: Rerun | None,
    trial: Trial | None,
    settled: Settled | None,
    restarts_left: int | None,
    left_out: bool,
    ran_again: bool = False,
) -> Settling | None:
    """Why a step that is not finite needs no other attempt, even though what was loaded is on probation or a
    suspect is on trial; None if the launcher has to be asked.

    `results`: of every rank. `settled`: what is known about the step. `restarts_left`: None if not known.
    `left_out`: whether the launcher would leave the step's data out, if it can restart. `ran_again`: whether
    the step was run again in place; whoever wants that wants to know the cause, even if no restart is left.
    """
    asks = left_out and restarts_left != 0
    if trial is not None and step == trial.until and rung not in trial.suspects and not asks:
        others = ", ".join(trial.suspects)
        why = f"{rung or 'a fresh start'} fails at step {step} too, so {others} is not the cause"
        return Settling(why=why, acquit=trial.suspects, shown=True, here=True)
    if settled is not None:
        return Settling(why=settled.why or "it was settled before", shown=settled.shown)
    if rerun is not None and rerun.settles and not rerun.breach and rerun.step == step and not asks:
        then = {one.rank: Place(one.node, one.device) for one in rerun.bad}
        now = {one.rank: Place(one.node, one.device) for one in results}
        bad = {one.rank: now[one.rank] for one in results if one.reasons}
        if not guilty_places(then, bad, now)[1]:
            moved = any(now.get(rank, place) != place for rank, place in then.items())
            where = "on other devices too" if moved else "here again"
            why = (
                f"step {step} fails {where}, and there is no other checkpoint to compare {rung or 'it'} with"
            )
            return Settling(why=why, shown=True, here=True)
    if restarts_left == 0 and not ran_again:
        return Settling(why="no restart is left to find out whether what was loaded is at fault")
    return None


def _transient(place: Place, evidence: str) -> ReplayFinding:
    return ReplayFinding(verdict="transient", place=place, evidence=evidence)


def _named(place: Place) -> str:
    return (
        f"{place.node or 'this node'}, device {place.device}" if place.device else place.node or "this node"
    )


FOLLOWS = "the fault follows it: "
"""How the reason continues after the accused device."""
NO_OTHER_DEVICE = "no second device was left to tell a bad device from bad work"
"""How the evidence begins where the work is blamed without having been tried elsewhere."""
_TWICE = "was rejected there"
"""Part of the reason why a node was kept out to see whether the step passes on another one."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A rejection and all that it is judged by."""

    failed: PastAttempt
    rejection: Rejection
    before: Sequence[PastAttempt]
    """Every earlier attempt, oldest first."""
    episode: Sequence[PastAttempt]
    """The attempts since the last progress."""
    forgiven: int = 0
    cluster: Cluster
    found: Fit
    """The nodes that would go on."""
    wanted: int
    rungs: Sequence[str] = ()
    """The checkpoints that a resume may use, newest first."""
    together: Sequence[str] = ()
    """What was loaded, and what is just as doubtful."""
    avoid: Sequence[str] = ()
    trial: Trial | None = None
    may_skip: bool = False
    nan_policy: str = "warn"


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What was found and what follows; recovery turns it into its decision, within its budgets."""

    action: Action
    """restart, rotate, exclude, shrink, lower_rung or stop."""
    reason: str
    findings: Findings = Findings()
    evidence: list[str] = []
    rotate_by: int | None = None
    exclude: list[Exclusion] = []
    found: Fit | None = None
    """The nodes that go on, if not those of the question."""
    readmit: list[str] = []
    """Nodes that were kept out for this step, which fails elsewhere too."""


def judge(question: Question) -> Judgement:
    return _Inquiry(question).judge()


class _Inquiry:
    """One rejection. Each rule judges or passes (None); the first that judges counts."""

    def __init__(self, question: Question) -> None:
        self._asked = question
        self._failed = question.failed
        self._rejection = rejection = question.rejection
        self._open = open_rejections([*question.before, question.failed], forgiven=question.forgiven)[:-1]
        self._same = [one for one in self._open if one.rejection and one.rejection.step == rejection.step]
        self._evidence = [_told(rejection)]

    def judge(self) -> Judgement:
        match self._rejection.kind:
            case Kind.DEVICE:
                accused = self._rejection.accused
                why = "; ".join(self._rejection.reasons) or "the ranks found it out"
                return self._accuse([accused] if accused else [], why)
            case Kind.ROLLBACK:
                return self._roll_back()
            case Kind.PROBATION:
                what = f"{self._failed.rung or 'what was loaded'} does not go on from where it was"
                return self._on_trial() or self._once_more(what) or self._suspect(what)
        rules = (self._on_trial, self._follows_a_device, self._stays_with_the_work, self._vary)
        return next(found for rule in rules if (found := rule()) is not None)

    # -- is it the device? ----------------------------------------------------------------------------------

    def _follows_a_device(self) -> Judgement | None:
        """Another rank was bad on the same device before and is well elsewhere, at that step or any other."""
        now, bad = places_of(self._failed), bad_places(self._failed)
        for earlier in reversed(self._open):
            then = bad_places(earlier)
            well, guilty = guilty_places(then, bad, now)
            if guilty:
                ranks = list_ranks(rank for rank, place in bad.items() if place in guilty)
                return self._accuse(
                    guilty,
                    f"{FOLLOWS}{list_ranks(well)} failed on it in attempt {earlier.number}, and not "
                    f"elsewhere; now {ranks} failed on it",
                )
        return None

    def _accuse(self, places: Iterable[Place], why: str) -> Judgement:
        asked, accused = self._asked, sorted(places, key=lambda place: (place.node, place.device))
        what = " and ".join(describe_place(place) for place in accused) or "a device that is not known"
        optional = self._rejection.optional
        reason = f"step {self._rejection.step} was rejected because of {what}: {why}"
        if optional:
            reason = f"the others wait for {what}: {why}"
        kept = keep_out(asked.cluster, asked.wanted, [(one.node, one.device) for one in accused], reason)
        if optional and (not accused or kept is None or not asked.cluster.nodes or kept[1].shrinks):
            return self._judged(
                Action.RESTART, f"{reason}. Nothing could take its place, so it stays", DEVICE
            )
        if not accused or kept is None or not asked.cluster.nodes:
            return self._stop(f"{reason}. The run cannot do without it", DEVICE)
        exclude, found = kept
        if not exclude:
            return self._judged(Action.RESTART, f"{reason}; it is kept out already", DEVICE)
        action = Action.SHRINK if found.shrinks else Action.EXCLUDE
        return self._judged(action, reason, DEVICE, exclude=exclude, found=found)

    # -- is it the work? ------------------------------------------------------------------------------------

    def _stays_with_the_work(self) -> Judgement | None:
        now, bad = places_of(self._failed), bad_places(self._failed)
        for earlier in reversed(self._same):
            then, before = bad_places(earlier), places_of(earlier)
            moved = [rank for rank in bad if rank in then and bad[rank] != then[rank]]
            if moved:
                was = ", ".join(
                    f"{rank} from {describe_place(then[rank])} to {describe_place(bad[rank])}"
                    for rank in moved
                )
                return self._reproducible(
                    f"the fault stays with the work: since attempt {earlier.number} it went with rank {was}"
                )
            if not (bad and then) and now and before and now != before:
                return self._reproducible(
                    f"it was rejected on other devices too, in attempt {earlier.number}; whose results were "
                    "bad is not known"
                )
        return None

    def _vary(self) -> Judgement:
        """It is not known yet: try the same step elsewhere, or here again; only a limited number of times."""
        step, times = self._rejection.step, 1 + len(self._same)
        shift = self._next_shift()
        if shift is not None and times <= RERUNS:
            what = f"step {step} is computed again with every rank on another device"
            return self._again(Action.ROTATE, what, rotate_by=shift)
        if times < RERUNS:
            return self._again(Action.RESTART, f"step {step} is computed again here: no rank can move")
        instead = self._spare()
        if instead is not None:
            return instead
        self._evidence.append(f"{NO_OTHER_DEVICE} ({times} attempts)")
        return self._reproducible("treated as reproducible")

    def _next_shift(self) -> int | None:
        asked, here = self._asked, self._failed.rotation
        rotations = sum(one.action == Action.ROTATE for one in asked.episode)
        count = arrangements(layout(asked.cluster, asked.found.nodes))
        if rotations >= MAX_ROTATIONS:
            return None
        seen = {one.rotation % count for one in self._same} | {here % count}
        return next((one % count for one in range(here + 1, here + count) if one % count not in seen), None)

    def _spare(self) -> Judgement | None:
        """A spare node in the place of those on which it was rejected; never for what may be honest."""
        asked = self._asked
        if self._rejection.finite:
            return None
        nodes = {place.node for place in bad_places(self._failed).values()} & set(asked.found.nodes)
        found = fit(asked.cluster, asked.wanted, without=nodes)
        if not nodes or found.missing or found.shrinks:
            return None
        reason = f"step {self._rejection.step} {_TWICE} in {1 + len(self._same)} attempts"
        exclude = [Exclusion(node, None, reason) for node in sorted(nodes)]
        what = f"{reason}: {', '.join(found.spares)} in the place of {', '.join(sorted(nodes))}"
        return self._again(Action.EXCLUDE, what, exclude=exclude, found=found)

    def _again(self, action: Action, reason: str, **more: Any) -> Judgement:
        asked, bad = self._asked, self._rejection.bad
        places = [(place.node, place.device) for place in bad_places(self._failed).values()]
        can = keep_out(asked.cluster, asked.wanted, places, "") is not None if places else False
        can = can and action is not Action.EXCLUDE  # they are out already
        same = self._rejection.in_probation and self._failed.rung in asked.rungs
        since = self._saved_since() if same else []
        rerun = Rerun(
            step=self._rejection.step,
            bad=bad,
            can_exclude=can,
            breach=self._rejection.kind is Kind.PROBATION,
            settles=self._settles(action, since),
        )
        return self._judged(action, reason, rerun=rerun, avoid=since, **more)

    def _saved_since(self) -> list[str]:
        """What was saved from what was loaded. To start from the same checkpoint means not to use these."""
        rung = self._failed.rung
        return [name for name in self._group() if rung and step_of(name) > step_of(rung)]

    def _settles(self, action: Action, since: Sequence[str]) -> bool:
        """Whether nothing will be left to compare with if this fails once more."""
        asked, rejection = self._asked, self._rejection
        usable = [name for name in asked.rungs if name not in asked.avoid and name not in since]
        if rejection.finite or rejection.counters:
            return False
        if len(usable) > 1 and not (rejection.in_probation and self._why_not_lower()):
            return False
        return action is Action.ROTATE or (action is Action.RESTART and self._spare() is None)

    def _once_more(self, what: str) -> Judgement | None:
        """What was loaded is tried once more, elsewhere if possible, before it is blamed."""
        if self._failed_before():
            return None
        shift = self._next_shift()
        if shift is not None:
            how = f"{what}: it is tried once more, with every rank on another device"
            return self._again(Action.ROTATE, how, rotate_by=shift)
        return self._again(Action.RESTART, f"{what}: it is tried once more, here, as no rank can move")

    def _failed_before(self) -> bool:
        """Whether what was loaded has failed like this before; a discontinuity belongs to no single step."""
        asked, rejection = self._asked, self._rejection
        found = failed_in_probation(asked.before, self._failed.rung, forgiven=asked.forgiven)
        earlier = [one.rejection for one in found if one.rejection is not None]
        return any(
            one.step == rejection.step or Kind.PROBATION in (one.kind, rejection.kind) for one in earlier
        )

    # -- reproducible: is it what was loaded? ---------------------------------------------------------------

    def _reproducible(self, why: str) -> Judgement:
        found = self._reproduced(why)
        mine = f"step {self._rejection.step} {_TWICE}"
        wronged = [out.node for out in self._asked.cluster.excluded if out.reason.startswith(mine)]
        return msgspec.structs.replace(found, readmit=sorted(set(wronged)))

    def _reproduced(self, why: str) -> Judgement:
        rejection = self._rejection
        if rejection.finite:
            return self._accept(why)
        if rejection.in_probation:
            return self._suspect(why)
        return self._without_blame(why)

    def _accept(self, why: str) -> Judgement:
        step = self._rejection.step
        if any(one.decided.rerun is not None and one.decided.rerun.accept for one in self._same):
            return self._stop(f"{why}; step {step} was to be accepted, and was rejected again", REPRODUCIBLE)
        rerun = Rerun(step=step, bad=self._rejection.bad, accept=True)
        reason = f"{why}; it is finite and the same everywhere: step {step} is to be accepted"
        settled = [self._settled(How.ACCEPTED, reason)]
        return self._judged(Action.RESTART, reason, REPRODUCIBLE, rerun=rerun, settled=settled)

    def _suspect(self, why: str) -> Judgement:
        """What was loaded is in its probation: a rung below it is to replay the same steps."""
        refused = self._why_not_lower()
        if refused:
            self._evidence.append(
                f"{self._failed.rung or 'what was loaded'} does not become suspect: {refused}"
            )
            return self._without_blame(why)
        if self._rejection.kind is Kind.PROBATION:
            return self._lower(why, "")
        return self._lower(f"{why}, soon after {self._failed.rung} was loaded", REPRODUCIBLE)

    def _why_not_lower(self) -> str:
        asked, rung = self._asked, self._failed.rung
        lowered = sum(one.action == Action.LOWER_RUNG or bool(one.decided.suspect) for one in asked.episode)
        if not rung:
            return "the run began from nothing"
        if any(rung in one.decided.acquit for one in asked.episode):
            return "it was acquitted already"
        if max(lowered, lowered_for(asked.before, asked.trial)) >= MAX_LOWER_RUNGS:
            return f"{MAX_LOWER_RUNGS} checkpoints were passed over already"
        return "" if self._below() else "there is no checkpoint below it"

    def _below(self) -> Sequence[str]:
        """The rungs below everything doubtful; none if that is not on the ladder."""
        group, rungs = self._group(), self._asked.rungs
        lowest = max((place for place, name in enumerate(rungs) if name in group), default=len(rungs))
        return [name for name in rungs[lowest + 1 :] if name not in self._asked.avoid]

    def _group(self) -> list[str]:
        return sorted({*self._asked.together, self._failed.rung} - {""})

    def _lower(self, why: str, verdict: str) -> Judgement:
        """Only what failed twice becomes suspect, with what was saved from it. The checkpoint that it was
        itself saved from may be just as bad, so it is passed over."""
        group, trial = self._group(), self._asked.trial
        blamed = [self._failed.rung, *self._saved_since()]
        suspects = sorted({*blamed, *(trial.suspects if trial is not None else [])})
        until = max(self._rejection.step, trial.until if trial is not None else 0)
        return self._judged(
            Action.LOWER_RUNG,
            f"{why}: {', '.join(blamed)} may be the cause; an older one replays the steps up to {until}",
            verdict,
            suspect=blamed,
            avoid=[name for name in group if name not in blamed],
            trial=Trial(suspects=suspects, until=until),
        )

    def _on_trial(self) -> Judgement | None:
        """A lower rung failed too, while others are suspect."""
        trial, rejection, rung = self._asked.trial, self._rejection, self._failed.rung
        if trial is None or rejection.finite or rung in trial.suspects or rejection.step > trial.until:
            return None
        others = ", ".join(trial.suspects)
        # A discontinuity belongs to no single step: it is the same if it shows where the suspect was watched.
        watched = max((step_of(name) for name in trial.suspects), default=0)
        same = rejection.kind is Kind.PROBATION and rejection.step > watched
        if same or rejection.step == trial.until:
            why = (
                f"{rung or 'a fresh start'} fails at step {rejection.step} too, so {others} is not the cause"
            )
            return self._without_blame(why)
        if not rejection.in_probation and rejection.kind is not Kind.PROBATION:
            return None
        refused = self._why_not_lower()
        if not refused:
            return self._judged(
                Action.LOWER_RUNG,
                f"{rung} fails soon after it was loaded, at step {rejection.step}: whether {others} is to "
                "blame is tried with an older checkpoint",
                avoid=self._group(),
            )
        self._evidence.append(f"no older checkpoint is tried: {refused}")
        what = f"{rung or 'a fresh start'} fails too, at step {rejection.step}"
        return self._without_blame(f"{what}: {others} cannot be shown to be bad")

    def _without_blame(self, why: str) -> Judgement:
        """It comes from the data, the device or the job: leave the data out if that is allowed, or take the
        step as it is; one that is not finite is then a matter for the user's `nan_policy`."""
        asked, rejection, window = self._asked, self._rejection, self._rejection.window
        a_step = rejection.kind is Kind.STEP
        verdict = REPRODUCIBLE if a_step else ""
        if a_step and asked.may_skip and window is not None:
            if any(one.decided.skip == window for one in asked.before):
                return self._stop(f"{why}; its data are left out already", REPRODUCIBLE)
            reason = f"{why}; batches {window.first} to {window.last} of epoch {window.epoch} are left out"
            return self._judged(Action.RESTART, reason, REPRODUCIBLE, skip=window, acquit=self._cleared())
        cause = f"{why}; the cause is the data, the device or the job"
        if rejection.counters:
            return self._stop(f"{why}; there is no other state to go on from", verdict)
        how = How.TOLERATED if a_step else How.SHIFT
        known = [one for past in asked.before for one in past.decided.settled if one.shown]
        if settled_as(known, how, rejection.step, window, self._failed.world_size) is not None:
            return self._stop(f"{cause}; step {rejection.step} was already to be taken as it is", verdict)
        if a_step and asked.nan_policy == "raise":
            return self._stop(f"{cause}, and validation.nan_policy is raise", verdict)
        then = f"validation.nan_policy = {asked.nan_policy} applies to step {rejection.step}"
        if not a_step:
            then = f"the shift up to step {rejection.step} is taken as it is"
        reason = f"{cause}: {then}"
        settled = [self._settled(how, reason)]
        return self._judged(Action.RESTART, reason, verdict, settled=settled, acquit=self._cleared())

    def _settled(self, how: How, why: str) -> Settled:
        rejection = self._rejection
        world = self._failed.world_size
        return Settled(
            step=rejection.step, how=how, window=rejection.window, world_size=world, shown=True, why=why
        )

    # -- rolling back, and ends -----------------------------------------------------------------------------

    def _roll_back(self) -> Judgement:
        """Go back past the newest checkpoint; the second time, past the one that was gone back to first."""
        asked, rungs = self._asked, [name for name in self._asked.rungs if name not in self._asked.avoid]
        lowered = sum(one.action == Action.LOWER_RUNG for one in asked.episode)
        again = any(_kind(one) is Kind.ROLLBACK for one in asked.episode if one.number != self._failed.number)
        past = 1
        if again and self._failed.rung in rungs:
            past = rungs.index(self._failed.rung) + 1
        why = f"too many steps in a row were not finite, the last one {self._rejection.step}"
        if lowered >= MAX_LOWER_RUNGS or len(rungs) <= past:
            left = "checkpoints were passed over already" if lowered else "checkpoint is left to go back to"
            return self._stop(f"{why}, and {lowered or 'no'} {left}", "")
        return self._judged(
            Action.LOWER_RUNG, f"{why}: go back past {rungs[past - 1]}", avoid=list(rungs[:past])
        )

    def _stop(self, reason: str, verdict: str) -> Judgement:
        """Stop. What is suspect must not stay so for ever when nothing more will be found out about it."""
        acquit = self._cleared() if verdict != DEVICE else []
        return self._judged(Action.STOP, reason, verdict, acquit=acquit)

    def _cleared(self) -> list[str]:
        """The suspects, if something other than they has failed too."""
        trial = self._asked.trial
        return trial.suspects if trial is not None and self._failed.rung not in trial.suspects else []

    def _judged(
        self,
        action: Action,
        reason: str,
        verdict: str = "",
        *,
        rotate_by: int | None = None,
        exclude: Sequence[Exclusion] = (),
        found: Fit | None = None,
        **more: Any,
    ) -> Judgement:
        """`more`: what is found out, and the orders for the next attempt."""
        orders = {"trial": None if more.get("acquit") else self._asked.trial, **more}
        return Judgement(
            action=action,
            reason=reason,
            findings=Findings(verdict=verdict, **orders),
            evidence=self._evidence,
            rotate_by=rotate_by,
            exclude=list(exclude),
            found=found,
        )


def _told(rejection: Rejection) -> str:
    bad = [one.rank for one in rejection.bad]
    whose = f" on {list_ranks(bad)}" if bad else ""
    again = ", and again when it was re-run in place" if rejection.rerun else ""
    why = "; ".join(rejection.reasons) or "no reason given"
    return f"step {rejection.step} was rejected{whose}{again}: {why}"


def _kind(attempt: PastAttempt) -> Kind | None:
    return attempt.rejection.kind if attempt.rejection is not None else None
