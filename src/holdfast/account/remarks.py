"""What a run met without failing: dropped steps, stops, slow ranks, refusals, missing copies. Pure.

None of these ends an attempt, and each of them is something that its owner wants to know of: a run whose page
says "no incident" has met none of them either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.account.incidents import Incident
from holdfast.checkpoint.identity import parse_name
from holdfast.journal.cluster_events import StopAsked, StopSaved
from holdfast.journal.events import (
    DrainFailed,
    Line,
    Resumed,
    RungRejected,
    SaveFailed,
    StepRejected,
    StepsDone,
)
from holdfast.journal.straggler_events import StragglerFound
from holdfast.journal.text import duration, plural, printable

NAMED = 5
"""Steps that are named one by one."""


@dataclass
class Remark:
    """One kind of thing that happened, once or often."""

    kind: str
    """dropped, stop, stopped, resized, slow, refused, save or copy."""
    at: float
    """The first time."""
    what: str
    next: str
    count: int = 1
    short: str = ""
    """Of a slow rank: who, and what it cost so far, for the closing line."""


def remarks(lines: Sequence[Line], found: Sequence[Incident] = ()) -> list[Remark]:
    """Everything of that sort, oldest first; `found`: refusals that these tell of are not told again."""
    told = {text.partition(":")[0] for incident in found for text in incident.refused}
    kept: dict[tuple[str, str], Remark] = {}
    dropped: dict[int, StepRejected] = {}
    first_drop = 0.0
    slow: dict[tuple[int | None, str], list[Line]] = {}
    last_step = 0
    for line in lines:
        body = line.body
        if isinstance(body, StepRejected) and body.then == "dropped":
            first_drop = first_drop or line.at
            dropped.setdefault(body.step, body)
            continue
        if isinstance(body, StragglerFound):
            slow.setdefault((body.rank, body.node), []).append(line)
            continue
        if isinstance(body, StepsDone):
            last_step = max(last_step, body.first + max(len(body.seconds), 1) - 1)
        remark = _of(line, told)
        if remark is None:
            continue
        key = (remark.kind, remark.what)
        if key in kept:
            kept[key].count += 1
        else:
            kept[key] = remark
    for (rank, node), times in slow.items():
        kept[("slow", f"{rank} {node}")] = _slow(times, last_step)
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


def _slow(times: Sequence[Line], last_step: int) -> Remark:
    """Of one rank or node: the newest figures, and what they come to since it was first named."""
    found = [line.body for line in times if isinstance(line.body, StragglerFound)]
    newest, since = found[-1], found[0].step
    who = f"rank {newest.rank} on {newest.node}" if newest.rank is not None else f"node {newest.node}"
    short = f"{printable(who)} slowed the others"
    if newest.seconds:
        short += f" by {duration(newest.seconds)} a step"
        whole = newest.seconds * (last_step - since)
        short += f", about {duration(whole)} in all since step {since}" if last_step > since else ""
    to_do = "look at that device or node; straggler.stop_if_detected acts by itself"
    return Remark("slow", times[0].at, f"{short}: {printable(newest.why)}", to_do, len(times), short)


def resized(body: Resumed) -> str:
    """What going on with another number of ranks changed; empty if it is the same number."""
    was, now = body.saved_by, body.world_size
    if not was or not now or was == now:
        return ""
    return (
        f"went on from step {body.step} with {plural(now, 'rank')}, where {was} had saved: models and "
        "optimizers were resharded, the counts of samples and tokens shared out, and the data goes on where it "
        "was; random generators are seeded anew on each rank, so dropout and the like differ from now on"
    )


def _of(line: Line, told: set[str]) -> Remark | None:
    body = line.body
    match body:
        case StopAsked():
            return Remark(
                "stop",
                line.at,
                f"asked to stop: {printable(body.detail)}",
                "run the same command to go on from there",
            )
        case Resumed() if text := resized(body):
            return Remark("resized", line.at, text, "nothing to do, if that many ranks are what you want")
        case StopSaved():
            return Remark(
                "stopped", line.at, f"stopped after step {body.step}, saved", "run the same command to go on"
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
