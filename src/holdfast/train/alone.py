"""A run without the launcher: what rank 0 decides in its place, from the run's records.

Guarantee: a result that the ranks rejected is decided about once, by the rules of `holdfast run`
(`policy.recovery`), durably and under the fence: by rank 0 before any rank ends, or, if it died first, by
rank 0 of the next start before any rank trains. What was decided to be the end stays the end: every later
start of the same thing is refused with 17 and the verdict, until an operator resets the budget or the script
or a setting changes. So however often plain python or torchrun starts the run again, it ends.

What can vary here is the rung, and the devices of a single node: each rank takes them in another order by
changing CUDA_VISIBLE_DEVICES, which counts only as long as nothing in its process has asked CUDA for devices.
Where that is too late, or the ranks are on several nodes, the devices stay, and the evidence says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Mapping
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
from holdfast.errors import BudgetSpentError, ControlError, ExitCode, HoldfastError, ValidationFailedError
from holdfast.journal import JournalWriter
from holdfast.journal.events import Warned
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
    ControlDirectory,
    Fence,
    HeadRecord,
    attempt_numbers,
    budget_reset,
    create_record,
    decision_path,
    digest_of,
    excluded,
    failed_attempt,
    past_attempts,
    read_attempt,
    read_record,
    refused_launch,
    rejection_of,
    rung_of,
    settled_in,
    was_kept,
)

log = logging.getLogger("holdfast")

NOT_INITIALIZED = 3
"""What the CUDA driver answers as long as nothing has initialised it, and so read CUDA_VISIBLE_DEVICES."""


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
    """The launch that torchrun's restarts belong to; empty without torchrun: each start is one of its own."""
    started_with: str = ""
    devices: list[str] = []
    """Of this node, in their plain order, if the ranks can be moved between them."""
    workers: int = 1
    shift: int = 0
    """By which the devices are turned in this process."""
    stays: str = ""
    """Why the devices are as they were."""

    def cluster(self, control: ControlDirectory) -> Cluster | None:
        """What recovery may choose from; None if nothing is known of other nodes. Nobody keeps nodes out."""
        if self.workers == 0:
            return None
        out = [one for one in excluded(control) if one.node == self.node and one.device is not None]
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

    Comes first: it may turn the devices, before CUDA sees them.
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
    """Ranks of this node; 0 if there are, or may be, others on other nodes."""
    world, local = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", "")
    return int(world) if world.isdecimal() and local in ((world, "") if world == "1" else (world,)) else 0


def _torchrun(environ: Mapping[str, str]) -> str:
    """All restarts of one torchrun have the same agent as their parent, whatever its run id is."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return ""
    parent = os.getppid()
    who = f"{environ['TORCHELASTIC_RUN_ID']}/{node_name('', environ)}/{parent}/{started_at(parent)}"
    return xxhash.xxh3_64(who.encode()).hexdigest()[:12]


# --- the devices -------------------------------------------------------------------------------------------


def _turn(here: Here, settings: Settings) -> Here:
    """Take the devices as the last decision wants them, and without those that are excluded."""
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
            return here  # what is excluded cannot be done without
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
    """Why the order of the devices cannot be changed any more in this process; empty if it can."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA was in use before the run was made"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""  # no driver: the devices are names only
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
    """Whether an attempt stands against this start no more: it was of something else, or was forgiven."""
    if number <= (budget_reset(control) or 0):
        return True
    record = read_record(control.attempt(number) / "attempt.json", AttemptRecord)
    return record is not None and bool(here.started_with) and record.started_with != here.started_with


class Deciding:
    """What rank 0 decides of attempts of the run that this start is part of."""

    def __init__(
        self, control: ControlDirectory, fence: Fence, journal: JournalWriter, settings: Settings, here: Here
    ) -> None:
        self._control = control
        self._fence = fence
        self._journal = journal
        self._settings = settings
        self._here = here

    def about(self, number: int) -> Decision | None:
        """What is done about an attempt: as decided, or now if it rejected a result; None if it did not."""
        control, fence, journal = self._control, self._fence, self._journal
        path = decision_path(control, number, RECOVERY)
        decided = read_record(path, Decision)
        if decided is not None:
            if not was_kept(control, number):  # who decided it died before that
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
        """What the next attempt begins with, or why there is none; `newest`: the last attempt, 0 if none."""
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
        """The running attempt has rejected a result, and its ranks are about to end: what the next start
        does; or, second, why there is to be none."""
        try:
            decided = self.about(attempt)
        except (HoldfastError, OSError) as error:
            return f"what the next start varies is decided there, because here it could not be: {error}", ""
        if decided is None:
            return "", ""
        if _is_the_end(decided):
            return "", _end(self._control, attempt, decided.reason, decided.verdict)
        return f"the next start: {decided.reason}", ""


def begin(control: ControlDirectory, fence: Fence, settings: Settings, here: Here, launch: str) -> Told:
    """Before an attempt is numbered: settle what the last one left open, and whether there may be another."""
    newest = max(attempt_numbers(control), default=0)
    with contextlib.closing(JournalWriter(control.journal, "rank-0", newest)) as journal:
        try:
            told = Deciding(control, fence, journal, settings, here).at_start(newest, launch)
        except ControlError as error:  # no reason to keep a run from starting
            log.warning("holdfast: what earlier attempts left open counts for nothing here: %s", error)
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
        "start is let in again when the script, a Python file beside it, its arguments or a setting has "
        f'changed, or after `holdfast control reset-budget {control.path} --reason "what was fixed"`'
    )
