"""The wait of a failed run whose recovery an operator has paused.

Every agent waits for itself, after the decision about its attempt is durable and its workers are gone; all of
them see the same records. The lease is kept meanwhile, so no other launch takes the run over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.control.directory import ControlDirectory
from holdfast.control.operator import Request, paused
from holdfast.errors import ControlError
from holdfast.journal.render import duration
from holdfast.launch.summary import live_line
from holdfast.waiting import Waiting

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
