"""The append-only record of a run's events and decisions.

For writing events as they happen, reading them while they are being written, and showing each as a line.
Promises: an event is one JSON line, typed, versioned and never changed; older journals are read.
Never: hold up a run because the journal cannot be written, or decide anything by what it says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.journal import events
    from holdfast.journal.event import Event, Unknown, because, event_name
    from holdfast.journal.line import EVENT_NAMES, REPORTER, AnyEvent, JournalLine, condense
    from holdfast.journal.reader import (
        JournalReader,
        batches,
        heads,
        last_loss,
        last_step,
        nodes_started,
        rate,
        read_journal,
        read_tail,
        tails,
        unfinished_save,
    )
    from holdfast.journal.writer import JournalWriter
else:
    __getattr__ = offers(__name__)
