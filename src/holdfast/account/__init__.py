"""What happened to a run, told once: who, what, why, what was done, what it cost, what to do now.

For the terminal, `holdfast why`, `status`, the report and alerts, which all render the same value.
Promises: there is one set of numbers, worked out once; what comes from outside is shown as plain text.
Never: compose such a sentence elsewhere; name a culprit without its evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.account.answers import (
        account_of_failure,
        account_of_lost_launch,
        account_of_lost_lease,
        account_of_lost_store,
        account_of_stop,
    )
    from holdfast.account.incidents import (
        Incident,
        ObservedCosts,
        Spread,
        headline,
        incidents_of,
        investigations,
        observed_costs,
        stops_of,
    )
    from holdfast.account.ledger import (
        PHASES,
        JournalledAttempt,
        Ledger,
        Phase,
        attempts_of,
        ledger_of,
        steps_done,
    )
    from holdfast.account.remarks import KINDS, Remark, answers_of, counts_by_kind, remarks_of
    from holdfast.account.words import (
        Story,
        back_line,
        closing_line,
        cost_of,
        finished_line,
        five_answers,
        incident_line,
        incident_text,
        phases_text,
        stop_text,
    )
else:
    __getattr__ = offers(__name__)
