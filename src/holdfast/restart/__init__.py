"""In-process restart: after a fault the training function starts again in the same processes.

For the function, its members and their keepers, the conductor, and leaving torch's process groups.
Promises: an iteration ends for all or none; keepers end members that hang; the shared budgets bound restarts.
Never: go on in a process whose state is not known to be sound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.restart import entry
    from holdfast.restart.conductor import Conductor, Denied, Granted, Restart
    from holdfast.restart.entry import KeeperHandover
    from holdfast.restart.function import restartable
    from holdfast.restart.keeper import Keeper, log_path, stamped
    from holdfast.restart.member import each
    from holdfast.restart.messages import (
        PREFIX,
        UNREADABLE,
        End,
        EndKind,
        IterationPlan,
        Next,
        Over,
        OverKind,
        end_key,
        faulted,
        handed_over,
        plan_key,
        planned,
    )
    from holdfast.restart.records import Faulted, as_evidence
else:
    __getattr__ = offers(__name__)
