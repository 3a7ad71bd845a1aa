"""A failure on one rank, made known to all of them as the same error.

What a retry may cure (storage, a part that is missing) is a failed save; anything else, such as a bug in a
tracked object's state_dict, is raised as it is.
"""

from __future__ import annotations

import pickle

from holdfast.checkpoint.identity import CheckpointName
from holdfast.checkpoint.manifest import ManifestError
from holdfast.control.exchange import share
from holdfast.control.group import Group
from holdfast.errors import HoldfastError, LeaseLostError, SaveFailedError, SaveStorageError, StorageError
from holdfast.files import is_storage_trouble
from holdfast.policy.classify import names_storage


def raise_for_all(group: Group, mine: BaseException | None, name: CheckpointName) -> None:
    """Every rank calls this when at least one has failed; every rank raises."""
    told = share(group, _portable(mine))
    errors = [(rank, error) for rank, error in enumerate(told) if error is not None]
    if mine is not None:  # with its own traceback
        errors = [(rank, mine if rank == group.rank else error) for rank, error in errors]
    raise explain(errors, name) from mine


def _portable(error: BaseException | None) -> BaseException | None:
    """The error itself if it survives a journey, else one that says the same."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever an exception class does when pickled, its text gets through
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def explain(errors: list[tuple[int, BaseException]], name: CheckpointName) -> BaseException:
    """Pure: the one error to raise for what happened on these ranks."""
    for _, error in errors:
        if isinstance(error, LeaseLostError):
            return LeaseLostError(str(error))
    for rank, error in errors:
        if isinstance(error, HoldfastError) and not isinstance(error, (SaveFailedError, StorageError)):
            return type(error)(f"rank {rank}: {error}")
        if not isinstance(error, (OSError, SaveFailedError, StorageError, ManifestError)):
            return error
    told = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors)
    stuck = all(is_storage_trouble(error) for _, error in errors)
    return save_failed(f"{name} was not saved ({told}). Every older checkpoint is untouched", storage=stuck)


def save_failed(told: str, *, storage: bool = False) -> SaveFailedError:
    """The error for a save that failed like this. `storage`: whether that alone is known to be the cause.

    Else the text tells: it may come from another process or rank, as text alone.
    """
    return SaveStorageError(told) if storage or names_storage(told) else SaveFailedError(told)
