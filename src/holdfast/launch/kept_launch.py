"""What a launch leaves behind of itself, for whoever has to start the run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.cluster.node_name import node_name
from holdfast.control.launches import record_launch
from holdfast.launch.context import LaunchContext


def keep_launch(
    context: LaunchContext, argv: Sequence[str], workers_per_node: int, tell: Callable[[str], None]
) -> None:
    """Write down how this launch was started; if that cannot be done, it is told and the launch goes on."""
    settings = context.settings
    problem = record_launch(
        context.control,
        context.launch,
        argv,
        node=node_name(settings.launch.node_name),
        min_nodes=context.min_nodes,
        max_nodes=context.max_nodes,
        workers_per_node=workers_per_node,
        root=settings.checkpoint.root,
        remote=settings.checkpoint.remote_root,
        resume_from=settings.checkpoint.resume_from,
        force=settings.checkpoint.force,
    )
    if problem:
        tell(problem)
