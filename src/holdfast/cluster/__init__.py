"""What the scheduler and the environment say of the job: nodes, devices, time limit, requeue.

For Slurm as it is (its environment and `scontrol`), batch scripts, and how ranks see a node's devices.
Promises: quiet where there is no scheduler; every call to it has a time limit; without torch.
Never: ask for a requeue that nobody decided, or that was not counted first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.cluster import scontrol as scontrol
    from holdfast.cluster.batch import Layout as Layout
    from holdfast.cluster.batch import render as render
    from holdfast.cluster.devices import VISIBLE as VISIBLE
    from holdfast.cluster.devices import Device as Device
    from holdfast.cluster.devices import devices_here as devices_here
    from holdfast.cluster.devices import environment_of as environment_of
    from holdfast.cluster.devices import index_of as index_of
    from holdfast.cluster.devices import own_place as own_place
    from holdfast.cluster.devices import visible_devices as visible_devices
    from holdfast.cluster.requeue import Asked as Asked
    from holdfast.cluster.requeue import ask_on_record as ask_on_record
    from holdfast.cluster.requeue import facts_of as facts_of
    from holdfast.cluster.requeue import may_requeue as may_requeue
    from holdfast.cluster.requeue import requeue_after_stop as requeue_after_stop
    from holdfast.cluster.requeue import requeue_at_the_end as requeue_at_the_end
    from holdfast.cluster.requeue import requeue_by_decision as requeue_by_decision
    from holdfast.cluster.scontrol import JobRecord as JobRecord
    from holdfast.cluster.scontrol import drain as drain
    from holdfast.cluster.scontrol import identified as identified
    from holdfast.cluster.scontrol import job_record as job_record
    from holdfast.cluster.scontrol import node_records as node_records
    from holdfast.cluster.scontrol import partition_nodes as partition_nodes
    from holdfast.cluster.slurm import SlurmJob as SlurmJob
    from holdfast.cluster.slurm import current_job as current_job
    from holdfast.cluster.slurm import job_found as job_found
    from holdfast.cluster.slurm import node_name as node_name
    from holdfast.cluster.time_limit import TimeLimit as TimeLimit
else:
    __getattr__ = offers(__name__)
