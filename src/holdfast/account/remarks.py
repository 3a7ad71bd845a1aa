"""What a run met without failing: dropped steps, stops, slow ranks, refusals, missing copies. Pure.

None of these is a failure, but the owner of a run wants to know about each of them: a run whose page says
"no incident" has met none of them either. So each has the same answers as an incident, and its cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from holdfast.account.incidents import Incident
from holdfast.base import duration, plural, printable, size
from holdfast.checkpoint.format import parse_name
from holdfast.journal import JournalLine
from holdfast.journal.events import (
    STOP,
    Account,
    AttemptEnded,
    AttemptStarted,
    CopyDrained,
    DrainFailed,
    HealthFailed,
    Resumed,
    RungRejected,
    SaveCommitted,
    SaveFailed,
    StepRejected,
    StepsDone,
    StopAsked,
    StopForced,
    StopSaved,
    StragglerFound,
    StragglersReported,
)
from holdfast.policy import is_slow

NAMED = 5
"""How many steps are named one by one."""


@dataclass
class Remark:
    """One kind of thing that happened, once or often."""

    kind: str
    """dropped, stop, slow, refused, save, storage, copy, resized or unfit."""
    at: float
    """The first time."""
    what: str
    """The whole remark in one line."""
    next: str
    count: int = 1
    who: str = ""
    did: str = ""
    """What happened, as the end of a sentence that begins with `who`."""
    why: str = ""
    done: str = ""
    cost: str = ""
    seconds: float = 0.0
    """The time that it cost, as far as known."""
    attempt: int = 0


KINDS = {
    "dropped": "dropped step",
    "stop": "stop",
    "slow": "slow rank",
    "link": "slow link",
    "refused": "refused checkpoint",
    "save": "failed save",
    "storage": "slow save",
    "copy": "failed upload",
    "resized": "change of the number of ranks",
    "unfit": "node kept out",
}
"""What a remark of each kind is called."""


def counts_by_kind(remarks: Sequence[Remark]) -> list[tuple[int, str]]:
    """How many there were of each kind; the same slow rank, stop or checkpoint counts once."""
    counts: dict[str, int] = {}
    for remark in remarks:
        often = remark.count if remark.kind in ("dropped", "save", "storage", "copy") else 1
        counts[remark.kind] = counts.get(remark.kind, 0) + often
    return [(count, KINDS[kind]) for kind, count in counts.items() if kind in KINDS]


def answers_of(remark: Remark) -> list[tuple[str, str]]:
    """The five answers, in the same shape as those about an incident."""
    asked = [
        ("who", remark.who),
        ("what", remark.did or remark.what),
        ("why", remark.why),
        ("done", remark.done),
    ]
    asked += [("cost", remark.cost), ("next", remark.next)]
    return [(question, answer) for question, answer in asked if answer]


def remarks_of(lines: Sequence[JournalLine], incidents: Sequence[Incident] = ()) -> list[Remark]:
    """Everything of that sort, oldest first. `incidents`: refusals that these mention are not repeated."""
    refused = {text.partition(":")[0] for incident in incidents for text in incident.refused}
    kept: dict[tuple[str, str], Remark] = {}
    dropped: dict[int, StepRejected] = {}
    slow: dict[tuple[str, str], StragglerFound] = {}
    first_drop: JournalLine | None = None
    for index, line in enumerate(lines):
        body = line.body
        if isinstance(body, StepRejected) and body.then == "dropped":
            first_drop = first_drop or line
            dropped.setdefault(body.step, body)
            continue
        remark = _of(lines, index, refused)
        if remark is None:
            continue
        remark.attempt = line.attempt
        by = remark.what
        if isinstance(body, StragglerFound):
            by = remark.who
            slow[remark.kind, by] = body
        elif remark.kind == "stop":
            by = str(line.attempt)
        earlier = kept.setdefault((remark.kind, by), remark)
        if earlier is not remark:
            earlier.count += 1
            if isinstance(body, StragglerFound):  # the newest figures
                earlier.what, earlier.did, earlier.why = remark.what, remark.did, remark.why
    for one in kept.values():
        if one.kind == "copy":
            _say_which(one, lines)
    for key, body in slow.items():
        _add_up(kept[key], body, lines)
    if dropped and first_drop is not None:
        kept[("dropped", "")] = _dropped(dropped, first_drop, _usual_step(lines))
    for root, saves in _slow_saves(lines).items():
        kept[("storage", root)] = _slow_storage(root, saves, lines)
    return sorted(kept.values(), key=lambda remark: remark.at)


def _slow_saves(lines: Sequence[JournalLine]) -> dict[str, list[tuple[JournalLine, SaveCommitted]]]:
    """The slow saves, by the directory they were made in."""
    saves: dict[str, list[tuple[JournalLine, SaveCommitted]]] = {}
    for line in lines:
        if isinstance(line.body, SaveCommitted) and is_slow_save(line.body):
            saves.setdefault(line.body.root, []).append((line, line.body))
    return saves


def is_slow_save(body: SaveCommitted) -> bool:
    return bool(body.root) and is_slow(body.bytes, body.stored_seconds)


def slow_storage_advice(blocked: float) -> str:
    """What to do about it; `blocked`: how many seconds training stood still."""
    if blocked < 1:
        return "use faster storage for checkpoints if you want newer saves; training did not wait for it"
    return (
        "use faster storage for checkpoints, or set checkpoint.async_save = true: training then goes on "
        "during a save"
    )


def _slow_storage(
    root: str, saves: Sequence[tuple[JournalLine, SaveCommitted]], lines: Sequence[JournalLine]
) -> Remark:
    every = [line.body for line in lines if isinstance(line.body, SaveCommitted) and line.body.root == root]
    stored, taken = sum(one.bytes for _, one in saves), sum(one.stored_seconds for _, one in saves)
    blocked = sum(one.blocked_seconds for _, one in saves)
    who = f"the storage of {printable(root, 4096)}"
    did = f"took {duration(taken / len(saves))} on average to store a save of {size(stored // len(saves))}"
    slowest = duration(max(one.stored_seconds for _, one in saves))
    why = (
        f"writing and committing came to {size(int(stored / taken))} a second in {len(saves)} of "
        f"{plural(len(every), 'save')}; the slowest took {slowest}"
    )
    cost = f"training stood still for {duration(blocked)} in all" if blocked >= 1 else "training did not wait"
    return Remark(
        "storage",
        saves[0][0].at,
        f"{who} {did}: {why}; {cost}",
        slow_storage_advice(blocked),
        len(saves),
        who=who,
        did=did,
        why=why,
        done="only reported: these saves were committed and are sound, and the run went on",
        cost=cost,
        seconds=blocked,
        attempt=saves[0][0].attempt,
    )


def _usual_step(lines: Sequence[JournalLine]) -> float:
    taken = [second for line in lines if isinstance(line.body, StepsDone) for second in line.body.seconds]
    return median(taken) if taken else 0.0


def _dropped(dropped: dict[int, StepRejected], line: JournalLine, usual: float) -> Remark:
    steps = sorted(dropped)
    named = ", ".join(map(str, steps[:NAMED])) + (
        f" and {len(steps) - NAMED} more" if len(steps) > NAMED else ""
    )
    first = dropped[steps[0]]
    why = _why_dropped(first)
    done = f"{plural(len(steps), 'step')} dropped ({named}), as the result must not be used"
    ranks = sorted({rank for one in dropped.values() for rank in one.ranks})
    seconds = usual * len(steps)
    lost = f", about {duration(seconds)}" if seconds else ""
    return Remark(
        "dropped",
        line.at,
        f"{done}: {why}",
        _look_at(first, len(steps)),
        len(steps),
        who=_ranks(ranks),
        did=f"gave a result that is not usable in {'step' if len(steps) == 1 else 'steps'} {named}",
        why=why,
        done=f"{done}: the weights stayed as they were",
        cost=f"the work of {plural(len(steps), 'step')}{lost}",
        seconds=seconds,
        attempt=line.attempt,
    )


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}" if ranks else "the job"


def _why_dropped(body: StepRejected) -> str:
    why = "; ".join(printable(reason) for reason in body.reasons[:2]) or "its result was bad"
    return f"{printable(body.batch)}: {why}" if body.batch else why


def _look_at(body: StepRejected, steps: int) -> str:
    which = "those batches" if steps > 1 else "that batch"
    if steps == 1 and body.batch:
        which = printable(body.batch)
    return (
        f"look at {which}; if more steps are dropped, validation.rerun_mode = validate_results tells whether "
        "the data, the state or a device is at fault"
    )


def drop_text(body: StepRejected) -> str:
    """What to print when a step is dropped."""
    often = f", the {ordinal(body.in_a_row)} in a row" if body.in_a_row > 1 else ""
    lines = [
        f"{_ranks(body.ranks)} gave a result that is not usable in step {body.step}{often}",
        f"why:  {_why_dropped(body)}",
        f"done: step {body.step} is dropped on all ranks: the weights stay as they were",
        f"next: {_look_at(body, 1)}",
    ]
    return "\n  ".join(lines)


def ordinal(number: int) -> str:
    """2nd, 3rd, 11th."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def resize_text(body: Resumed) -> str:
    """What changed by going on with another number of ranks; empty if the number is the same."""
    was, now = body.saved_by, body.world_size
    if not was or not now or was == now:
        return ""
    return (
        f"went on from step {body.step} with {plural(now, 'rank')}, where {was} had saved: models and "
        "optimizers were resharded, the counts of samples and tokens shared out, and the data goes on where "
        "it was; random generators are seeded anew on each rank, so dropout and the like differ from now on"
    )


def _of(lines: Sequence[JournalLine], index: int, told: set[str]) -> Remark | None:
    line = lines[index]
    body = line.body
    match body:
        case StopAsked():
            return _stop(body, line, lines[index:])
        case StragglerFound():
            return _slow(body, line)
        case Resumed() if text := resize_text(body):
            return Remark(
                "resized", line.at, text, "nothing to do, if that many ranks are what you want",
                who="the run", did=text, why="it was started with another number of ranks", done="it went on",
                cost="no time",
            )  # fmt: skip
        case RungRejected() if body.checkpoint not in told:
            return _refused(body, line, lines[index:])
        case SaveFailed():
            why = printable(body.error)
            full = any(sign in body.error for sign in _FULL)
            next_ = "free space there" if full else "look at the checkpoint root's space and permissions"
            return Remark(
                "save", line.at, f"a save failed: {why}", next_, who="a save", did="failed", why=why,
                done="training went on without it", cost="a fault before the next save costs more steps",
            )  # fmt: skip
        case HealthFailed() if body.kept_out:
            return _kept_out(body, line)
        case DrainFailed():
            why, where = printable(body.error), printable(body.remote)
            text = f"the copy to {where} could not be made: {why}"
            return Remark(
                "copy", line.at, text, f"look at {where} (checkpoint.remote_root)",
                who=f"the copy to {where}", did="could not be made", why=why,
                done="training went on; nothing is lost", cost="no time",
            )  # fmt: skip
        case _:
            return None


_FULL = ("No space left on device", "Disk quota exceeded")
"""Texts by which an error says that there is no space."""


def _kept_out(body: HealthFailed, line: JournalLine) -> Remark:
    """A node that was kept from taking part by its health checks."""
    who, why = f"node {printable(body.node)}", "; ".join(printable(text) for text in body.problems)
    return Remark(
        "unfit", line.at, f"{who} did not take part: its health checks failed: {why}",
        "mend what failed, then run the same command; `holdfast doctor` shows every check, and "
        "health.gate = 'warn' lets the node take part nevertheless",
        who=who, did="did not take part: its health checks failed", why=why,
        done="kept out before anything was started on it", cost="no step, and nothing is lost",
    )  # fmt: skip


def _say_which(remark: Remark, lines: Sequence[JournalLine]) -> None:
    """For failed copies: say which checkpoints they were of, and whether they were made later after all."""
    failed: dict[str, int] = {}
    for line in lines:
        body = line.body
        if isinstance(body, DrainFailed) and remark.who.endswith(printable(body.remote)):
            failed[body.checkpoint] = body.step
        elif isinstance(body, CopyDrained):
            failed.pop(body.checkpoint, None)
    if not failed:
        remark.done, remark.next = "it was made later", "nothing to do"
        return
    steps = sorted(failed.values())
    named = ", ".join(map(str, steps[-NAMED:]))
    of = f"of the checkpoint at step {named}" if len(steps) == 1 else f"of {len(steps)} checkpoints"
    if len(steps) > 1:
        of += f" (steps {named})" if len(steps) <= NAMED else f" (the newest: steps {named})"
    remark.did = f"could not be made {of}"
    remark.what = f"{remark.who} {remark.did}: {remark.why}"
    it = "it lies" if len(steps) == 1 else "they lie"
    remark.done = f"training went on; nothing is lost: {it} in the checkpoint root"
    remark.next = f"{remark.next}; the next start copies what is missing"


_ASKED_BY = {
    "signal": "a signal reached the run",
    "stop_file": "somebody made the stop file",
    "operator": "somebody asked for it with `holdfast control`",
    "time_limit": "the time of the job was nearly over",
    "straggler": "a slow rank was found, and the settings say to stop then",
}


def _stop(body: StopAsked, line: JournalLine, after: Sequence[JournalLine]) -> Remark:
    own = [one for one in after if one.attempt == line.attempt]
    saved = next((one.body for one in own if isinstance(one.body, StopSaved)), None)
    forced = next((one.body for one in own if isinstance(one.body, StopForced)), None)
    ended = next((one.at for one in own if isinstance(one.body, AttemptEnded)), None)
    started = (one for one in after if isinstance(one.body, AttemptStarted) and one.attempt > line.attempt)
    again = next((one.at for one in started), None)
    done = "the ranks save and stop"
    if saved is not None:
        done = f"stopped after step {saved.step}, saved"
    elif forced is not None:
        done = f"ended without saving: {printable(forced.why)}"
    elif ended is not None:
        done = "stopped"
    begun = ended if ended is not None else line.at
    down = max(0.0, again - begun) if again is not None else 0.0
    ending = max(0.0, begun - line.at)
    cost = f"{duration(ending)} to save and stop, " if ended is not None else ""
    cost += f"{duration(down)} until it was started again" if again is not None else "not started again yet"
    who, did, why = (
        printable(body.detail),
        "asked the run to stop",
        _ASKED_BY.get(body.source, "it was asked to"),
    )
    next_ = "run the same command to go on"
    account = next((one.body for one in own if isinstance(one.body, Account) and one.body.kind == STOP), None)
    if account is not None:  # the launcher's own words; without a launcher there is no account
        who, did, done, next_ = (
            printable(text) for text in (account.who, account.what, account.done, account.next)
        )
        why = printable(account.why[0]) if account.why else why
    return Remark(
        "stop",
        line.at,
        f"{who} {did}: {done}",
        "nothing to do: it was started again" if again is not None else next_,
        who=who,
        did=did,
        why=why,
        done=done,
        cost=cost,
        seconds=ending + down,
    )


def _slow(body: StragglerFound, line: JournalLine) -> Remark:
    link = body.kind == "link"
    named = f"rank {body.rank} on {body.node}" if body.rank is not None else f"node {body.node}"
    if link:
        ranks = ", ".join(map(str, body.ranks))
        named = f"the links of rank {ranks}" if len(body.ranks) == 1 else f"the link between ranks {ranks}"
    who, why = printable(named), printable(body.why)
    each = f", {duration(body.seconds)} of every step" if body.seconds else ""
    done = {
        "stop": "the run saves and stops, as the settings say",
        "exclude": "the run goes on without it, as the settings say",
    }.get(body.then, "only reported: the run went on with it")
    whom = "its ranks" if link else "the others"
    return Remark(
        "link" if link else "slow",
        line.at,
        f"{who} slowed {whom}{each}: {why}",
        "look at the network there; no setting makes the run act by itself"
        if link
        else "look at that device or node; straggler.stop_if_detected = true makes the run act by itself",
        who=who,
        did=f"slowed {whom}{each}",
        why=why,
        done=done,
    )


def _add_up(remark: Remark, body: StragglerFound, lines: Sequence[JournalLine]) -> None:
    remark.seconds = _waited_for(body, lines)
    each = f"{duration(body.seconds)} of every step" if body.seconds else ""
    whom = "its ranks" if body.kind == "link" else "the others"
    remark.cost = f"{whom} waited {duration(remark.seconds)} for it in all" if remark.seconds else each


def _waited_for(body: StragglerFound, lines: Sequence[JournalLine]) -> float:
    """How long the others waited for it in all, as every comparison measured it: how much later than most it
    arrived in an average step, times the steps."""
    total = sum(
        line.body.behind(body.rank, body.node)
        for line in lines
        if isinstance(line.body, StragglersReported) and body.kind != "link"
    )
    return total or body.seconds * max(
        (one.body.steps for one in lines if isinstance(one.body, StragglersReported)), default=0
    )


def _refused(body: RungRejected, line: JournalLine, after: Sequence[JournalLine]) -> Remark:
    name = parse_name(body.checkpoint)
    which = f"the checkpoint at step {name.step}" if name else printable(body.checkpoint)
    why = "; ".join(printable(reason) for reason in body.reasons[:2])
    resumed = next(
        (one.body for one in after if isinstance(one.body, Resumed) and one.attempt == line.attempt), None
    )
    done, cost = "nothing was resumed from yet", ""
    if resumed is not None:
        done = f"resumed from step {resumed.step}" if resumed.checkpoint else "began anew"
        older = name.step - resumed.step if name is not None else 0
        cost = f"{plural(older, 'step')} done again" if older > 0 else "no step lost"
    return Remark(
        "refused",
        line.at,
        f"{which} was refused: {why}",
        "nothing to do: an older one was used"
        if resumed is not None and resumed.checkpoint
        else "look at it with `holdfast ckpt verify`",
        who=which,
        did="was refused",
        why=why,
        done=done,
        cost=cost,
    )
