"""Tells people, by a command or a URL, that something happened to the run.

Guarantee: `send` returns at once and never raises, whatever the command or the server does. An alert is
given up after `DEADLINE` seconds; at most `MOST_A_MINUTE` are sent, and the next one says how many were left
out. An alert that was not delivered becomes a warning, in which only the URL's host is named: such URLs are
secrets. No command outlives the launcher, and nothing in a command's process group outlives the command.

However a launch ends for good, one alert of kind `stop` reports it (`ended`): from the node that led, or,
where each node finds out about the end for itself, from the first one to say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec
import xxhash

from holdfast.base import Bounded, make_dirs
from holdfast.config import LaunchSettings
from holdfast.errors import MEANINGS, NOT_ALERTED, ExitCode
from holdfast.process import guarded

DEADLINE = 10.0
"""Seconds for one alert, by command and URL together."""
MOST_A_MINUTE = 12
POLL = 0.02
SAME_END = 120.0
"""Several nodes that report the same end within this many seconds mean the same one."""
KILL_TIMEOUT = 2.0
"""Seconds for SIGKILL to take effect on a command."""
TEXT_LIMIT = 2000
"""Characters of a field that a command gets in a variable; its standard input has all of them."""

INCIDENT, STOP, EXCLUSION = "incident", "stop", "exclusion"
VARIABLES = ("kind", "run", "run_dir", "attempt", "text")
"""Fields that a command gets in its environment too: HOLDFAST_ALERT_KIND …"""


class Alerts:
    """Sends the alerts of one launcher, one after the other, from a thread of its own."""

    def __init__(
        self, settings: LaunchSettings, *, run: str, run_dir: Path, warn: Callable[[str], None]
    ) -> None:
        """`warn` journals what went wrong; it is called from another thread."""
        self._command = settings.alert_command
        self._url = settings.alert_url
        self._frame = {"run": run, "run_dir": str(run_dir)}
        self._warn = warn
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._sent: deque[float] = deque(maxlen=MOST_A_MINUTE)
        self._left_out = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._give_up = threading.Event()
        self._stopped = False

    def ended(self, code: int, why: str, attempt: int) -> None:
        """Report that the launch ends with this code, unless the run is not over or a stop was reported."""
        if code in NOT_ALERTED or self._stopped:
            return
        meaning = MEANINGS[ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED][0]
        text = " ".join(f"the run ended with code {code}: {why or meaning}".split())
        self.send(STOP, {"text": text, "attempt": attempt, "cause": "", "exit_code": code})

    def send(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Alert people. `payload` should have `text` (one line) and `attempt`."""
        self._stopped = self._stopped or kind == STOP
        if not self._command and not self._url:
            return
        try:
            self._enqueue(kind, payload)
        except Exception as error:  # noqa: BLE001 - no thread can be had, say: the launcher has other worries
            self._tell(f"the alert of kind {kind} was not delivered: {error!r}")

    def _enqueue(self, kind: str, payload: Mapping[str, Any]) -> None:
        with self._lock:
            now = time.monotonic()
            if self._closed:
                return
            if len(self._sent) == MOST_A_MINUTE and now - self._sent[0] < 60:
                self._left_out += 1
                return
            self._sent.append(now)
            alert = {"kind": kind, "at": time.time(), **self._frame, **payload, "left_out": self._left_out}
            self._left_out = 0
            self._queue.put(alert)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="holdfast-alerts", daemon=True)
                thread.start()
                self._thread = thread

    def close(self, timeout: float = DEADLINE) -> None:
        """Let what is under way end within `timeout` seconds; after that, give it up."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left_out, thread = self._left_out, self._thread
            self._queue.put(None)
        if left_out:
            self._tell(f"{left_out} alerts were left out: at most {MOST_A_MINUTE} are sent in a minute")
        if thread is not None:
            thread.join(timeout)
            self._give_up.set()
            thread.join(KILL_TIMEOUT)

    def _work(self) -> None:
        while (alert := self._queue.get()) is not None:
            try:
                for problem in self._deliver(alert):
                    self._tell(f"the alert of kind {alert['kind']} was not delivered: {problem}")
            except Exception as error:  # noqa: BLE001 - an alert must never end a launcher
                self._tell(f"the alert of kind {alert['kind']} was not delivered: {error!r}")
            if self._give_up.is_set():
                return

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self._warn(text)

    def _deliver(self, alert: dict[str, Any]) -> list[str]:
        """Deliver it; returns why it was not delivered, for the command and for the URL."""
        raw = _encode(alert)
        deadline = time.monotonic() + DEADLINE
        post = _Post(self._url, raw) if self._url else None
        problems: list[str] = []
        if self._command:
            problems.append(self._run(alert, raw, deadline))
        if post is not None:
            problems.append(post.outcome(deadline, self._give_up))
        return [problem for problem in problems if problem]

    def _run(self, alert: dict[str, Any], raw: bytes, deadline: float) -> str:
        environment = dict(os.environ)
        for name in VARIABLES:
            text = str(alert.get(name, "")).replace("\0", "").encode(errors="replace").decode()
            environment[f"HOLDFAST_ALERT_{name.upper()}"] = text[:TEXT_LIMIT]
        # Files, not pipes: neither a command that does not read nor one that writes a lot can block.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            given.write(raw)
            given.seek(0)
            process = subprocess.Popen(
                guarded(["/bin/sh", "-c", self._command]),
                stdin=given,
                stdout=said,
                stderr=said,
                env=environment,
                process_group=0,
            )
            ended = _await_end(process.pid, deadline, self._give_up)
            # Not reaped yet, so its process group's number cannot be anybody else's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_TIMEOUT)
            if not ended:
                return f"launch.alert_command did not end within {DEADLINE:g} s and was killed"
            if process.returncode != 0:
                return f"launch.alert_command ended with {process.returncode}{_last_words(said)}"
        return ""


def first_to_tell(folder: Path, end: str) -> bool:
    """Whether no node has just reported this end. When in doubt, it is reported twice rather than never."""

    def mark() -> bool:
        make_dirs(folder)
        path = folder / xxhash.xxh3_64_hexdigest(end.encode())
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            return True
        except FileExistsError:
            lately = time.time() - path.stat().st_mtime < SAME_END
            path.touch()
            return not lately

    try:
        looking = Bounded(mark, "first-to-tell")
        return looking.result() if looking.ended(DEADLINE) else True
    except (OSError, RuntimeError):
        return True


def _await_end(pid: int, deadline: float, give_up: threading.Event) -> bool:
    """Wait for a child's end without reaping it. False if it did not end in time."""
    while True:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        if time.monotonic() >= deadline or give_up.is_set():
            return False
        time.sleep(POLL)


def _last_words(said: IO[bytes]) -> str:
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - 400))
    words = " ".join(said.read().decode(errors="replace").split())
    return f": {words}" if words else ""


class _Post:
    """One POST, on a thread that may be abandoned: a server that sends byte by byte defeats every timeout."""

    def __init__(self, url: str, raw: bytes) -> None:
        self._url, self._raw = url, raw
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._post, name="holdfast-alert-post", daemon=True)
        self._thread.start()

    def _post(self) -> None:
        try:
            self._problem = self._send()
        except Exception as error:  # noqa: BLE001 - reported, whatever a server makes urllib raise
            reason = getattr(error, "reason", None) or type(error).__name__
            self._problem = f"{reason}".replace(self._url, "…")

    def _send(self) -> str:
        from urllib.error import HTTPError
        from urllib.request import HTTPRedirectHandler, Request, build_opener

        class NoRedirects(HTTPRedirectHandler):
            """A redirected POST would arrive as a GET, without its content."""

            def redirect_request(self, *args: Any, **kwargs: Any) -> None:
                del args, kwargs

        headers = {"Content-Type": "application/json", "User-Agent": "holdfast"}
        request = Request(self._url, data=self._raw, headers=headers, method="POST")
        try:
            with build_opener(NoRedirects).open(request, timeout=DEADLINE):
                return ""
        except HTTPError as error:
            error.close()
            return f"it answered {error.code}"

    def outcome(self, deadline: float, give_up: threading.Event) -> str:
        while self._thread.is_alive() and time.monotonic() < deadline and not give_up.is_set():
            self._thread.join(POLL)
        where = f"launch.alert_url ({urlsplit(self._url).hostname})"
        if self._thread.is_alive():
            return f"{where}: no answer within {DEADLINE:g} s"
        return f"{where}: {self._problem}" if self._problem else ""


def _encode(alert: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(alert, enc_hook=str)
    except UnicodeEncodeError:  # a message has stray bytes, which only escapes can carry
        return json.dumps(msgspec.to_builtins(alert, enc_hook=str)).encode()
