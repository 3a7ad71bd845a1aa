"""Waits before a decision: for storage that takes nothing, or while an operator has paused recovery.

Guarantee: it ends, within bounds and with what is wrong. Whoever decides then knows whether a restart could
follow: what the gate would keep every node out for is found out here, and not after a restart was announced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.base import Look, Waiting, duration
from holdfast.config import Settings
from holdfast.errors import ControlError
from holdfast.health import SPACE_CRITICAL, Trouble, nearest, try_storage
from holdfast.launch import live_line
from holdfast.record import ControlDirectory, Request, paused

STORAGE_PATIENCE = 30.0
"""Seconds for which a failed attempt waits for its storage to take what is to be recorded: a disk that was
full for a moment is no reason to give the job back."""
STORAGE_LOOK = 1.0
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def shared_places(settings: Settings) -> list[Path]:
    """Where every attempt writes, on whichever node; the run directory first."""
    return list(dict.fromkeys([Path(settings.run.dir).absolute(), settings.checkpoint_root().absolute()]))


def least_space(settings: Settings) -> int:
    """Bytes below which no node may take part in another attempt."""
    return SPACE_CRITICAL if settings.health.gate == "refuse" else 0


def find_trouble(places: Sequence[Path], least: int = 0) -> Trouble | None:
    """What keeps these places from taking what is written; None if nothing does."""
    for place in places:
        if place != places[0] and not place.is_dir():
            continue  # it is made when something is saved there
        tried = try_storage(place)
        free = None
        with contextlib.suppress(OSError):
            info = os.statvfs(nearest(place))
            free = info.f_bavail * info.f_frsize
        if tried.problem:
            return Trouble(path=str(place), problem=tried.problem, full=tried.errno in _NO_ROOM, free=free)
        if free is not None and free < least:
            return Trouble(path=str(place), full=True, free=free)
    return None


def await_storage(
    places: Sequence[Path],
    *,
    check: Callable[[], None],
    tell: Callable[[str], None],
    least: int = 0,
    patience: float = STORAGE_PATIENCE,
) -> Trouble | None:
    """Wait until these places take what is written, at most `patience` seconds; then what keeps them from it.

    `check` is called at every look, and raises if the launcher was told to stop. `least`: bytes that must be
    free beside.
    """
    look = Look(lambda: find_trouble(places, least), "storage", patience=STORAGE_LOOK)
    began, told, line = time.monotonic(), "", live_line()
    while True:
        looked = look.take()
        hangs = Trouble(path=str(places[0]), problem="it does not answer")
        found = hangs if looked is None else looked.result()
        if found is None or time.monotonic() - began > patience:
            break
        if not told:
            told = found.path
            what = found.problem and f"the storage of {told} takes nothing: {found.problem}"
            tell(f"{what or found.describe()}. Waiting for it, up to {patience:g} s")
        line(Waiting(f"the storage of {told}", time.monotonic() - began, patience))
        check()
        time.sleep(min(STORAGE_LOOK, patience))
    line.over()
    waited = time.monotonic() - began
    if found is not None:
        return msgspec.structs.replace(found, waited=waited)
    if told:
        tell(f"the storage of {told} works again, after {waited:.0f} s")
    return None


# The wait of a failed run whose recovery an operator has paused.
#
# Every agent waits for itself, after the decision about its attempt is durable and its workers are gone; all
# of them see the same records. The lease is kept meanwhile, so no other launch takes the run over.


POLL = 0.5


def wait_while_paused(
    control: ControlDirectory, maximum: float, *, check: Callable[[], None], tell: Callable[[str], None]
) -> bool:
    """Return at once unless recovery is paused; else wait until it is not. False: not within `maximum`.

    `check` is called at every look, and raises if the launcher was told to stop. `tell` gets a line when the
    wait begins and ends. A record that cannot be read for a while is no reason to go on.
    """
    request = paused(control)
    if request is None:
        return True
    started = time.monotonic()
    tell(
        f"recovery is paused by {request.describe()}. Nothing is restarted until "
        f"`holdfast control unpause {control.path}`; after {duration(maximum)} the run stops"
    )
    line = live_line()
    while request is not None:
        if time.monotonic() - started >= maximum:
            tell(f"recovery stayed paused for {duration(maximum)} (launch.max_pause)")
            return False
        line(Waiting("`holdfast control unpause`", time.monotonic() - started, maximum))
        check()
        time.sleep(min(POLL, maximum))
        request = _still(control, request)
    line.over()
    tell(f"recovery goes on, after a pause of {duration(time.monotonic() - started)}")
    return True


def _still(control: ControlDirectory, request: Request) -> Request | None:
    try:
        return paused(control)
    except ControlError:
        return request
