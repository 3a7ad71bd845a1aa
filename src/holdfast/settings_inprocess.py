"""Settings of in-process restart: a section of the tree in `settings.py`.

The names are those that users of nvidia-resiliency-ext know, so that a file can be taken over.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.settings_fields import LONGEST_WAIT

MOST_MEMBERS = 10**7


class InProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Starting the training function again in the same processes."""

    enabled: Annotated[
        bool,
        "Whether `holdfast.restartable` restarts its function in place after a fault; otherwise it calls it "
        "once. Turn it on where starting processes, importing and connecting cost more than a step.",
    ] = False
    granularity: Annotated[
        Literal["node", "rank"],
        "What is lost with a lost rank: its node, or the rank alone. Set rank where ranks of one node may "
        "train without each other.",
    ] = "node"
    active_world_size: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_MEMBERS)] | Literal["all"],
        "How many of the started ranks train; the rest wait as warm reserves. `all`: there are no reserves.",
    ] = "all"
    min_world_size: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_MEMBERS)] | Literal["active"],
        "With how few ranks the function may go on when no reserve is left. `active`: as many as "
        "active_world_size, or not at all.",
    ] = "active"
    assign: Annotated[
        str,
        "The function that says which process trains under which rank, as package.module:function; empty for "
        "Holdfast's own. Set it where ranks cannot be exchanged freely; see `policy.reassignment`.",
    ] = ""
    max_iterations: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | Literal["budget"],
        "How often the function is called at most. `budget`: the budgets of recovery are the only "
        "bound, as for restarts by the launcher.",
    ] = "budget"
    max_rank_faults: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)] | Literal["any"],
        "How many faults one process may have before it is left out, whatever they were. `any`: there is "
        "no such limit.",
    ] = "any"
    soft_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds without progress of a rank's main thread after which all restart. Raise it where one call "
        "out of Python takes longer, as compiling a model does.",
    ] = 60.0
    hard_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds after which a rank that stands still, or does not leave the function, is ended. Longer than "
        "soft_timeout.",
    ] = 90.0
    heartbeat_interval: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds between two signs of life of a node's keeper. Lower it to notice a lost node sooner.",
    ] = 30.0
    heartbeat_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds without a sign of life after which a node counts as lost. Longer than heartbeat_interval.",
    ] = 60.0
    barrier_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds for all ranks to come together before the function starts again; who is late is left out. "
        "To its first start they have monitor.initial_rank_heartbeat_timeout if that is longer. Longer than "
        "hard_timeout.",
    ] = 120.0
    completion_timeout: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds for the other ranks to return once one has; 0 means as long as they make progress. Set it "
        "where a rank that returns alone means that something went wrong.",
    ] = 0.0
    empty_cuda_cache: Annotated[
        bool,
        "Whether cached device memory is given back before the function starts again. Turn it off where "
        "nothing but the function uses the device.",
    ] = True
    monitor_process_logdir: Annotated[
        str,
        "Directory for the log of each node's keeper, whether that is a process of its own or part of the "
        "launcher. They log nothing if it is empty.",
    ] = ""
