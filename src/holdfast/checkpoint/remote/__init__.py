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
    from holdfast.checkpoint.remote.copies import Remote as Remote
    from holdfast.checkpoint.remote.copies import open_remote as open_remote
    from holdfast.checkpoint.remote.copies import pull as pull
    from holdfast.checkpoint.remote.copies import pull_named as pull_named
    from holdfast.checkpoint.remote.copies import pull_standing_of as pull_standing_of
    from holdfast.checkpoint.remote.copies import split_copy_url as split_copy_url
    from holdfast.checkpoint.remote.drain import Drain as Drain
    from holdfast.checkpoint.remote.store import BadCopyError as BadCopyError
    from holdfast.checkpoint.remote.store import RemoteError as RemoteError
    from holdfast.checkpoint.remote.store import RemoteUnavailableError as RemoteUnavailableError
else:
    __getattr__ = offers(__name__)
