"""Who sent a signal: real processes that send real ones, and that a signal does what it did without it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import pwd
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.launch.context import LaunchSignals
from holdfast.process import senders as signal_senders
from holdfast.process.senders import CODE, Origin, SeenSender, from_whom, named, seen, take, watch
from holdfast.stop.signals import StopSignals
from kit.harness import await_child, wait_until
from kit.tiny import forked

LIMIT = 20.0
USED = signal.SIGUSR1
ME = pwd.getpwuid(os.getuid()).pw_name
HERE = pytest.mark.skipif(platform.machine() not in CODE, reason="the sender is not known on this processor")


def alone(work: Callable[[], None]) -> None:
    """In a process of its own: a signal's handler stays with a process."""
    code = forked(work, 2 * LIMIT)
    assert code == 0, f"ended with {code}"


def counted() -> list[int]:
    """Take the signal; what is returned has an entry for each time that the handler ran."""
    ran: list[int] = []
    signal.signal(USED, lambda number, frame: ran.append(number))
    assert watch(USED), signal_senders._unfit
    return ran


def sent_by(*command: str) -> subprocess.Popen[bytes]:
    """A process that runs this in a shell, with this one's id as `$1`, and then lives on."""
    line = "; ".join([*command, "read end"])
    return subprocess.Popen(["sh", "-c", line, "sender", str(os.getpid())], stdin=subprocess.PIPE)


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate(b"\n", LIMIT)


@HERE
def test_a_living_sender_is_named_with_its_user() -> None:
    def work() -> None:
        ran = counted()
        sender = sent_by("kill -USR1 $1")
        wait_until(lambda: ran, LIMIT, "the signal")
        found = seen(take(USED))
        assert found is not None
        assert found.origin == Origin(0, sender.pid, os.getuid())
        assert named(USED, found) == f"sh (pid {sender.pid}, {ME})"
        assert named(USED, found, sender.pid) == f"its own launcher (pid {sender.pid})"
        end(sender)
        assert ran == [USED]

    alone(work)


@HERE
def test_a_sender_that_has_ended_by_then_is_told_by_its_number_and_user() -> None:
    def work() -> None:
        ran = counted()
        child = subprocess.Popen(["kill", "-USR1", str(os.getpid())])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        wait_until(lambda: ran, LIMIT, "the signal")
        origin = take(USED)
        assert named(USED, seen(origin)) == f"kill (pid {child.pid}, {ME}, which has ended)"
        child.wait(LIMIT)
        assert named(USED, seen(origin)) == f"process {child.pid} of user {ME} (which has ended)"

    alone(work)


@HERE
@pytest.mark.parametrize(
    "send",
    [
        lambda: os.kill(os.getpid(), USED),
        lambda: signal.raise_signal(USED),
        lambda: signal.pthread_kill(threading.main_thread().ident or 0, USED),
    ],
    ids=["kill", "raise", "to a thread"],
)
def test_one_from_within_the_process_is_told_as_such(send: Callable[[], None]) -> None:
    def work() -> None:
        ran = counted()
        send()
        wait_until(lambda: ran, LIMIT, "the signal")
        assert named(USED, seen(take(USED))) == "this process itself"

    alone(work)


@HERE
def test_one_that_another_thread_gets_is_told_as_well() -> None:
    """The kernel may give a process's signal to any of its threads."""

    def work() -> None:
        ran = counted()
        gone = threading.Event()
        other = threading.Thread(target=gone.wait, args=(LIMIT,))
        other.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [USED])
        sender = sent_by("kill -USR1 $1")
        wait_until(lambda: ran, LIMIT, "the signal")
        assert named(USED, seen(take(USED))).startswith("sh (pid")
        gone.set()
        other.join()
        end(sender)

    alone(work)


@HERE
def test_of_many_in_a_row_the_first_is_told_until_it_is_taken() -> None:
    def work() -> None:
        ran = counted()
        first = sent_by("kill -USR1 $1")
        wait_until(lambda: ran, LIMIT, "the first signal")
        for _ in range(50):
            os.kill(os.getpid(), USED)
        wait_until(lambda: len(ran) > 1, LIMIT, "more of them")
        found = take(USED)
        assert found is not None
        assert found.pid == first.pid
        assert take(USED) is None
        os.kill(os.getpid(), USED)
        found = take(USED)
        assert found is not None
        assert found.pid == os.getpid()
        end(first)

    alone(work)


@HERE
@pytest.mark.parametrize("restart", [False, True], ids=["interrupted", "restarted by the kernel"])
def test_a_blocking_call_goes_on_after_the_signal(restart: bool) -> None:
    """PEP 475: Python tries again what a signal has interrupted, once the handler has run."""

    def work() -> None:
        readable, writable = os.pipe()
        ran: list[int] = []

        def heard(number: int, frame: object) -> None:
            ran.append(number)
            if not restart:
                os.write(writable, b"after")

        signal.signal(USED, heard)
        if restart:  # Python's handler runs when the call is over, and the kernel begins that again
            signal.siginterrupt(USED, False)
        assert watch(USED)
        said = f"printf after > /proc/self/fd/{writable}" if restart else ":"
        line = f"kill -USR1 $1; {said}; read end"
        command = ["sh", "-c", line, "sender", str(os.getpid())]
        sender = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writable])
        assert os.read(readable, 5) == b"after"
        wait_until(lambda: ran, LIMIT, "the handler")
        assert ran == [USED]
        assert named(USED, seen(take(USED))) == f"sh (pid {sender.pid}, {ME})"
        end(sender)

    alone(work)


@HERE
def test_a_forked_child_writes_nothing_into_its_parents_slot() -> None:
    def work() -> None:
        ran = counted()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), USED)
            found = take(USED)
            os._exit(0 if found is not None and found.pid == os.getpid() and ran else 1)
        assert await_child(child, LIMIT) == 0
        assert take(USED) is None
        assert ran == []

    alone(work)


@HERE
def test_whoever_takes_the_signal_later_replaces_it() -> None:
    def work() -> None:
        before = _action(USED)
        counted()
        native = signal_senders._native
        assert native is not None
        ours = _action(USED)[0]
        assert native.knows(ours)
        own: list[int] = []
        signal.signal(USED, lambda number, frame: own.append(number))
        assert not native.knows(_action(USED)[0])
        os.kill(os.getpid(), USED)
        assert own == [USED]
        assert take(USED) is None
        signal.signal(USED, signal.SIG_DFL)
        assert _action(USED)[0] == before[0] == 0
        assert watch(USED) is False
        signal.signal(USED, signal.SIG_IGN)
        assert watch(USED) is False
        assert _action(USED)[0] == 1

    alone(work)


def _action(number: int) -> tuple[int, int, int]:
    found = signal_senders._get_native().action(number)
    return found.handler, found.mask[0], found.flags & ~signal_senders._SA_RESTORER


@HERE
def test_flags_and_mask_of_the_handler_are_kept() -> None:
    def work() -> None:
        signal.signal(USED, lambda number, frame: None)
        signal.siginterrupt(USED, False)
        native = signal_senders._get_native()
        action = native.action(USED)
        action.mask[0] = 1 << (signal.SIGUSR2 - 1)
        assert native.set(USED, action)
        before = _action(USED)
        assert watch(USED)
        after = _action(USED)
        assert after[1:] == (before[1], before[2] | signal_senders._SA_SIGINFO)
        assert after[0] != before[0]

    alone(work)


@HERE
def test_what_is_executable_is_never_writable() -> None:
    def work() -> None:
        counted()
        ours = _action(USED)[0]
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, permissions = line.split()[:2]
            low, high = (int(one, 16) for one in span.split("-"))
            if low <= ours < high:
                assert permissions == "r-xp"
                return
        raise AssertionError("it is not mapped")

    alone(work)


@HERE
def test_a_handler_that_calls_it_without_the_kernels_words_does_no_harm() -> None:
    """Somebody's own C handler, put before it, that hands on nothing but the number."""

    def work() -> None:
        ran = counted()
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)(_action(USED)[0])
        handler(int(USED), 0xDEAD0000DEAD, 8)
        wait_until(lambda: ran, LIMIT, "Python's handler")
        assert take(USED) is None

    alone(work)


@HERE
def test_ten_thousand_signals_under_load() -> None:
    """From two processes, while threads allocate, hash, and start and end others."""

    def work() -> None:
        ran = counted()
        over = threading.Event()

        def busy() -> None:
            while not over.is_set():
                hashlib.sha256(bytes(200_000)).digest()
                [str(n) for n in range(2000)]
                thread = threading.Thread(target=int)
                thread.start()
                thread.join()

        threads = [threading.Thread(target=busy) for _ in range(4)]
        for thread in threads:
            thread.start()
        code = "import os, signal, sys\nfor _ in range(5000): os.kill(int(sys.argv[1]), signal.SIGUSR1)"
        senders = [subprocess.Popen([sys.executable, "-c", code, str(os.getpid())]) for _ in range(2)]
        pids, taken = {sender.pid for sender in senders}, 0
        deadline = time.monotonic() + LIMIT
        while any(sender.poll() is None for sender in senders):
            assert time.monotonic() < deadline
            found = take(USED)
            if found is not None:
                taken += 1
                assert found.pid in pids
                assert (found.code, found.uid) == (0, os.getuid())
        over.set()
        for thread in threads:
            thread.join()
        assert [sender.returncode for sender in senders] == [0, 0]
        assert ran
        assert taken

    alone(work)


@HERE
def test_signals_until_the_interpreters_very_end() -> None:
    """SIGURG, which is ignored by default: whatever ends this process is not the signal as such."""
    script = (
        "import signal, threading\n"
        "from holdfast.process.senders import watch\n"
        "signal.signal(signal.SIGURG, lambda *_: None)\n"
        "assert watch(signal.SIGURG)\n"
        "print('there', flush=True)\n"
        "class Late:\n"
        "    def __del__(self): sum(range(300000))\n"
        "kept = [Late() for _ in range(20)]\n"
        "kept.append(kept)\n"
    )
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        deadline = time.monotonic() + LIMIT
        while child.poll() is None:
            assert time.monotonic() < deadline
            child.send_signal(signal.SIGURG)
        assert child.wait() == 0
        child.stdout.close()


# --- where it cannot be -------------------------------------------------------------------------------------


def test_on_another_processor_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_senders, "_native", None)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    alone(_works_without)


def test_where_memory_cannot_be_made_executable_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own refusal (PR_SET_MDWE), as a hardened service has it."""
    monkeypatch.setattr(signal_senders, "_native", None)

    def work() -> None:
        if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0:
            os._exit(77)
        _works_without()

    code = forked(work, LIMIT)
    if code == 77:
        pytest.skip("this kernel has no PR_SET_MDWE")
    assert code == 0


def _works_without() -> None:
    ran: list[int] = []
    signal.signal(USED, lambda number, frame: ran.append(number))
    assert watch(USED) is False
    os.kill(os.getpid(), USED)
    assert ran == [USED]
    assert take(USED) is None
    assert named(USED, seen(None)) == from_whom("") == ""


# --- in words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "origin", "words"),
    [
        (signal.SIGTERM, Origin(0, 0, 0), "a process outside this container"),
        (signal.SIGINT, Origin(0x80, 0, 0), "the terminal (a key was pressed)"),
        (signal.SIGHUP, Origin(0x80, 0, 0), "the terminal (it was closed)"),
        (signal.SIGTERM, Origin(0x80, 0, 0), "the kernel"),
        (signal.SIGALRM, Origin(-2, 7, 0), "a timer of this process"),
    ],
)
def test_senders_that_are_no_process_here(number: int, origin: Origin, words: str) -> None:
    assert named(number, seen(origin)) == words


def test_a_number_that_is_another_users_process_by_now_is_not_taken_for_the_sender() -> None:
    origin = Origin(0, os.getppid(), 54321)
    found = seen(origin)
    assert found == SeenSender(origin, "", True)
    assert named(USED, found) == f"process {os.getppid()} of uid 54321 (which has ended)"


def test_of_an_interpreter_the_script_is_named_and_nothing_that_was_given_to_it(tmp_path: Path) -> None:
    script = tmp_path / "nightly.py"
    script.write_text("print('there', flush=True); input()")
    process = subprocess.Popen(
        [sys.executable, str(script), "--password", "swordfish"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    told = named(USED, seen(Origin(0, process.pid, os.getuid())))
    process.communicate(b"\n", LIMIT)
    assert " nightly.py (pid" in told
    assert "swordfish" not in told


# --- where signals are taken --------------------------------------------------------------------------------


@HERE
def test_a_rank_and_a_launcher_know_who_asked_them() -> None:
    def rank() -> None:
        told: list[str] = []
        signals = StopSignals([signal.SIGTERM], lambda number: told.append(signals.sender(number)))
        signals.install()
        sender = sent_by("kill -TERM $1")
        wait_until(lambda: told, LIMIT, "the signal")
        assert told == [f"sh (pid {sender.pid}, {ME})"]
        end(sender)
        signals.close()
        native = signal_senders._native
        assert native is not None
        assert not native.knows(_action(signal.SIGTERM)[0])

    def launcher() -> None:
        signals = LaunchSignals("SIGTERM")
        signals.install()
        sender = sent_by("kill -TERM $1")
        wait_until(lambda: signals.received, LIMIT, "the signal")
        end(sender)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.again is None
        assert signals.sender == f"sh (pid {sender.pid}, {ME})"

    alone(rank)
    alone(launcher)


@HERE
def test_a_directory_of_users_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_senders, "_user", lambda uid: select.select([], [], [], LIMIT)[0] or "late")
    began = time.monotonic()
    told = named(USED, SeenSender(Origin(0, 4242, 1000), "scancel", True))
    assert told == "scancel (pid 4242, uid 1000, which has ended)"
    assert time.monotonic() - began < LIMIT / 2
