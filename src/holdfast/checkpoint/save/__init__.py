"""From live state to a committed checkpoint: plan, snapshot, staging, and writing, beside training or not.

For synchronous and asynchronous saves, snapshots from devices, and the writer process of each rank.
Promises: a save becomes durable on all ranks or fails on all with the same error; a staged snapshot outlives
its trainer.
Never: touch what was committed before; hold training up longer than the snapshot takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.save.device import Buffer, Pinned, TooLittleError, pin
    from holdfast.checkpoint.save.handoff import MendCopies, PeerTarget, Save, UsePeers
    from holdfast.checkpoint.save.image import PR_SET_PDEATHSIG
    from holdfast.checkpoint.save.plan import Plan, own_prefix
    from holdfast.checkpoint.save.saver import (
        BackgroundSaver,
        Ended,
        ForegroundSaver,
        SaveContext,
        SaveFacts,
        Saver,
    )
    from holdfast.checkpoint.save.snapshot import Snapshotter, Stager
    from holdfast.checkpoint.save.staging import LocalTarget
else:
    __getattr__ = offers(__name__)
