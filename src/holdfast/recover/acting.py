"""What `holdfast recover` does, once it may: drains nodes, and runs the command with its signals passed on.

Guarantee: nothing here is called without a person's word (`--yes`, or an answer). A node is kept out of the
run durably before the scheduler is asked to drain it, so that the run does without it whatever comes of that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from holdfast.control import operator
from holdfast.control.directory import ControlDirectory
from holdfast.errors import HoldfastError, UsageError
from holdfast.policy.readiness import Drain
from holdfast.recover import scheduler
from holdfast.recover.report import Action, Command

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def drain(control: ControlDirectory, drains: Sequence[Drain], by: str) -> list[Action]:
    """Take nodes out of the run, and out of service where there is a scheduler."""
    done: list[Action] = []
    for one in drains:
        reason = f"holdfast recover: {one.reason}"
        try:
            operator.exclude(control, one.node, one.device, reason, by)
        except HoldfastError as error:
            done.append(Action(what=f"exclude {one.describe()}", done=False, result=str(error)))
            continue
        done.append(Action(what=f"exclude {one.describe()} from the run", done=True, result=one.reason))
        if one.device is None and (asked := scheduler.drain(one.node, reason)) is not None:
            done.append(asked)
    return done


class Started:
    """The command, as a child in a process group of its own: the terminal's signals reach it once, by us."""

    def __init__(self, command: Command, *, to_stderr: bool, extra: Mapping[str, str] | None = None) -> None:
        """`to_stderr`: what it prints must not mix with what we print; `extra`: variables that it gets."""
        out = sys.stderr.fileno() if to_stderr else None
        try:
            self._process = subprocess.Popen(
                command.argv,
                cwd=command.directory,
                stdout=out,
                process_group=0,
                env={**os.environ, **(extra or {})},
            )
        except OSError as error:
            raise UsageError(
                f"cannot run {command.argv[0]} in {command.directory}: {error.strerror or error}. "
                "Give the command after `--`"
            ) from error

    def poll(self) -> int | None:
        """Its exit code as a shell has it; None while it runs."""
        code = self._process.poll()
        return None if code is None else code if code >= 0 else 128 - code

    def wait(self, seconds: float) -> None:
        """Until it has ended, or so long."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    @contextmanager
    def passing_on(self) -> Iterator[None]:
        """Within, what is sent to this process goes to the command."""

        def hand_on(number: int, frame: object) -> None:
            del frame
            self._process.send_signal(number)

        before = {number: signal.signal(number, hand_on) for number in PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
