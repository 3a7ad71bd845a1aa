"""What the scheduler and the environment say of the job: nodes, devices, time limit, requeue.

For Slurm as it is (its environment and `scontrol`), batch scripts, and how ranks see a node's devices.
Promises: quiet where there is no scheduler; every call to it has a time limit; without torch.
Never: ask for a requeue that nobody decided, or that was not counted first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.cluster import slurm
    from holdfast.cluster.batch import JobLayout, render
    from holdfast.cluster.devices import (
        VISIBLE,
        Device,
        devices_here,
        environment_of,
        index_of,
        own_place,
        visible_devices,
    )
    from holdfast.cluster.slurm import (
        JobRecord,
        SlurmJob,
        current_job,
        drain,
        identified,
        job_found,
        job_record,
        node_name,
        node_records,
        partition_nodes,
    )
    from holdfast.cluster.time_limit import (
        Asked,
        TimeLimit,
        ask_on_record,
        facts_of,
        may_requeue,
        requeue_after_stop,
        requeue_at_the_end,
        requeue_by_decision,
    )
else:
    __getattr__ = offers(__name__)
