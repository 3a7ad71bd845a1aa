"""What befell a run, told once: who, what, why, what was done, what it cost, what to do now.

For the terminal, `holdfast why`, `status`, the report and alerts, which all render the same value.
Promises: one set of numbers, worked out once; what comes from outside is shown as text.
Never: compose such a sentence elsewhere; name a culprit without its evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.account.answers import answers_about, launch_lost, lease_taken, of_stop, store_lost
    from holdfast.account.incidents import (
        Incident,
        ObservedCosts,
        Spread,
        headline,
        incidents_of,
        investigations,
        observed_costs,
        stops,
    )
    from holdfast.account.ledger import Attempt, Ledger, accounting, attempts, steps_done
    from holdfast.account.remarks import KINDS, Remark, answers_of, counted, remarks_of
    from holdfast.account.words import (
        Story,
        back,
        closing,
        cost_of,
        finished,
        five,
        on_the_terminal,
        one_line,
        stop_on_the_terminal,
    )
else:
    __getattr__ = offers(__name__)
