"""Whether a run that stopped has what it needs to go on: nodes, storage, and ranks that fit. Pure.

The part of the recovery runbook that looks ahead; `runbook` has what looks back.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.policy.capacity import Cluster, Exclusion, fit
from holdfast.policy.runbook import Finding, Mark, Stage

# --- nodes and capacity ------------------------------------------------------------------------------------


class Suspected(msgspec.Struct, frozen=True, kw_only=True):
    """A node, or a device of one, that something speaks against."""

    node: str
    device: str | None = None
    why: str
    sure: bool = False
    """Whether the hardware or a health check itself says so; otherwise it is only where things went wrong."""


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    device: str | None = None
    reason: str

    def describe(self) -> str:
        return self.node if self.device is None else f"device {self.device} of {self.node}"


TWICE = 2
"""So often a place must have been named for its faults to count against it: once is chance."""


def nodes_to_drain(suspected: Sequence[Suspected], cluster: Cluster) -> tuple[list[Drain], Finding]:
    """What to take out of service before the run is started again.

    What the hardware or a health check accuses; and where things went wrong twice, if the rest suffices.
    """
    places: dict[tuple[str, str | None], list[Suspected]] = {}
    for one in suspected:
        out = any(e.node == one.node and e.device in (None, one.device) for e in cluster.excluded)
        if not out:
            places.setdefault((one.node, one.device), []).append(one)
    drains: list[Drain] = []
    looked: list[str] = []
    for (node, device), told in sorted(places.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        reason = next((one.why for one in told if one.sure), told[-1].why)
        drain = Drain(node=node, device=device, reason=reason)
        without = _without(cluster, [*drains, drain])
        enough = not fit(without, max(cluster.min_nodes, 1)).missing
        if any(one.sure for one in told) or (len(told) >= TWICE and enough):
            drains.append(drain)
        else:
            only = "the rest would not suffice without it" if not enough else "once is no pattern"
            looked.append(f"look at {drain.describe()}: {reason} ({only})")
    kept_out = [
        f"{e.node}{'' if e.device is None else f', device {e.device}'} is out already: {e.reason}"
        for e in cluster.excluded
    ]
    if drains:
        names = ", ".join(drain.describe() for drain in drains)
        told_why = [f"{drain.describe()}: {drain.reason}" for drain in drains]
        text = f"to be drained: {names}"
        return drains, Finding(
            stage=Stage.NODES, mark=Mark.NOTE, text=text, evidence=[*told_why, *looked, *kept_out]
        )
    return [], Finding(
        stage=Stage.NODES,
        mark=Mark.NOTE if looked else Mark.OK,
        text="none to drain",
        evidence=[*looked, *kept_out],
    )


def _without(cluster: Cluster, drains: Sequence[Drain]) -> Cluster:
    gone = [Exclusion(drain.node, drain.device, drain.reason) for drain in drains]
    return msgspec.structs.replace(cluster, excluded=[*cluster.excluded, *gone])


def nodes_to_start_with(cluster: Cluster, drains: Sequence[Drain]) -> int | None:
    """How many nodes a start of a run that may shrink would have; None where its launch alone says that."""
    if not cluster.may_shrink:
        return None
    found = fit(_without(cluster, drains), cluster.max_nodes)
    return len(found.nodes) if found.nodes and not found.missing else None


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that a scheduler has for the run now, without those that are kept out."""

    by: str
    nodes: int
    queues: bool
    """Whether a start waits in its queue until there are enough; a job that runs keeps the nodes it has."""


def capacity(cluster: Cluster, drains: Sequence[Drain], offer: Offer | None) -> Finding:
    """Whether there are nodes enough: enough, shrink, or wait.

    `offer`: None if there is no scheduler to ask, or no answer; then the last attempts' nodes count.
    """
    if not cluster.nodes and offer is None:
        return Finding(
            stage=Stage.CAPACITY, mark=Mark.UNKNOWN, text="not known: the run has no record of its nodes"
        )
    wanted = max(cluster.max_nodes or len(cluster.nodes), cluster.min_nodes)
    if offer is not None:
        return _offered(cluster, offer, wanted)
    found = fit(_without(cluster, drains), wanted)
    have = f"{len(found.nodes)} of {wanted} node{'s' * (wanted != 1)}"
    if found.missing:
        return _too_few(f"wait: {have} usable, {found.missing} more needed")
    if found.shrinks:
        text = f"shrink: {have} usable, and the run may go on with {cluster.min_nodes} or more"
        return Finding(stage=Stage.CAPACITY, mark=Mark.NOTE, text=text)
    where = ", ".join(found.nodes[:8]) + (" …" if len(found.nodes) > 8 else "")
    new = [f"{node} is new to the run: it takes the place of one that is out" for node in found.spares]
    mark = Mark.NOTE if new else Mark.OK
    return Finding(stage=Stage.CAPACITY, mark=mark, text=f"enough: {have} ({where})", evidence=new)


def _offered(cluster: Cluster, offer: Offer, wanted: int) -> Finding:
    have = f"{offer.by} has {offer.nodes} {'free' if offer.queues else 'usable'}, {wanted} are wanted"
    if offer.nodes >= wanted:
        return Finding(stage=Stage.CAPACITY, mark=Mark.OK, text=f"enough: {have}")
    if cluster.may_shrink and offer.nodes >= cluster.min_nodes:
        text = f"shrink: {have}, and the run may go on with {cluster.min_nodes} or more"
        return Finding(stage=Stage.CAPACITY, mark=Mark.NOTE, text=text)
    if not offer.queues:
        return _too_few(f"wait: {have}")
    text = f"wait: {have}; the job waits in the queue until they are there"
    return Finding(stage=Stage.CAPACITY, mark=Mark.NOTE, text=text)


def _too_few(text: str) -> Finding:
    code = ExitCode.NO_CAPACITY
    return Finding(stage=Stage.CAPACITY, mark=Mark.PROBLEM, text=text, code=int(code), next=MEANINGS[code][1])


# --- storage, and the number of ranks ----------------------------------------------------------------------


class StorageFacts(msgspec.Struct, frozen=True, kw_only=True):
    place: str
    what: str
    """What lies there: the checkpoints, or the run's memory."""
    problem: str = ""
    """What trying it showed; empty if it takes and gives back what is written."""
    free: int | None = None
    needed: int = 0
    """Bytes that the next save takes; 0 if not known."""
    code: int = int(ExitCode.SAVE_FAILED)
    """What a start would end with if it cannot be written."""


def storage(places: Sequence[StorageFacts], alarm: Sequence[str]) -> Finding:
    """Whether what is there can be believed, and the next save has room."""
    evidence: list[str] = []
    code, remedy = 0, ""
    for one in places:
        short = one.free is not None and one.free < one.needed
        if one.problem:
            evidence.append(f"{one.what} in {one.place}: {one.problem}")
        elif short:
            evidence.append(
                f"{one.what} in {one.place}: {one.free} bytes free, the next save takes {one.needed}"
            )
        else:
            evidence.append(f"{one.what} in {one.place}: written, made durable, moved and read back")
        if (one.problem or short) and not code:
            code, remedy = one.code, MEANINGS[ExitCode(one.code)][1]
    if alarm:
        told = f"storage alarm: {' and '.join(alarm)}, one after the other, cannot be used"
        works = "the storage was tried and works, so the next older checkpoint counts"
        evidence.append(told if code else f"{told}; {works}")
    if code:
        text = "cannot be used as it is"
        return Finding(
            stage=Stage.STORAGE, mark=Mark.PROBLEM, text=text, evidence=evidence, code=code, next=remedy
        )
    mark = Mark.NOTE if alarm else Mark.OK
    text = "takes and gives back what is written"
    return Finding(stage=Stage.STORAGE, mark=mark, text=text, evidence=evidence)


def world(saved: int | None, wanted: int | None, *, shared: bool | None) -> Finding:
    """Whether so many ranks can take up what others saved. `shared`: the data position is a global one."""
    if saved is None or wanted is None:
        known = "the number of ranks that a start would have" if wanted is None else "how many ranks saved it"
        return Finding(stage=Stage.WORLD, mark=Mark.UNKNOWN, text=f"{known} is not known")
    if saved == wanted:
        return Finding(stage=Stage.WORLD, mark=Mark.OK, text=f"{_ranks(saved)} saved it, as many start")
    both = f"{_ranks(saved)} saved it, {_ranks(wanted)} would start"
    if shared is None:
        text = f"{both}: whether its data position can be shared out is known only when it is loaded"
        return Finding(stage=Stage.WORLD, mark=Mark.UNKNOWN, text=text)
    if shared:
        told = ["tensors and the data position are resharded; random generators are seeded anew"]
        return Finding(stage=Stage.WORLD, mark=Mark.NOTE, text=f"{both}: resharding is fine", evidence=told)
    return Finding(
        stage=Stage.WORLD,
        mark=Mark.PROBLEM,
        text=f"{both}: refused",
        evidence=["its loader keeps one data position per rank: samples would be repeated or left out"],
        code=int(ExitCode.STATE_MISFIT),
        next=f"start {_ranks(saved)}; with holdfast.GlobalBatches any number could go on",
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


# --- the command -------------------------------------------------------------------------------------------


def command(
    shown: str | None, *, nodes: int = 1, missing: Sequence[str] = (), submit: str = "", wrong: str = ""
) -> Finding:
    """How the run starts again. `shown`: the command in words, None if it is not known.

    `missing`: variables that the last launch had; `submit`: how to start it where it must not be run here;
    `wrong`: why it would not start this run.
    """
    if shown is None:
        return Finding(
            stage=Stage.COMMAND,
            mark=Mark.UNKNOWN,
            text="not known: the run was not started by `holdfast run`",
            next="start it as before, or give the command after `--`",
        )
    if wrong and not submit:
        return Finding(
            stage=Stage.COMMAND,
            mark=Mark.PROBLEM,
            text=shown,
            evidence=[wrong],
            code=int(ExitCode.USAGE),
            next="give the command that starts this run after `--`",
        )
    evidence = [f"set for the last launch, and not here: {', '.join(missing)}"] if missing else []
    if submit:
        evidence.append(submit)
    elif nodes > 1:
        evidence.append(f"on each of {nodes} nodes, or through the batch script again")
    return Finding(
        stage=Stage.COMMAND, mark=Mark.NOTE if evidence else Mark.OK, text=shown, evidence=evidence
    )
