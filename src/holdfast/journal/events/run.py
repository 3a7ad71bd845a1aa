"""Events of a run: who may act, which workers train, restarts in place, stops, and how each attempt ended."""

from __future__ import annotations

import signal

import msgspec

from holdfast.base import Rendered, duration, plural, printable
from holdfast.journal import Event, because


class RunCreated(Event, tag="run_created"):
    """The run exists: its directory was made."""

    run: str
    checkpoint_root: str

    def render(self) -> Rendered:
        text = f"run {printable(self.run)} created; checkpoints in {printable(self.checkpoint_root)}"
        return Rendered(text, "plain")


class LeaseClaimed(Event, tag="lease_claimed"):
    """A launch claimed the lease: from here on only it may act on the run."""

    epoch: int
    owner: str
    """Launch id of the claimant."""
    evidence: str
    """Why the claim was allowed: first claim, released, holder dead, lapsed, same launch."""

    def render(self) -> Rendered:
        return Rendered(f"lease claimed, epoch {self.epoch}: {printable(self.evidence)}", "plain")


class LeaseLost(Event, tag="lease_lost"):
    """The lease now belongs to another launch; the launch that writes this stops acting."""

    epoch: int
    evidence: str

    def render(self) -> Rendered:
        return Rendered(f"lease lost, epoch {self.epoch}: {printable(self.evidence)}", "fault")


class AttemptStarted(Event, tag="attempt_started"):
    """A group of ranks begins to train."""

    epoch: int
    world_size: int
    nodes: int = 1
    launcher: str = "none"
    """`holdfast run`, `torchrun` or `none`."""
    torch: str = ""
    launched: float = 0.0
    """When the launch that this attempt belongs to began, in seconds since 1970; 0 if that is not known."""
    paused: float = 0.0
    """Seconds for which an operator had held it up."""

    def render(self) -> Rendered:
        where = f" on {plural(self.nodes, 'node')}" if self.nodes != 1 else ""
        under = f" under {printable(self.launcher)}" if self.launcher != "none" else ""
        return Rendered(f"attempt started: {plural(self.world_size, 'rank')}{where}{under}", "good")


class WorkersStarted(Event, tag="workers_started"):
    """The worker processes of one node are running."""

    node: str
    pids: dict[int, int]
    """Global rank → process id."""
    master: str = ""
    kept: bool = False
    """Whether they are the processes of the attempt before, which go on."""

    def render(self) -> Rendered:
        workers, node = plural(len(self.pids), "worker"), printable(self.node)
        text = f"{workers} of {node} go on" if self.kept else f"{workers} started on {node}"
        return Rendered(text, "plain")


class LoadTimes(msgspec.Struct, frozen=True):
    """How long each part of a load took rank 0, in seconds: of parts that ran side by side, the share."""

    read: float = 0.0
    digest: float = 0.0
    copy: float = 0.0
    check: float = 0.0
    """Looking again at what came to lie in the live tensors."""
    bytes: int = 0


class RankStarted(Event, tag="rank_started"):
    """Rank 0 is ready for its first step, and how it got there: in seconds since 1970, 0 if not known."""

    process: float
    """When its process began; in a restart in place, long before this attempt."""
    torch: float
    """When torch had been imported."""
    importing: float
    """When the import of Holdfast's own modules began, which may be much later."""
    imported: float
    """When they had been imported."""
    start: float
    """When the script called `run.start()`, or began its loop."""
    search: float
    """When this rank was part of the attempt, and the search for a checkpoint began."""
    loaded: float
    """When the state was in place."""
    load: LoadTimes | None = None
    """What the load consisted of, if it was measured."""
    imports: dict[str, float] = msgspec.field(default_factory=dict)
    """What else took long to import after torch, in seconds: `--preload` could spare restarts that."""

    def render(self) -> Rendered:
        took = f"{duration(max(0.0, self.loaded - self.start))} after the script had got ready"
        return Rendered(f"the state is in place, {took}", "plain")


class WorkerFailed(Event, tag="worker_failed"):
    """How one worker ended, and what it left behind: message, error file, section."""

    rank: int
    node: str
    pid: int
    exit_code: int
    """As from waitpid: negative for a signal."""
    signal: str = ""
    message: str = ""
    error_file: str = ""
    section: str = ""
    left: bool = False
    """Whether it ended with exit code 0 while others still ran: it is why they failed, or was done first."""
    at: float = 0.0
    """When it failed, as far as that is known, in seconds since 1970; the line may be written later."""

    def render(self) -> Rendered:
        details = [f"last section: {printable(self.section)}"] if self.section else []
        if self.error_file:
            details.append(f"error file: {printable(self.error_file)}")
        return Rendered(self.summary(), "fault", details)

    def summary(self) -> str:
        """How it ended: "rank 1 killed by SIGKILL", "rank 0 exited with code 1: ValueError: …"."""
        if self.exit_code < 0 or self.signal:
            named = self.signal if self.signal.startswith("SIG") else f"signal {-self.exit_code}"
            text = f"rank {self.rank} killed by {named}"
        elif self.left:
            text = f"rank {self.rank} left with exit code 0 while others still ran"
        else:
            text = f"rank {self.rank} exited with code {self.exit_code}"
        return printable(f"{text}: {self.message}" if self.message else text)


class AttemptEnded(Event, tag="attempt_ended"):
    """The group has ended, and how."""

    outcome: str
    """finished, failed, stopped, lost."""
    exit_code: int = 0
    last_step: int = 0
    noticed: float = 0.0
    """When the leading agent learned what ended it, in seconds since 1970; 0 if that is not known."""
    stopped: float = 0.0
    """When it knew that all workers were gone."""

    def render(self) -> Rendered:
        code = f", {_exit(self.exit_code)}" if self.exit_code else ""
        step = f", last step {self.last_step}" if self.last_step else ""
        style = {"finished": "good", "stopped": "warning"}.get(self.outcome, "fault")
        return Rendered(f"attempt {printable(self.outcome)}{code}{step}", style)


def _exit(code: int) -> str:
    """An exit code as from waitpid, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class RunFinished(Event, tag="run_finished"):
    """The last step is done."""

    step: int
    samples: int
    tokens: int
    counts: str = ""
    """Whose counts these are, as in a manifest: `job`, or empty for rank 0's."""

    def render(self) -> Rendered:
        counts = [plural(self.samples, "sample")] if self.samples else []
        counts += [plural(self.tokens, "token")] if self.tokens else []
        return Rendered(", ".join([f"run finished at step {self.step}", *counts]), "good")


class Warned(Event, tag="warned"):
    """Anything else worth knowing."""

    message: str

    def render(self) -> Rendered:
        return Rendered(printable(self.message), "warning")


# --- a restart in the same processes ------------------------------------------------------------------------

_BEFELL = {
    "exception": "raised",
    "lost": "ended",
    "soft_timeout": "stood still",
    "hard_timeout": "was ended by its keeper",
    "silent": "was lost with its node",
    "late": "did not come to the barrier",
    "unfit": "is not fit to go on",
    "asked": "asked for a restart",
}


class RestartFaulted(Event, tag="restart_faulted"):
    """What ended an iteration of a restartable function, or happened to a process in it."""

    iteration: int
    member: int
    """The process, by the rank that it was started with; -1 if it is not known which."""
    kind: str
    """exception, lost, soft_timeout, hard_timeout, silent, late, unfit or asked."""
    rank: int | None = None
    """The rank that it trained under; None for a reserve."""
    node: str = ""
    detail: str = ""
    step: int = 0
    """The last step that it completed, as far as known."""
    at: float = 0.0
    """When, in seconds since 1970; the line may be written later."""
    ended: int = 0
    """The attempt that this ended; 0 if it is not known to have ended one."""

    def render(self) -> Rendered:
        details = [f"after step {self.step}"] if self.step else []
        return Rendered(self.summary(), "fault", details)

    def summary(self) -> str:
        """What happened to whom: "rank 1 on a raised: ValueError: bad sample"."""
        reserve = f"reserve {self.member}" if self.member >= 0 else "a process"
        who = reserve if self.rank is None else f"rank {self.rank}"
        where = f" on {self.node}" if self.node else ""
        text = f"{who}{where} {_BEFELL.get(self.kind, self.kind)}"
        return printable(f"{text}: {self.detail}" if self.detail else text)


class RestartPlanned(Event, tag="restart_planned"):
    """Another iteration follows: who takes part in it, and why."""

    iteration: int
    world_size: int
    order: list[int] = msgspec.field(default_factory=list)
    """Processes by rank; empty if all train under the rank that they were started with."""
    reserves: list[int] = msgspec.field(default_factory=list)
    promoted: list[int] = msgspec.field(default_factory=list)
    """Processes that were reserves before."""
    reason: str = ""
    seconds: float = 0.0
    """From the first fault to the plan."""
    ended: int = 0
    """The attempt that the previous iteration was, if it was one."""

    def render(self) -> Rendered:
        text = f"restart in place: iteration {self.iteration} with {plural(self.world_size, 'rank')}"
        text += f" and {plural(len(self.reserves), 'reserve')}" if self.reserves else ""
        text += f", planned {duration(self.seconds)} after the fault" if self.seconds else ""
        details = because([self.reason]) if self.reason else []
        if self.promoted:
            details.append(f"promoted: {', '.join(map(self._place, self.promoted))}")
        return Rendered(text, "decision", details)

    def _place(self, member: int) -> str:
        rank = self.order.index(member) if member in self.order else member
        return f"process {member} as rank {rank}"


class RestartHandedOver(Event, tag="restart_handed_over"):
    """No further iteration follows in these processes; whoever started them decides what happens next."""

    iteration: int
    """The last iteration."""
    reason: str
    exit_code: int
    """The code that the processes end with."""

    def render(self) -> Rendered:
        text = f"not restarted in place after iteration {self.iteration}: {printable(self.reason)}"
        return Rendered(text, "fault", [f"the processes end with code {self.exit_code}"])


class FunctionRestarted(Event, tag="function_restarted"):
    """The function starts again in this process."""

    iteration: int
    rank: int
    seconds: float
    """Since this process learned that the previous iteration had ended."""
    at: float = 0.0
    """When it learned who takes part now, in seconds since 1970; the line may be written later."""

    def render(self) -> Rendered:
        text = f"iteration {self.iteration} begins as rank {self.rank}"
        return Rendered(f"{text}, {duration(self.seconds)} after the last one ended", "good")


# --- a stop on request --------------------------------------------------------------------------------------


class StopAsked(Event, tag="stop_asked"):
    """Somebody or something asked the run to stop; from here on the deadline counts."""

    source: str
    """signal, stop_file, operator, time_limit or straggler."""
    detail: str
    """In words: which signal, who, why."""
    node: str = ""
    rank: int | None = None
    """The rank that saw it; None if no rank did."""
    seconds: float | None = None
    """Until the hard deadline; None if there is none."""
    sender: str = ""
    """Who sent the signal, as far as the kernel tells; empty if not known."""

    def render(self) -> Rendered:
        limit = "" if self.seconds is None else f"; {duration(self.seconds)} until the deadline"
        return Rendered(f"asked to stop: {printable(self.detail)}{limit}", "decision")


class StopHastened(Event, tag="stop_hastened"):
    """The scheduler will end the job sooner than was known when the stop was asked for."""

    seconds: float
    """Until the hard deadline as it is now."""
    why: str

    def render(self) -> Rendered:
        text = f"the stop must be over within {duration(self.seconds)}: {printable(self.why)}"
        return Rendered(text, "warning")


class StopAgreed(Event, tag="stop_agreed"):
    """All ranks know which step they stop after."""

    step: int
    after: float
    """Seconds since the stop was asked for."""

    def render(self) -> Rendered:
        text = f"all ranks stop after step {self.step} (agreed in {duration(self.after)})"
        return Rendered(text, "decision")


class StopSaved(Event, tag="stop_saved"):
    """The state of the last step is safe, and the ranks end."""

    step: int
    checkpoint: str = ""
    """The checkpoint that holds it; empty if there was nothing to save yet."""
    already: bool = False
    """Whether it had been saved before the stop was asked for."""
    seconds: float = 0.0
    """How long the save took."""
    after: float = 0.0
    """Seconds since the stop was asked for."""

    def render(self) -> Rendered:
        if not self.checkpoint:
            return Rendered(f"stopped at step {self.step}: there was nothing to save", "good")
        how = "was saved already" if self.already else f"saved in {duration(self.seconds)}"
        text = f"stopped after step {self.step}: {printable(self.checkpoint)} {how}"
        return Rendered(f"{text}, {duration(self.after)} after it was asked", "good")


class StopForced(Event, tag="stop_forced"):
    """A stop was not complete by the deadline, or was asked for again, so it was cut short."""

    why: str
    """It says so if the state was saved all the same."""
    rank: int | None = None
    stacks: str = ""
    """File with what every thread of the rank was doing."""

    def render(self) -> Rendered:
        whose = f"rank {self.rank}" if self.rank is not None else "the workers"
        details = [f"stacks: {printable(self.stacks)}"] if self.stacks else []
        return Rendered(f"{whose} ended by force: {printable(self.why)}", "fault", details)
