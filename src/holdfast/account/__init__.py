"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.account.answers import account_of_failure as account_of_failure
    from holdfast.account.answers import account_of_lost_launch as account_of_lost_launch
    from holdfast.account.answers import account_of_lost_lease as account_of_lost_lease
    from holdfast.account.answers import account_of_lost_store as account_of_lost_store
    from holdfast.account.answers import account_of_stop as account_of_stop
    from holdfast.account.incidents import Incident as Incident
    from holdfast.account.incidents import ObservedCosts as ObservedCosts
    from holdfast.account.incidents import Spread as Spread
    from holdfast.account.incidents import headline as headline
    from holdfast.account.incidents import incidents_of as incidents_of
    from holdfast.account.incidents import investigations as investigations
    from holdfast.account.incidents import observed_costs as observed_costs
    from holdfast.account.incidents import stops_of as stops_of
    from holdfast.account.ledger import Attempt as Attempt
    from holdfast.account.ledger import Ledger as Ledger
    from holdfast.account.ledger import attempts_of as attempts_of
    from holdfast.account.ledger import ledger_of as ledger_of
    from holdfast.account.ledger import steps_done as steps_done
    from holdfast.account.remarks import KINDS as KINDS
    from holdfast.account.remarks import Remark as Remark
    from holdfast.account.remarks import answers_of as answers_of
    from holdfast.account.remarks import counts_by_kind as counts_by_kind
    from holdfast.account.remarks import remarks_of as remarks_of
    from holdfast.account.words import Story as Story
    from holdfast.account.words import back_line as back_line
    from holdfast.account.words import closing_line as closing_line
    from holdfast.account.words import cost_of as cost_of
    from holdfast.account.words import finished_line as finished_line
    from holdfast.account.words import five_answers as five_answers
    from holdfast.account.words import incident_line as incident_line
    from holdfast.account.words import incident_text as incident_text
    from holdfast.account.words import stop_text as stop_text
else:
    __getattr__ = offers(__name__)
