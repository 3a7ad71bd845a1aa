"""A failure on one rank of a save, made known to all ranks as the same failed save.

Guarantee: whatever goes wrong with the work of a save on some rank (collecting, planning, reading a tensor,
writing, committing; in a tracked object's state_dict or in Holdfast itself) is one SaveFailedError on every
rank, which names the rank and, where one can be named, the entry of the state. Nobody is left waiting. Three
things are not failed saves: a lost lease, after which this attempt may do nothing more; a state that no
resume would accept, found at the first save of an attempt (proof.py), which is an IncompleteStateError on
every rank; and an error of the exchange between the ranks itself, because a group that cannot exchange cannot
agree on anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.base import is_storage_trouble, names_storage_trouble
from holdfast.checkpoint.format.manifest import CheckpointName
from holdfast.errors import IncompleteStateError, LeaseLostError, SaveFailedError, SaveStorageError
from holdfast.record import Group, add_up, share

T = TypeVar("T")
Kind = type[LeaseLostError | SaveFailedError | IncompleteStateError]

FAILURES = (Exception, CheckpointException)
"""What fails a save. Not what asks a process or the function around the run to end: that is not an Exception.
DCP's own error is not one either, and yet it is an error and nothing else."""
TOLD = 4
"""How many different errors, of different ranks, one message names."""


class EntryError(SaveFailedError):
    """Something is wrong with one entry of the state, which the message names."""


def about(entry: str, error: BaseException) -> EntryError:
    """The same error, naming the entry of the state that it concerns; raised `from` it."""
    if isinstance(error, EntryError):
        return error
    return EntryError(f"{entry}: {describe(error)}")


@contextlib.contextmanager
def naming(entry: str) -> Iterator[None]:
    """What fails in here names this entry. A lost lease stays what it is."""
    try:
        yield
    except LeaseLostError:
        raise
    except FAILURES as error:
        raise about(entry, error) from error


def describe(error: BaseException) -> str:
    """In words, with the kind of error unless it is our own, whose words are enough."""
    if isinstance(error, SaveFailedError | LeaseLostError | IncompleteStateError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def together(group: Group, name: CheckpointName, work: Callable[[], T]) -> T:
    """Do this rank's work; continue only if all ranks did theirs, else every rank raises the same error."""
    error: BaseException | None = None
    done: list[T] = []
    try:
        done.append(work())
    except FAILURES as caught:
        error = caught
    if add_up(group, [error is not None])[0]:
        raise_for_all(group, error, name)
    return done[0]


def raise_for_all(group: Group, mine: BaseException | None, name: CheckpointName) -> None:
    """Every rank calls this when at least one has failed; every rank raises the same error."""
    shared = share(group, None if mine is None else (_kind(mine), describe(mine)))
    raise explain([(rank, *error) for rank, error in enumerate(shared) if error is not None], name) from mine


def _kind(error: BaseException) -> Kind:
    """The kind of failure of a save that fails by this error alone."""
    if isinstance(error, LeaseLostError):
        return LeaseLostError
    if isinstance(error, IncompleteStateError):
        return IncompleteStateError
    if isinstance(error, SaveStorageError) or any(map(is_storage_trouble, (error, error.__cause__))):
        return SaveStorageError
    return SaveFailedError


def explain(
    errors: Sequence[tuple[int, Kind, str]], name: CheckpointName
) -> LeaseLostError | SaveFailedError | IncompleteStateError:
    """Pure: the one error to raise for what happened on these (rank, kind, what).

    If any rank has a state that no resume would accept, that is the error of all. It is the storage's error
    if nothing else failed on any rank.
    """
    for _, kind, text in errors:
        if kind is LeaseLostError:
            return LeaseLostError(text)
    storage = all(kind is SaveStorageError for _, kind, _ in errors)
    by_text: dict[str, list[int]] = {}
    for rank, _, text in errors:
        by_text.setdefault(text, []).append(rank)
    texts = [f"{_ranks(ranks)}: {text}" for text, ranks in list(by_text.items())[:TOLD]]
    more = f"; and {len(by_text) - TOLD} other errors" if len(by_text) > TOLD else ""
    failed: Kind = SaveStorageError if storage else SaveFailedError
    if any(kind is IncompleteStateError for _, kind, _ in errors):
        failed = IncompleteStateError
    return failed(f"{name} was not saved ({'; '.join(texts)}{more}). Every older checkpoint is untouched")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"rank {ranks[0]} and {len(ranks) - 1} more"


def save_failed(told: str) -> SaveFailedError:
    """The error for a save that failed like this, as reported by another process."""
    return SaveStorageError(told) if names_storage_trouble(told) else SaveFailedError(told)


def needs_more_than_a_fork(error: BaseException | None) -> bool:
    """Pure: whether a load may have failed only because a fork lacks something that it needs.

    That is a device, the trainer's sockets and open files, its threads, and with them its process groups.
    """
    while error is not None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        text = str(error).lower()
        if (
            isinstance(error, OSError | EOFError | torch.distributed.DistError)
            or "AcceleratorError" in kinds
            or (isinstance(error, RuntimeError) and any(word in text for word in _OF_MORE_THAN_A_FORK))
        ):
            return True
        error = error.__cause__
    return False


_OF_MORE_THAN_A_FORK = ("cuda", "hip error", "gloo", "nccl", "process group", "connection", "thread")
