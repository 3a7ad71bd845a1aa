"""Events of a run and of its attempts: who may act, which workers train, and how each of it ended."""

from __future__ import annotations

import signal

from holdfast.base import Rendered, plural, printable
from holdfast.journal import Event


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
    """The lease is another launch's by now; whoever writes this stops acting."""

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

    def render(self) -> Rendered:
        where = f" on {plural(self.nodes, 'node')}" if self.nodes != 1 else ""
        under = f" under {printable(self.launcher)}" if self.launcher != "none" else ""
        return Rendered(f"attempt started: {plural(self.world_size, 'rank')}{where}{under}", "good")


class WorkersStarted(Event, tag="workers_started"):
    """The worker processes of one node run."""

    node: str
    pids: dict[int, int]
    """Global rank → process id."""
    master: str = ""
    kept: bool = False
    """Whether they are those of the attempt before, which go on in the same processes."""

    def render(self) -> Rendered:
        workers, node = plural(len(self.pids), "worker"), printable(self.node)
        text = f"{workers} of {node} go on" if self.kept else f"{workers} started on {node}"
        return Rendered(text, "plain")


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
    """Whether it ended with exit code 0 while others still ran: why they then failed, or just done first."""

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
    """Whose these are, as in a manifest: `job`, or empty for rank 0's."""

    def render(self) -> Rendered:
        counts = [plural(self.samples, "sample")] if self.samples else []
        counts += [plural(self.tokens, "token")] if self.tokens else []
        return Rendered(", ".join([f"run finished at step {self.step}", *counts]), "good")


class Warned(Event, tag="warned"):
    """Anything else worth knowing."""

    message: str

    def render(self) -> Rendered:
        return Rendered(printable(self.message), "warning")
