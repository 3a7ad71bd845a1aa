"""Checkpoints of other projects: recognised, read as data, judged by their form, taken as a source.

For resumes and commands that are given a checkpoint of torchtitan, Megatron, KempnerForge, Hugging Face,
Lightning or plain `torch.save`, and for converting one into ours.
Promises: what has no digest is said to be unverified; what is missing, or one rank's alone, is named.
Never: execute anything that is stored in one, change it, or guess which tensor is meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.checkpoint.foreign.archive import StoredTensor
    from holdfast.checkpoint.foreign.contents import (
        DATA,
        MODEL,
        OPTIMIZER,
        RNG,
        SCALER,
        SCHEDULE,
        Contents,
        ForeignError,
        ForeignPart,
        ForeignTensor,
        entry_of,
        read_contents,
        step_told,
    )
    from holdfast.checkpoint.foreign.names import NameFunction, name_function, tracked_names, unstacked
    from holdfast.checkpoint.foreign.recognition import (
        ForeignLayout,
        Recognised,
        checkpoints_in,
        hints,
        rank_files,
        recognise,
    )
    from holdfast.checkpoint.foreign.soundness import check_values, examine
    from holdfast.checkpoint.foreign.source import BoxReader, generators_of, read_into, values_of
else:
    __getattr__ = offers(__name__)
