"""A rank's snapshot: what it stores, under a plan that all ranks know to fit, and its copy for the writer.

Guarantee: either every rank has a snapshot of the same step under the same plan, or every rank knows that
there is none, and why. Usually that costs one exchange of a few integers; only a change of structure, a
tensor that ranks no longer hold alike, or a failure costs more.

A save in the foreground writes the tensors from where they are. For a save beside training they are first
staged: copied into memory that the writer process reads.
"""

from __future__ import annotations

import ctypes
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.checkpoint.format import (
    FAILURES,
    CheckpointName,
    Frames,
    PartEntry,
    Proof,
    about,
    check_size,
    derive_id,
    describe,
    explain,
    naming,
    plain,
    raise_for_all,
    together,
)
from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.checkpoint.save.device import (
    Buffer,
    DeviceStager,
    InFlight,
    Owned,
    TensorPiece,
)
from holdfast.checkpoint.save.plan import (
    Plan,
    RankFacts,
    SnapshotPlanner,
    make_plan,
    metadata_of,
    signature_of,
    structure_of,
    term,
)
from holdfast.checkpoint.state import (
    ABSENT,
    GRADIENTS,
    NESTED,
    OWN,
    Initial,
    Report,
    Subject,
    Tracked,
    alive,
    coordinates,
    has_form,
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
from holdfast.policy import Choice, Setting, Way, choose_snapshot, owned_enough
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
    """This rank's share of a save, not yet copied."""

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

    @property
    def needs(self) -> list[str]:
        """Features without which it cannot be read correctly."""
        return [
            *([GRADIENTS] if GRADIENTS in self.parts else []),
            *([NESTED] if self.plan.facts.nested else []),
            *([ABSENT] if self.plan.facts.absent else []),
        ]

    def fingerprints(self) -> list[str]:
        """That of every tensor, taken on its device, as it is now."""
        unknown = [at for at in range(len(self.tensors)) if at not in self.prints]
        names = [self.plan.items[at].index.fqn for at in unknown]
        found = _fingerprints(names, [self.tensors[at] for at in unknown])
        known = {**self.prints, **dict(zip(unknown, found, strict=True))}
        return [known[at] for at in range(len(self.tensors))]


def _fingerprints(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Those of tensors under these names; an error names the tensor that it concerns."""
    plains: list[torch.Tensor] = []
    for name, tensor in zip(names, tensors, strict=True):
        try:
            if tensor.device.type == "meta":
                raise ValueError("it is on the meta device and has no bytes")
            # Small ones are taken as they are: making each plain is what takes long when there are many.
            plains.append(tensor if fingerprints.small_bytes(tensor) is not None else plain(tensor))
        except FAILURES as error:
            raise about(name, _of_its_class(tensor, error)) from error
    return fingerprints.begin(plains).result()


def _of_its_class(tensor: torch.Tensor, error: BaseException) -> BaseException:
    """The error; where that need not say it, with the class of the tensor."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter) or isinstance(error, SaveFailedError):
        return error
    return SaveFailedError(f"it is of class {kind.__name__}, which has no plain bytes ({describe(error)})")


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return dict(zip(tensors, _fingerprints(list(tensors), list(tensors.values())), strict=True))


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

    def compare(self, names: frozenset[str]) -> dict[str, str]:
        """Digests of what this rank holds of these distributed tensors; known from now on."""
        found = _digests(self.planner.shares_of(names))
        self.digests |= found
        return found


class _Sums(NamedTuple):
    """What ranks tell each other at a save, over all of them."""

    waiting: int
    cramped: int
    replan: int
    drift: int
    """Zero if every rank holds alike what it used to hold alike."""
    samples: int
    tokens: int
    heard: int


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
        self.plan: Plan | None = None
        """That of the last save, or the one made ahead."""
        self._plans = 0
        self._frames = Frames()
        self._blob = 0
        self._doubts: list[str] = []
        self._initial = Initial(tracked)
        """The tracked objects as they were at the start."""
        self._proof = Proof()
        self._proven: dict[str, Report] = {}
        """What this rank's proof reported, by the structure it was made for; one entry at most."""
        self._proven_plan = 0
        self._in_question: frozenset[int] = frozenset()
        """What the last proof was about besides the tracked objects."""
        self.counted = (0, 0)
        """Samples and tokens of all ranks together, at the last snapshot."""
        self.word = self.heard = 0
        """What this rank adds to the exchange of its next snapshots, and the sum at the last one: so rank 0
        tells all ranks when the next local save is due (train/schedule.py)."""
        self.cramped = False
        """Whether some rank had no room for a local copy at the last `take`; the same on every rank."""

    @property
    def planned_bytes(self) -> int | None:
        """The size of this rank's image, if the next save is like the last; None if there was none."""
        return self.plan.layout.size if self.plan is not None else None

    def next_name(self, step: int) -> CheckpointName:
        """The next save's identity; the same on every rank, because every rank counts its saves alike."""
        return CheckpointName(step, derive_id(self._run, self._attempt, step, self._serial + 1))

    def take_doubts(self) -> list[str]:
        """What the first save found doubtful about the state of tracked objects; returned only once."""
        doubts, self._doubts = self._doubts, []
        return doubts

    def may_plan(self, step: int, *, ready: bool) -> bool:
        """Whether all ranks are ready to plan ahead after this step.

        It is the exchange of a save, so that ranks which save at other steps are told so here too.
        """
        return not self._exchange(-1 - step, waiting=not ready).waiting

    def plan_ahead(self) -> None:
        """Plan before the first save is due, on all ranks, unless some rank cannot yet.

        The plan fits state that is complete; an optimizer that has not stepped yet makes another necessary.
        """
        name = self.next_name(0)
        try:
            collected = together(self._group, name, lambda: self._collect(None))
            together(self._group, name, lambda: self._replan(collected))
        except (SaveFailedError, IncompleteStateError) as error:  # the first save says so, if it is still so
            log.warning("holdfast: the first save could not be planned ahead: %s", error)
        finally:
            self._doubts = []  # the first save has them too

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

        `cramped`: this rank has no room for a local copy; with `only_local` that too means None for all.
        `prove`: the first snapshot of a structure is proven to resume, or IncompleteStateError is raised.
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
                plan = self.plan
                replan = plan is None or plan.signature != collected.signature or self._has_more()
                if plan is not None and not replan:
                    content = term(plan.shares, collected.digests)
                    tensors = _tensors(collected.planner, plan)
            except FAILURES as caught:
                error = caught
        told = self._exchange(
            step,
            error=error,
            waiting=busy,
            cramped=cramped,
            replan=replan and not busy,
            content=content,
            counted=counted,
        )
        self.cramped, self.heard = told.cramped > 0, told.heard
        if told.waiting:
            return None
        assert collected is not None
        if told.replan or told.drift:
            found = collected
            tensors = together(self._group, name, lambda: self._replan(found))
        plan = self.plan
        assert plan is not None
        if prove and self._proven_plan != plan.number:
            self._prove(name, collected, plan)
        self._serial += 1
        digests = collected.digests
        prints: dict[int, str] = {}
        if digests:  # with one rank there are none
            prints = {at: digests[key] for at, key in enumerate(plan.digest_keys) if key in digests}
        self.counted = samples, tokens = told.samples, told.tokens
        return Snapshot(
            name,
            plan,
            tensors,
            prints,
            {**plan.facts.parts, **collected.parts},
            self._proof,
            self._serial,
            samples=samples,
            tokens=tokens,
        )

    def _exchange(
        self,
        step: int,
        *,
        error: BaseException | None = None,
        waiting: bool = False,
        cramped: bool = False,
        replan: bool = False,
        content: int = 0,
        counted: Mapping[str, int] | None = None,
    ) -> _Sums:
        """The one exchange of a save. Raises, on all ranks, what failed on any, or UsageError.

        A negative step n stands for a boundary without a save, after step -1 - n.
        """
        world, counted = self._group.world_size, counted or {}
        failed, steps, squares, *sums = add_up(
            self._group,
            [
                error is not None,
                step,
                step * step,
                waiting,
                cramped,
                replan,
                content,
                counted.get("samples", 0),
                counted.get("tokens", 0),
                self.word,
            ],
        )
        if failed:
            raise_for_all(self._group, error, self.next_name(step))
        if steps != world * step or squares != world * step * step:
            does = f"saves step {step}" if step >= 0 else f"saves nothing after step {-1 - step}"
            raise UsageError(
                f"rank {self._group.rank} {does}, other ranks save other steps (they add up to {steps} over "
                f"{world} ranks). Every rank must save at the same step"
            )
        return _Sums(*sums)

    def _prove(self, name: CheckpointName, collected: _Collected, plan: Plan) -> None:
        """All ranks together, under a new plan; a rank whose own structure is unchanged keeps its report."""
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
            failures = [(rank, kind, "; ".join(errors)) for rank, errors in failed]
            raise explain(failures, name)
        self._proven = {structure: mine}
        self._proven_plan = plan.number
        self._proof = merge(reports, name.step)
        self._doubts += [doubt for report in reports for doubt in report.doubts]
        if self._proof.why_not:
            self._doubts.append(
                f"{name} is saved without a proof that this run could resume from it: {self._proof.why_not}"
            )

    def _has_more(self) -> bool:
        """Whether another proof is due although the structure of what is stored is the same."""
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
            if self.plan is not None:
                shared |= planner.shares_of(self.plan.contested)
            found.digests = _digests(shared)
        return found

    def _schedules_left_out(self) -> list[str]:
        """Untracked schedules, in words; none where the first step has already shown them."""
        tracked = self.tracked
        given = tracked.given()
        if tracked.looked_around or not any(map(has_schedule, given.values())):
            return []
        names = {id(thing): name for name, thing in given.items()}
        return [
            f"a {type(schedule).__name__} of track({names.get(id(schedule.optimizer), '…')}=…) is not tracked"
            ", so a resume would begin it anew: give it to run.track(…) too, or to run.ignore(…) if the "
            "script sets it by itself"
            for schedule in untracked_schedules(given.values(), tracked.ignored, alive(LRScheduler))
        ]

    def _to_blob(self, others: dict[str, Any], own: dict[str, Any]) -> torch.Tensor:
        try:
            here = {"held": self.tracked.held, "laid": self.tracked.laid}
            state = {"format": 1, **here, "tracked": others, "own": own}
            return to_blob(state, self._blob)
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
        self.plan = None  # if this fails on one rank, all of them plan at the next save
        plan = make_plan(
            self._group,
            self._plans,
            collected.planner,
            collected.signature,
            collected.digests,
            self._frames,
            RankFacts(
                lowest=self.tracked.lowest(
                    collected.planner.state_dict if self._group.world_size > 1 else ()
                ),
                idle=frozenset(self.tracked.division.idle),
                coordinates=coordinates(),
                parts=collected.parts,
                nested=any(map(has_form, collected.others.values())),
                absent=bool(self.tracked.absent()),
            ),
            compare=collected.compare,
        )
        tensors = _tensors(collected.planner, plan)
        self.plan = plan
        return tensors


def _tensors(planner: SnapshotPlanner, plan: Plan) -> list[torch.Tensor]:
    """In the plan's order; an error names the entry that it concerns."""
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


# Staging: from live tensors, wherever they are, into a buffer.
#
# Tensors on a device are copied in the way that the policy (policy/upkeep.py) chooses: clone, overlap or
# block. That copy may go on while training does; `Staged` then says when it is complete, and whether it can
# be trusted. Tensors on the host are copied at once.


SLICE = 512 * 1024
"""Bytes fingerprinted and copied at a time, so that the copy finds them in the processor's cache."""
STAGING_THREADS = 8
"""At most this many copy from host memory; a few more would gain no bandwidth."""

is_cpu = operator.attrgetter("is_cpu")


def stage_from_host(
    buffer: Buffer,
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    known: dict[int, str],
    threads: int,
) -> dict[int, str]:
    """Copy the tensors that are on the host into a buffer; returns their fingerprints, from the same pass."""
    all_here: Sequence[int] = range(len(tensors))
    if not all(map(is_cpu, tensors)):
        all_here = [at for at in all_here if tensors[at].is_cpu]
    found, here = _stage_small(buffer, plan, tensors, known, all_here)

    def one(at: int) -> str:
        item = plan.layout.items[at]
        try:
            source = plain(tensors[at]).numpy()
        except FAILURES as error:
            raise about(item.name, error) from error
        check_size(item, source.nbytes)
        target = buffer.bytes[item.raw_offset : item.raw_offset + item.raw_length]
        if at in known:
            target[:] = source
            return known[at]
        hasher = fingerprints.Hasher("x")
        for start in range(0, source.nbytes, SLICE):
            piece = source[start : start + SLICE]
            hasher.update(piece.data)
            target[start : start + SLICE] = piece
        return hasher.done()

    if threads == 1 or len(here) < 2:
        return found | {at: one(at) for at in here}
    with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-stage") as pool:
        return found | dict(zip(here, pool.map(one, here), strict=True))


def _stage_small(
    buffer: Buffer, plan: Plan, tensors: Sequence[torch.Tensor], known: dict[int, str], here: Sequence[int]
) -> tuple[dict[int, str], list[int]]:
    """Copy the small ones, which are not worth a thread; returns their fingerprints, and which are left."""
    base, size = int(buffer.bytes.ctypes.data), buffer.bytes.nbytes
    memories = fingerprints.small_memories([tensors[at] for at in here])
    found: dict[int, str] = {}
    left: list[int] = []
    for at, memory, (offset, wanted) in zip(here, memories, _raw_places(plan, here), strict=True):
        if memory is None:
            left.append(at)
            continue
        length = len(memory)
        if wanted != length or not 0 <= offset <= size - length:
            item = plan.layout.items[at]
            check_size(item, length)
            raise SaveFailedError(f"{item.name} ends beyond the staging buffer, which has {size} bytes")
        found[at] = known.get(at) or fingerprints.of_small(memory)
        ctypes.memmove(base + offset, memory, length)
    return found, left


def _raw_places(plan: Plan, here: Sequence[int]) -> Iterable[tuple[int, int]]:
    places = plan.raw_places
    return places if len(here) == len(places) else [places[at] for at in here]


class Staged:
    """A snapshot on its way into a buffer."""

    def __init__(self, prints: dict[int, str], at: list[int], flight: InFlight | None) -> None:
        self._prints = prints
        self._at = at
        """The positions of the tensors in flight."""
        self._flight = flight

    def done(self) -> bool:
        """Whether the buffer holds all of it. Never blocks."""
        return self._flight is None or self._flight.done()

    def boundary(self) -> None:
        """The next step is about to begin: nothing may change under the copy."""
        if self._flight is not None:
            self._flight.boundary()

    def torn(self) -> str:
        """Why it must not be used; empty if it may be. Final once `done`."""
        return self._flight.torn() if self._flight is not None else ""

    def fingerprints(self) -> list[str]:
        """In the layout's order; only once it is done. Unlike all else here, callable from any thread."""
        found = dict(self._prints)
        if self._flight is not None:
            found.update(zip(self._at, self._flight.fingerprints(), strict=True))
        return [found[at] for at in range(len(found))]

    def release(self) -> None:
        """Let go of the device; waits until it is done."""
        if self._flight is not None:
            self._flight.release()

    @property
    def copy_seconds(self) -> float:
        """How long the copy from a device took; 0 if there was none."""
        return self._flight.copy_seconds() if self._flight is not None else 0.0


class Stager:
    """Stages the snapshots of one rank."""

    def __init__(
        self,
        setting: Setting,
        *,
        timeout: float,
        step_seconds: Callable[[], float | None],
        tell: Callable[[Choice], None],
        devices: DeviceStager | None = None,
    ) -> None:
        self._setting = setting
        self._step_seconds = step_seconds
        self._tell = tell
        self._told: Choice | None = None
        self._devices = devices or DeviceStager(timeout=timeout)
        self._copy_seconds: float | None = None
        self._torn = False

    def prepare(self, devices: set[torch.device]) -> None:
        """Pay at the start what the first snapshot from a device would cost."""
        for device in devices:
            self._devices.prepare(device)

    @uncollected()
    def stage(self, snapshot: Snapshot, buffer: Buffer, tracked: Tracked) -> Staged:
        """Begin to copy a snapshot into a buffer that was prepared for its plan."""
        tensors, items = snapshot.tensors, snapshot.plan.layout.items
        all_here = all(map(is_cpu, tensors))
        elsewhere = [] if all_here else [at for at, tensor in enumerate(tensors) if not tensor.is_cpu]
        flight: InFlight | None = None
        if elsewhere:  # first of all: it is what training may change soonest
            pieces = [TensorPiece(tensors[at], items[at].raw_offset, items[at].raw_length, items[at].name)
                      for at in elsewhere]  # fmt: skip
            owned = Owned(tracked.optimizers())
            way = self._choose(pieces, owned)
            trusted = None if self._torn else owned
            flight = self._devices.begin(pieces, buffer.memory(), way, trusted)
            for note in flight.notes:
                log.warning("holdfast: %s", note)
        threads = min(STAGING_THREADS, torch.get_num_threads())
        prints = stage_from_host(buffer, snapshot.plan, tensors, snapshot.prints, threads)
        return Staged(prints, elsewhere, flight)

    def note(self, staged: Staged) -> None:
        """A snapshot is done: the time it took counts for the next choice."""
        self._copy_seconds = staged.copy_seconds or self._copy_seconds
        if staged.torn():
            self.was_torn()

    def was_torn(self) -> None:
        """A snapshot was changed while being copied: from now on nothing is copied from live tensors."""
        self._torn = True

    def _choose(self, pieces: list[TensorPiece], owned: Owned) -> Way:
        needed: dict[torch.device, int] = {}
        for piece in pieces:
            needed[piece.tensor.device] = needed.get(piece.tensor.device, 0) + piece.nbytes
        memory = {device: self._devices.memory(device) for device in needed}
        tightest = min(needed, key=lambda device: memory[device].free - needed[device])
        choice = choose_snapshot(
            self._setting,
            free_bytes=memory[tightest].free,
            needed_bytes=needed[tightest],
            device_bytes=memory[tightest].total,
            copy_seconds=self._copy_seconds,
            step_seconds=self._step_seconds(),
            has_owned=owned_enough(owned.nbytes(pieces), sum(needed.values())),
            torn_before=self._torn,
        )
        if self._told is None or (choice.way, choice.warning) != (self._told.way, self._told.warning):
            self._told = choice
            self._tell(choice)
        return choice.way
