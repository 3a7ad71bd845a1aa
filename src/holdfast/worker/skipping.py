"""Tells a rank's data feed which batches the run leaves out.

All ranks must leave out the same ones, and a network file system may show two ranks different things: rank 0
reads the records and tells the others through the store.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.control.decisions import read_key
from holdfast.control.directory import ControlDirectory
from holdfast.control.group import Group
from holdfast.control.skips import Skip, read_skips
from holdfast.errors import ControlError
from holdfast.journal.events import DataSkipped
from holdfast.journal.writer import JournalWriter
from holdfast.worker.data import DataFeed

KEY = "skips"


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    skips: list[Skip] = []
    problem: str = ""


def follow_skips(
    feed: DataFeed,
    control: ControlDirectory,
    group: Group,
    journal: JournalWriter,
    completed: Callable[[], int],
    timeout: float,
) -> None:
    """Called on all ranks after the resume, before the first batch. `completed`: steps done by now."""
    if group.is_coordinator:
        left_out = _read_for_all(control, group)
    else:
        raw = read_key(group.store, KEY, timeout, "the batches that rank 0 says are left out")
        from_rank_0 = msgspec.json.decode(raw, type=_Told)
        if from_rank_0.problem:
            raise ControlError(from_rank_0.problem)
        left_out = from_rank_0.skips

    def told(skip: Skip) -> None:
        if group.is_coordinator:
            window = skip.window
            journal.write(
                DataSkipped(
                    step=completed() + 1,
                    epoch=window.epoch,
                    first=window.first,
                    last=window.last,
                    reason=skip.reason,
                )
            )

    feed.follow(completed, left_out, told)


def _read_for_all(control: ControlDirectory, group: Group) -> list[Skip]:
    try:
        found = read_skips(control)
    except ControlError as error:
        group.store.set(KEY, msgspec.json.encode(_Told(problem=str(error))).decode())
        raise
    group.store.set(KEY, msgspec.json.encode(_Told(skips=found)).decode())
    return found
