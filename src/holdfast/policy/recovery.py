"""What to do after an attempt failed: go on in some way, or stop with a documented code.

Guarantee: pure, and it ends. Unless the highest committed step rises, a run is restarted at most
`budgets.most_restarts(launch.max_restarts)` times, however many launches it is given; after that every
decision is a stop. The same failure in the same setting is met at most `budgets.MOST_IDENTICAL` times: then
something is varied that has not been tried against it, or the run stops. What is excluded is never used
again. Every decision says what it rests on. Nobody else decides.

The errors of a script without a Run are the exception: nobody sees its progress, so nobody can say that it
repeats itself. If somebody chose launch.max_restarts, that number applies to these errors in each launch, as
under torchrun, and is their only bound.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec

from holdfast.errors import MEANINGS, ExitCode
from holdfast.policy.budgets import (
    BUDGETS,
    MAX_REQUEUES,
    RERUNS,
    PastAttempt,
    episode,
    highest_step,
    recent,
    restarts_after,
    restarts_left,
)
from holdfast.policy.placement import (
    Cluster,
    Exclusion,
    Fit,
    Tried,
    arrangements,
    devices_of,
    fit,
    layout,
    suffice,
)
from holdfast.policy.results import Findings, Orders
from holdfast.policy.signs import Action, Cause, activity, adapter_to_check, deed, origin, sign_in
from holdfast.policy.verdicts import Question, judge

CAPACITY_WAIT = 600.0
"""Seconds to wait for missing nodes: longer than a node takes to boot, and no longer than it pays to keep the
others idle."""
AT_IMPORT = 120.0
"""Seconds within which a script that got nowhere counts as failed at its start: importing torch on many nodes
from a network file system can take that long."""
CANNOT_PASS = frozenset({"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"})
"""Errors that the next start of the same script would meet again."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """The incident to decide about. What is not known keeps its default, and nothing is decided by it."""

    attempt: PastAttempt
    """The attempt that just failed, with its root cause."""
    max_restarts: int
    restarts_chosen: bool = False
    """Whether somebody set that number, by `--max-restarts` or otherwise; if not, it is the default."""
    facts: list[str] = []
    """What was seen, in words; goes into the decision's evidence as it is."""
    cluster: Cluster | None = None
    lower_rungs: int = 0
    """How many checkpoints below the one it came from a resume may still use."""
    can_requeue: bool = False
    """Whether a scheduler would start the job again."""
    stopping: str = ""
    """The request to stop the run, if one came before the failure, in words; else empty."""
    storage: str = ""
    """Why no attempt can begin, in words: the run's storage cannot be written. Empty if it can."""
    capacity_wait: float = CAPACITY_WAIT
    waited: float = 0.0
    """Seconds spent waiting for capacity since it failed."""
    budget_reset: int = 0
    """Attempts up to this number are forgiven: an operator reset the budget after them."""
    rungs: list[str] = []
    """Checkpoints that a resume may use, newest first."""
    together: list[str] = []
    """What was loaded, and the checkpoints that are suspect if it is: those it was saved from that were not
    proven yet, and all that were saved from any of them."""
    skip_bad_data: bool = False
    nan_policy: str = "warn"
    """What the user wants done about a step that is not finite if nothing but the work is to blame."""
    orders: Orders = Orders()
    """The orders that the failed attempt was given, as far as they are still open."""


class Decision(Findings, frozen=True, kw_only=True):
    """What to do about a failed attempt, what was found out, and the orders for the next attempt."""

    action: Action
    exit_code: int
    """What the launcher ends with; 0 if it goes on."""
    reason: str
    evidence: list[str]
    restarts_left: int
    """After this decision."""
    rotate_by: int = 0
    """The shift of the next attempt's devices, counted from the plain order: see `placement.arrange`."""
    nodes: list[str] = msgspec.field(default_factory=list)
    """The nodes that take part in the next attempt, in the plain order; empty where not known here."""
    spares: list[str] = msgspec.field(default_factory=list)
    """Which of them were waiting until now."""
    exclude: list[Exclusion] = msgspec.field(default_factory=list)
    """What is kept out from now on, in addition to what already is."""
    readmit: list[str] = msgspec.field(default_factory=list)
    """Nodes that were kept out for a fault that turned out not to be theirs."""
    grounds: list[str] = msgspec.field(default_factory=list)
    """What the findings rest on: the part of the evidence about a rejected step, checkpoints and data."""
    wait_seconds: float = 0.0


INCURABLE = frozenset(
    {
        ExitCode.VALIDATION_FAILED,
        ExitCode.NO_VALID_RUNG,
        ExitCode.LEASE_LOST,
        ExitCode.RUN_IS_LIVE,
        ExitCode.CONTROL_UNUSABLE,
        ExitCode.STATE_MISFIT,
    }
)
"""Codes by which a worker says that the same start would end the same way. 2 is not one of them: scripts use
it for reasons of their own."""

INSTEAD = "with working storage the decision would have been: "
"""How the piece of evidence begins that says what was given up for want of storage."""

_DIFFERS = "the others run the same lines, so what differs is that node, or what that rank does"
_FROM_OUTSIDE = frozenset({Cause.PREEMPTION, Cause.INFRASTRUCTURE})
"""Causes that may be absent in another place or at another time."""


def recover(history: Sequence[PastAttempt], situation: Situation) -> Decision:
    """Decide about one failed attempt. `history`: the attempts before it, in any order."""
    return _Case(history, situation).decide()


class _Case:
    """One incident. Each rule decides or passes (None); the first that decides counts."""

    def __init__(self, history: Sequence[PastAttempt], situation: Situation) -> None:
        self._now = situation
        self._failed = failed = situation.attempt
        self._cause = Cause(failed.cause) if failed.cause in set(Cause) else Cause.UNKNOWN
        past = sorted((one for one in history if one.number < failed.number), key=lambda one: one.number)
        self._all = [*past, failed]
        self._forgiven = situation.budget_reset
        self._left = restarts_left(self._all, situation.max_restarts, self._forgiven)
        here = [attempt for attempt in self._all if attempt.launch == self._failed.launch]
        self._left_here = restarts_left(here, situation.max_restarts, self._forgiven)
        """Restarts left in this launch, as torchrun would count them."""
        self._episode = episode(self._all, self._forgiven)
        self._tried = Tried(self._episode, failed)
        self._cluster = cluster = situation.cluster or Cluster()
        self._wanted = failed.node_count or len(failed.nodes) or len(cluster.nodes)
        self._fit = Fit(nodes=[]) if situation.cluster is None else fit(cluster, self._wanted)
        self._evidence = [*situation.facts, f"cause: {failed.cause}", _progress(past, failed)]
        check = adapter_to_check([failed.message], failed.culprit_node)
        if check and not any(one.startswith(check) for one in situation.facts):
            self._evidence.insert(len(situation.facts), check)
        if alone := self._on_one_rank_only():
            self._evidence.insert(len(situation.facts), f"it failed on {alone}: {_DIFFERS}")

    def decide(self) -> Decision:
        rules = (
            self._asked_to_stop,
            self._incurable,
            self._storage_failed,
            self._failed_at_import,
            self._judged,
            self._rejected_too_often,
            self._same_error,
            self._budget_spent,
            self._too_few_nodes,
            self._exclude,
            self._change_of_nodes,
            self._repeat_first,
            self._rotate,
            self._lower_rung,
            self._repeat_last,
        )
        decision = next((found for rule in rules if (found := rule()) is not None), None)
        if decision is None:
            decision = self._give_up()
        if decision.action is Action.STOP and self._counts_only(decision.exit_code):
            why = (
                "as often as launch.max_restarts says, because the script has no Run that shows its progress"
            )
            self._evidence.append(f"not decisive without a Run: {decision.reason}")
            self._left = self._left_here
            decision = self._too_few_nodes() or self._go(Action.RESTART, why, self._fit)
        if self._now.storage and decision.action not in (Action.STOP, Action.REQUEUE):
            decision = self._without_storage(decision)
        if self._failed.rejection is None and decision.action is not Action.STOP:
            orders = self._now.orders  # another failure has interrupted them
            decision = msgspec.structs.replace(decision, rerun=orders.rerun, trial=orders.trial)
        return decision

    def _asked_to_stop(self) -> Decision | None:
        """Whatever failed by then, the run was meant to end: whoever wants it back starts it again."""
        if not self._now.stopping:
            return None
        return self._stop(
            ExitCode.STOPPED_UNSAVED,
            f"it failed while it was being stopped, before it could save ({self._now.stopping})",
        )

    def _counts_only(self, code: int) -> bool:
        """Whether the run may stop with this code only once the restarts that somebody chose are used up."""
        own = self._cause in (Cause.JOB, Cause.UNKNOWN)  # a bare exit code may be either
        if not self._now.restarts_chosen or self._left_here == 0 or not own:
            return False
        if any(attempt.began for attempt in self._all) or highest_step(self._all) > 0:
            return False
        failed = self._failed
        hopeless = self._at_import() if failed.message else failed.exit_code == ExitCode.USAGE
        if failed.exit_code in INCURABLE or (failed.alike and hopeless):
            return False
        return code in (ExitCode.FAILED, ExitCode.BUDGET_SPENT, ExitCode.NOTHING_LEFT)

    def _at_import(self) -> bool:
        return self._failed.message.partition(":")[0].rpartition(".")[2] in CANNOT_PASS

    def _on_one_rank_only(self) -> str:
        """Where an error occurred that all ranks would share if it were the script's; empty for any other."""
        failed = self._failed
        if failed.alike or not self._at_import() or failed.root_rank is None:
            return ""
        if failed.same_ranks != 1 or failed.world_size < 2:
            return ""
        return f"rank {failed.root_rank}{f' on {failed.culprit_node}' if failed.culprit_node else ''} only"

    # -- what a restart would not cure ----------------------------------------------------------------------

    def _incurable(self) -> Decision | None:
        if self._failed.exit_code not in INCURABLE:
            return None
        code = ExitCode(self._failed.exit_code)
        meaning = MEANINGS[code][0].rstrip(".")
        return self._stop(code, f"a restart cannot cure this: {meaning[0].lower()}{meaning[1:]}")

    def _storage_failed(self) -> Decision | None:
        """Nothing is wrong with the run, its nodes' work or its checkpoints: another time or place may do."""
        if self._failed.exit_code != ExitCode.STORAGE_FAILED or self._fit.missing:
            return None
        code = ExitCode.STORAGE_FAILED
        why = "the run's storage could not be written"
        if self._may_requeue():
            wanted = self._requeue(f"{why}: the job comes back when it is queued again")
            return msgspec.structs.replace(wanted, exit_code=int(code))
        spent = self._budget_spent()
        if spent is not None:
            return self._stop(code, f"{why}, and {spent.reason}")
        if not self._may_repeat():
            return self._stop(code, f"{why} in {1 + self._tried.repeats} attempts without progress")
        return self._go(Action.RESTART, f"{why}, and may be usable again", self._fit)

    def _without_storage(self, wanted: Decision) -> Decision:
        """No attempt could begin. What was going to be varied is kept: the next launch begins with it."""
        action = Action.REQUEUE if self._may_requeue() else Action.STOP
        return msgspec.structs.replace(
            wanted,
            action=action,
            exit_code=int(ExitCode.STORAGE_FAILED),
            reason=self._now.storage,
            evidence=[
                *self._evidence,
                f"{INSTEAD}{deed(wanted.action)}, {wanted.reason}",
            ],
            restarts_left=self._left,
            wait_seconds=0.0,
        )

    def _failed_at_import(self) -> Decision | None:
        failed = self._failed
        # An unknown error, in the same words on all ranks before their first step, is the script's.
        own = self._cause is Cause.JOB or (
            self._cause is Cause.UNKNOWN and bool(failed.message) and sign_in(failed.message) is None
        )
        if failed.began or not failed.alike or not own:
            return None
        if failed.seconds > AT_IMPORT or highest_step(self._all) > 0:
            return None
        who = "on all ranks alike and "
        if failed.world_size == 1:
            who = ""  # a single rank has none to be like
        elif 0 < failed.same_ranks < failed.world_size:
            who = f"on {failed.same_ranks} of {failed.world_size} ranks alike and "
        return self._stop(
            ExitCode.FAILED,
            f"the script failed after {failed.seconds:.0f} s, {who}before its first step: "
            "a restart would end the same way",
        )

    def _judged(self) -> Decision | None:
        """The verdict on a rejected result, and what follows from it as far as the budgets allow."""
        failed, now = self._failed, self._now
        if failed.rejection is None or failed.exit_code != ExitCode.RERUN_WANTED:
            return None
        question = Question(
            failed=failed,
            rejection=failed.rejection,
            before=self._all[:-1],
            episode=self._episode,
            forgiven=self._forgiven,
            cluster=self._cluster,
            found=self._fit,
            wanted=self._wanted,
            rungs=now.rungs,
            together=now.together,
            avoid=self._tried.avoid,
            trial=now.orders.trial,
            may_skip=now.skip_bad_data,
            nan_policy=now.nan_policy,
        )
        found = judge(question)
        self._evidence += found.evidence
        more = msgspec.structs.asdict(found.findings)
        del more["avoid"]  # it is added to what is avoided already
        more |= {"readmit": found.readmit, "grounds": found.evidence}
        if found.action is Action.STOP:
            return self._end(Action.STOP, ExitCode.VALIDATION_FAILED, found.reason, **more)
        spent = self._budget_spent()
        if spent is not None:
            # What was found out is kept, and so is what was going to be done: the next launch begins with it.
            more |= {"exclude": found.exclude, "avoid": sorted({*self._tried.avoid, *found.findings.avoid})}
            more["rotate_by"] = self._failed.rotation if found.rotate_by is None else found.rotate_by
            times = sum(one.rejection is not None for one in self._episode)
            if not found.findings.verdict and times < 2:
                return msgspec.structs.replace(spent, **more)
            why = f"{found.reason}; but {spent.reason}"
            return self._end(Action.STOP, ExitCode.VALIDATION_FAILED, why, **more)
        chosen = found.found or self._fit
        shift, keep, avoid = found.rotate_by, found.exclude, found.findings.avoid
        decision = self._go(found.action, found.reason, chosen, rotate_by=shift, exclude=keep, avoid=avoid)
        decision = msgspec.structs.replace(decision, **more)
        short = self._too_few_nodes() if chosen.missing else None
        if short is None or short.action is not Action.WAIT:
            return short or decision
        return msgspec.structs.replace(decision, action=Action.WAIT, wait_seconds=short.wait_seconds)

    def _rejected_too_often(self) -> Decision | None:
        if self._failed.exit_code != ExitCode.RERUN_WANTED:
            return None
        times = sum(attempt.exit_code == ExitCode.RERUN_WANTED for attempt in self._episode)
        if times <= RERUNS and (self._left > 0 or times < 2):
            return None
        return self._stop(
            ExitCode.VALIDATION_FAILED,
            f"a step was rejected in {times} attempts without progress, and re-running it did not help",
        )

    def _same_error(self) -> Decision | None:
        earlier = self._tried.same_error
        if earlier is None:
            return None
        self._evidence.append(f"attempt {earlier.number} ended with the same error at the same step")
        if self._may_lower():
            return None
        return self._stop(ExitCode.FAILED, "the same error repeated without progress")

    def _budget_spent(self) -> Decision | None:
        cause, budget = self._cause, BUDGETS[self._cause]
        if self._now.max_restarts == 0 or (self._left == 0 and cause is not Cause.PREEMPTION):
            return self._stop(
                ExitCode.BUDGET_SPENT,
                f"no restart is left: launch.max_restarts allows {self._now.max_restarts} without progress",
            )
        used = restarts_after(cause, self._all, self._forgiven)
        if used >= budget.restarts:
            why = f"{used} restarts after {origin(cause)} led to nothing new, and no more are given for it"
            if cause in _FROM_OUTSIDE:
                return self._requeue_or_stop(ExitCode.BUDGET_SPENT, why)
            return self._stop(ExitCode.BUDGET_SPENT, why)
        times = recent(cause, self._episode, self._failed.at)
        if budget.per_window and times > budget.per_window:
            return self._requeue_or_stop(
                ExitCode.BUDGET_SPENT,
                f"{times} attempts within {budget.window:g} s ended by {origin(cause)}, without progress",
            )
        return None

    # -- what there is to run on ----------------------------------------------------------------------------

    def _too_few_nodes(self) -> Decision | None:
        missing = self._fit.missing
        if not missing:
            return None
        shortage = f"{len(self._fit.nodes)} usable nodes are available, {missing} more are needed"
        if self._cluster.may_shrink and self._cluster.tied:
            shortage += f"; fewer cannot go on from what is saved: {self._cluster.tied}"
        self._evidence.append(shortage)
        rest = self._now.capacity_wait - self._now.waited
        if rest > 0:
            return self._wait(rest, f"{shortage}: wait for them")
        return self._requeue_or_stop(
            ExitCode.NO_CAPACITY, f"{shortage}, and none came within {self._now.waited:.0f} s"
        )

    def _exclude(self) -> Decision | None:
        """Keep out what is at fault, if what remains suffices."""
        failed, cluster = self._failed, self._cluster
        if failed.culprit_node not in self._fit.nodes or not self._guilty():
            return None
        node, device = failed.culprit_node, failed.culprit_device
        if any((out.node, out.device) == (node, device) for out in cluster.excluded):
            return None  # it is kept out already, so its node is not to blame for it
        reason = self._accusation()
        if device and device in devices_of(cluster, node):
            left = devices_of(cluster, node, without=device)
            if suffice(cluster, node, left):
                what = f"device {device} of {node} is excluded: {reason}"
                return self._go(Action.EXCLUDE, what, self._fit, exclude=[Exclusion(node, device, reason)])
        found = fit(cluster, self._wanted, without={node})
        if found.missing or (found.shrinks and not failed.named and self._may_repeat()):
            return None
        exclude = [Exclusion(node, None, reason)]
        if found.shrinks:
            what = f"{node} is excluded and {len(found.nodes)} nodes go on: {reason}"
            return self._go(Action.SHRINK, what, found, exclude=exclude)
        return self._go(Action.EXCLUDE, f"{node} is excluded: {reason}", found, exclude=exclude)

    def _guilty(self) -> bool:
        return self._failed.named or self._tried.accused >= 2

    def _accusation(self) -> str:
        failed = self._failed
        what = f"attempt {failed.number}: {failed.message or self._end_in_words()} ({self._cause})"
        return what if failed.named else f"{what}; at fault {self._tried.accused} times without progress"

    def _change_of_nodes(self) -> Decision | None:
        """Nodes are gone. Others in their place, or fewer nodes, are change enough, unless this failure was
        already seen on exactly those."""
        found = self._fit
        if not (found.spares or found.shrinks) or self._tried.met_on(found.nodes):
            return None
        if self._tried.same_error is not None:
            return None  # it does not come from the nodes
        if found.shrinks:
            return self._go(Action.SHRINK, f"{len(found.nodes)} of {self._wanted} nodes go on", found)
        return self._go(Action.RESTART, f"the spare {', '.join(found.spares)} takes part", found)

    # -- repeat, or vary ------------------------------------------------------------------------------------

    def _may_repeat(self) -> bool:
        if self._tried.same_error is not None:
            return False
        rerun = self._failed.exit_code == ExitCode.RERUN_WANTED
        return self._tried.repeats < (RERUNS if rerun else BUDGETS[self._cause].repeats)

    def _repeat_first(self) -> Decision | None:
        return None if BUDGETS[self._cause].vary_first else self._repeat_last()

    def _repeat_last(self) -> Decision | None:
        if not self._may_repeat():
            return None
        what = f"{self._end_in_words()} ({self._cause})"
        what += f" on {alone}" if (alone := self._on_one_rank_only()) else ""
        before = self._tried.repeats
        if before == 0:
            return self._go(Action.RESTART, f"{what} may not happen again", self._fit)
        times = "once" if before == 1 else f"{before} times"
        why = f"{what}: the same failure came back {times}, and may still pass"
        return self._go(Action.RESTART, why, self._fit)

    def _end_in_words(self) -> str:
        failed = self._failed
        if failed.exit_code in set(ExitCode) - {ExitCode.OK, ExitCode.FAILED, ExitCode.USAGE}:
            return f'"{MEANINGS[ExitCode(failed.exit_code)][0].rstrip(".")}"'
        if failed.exit_code:
            return describe_end(failed.exit_code)
        if failed.section:
            return f"no sign of life {activity(failed.section)}"
        return failed.message or "what ended it"

    def _rotate(self) -> Decision | None:
        places = layout(self._cluster, self._fit.nodes)
        shift = self._tried.next_shift(arrangements(places))
        if shift is None:
            return None
        return self._go(
            Action.ROTATE,
            f"every rank runs on another device, after {origin(self._cause)} on the present ones",
            self._fit,
            rotate_by=shift,
        )

    def _may_lower(self) -> bool:
        return self._now.lower_rungs > 0 and self._tried.may_lower()

    def _lower_rung(self) -> Decision | None:
        if not self._may_lower():
            return None
        rung = self._failed.rung
        return self._go(
            Action.LOWER_RUNG,
            f"{rung} may be the cause: resume from an older checkpoint",
            self._fit,
            avoid=[rung],
        )

    def _give_up(self) -> Decision:
        times = 1 + self._tried.repeats
        if self._tried.told:
            self._evidence.append(f"tried since the last progress: {self._tried.told}")
        alone = self._on_one_rank_only()
        where = f" on {alone}" if alone else ""
        why = f"the same failure came back {times} times{where}, and nothing is left to vary against it"
        if self._guilty() and self._failed.culprit_node and self._may_requeue():
            node, reason = self._failed.culprit_node, self._accusation()
            return self._requeue(f"{why} on these nodes", [Exclusion(node, None, reason)])
        return self._stop(ExitCode.NOTHING_LEFT, why)

    # -- the decisions --------------------------------------------------------------------------------------

    def _go(
        self,
        action: Action,
        reason: str,
        found: Fit,
        *,
        rotate_by: int | None = None,
        exclude: Sequence[Exclusion] = (),
        avoid: Sequence[str] = (),
    ) -> Decision:
        evidence = list(self._evidence)
        if self._cause is Cause.PREEMPTION:
            left = self._left
            evidence.append("preemption does not use up a restart")
        else:
            left = self._left - 1
            most = self._now.max_restarts
            evidence.append(f"{self._left} of {most} restarts without progress were left")
        return Decision(
            action=action,
            exit_code=0,
            reason=reason,
            evidence=evidence,
            restarts_left=left,
            rotate_by=self._failed.rotation if rotate_by is None else rotate_by,
            nodes=found.nodes,
            spares=found.spares,
            exclude=list(exclude),
            avoid=sorted({*self._tried.avoid, *avoid}),
        )

    def _end(self, action: Action, code: int, reason: str, **more: object) -> Decision:
        found = Decision(
            action=action, exit_code=code, reason=reason, evidence=self._evidence, restarts_left=self._left
        )
        return msgspec.structs.replace(found, **more)

    def _stop(self, code: ExitCode, reason: str) -> Decision:
        return self._end(Action.STOP, code, reason)

    def _wait(self, seconds: float, reason: str) -> Decision:
        turn, avoid = self._failed.rotation, self._tried.avoid
        return self._end(Action.WAIT, 0, reason, wait_seconds=seconds, rotate_by=turn, avoid=avoid)

    def _may_requeue(self) -> bool:
        return self._now.can_requeue and self._tried.requeues < MAX_REQUEUES

    def _requeue(self, reason: str, exclude: Sequence[Exclusion] = ()) -> Decision:
        return self._end(
            Action.REQUEUE,
            ExitCode.REQUEUE_WANTED,
            reason,
            exclude=list(exclude),
            rotate_by=self._failed.rotation,
            avoid=self._tried.avoid,
        )

    def _requeue_or_stop(self, code: ExitCode, reason: str) -> Decision:
        return self._requeue(reason) if self._may_requeue() else self._stop(code, reason)


def _progress(past: Sequence[PastAttempt], failed: PastAttempt) -> str:
    before = highest_step(past)
    if failed.highest_step > before:
        return f"the run had made progress before that: step {failed.highest_step} is saved"
    saved = max(before, failed.highest_step)
    return (
        f"nothing new was saved since the last failure: still step {saved}"
        if saved
        else "nothing was saved yet"
    )


def describe_end(exit_code: int) -> str:
    """An exit code as from waitpid, in words."""
    if exit_code < 0:
        try:
            return f"death by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"death by signal {-exit_code}"
    return f"exit code {exit_code}"
