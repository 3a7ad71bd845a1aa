"""Seconds of a step by rank and section as inline SVG: where which rank loses time, at a look.

A cell is the darker the more it takes beyond the median of its column, as a part of a step. Waiting is shown
and not coloured: who waits is not slow. More ranks than fit are shown by node, each cell as its worst rank's.

Pure: an event in, markup out. Every cell says its number too, as text or on pointing at it. All text is
escaped here; nothing else goes into the markup but numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from holdfast.journal.straggler_events import StragglersReported
from holdfast.journal.text import printable
from holdfast.policy.straggler_times import COMPUTE, INPUT, OTHER

MOST_RANKS = 64
"""Rows for ranks; more of them are put together by node."""
MOST_NODES = 256
ROW, HEAD = 24, 34
SHADES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Parts of a step above the median at which a cell gets darker."""
WAITING = "waiting"


@dataclass(frozen=True)
class Row:
    label: str
    name: str
    """In full, for those who point at it."""
    seconds: list[float]


def columns(event: StragglersReported) -> list[str]:
    """The sections in the order of a step, those that the script has named between the others."""
    named = sorted(name for name in event.sections if name not in (INPUT, COMPUTE, OTHER))
    return [name for name in (INPUT, COMPUTE, *named, OTHER) if name in event.sections]


def rows(event: StragglersReported) -> list[Row]:
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
        Row(
            f"{printable(nodes[at], 12)} · {event.ranks[at]}" if several else f"rank {event.ranks[at]}",
            f"rank {event.ranks[at]}{f' on {printable(nodes[at])}' if nodes[at] else ''}",
            values[at],
        )
        for at in order
    ]


def draw(event: StragglersReported, *, width: int, name: str) -> str:
    """The map as an SVG element. `name` makes its ids unique in the page."""
    shown, names = rows(event), [*columns(event), WAITING]
    left = 128 if width > 600 else 92
    wide = (width - left - 2) / len(names)
    height = HEAD + ROW * len(shown) + 2
    parts = [
        f'<svg class="chart {escape(name)}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="heat-{escape(name)}-title heat-{escape(name)}-desc">',
        f'<title id="heat-{escape(name)}-title">Milliseconds of a step by rank and section</title>',
        f'<desc id="heat-{escape(name)}-desc">{escape(describe(event))}</desc>',
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


def describe(event: StragglersReported) -> str:
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


def _by_node(values: Sequence[list[float]], nodes: Sequence[str]) -> list[Row]:
    members: dict[str, list[list[float]]] = {}
    for mine, node in zip(values, nodes, strict=True):
        members.setdefault(node, []).append(mine)
    found = []
    slowest = sorted(members, key=lambda node: -max(sum(mine[:-1]) for mine in members[node]))
    for node in sorted(slowest[:MOST_NODES]):
        ranks = members[node]
        worst = [max(column) for column in zip(*ranks, strict=True)]
        worst[-1] = min(mine[-1] for mine in ranks)  # who waits least is the one that is late
        shown = printable(node) or "(no name)"
        found.append(Row(shown, f"node {shown}, the worst of {len(ranks)} rows", worst))
    return found


def _medians(shown: Sequence[Row]) -> list[float]:
    return [statistics.median(column) for column in zip(*(row.seconds for row in shown), strict=True)]


def _shade(over: float, step: float) -> int:
    return sum(over >= limit * step for limit in SHADES) if step else 0
