"""A child beside its process: started, spoken to, and ended within bounds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import holdfast
from holdfast.process.companion import (
    BESIDE,
    OUTLIVES,
    Companion,
    cores_beside,
    start_child,
    step_aside,
)
from holdfast.process.local_wire import Gone, Packets, Stream
from kit import tiny
from kit.harness import wait_until
from kit.nodes.local_tier import memory

ECHO = "import sys\nfrom holdfast.process import Gone, Packets\nline = Packets.at(int(sys.argv[1]), str)\n"


def starting(body: str) -> Callable[[int], subprocess.Popen[bytes]]:
    """Starts a child that does this with its end of the line."""

    def start(descriptor: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ECHO + body, str(descriptor)]
        return subprocess.Popen(command, pass_fds=[descriptor])

    return start


def test_it_is_spoken_to_and_ends_when_the_line_does() -> None:
    echo = "try:\n  while said := line.receive(30): line.send(said)\nexcept Gone: pass"
    child: Companion[Packets[str]] = Companion(starting(echo), Packets.pair(str))
    assert child.code is None
    assert child.line.send("one")
    assert child.line.receive(30) == "one"
    assert child.connected
    child.hang_up()
    assert not child.connected
    assert child.wait(30) == child.code == 0


def test_its_end_is_seen_in_the_line_after_what_it_said() -> None:
    child: Companion[Packets[str]] = Companion(starting("line.send('last'); sys.exit(3)"), Packets.pair(str))
    assert child.line.receive(30) == "last"
    with pytest.raises(Gone):
        child.line.receive(30)
    assert child.wait(30) == 3
    assert child.kill(0.0) == 3


def test_one_that_does_not_end_is_waited_for_no_longer_than_told() -> None:
    child: Companion[Packets[str]] = Companion(
        starting("line.send('here')\nwhile True: pass"), Packets.pair(str)
    )
    assert child.line.receive(30) == "here"
    began = time.monotonic()
    child.hang_up()
    assert child.wait(0.1) is None
    assert time.monotonic() - began < 20
    assert child.kill(30) == -signal.SIGKILL


def test_one_that_cannot_be_started_leaves_nothing_open() -> None:
    def start(descriptor: int) -> subprocess.Popen[bytes]:
        raise OSError("no room")

    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no room"):
        Companion(start, Stream.pair(str))
    assert os.listdir("/proc/self/fd") == before


def test_one_that_may_outlive_us_is_marked_apart_and_writes_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "made" / "log"
    child = start_child("holdfast.process.no_such_module", log=log, outlives=True)
    place = Path(f"/proc/{child.pid}/environ")
    wait_until(lambda: place.read_bytes() != b"", 30, "the kernel shows it, a moment after the exec")
    environment = place.read_bytes()
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    assert f"{OUTLIVES}=holdfast.process.no_such_module {os.getpid()}".encode() in environment
    assert child.wait(30) != 0
    assert "no_such_module" in log.read_text()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "ours are not blocked any longer"


# --- out of the trainer's way -------------------------------------------------------------------------------

SHOW = """
import os, psutil, sys
from holdfast.process import BESIDE, step_aside
before = psutil.Process().nice()
step_aside(BESIDE, threads=int(sys.argv[1]))
print(psutil.Process().nice() - before, psutil.Process().ionice().value, *sorted(os.sched_getaffinity(0)))
"""


def shown(*around: str, threads: int = 1, **environment: str) -> list[int]:
    """How nice a companion that stepped aside is beside its trainer (a shell, started by `around`), its
    storage level, and its cores."""
    # Not the last command: the shell would become it, and have no child.
    trainer = f'"{sys.executable}" -c "$0" {threads}; exit $?'
    command = [*around, "sh", "-c", trainer, SHOW]
    result = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=60
    )
    return [int(value) for value in result.stdout.split()]


def test_it_steps_aside_for_processors_and_storage() -> None:
    nice, storage, *cores = shown(LOCAL_WORLD_SIZE="1")
    assert nice == min(5, 19 - os.nice(0))
    assert storage == 5
    assert set(cores) == os.sched_getaffinity(0), "nobody is bound: no core is known to be spare"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_it_leaves_the_core_that_its_trainer_is_bound_to() -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    bound = ["taskset", "-c", str(first)]
    assert shown(*bound, LOCAL_WORLD_SIZE="1")[2:] == others
    assert set(shown(*bound, threads=64, LOCAL_WORLD_SIZE="1")[2:]) == {first, *others}, "too few for it"
    assert shown(*bound, LOCAL_WORLD_SIZE="2")[2:] == [first], "where the other rank is is not known"
    assert shown(*bound, LOCAL_WORLD_SIZE="")[2:] == [first]


def test_cores_of_other_trainers_are_not_spare() -> None:
    own, everything = {0, 1}, range(8)
    trainers = [{0, 1}, {2, 3}]
    assert cores_beside(own, everything, trainers, threads=2, ranks=2) == {4, 5, 6, 7}
    assert cores_beside(own, everything, trainers, threads=3, ranks=2) == {0, 1, 4, 5, 6, 7}
    assert cores_beside(own, everything, trainers, threads=1, ranks=3) == own, "one is not accounted for"
    assert cores_beside(own, everything, [{0, 1}, set(range(2, 8))], threads=1, ranks=2) == own


def test_what_the_kernel_refuses_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    for name in ("nice", "sched_setaffinity", "sched_getaffinity"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("psutil.Process.ionice", refuse)
    step_aside(BESIDE)


def test_those_beside_a_trainer_step_aside(tmp_path: Path) -> None:
    """The writer and the peer server, as a real run starts them."""
    own, found = os.nice(0), {}
    levels = {"writer_process": 5, "peer_process": 5}
    wanted = {name: min(19, own + level) for name, level in levels.items()}

    def niceness() -> dict[str, int]:
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                for name in levels:
                    if any(part.endswith(name) for part in process.cmdline()):
                        found[name] = process.nice()
        return found

    def look(step: int, run: holdfast.Run) -> None:
        if step == 4:
            with contextlib.suppress(AssertionError):
                wait_until(lambda: niceness() == wanted, 10, "all have stepped aside")

    settings = {"checkpoint_async_save": True, "checkpoint_non_persistent_ckpt_type": "local"}
    with memory() as where:
        tiny.train(
            tmp_path / "run", until=5, at_step=look, checkpoint_interval=2,
            checkpoint_non_persistent_local_ckpt_dir=str(where), **settings,
        )  # fmt: skip
    assert found == wanted
