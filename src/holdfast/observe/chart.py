"""Pictures as inline SVG: the loss over the steps, and seconds of a step by rank and section.

A run that resumes exactly draws the same curve again, on top of the lost part. So every attempt also has a
lane under the axis, which shows where it began, what was kept of it and what was done again.

Pure: numbers in, markup out. Everything that colour shows is also shown by a label, a dash or a shape. All
text is escaped here; nothing else goes into the markup but numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from holdfast.account import steps_done
from holdfast.base import number, printable
from holdfast.journal import JournalLine
from holdfast.journal.events import StragglersReported
from holdfast.train.stragglers import COMPUTE, INPUT, OTHER

# The losses of a run, one series per attempt. Pure: journal lines in, numbers out.


@dataclass(frozen=True)
class LossPoint:
    step: int
    loss: float
    """May be NaN or infinite, if it was recorded so."""
    at: float


@dataclass(frozen=True)
class AttemptLosses:
    attempt: int
    points: list[LossPoint] = field(default_factory=list)
    kept: int | None = None
    """The last step that still counts; later ones were done again by a later attempt. None: all count."""


def losses_by_attempt(lines: list[JournalLine]) -> list[AttemptLosses]:
    """Each attempt's losses in the order of its steps; attempts that recorded none are left out."""
    points: dict[int, list[LossPoint]] = {}
    first: dict[int, int] = {}
    for step in steps_done(lines):
        first.setdefault(step.attempt, step.step)
        if step.loss is not None:
            points.setdefault(step.attempt, []).append(LossPoint(step.step, step.loss, step.end))
    series = []
    for attempt in sorted(points):
        later = [step for number, step in first.items() if number > attempt]
        kept = min(later) - 1 if later and min(later) <= points[attempt][-1].step else None
        series.append(AttemptLosses(attempt, points[attempt], kept))
    return series


# Seconds of a step by rank and section as inline SVG: shows at a glance where each rank loses time.
#
# A cell is darker the more it takes beyond the median of its column, as a fraction of a step. Waiting is
# shown but not coloured: a rank that waits is not slow. If there are too many ranks, rows are nodes, each
# with the values of its worst rank.
#
# Pure: an event in, markup out. Every cell also says its number, as text or when pointed at. All text is
# escaped here; nothing else goes into the markup but numbers.


MOST_RANKS = 64
"""Most rows for ranks; more ranks are grouped by node."""
MOST_NODES = 256
ROW, HEAD = 24, 34
SHADES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Fractions of a step above the median at which a cell gets darker."""
WAITING = "waiting"


@dataclass(frozen=True)
class ChartRow:
    label: str
    name: str
    """In full, shown when pointed at."""
    seconds: list[float]


def columns(event: StragglersReported) -> list[str]:
    """The sections in the order of a step, with those that the script has named between the others."""
    named = sorted(name for name in event.sections if name not in (INPUT, COMPUTE, OTHER))
    return [name for name in (INPUT, COMPUTE, *named, OTHER) if name in event.sections]


def rows(event: StragglersReported) -> list[ChartRow]:
    names = columns(event)
    values = [
        [*(event.sections[name][at] for name in names), event.waiting[at] if event.waiting else 0.0]
        for at in range(len(event.ranks))
    ]
    nodes = [event.nodes[at] if at < len(event.nodes) else "" for at in range(len(event.ranks))]
    if event.by_node or len(values) > MOST_RANKS:
        return _by_node(values, nodes)
    order = sorted(range(len(values)), key=lambda at: (nodes[at], event.ranks[at]))
    several = len(set(nodes)) > 1
    return [
        ChartRow(
            f"{printable(nodes[at], 12)} · {event.ranks[at]}" if several else f"rank {event.ranks[at]}",
            f"rank {event.ranks[at]}{f' on {printable(nodes[at])}' if nodes[at] else ''}",
            values[at],
        )
        for at in order
    ]


def draw_heat_map(event: StragglersReported, *, width: int, name: str) -> str:
    """The map as an SVG element. `name` makes its ids unique in the page."""
    shown, names = rows(event), [*columns(event), WAITING]
    left = 128 if width > 600 else 92
    wide = (width - left - 2) / len(names)
    height = HEAD + ROW * len(shown) + 2
    parts = [
        f'<svg class="chart {escape(name)}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="heat-{escape(name)}-title heat-{escape(name)}-desc">',
        f'<title id="heat-{escape(name)}-title">Milliseconds of a step by rank and section</title>',
        f'<desc id="heat-{escape(name)}-desc">{escape(describe_heat_map(event))}</desc>',
    ]
    room = max(3, int(wide / 8.5))
    medians = _medians(shown)
    for at, column in enumerate(names):
        x = left + wide * (at + 0.5)
        parts.append(f'<text x="{x:.1f}" y="22" class="axis mid">{escape(printable(column, room))}</text>')
    for line, row in enumerate(shown):
        y = HEAD + ROW * line
        label = escape(printable(row.label, int(left / 7)))
        parts.append(f'<text x="{left - 8}" y="{y + 16}" class="axis end">{label}</text>')
        for at, seconds in enumerate(row.seconds):
            shade = 0 if at == len(names) - 1 else _shade(seconds - medians[at], event.step_seconds)
            x = left + wide * at
            full = f"{row.name}, {printable(names[at])}: {1000 * seconds:.3g} ms"
            parts.append(
                f'<g><title>{escape(full)}</title><rect x="{x:.1f}" y="{y}" width="{wide - 1:.1f}" '
                f'height="{ROW - 1}" class="h{shade}"/>'
                f'<text x="{x + wide / 2:.1f}" y="{y + 16}" class="cell mid c{shade}">'
                f"{1000 * seconds:.3g}</text></g>"
            )
    return "".join([*parts, "</svg>"])


def describe_heat_map(event: StragglersReported) -> str:
    """What the map shows, in words."""
    shown, names = rows(event), columns(event)
    medians = _medians(shown)
    worst = max(
        (
            (row.seconds[at] - medians[at], row.name, column)
            for row in shown
            for at, column in enumerate(names)
        ),
        default=None,
    )
    text = f"{len(shown)} rows over {len(names)} sections, {event.steps} steps up to step {event.step}."
    if worst is not None and event.step_seconds and worst[0] >= SHADES[0] * event.step_seconds:
        text += f" Most is lost by {worst[1]} in {printable(worst[2])}: {1000 * worst[0]:.3g} ms a step."
    return text


def _by_node(values: Sequence[list[float]], nodes: Sequence[str]) -> list[ChartRow]:
    members: dict[str, list[list[float]]] = {}
    for mine, node in zip(values, nodes, strict=True):
        members.setdefault(node, []).append(mine)
    rows = []
    slowest = sorted(members, key=lambda node: -max(sum(mine[:-1]) for mine in members[node]))
    for node in sorted(slowest[:MOST_NODES]):
        ranks = members[node]
        worst = [max(column) for column in zip(*ranks, strict=True)]
        worst[-1] = min(mine[-1] for mine in ranks)  # the rank that waits least is the late one
        shown = printable(node) or "(no name)"
        rows.append(ChartRow(shown, f"node {shown}, the worst of {len(ranks)} rows", worst))
    return rows


def _medians(shown: Sequence[ChartRow]) -> list[float]:
    return [statistics.median(column) for column in zip(*(row.seconds for row in shown), strict=True)]


def _shade(over: float, step: float) -> int:
    return sum(over >= limit * step for limit in SHADES) if step else 0


SERIES = 6
"""Attempt colours in the style sheet; after so many they repeat, but labels still tell attempts apart."""
MAX_BROKEN = 12
"""Most values per attempt that are not finite and get a mark of their own."""
MAX_LANES = 10
LANE = 18
USUAL_LANES = 3
"""Lanes that fit into the given height; more lanes make the drawing taller."""
MOST_NAMED = 20
"""Most incidents, attempts and checkpoints that the description names one by one."""
MANY_SERIES = 40
"""With more attempts than this, each is drawn with fewer points, so that all together have a few thousand."""


@dataclass(frozen=True)
class FaultMark:
    incident: int
    step: int
    what: str


@dataclass(frozen=True)
class Chart:
    """What is to be drawn."""

    series: list[AttemptLosses]
    faults: list[FaultMark] = field(default_factory=list)
    commits: list[tuple[int, int, str]] = field(default_factory=list)
    """Attempt, step and name of each committed checkpoint."""
    rejected: list[tuple[int, str, str]] = field(default_factory=list)
    """Step, name and reason of each rung that was not used."""
    reference: list[tuple[int, float]] = field(default_factory=list)


def _drawable(value: float) -> float:
    """A loss, even an exploded one, within the range in which differences of floats stay finite."""
    return min(max(value, -1e300), 1e300)


class _Drawing:
    """Maps steps and losses to a drawing of the given size."""

    def __init__(self, chart: Chart, width: int, height: int) -> None:
        self.width = width
        self.lanes = {one.attempt: index for index, one in enumerate(chart.series)}
        hidden = max(0, len(self.lanes) - MAX_LANES)
        self.lanes = {attempt: index - hidden for attempt, index in self.lanes.items() if index >= hidden}
        self.height = height + LANE * max(0, len(self.lanes) - USUAL_LANES)
        self.left, self.right, self.top = 74 if max(self.lanes, default=0) < 1000 else 96, width - 18, 40
        self.bottom = self.height - 54 - LANE * len(self.lanes)
        self.buckets = width if len(chart.series) <= MANY_SERIES else max(2, 2 * width // len(chart.series))
        steps = [point.step for one in chart.series for point in one.points]
        steps += [step for step, _ in chart.reference] + [fault.step for fault in chart.faults]
        steps += [step for _, step, _ in chart.commits] + [step for step, _, _ in chart.rejected]
        values = [point.loss for one in chart.series for point in one.points]
        values = [_drawable(v) for v in values + [loss for _, loss in chart.reference] if math.isfinite(v)]
        self.low_step, self.high_step = min(steps, default=0), max(steps, default=1)
        if self.high_step == self.low_step:
            self.high_step += 1
        self.ticks = nice_ticks(min(values, default=0.0), max(values, default=1.0))
        self.low, self.high = self.ticks[0], self.ticks[-1]

    def x(self, step: float) -> float:
        share = (step - self.low_step) / (self.high_step - self.low_step)
        return self.left + share * (self.right - self.left)

    def lane(self, attempt: int) -> float | None:
        """Where an attempt's lane is; None for the oldest of very many."""
        index = self.lanes.get(attempt)
        return None if index is None else self.bottom + 40 + LANE * index

    def y(self, loss: float) -> float:
        share = (_drawable(loss) - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.top)


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round values that span [low, high]."""
    if not high > low:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    raw = high / wanted - low / wanted  # divided first: high - low may overflow
    if not math.isfinite(raw) or raw < 1e-300:
        return [low, high]
    unit = 10.0 ** math.floor(math.log10(raw))
    size = next((unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw), unit * 10)
    first, last = math.floor(low / size), math.ceil(high / size)
    ticks = [round(index * size, 12) if size > 1e-9 else index * size for index in range(first, last + 1)]
    return ticks if len(ticks) > 1 and ticks[-1] > ticks[0] else [low, high]


def thin(points: Sequence[tuple[int, float]], buckets: int) -> list[tuple[int, float]]:
    """At most about two points per bucket, the lowest and the highest, so that a spike stays visible."""
    if len(points) <= 2 * buckets:
        return list(points)
    kept: list[tuple[int, float]] = [points[0]]
    for index in range(buckets):
        part = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        low = min(part, key=lambda point: point[1])
        high = max(part, key=lambda point: point[1])
        kept.extend(sorted({low, high}))
    kept.append(points[-1])
    return kept


def draw(chart: Chart, *, width: int, height: int, name: str) -> str:
    """The chart as an SVG element. `name` makes its ids unique in the page."""
    frame = _Drawing(chart, width, height)
    parts = [
        f'<svg class="chart {escape(name)}" viewBox="0 0 {width} {frame.height}" role="img" '
        f'aria-labelledby="{escape(name)}-title {escape(name)}-desc">',
        f'<title id="{escape(name)}-title">Loss over steps, one line an attempt</title>',
        f'<desc id="{escape(name)}-desc">{escape(describe(chart))}</desc>',
        *_axes(frame),
        *_reference(chart, frame),
        *_series(chart.series, frame),
        *_faults(chart.faults, frame),
        *_lanes(chart, frame),
        "</svg>",
    ]
    return "\n".join(parts)


def describe(chart: Chart) -> str:
    """What the picture shows, in words."""
    sentences = []
    for series in chart.series[-MOST_NAMED:]:
        first, last = series.points[0], series.points[-1]
        text = (
            f"Attempt {series.attempt}: steps {first.step} to {last.step}, "
            f"loss {number(first.loss)} to {number(last.loss)}"
        )
        sentences.append(
            text + (f", rolled back after step {series.kept}." if series.kept is not None else ".")
        )
    sentences += [
        f"Incident {fault.incident}, last known step {fault.step}: {fault.what}."
        for fault in chart.faults[-MOST_NAMED:]
    ]
    sentences += [f"Checkpoint {name} was rejected: {why}." for _, name, why in chart.rejected[-MOST_NAMED:]]
    if max(len(chart.series), len(chart.faults), len(chart.rejected)) > MOST_NAMED:
        sentences.append(f"Of each kind only the last {MOST_NAMED} are named here.")
    sentences.append(f"{len(chart.commits)} checkpoints were committed.")
    if chart.reference:
        sentences.append("A reference curve is drawn underneath.")
    return " ".join(sentences)


def _axes(frame: _Drawing) -> list[str]:
    parts = ['<g class="axes">']
    for tick in frame.ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    parts.append(
        f'<text class="name" x="{frame.left - 8}" y="{frame.top - 18}" text-anchor="end">loss</text>'
    )
    wanted = 8 if frame.width > 600 else 4
    for tick in nice_ticks(frame.low_step, frame.high_step, wanted):
        if tick != int(tick) or not frame.low_step <= tick <= frame.high_step:
            continue
        x = frame.x(tick)
        anchor = "end" if x + 4 * len(str(int(tick))) > frame.width else "middle"
        parts.append(
            f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.bottom}" y2="{frame.bottom + 5}"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{frame.bottom + 20}" text-anchor="{anchor}">{int(tick)}</text>')
    parts.append(
        f'<line class="base" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}" y2="{frame.bottom}"/>'
    )
    parts.append(
        f'<text class="name" x="{frame.left - 8}" y="{frame.bottom + 20}" text-anchor="end">step</text></g>'
    )
    return parts


def _short(tick: float) -> str:
    """A value on the axis, short enough for the room beside it."""
    text = f"{tick:.6g}"
    return text if len(text) <= 8 else f"{tick:.2g}"


def _path(points: Iterable[tuple[int, float]], frame: _Drawing, classes: str) -> list[str]:
    """A line through the points, broken where a value is not finite."""
    paths: list[str] = []
    run: list[tuple[int, float]] = []
    for step, loss in [*points, (0, math.nan)]:
        if math.isfinite(loss):
            run.append((step, loss))
            continue
        if run:
            shown = thin(run, frame.buckets)
            if len(shown) == 1:
                paths.append(f'<circle class="{classes} dot" cx="{frame.x(run[0][0]):.1f}" '
                             f'cy="{frame.y(run[0][1]):.1f}" r="2"/>')  # fmt: skip
            else:
                at = " L".join(f"{frame.x(step):.1f} {frame.y(loss):.1f}" for step, loss in shown)
                paths.append(f'<path class="{classes}" d="M{at}"/>')
        run = []
    return paths


def _reference(chart: Chart, frame: _Drawing) -> list[str]:
    if not chart.reference:
        return []
    return ["<g><title>Reference</title>", *_path(chart.reference, frame, "reference"), "</g>"]


def _split(series: AttemptLosses) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """An attempt's points: those that count, and those that were done again later."""
    points = [(point.step, point.loss) for point in series.points]
    kept = [point for point in points if series.kept is None or point[0] <= series.kept]
    return kept, points[len(kept) :]


def _series(series: list[AttemptLosses], frame: _Drawing) -> list[str]:
    solid: list[str] = []
    dashed: list[str] = []
    labels: list[str] = []
    taken: list[tuple[float, float]] = []
    for index, one in enumerate(series):
        kept, lost = _split(one)
        opening = f'<g class="s{index % SERIES}"><title>Attempt {one.attempt}</title>'
        solid += [opening, *_path(kept, frame, "line"), "</g>"]
        dashed += [opening, *_path(kept[-1:] + lost, frame, "line lost")] if lost else [opening]
        for step in [step for step, loss in kept + lost if not math.isfinite(loss)][:MAX_BROKEN]:
            dashed.append(
                f'<text class="broken" x="{frame.x(step):.1f}" y="{frame.top + 10}" text-anchor="middle">'
                f"NaN<title>The loss of step {step} was not finite</title></text>"
            )
        dashed.append("</g>")
        labels += [opening, *_label(one, index, frame, taken), "</g>"]
    return solid + dashed + labels  # dashes above the lines that repeat them, names above everything


def _label(series: AttemptLosses, index: int, frame: _Drawing, taken: list[tuple[float, float]]) -> list[str]:
    """An attempt's mark and its name, above and to the right, clear of the names already there."""
    start = next(((p.step, p.loss) for p in series.points if math.isfinite(p.loss)), None)
    if start is None:
        return []
    x, y = frame.x(start[0]), frame.y(start[1])
    above = max(y - 10, 12)
    while any(abs(x - other_x) < 80 and abs(above - other_y) < 14 for other_x, other_y in taken):
        above -= 14
    # No room; with very many attempts the oldest have no lane to find them by either.
    if above < 12 or frame.lane(series.attempt) is None:
        return [_shape(index, x, y)]
    taken.append((x, above))
    anchor, shift = ("end", -8) if x > frame.right - 70 else ("start", 8)
    return [
        _shape(index, x, y),
        f'<text class="label" x="{x + shift:.1f}" y="{above:.1f}" text-anchor="{anchor}">'
        f"attempt {series.attempt}</text>",
    ]


def _shape(index: int, x: float, y: float) -> str:
    """The mark where an attempt begins; shapes tell attempts apart without colour."""
    shapes = (
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>',
        f'<rect class="mark" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>',
        f'<path class="mark" d="M{x:.1f} {y - 5.5:.1f} l5.5 9.5 h-11 z"/>',
        f'<path class="mark" d="M{x:.1f} {y - 6:.1f} l6 6 l-6 6 l-6 -6 z"/>',
    )
    return shapes[index % len(shapes)]


@dataclass(frozen=True)
class _Badge:
    """One incident, or several that are too close together for a badge each."""

    faults: tuple[FaultMark, ...]
    first: float
    last: float
    """Where the first and the last of them are."""
    middle: float
    half: float

    @property
    def label(self) -> str:
        return _label_of(self.faults)


def _label_of(faults: Sequence[FaultMark]) -> str:
    return str(faults[0].incident) if len(faults) == 1 else f"{len(faults)}×"


def _badge(faults: tuple[FaultMark, ...], frame: _Drawing) -> _Badge:
    at = [frame.x(fault.step) for fault in faults]
    half = max(10.0, 4.2 * len(_label_of(faults)) + 5)
    middle = min(max((min(at) + max(at)) / 2, half + 2), frame.width - half - 2)
    return _Badge(faults, min(at), max(at), middle, half)


def badges(faults: Iterable[FaultMark], frame: _Drawing) -> list[_Badge]:
    """In the order of steps, without overlap: neighbours that would touch become one badge."""
    placed: list[_Badge] = []
    for fault in sorted(faults, key=lambda fault: (fault.step, fault.incident)):
        newest = _badge((fault,), frame)
        while placed and newest.middle - newest.half < placed[-1].middle + placed[-1].half + 2:
            newest = _badge(placed.pop().faults + newest.faults, frame)
        placed.append(newest)
    return placed


def _faults(faults: list[FaultMark], frame: _Drawing) -> list[str]:
    parts: list[str] = []
    for badge in badges(faults, frame):
        first, many = badge.faults[0], len(badge.faults)
        named = f"Incident {first.incident}: {escape(first.what)} (last known step {first.step})"
        if many > 1:
            numbers = sorted(fault.incident for fault in badge.faults)
            listed = ", ".join(map(str, numbers[:MOST_NAMED])) + (" …" if many > MOST_NAMED else "")
            last = max(fault.step for fault in badge.faults)
            named = f"{many} incidents, last known steps {first.step} to {last}: {listed}"
        parts.append(f'<a href="#incident-{first.incident}" class="fault"><title>{named}</title>')
        if badge.last - badge.first >= 1:
            parts.append(
                f'<rect class="many" x="{badge.first:.1f}" y="{frame.top}" '
                f'width="{badge.last - badge.first:.1f}" height="{frame.bottom - frame.top}"/>'
            )
        x = (badge.first + badge.last) / 2 if badge.last - badge.first >= 1 else badge.first
        down = "" if badge.last - badge.first >= 1 else f"M{x:.1f} {frame.bottom} V{frame.top} "
        parts.append(
            f'<path d="{down or f"M{x:.1f} {frame.top} "}L{badge.middle:.1f} {frame.top - 8}"/>'
            f'<rect class="pill" x="{badge.middle - badge.half:.1f}" y="{frame.top - 28}" '
            f'width="{2 * badge.half:.1f}" height="20" rx="10"/>'
            f'<text x="{badge.middle:.1f}" y="{frame.top - 13.5}" text-anchor="middle">'
            f"{badge.label}</text></a>"
        )
    return parts


def _lanes(chart: Chart, frame: _Drawing) -> list[str]:
    """One lane per attempt: solid for what was kept of it, dashed for what was done again, dots for commits,
    crosses for checkpoints that were later refused."""
    parts: list[str] = []
    for index, one in enumerate(chart.series):
        y = frame.lane(one.attempt)
        if y is None:
            continue
        kept, lost = _split(one)
        parts.append(f'<g class="lane s{index % SERIES}"><title>Attempt {one.attempt}</title>')
        parts.append(f'<text class="label" x="0" y="{y + 4:.1f}">attempt {one.attempt}</text>')
        for points, classes in ((kept, "line"), (kept[-1:] + lost if lost else [], "line lost")):
            if points:
                x1, x2 = frame.x(points[0][0]), frame.x(points[-1][0])
                parts.append(
                    f'<line class="{classes}" x1="{x1:.1f}" x2="{max(x2, x1 + 2):.1f}" y1="{y}" y2="{y}"/>'
                )
        parts.append("</g>")
    refused = {name: why for _, name, why in chart.rejected}
    newest = max(frame.lanes, default=0)
    saved_by = {name: attempt for attempt, _, name in chart.commits}
    for attempt, step, name in chart.commits:
        y = frame.lane(attempt)
        if y is not None and name not in refused:
            parts.append(
                f'<circle class="commit" cx="{frame.x(step):.1f}" cy="{y}" r="4.5">'
                f"<title>{escape(name)} committed</title></circle>"
            )
    for step, name, why in chart.rejected:
        y = frame.lane(saved_by.get(name, newest))
        if y is not None:
            parts.append(
                f'<path class="cross" d="M{frame.x(step) - 5:.1f} {y - 5} l10 10 m0 -10 l-10 10">'
                f"<title>{escape(name)} rejected: {escape(why)}</title></path>"
            )
    return parts
