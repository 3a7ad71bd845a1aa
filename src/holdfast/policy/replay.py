"""What it means that a step which was rejected is accepted when the next attempt replays it. Pure.

The work is the same, and the group is the same; what may differ is the device of each rank, and the state
that the step began from. So for each rank that was bad:

* the same state, another device: only the device differs, so the **device** it was on is at fault;
* the same state, the same device: it passes, so it was **transient**;
* another state: it was damaged in the memory of that process, which is gone: **transient** too;
* a state that is not known, or no rank that is known to have been bad: **transient**, because nothing more is
  shown.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast.policy.rejection import Place, Rerun


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


def _transient(place: Place, evidence: str) -> Finding:
    return Finding(verdict="transient", place=place, evidence=evidence)


def _named(place: Place) -> str:
    return (
        f"{place.node or 'this node'}, device {place.device}" if place.device else place.node or "this node"
    )
