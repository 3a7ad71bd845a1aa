"""What the agent needs of torch elastic's own parts, and where it works around them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec

from holdfast.policy.rounds import Member, ranks_of


def make_workers(members: Sequence[Member], place: int) -> list[Worker]:
    """The workers of the node at `place`, with their ranks."""
    ranks = ranks_of(list(members), place)
    return [
        Worker(
            local_rank=local_rank,
            global_rank=ranks.first + local_rank,
            role_rank=ranks.first_of_role + local_rank,
            world_size=ranks.world_size,
            role_world_size=ranks.role_world_size,
        )
        for local_rank in range(members[place].slots)
    ]


@contextlib.contextmanager
def unshared_store() -> Iterator[None]:
    """Keep torch's rendezvous from sharing its store with the workers, which have one of their own here.

    With sharing (torch 2.13), a node caches the address of the first round and does not publish it again, so
    that a node which joins later waits for it in vain. The variable must not reach the workers.
    """
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def launch_store(store: Any, spec: WorkerSpec) -> Any:
    """A part of the rendezvous store that all rounds of this launch share."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore(f"holdfast.{spec.rdzv_handler.get_run_id()}", store)
