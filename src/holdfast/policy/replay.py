"""What it means that a step which was rejected comes up again: accepted this time, or bad once more. Pure.

*Accepted.* The work is the same, and the group is the same; what may differ is the device of each rank, and
the state that the step began from. So for each rank that was bad:

* the same state, another device: only the device differs, so the **device** it was on is at fault;
* the same state, the same device: it passes, so it was **transient**;
* another state: it was damaged in the memory of that process, which is gone: **transient** too;
* a state that is not known, or no rank that is known to have been bad: **transient**, because nothing more is
  shown.

*Bad once more*, and not a number: `settle` says whether the ranks know enough to go on by themselves. What
was loaded is acquitted if a lower rung fails at the very step at which it failed. Where there is no lower
rung the same one is tried twice, on other devices if there are any. After that the step is left to the user's
`validation.nan_policy`, as if nothing had been loaded: that costs no restart. It is safe, because a bad state
makes the steps after it fail as well, and `validation.max_consecutive` of them in a row end the run or take
it back; data that is bad fails in its own step only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.policy.rejection import Place, RankResult, Rerun, Settled, Trial
from holdfast.policy.whereabouts import guilty_places


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    verdict: str
    """device or transient."""
    place: Place | None
    """Where it happened; None if no rank is known to have been bad."""
    evidence: str


def judge_replay(rerun: Rerun, now: Mapping[int, Place], same: Mapping[int, bool | None]) -> list[Finding]:
    """One finding for each rank that was bad; `same`: whether a rank's state was equal, None if unknown."""
    findings = []
    for one in rerun.bad:
        old, place = Place(one.node, one.device), now.get(one.rank)
        where = _named(old)
        told = f"rank {one.rank} failed step {rerun.step} on {where}"
        if place is None:
            findings.append(
                _transient(old, f"{told}; that rank does not exist any more, and the step passes")
            )
        elif same.get(one.rank) is None:
            findings.append(_transient(old, f"{told}, from a state that is not known, and passes now"))
        elif not same[one.rank]:
            findings.append(
                _transient(
                    old,
                    f"{told} and passes from another state: what it began from was damaged in the memory of "
                    "that process",
                )
            )
        elif place == old:
            findings.append(_transient(old, f"{told} and passes there now, from the same state"))
        else:
            evidence = f"{told} and passes on {_named(place)}: the same work from the same state"
            findings.append(Finding(verdict="device", place=old, evidence=evidence))
    if not rerun.bad:
        evidence = f"step {rerun.step} was rejected, on a rank that is not known, and passes now"
        findings.append(Finding(verdict="transient", place=None, evidence=evidence))
    return findings


class Settling(msgspec.Struct, frozen=True, kw_only=True):
    """Why the ranks go on by themselves with a step that is not finite."""

    why: str
    acquit: list[str] = []
    """Checkpoints that are suspect no more."""
    shown: bool = False
    """Whether it was compared with something, now or before: then too many in a row are the work's own."""
    here: bool = False
    """Whether this attempt has found it out."""


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
    """Why a step that is not finite needs no other attempt, though what was loaded is on probation or a
    suspect on trial; None if the launcher has to be asked.

    `results`: of every rank. `settled`: what is known of the step. `restarts_left`: None if not known.
    `left_out`: the launcher would leave the step's data out, if it can restart. `ran_again`: it was, in
    place; who wants that wants to know the cause, also if no restart is left.
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


def _transient(place: Place, evidence: str) -> Finding:
    return Finding(verdict="transient", place=place, evidence=evidence)


def _named(place: Place) -> str:
    return (
        f"{place.node or 'this node'}, device {place.device}" if place.device else place.node or "this node"
    )
