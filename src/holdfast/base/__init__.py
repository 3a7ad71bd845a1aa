"""The floor: what every room stands on. It knows nothing of training.

For files that survive a crash, text that people read, lines on standard error, calls that may hang, the
points at which an in-process restart may interrupt, and torch's private parts.
Promises: nothing here decides, remembers or starts anything; a durable write is on disk when it returns.
Never: import another room, or torch before somebody needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.base import lines, scope, torch_internals
    from holdfast.base.bounded import PATIENCE, REWRITTEN, Aside, Bounded, Look, Waiting, is_table_full
    from holdfast.base.files import (
        OpenFile,
        check_output,
        create_exclusive,
        entries,
        explain_os_error,
        fsync_dir,
        is_storage_trouble,
        make_dirs,
        make_folder,
        move,
        names_storage_trouble,
        open_folder,
        overwrite,
        read_regular,
        remove,
        replace_atomic,
        unlink,
        write_durable,
    )
    from holdfast.base.fronts import offers, seen_imports, watch_imports
    from holdfast.base.lines import (
        FORMAT_VARIABLE,
        VERBOSITY_VARIABLE,
        LineKind,
        LineSource,
        LiveLine,
        LogFormat,
        Rendered,
        Verbosity,
        duration,
        escaped,
        install,
        is_format,
        is_taken,
        is_verbosity,
        log_format,
        moment,
        number,
        plural,
        printable,
        rendered,
        say_as_rank,
        size,
        speak,
        verbosity,
    )
    from holdfast.base.scope import (
        RestartRequested,
        Scope,
        critical,
        current,
        entered,
        leavable,
        stretch,
        to_the_end,
    )
    from holdfast.base.torch_internals import (
        ActivationWrapper,
        InstanceNorm,
        LoaderIterator,
        NormBase,
        ShardedParameter,
        StorageInfo,
        TreeSpec,
        collective_timeout,
        compute_local_shape_and_global_offset,
        create_write_items,
        default_store,
        flat_handle,
        flat_stretches,
        flatten_state_dict,
        forget_gathered,
        functional_collectives,
        get_addr_and_port,
        group_of_name,
        has_bytes,
        has_partial_reduction,
        has_unreduced_gradient,
        hides_parameters,
        in_backward,
        is_traceable_wrapper_subclass,
        local_part,
        narrow_tensor_by_index,
        processors_near,
        scaler_findings,
        sharded_parameters,
        tree_flatten,
        tree_leaves,
        tree_unflatten,
        wrapper_around,
    )
else:
    __getattr__ = offers(__name__)
