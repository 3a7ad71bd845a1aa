"""What a run met without failing: dropped steps, stops, slow ranks, refusals, missing copies. Pure.

None of these ends an attempt, and each of them is something that its owner wants to know of: a run whose page
says "no incident" has met none of them either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.account.incidents import Incident, headline
from holdfast.checkpoint.identity import parse_name
from holdfast.journal.account_events import STOP, Account
from holdfast.journal.cluster_events import StopAsked, StopSaved
from holdfast.journal.events import DrainFailed, Line, RungRejected, SaveFailed, StepRejected
from holdfast.journal.straggler_events import StragglerFound
from holdfast.journal.text import duration, plural, printable

NAMED = 5
"""Steps that are named one by one."""


@dataclass
class Remark:
    """One kind of thing that happened, once or often."""

    kind: str
    """dropped, stop, stopped, slow, refused, save or copy."""
    at: float
    """The first time."""
    what: str
    next: str
    count: int = 1


def remarks(lines: Sequence[Line], found: Sequence[Incident] = ()) -> list[Remark]:
    """Everything of that sort, oldest first; `found`: refusals that these tell of are not told again."""
    told = {text.partition(":")[0] for incident in found for text in incident.refused}
    kept: dict[tuple[str, str], Remark] = {}
    dropped: dict[int, StepRejected] = {}
    first_drop = 0.0
    stopped = {
        line.body.attempt for line in lines if isinstance(line.body, Account) and line.body.kind == STOP
    }
    for line in lines:
        body = line.body
        if isinstance(body, StopAsked | StopSaved) and line.attempt in stopped:
            continue  # told whole, by its account
        if isinstance(body, StepRejected) and body.then == "dropped":
            first_drop = first_drop or line.at
            dropped.setdefault(body.step, body)
            continue
        remark = _of(line, told)
        if remark is None:
            continue
        key = (remark.kind, remark.what if remark.kind != "slow" else remark.what.partition(":")[0])
        if key in kept:
            kept[key].count += 1
            if remark.kind == "slow":
                kept[key].what = remark.what  # the newest figures
        else:
            kept[key] = remark
    if dropped:
        kept[("dropped", "")] = _dropped(dropped, first_drop)
    return sorted(kept.values(), key=lambda remark: remark.at)


def _dropped(dropped: dict[int, StepRejected], at: float) -> Remark:
    steps = sorted(dropped)
    named = ", ".join(map(str, steps[:NAMED])) + (
        f" and {len(steps) - NAMED} more" if len(steps) > NAMED else ""
    )
    why = "; ".join(printable(reason) for reason in dropped[steps[0]].reasons[:2]) or "its result was bad"
    return Remark(
        "dropped",
        at,
        f"{plural(len(steps), 'step')} dropped ({named}), as the result must not be used: {why}",
        "look at those batches if it goes on; validation.rerun_mode = validate_results names the culprit",
        len(steps),
    )


def _of(line: Line, told: set[str]) -> Remark | None:
    body = line.body
    match body:
        case Account(kind="stop"):
            return Remark("stop", line.at, f"{headline(body)}: {printable(body.done)}", printable(body.next))
        case StopAsked():
            return Remark(
                "stop",
                line.at,
                f"asked to stop: {printable(body.detail)}",
                "run the same command to go on from there",
            )
        case StopSaved():
            return Remark(
                "stopped", line.at, f"stopped after step {body.step}, saved", "run the same command to go on"
            )
        case StragglerFound():
            who = f"rank {body.rank} on {body.node}" if body.rank is not None else f"node {body.node}"
            cost = f", {duration(body.seconds)} of every step" if body.seconds else ""
            return Remark(
                "slow",
                line.at,
                f"{printable(who)} slowed the others{cost}: {printable(body.why)}",
                "look at that device or node; straggler.stop_if_detected acts by itself",
            )
        case RungRejected() if body.checkpoint not in told:
            name = parse_name(body.checkpoint)
            which = f"the checkpoint at step {name.step}" if name else printable(body.checkpoint)
            why = "; ".join(printable(reason) for reason in body.reasons[:2])
            return Remark(
                "refused", line.at, f"{which} was refused: {why}", "nothing to do: an older one was used"
            )
        case SaveFailed():
            text = f"a save failed: {printable(body.error)}"
            return Remark("save", line.at, text, "look at the checkpoint root's space and permissions")
        case DrainFailed():
            text = f"a copy was not made on {printable(body.remote)}: {printable(body.error)}"
            return Remark("copy", line.at, text, "look at the remote root; it is tried again")
        case _:
            return None
