"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.base import lines as lines
    from holdfast.base import scope as scope
    from holdfast.base import torch_internals as torch_internals
    from holdfast.base.bounded import PATIENCE as PATIENCE
    from holdfast.base.bounded import REWRITTEN as REWRITTEN
    from holdfast.base.bounded import Aside as Aside
    from holdfast.base.bounded import Bounded as Bounded
    from holdfast.base.bounded import Look as Look
    from holdfast.base.bounded import Waiting as Waiting
    from holdfast.base.bounded import is_table_full as is_table_full
    from holdfast.base.files import OpenFile as OpenFile
    from holdfast.base.files import check_output as check_output
    from holdfast.base.files import create_exclusive as create_exclusive
    from holdfast.base.files import entries as entries
    from holdfast.base.files import explain_os_error as explain_os_error
    from holdfast.base.files import fsync_dir as fsync_dir
    from holdfast.base.files import is_storage_trouble as is_storage_trouble
    from holdfast.base.files import make_dirs as make_dirs
    from holdfast.base.files import make_folder as make_folder
    from holdfast.base.files import move as move
    from holdfast.base.files import names_storage_trouble as names_storage_trouble
    from holdfast.base.files import open_folder as open_folder
    from holdfast.base.files import overwrite as overwrite
    from holdfast.base.files import read_regular as read_regular
    from holdfast.base.files import remove as remove
    from holdfast.base.files import replace_atomic as replace_atomic
    from holdfast.base.files import unlink as unlink
    from holdfast.base.files import write_durable as write_durable
    from holdfast.base.lines import FORMAT_VARIABLE as FORMAT_VARIABLE
    from holdfast.base.lines import VERBOSITY_VARIABLE as VERBOSITY_VARIABLE
    from holdfast.base.lines import Kind as Kind
    from holdfast.base.lines import LiveLine as LiveLine
    from holdfast.base.lines import LogFormat as LogFormat
    from holdfast.base.lines import Source as Source
    from holdfast.base.lines import Verbosity as Verbosity
    from holdfast.base.lines import install as install
    from holdfast.base.lines import is_format as is_format
    from holdfast.base.lines import is_taken as is_taken
    from holdfast.base.lines import is_verbosity as is_verbosity
    from holdfast.base.lines import log_format as log_format
    from holdfast.base.lines import rendered as rendered
    from holdfast.base.lines import say_as_rank as say_as_rank
    from holdfast.base.lines import speak as speak
    from holdfast.base.lines import verbosity as verbosity
    from holdfast.base.scope import RestartRequested as RestartRequested
    from holdfast.base.scope import Scope as Scope
    from holdfast.base.scope import critical as critical
    from holdfast.base.scope import current as current
    from holdfast.base.scope import entered as entered
    from holdfast.base.scope import leavable as leavable
    from holdfast.base.scope import stretch as stretch
    from holdfast.base.scope import to_the_end as to_the_end
    from holdfast.base.text import MAX_TEXT as MAX_TEXT
    from holdfast.base.text import Rendered as Rendered
    from holdfast.base.text import duration as duration
    from holdfast.base.text import escaped as escaped
    from holdfast.base.text import moment as moment
    from holdfast.base.text import number as number
    from holdfast.base.text import plural as plural
    from holdfast.base.text import printable as printable
    from holdfast.base.text import size as size
    from holdfast.base.torch_internals import ActivationWrapper as ActivationWrapper
    from holdfast.base.torch_internals import InstanceNorm as InstanceNorm
    from holdfast.base.torch_internals import LoaderIterator as LoaderIterator
    from holdfast.base.torch_internals import NormBase as NormBase
    from holdfast.base.torch_internals import ShardedParameter as ShardedParameter
    from holdfast.base.torch_internals import StorageInfo as StorageInfo
    from holdfast.base.torch_internals import TreeSpec as TreeSpec
    from holdfast.base.torch_internals import collective_timeout as collective_timeout
    from holdfast.base.torch_internals import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )
    from holdfast.base.torch_internals import create_write_items as create_write_items
    from holdfast.base.torch_internals import default_store as default_store
    from holdfast.base.torch_internals import flatten_state_dict as flatten_state_dict
    from holdfast.base.torch_internals import get_addr_and_port as get_addr_and_port
    from holdfast.base.torch_internals import has_partial_reduction as has_partial_reduction
    from holdfast.base.torch_internals import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from holdfast.base.torch_internals import local_part as local_part
    from holdfast.base.torch_internals import narrow_tensor_by_index as narrow_tensor_by_index
    from holdfast.base.torch_internals import processors_near as processors_near
    from holdfast.base.torch_internals import scaler_findings as scaler_findings
    from holdfast.base.torch_internals import sharded_parameters as sharded_parameters
    from holdfast.base.torch_internals import tolerant as tolerant
    from holdfast.base.torch_internals import tree_flatten as tree_flatten
    from holdfast.base.torch_internals import tree_leaves as tree_leaves
    from holdfast.base.torch_internals import tree_unflatten as tree_unflatten
else:
    __getattr__ = offers(__name__)
