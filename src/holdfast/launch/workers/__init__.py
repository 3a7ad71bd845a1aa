"""The worker processes of one node: started, forked, heard, and ended for certain with all they started.

For the agent; the preloaded parent makes restarts quick.
Promises: a forked worker is what a new interpreter would have become; nothing is left behind, even by a
killed agent.
Never: end a process that is not ours; lose the last lines that a worker wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.launch.workers.orphans import OrphanKeeper, Orphans, Workers, mark_environment
    from holdfast.launch.workers.preload import (
        RUN_PATH,
        PreloadedParent,
        choose_format,
        insist_on_room,
        start_early,
    )
    from holdfast.launch.workers.start import Starter, launch_store, make_workers, unshared_store
else:
    __getattr__ = offers(__name__)
