"""The five answers about a failure, an end that nobody decided about, or a stop on request. Pure.

Guarantee: every answer is a sentence that a person can act on without knowing Holdfast. Numbers are those of
the records: the last complete step, the step of the newest usable checkpoint, and the restarts that the
budget counts; nothing is estimated.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from holdfast.base import duration, plural, printable, size
from holdfast.checkpoint.format import CheckpointName, parse_name
from holdfast.errors import MEANINGS, ExitCode
from holdfast.health import Trouble, what_to_do
from holdfast.journal.events import STOP, Account, StopAsked
from holdfast.policy import (
    DEVICE,
    FOLLOWS,
    INSTEAD,
    KERNEL_OOM,
    NO_OTHER_DEVICE,
    STEP,
    Action,
    Cause,
    Decision,
    Hang,
    Loss,
    LostNode,
    MemoryKill,
    PastAttempt,
    Rejection,
    Situation,
    Source,
    StopRequest,
    activity,
    blamed,
    is_symptom,
)
from holdfast.policy import ranks as list_ranks
from holdfast.record import FailureRecord

MESSAGE_LIMIT = 300
MOST_WHY = 12
_POINTS_TO = {
    Cause.PREEMPTION: "somebody or something asked this job to end",
    Cause.INFRASTRUCTURE: "this points to the machine or the network, not to the training script",
    Cause.DEVICE: "this points to the device, not to the training script",
    Cause.JOB: "this points to the training script",
    Cause.DATA: "this points to the data",
    Cause.CHECKPOINT: "this points to the checkpoint that was loaded",
    Cause.HANG: "it gave no sign of life for longer than is allowed",
    Cause.UNKNOWN: "neither exit code, error file, last output, kernel log nor devices say why",
}
_WRONG_SETTING = "a setting is wrong; neither the training script nor the machine is to blame"
_LOSSES = {
    Loss.CLOSED: "nobody told it to leave: its machine went down, or its launcher was killed",
    Loss.SILENT: "it hangs, its launcher is stopped, or the network to it is cut",
}
NO_MORE_PROCESSES = (
    "no more processes or threads can be started there: the limit of its user (`ulimit -u`) or of the "
    "container (pids.max) is reached"
)
_ONLY_ON = re.compile(r"^it failed on (rank .*) only: ")
_STOOD_STILL = re.compile(
    r"^(ranks? [\d, -]*\d) stood still for [^:]*: (?:it|they|its process|their processes) "
)
"""How the sentence about a rank that stood still begins; `what` already says for how long."""
_VERDICTS = {
    "device": "the fault follows the device to whichever rank uses it",
    "reproducible": "the result is the same on other devices: it is in the data, the state or the script",
    "transient": "it did not come back when the step was run again",
}
_CLASS = re.compile(r"^\w+(?:Error|Exception): ")
"""The class in front of an error of Holdfast's own, which is dropped: the words after it say enough."""
_ALONE = (
    "it came back when the step was done again from a checkpoint, on the only devices there are: it is in "
    "the data, the state or the script, unless they share a fault"
)
_SAME_STATE = (
    "the same happened before with this state, and every byte of the checkpoint is what was saved: what was "
    "saved may have been bad already"
)
_UNDECIDED = "one bad result does not say yet whether the device, the data or the state is to blame"
_GOT_ON = "the run had made progress before that:"
_ADAPTER = "check the network adapter "
_PASSED_ON = re.compile(r"^([\w.]+): Caught \1 in [^.]*\. .*?(?=\1\b)\1")
_NO_ROOM = re.compile(
    r"can't start new thread|pthread_create failed|\[Errno 11\]|Resource temporarily unavailable"
)
"""The errors that one meets beyond the limit of processes and threads."""
_SAID = re.compile(
    r"^cause: |^rank \d+ on \S+ \(pid \d+\) failed: |restarts? without progress (was|were) left$"
    rf"|^check the network adapter |^{re.escape(INSTEAD)}"
)
"""Evidence that is put into other words here."""


def account_of_failure(
    situation: Situation,
    decision: Decision,
    root: FailureRecord | None,
    failures: Sequence[FailureRecord],
    *,
    hangs: Sequence[Hang] = (),
    lost: Sequence[LostNode] = (),
    seen: Sequence[str] = (),
    detail: str = "",
    saved: str = "",
    cut_off: CheckpointName | None = None,
    coming: CheckpointName | None = None,
    storage: Trouble | None = None,
    in_place: bool = False,
    newest: int | None = None,
) -> Account:
    """The account of an attempt that failed, and of the decision about it.

    `seen`: what was seen of a hang, in sentences; `detail`: what happened, if no worker ended by itself;
    `saved`: where a diagnostic save is; `cut_off`: the checkpoint whose save was not complete by then;
    `coming`: the checkpoint that its writers may still complete;
    `storage`: why nothing can be written to the run's storage; `in_place`: whether the processes go on;
    `newest`: the step of the newest checkpoint, where it is not known which ones may be used.
    """
    failed = situation.attempt
    hang = hangs[0] if root is None and hangs else None
    gone = [] if root is not None else lost
    return Account(
        attempt=failed.number,
        cause=failed.cause,
        who=_who(failed, root, hang, lost, decision),
        what=_what(failed, root, hang, lost, detail, decision, cut_off),
        why=_with_storage(
            _why(situation, root, failures, decision, seen, detail, [] if root is not None else lost),
            root,
            decision,
            storage,
            cut_off,
        )[:MOST_WHY],
        done=_done(situation, decision, storage, cut_off, coming, in_place=in_place, newest=newest),
        next=_next(failed, root, decision, gone, storage),
        step=failed.last_step,
        saved=None
        if failed.exit_code == ExitCode.NO_VALID_RUNG
        else resumes_from(situation, decision, newest),
        began=hang.at - hang.seconds if hang is not None and hang.at else None,
        exit_code=decision.exit_code if decision.action in (Action.STOP, Action.REQUEUE) else 0,
        files=_files(root, saved),
        suspects=decision.suspect,
        undecided=failed.rejection is not None and not decision.verdict,
    )


# --- who, and what ------------------------------------------------------------------------------------------


def _who(
    failed: PastAttempt,
    root: FailureRecord | None,
    hang: Hang | None,
    lost: Sequence[LostNode],
    decision: Decision,
) -> str:
    if failed.rejection is not None:
        if decision.suspect:
            return _checkpoint(decision.suspect[0])
        out = decision.exclude[0] if decision.exclude and decision.verdict == DEVICE else None
        if out is not None and out.device is not None:
            return f"device {printable(out.device)} of {printable(out.node)}"
        return _rejected_by(failed.rejection)
    if root is not None and failed.alike and failed.world_size > 1:
        return "both ranks" if failed.world_size == 2 else f"all {failed.world_size} ranks"
    if root is not None:
        return f"rank {root.rank} on {printable(root.node)}"
    if lost:
        return f"node {printable(lost[0].node)}"
    if hang is not None:
        culprits = hang.missing or [hang.rank]
        where = hang.missing_nodes if hang.missing else [hang.node]
        named = ", ".join(map(str, culprits[:8]))
        on = f" on {printable(where[0])}" if len(where) == 1 and where[0] else ""
        return f"{'rank' if len(culprits) == 1 else 'ranks'} {named}{on}"
    if failed.culprit_device:
        return f"device {printable(failed.culprit_device)} of {printable(failed.culprit_node)}"
    return f"node {printable(failed.culprit_node)}" if failed.culprit_node else "the job"


def _what(
    failed: PastAttempt,
    root: FailureRecord | None,
    hang: Hang | None,
    lost: Sequence[LostNode],
    detail: str,
    decision: Decision,
    cut_off: CheckpointName | None,
) -> str:
    when = _when(failed)
    if failed.rejection is not None:
        why = "; ".join(printable(reason) for reason in failed.rejection.reasons[:3]) or "it was rejected"
        again = ", and again when the step was repeated" if failed.rejection.rerun else ""
        gave = f"gave a bad result in step {failed.rejection.step}{again}: {why}"
        return f"may be bad: the run went on from it and {gave}" if decision.suspect else gave
    if root is not None:
        saving = cut_off is not None and cut_off.step == failed.last_step
        return _ended(root, f" while step {failed.last_step} was being saved" if saving else when)
    if lost:
        loss = printable(lost[0].detail.removeprefix(f"node {lost[0].node} was lost: "), MESSAGE_LIMIT)
        return f"was lost{when}{f': {loss}' if loss else ''}"
    if hang is not None:
        inside = "" if hang.section == STEP else f", {printable(activity(hang.section, hang.exiting))}"
        long = f" for {hang.seconds:.0f} s{inside} ({hang.limit:.0f} s are allowed)" if hang.limit else inside
        still = f"stood still{when}{long}"
        waits = f"; rank {hang.rank} waited for it" if hang.missing and hang.rank not in hang.missing else ""
        return still + waits
    how = printable(detail or failed.message, MESSAGE_LIMIT)
    return f"failed{when}{f': {how}' if how else ''}"


def _checkpoint(named: str) -> str:
    """`the checkpoint at step 20 (step_00000020-3fa9c1d2)`."""
    name = parse_name(named)
    return f"the checkpoint at step {name.step} ({printable(named)})" if name else printable(named)


def _rejected_by(rejection: Rejection) -> str:
    """Whose own result was bad, or the accused device if there is one."""
    if rejection.accused is not None and rejection.accused.node:
        device = f"device {printable(rejection.accused.device)} of " if rejection.accused.device else ""
        return f"{device}{printable(rejection.accused.node)}"
    bad = rejection.bad
    if len(bad) == 1:
        on = f", device {printable(bad[0].device)}" if bad[0].device else ""
        return f"rank {bad[0].rank} on {printable(bad[0].node)}{on}"
    return f"ranks {', '.join(str(one.rank) for one in bad[:8])}" if bad else "the job"


def _ended(root: FailureRecord, when: str) -> str:
    if root.left:
        return "left with exit code 0 before its peers were done"
    if root.message.startswith(KERNEL_OOM):
        if root.exit_code > 0:
            return f"failed{when}: the kernel killed a process of its data loader, as memory ran out"
        return f"was killed by the kernel{when}: out of memory"
    if root.exit_code == ExitCode.STORAGE_FAILED:
        return f"could not go on{when}: the run's storage could not be written"
    if _is_own(root):
        meaning = MEANINGS[ExitCode(root.exit_code)][0].rstrip(".")
        return f"could not go on{when}: {meaning[0].lower()}{meaning[1:]}"
    if root.exit_code < 0:
        said = f": {printable(root.message, MESSAGE_LIMIT)}" if root.message else ""
        return f"was killed by {_signal(-root.exit_code)}{when}{said}"
    if root.message:
        return f"failed{when} with {_said(root)}"
    return f"ended{when} with exit code {root.exit_code} and said nothing"


def _said(root: FailureRecord) -> str:
    """Its last words; for an error that a data loader passes on, the error itself."""
    return printable(_PASSED_ON.sub(r"\1", printable(root.message, 4 * MESSAGE_LIMIT)), MESSAGE_LIMIT)


def _is_own(root: FailureRecord) -> bool:
    """Whether it ended with one of Holdfast's own codes: no line of the user's raised that."""
    return root.exit_code in set(ExitCode) and root.exit_code not in (0, ExitCode.FAILED, ExitCode.USAGE)


def _by_setting(root: FailureRecord | None) -> bool:
    """Whether a Holdfast setting ended it; the line that passed the setting on is not to blame."""
    return root is not None and any("holdfast.errors.ConfigError" in one.types for one in root.errors)


def _where(root: FailureRecord) -> str:
    """The user's own line that raised it."""
    return printable(blamed(root.errors))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _when(failed: PastAttempt) -> str:
    if not failed.began:
        return " before the first step" if failed.last_step is None else ""
    return f" in step {failed.last_step + 1}" if failed.last_step is not None else ""


# --- why ----------------------------------------------------------------------------------------------------


def _with_storage(
    evidence: list[str],
    root: FailureRecord | None,
    decision: Decision,
    storage: Trouble | None,
    cut_off: CheckpointName | None,
) -> list[str]:
    """The evidence, with what is known about the run's storage first, and an incomplete save right after how
    the failed rank ended. What storage or memory led to does not point to anything else."""
    full = storage is not None and decision.exit_code == ExitCode.STORAGE_FAILED
    if full or (root is not None and root.message.startswith(KERNEL_OOM)):
        evidence = [text for text in evidence if text not in _POINTS_TO.values()]
    if cut_off is not None:
        torn = (
            f"the save of step {cut_off.step} had begun and was not complete ({cut_off}): it was never "
            "committed, so what there is of it is not used"
        )
        evidence = list(evidence)
        evidence.insert(1 if root is not None else len(evidence), printable(torn))
    if full and storage is not None:
        evidence = [printable(storage.describe()), *evidence]
    return list(dict.fromkeys(evidence))


def _why(
    situation: Situation,
    root: FailureRecord | None,
    failures: Sequence[FailureRecord],
    decision: Decision,
    seen: Sequence[str],
    detail: str,
    lost: Sequence[LostNode],
) -> list[str]:
    evidence: list[str] = []
    failed = situation.attempt
    if decision.verdict:
        evidence += [_of_the_verdict(decision), *decision.grounds]
        if decision.suspect:
            evidence.insert(0, _SAME_STATE)
    cause = Cause(failed.cause) if failed.cause in set(Cause) else Cause.UNKNOWN
    named = next((text for text in decision.evidence if text.startswith(_ADAPTER)), "")
    if named:
        adapter = named.removeprefix(_ADAPTER)
        evidence.append(f"the error names the network adapter {adapter}: it, its cable or its switch failed")
    if lost and lost[0].how in _LOSSES:
        evidence.append(_LOSSES[lost[0].how])
    if root is not None and not root.left and failed.rejection is None:
        evidence += _of_the_end(root)
    if cause is Cause.HANG:
        evidence += seen
    undecided = failed.rejection is not None and not decision.verdict
    if undecided:
        evidence.append(_UNDECIDED)
    elif cause is Cause.UNKNOWN:
        if root is None or not (_is_own(root) or (root.exit_code > 0 and root.message)):  # that says why
            evidence.append(_POINTS_TO[cause])
    elif cause is not Cause.HANG or not seen:
        evidence = _together(evidence, _WRONG_SETTING if _by_setting(root) else _POINTS_TO[cause])
    said = {one.detail for one in lost}
    evidence += [
        text for text in (detail, *decision.evidence) if text and text not in said and not _SAID.search(text)
    ]
    if any(_ONLY_ON.match(text) for text in evidence):
        evidence = [text for text in evidence if not text.endswith("failed in their first lines")]
    if failed.rejection is not None:  # said with what happened
        evidence = [
            text for text in evidence if not text.startswith(f"step {failed.rejection.step} was rejected")
        ]
    kept = resumes_from(situation, decision)
    if kept is not None and kept > failed.highest_step:  # the newest one has not reached the root yet
        root_has = f", step {failed.highest_step} in the checkpoint root" if failed.highest_step else ""
        evidence = [
            f"{_GOT_ON} step {kept} is saved on the nodes{root_has}" if text.startswith(_GOT_ON) else text
            for text in evidence
        ]
    if failed.alike or failed.rejection is not None:  # the ranks agree on what they reject, and end alike
        evidence = [text for text in evidence if not text.endswith(" failed too")]
    followed = [one for one in failures if root is not None and one.rank != root.rank and not one.left]
    consequences = [one.rank for one in followed if is_symptom(one.exit_code, one.message)]
    if consequences and not any("then lost" in text for text in evidence):
        who = "it" if len(consequences) == 1 else "they"
        evidence.append(f"{list_ranks(consequences)} ended only because {who} lost that one")
    return [printable(text) for text in dict.fromkeys(_STOOD_STILL.sub(r"\1 ", text) for text in evidence)]


def _together(evidence: list[str], origin: str) -> list[str]:
    """Join the line that raised it, and what that points to, into one reason."""
    at = next((index for index, text in enumerate(evidence) if text.startswith("raised at ")), None)
    if at is None:
        return [*evidence, origin]
    return [*evidence[:at], f"{evidence[at]}: {origin}", *evidence[at + 1 :]]


def _of_the_verdict(decision: Decision) -> str:
    said = _VERDICTS.get(decision.verdict, f"verdict: {decision.verdict}")
    if any(text.startswith(NO_OTHER_DEVICE) for text in decision.grounds):
        return _ALONE
    _, follows, where = decision.reason.partition(FOLLOWS)
    return f"{said}: {where}" if follows else said


def _of_the_end(root: FailureRecord) -> list[str]:
    if root.message.startswith(KERNEL_OOM):
        return [_counted(root.memory)]
    if root.exit_code == -signal.SIGKILL:
        return [
            "SIGKILL always comes from outside: Holdfast did not send it, and the kernel counts no "
            "out-of-memory kill here. It may have been the scheduler, an administrator or a container's limit"
        ]
    if _is_own(root):
        return [printable(_CLASS.sub("", root.message))] if root.message else []
    if _NO_ROOM.search(root.message):
        return [NO_MORE_PROCESSES]
    if _by_setting(root):
        return []
    where = _where(root)
    return [f"raised at {where}"] if where else []


def _counted(memory: MemoryKill | None) -> str:
    """What the kernel says about it, with the limit that was reached."""
    if memory is None or not memory.group:
        return "the kernel's out-of-memory counter of this job rose when it was killed"
    rose = f"the kernel's count of out-of-memory kills rose by {memory.kills}"
    where = f"in the control group {memory.group}"
    if memory.limit is None:
        return f"{rose} {where}, which has no limit: the memory of the whole machine was used up"
    if memory.limited in ("", memory.group):
        return f"{rose} {where}, all of whose processes together may use {size(memory.limit)}"
    return f"{rose} {where}, part of {memory.limited}, which may use {size(memory.limit)} in all"


# --- what was done, and what is left to do ------------------------------------------------------------------


def _done(
    situation: Situation,
    decision: Decision,
    storage: Trouble | None,
    cut_off: CheckpointName | None,
    coming: CheckpointName | None,
    *,
    in_place: bool,
    newest: int | None,
) -> str:
    reason = printable(decision.reason, MESSAGE_LIMIT)
    if storage is not None and decision.exit_code == ExitCode.STORAGE_FAILED:
        reason = printable(storage.describe(), MESSAGE_LIMIT)
    if decision.action is Action.STOP:
        here = decision.exit_code == ExitCode.HANDED_OVER
        return f"{'ended these processes' if here else 'stopped'}: {reason}"
    if decision.action is Action.REQUEUE:
        return f"gave the job back to its scheduler: {reason}"
    if decision.action is Action.WAIT:
        return f"waiting up to {decision.wait_seconds:.0f} s for nodes: {reason}"
    how = {
        Action.ROTATE: "restarting on other devices",
        Action.SHRINK: "restarting with fewer nodes",
    }.get(decision.action, "calling the function again in the same processes," if in_place else "restarting")
    if decision.action is Action.SHRINK and situation.cluster is not None and situation.attempt.node_count:
        left = len(situation.cluster.nodes)
        how = f"restarting with {left} of {plural(situation.attempt.node_count, 'node')}"
    out = [
        one.node if one.device is None else f"device {one.device} of {one.node}" for one in decision.exclude
    ]
    if out:
        how += f" without {printable(', '.join(out))}"
    if decision.spares:
        how += f" on the spare {printable(', '.join(decision.spares))}"
    if decision.skip is not None:
        how += f" without batches {decision.skip.first} to {decision.skip.last}"
    trial = situation.attempt.rejection if decision.suspect else None
    aim = f", to see whether step {trial.step} is sound without it" if trial is not None else ""
    return f"{how} {_from(situation, decision, cut_off, coming, newest)}{aim}{_budget(situation, decision)}"


def resumes_from(situation: Situation, decision: Decision, newest: int | None = None) -> int | None:
    """The step of the newest checkpoint that the next attempt may use; None for a fresh start."""
    if not situation.rungs and newest:
        return newest
    without = {*decision.avoid, *decision.suspect}
    usable = (parse_name(name) for name in situation.rungs if name not in without)
    return next((name.step for name in usable if name is not None), None)


def _from(
    situation: Situation,
    decision: Decision,
    cut_off: CheckpointName | None,
    coming: CheckpointName | None,
    newest: int | None,
) -> str:
    step, last = resumes_from(situation, decision, newest), situation.attempt.last_step
    older = "the older checkpoint at " if decision.action is Action.LOWER_RUNG else ""
    where = "from the beginning, as nothing was saved yet" if step is None else f"from {older}step {step}"
    if cut_off is not None and cut_off.step > (step or 0):
        why = f"as the save of step {cut_off.step} was cut off and is not used"
        where = f"from the beginning, {why}" if step is None else f"{where}, {why}"
    # What was saved from a checkpoint that is avoided is avoided too.
    waits = coming is not None and coming.step > (step or 0) and not decision.avoid and not decision.suspect
    if waits and coming is not None:
        start = "the beginning" if step is None else f"step {step}"
        where = f"from {start}, or from step {coming.step} if its save, still under way, is completed"
    if last is None:
        return where
    redo = max(0, last - (step or 0))
    most = "at most " if waits and redo else ""
    return f"{where}: {most}{plural(redo, 'step')} to redo" if redo else f"{where}: nothing to redo"


def _budget(situation: Situation, decision: Decision) -> str:
    number = situation.max_restarts - decision.restarts_left
    return f" (restart {number} of {situation.max_restarts})" if 0 < number <= situation.max_restarts else ""


def _next(
    failed: PastAttempt,
    root: FailureRecord | None,
    decision: Decision,
    lost: Sequence[LostNode],
    storage: Trouble | None,
) -> str:
    if storage is not None and decision.exit_code == ExitCode.STORAGE_FAILED:
        return what_to_do(storage, requeued=decision.action is Action.REQUEUE)
    look_at = printable(next((text for text in decision.evidence if text.startswith(_ADAPTER)), ""))
    if decision.action is Action.WAIT:
        return "provide nodes, or let it wait"
    if decision.action not in (Action.STOP, Action.REQUEUE):
        out = sorted({one.node for one in decision.exclude})
        if look_at and not out:
            return f"{look_at}; the run itself needs nothing"
        if not out and any(one.how in _LOSSES for one in lost):
            gone = printable(", ".join(dict.fromkeys(one.node for one in lost)))
            return f"find out why {gone} was lost; the run itself needs nothing"
        if not out and root is not None and root.message.startswith(KERNEL_OOM):
            return f"nothing to do, unless it comes back: {_less_memory(root.memory)}"
        if not out:
            own = failed.cause in _OWN and _to_mend(root)
            return f"nothing to do, unless it comes back: {_to_mend(root)}" if own else "nothing to do"
        devices = [f"device {one.device} of {one.node}" for one in decision.exclude if one.device is not None]
        named = printable(", ".join(devices if len(devices) == len(decision.exclude) else out))
        return f"have {named} looked at, then `holdfast control readmit`; the run itself needs nothing"
    if look_at:
        return f"{look_at}, then run the same command"
    if root is not None and root.message.startswith(KERNEL_OOM):
        return f"{_less_memory(root.memory)}, then run the same command"
    if root is not None and root.exit_code == -signal.SIGKILL and decision.exit_code in _BY_CAUSE:
        return (
            "find out what kills it (the kernel's log, the scheduler's, a container's limits), "
            "then run the same command"
        )
    only = next((found[1] for text in decision.evidence if (found := _ONLY_ON.match(text))), "")
    if only and decision.exit_code in _BY_CAUSE:
        return (
            f"find out what differs for {printable(only)} (packages, paths, files), then run the same command"
        )
    if _to_mend(root) and failed.cause in _OWN and decision.exit_code in _BY_CAUSE:
        return f"{_to_mend(root)}, then run the same command"
    code = decision.exit_code
    return MEANINGS[ExitCode(code)][1] if code in set(ExitCode) else MEANINGS[ExitCode.FAILED][1]


def _less_memory(memory: MemoryKill | None) -> str:
    more = "take a larger machine"
    if memory is not None and memory.limit is not None:
        more = f"raise the limit of {size(memory.limit)}"
    return f"use less memory (smaller batches, fewer data loader workers, less prefetching) or {more}"


_OWN = (Cause.JOB, Cause.DATA, Cause.UNKNOWN)
_BY_CAUSE = (ExitCode.FAILED, ExitCode.BUDGET_SPENT, ExitCode.NOTHING_LEFT)
"""Codes that say how often something was tried; what to do about it depends on the cause."""


def _to_mend(root: FailureRecord | None) -> str:
    """What to fix in the user's own code or settings; empty if nothing there is known to be at fault."""
    if root is None or root.exit_code <= 0 or not root.message or _is_own(root):
        return ""
    if _NO_ROOM.search(root.message):
        return "raise that limit, or end what else that user runs there"
    if _by_setting(root):
        return "correct that setting"
    where = _where(root)
    return f"mend {where}" if where else f"mend what raised {printable(root.message.partition(':')[0])}"


def _files(root: FailureRecord | None, saved: str) -> list[str]:
    files = [] if root is None else [root.error_file, root.stderr_file]
    return [*filter(None, files), *([saved] if saved else [])]


# Accounts of ends that nobody decided about: the store, the lease or the whole launch was lost. Pure.


def account_of_lost_store(
    attempt: int, node: str, error: str, step: int | None, saved: int | None
) -> Account:
    """The account of a node that has no other node left to decide with."""
    addresses = error.partition("(")[2].partition(")")[0] or error
    return Account(
        attempt=attempt,
        cause=Cause.INFRASTRUCTURE,
        who="the host of the store that the nodes meet in",
        what=f"was lost{_in(step)}, as node {printable(node)} sees it",
        why=[
            f"every address that the nodes could meet at was tried: {printable(addresses)}",
            "its machine or its launcher is gone, or the network to it",
        ],
        done="ended all workers here: without the store the nodes cannot agree on anything",
        next="start the same command again on all nodes; with a second --rdzv-endpoint the run survives this",
        step=step,
        saved=saved,
        exit_code=int(ExitCode.STORE_LOST),
        alone=True,
    )


def account_of_lost_lease(
    attempt: int, evidence: str, by: str, found: str, step: int | None, saved: int | None
) -> Account:
    """`by`: the process that claimed the run; `found`: why it took this launch to be dead."""
    why = [f"it took this launch to be gone: {printable(found)}"] if found else []
    return Account(
        attempt=attempt,
        cause=Cause.INFRASTRUCTURE,
        who=f"another launch{f' ({printable(by)})' if by else ''}",
        what=f"took this run over{_in(step)}",
        why=[
            *why,
            printable(evidence),
            "one run must not be trained by two launches: each would undo the other",
        ],
        done="ended all workers here; the run is left to the other launch",
        next="nothing to do here; if the other launch is one too many, stop it and run this command again",
        step=step,
        saved=saved,
        exit_code=int(ExitCode.LEASE_LOST),
        alone=True,
    )


def account_of_lost_launch(
    attempt: int, holder: str, found: str, asked: StopAsked | None, step: int | None, saved: int | None
) -> Account:
    """What a new launch says about the one before, which recorded no end. `found`: why the run was free to
    take; `asked`: the request to stop, if there was one and the launch had not saved by then."""
    on = f" ({printable(holder)})" if holder else ""
    after = f" some time after step {step}" if step else ""  # its very last steps were not journalled yet
    if asked is None:
        what = f"ended without a word{after}"
        why = "its launcher and its ranks were killed at once, or the machine went down"
        to_do = "look into the logs of the machine and of the scheduler if nobody ended it on purpose"
    else:
        what = f"was killed{after} before it could save"
        given = f", and counted on {duration(asked.seconds)}" if asked.seconds is not None else ""
        why = (
            f"it had been asked to stop ({printable(asked.detail)}){given}; it was killed before it had saved"
        )
        to_do = (
            "give it more time between SIGTERM and SIGKILL (Slurm: GraceTime, KillWait; Kubernetes: "
            "terminationGracePeriodSeconds), or save more often; the run itself needs nothing"
        )
    return Account(
        attempt=attempt,
        cause=Cause.PREEMPTION if asked is not None else Cause.INFRASTRUCTURE,
        who=f"the launch before this one{on}",
        what=what,
        why=[why, printable(found)],
        done=f"this launch goes on from step {saved}"
        if saved
        else "this launch begins anew: nothing was saved",
        next=to_do,
        step=step,
        saved=saved,
    )


def account_of_exit_code(attempt: int, code: int, step: int | None, saved: int | None) -> Account | None:
    """The account of an attempt that ended for good when only its code could be written down, as on a full
    disk; None for a code that says nothing."""
    if code not in set(ExitCode) or code in (ExitCode.OK, ExitCode.FAILED, ExitCode.USAGE):
        return None
    meaning, then = MEANINGS[ExitCode(code)]
    said = f"{meaning[0].lower()}{meaning[1:].rstrip('.')}"
    return Account(
        attempt=attempt,
        cause=Cause.UNKNOWN,
        who="the run",
        what=f"ended{_in(step)}: {said}",
        why=["only its exit code could be written down; the launcher's output says more"],
        done=f"stopped: {said}",
        next=then,
        step=step,
        saved=saved,
        exit_code=code,
    )


def _in(step: int | None) -> str:
    return f" in step {step + 1}" if step is not None else ""


# The five answers about a stop on request. Pure.


_WHY = {
    Source.SIGNAL: "a signal asks a run to save and to end: schedulers send one, and so does Ctrl-C",
    Source.STOP_FILE: "the file is there, which asks the run to save and to end",
    Source.OPERATOR: "somebody asked for it with `holdfast control stop`",
    Source.TIME_LIMIT: "the scheduler ends the job at its time limit; the run saves before that",
    Source.STRAGGLER: "a rank slowed the others by more than straggler.stop_if_detected lets it",
}
_ASKED = {
    Source.STOP_FILE: ("the stop file", "asked the run to stop"),
    Source.TIME_LIMIT: ("the job's time limit", "is near, so the run was asked to stop"),
    Source.STRAGGLER: ("a slow rank", "made the run stop"),
}
"""Who asked, and what it did, where the request's own words give the reason instead."""
_UNSAVED = (ExitCode.STOPPED_UNSAVED,)


def account_of_stop(
    attempt: int, request: StopRequest, code: int, *, detail: str, step: int | None, saved: int | None
) -> Account:
    """The account of a run that was asked to stop, and did.

    `detail`: how it ended, if that says more than the request; `step`: the last complete step; `saved`: the
    highest step in a checkpoint.
    """
    more = detail.removeprefix(request.detail).removeprefix("; ")
    done = f"stopped after step {step}" if step else "stopped before its first step"
    if code in _UNSAVED:
        done += " without saving"
    elif saved:
        done += ", saved" if saved == step else f"; saved up to step {saved}"
    who, what = _ASKED.get(request.source, (printable(request.detail), "asked the run to stop"))
    said = [printable(request.detail)] if request.source in _ASKED else []
    return Account(
        attempt=attempt,
        cause="",
        kind=STOP,
        who=who,
        what=what,
        why=[*said, _WHY[request.source], *([printable(more)] if more else [])],
        done=done,
        next=MEANINGS[ExitCode(code)][1] if code in set(ExitCode) else MEANINGS[ExitCode.FAILED][1],
        step=step,
        saved=saved,
        exit_code=code,
    )
