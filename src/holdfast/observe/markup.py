"""How values become markup in the report. Everything that comes from outside goes through `text`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

from holdfast.journal.render import duration, printable


def text(value: str, limit: int = 2000) -> str:
    """Any value as harmless markup."""
    return escape(printable(value, limit))


def clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def when(at: float, began: float) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return f'<time datetime="{stamp}" title="{clock(at)}">+{duration(at - began)}</time>'


def table(caption: str, heads: Sequence[tuple[str, str]], rows: Iterable[str], classes: str = "stack") -> str:
    columns = "".join(f'<th scope="col"{style and f" class={style!r}"}>{name}</th>' for name, style in heads)
    return (
        f'<div class="card scroll"><table class="{classes}"><caption>{caption}</caption>'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table></div>"
    )
