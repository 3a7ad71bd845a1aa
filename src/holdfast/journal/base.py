"""What every event of the journal is; the events are in events.py and the other files named so."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, tag_field="event", kw_only=True, omit_defaults=True):
    """Base of all events."""
