"""From live state to a committed checkpoint: plan, snapshot, staging, and writing beside training or not.

For synchronous and asynchronous saves, snapshots from devices, and the writer process of each rank.
Promises: a save becomes durable on all ranks or fails on all as the same error; a staged snapshot outlives
its trainer.
Never: touch what was committed before; hold training up longer than the snapshot takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.save.background import BackgroundSaver as BackgroundSaver
    from holdfast.checkpoint.save.background import Ended as Ended
    from holdfast.checkpoint.save.background import LocalSaving as LocalSaving
    from holdfast.checkpoint.save.device import Pinned as Pinned
    from holdfast.checkpoint.save.device import pin as pin
    from holdfast.checkpoint.save.foreground import SaveContext as SaveContext
    from holdfast.checkpoint.save.foreground import SaveFacts as SaveFacts
    from holdfast.checkpoint.save.foreground import Saver as Saver
    from holdfast.checkpoint.save.image import PR_SET_PDEATHSIG as PR_SET_PDEATHSIG
    from holdfast.checkpoint.save.plan import Plan as Plan
    from holdfast.checkpoint.save.plan import own_prefix as own_prefix
    from holdfast.checkpoint.save.snapshot import Snapshotter as Snapshotter
    from holdfast.checkpoint.save.staging import Buffer as Buffer
    from holdfast.checkpoint.save.staging import Stager as Stager
    from holdfast.checkpoint.save.writer import MendCopies as MendCopies
    from holdfast.checkpoint.save.writer import PeerTarget as PeerTarget
    from holdfast.checkpoint.save.writer import UsePeers as UsePeers
else:
    __getattr__ = offers(__name__)
