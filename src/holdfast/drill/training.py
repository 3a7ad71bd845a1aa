"""A training run as a child process, watched through its journal.

Guarantee: every wait has a deadline, and leaving the `with` block ends the launcher; its workers end with it.
The launcher is tied to this process as workers are to their agent, so that nothing is left behind even if
this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.journal.events import Line
from holdfast.journal.reader import JournalReader
from holdfast.launch.orphan_guard import guarded
from holdfast.own_child import own_child

POLL = 0.02
STOP_GRACE = 5.0
LOG_TAIL = 12


class TrainingFailedError(HoldfastError):
    """A training run of the drill did not do what it had to; the message points to its log."""


class Training:
    """One `holdfast run`, alive, and what its journal said so far."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.log = log
        self.lines: list[Line] = []
        self._reader = JournalReader(run_dir / "journal")

    def poll(self) -> list[Line]:
        """Journal lines that are new."""
        fresh = self._reader.poll()
        self.lines.extend(fresh)
        return fresh

    def follow(
        self,
        until: Callable[[], bool],
        see: Callable[[Line], None],
        *,
        timeout: float,
        quiet: float,
        what: str,
    ) -> None:
        """Hand every new line to `see` until `until()`. At most `timeout` seconds, `quiet` without a line."""
        begun = heard = time.monotonic()
        while True:
            ended = (
                self.process.poll() is not None
            )  # asked first: what it wrote before it ended is still read
            for line in self.poll():
                heard = time.monotonic()
                see(line)
            if until():
                return
            now = time.monotonic()
            if ended:
                code = self.process.returncode
                raise TrainingFailedError(
                    f"the run ended with code {code} while waiting for {what}{self.tail()}"
                )
            if now - begun > timeout or now - heard > quiet:
                why = f"{timeout:g} s" if now - begun > timeout else f"{quiet:g} s without a word from it"
                raise TrainingFailedError(f"gave up waiting for {what} after {why}{self.tail()}")
            time.sleep(POLL)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def tail(self) -> str:
        """Where the log is, and its last lines."""
        try:
            last = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
        except OSError:
            last = []
        shown = "".join(f"\n    {line}" for line in last)
        where = f"\n  log:     {self.log}\n  journal: holdfast journal {self.run_dir}"
        return f"{where}\n  the log's last lines:{shown or ' none'}"

    def end(self) -> None:
        """Stop the launcher, politely for a moment, then not."""
        for number, grace in ((signal.SIGTERM, STOP_GRACE), (signal.SIGKILL, STOP_GRACE)):
            if self.process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)


@contextlib.contextmanager
def training(
    script: Path, run_dir: Path, log: Path, *, ranks: int, settings: Sequence[str], arguments: Sequence[str]
) -> Iterator[Training]:
    """Train `script` on CPU ranks under `holdfast run`, its output in `log`; over when the block is left."""
    command = own_child("holdfast", "run", f"--nproc-per-node={ranks}", f"--run-dir={run_dir}")
    for setting in settings:
        command += ["--set", setting]
    command += [str(script), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            guarded(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the launcher
        )
    run = Training(process, run_dir, log)
    try:
        yield run
    finally:
        run.end()


def _environment() -> dict[str, str]:
    """Ours, without other launches' settings, and with one thread a rank: results depend on their number."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PET_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
