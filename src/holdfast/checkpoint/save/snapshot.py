"""Taking part in a save: what this rank stores, under a plan that all ranks know to fit.

Guarantee: either every rank has a snapshot of the same step under the same plan, or every rank knows that
there is none, and why. In the usual case that costs one exchange of a few integers; only a change of
structure, a tensor that ranks no longer hold alike, or a failure costs more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.checkpoint.format import (
    FAILURES,
    CheckpointName,
    Frames,
    PartEntry,
    Proof,
    about,
    derive_id,
    explain,
    naming,
    plain,
    raise_for_all,
    together,
)
from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.checkpoint.save.plan import (
    Plan,
    SnapshotPlanner,
    make_plan,
    metadata_of,
    signature_of,
    structure_of,
    term,
)
from holdfast.checkpoint.state import (
    GRADIENTS,
    OWN,
    Initial,
    Report,
    Subject,
    Tracked,
    alive,
    has_schedule,
    in_question,
    merge,
    prove,
    rank_key,
    to_blob,
    uncollected,
    untracked_schedules,
)
from holdfast.errors import IncompleteStateError, SaveFailedError, UsageError
from holdfast.record import Group, add_up, share

log = logging.getLogger("holdfast.checkpoint")

OWN_PARTS = {
    "rng": PartEntry(kind="rng"),
    "data": PartEntry(kind="data"),
    "counters": PartEntry(kind="counters"),
}


def _own_parts(own: Mapping[str, Any]) -> dict[str, PartEntry]:
    position = own.get("data")
    shared = bool(position.get("is_global")) if isinstance(position, Mapping) else None
    return OWN_PARTS | {"data": PartEntry(kind="data", is_global=shared)}


@dataclass(frozen=True)
class Snapshot:
    """This rank's share of a save, not copied yet."""

    name: CheckpointName
    plan: Plan
    tensors: list[torch.Tensor]
    """In the plan's order; aliases of live state."""
    prints: dict[int, str]
    """Fingerprints that are known already, by position."""
    parts: dict[str, PartEntry]
    proof: Proof
    serial: int
    """Counts the snapshots of an attempt, on every rank alike."""
    samples: int = 0
    tokens: int = 0
    """Of all ranks together."""

    def fingerprints(self) -> list[str]:
        """Of every tensor, on its device, as it is now."""
        unknown = [at for at in range(len(self.tensors)) if at not in self.prints]
        names = [self.plan.items[at].index.fqn for at in unknown]
        found = _fingerprints(names, [self.tensors[at] for at in unknown])
        known = {**self.prints, **dict(zip(unknown, found, strict=True))}
        return [known[at] for at in range(len(self.tensors))]


def _fingerprints(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Of tensors under these names; an error names the one that it befell."""
    plains: list[torch.Tensor] = []
    for name, tensor in zip(names, tensors, strict=True):
        try:
            if tensor.device.type == "meta":
                raise ValueError("it is on the meta device and has no bytes")
            # Small ones are looked at as they are: that is what takes long where there are many.
            plains.append(tensor if fingerprints.small_bytes(tensor) is not None else plain(tensor))
        except FAILURES as error:
            raise about(name, error) from error
    return fingerprints.begin(plains).result()


@dataclass
class _Collected:
    planner: SnapshotPlanner
    signature: str
    parts: dict[str, PartEntry]
    tensors: dict[str, Any]
    others: dict[str, Any]
    own: dict[str, Any]
    blob: torch.Tensor
    digests: dict[str, str] = field(default_factory=dict)


class Snapshotter:
    """Takes the snapshots of one attempt. Every rank makes the same calls in the same order."""

    def __init__(
        self, tracked: Tracked, own: Callable[[], dict[str, Any]], *, run: str, attempt: int, group: Group
    ) -> None:
        """`own`: the run's own state."""
        self.tracked = tracked
        self._own = own
        self._run = run
        self._attempt = attempt
        self._group = group
        self._serial = 0
        self._plan: Plan | None = None
        self._plans = 0
        self._frames = Frames()
        self._blob = 0
        self._doubts: list[str] = []
        self._initial = Initial(tracked)
        """The tracked objects as they were at the start."""
        self._proof = Proof()
        self._proven: dict[str, Report] = {}
        """What this rank found, by the structure that it was found of; one at most."""
        self._proven_plan = 0
        self._in_question: frozenset[int] = frozenset()
        """What the last proof was about besides the tracked objects."""
        self.counted = (0, 0)
        """Samples and tokens of all ranks together, at the last snapshot."""
        self.cramped = False
        """Whether, at the last `take`, some rank had no room for a local copy; the same on every rank."""

    @property
    def planned_bytes(self) -> int | None:
        """Of this rank's image, if the next save is like the last one; None if there was none."""
        return self._plan.layout.size if self._plan is not None else None

    def next_name(self, step: int) -> CheckpointName:
        """The next save's identity; the same on every rank, because every rank counts its saves alike."""
        return CheckpointName(step, derive_id(self._run, self._attempt, step, self._serial + 1))

    def take_doubts(self) -> list[str]:
        """What the first save found wrong with the state of tracked objects; told once."""
        doubts, self._doubts = self._doubts, []
        return doubts

    def plan_ahead(self) -> Plan | None:
        """Plan before the first save is due, on all ranks; None if some rank cannot yet.

        It holds for state that is complete; an optimizer that has not stepped yet makes another necessary.
        """
        name = self.next_name(0)
        try:
            collected = together(self._group, name, lambda: self._collect(None))
            together(self._group, name, lambda: self._replan(collected))
        except SaveFailedError as error:  # the first save will say so again, if it is still so then
            log.warning("holdfast: the first save could not be planned ahead: %s", error)
            return None
        return self._plan

    def take(
        self,
        step: int,
        *,
        prepare: Callable[[CheckpointName], None] | None = None,
        busy: bool = False,
        cramped: bool = False,
        only_local: bool = False,
        prove: bool = True,
    ) -> Snapshot | None:
        """The group's snapshot, or None if some rank is busy. `prepare` runs first; its failure is shared.

        `cramped`: this rank has no room for a local copy. With `only_local` that too means None, for all.
        `prove`: the first of its structure is proven to resume, or IncompleteStateError is raised.
        """
        name = self.next_name(step)
        busy = busy or (cramped and only_local)
        error: BaseException | None = None
        collected: _Collected | None = None
        tensors: list[torch.Tensor] = []
        replan, content = True, 0
        counted: Mapping[str, int] = {}
        if not busy:
            try:
                if prepare is not None:
                    prepare(name)
                collected = self._collect(step)
                counted = collected.own.get("counters", {})
                plan = self._plan
                replan = plan is None or plan.signature != collected.signature or self._has_more()
                if plan is not None and not replan:
                    content = term(plan.sharings, self._group.rank, collected.digests)
                    tensors = _tensors(collected.planner, plan)
            except FAILURES as caught:
                error = caught
        failed, waiting, short, replanning, drift, steps, squares, samples, tokens = add_up(
            self._group,
            [
                error is not None,
                busy,
                cramped,
                replan and not busy,
                content,
                step,
                step * step,
                counted.get("samples", 0),
                counted.get("tokens", 0),
            ],
        )
        self.cramped = short > 0
        world = self._group.world_size
        if failed:
            raise_for_all(self._group, error, name)
        if steps != world * step or squares != world * step * step:
            raise UsageError(
                f"rank {self._group.rank} saves step {step}, other ranks save other steps (they add up to "
                f"{steps} over {world} ranks). Every rank must save at the same step"
            )
        if waiting:
            return None
        assert collected is not None
        if replanning or drift:
            found = collected
            tensors = together(self._group, name, lambda: self._replan(found))
        plan = self._plan
        assert plan is not None
        if prove and self._proven_plan != plan.number:
            self._prove(name, collected, plan)
        self._serial += 1
        digests = collected.digests
        prints: dict[int, str] = {}
        if digests:  # with one rank there are none
            prints = {at: digests[fqn] for at, fqn in enumerate(plan.names) if fqn in digests}
        self.counted = samples, tokens
        return Snapshot(
            name,
            plan,
            tensors,
            prints,
            collected.parts,
            self._proof,
            self._serial,
            samples=samples,
            tokens=tokens,
        )

    def _prove(self, name: CheckpointName, collected: _Collected, plan: Plan) -> None:
        """All ranks together, under a new plan; a rank whose own structure is as before need not again."""
        first = self._proven_plan == 0
        self._in_question = in_question(self.tracked)
        structure = f"{structure_of(collected.planner)} {sorted(self._in_question)}"
        mine = self._proven.get(structure)
        if mine is None:
            subject = Subject(
                tracked=self.tracked,
                initial=self._initial,
                tensors=collected.tensors,
                others=collected.others,
                own=collected.own,
                blob=collected.blob,
                metadata=lambda: metadata_of(collected.planner, plan),
            )
            mine = prove(subject)
        reports = share(self._group, mine)
        failed = [(rank, report.errors) for rank, report in enumerate(reports) if report.errors]
        if failed:
            kind = IncompleteStateError if first else SaveFailedError
            told = [(rank, kind, "; ".join(errors)) for rank, errors in failed]
            raise explain(told, name)
        self._proven = {structure: mine}
        self._proven_plan = plan.number
        self._proof = merge(reports, name.step)
        self._doubts += [doubt for report in reports for doubt in report.doubts]
        if self._proof.why_not:
            self._doubts.append(
                f"{name} is saved without a proof that this run could resume from it: {self._proof.why_not}"
            )

    def _has_more(self) -> bool:
        """Whether another proof is due, though what is stored has the same structure."""
        return not in_question(self.tracked) <= self._in_question

    @uncollected()
    def _collect(self, step: int | None) -> _Collected:
        tracked = self.tracked
        tensors, others = tracked.collect()
        with naming("the gradients"):
            gradients, described = tracked.gradients.collect(step)
        if self._serial == 0:
            self._doubts = [
                f"{name}: it has no state at all; is the right object tracked?"
                for name, state in others.items()
                if tracked.kind(name) == "object" and isinstance(state, Mapping) and not state
            ]
            self._doubts += self._schedules_left_out()
        with naming("the run's own state (generators, data position, counters)"):
            mine = {**self._own(), "gradients": described}
        blob = self._to_blob(others, mine)
        self._blob = blob.numel()
        state = {**tensors, OWN: {rank_key(self._group.rank): blob}}
        if gradients:
            state[GRADIENTS] = gradients
        planner = SnapshotPlanner(state, self._group.rank, is_coordinator=self._group.is_coordinator)
        signature = signature_of(planner, self._group.world_size)
        parts = {**tracked.parts(tensors), **_own_parts(mine)}
        if gradients:
            parts[GRADIENTS] = PartEntry(kind="gradients", entries=len(gradients))
        found = _Collected(planner, signature, parts, tensors, others, mine, blob)
        if self._group.world_size > 1:
            shared = planner.plain_tensors()
            prints = _fingerprints(list(shared), list(shared.values()))
            found.digests = dict(zip(shared, prints, strict=True))
        return found

    def _schedules_left_out(self) -> list[str]:
        """In words; nothing where the first step has shown it already."""
        tracked = self.tracked
        given = tracked.given()
        if tracked.looked_around or not any(map(has_schedule, given.values())):
            return []
        names = {id(thing): name for name, thing in given.items()}
        return [
            f"a {type(one).__name__} of track({names.get(id(one.optimizer), '…')}=…) is not tracked, so a "
            "resume would begin it anew: give it to run.track(…) too, or to run.ignore(…) if the script sets "
            "it by itself"
            for one in untracked_schedules(given.values(), tracked.ignored, alive(LRScheduler))
        ]

    def _to_blob(self, others: dict[str, Any], own: dict[str, Any]) -> torch.Tensor:
        try:
            return to_blob({"format": 1, "tracked": others, "own": own}, self._blob)
        except FAILURES as error:
            for name, state in others.items():
                try:
                    to_blob(state)
                except FAILURES as found:
                    kind = IncompleteStateError if self._serial == 0 else SaveFailedError
                    raise kind(
                        f"track({name}=…): its state cannot be saved: {type(found).__name__}: {found}. Give "
                        "its state_dict plain values, containers and tensors"
                    ) from found
            raise about("the run's own state (generators, data position, counters)", error) from error

    def _replan(self, collected: _Collected) -> list[torch.Tensor]:
        """All ranks together: a new plan, and this rank's tensors under it."""
        self._plans += 1
        self._plan = None  # if this fails on one rank, all of them plan at the next save
        plan = make_plan(
            self._group,
            self._plans,
            collected.planner,
            collected.signature,
            collected.digests,
            self._frames,
        )
        tensors = _tensors(collected.planner, plan)
        self._plan = plan
        return tensors


def _tensors(planner: SnapshotPlanner, plan: Plan) -> list[torch.Tensor]:
    """In the plan's order; an error names the entry that it befell."""
    plainly = planner.plain_tensors_of(plan.names)
    if plainly is not None:
        return plainly
    found: list[torch.Tensor] = []
    for item in plan.items:
        try:
            found.append(planner.tensor_of(item))
        except FAILURES as error:
            raise about(item.index.fqn, error) from error
    return found
