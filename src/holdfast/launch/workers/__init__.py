"""The worker processes of one node: started, forked, heard, ended for certain, with all they started.

For the agent; the preloaded parent makes restarts quick.
Promises: a forked worker is what a new interpreter would have become; nothing is left behind, also by a
killed agent.
Never: end a process that is not ours; lose the last lines that a worker wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.launch.workers.orphans import Orphans as Orphans
    from holdfast.launch.workers.orphans import Workers as Workers
    from holdfast.launch.workers.preload import RUN_PATH as RUN_PATH
    from holdfast.launch.workers.preload import PreloadedParent as PreloadedParent
    from holdfast.launch.workers.preload import choose_format as choose_format
    from holdfast.launch.workers.preload import insist_on_room as insist_on_room
    from holdfast.launch.workers.preload import start_early as start_early
    from holdfast.launch.workers.start import Starter as Starter
    from holdfast.launch.workers.start import launch_store as launch_store
    from holdfast.launch.workers.start import make_workers as make_workers
    from holdfast.launch.workers.start import unshared_store as unshared_store
    from holdfast.launch.workers.sweeper import Keeper as Keeper
    from holdfast.launch.workers.sweeper import mark_environment as mark_environment
else:
    __getattr__ = offers(__name__)
