"""Events of what training produces: steps, rejections, verdicts, probation, standing, and stragglers."""

from __future__ import annotations

import math
from statistics import median

import msgspec

from holdfast.base import Rendered, duration, number, plural, printable
from holdfast.journal import Event, because


def encode_loss(loss: float | None) -> float | str | None:
    """A loss as it is journalled. JSON has no NaN, and a NaN must not read like "no loss"."""
    if loss is None or math.isfinite(loss):
        return loss
    return "nan" if math.isnan(loss) else "inf" if loss > 0 else "-inf"


def decode_loss(loss: float | str | None) -> float | None:
    """The inverse of `encode_loss`. Text that no release writes reads as NaN: not a number, yet recorded."""
    if isinstance(loss, str):
        return {"inf": math.inf, "-inf": -math.inf}.get(loss, math.nan)
    return loss


class StepsDone(Event, tag="steps_done"):
    """A batch of completed steps, written about once a second."""

    first: int
    """Step of the first entry; the rest follow one by one."""
    seconds: list[float]
    loss: list[float | str | None] = msgspec.field(default_factory=list)
    """Each as `encode_loss` gives it: None is a step whose loss was not recorded."""
    grad_norm: list[float | str | None] = msgspec.field(default_factory=list)
    """Like `loss`, where the loop gave any."""
    samples: list[str] = msgspec.field(default_factory=list)
    """Digest of each step's sample ids, where the loop gave them."""
    data: float = 0.0
    """Seconds of an attempt's first step until its first batch was there; 0 in every other batch of steps."""

    def render(self) -> Rendered:
        count = max(len(self.seconds), len(self.loss), 1)
        last = self.first + count - 1
        text = f"step {last}" if count == 1 else f"steps {self.first}–{last}"
        recorded = [loss for loss in map(decode_loss, self.loss) if loss is not None]
        if len(recorded) == 1:
            text += f", loss {number(recorded[0])}"
        elif recorded:
            text += f", loss {number(recorded[0])} → {number(recorded[-1])}"
        broken = sum(1 for loss in recorded if not math.isfinite(loss))
        if broken:
            text += f" ({broken} not finite)"
        if self.seconds:
            text += f", {duration(sum(self.seconds) / len(self.seconds))} a step"
        return Rendered(text, "progress")


class StepRejected(Event, tag="step_rejected"):
    """The group rejected a step's result before the optimizer used it (with deferred checks, after)."""

    step: int
    reasons: list[str]
    ranks: list[int] = msgspec.field(default_factory=list)
    """The ranks whose own results, before any reduction, were bad; empty if not known."""
    then: str = ""
    """What was done: rerun, dropped, stop, restart."""
    batch: str = ""
    """The data of the step: batch and epoch, and the samples of those ranks as far as known."""
    in_a_row: int = 0
    """Steps dropped in a row so far; 0 where that is not to be shown."""

    def render(self) -> Rendered:
        whose = f" on {plural(len(self.ranks), 'rank')} ({', '.join(map(str, self.ranks))})"
        text = f"step {self.step} rejected{whose if self.ranks else ''}"
        text += f": {printable(self.then)}" if self.then else ""
        batch = [printable(self.batch)] if self.batch else []
        return Rendered(text, "fault", [*batch, *(printable(item) for item in self.reasons)])


class Verdict(Event, tag="verdict"):
    """What a rejected step turned out to be."""

    verdict: str
    """transient, device or reproducible."""
    step: int
    evidence: list[str]
    node: str = ""
    device: str = ""
    """What it accuses or, if transient, where it was counted."""

    def render(self) -> Rendered:
        where = "/".join(printable(part) for part in (self.node, self.device) if part)
        text = f"verdict on step {self.step}: {printable(self.verdict)}{', ' + where if where else ''}"
        return Rendered(text, "decision", because(self.evidence))


class ProbationEnded(Event, tag="probation_ended"):
    """The steps after a resume during which the loaded state is watched are over."""

    checkpoint: str
    outcome: str
    """passed, breached, or unsettled (the attempt had to end first)."""
    first: int
    last: int
    evidence: list[str] = msgspec.field(default_factory=list)

    def render(self) -> Rendered:
        text = f"probation of {printable(self.checkpoint)}, steps {self.first}–{self.last}"
        style = {"passed": "good", "breached": "fault"}.get(self.outcome, "plain")
        details = [printable(item) for item in self.evidence]
        return Rendered(f"{text}: {printable(self.outcome)}", style, details)


class StandingChanged(Event, tag="standing_changed"):
    """What is known about a checkpoint has changed; the record is durable already."""

    checkpoint: str
    standing: str
    evidence: list[str]

    def render(self) -> Rendered:
        style = {"proven": "good", "acquitted": "good"}.get(self.standing, "warning")
        text = f"{printable(self.checkpoint)} is {printable(self.standing)}"
        return Rendered(text, style, because(self.evidence))


class ThroughputLow(Event, tag="throughput_low"):
    """Steps after a resume take much longer than before it. Accuses a node, never the checkpoint."""

    seconds: float
    before: float
    """Median step time now, and before the checkpoint was saved."""
    probes: list[str]
    """What a short probe showed on each rank."""
    accused: str = ""
    """The node that is slower than the others; empty if none is."""

    def render(self) -> Rendered:
        text = f"slow: {duration(self.seconds)} a step, {duration(self.before)} before this resume"
        accused = f"; {printable(self.accused)} is slower than the others" if self.accused else ""
        return Rendered(f"{text}{accused}", "warning", [printable(item) for item in self.probes])


class DataSkipped(Event, tag="data_skipped"):
    """Samples that were left out because they fail everywhere."""

    step: int
    """The step that would have used them."""
    epoch: int
    first: int
    last: int
    """Batches of the epoch, counted from 0."""
    reason: str

    def render(self) -> Rendered:
        what = f"batches {self.first}–{self.last} of epoch {self.epoch}"
        return Rendered(f"left out at step {self.step}: {what}", "warning", because([self.reason]))


class DeterminismMeasured(Event, tag="determinism_measured"):
    """How much the same step's result differed between two runs of it, relative to its size.

    Each step counts with its worst rank.
    """

    steps: int
    p50: float
    p90: float
    p99: float
    p999: float
    largest: float
    ranks: int = 1
    """How many ranks were compared; older releases looked at rank 0 alone."""
    worst_rank: int = 0
    """The rank with the largest difference."""

    def render(self) -> Rendered:
        measured = {
            "p50": self.p50,
            "p90": self.p90,
            "p99": self.p99,
            "p99.9": self.p999,
            "largest": self.largest,
        }
        text = ", ".join(f"{name} {value:.2g}" for name, value in measured.items())
        where = f" (rank {self.worst_rank})" if self.ranks > 1 and self.largest else ""
        on = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        return Rendered(f"two runs of {plural(self.steps, 'step')}{on} differ by {text}{where}", "plain")


# --- stragglers ---------------------------------------------------------------------------------------------


class StragglersReported(Event, tag="stragglers_reported"):
    """What the ranks measured since the last report. The lists have one entry per row: a rank, or a node."""

    step: int
    """The last step measured."""
    steps: int
    """How many steps were measured, on the rank with the fewest."""
    seconds: float
    """Since the last report."""
    step_seconds: float
    """The median over the ranks of the time of a step."""
    ranks: list[int]
    """The rank of each row; for a node, its slowest rank."""
    nodes: list[str] = msgspec.field(default_factory=list)
    sections: dict[str, list[float]] = msgspec.field(default_factory=dict)
    """By section, the seconds of an average step until the rank arrived."""
    waiting: list[float] = msgspec.field(default_factory=list)
    """Seconds of an average step that the rank is known to have waited for others."""
    relative: list[float | None] = msgspec.field(default_factory=list)
    """Speed relative to the other ranks: 1 is as fast as they are."""
    individual: list[float | None] = msgspec.field(default_factory=list)
    """Speed relative to its own best."""
    by_node: bool = False
    """Whether a row is a node, because there are too many ranks to list."""
    group_slower: bool = False
    """Most ranks lost speed at once, so nobody could be named."""
    unclear: list[int] = msgspec.field(default_factory=list)
    """Ranks that work far longer than others and are alone with their work, as a stage of a pipeline may be:
    whether they are slow or have more to do cannot be told."""
    exchange: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds of an average step that even the rank that waits least waits in the collectives of a group,
    by its ranks: `0,1,2`, or `0-1` for two that send to each other. The groups with most of it."""

    def behind(self, rank: int | None, node: str) -> float:
        """Seconds that the others waited for that rank (or, if it is None, for the slowest of that node):
        how much later than most of them it arrived in an average step, times the steps."""
        arrived = [sum(column[row] for column in self.sections.values()) for row in range(len(self.ranks))]
        mine = {
            row
            for row in range(len(self.ranks))
            if (self.ranks[row] == rank if rank is not None else self.nodes[row] == node)
        }
        others = [value for row, value in enumerate(arrived) if row not in mine]
        if not mine or not others or not self.sections:
            return 0.0
        return max(0.0, max(arrived[row] for row in mine) - median(others)) * self.steps

    def render(self) -> Rendered:
        what = "node" if self.by_node else "rank"
        text = f"{plural(len(self.ranks), what)} compared over {plural(self.steps, 'step')}"
        text += f" of {duration(self.step_seconds)}"
        rows = zip(self.relative, self.ranks, strict=False)
        scored = [(score, rank) for score, rank in rows if score is not None]
        if scored:
            score, rank = min(scored)
            text += f"; the slowest is rank {rank} with a score of {score:.2f}"
        if self.group_slower:
            text += "; most ranks are slower than they were, so nobody can be named"
        if self.unclear:
            who = ", ".join(map(str, self.unclear[:8]))
            text += f"; rank {who} has more work or is slow, which cannot be told"
        return Rendered(text, "warning" if self.group_slower else "progress")


class StragglerFound(Event, tag="straggler_found"):
    """A rank, or a node, that the others wait for."""

    step: int
    kind: str
    """compute, input, section, other, node or link."""
    section: str
    """Where most of the time goes; of a link, the group that it is in."""
    why: str
    """In words, with the figures."""
    rank: int | None = None
    """None for a whole node, and for a link."""
    node: str = ""
    device: str = ""
    relative: float | None = None
    individual: float | None = None
    seconds: float = 0.0
    """How much longer a step takes because of it."""
    then: str = "told"
    """told, stop (the run saves and stops) or exclude (it goes on without that device)."""
    ranks: list[int] = msgspec.field(default_factory=list)
    """Of a link: those between which it is, or the one whose links are all slow."""
    waits: float | None = None
    """Seconds of a step that it waits in collectives; None where that was not seen."""
    others_wait: float | None = None
    """The same of the others, their median."""

    def render(self) -> Rendered:
        then = {"stop": "; the run saves and stops", "exclude": "; the run goes on without it"}
        text = f"straggler: {printable(self.why)}{then.get(self.then, '')}"
        return Rendered(text, "fault" if self.then in then else "warning")
