"""What every event of a run's journal is, and how it is shown to people.

Fields are only ever added, with defaults; a reader keeps an event it does not know as `Unknown`, so journals
of newer releases stay readable.

Guarantee: an event renders as one line, safe to print, with details of one line each. A worker's message may
hold anything, so control characters (which could steer a terminal) are shown as escapes, and very long text
is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from holdfast.base import Rendered, printable


class Event(msgspec.Struct, tag_field="event", kw_only=True, omit_defaults=True):
    """Base of all events."""

    def render(self) -> Rendered:
        """What the event says, for people; the terminal and the report both show this."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is shown")

    def save_line(self) -> str | None:
        """What `holdfast run` prints if this event is about a save, else None. See `SaveLines`."""
        return None


class Unknown(msgspec.Struct, frozen=True):
    """An event of a newer release, kept as it is."""

    event: str
    fields: dict[str, Any]

    def render(self) -> Rendered:
        fields = ", ".join(f"{key}={value!r}" for key, value in self.fields.items())
        name = self.event.replace("_", " ")
        return Rendered(printable(f"{name} (from a newer release): {fields}"), "plain")


def event_name(body: Event | Unknown) -> str:
    """The tag of a body in the file."""
    if isinstance(body, Unknown):
        return body.event
    return str(body.__struct_config__.tag)


def because(evidence: Iterable[str]) -> list[str]:
    """The evidence, as details below a rendered line."""
    return [f"because {printable(item)}" for item in evidence]
