"""How a process becomes a member: what it is handed, who it is, its keeper, and the store.

Under `holdfast run` all of it is handed over. Otherwise each node's local rank 0 starts a keeper process, and
the node's other ranks learn its address from the store: torchrun's, or one that rank 0's keeper hosts at
MASTER_ADDR:MASTER_PORT. Every wait is bounded by barrier_timeout; a process that cannot join raises
HandedOverError.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.cluster import node_name
from holdfast.config import InProcessSettings, LaunchSettings
from holdfast.errors import DecisionTimeoutError, HandedOverError, UsageError
from holdfast.record import connect, read_handover, read_key
from holdfast.restart.keeper_process import Duties, start, sweep
from holdfast.restart.messages import PREFIX, NodeKeeper, keeper_key

if TYPE_CHECKING:
    from torch.distributed import Store


# What the launcher hands to members: one environment variable, HOLDFAST_RESTART, as JSON.
#
# A process that finds it has its keeper in its node's agent, and meets the others in the attempt's store.


VARIABLE = "HOLDFAST_RESTART"


class KeeperHandover(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    """Of the store."""
    keeper: str
    """Path of the keeper's socket."""
    members: int
    """How many there are on all nodes."""
    node: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> KeeperHandover | None:
        """The hand-over, or None for a process whose launcher keeps no members."""
        return read_handover(environ, VARIABLE, cls)

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}


LOOPBACK = "127.0.0.1"
_WHICH_START = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""What distinguishes one start of the ranks from another: torchrun's store survives a second start."""


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that this process was started with."""

    member: int = 0
    members: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Ranks:
        """As torchrun or Slurm set them; a process that nobody numbered is alone."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if "RANK" not in environ and "SLURM_STEP_ID" in environ:  # a batch script is not a task of a step
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        if names[0] not in environ:
            return cls()
        numbers = {}
        for field, name in zip(("member", "members", "local_rank"), names, strict=True):
            text = environ.get(name, "")
            if not text.isdecimal():
                raise UsageError(
                    f"{names[0]} is set, but {name} is {text!r}, which is not a number; set all of {names}"
                )
            numbers[field] = int(text)
        return cls(**numbers)


class Joined:
    """A member's place in a job. `store` is for one thread; others get their own connection with `client`."""

    def __init__(
        self, ranks: Ranks, node: str, prefix: str, host: str, port: int, patience: float, *, launched: bool
    ) -> None:
        self.member, self.members, self.local_rank = ranks.member, ranks.members, ranks.local_rank
        self.node = node
        self.keeper_path = ""
        self._launched = launched
        self._prefix, self._host, self._port, self._patience = prefix, host, port, patience
        self.store: Store | None = self.client()

    def client(self) -> Store:
        """Another connection to the store: a wait on one does not hold up the other."""
        from torch.distributed import PrefixStore

        try:
            return PrefixStore(self._prefix, connect(self._host, self._port, self._patience))
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise HandedOverError(
                f"member {self.member} cannot reach the store at {self._host}:{self._port} within "
                f"{self._patience:g} s: {first_line}. Check that rank 0 was started, and that all nodes "
                "have the same MASTER_ADDR and MASTER_PORT"
            ) from error

    def close(self) -> None:
        """Leave the store."""
        self.store = None
        if not self._launched:
            sweep(Path(self.keeper_path))


def join(
    chosen: InProcessSettings,
    environ: Mapping[str, str] = os.environ,
    *,
    node: str = "",
    max_restarts: int = LaunchSettings().max_restarts,
    first_barrier: float = 0.0,
) -> Joined:
    """Become a member. `node` and `max_restarts` are as in the settings of launch.

    `first_barrier`: seconds that members may take to reach the first barrier, if more than barrier_timeout.
    """
    ranks = Ranks.from_environment(environ)
    handed = KeeperHandover.from_environment(environ)
    if handed is not None:
        joined = Joined(
            ranks, handed.node, PREFIX, handed.host, handed.port, chosen.barrier_timeout, launched=True
        )
        joined.members, joined.keeper_path = handed.members, handed.keeper
        return joined
    return _join_by_ourselves(chosen, environ, ranks, _node_of(environ, node), max_restarts, first_barrier)


def _join_by_ourselves(
    chosen: InProcessSettings,
    environ: Mapping[str, str],
    ranks: Ranks,
    node: str,
    max_restarts: int,
    first_barrier: float,
) -> Joined:
    elastic = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = _address(environ, ranks)
    prefix = "/".join([PREFIX, *(environ[name] for name in _WHICH_START if environ.get(name))])
    if ranks.member == 0 and ranks.local_rank != 0:
        raise UsageError(f"RANK 0 has to be LOCAL_RANK 0 on its node, but is {ranks.local_rank}")
    path = ""
    if ranks.local_rank == 0:
        duties = Duties(
            node=node,
            members=ranks.members,
            host=host,
            port=port,
            prefix=prefix,
            hosts=ranks.member == 0 and not elastic,
            conducts=ranks.member == 0,
            starter=ranks.member,
            pid=os.getpid(),
            max_restarts=max_restarts,
            chosen=chosen,
            first_barrier=first_barrier,
        )
        started = start(duties)
        path, port = started.path, started.port
    joined = Joined(ranks, node, prefix, host, port, chosen.barrier_timeout, launched=False)
    joined.keeper_path = path or _find_keeper(joined, chosen.barrier_timeout)
    return joined


def _find_keeper(joined: Joined, patience: float) -> str:
    assert joined.store is not None
    what = f"the keeper of {joined.node}, which its local rank 0 starts"
    try:
        raw = read_key(joined.store, keeper_key(joined.node), patience, what)
    except DecisionTimeoutError as error:
        raise HandedOverError(str(error)) from error
    return msgspec.json.decode(raw, type=NodeKeeper).path


def _address(environ: Mapping[str, str], ranks: Ranks) -> tuple[str, int]:
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if ranks.members == 1 and not (host and port):
        return LOOPBACK, 0
    if not host or not port.isdecimal():
        raise UsageError(
            f"{ranks.members} ranks have to find each other: set MASTER_ADDR and MASTER_PORT to the same "
            f"values on all of them (here they are {host!r} and {port!r}), or use `holdfast run` or torchrun"
        )
    return host, int(port)


def _node_of(environ: Mapping[str, str], configured: str) -> str:
    """The node's name, made unique if several groups of workers may share a host."""
    name = node_name(configured, environ)
    group = environ.get("GROUP_RANK", "")
    several = environ.get("GROUP_WORLD_SIZE", "1") != "1"
    return f"{name}.{group}" if several and group else name
