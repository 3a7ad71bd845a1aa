"""What can be tried out about a machine: short probes with known answers, and what their results mean.

For nodes, storage, networks, GPUs and peers, before joining, between attempts and by `holdfast doctor`.
Promises: each check ends by its own deadline and names what it found, what it expected, and the fix.
Never: change the machine; accuse one by what is not proven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.health.checks import Check as Check
    from holdfast.health.checks import run_checks as run_checks
    from holdfast.health.compute import ComputeProbe as ComputeProbe
    from holdfast.health.compute import probe_compute as probe_compute
    from holdfast.health.connections import RING as RING
    from holdfast.health.connections import SLOW_RING as SLOW_RING
    from holdfast.health.connections import judge_pairs as judge_pairs
    from holdfast.health.connections import judge_reached as judge_reached
    from holdfast.health.examination import GATE_PATIENCE as GATE_PATIENCE
    from holdfast.health.examination import TIMEOUT as TIMEOUT
    from holdfast.health.examination import NodeReport as NodeReport
    from holdfast.health.examination import Report as Report
    from holdfast.health.examination import ask_all_nodes as ask_all_nodes
    from holdfast.health.examination import compute_check as compute_check
    from holdfast.health.examination import examine as examine
    from holdfast.health.examination import gate_network as gate_network
    from holdfast.health.examination import gpu_check as gpu_check
    from holdfast.health.examination import lines_of as lines_of
    from holdfast.health.examination import merge as merge
    from holdfast.health.examination import network_check as network_check
    from holdfast.health.examination import network_probe as network_probe
    from holdfast.health.examination import places_of as places_of
    from holdfast.health.examination import quick_checks as quick_checks
    from holdfast.health.examination import site_checks as site_checks
    from holdfast.health.findings import EXIT_CODES as EXIT_CODES
    from holdfast.health.findings import SPACE_CRITICAL as SPACE_CRITICAL
    from holdfast.health.findings import CheckResult as CheckResult
    from holdfast.health.findings import GateAnswer as GateAnswer
    from holdfast.health.findings import Status as Status
    from holdfast.health.findings import Trouble as Trouble
    from holdfast.health.findings import judge_gate as judge_gate
    from holdfast.health.findings import judge_history as judge_history
    from holdfast.health.findings import last_words as last_words
    from holdfast.health.findings import what_to_do as what_to_do
    from holdfast.health.gpu import check_compute as check_compute
    from holdfast.health.gpu import check_gpus as check_gpus
    from holdfast.health.gpu import judge_gpus as judge_gpus
    from holdfast.health.gpu_facts import Gpus as Gpus
    from holdfast.health.gpu_facts import ask_gpus as ask_gpus
    from holdfast.health.gpu_facts import names_of as names_of
    from holdfast.health.gpu_facts import present as present
    from holdfast.health.gpu_facts import read_kernel_log as read_kernel_log
    from holdfast.health.network import TOKEN as TOKEN
    from holdfast.health.network import network_seconds as network_seconds
    from holdfast.health.network import read_soon as read_soon
    from holdfast.health.network import ring_pairs as ring_pairs
    from holdfast.health.network import try_ring as try_ring
    from holdfast.health.node import CGROUPS as CGROUPS
    from holdfast.health.node import OWN as OWN
    from holdfast.health.node import cgroup_memory as cgroup_memory
    from holdfast.health.node import check_node as check_node
    from holdfast.health.node import check_storage as check_storage
    from holdfast.health.node import nearest as nearest
    from holdfast.health.node import try_storage as try_storage
    from holdfast.health.node import why_not_first as why_not_first
    from holdfast.health.ping import LivenessPing as LivenessPing
else:
    __getattr__ = offers(__name__)
