"""In-process restart: after a fault the training function starts again in the same processes.

For the function, its members and their keepers, the conductor, and leaving torch's process groups.
Promises: an iteration ends for all or none; who hangs is ended by its keeper; the shared budgets bound it.
Never: go on in a process whose state is not known to be sound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.restart import entry as entry
    from holdfast.restart.conductor import Conductor as Conductor
    from holdfast.restart.conductor import Denied as Denied
    from holdfast.restart.conductor import Granted as Granted
    from holdfast.restart.conductor import Restart as Restart
    from holdfast.restart.entry import Handed as Handed
    from holdfast.restart.function import restartable as restartable
    from holdfast.restart.keeper import Keeper as Keeper
    from holdfast.restart.keeper import log_path as log_path
    from holdfast.restart.keeper import stamped as stamped
    from holdfast.restart.member import each as each
    from holdfast.restart.messages import PREFIX as PREFIX
    from holdfast.restart.messages import UNREADABLE as UNREADABLE
    from holdfast.restart.messages import End as End
    from holdfast.restart.messages import EndKind as EndKind
    from holdfast.restart.messages import Next as Next
    from holdfast.restart.messages import Over as Over
    from holdfast.restart.messages import OverKind as OverKind
    from holdfast.restart.messages import Plan as Plan
    from holdfast.restart.messages import end_key as end_key
    from holdfast.restart.messages import faulted as faulted
    from holdfast.restart.messages import handed_over as handed_over
    from holdfast.restart.messages import plan_key as plan_key
    from holdfast.restart.messages import planned as planned
    from holdfast.restart.records import Faulted as Faulted
    from holdfast.restart.records import as_evidence as as_evidence
else:
    __getattr__ = offers(__name__)
