"""What can be tried out about a machine: short probes with known answers, and what their results mean.

For nodes, storage, networks, GPUs and peers, before joining, between attempts and by `holdfast doctor`.
Promises: each check ends by its own deadline and names what it found, what it expected, and the fix.
Never: change the machine; accuse one without proof.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.health.compute import ComputeProbe, probe_compute
    from holdfast.health.connections import RING, SLOW_RING, judge_pairs, judge_reached
    from holdfast.health.examination import (
        GATE_PATIENCE,
        TIMEOUT,
        DoctorReport,
        NodeReport,
        ask_all_nodes,
        compute_check,
        examine,
        gate_network,
        gpu_check,
        lines_of,
        merge,
        network_check,
        network_probe,
        places_of,
        quick_checks,
        site_checks,
    )
    from holdfast.health.gpu import (
        Gpu,
        Gpus,
        HeldMemory,
        ask_gpus,
        ask_holders,
        check_compute,
        check_gpus,
        judge_gpus,
        names_of,
        present,
        read_kernel_log,
    )
    from holdfast.health.judgements import (
        EXIT_CODES,
        SPACE_CRITICAL,
        CheckResult,
        GateAnswer,
        HealthStatus,
        Trouble,
        judge_gate,
        judge_history,
        last_words,
        what_to_do,
    )
    from holdfast.health.network import TOKEN, network_seconds, read_soon, ring_pairs, try_ring
    from holdfast.health.node import (
        CGROUPS,
        OWN,
        cgroup_memory,
        check_node,
        check_storage,
        nearest,
        try_storage,
        why_not_first,
    )
    from holdfast.health.ping import LivenessPing
    from holdfast.health.trials import Check, run_checks
else:
    __getattr__ = offers(__name__)
