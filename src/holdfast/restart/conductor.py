"""The conductor: says who takes part in each iteration, and when there is no further one.

Guarantees: only one conductor makes plans, each plan is made once, and none before every member is at the
barrier or known to be gone. Each of its waits is bounded: a member that is not at the barrier after
barrier_timeout (at the first one, after the launcher's initial limit if that is longer), or whose node's
keeper is silent for heartbeat_timeout, is gone for good. If too few are left, or `authorise` does not grant
another iteration, everything is over, and that is said too. Only time in which this process was awake counts.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import msgspec

from holdfast.config import InProcessSettings
from holdfast.errors import ConfigError, ExitCode
from holdfast.policy import (
    Assignment,
    Decision,
    Fault,
    FaultKind,
    Shortage,
    count,
    limits_of,
    over_the_limit,
    reassign,
)
from holdfast.process import Waking
from holdfast.restart.messages import (
    LOST,
    UNREADABLE,
    End,
    EndKind,
    IterationPlan,
    Next,
    Over,
    OverKind,
    Ready,
    arrived_key,
    beat_key,
    done_key,
    end_key,
    fault_key,
    gone_key,
    lost_store,
    plan_key,
    ready_key,
    text,
)

if TYPE_CHECKING:
    from torch.distributed import Store


# The stage that says who is who: `policy.reassignment.reassign`, or a function that the settings name.
#
# Guarantee: whatever that function does, no plan names a member twice, names one that is not there, or has no
# members at all: an answer that would lead to such a plan is an error with its reason, and the job is handed
# over.


Assign = Callable[..., Assignment | Shortage]


def assigner(name: str) -> Assign:
    """The function that `inprocess.assign` names, as package.module:function; our own if it names none."""
    if not name:
        return reassign
    module, _, function = name.partition(":")
    try:
        assign = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"inprocess.assign = {name!r} cannot be found: {error}. Name a function that can be imported "
            "where the launcher runs, as package.module:function"
        ) from error
    if not callable(assign):
        raise ConfigError(f"inprocess.assign = {name!r} is a {type(assign).__name__}, not a function")
    stage: Assign = assign
    return stage


def sound(found: Assignment | Shortage, present: AbstractSet[int]) -> Assignment | Shortage:
    """The answer, if a plan can be made of it; otherwise ValueError says what is wrong with it."""
    if isinstance(found, Shortage):
        return found
    if not isinstance(found, Assignment):
        raise ValueError(f"inprocess.assign answered {found!r:.100}, not an Assignment or a Shortage")
    named = [*found.order, *found.reserves]
    if not found.order or len(set(named)) < len(named) or not set(named) <= present:
        raise ValueError(
            f"inprocess.assign answered {found.order} with reserves {found.reserves}; present are "
            f"{sorted(present)}, each may be named once, and somebody has to train"
        )
    return found


QUICK, CALM = 0.005, 0.05
"""Seconds between two looks at the counters: while something is being agreed, and while the function runs."""
BLIND = 5.0
"""If more seconds than this pass between two looks, this process counts as having been stopped itself."""
JOIN = 5.0


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """The question whether there may be another iteration."""

    iteration: int
    """The iteration that ended with a fault."""
    faults: list[Fault]
    order: list[int]
    """Its members by rank."""
    ready: list[Ready]
    """The members that are at the barrier."""
    committed: int
    """The highest step that any of them knows to be committed."""
    following: list[int]
    """The members, by rank, that the next iteration would have."""
    nodes: dict[int, str] = {}
    """Each member's node, as far as it is known."""


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    launch: dict[str, object] = {}
    """The fields of `LaunchInfo` that have changed."""
    reason: str = ""
    decision: Decision | None = None
    """The decision behind it, if the members are to report it themselves."""


class Denied(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    exit_code: int = int(ExitCode.HANDED_OVER)
    decision: Decision | None = None


Authorise = Callable[[Restart], Granted | Denied]


class Conductor:
    """One for each job. `nodes`: member → node as far as it is known beforehand; the rest is learned."""

    def __init__(
        self,
        store: Store,
        nodes: Mapping[int, str],
        members: int,
        chosen: InProcessSettings,
        authorise: Authorise,
        tell: Callable[[str], None],
        *,
        first_barrier: float = 0.0,
    ) -> None:
        """`first_barrier`: seconds that members may take to the first barrier, if more than to the others."""
        self.plan: IterationPlan | None = None
        self.over: Over | None = None
        """The newest plan, and the end once it was announced; may be read from any thread."""
        self.completed = False
        self._store = store
        self._nodes = dict(nodes)
        self._limits = limits_of(chosen, members)
        self._assign = assigner(chosen.assign)
        self._chosen = chosen
        self._first_barrier = max(first_barrier, chosen.barrier_timeout)
        self._authorise = authorise
        self._tell = tell
        self._awaited = set(range(members))
        """Members that may still come to a barrier."""
        self._lost = 0
        self._found: dict[int, Fault] = {}
        """What befell the members that have gone since the last plan."""
        self._faulted: Counter[int] = Counter()
        self._beats: dict[str, tuple[int, float]] = {}
        """Each keeper's last sign of life, and when it was noticed."""
        self._listened = 0.0
        self._reported: dict[str, str] = {}
        self._waking = Waking()
        self._fresh = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-conductor", daemon=True)
        self._thread.start()

    def lose(self, node: str, why: str) -> None:
        """This node is lost, as somebody else has found out. May be called from any thread."""
        self._reported[node] = why

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to conduct."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Make no more plans."""
        self._closing.set()
        self._thread.join(JOIN)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._conduct()
        except (RuntimeError, *UNREADABLE) as error:  # torch's DistNetworkError, DistStoreError, …
            self.over = _handed_over(lost_store(error), [])  # the members cannot be told
            self._tell(self.over.reason)

    def _conduct(self) -> None:
        iteration = 0
        while (ready := self._gather(iteration)) is not None:
            following = self._choose(iteration, ready)
            self._store.compare_set(plan_key(iteration), "", text(following))
            if isinstance(following, Over):
                self.over = following
                self._tell(f"no further iteration: {following.reason}")
                return
            self.plan = following
            self._awaited &= {*following.order, *following.reserves}
            self._tell(f"iteration {iteration}: {len(following.order)} ranks. {following.reason}".strip())
            self._clear(iteration - 1)
            end = self._attend(following)
            if end is None or end.kind is EndKind.COMPLETED:
                self.completed = end is not None
                return
            iteration += 1

    # --- before an iteration --------------------------------------------------------------------------------

    def _gather(self, iteration: int) -> dict[int, Ready] | None:
        """Who is at the barrier, once all are there or known to be gone; None if this conductor closes."""
        limit = self._chosen.barrier_timeout if iteration else self._first_barrier
        began = time.monotonic()
        seen = (-1, -1)
        for now in self._looks(QUICK):
            counters = (self._store.add(arrived_key(iteration), 0), self._lost)
            if iteration == 0 and counters[0] == 0:
                began = now  # what a script does before it calls the function takes as long as it takes
            if counters != seen:
                seen = counters
                if not self._missing(iteration):
                    return self._ready(iteration)
            if now - max(began, self._fresh) > limit:
                for member in self._missing(iteration):
                    detail = f"it was not at the barrier of iteration {iteration} within {limit:g} s"
                    self._give_up(member, FaultKind.LATE, detail)
                return self._ready(iteration)
        return None

    def _missing(self, iteration: int) -> list[int]:
        awaited = sorted(self._awaited)
        if not awaited or self._store.check([ready_key(iteration, member) for member in awaited]):
            return []
        return [member for member in awaited if not self._store.check([ready_key(iteration, member)])]

    def _ready(self, iteration: int) -> dict[int, Ready]:
        awaited = sorted(self._awaited)
        raw = self._store.multi_get([ready_key(iteration, member) for member in awaited]) if awaited else []
        found = {ready.member: ready for ready in (msgspec.json.decode(one, type=Ready) for one in raw)}
        self._nodes.update({member: ready.node for member, ready in found.items()})
        return found

    def _choose(self, iteration: int, ready: Mapping[int, Ready]) -> Next:
        """What this iteration is to be, with what is known of the one before."""
        return msgspec.structs.replace(
            self._next(iteration, ready),
            ended=max((one.attempt for one in ready.values()), default=0),
            committed=max((one.committed for one in ready.values()), default=0),
        )

    def _next(self, iteration: int, ready: Mapping[int, Ready]) -> Next:
        stop = next((one.stop for one in ready.values() if one.stop), "")
        if stop:
            return Over(kind=OverKind.STOPPED, reason=f"{stop} came", exit_code=int(ExitCode.STOPPED))
        for member, one in ready.items():
            if one.unfit:
                self._give_up(member, FaultKind.UNFIT, one.unfit)
        before = self.plan.order if self.plan is not None else []
        faults = self._faults(before, iteration - 1)
        self._faulted = count(self._faulted, faults)
        present = (set(ready) & self._awaited) - set(over_the_limit(self._faulted, self._limits))
        try:
            found = self._assigned(present, before)
        except Exception as error:  # noqa: BLE001 - a user's function; members must not wait for a plan in vain
            return _handed_over(f"who is to train could not be decided: {error!r}", faults)
        if isinstance(found, Shortage):
            return _handed_over(found.reason, faults)
        if self.plan is None:
            return IterationPlan(iteration=0, order=found.order, reserves=found.reserves, faults=faults)
        return self._go_on(iteration, ready, before, found, faults)

    def _assigned(self, present: AbstractSet[int], before: Sequence[int]) -> Assignment | Shortage:
        limits = self._limits
        found = self._assign(
            self._nodes,
            present,
            before,
            wanted=limits.wanted,
            least=limits.least,
            whole_nodes=limits.whole_nodes,
        )
        return sound(found, present)

    def _go_on(
        self,
        iteration: int,
        ready: Mapping[int, Ready],
        before: Sequence[int],
        found: Assignment,
        faults: list[Fault],
    ) -> Next:
        most = self._limits.max_iterations
        if most is not None and iteration >= most:
            return _handed_over(
                f"the function was called {most} times, as often as max_iterations allows", faults
            )
        question = Restart(
            iteration=iteration - 1,
            faults=faults,
            order=list(before),
            ready=list(ready.values()),
            committed=max((one.committed for one in ready.values()), default=0),
            following=found.order,
            nodes=dict(self._nodes),
        )
        try:
            answer = self._authorise(question)
        except Exception as error:  # noqa: BLE001 - whatever it is, members must not wait for a plan in vain
            self._tell(f"whether to go on could not be decided: {error!r}")
            return _handed_over(f"whether to go on could not be decided: {error!r}", faults)
        if isinstance(answer, Denied):
            return _handed_over(answer.reason, faults, answer.exit_code, answer.decision)
        return IterationPlan(
            iteration=iteration,
            order=found.order,
            reserves=found.reserves,
            reason=answer.reason or "; ".join(fault.describe() for fault in faults),
            faults=faults,
            decision=answer.decision,
            launch=answer.launch,
        )

    def _faults(self, order: Sequence[int], iteration: int) -> list[Fault]:
        """What befell the members since the last plan, the first one first; each member once."""
        found, self._found = self._found, {}
        for member in order:
            key = fault_key(iteration, member)
            if self._store.check([key]):
                found[member] = msgspec.json.decode(self._store.get(key), type=Fault)
        ended = end_key(iteration)
        if order and self._store.check([ended]):
            first = msgspec.json.decode(self._store.get(ended), type=End).fault
            if first is not None:
                found.setdefault(first.member, first)
        return sorted(found.values(), key=lambda fault: (fault.at, fault.member))

    def _clear(self, iteration: int) -> None:
        """Remove from the store what nobody reads any more: a job may have many iterations."""
        for member in self._nodes if iteration >= 0 else ():
            self._store.delete_key(ready_key(iteration, member))
            self._store.delete_key(fault_key(iteration, member))

    # --- during an iteration --------------------------------------------------------------------------------

    def _attend(self, plan: IterationPlan) -> End | None:
        """How the iteration ended; None if this conductor closes, or everybody has left."""
        limit, key = self._chosen.completion_timeout, end_key(plan.iteration)
        returned = 0.0
        for now in self._looks(CALM):
            if self._store.check([key]):
                return msgspec.json.decode(self._store.get(key), type=End)
            if not self._awaited and not self._found:
                return None
            lost = next((self._found[member] for member in plan.order if member in self._found), None)
            if lost is not None:
                self._end(plan, lost)
                continue
            done = self._store.add(done_key(plan.iteration), 0)
            if done >= len(plan.order):
                self._store.compare_set(key, "", text(End(kind=EndKind.COMPLETED)))
            elif done:
                returned = returned or now
                if limit and now - max(returned, self._fresh) > limit:
                    detail = f"{done} of {len(plan.order)} ranks had returned {limit:g} s after the first"
                    fault = Fault(member=-1, kind=FaultKind.LATE, detail=detail, at=time.time())
                    self._end(plan, fault)
        return None

    def _end(self, plan: IterationPlan, fault: Fault) -> None:
        if fault.member >= 0:
            fault = msgspec.structs.replace(fault, rank=plan.order.index(fault.member))
            self._store.compare_set(fault_key(plan.iteration, fault.member), "", text(fault))
        self._store.compare_set(end_key(plan.iteration), "", text(End(kind=EndKind.FAULT, fault=fault)))

    # --- who is still there ---------------------------------------------------------------------------------

    def _looks(self, pause: float) -> Iterator[float]:
        """The time, again and again until this conductor closes, each time after a look at who is gone."""
        while True:
            now = time.monotonic()
            if self._waking.missed() > BLIND:
                self._fresh = now
            self._learn_gone()
            self._listen(now)
            yield now
            if self._closing.wait(pause):
                return

    def _learn_gone(self) -> None:
        lost = self._store.add(LOST, 0)
        if lost == self._lost:
            return
        self._lost = lost
        for member in sorted(self._awaited):
            if self._store.check([gone_key(member)]):
                self._strike(
                    member, msgspec.json.decode(self._store.get(gone_key(member)), type=Fault | None)
                )

    def _strike(self, member: int, fault: Fault | None) -> None:
        self._awaited.discard(member)
        if fault is not None:
            self._found[member] = fault
            self._nodes.setdefault(member, fault.node)

    def _give_up(self, member: int, kind: FaultKind, detail: str) -> None:
        order = self.plan.order if self.plan is not None else []
        fault = Fault(
            member=member,
            rank=order.index(member) if member in order else -1,
            node=self._nodes.get(member, ""),
            kind=kind,
            detail=detail,
            at=time.time(),
        )
        raw = self._store.compare_set(gone_key(member), "", text(fault))
        self._strike(member, msgspec.json.decode(raw, type=Fault | None))
        self._store.add(LOST, 1)

    def _listen(self, now: float) -> None:
        """Give up the members of nodes that are lost, or whose keepers are silent."""
        for node in list(self._reported):
            self._give_up_node(node, self._reported.pop(node))
        if now - self._listened < self._chosen.heartbeat_interval / 4:
            return
        self._listened = now
        limit = self._chosen.heartbeat_timeout
        for node in sorted({self._nodes[member] for member in self._awaited if member in self._nodes}):
            beats = self._store.add(beat_key(node), 0)
            before, at = self._beats.get(node, (-1, now))
            self._beats[node] = (beats, at if beats == before else now)
            if now - max(self._beats[node][1], self._fresh) > limit:
                self._give_up_node(node, f"the keeper of {node} gave no sign of life for {limit:g} s")

    def _give_up_node(self, node: str, why: str) -> None:
        for member in sorted(one for one in self._awaited if self._nodes.get(one) == node):
            self._give_up(member, FaultKind.SILENT, why)


def _handed_over(
    reason: str,
    faults: list[Fault],
    exit_code: int = int(ExitCode.HANDED_OVER),
    decision: Decision | None = None,
) -> Over:
    kind = OverKind.STOPPED if exit_code == ExitCode.STOPPED else OverKind.HANDED_OVER
    return Over(kind=kind, reason=reason, exit_code=exit_code, faults=faults, decision=decision)
