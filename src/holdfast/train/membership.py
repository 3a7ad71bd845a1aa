"""Which attempt this process belongs to, and its right to act.

Under `holdfast run` the agent has claimed the lease and numbered the attempt; a worker only takes both over.
Under plain `python` or torchrun there is no such agent: rank 0 claims the lease, settles what was left open,
numbers the attempt, renews the lease from a thread, and tells the others through the store.
torchrun's restarts are attempts of one launch; each start of plain python is a launch of its own.

Without the launcher, rank 0 decides in its place, from the run's records. Guarantee: what to do about a
result that the ranks rejected is decided once, by the rules of `holdfast run` (`policy.recovery`), durably
and under the fence: by rank 0 before any rank ends, or, if it died first, by rank 0 of the next start before
any rank trains. What was decided to be the end stays the end: every later start of the same thing is refused
with 17 and the verdict, until an operator resets the budget or the script or a setting changes. So however
often plain python or torchrun starts the run again, it ends.

What can vary here is the rung, and the devices of a single node: each rank takes them in another order by
changing CUDA_VISIBLE_DEVICES, which has an effect only until something in its process asks CUDA for devices.
If that is too late, or the ranks are on several nodes, the devices stay, and the evidence says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import xxhash

from holdfast.base import scope
from holdfast.checkpoint.choose import (
    highest_committed_step,
    next_orders,
    situation_of,
    write_down,
    write_findings,
)
from holdfast.cluster import VISIBLE, devices_here, environment_of, node_name
from holdfast.config import Settings
from holdfast.errors import (
    BudgetSpentError,
    ConfigError,
    ControlError,
    ExitCode,
    HoldfastError,
    StorageError,
    UsageError,
    ValidationFailedError,
)
from holdfast.journal import JournalWriter
from holdfast.journal.events import AttemptStarted, LeaseClaimed, RunCreated, Warned
from holdfast.policy import (
    REPRODUCIBLE,
    Action,
    Cause,
    Cluster,
    Decision,
    Diagnosis,
    How,
    NodeDevices,
    Orders,
    PastAttempt,
    Rejection,
    arrange,
    describe_devices,
    devices_of,
    of_rejection,
    recover,
)
from holdfast.process import started_at
from holdfast.record import (
    RECOVERY,
    AttemptRecord,
    Claim,
    ControlDirectory,
    EndRecord,
    FailureRecord,
    Fence,
    Group,
    HeadRecord,
    LaunchInfo,
    LeaseKeeper,
    attempt_numbers,
    begin_attempt,
    budget_reset,
    claim,
    create_record,
    decision_path,
    digest_of,
    end_attempt,
    excluded,
    failed_attempt,
    latest_head,
    past_attempts,
    read_attempt,
    read_key,
    read_record,
    record_crash,
    refused_launch,
    rejection_of,
    rung_of,
    settled_in,
    was_kept,
)
from holdfast.train.crash import text_of

log = logging.getLogger("holdfast")

# --- which attempt this process belongs to ------------------------------------------------------------------

NOT_INITIALIZED = 3
"""What the CUDA driver answers until something initialises it, which is when CUDA_VISIBLE_DEVICES is read."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt without the launcher begins with, as rank 0 decided it."""

    orders: Orders = Orders()
    refused: str = ""
    """Why there is no attempt; empty if there is one."""
    code: int = 0

    def insist(self) -> None:
        """Raise the refusal, if it is one."""
        if self.refused:
            kind = ValidationFailedError if self.code == ExitCode.VALIDATION_FAILED else BudgetSpentError
            raise kind(self.refused)


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """This process's surroundings: what was started, by whom, and on which devices."""

    node: str
    launch: str = ""
    """The launch that torchrun's restarts belong to; empty without torchrun: each start is its own launch."""
    started_with: str = ""
    devices: list[str] = []
    """Those of this node, in their plain order, if the ranks can be moved between them."""
    workers: int = 1
    shift: int = 0
    """By how many places the devices are rotated in this process."""
    stays: str = ""
    """Why the devices are as they were."""

    def cluster(self, control: ControlDirectory) -> Cluster | None:
        """What recovery may choose from; None if other nodes may be involved. No nodes are kept out here."""
        if self.workers == 0:
            return None
        out = [
            exclusion
            for exclusion in excluded(control)
            if exclusion.node == self.node and exclusion.device is not None
        ]
        return Cluster(
            nodes=[self.node],
            devices={self.node: self.devices} if self.devices else {},
            workers_per_node=self.workers,
            excluded=[*out],
        )

    def placement(self, control: ControlDirectory) -> str:
        """Which rank runs on which device, for the record; empty where that is not known."""
        cluster = self.cluster(control)
        if cluster is None:
            return ""
        return describe_devices(_arranged(cluster, self.node, self.shift), self.workers)


def look_around(settings: Settings, given: Settings, environ: Mapping[str, str] = os.environ) -> Here:
    """What this process was started with; `given` are the settings as they were written.

    Must come first: it may rotate the devices, before CUDA sees them.
    """
    script = str(getattr(sys.modules.get("__main__"), "__file__", "") or "")
    here = Here(
        node=node_name(settings.launch.node_name, environ),
        launch=_torchrun(environ),
        started_with=digest_of(script, sys.argv[1:], given),
        workers=_workers(environ),
    )
    return _turn(here, settings)


def _workers(environ: Mapping[str, str]) -> int:
    """How many ranks this node has; 0 if there are, or may be, others on other nodes."""
    world, local = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", "")
    return int(world) if world.isdecimal() and local in ((world, "") if world == "1" else (world,)) else 0


def _torchrun(environ: Mapping[str, str]) -> str:
    """An id of the torchrun: all its restarts have the same agent as their parent, whatever its run id."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return ""
    parent = os.getppid()
    who = f"{environ['TORCHELASTIC_RUN_ID']}/{node_name('', environ)}/{parent}/{started_at(parent)}"
    return xxhash.xxh3_64(who.encode()).hexdigest()[:12]


# --- the devices -------------------------------------------------------------------------------------------


def _turn(here: Here, settings: Settings) -> Here:
    """Take the devices in the order that the last decision wants, without those that are excluded."""
    seen = devices_here()
    visible = [device.name for device in seen]
    if len(visible) < 2 or not here.workers:
        return here
    if scope.current() is not None:
        return msgspec.structs.replace(here, stays="a restart in place keeps its devices")
    if why := in_use():
        return msgspec.structs.replace(here, stays=why)
    here = msgspec.structs.replace(here, devices=visible)
    try:
        run_dir = Path(settings.run.dir).absolute()
        if not (run_dir / "run.json").is_file():
            return here
        control = ControlDirectory.open(run_dir)
        number, decided = _last(control)
        shift = decided.rotate_by if decided is not None and not _forgiven(control, number, here) else 0
        cluster = here.cluster(control)
        assert cluster is not None
        if len(devices_of(cluster, here.node)) < here.workers:
            return here  # the run cannot do without what is excluded
        devices = _arranged(cluster, here.node, shift)[0].devices
    except ControlError as error:
        log.warning("holdfast: the devices stay as they are: %s", error)
        return here
    if changed := environment_of(devices, seen, 0, virtual=False):
        before = os.environ.get(VISIBLE, "not set")
        os.environ.update(changed)
        log.warning(
            "holdfast: %s was %s and is %s in this process, by what was decided after attempt %d",
            VISIBLE, before, changed[VISIBLE], number,
        )  # fmt: skip
    return msgspec.structs.replace(here, shift=shift)


def _arranged(cluster: Cluster, node: str, shift: int) -> list[NodeDevices]:
    left = devices_of(cluster, node)
    enough = len(left) >= cluster.workers_per_node
    return arrange([NodeDevices(node, left if enough else cluster.devices.get(node, []))], shift)


def in_use() -> str:
    """Why the order of the devices can no longer be changed in this process; empty if it can."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA was in use before the run was made"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""  # no driver: the devices are only names
    if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED:
        return (
            "CUDA had been asked for its devices before the run was made (torch.cuda.is_available() does so)"
        )
    return ""


# --- what was rejected -------------------------------------------------------------------------------------


def _last(control: ControlDirectory) -> tuple[int, Decision | None]:
    """The newest attempt (0: none), and what was decided about it."""
    newest = max(attempt_numbers(control), default=0)
    return newest, read_record(decision_path(control, newest, RECOVERY), Decision) if newest else None


def _forgiven(control: ControlDirectory, number: int, here: Here) -> bool:
    """Whether an attempt no longer counts against this start: it ran something else, or was forgiven."""
    if number <= (budget_reset(control) or 0):
        return True
    record = read_record(control.attempt(number) / "attempt.json", AttemptRecord)
    return record is not None and bool(here.started_with) and record.started_with != here.started_with


class Deciding:
    """What rank 0 decides about attempts of the run that this start belongs to."""

    def __init__(
        self, control: ControlDirectory, fence: Fence, journal: JournalWriter, settings: Settings, here: Here
    ) -> None:
        self._control = control
        self._fence = fence
        self._journal = journal
        self._settings = settings
        self._here = here

    def about(self, number: int) -> Decision | None:
        """What is done about an attempt: as decided before, or now if it rejected a result; else None."""
        control, fence, journal = self._control, self._fence, self._journal
        path = decision_path(control, number, RECOVERY)
        decided = read_record(path, Decision)
        if decided is not None:
            if not was_kept(control, number):  # the process that decided it died before that
                write_findings(control, fence, journal, number, decided)
            return decided
        rejection = rejection_of(control, number)
        if rejection is None:
            return None
        failed = self._failed(read_attempt(control, number), rejection)
        here, history = self._here, past_attempts(control, before=number)
        others = [
            one.number for one in history if here.started_with and one.started_with != here.started_with
        ]
        situation = situation_of(
            control,
            failed,
            history,
            self._settings,
            max_restarts=max(1, self._settings.launch.max_restarts),
            facts=[f"no rank can move: {here.stays}"] if here.stays else [],
            cluster=here.cluster(control),
            forgiven=max(others, default=0),
        )
        with fence.guard(f"decide about attempt {number}"):
            decision = recover(history, situation)
            decision = decision if create_record(path, decision) else read_record(path, Decision) or decision
        write_down(control, fence, journal, failed, None, decision)
        return decision

    def _failed(self, record: AttemptRecord, rejection: Rejection) -> PastAttempt:
        control = self._control
        head = read_record(control.attempt(record.number) / "head.json", HeadRecord)
        steps = max(0, rejection.step - 1 - head.step) if head is not None else None
        found = of_rejection(Diagnosis(cause=Cause.UNKNOWN, rung=rung_of(head), steps=steps), rejection)
        highest = highest_committed_step(self._settings.checkpoint_root(), control)
        return failed_attempt(control, record, found, highest_step=highest, rejection=rejection)

    def at_start(self, newest: int, launch: str) -> Told:
        """What the next attempt begins with, or why there is none. `newest`: the last attempt, 0 if none."""
        control, here = self._control, self._here
        decided = self.about(newest) if newest else None
        if decided is not None and _is_the_end(decided) and not _forgiven(control, newest, here):
            return _refuse(control, newest, decided.reason, decided.verdict)
        fatal = next((one for one in settled_in(control, newest) if one.how is How.FATAL), None)
        if fatal is not None and not _forgiven(control, newest, here):
            return _refuse(control, newest, f"step {fatal.step} is not finite: {fatal.why}", REPRODUCIBLE)
        if why := refused_launch(control, here.started_with, [launch]):
            return Told(refused=why, code=int(ExitCode.BUDGET_SPENT))
        return Told(orders=next_orders(control, past_attempts(control)))

    def at_rejection(self, attempt: int) -> tuple[str, str]:
        """The running attempt has rejected a result, and its ranks are about to end. Returns what the next
        start does; or, second, why there is to be none."""
        try:
            decided = self.about(attempt)
        except (HoldfastError, OSError) as error:
            return f"the next start decides what to vary, because it could not be decided here: {error}", ""
        if decided is None:
            return "", ""
        if _is_the_end(decided):
            return "", _end(self._control, attempt, decided.reason, decided.verdict)
        return f"the next start: {decided.reason}", ""


def begin(control: ControlDirectory, fence: Fence, settings: Settings, here: Here, launch: str) -> Told:
    """Before an attempt is numbered, settle what the last one left open, and whether there may be another."""
    newest = max(attempt_numbers(control), default=0)
    with contextlib.closing(JournalWriter(control.journal, "rank-0", newest)) as journal:
        try:
            told = Deciding(control, fence, journal, settings, here).at_start(newest, launch)
        except ControlError as error:  # no reason to keep a run from starting
            log.warning("holdfast: what earlier attempts left open is ignored here: %s", error)
            journal.write(Warned(message=f"what earlier attempts left open could not be read: {error}"))
            return Told()
        if told.refused:
            journal.write(Warned(message=f"a start was refused with code {told.code}: {told.refused}"))
    return told


def _is_the_end(decision: Decision) -> bool:
    return decision.action is Action.STOP and decision.exit_code == ExitCode.VALIDATION_FAILED


def _refuse(control: ControlDirectory, number: int, reason: str, verdict: str) -> Told:
    return Told(refused=_end(control, number, reason, verdict), code=int(ExitCode.VALIDATION_FAILED))


def _end(control: ControlDirectory, number: int, reason: str, verdict: str) -> str:
    """The end, in words, and how to go on from it."""
    verdict = f"verdict: {verdict}. " if verdict else ""
    return (
        f"validation has failed, and a start would end the same way: {reason}. {verdict}Evidence: "
        f"`holdfast journal {control.path}`, attempt {number}. Look at that step's data; a "
        "start is allowed again when the script, a Python file beside it, its arguments or a setting has "
        f'changed, or after `holdfast control reset-budget {control.path} --reason "what was fixed"`'
    )


class _Told(msgspec.Struct, frozen=True):
    run: str
    attempt: int
    epoch: int
    launch: str
    begun: Told
    shift: int = 0


@dataclass
class Membership:
    control: ControlDirectory
    fence: Fence
    attempt: int
    launch: str
    journal: JournalWriter
    keeper: LeaseKeeper | None = None
    """Held by rank 0 when there is no launcher."""
    told: Told = field(default_factory=Told)
    """What earlier attempts have left for this one, as told by the launcher, or by rank 0 without one."""
    node: str = ""
    """The node of the process, if that numbered the attempt itself."""
    ended: EndRecord | None = None
    """The end that this process has written."""

    @functools.cached_property
    def is_restart(self) -> bool:
        """Whether an earlier attempt of this very launch already trained."""
        head = latest_head(self.control, before=self.attempt)
        return head is not None and read_attempt(self.control, head.attempt).launch == self.launch

    def leave(self, end: EndRecord | None) -> None:
        """Record the end and give the lease back, if that is this process's task."""
        keeper, self.keeper = self.keeper, None
        try:
            if keeper is not None and end is not None:
                end_attempt(self.control, self.fence, self.attempt, end)
                self.ended = end
        except StorageError as error:  # a run that has reached its end does not fail for want of a record
            log.error("holdfast: attempt %d has no record of its end: %s", self.attempt, error)
        finally:
            if keeper is not None:
                keeper.release()
            self.journal.close()

    def crashed(self, error: BaseException) -> None:
        """An error is ending this process. On leaving the loop it dropped the loop's generator, which ended
        the attempt before anyone could see the error; if so, record the error as how the attempt ended."""
        end = self.ended
        if end is None or (end.outcome, end.exit_code) != ("stopped", ExitCode.FAILED):
            return
        if not isinstance(error, Exception):
            return  # somebody interrupted it
        message, now = f"{type(error).__name__}: {text_of(error)}", time.time()
        failure = FailureRecord(
            rank=0, node=self.node, pid=os.getpid(), exit_code=int(ExitCode.FAILED), at=now, message=message
        )
        try:
            failed = msgspec.structs.replace(end, outcome="failed", at=now)
            record_crash(self.control, self.attempt, failed, failure)
        except (HoldfastError, OSError) as problem:
            log.warning("holdfast: attempt %d counts as stopped, not as failed: %s", self.attempt, problem)


def join_attempt(
    settings: Settings,
    group: Group,
    launched: LaunchInfo | None,
    here: Here | None,
    on_lost: Callable[[str], None],
) -> Membership:
    """Become part of the run's current attempt. `here`: what this process was started with, if not by the
    launcher."""
    run_dir, ttl = Path(settings.run.dir), settings.control.lease_ttl
    if launched is not None:
        if run_dir.absolute() != Path(launched.run_dir):
            raise ConfigError(
                f"run.dir is {run_dir.absolute()} in this script, but `holdfast run` was started for "
                f"{launched.run_dir}. Set it in one place, or give both the same"
            )
        control = _same_run(run_dir, launched.run_id, "its agent", group.rank)
        fence = Fence(control, launched.epoch, timeout=ttl)
        journal = JournalWriter(control.journal, f"rank-{group.rank}", launched.attempt)
        told = Told(orders=launched.orders)
        return Membership(control, fence, launched.attempt, launched.launch, journal, told=told)
    assert here is not None
    if group.is_coordinator:
        return _begin(settings, group, here, on_lost)
    return _follow(settings, group, here)


def _follow(settings: Settings, group: Group, here: Here) -> Membership:
    patience = settings.control.decision_timeout
    raw = read_key(group.store, "attempt", patience, "the attempt that rank 0 begins")
    told = msgspec.json.decode(raw, type=_Told)
    told.begun.insist()
    if told.shift != here.shift:
        raise UsageError(
            f"rank {group.rank} has rotated its devices by {here.shift}, rank 0 by {told.shift}: two ranks "
            f"may share one. {here.stays or 'On rank 0 it was too late for that'}: make the Run at the same "
            "place in every rank's script, before CUDA is asked for anything"
        )
    control = _same_run(Path(settings.run.dir), told.run, "rank 0", group.rank)
    journal = JournalWriter(control.journal, f"rank-{group.rank}", told.attempt)
    fence = Fence(control, told.epoch, timeout=settings.control.lease_ttl)
    return Membership(control, fence, told.attempt, told.launch, journal, told=told.begun)


def _same_run(run_dir: Path, run: str, who: str, rank: int) -> ControlDirectory:
    """Open the run directory; its random run id proves that it is the one the others see."""
    control = ControlDirectory.open(run_dir.absolute())
    if control.run_id != run:
        raise ControlError(
            f"rank {rank} sees run {control.run_id} in {control.path}, {who} sees run {run}. "
            "All ranks must see the same run directory: put it on a shared file system"
        )
    return control


def _begin(settings: Settings, group: Group, here: Here, on_lost: Callable[[str], None]) -> Membership:
    control, created = ControlDirectory.open_or_create(Path(settings.run.dir))
    around = scope.current()
    launch = (around.job if around is not None else "") or here.launch or uuid.uuid4().hex[:12]
    held = claim(control, launch, settings.control.lease_ttl, handover=settings.handover())
    fence = Fence(control, held.epoch, timeout=held.ttl)
    journals: list[JournalWriter] = []

    def on_trouble(message: str) -> None:
        log.error("holdfast: %s", message)
        for journal in journals:
            journal.write(Warned(message=message))

    def announce(attempt: int, begun: Told) -> None:
        told = _Told(control.run_id, attempt, held.epoch, launch, begun, here.shift)
        group.store.set("attempt", msgspec.json.encode(told).decode())

    keeper = LeaseKeeper(control, held, on_lost, on_trouble)
    try:
        begun = begin(control, fence, settings, here, launch)
        if begun.refused:
            announce(0, begun)
            begun.insist()
        number = begin_attempt(
            control,
            fence,
            launch,
            group.world_size,
            nodes=[here.node] if here.workers else [],
            placement=here.placement(control),
            rotation=here.shift,
            started_with=here.started_with,
        ).number
        journal = JournalWriter(control.journal, f"rank-{group.rank}", number)
        if created:
            journal.write(RunCreated(run=control.run_id, checkpoint_root=str(settings.checkpoint_root())))
        _tell(journal, held, group.world_size)
        announce(number, begun)
    except BaseException:
        keeper.release()  # otherwise this very process would keep the lease from the next attempt
        raise
    journals.append(journal)
    return Membership(control, fence, number, launch, journal, keeper, begun, here.node)


def _tell(journal: JournalWriter, held: Claim, world_size: int) -> None:
    journal.write(LeaseClaimed(epoch=held.epoch, owner=held.owner, evidence=held.evidence))
    journal.write(
        AttemptStarted(
            epoch=held.epoch,
            world_size=world_size,
            launcher="torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "none",
            torch=str(torch.__version__),
        )
    )
