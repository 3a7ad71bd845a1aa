"""`holdfast recover`: the recovery runbook as a program, from what stopped a run to a resume that was right.

For an operator at 3 am: looks, asks, starts the run again, and watches it until its probation is over.
Promises: it says what it did and what it would do; nothing is drained without being asked.
Never: start a run that is alive; hide why it does not start one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.recover.conduct import Wishes, recover_plain_root, recover_run
    from holdfast.recover.conversion import convert
    from holdfast.recover.examine import open_run
    from holdfast.recover.ticket import TicketRow, plain_text
else:
    __getattr__ = offers(__name__)
