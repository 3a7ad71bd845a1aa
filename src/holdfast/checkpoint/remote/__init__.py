"""Copies of committed checkpoints on an object store or another file system, under one URL.

For the drain beside training, listing, verifying, fetching back and deleting.
Promises: marker written last and deleted first, so a copy counts only when it is whole; retries have a
budget.
Never: slow training down or fail it because the remote does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.remote.copies import (
        Remote,
        open_remote,
        pull,
        pull_named,
        pull_standing_of,
        split_copy_url,
    )
    from holdfast.checkpoint.remote.drain import Drain
    from holdfast.checkpoint.remote.store import BadCopyError, RemoteError, RemoteUnavailableError
else:
    __getattr__ = offers(__name__)
