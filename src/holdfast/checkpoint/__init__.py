"""Checkpoints that can be believed: saved whole, committed atomically, verified before use.

For the commit, retention, reading back, comparing and exporting. Sub-rooms: `format`, `state`, `save`,
`choose`, `copies` (the nodes' own tier and its peers) and `remote`.
Promises: a checkpoint exists complete or not at all; what is loaded is what was saved, byte for byte.
Never: change what was committed; delete the last one that is sound; believe a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint import commit as commit
    from holdfast.checkpoint.commit import Committed as Committed
    from holdfast.checkpoint.commit import Owner as Owner
    from holdfast.checkpoint.commit import open_root as open_root
    from holdfast.checkpoint.commit import sweep_staging as sweep_staging
    from holdfast.checkpoint.format.structure import check_structure as check_structure
    from holdfast.checkpoint.format.structure import verify as verify
    from holdfast.checkpoint.read_back import ReadBack as ReadBack
    from holdfast.checkpoint.read_back import gone_since as gone_since
    from holdfast.checkpoint.read_back import last_read_back as last_read_back
    from holdfast.checkpoint.read_back import no_such as no_such
    from holdfast.checkpoint.read_back import reading as reading
    from holdfast.checkpoint.read_back import removed as removed
    from holdfast.checkpoint.retention import Item as Item
    from holdfast.checkpoint.retention import Outcome as Outcome
    from holdfast.checkpoint.retention import Retainer as Retainer
    from holdfast.checkpoint.retention import Retention as Retention
    from holdfast.checkpoint.retention import deletion_event as deletion_event
    from holdfast.checkpoint.retention import empty as empty
    from holdfast.checkpoint.tools import Difference as Difference
    from holdfast.checkpoint.tools import EntryDifference as EntryDifference
    from holdfast.checkpoint.tools import compare as compare
    from holdfast.checkpoint.tools import export as export
else:
    __getattr__ = offers(__name__)
