"""What befell a run, told once: who, what, why, what was done, what it cost, what to do now.

For the terminal, `holdfast why`, `status`, the report and alerts, which all render the same value.
Promises: one set of numbers, worked out once; what comes from outside is shown as text.
Never: compose such a sentence elsewhere; name a culprit without its evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.account.answers import answers_about as answers_about
    from holdfast.account.answers import launch_lost as launch_lost
    from holdfast.account.answers import lease_taken as lease_taken
    from holdfast.account.answers import of_stop as of_stop
    from holdfast.account.answers import store_lost as store_lost
    from holdfast.account.incidents import Incident as Incident
    from holdfast.account.incidents import ObservedCosts as ObservedCosts
    from holdfast.account.incidents import Spread as Spread
    from holdfast.account.incidents import headline as headline
    from holdfast.account.incidents import incidents_of as incidents_of
    from holdfast.account.incidents import investigations as investigations
    from holdfast.account.incidents import observed_costs as observed_costs
    from holdfast.account.incidents import stops as stops
    from holdfast.account.ledger import Attempt as Attempt
    from holdfast.account.ledger import Ledger as Ledger
    from holdfast.account.ledger import accounting as accounting
    from holdfast.account.ledger import attempts as attempts
    from holdfast.account.ledger import steps_done as steps_done
    from holdfast.account.remarks import KINDS as KINDS
    from holdfast.account.remarks import Remark as Remark
    from holdfast.account.remarks import answers_of as answers_of
    from holdfast.account.remarks import counted as counted
    from holdfast.account.remarks import remarks_of as remarks_of
    from holdfast.account.words import Story as Story
    from holdfast.account.words import back as back
    from holdfast.account.words import closing as closing
    from holdfast.account.words import cost_of as cost_of
    from holdfast.account.words import finished as finished
    from holdfast.account.words import five as five
    from holdfast.account.words import on_the_terminal as on_the_terminal
    from holdfast.account.words import one_line as one_line
    from holdfast.account.words import stop_on_the_terminal as stop_on_the_terminal
else:
    __getattr__ = offers(__name__)
