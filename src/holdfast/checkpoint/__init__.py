"""Checkpoints that can be trusted: saved whole, committed atomically, verified before use.

For the commit, retention, reading back, comparing and exporting. Sub-rooms: `format`, `state`, `save`,
`choose`, `copies` (the nodes' own tier and its peers) and `remote`.
Promises: a checkpoint exists complete or not at all; what is loaded is what was saved, byte for byte.
Never: change what was committed; delete the last sound one; trust a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint import commit
    from holdfast.checkpoint.commit import Owner, open_root, sweep_staging
    from holdfast.checkpoint.difference import Difference, EntryDifference, compare
    from holdfast.checkpoint.export import export_weights
    from holdfast.checkpoint.format.structure import check_structure, verify
    from holdfast.checkpoint.read_back import ReadBack, gone_since, last_read_back, no_such, reading, removed
    from holdfast.checkpoint.retention import (
        JudgedCheckpoint,
        Retainer,
        Retention,
        RetentionOutcome,
        deletion_event,
        empty,
    )
else:
    __getattr__ = offers(__name__)
