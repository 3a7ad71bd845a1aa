"""Alerts: a real command and a real server are told; nothing they do holds the launcher up or outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from holdfast import errors
from holdfast.config.settings import LaunchSettings
from holdfast.config.sources import load
from holdfast.errors import NOT_ALERTED, ExitCode
from holdfast.launch import alert
from holdfast.launch import command as launcher
from holdfast.launch.alert import Alerts
from holdfast.launch.context import Interrupted, LaunchContext
from holdfast.launch.nodes.attempt import StopRun
from holdfast.launch.nodes.meeting import StoreLostError
from holdfast.record.directory import ControlDirectory
from kit.harness import job, python, wait_until

PATIENCE = 30.0


class Told:
    """What an Alerts under test warned of."""

    def __init__(self) -> None:
        self.warnings: list[str] = []


def alerts(told: Told, *, command: str = "", url: str = "") -> Alerts:
    settings = LaunchSettings(alert_command=command, alert_url=url)
    return Alerts(settings, run="3fa9c1d2e4b5", run_dir=Path("/runs/a"), warn=told.warnings.append)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline that a test can wait for."""
    monkeypatch.setattr(alert, "DEADLINE", 1.0)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posts: list[tuple[str, dict[str, object], str]] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/T0/secret"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append((self.path, json.loads(body), self.headers["Content-Type"]))
        self.send_response(self.server.status)
        self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def test_a_command_gets_the_alert_on_its_standard_input_and_in_its_environment(
    tmp_path: Path, told: Told
) -> None:
    command = f"cat > {tmp_path}/given; env | grep ^HOLDFAST_ALERT_ | sort > {tmp_path}/env; echo noise"
    sender = alerts(told, command=command)
    sender.send("incident", {"attempt": 3, "text": "rank 1 was killed", "evidence": ["a", "b"]})
    sender.close(PATIENCE)
    given = json.loads((tmp_path / "given").read_text())
    assert abs(given.pop("at") - time.time()) < 3600
    assert given == {
        "kind": "incident", "run": "3fa9c1d2e4b5", "run_dir": "/runs/a", "attempt": 3,
        "text": "rank 1 was killed", "evidence": ["a", "b"], "left_out": 0,
    }  # fmt: skip
    assert (tmp_path / "env").read_text().splitlines() == [
        "HOLDFAST_ALERT_ATTEMPT=3",
        "HOLDFAST_ALERT_KIND=incident",
        "HOLDFAST_ALERT_RUN=3fa9c1d2e4b5",
        "HOLDFAST_ALERT_RUN_DIR=/runs/a",
        "HOLDFAST_ALERT_TEXT=rank 1 was killed",
    ]
    assert told.warnings == []


def test_a_url_gets_the_same_as_json(server: Server, told: Told) -> None:
    sender = alerts(told, url=server.url)
    sender.send("stop", {"attempt": 4, "text": "budget spent", "exit_code": 22})
    sender.close(PATIENCE)
    ((path, body, kind),) = server.posts
    assert (path, kind) == ("/T0/secret", "application/json")
    assert (body["kind"], body["exit_code"], body["text"]) == ("stop", 22, "budget spent")
    assert told.warnings == []


@pytest.mark.parametrize("command", ["~/page given", "$HOME/page given", 'x=given; "$HOME"/page $x'])
def test_a_command_may_be_what_a_shell_takes(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "page").write_text('#!/bin/sh\ncat > "$HOME/$1"\n')
    (tmp_path / "page").chmod(0o700)
    loaded = load(environ={"HOLDFAST_LAUNCH_ALERT_COMMAND": command}).settings.launch
    sender = alerts(told, command=loaded.alert_command)
    sender.send("incident", {"text": "x"})
    sender.close(PATIENCE)
    assert json.loads((tmp_path / "given").read_text())["text"] == "x"
    assert told.warnings == []


# --- how a launch can end


def end_of(
    home: Path, how: Callable[[LaunchContext], int], *, nodes: int = 1, leads: bool = False
) -> tuple[int, list[dict[str, object]]]:
    """What the launcher makes of an end of what it runs: its code, and the alerts that it sent."""
    told, given = Told(), home / f"alerts-{len(list(home.iterdir()))}"
    control, _ = ControlDirectory.open_or_create(home / "run")
    sender = alerts(told, command=f"cat >> {given}; echo >> {given}")
    context: Any = SimpleNamespace(
        control=control, alerts=sender, max_nodes=nodes, leads=leads, last_words="what happened",
        settings=load(keywords={"run_dir": str(home / "run")}).settings,
    )  # fmt: skip
    config: Any = SimpleNamespace(run_id="job 7", min_nodes=nodes)
    teller: Any = SimpleNamespace(ended=lambda code, why: code)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launcher, "_run", lambda config, command, context: how(context))
        try:
            code = launcher._live(config, [], context, teller)
        except ZeroDivisionError:
            code = 1
    sender.close(PATIENCE)
    assert told.warnings == []
    return code, [json.loads(line) for line in given.read_text().splitlines()] if given.exists() else []


def returned(code: int) -> Callable[[LaunchContext], int]:
    return lambda context: code


def raised(error: BaseException) -> Callable[[LaunchContext], int]:
    def run(context: LaunchContext) -> int:
        del context
        raise error

    return run


def decided(code: int) -> Callable[[LaunchContext], int]:
    def run(context: LaunchContext) -> int:
        context.alerts.send("stop", {"text": "recovery decided", "exit_code": code})
        return code

    return run


@pytest.mark.parametrize("code", ExitCode, ids=lambda code: code.name)
def test_every_code_that_ends_a_run_raises_one_alert(tmp_path: Path, code: ExitCode) -> None:
    """The whole table, by every way in which a launch can end with the code."""
    ways = {"returned": returned(code), "stopped": raised(StopRun(code, "why it stopped"))}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.HoldfastError) and kind.exit_code is code:
            ways[kind.__name__] = raised(kind("why it\n  failed"))
    for name, way in ways.items():
        ended, sent = end_of(tmp_path, way)
        assert ended == code, name
        if code in NOT_ALERTED:
            assert sent == [], name
            continue
        (alert_,) = sent
        assert (alert_["kind"], alert_["exit_code"], alert_["attempt"]) == ("stop", int(code), 0), name
        text = str(alert_["text"])
        assert text.startswith(f"the run ended with code {int(code)}: "), name
        assert "what happened" in text if name == "returned" else "why it" in text, name
        assert "\n" not in text
    _, sent = end_of(tmp_path, decided(code))
    assert [one["text"] for one in sent] == ["recovery decided"], "what was told is not told twice"


def test_the_codes_without_an_alert_are_those_after_which_nobody_has_to_act() -> None:
    assert set(NOT_ALERTED) == {
        ExitCode.OK, ExitCode.USAGE, ExitCode.LEASE_LOST, ExitCode.RUN_IS_LIVE
    }  # fmt: skip
    assert ExitCode.STORE_LOST is StoreLostError.exit_code


def test_ends_without_a_code_of_ours_raise_the_alert_too(tmp_path: Path) -> None:
    for error, code in (
        (RendezvousTimeoutError("late"), ExitCode.NO_CAPACITY),
        (RendezvousClosedError(), ExitCode.FAILED),
        (DistError("gone"), ExitCode.DECISION_TIMEOUT),
        (StoreLostError("gone"), ExitCode.STORE_LOST),
        (Interrupted(signal.SIGTERM), ExitCode.STOPPED),
        (ZeroDivisionError("a defect"), ExitCode.FAILED),
    ):
        ended, sent = end_of(tmp_path, raised(error))
        assert (ended, [one["exit_code"] for one in sent]) == (code, [code]), error


def test_of_several_nodes_one_tells_of_the_end(tmp_path: Path) -> None:
    stop = returned(ExitCode.PAUSED_TOO_LONG)
    told = [len(end_of(tmp_path, stop, nodes=3, leads=leads)[1]) for leads in (False, True, False)]
    assert told == [0, 1, 0], "all of them know it from the leader"
    lost = raised(StoreLostError("the host is gone"))
    assert [len(end_of(tmp_path, lost, nodes=3)[1]) for _ in range(3)] == [1, 0, 0], "the first one"
    (mark,) = (tmp_path / "run" / "alerts").iterdir()
    os.utime(mark, (0, 0))
    assert len(end_of(tmp_path, lost, nodes=3)[1]) == 1, "another end, later"
    over = raised(StopRun(ExitCode.BUDGET_SPENT, "the run has ended: …"))
    assert end_of(tmp_path, over, nodes=3)[1] == [], "a spare was told so by those who decided it"


def test_text_that_json_cannot_carry_and_zeros_arrive_all_the_same(tmp_path: Path, told: Told) -> None:
    sender = alerts(told, command=f"cat > {tmp_path}/given")
    sender.send("incident", {"text": "bytes \udcff and \0 zero", "path": Path("/x"), "loss": float("nan")})
    sender.close(PATIENCE)
    assert json.loads((tmp_path / "given").read_text())["path"] == "/x"
    assert told.warnings == []


def test_without_a_hook_nothing_is_started(told: Told) -> None:
    sender = alerts(told)
    before = threading.active_count()
    sender.send("incident", {"text": "x"})
    assert threading.active_count() == before
    sender.close()


@pytest.mark.parametrize("status", [302, 404, 500])
def test_an_answer_that_is_no_success_is_a_warning_without_the_secret(
    server: Server, told: Told, status: int
) -> None:
    server.status = status
    sender = alerts(told, url=server.url)
    sender.send("incident", {"text": "x"})
    sender.close(PATIENCE)
    (warning,) = told.warnings
    assert f"launch.alert_url (127.0.0.1): it answered {status}" in warning
    assert "secret" not in warning
    assert len(server.posts) == 1, "a redirect is not followed"


def test_a_server_that_is_not_there_is_a_warning_without_the_secret(told: Told) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else can be there
        taken.bind(("127.0.0.1", 0))
        sender = alerts(told, url=f"http://127.0.0.1:{taken.getsockname()[1]}/secret")
        sender.send("incident", {"text": "x"})
        sender.close(PATIENCE)
    (warning,) = told.warnings
    assert "refused" in warning
    assert "secret" not in warning


def test_a_command_that_fails_is_a_warning_with_its_last_words(told: Told) -> None:
    sender = alerts(told, command="echo no such channel >&2; exit 3")
    sender.send("exclusion", {"text": "x"})
    sender.close(PATIENCE)
    assert told.warnings == [
        "the alert of kind exclusion was not delivered: launch.alert_command ended with 3: no such channel"
    ]


def test_both_ways_are_tried_when_one_fails(server: Server, told: Told) -> None:
    sender = alerts(told, command="exit 1", url=server.url)
    sender.send("incident", {"text": "x"})
    sender.close(PATIENCE)
    assert len(server.posts) == 1
    assert len(told.warnings) == 1


def is_alive(path: Path) -> bool:
    """Whether the process lives whose id a file holds; one that never got to write it does not."""
    try:
        pid = int(path.read_text())
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (OSError, ValueError):
        return False


@pytest.mark.usefixtures("short")
def test_a_command_that_hangs_is_killed_with_all_it_started(tmp_path: Path, told: Told) -> None:
    command = f"sleep 600 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/shell; wait"
    sender = alerts(told, command=command)
    for _ in range(2):
        sender.send("incident", {"text": "x"})
    wait_until(lambda: len(told.warnings) == 2, PATIENCE, "each is given up")
    assert "did not end within 1 s and was killed" in told.warnings[0]
    wait_until(lambda: not is_alive(tmp_path / "child"), 10, "what SIGKILL was sent to is gone")
    assert not is_alive(tmp_path / "shell")
    sender.close(PATIENCE)


def test_what_a_command_leaves_in_the_background_is_ended_with_it(tmp_path: Path, told: Told) -> None:
    sender = alerts(told, command=f"sleep 600 & echo $! > {tmp_path}/child")
    sender.send("incident", {"text": "x"})
    sender.close(PATIENCE)
    wait_until(lambda: not is_alive(tmp_path / "child"), 10, "what SIGKILL was sent to is gone")
    assert told.warnings == []


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "byte by byte"])
@pytest.mark.usefixtures("short")
def test_a_server_that_does_not_come_to_an_end_is_given_up(told: Told, drip: bool) -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not over.wait(0.05):
                    if drip:
                        try:
                            connection.sendall(b"X-A: b\r\n")
                        except OSError:
                            return

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        sender = alerts(told, url=f"http://127.0.0.1:{listening.getsockname()[1]}/secret")
        sender.send("incident", {"text": "x"})
        wait_until(lambda: told.warnings, PATIENCE, "it is given up")
        over.set()
        server.join(PATIENCE)
    # A silent one may run into the socket's own timeout first.
    assert "no answer within" in told.warnings[0] or "TimeoutError" in told.warnings[0]
    sender.close(PATIENCE)


def test_a_flood_is_cut_and_the_next_alert_says_how_many_were_left_out(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(alert.time, "monotonic", lambda: now[0])
    sender = alerts(told, command="true")
    sent: list[dict[str, object]] = []
    monkeypatch.setattr(sender, "_deliver", lambda given: sent.append(given) or [])
    for number in range(alert.MOST_A_MINUTE + 5):
        sender.send("incident", {"number": number})
    now[0] += 61
    sender.send("incident", {"number": "late"})
    for _ in range(alert.MOST_A_MINUTE + 2):
        sender.send("incident", {})
    sender.close(PATIENCE)
    assert len(sent) == 2 * alert.MOST_A_MINUTE
    assert sent[alert.MOST_A_MINUTE]["number"] == "late"
    assert sent[alert.MOST_A_MINUTE]["left_out"] == 5
    assert told.warnings == ["3 alerts were left out: at most 12 are sent in a minute"]


def test_sending_waits_for_nothing_and_closing_is_bounded_and_leaves_no_process(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert, "DEADLINE", 600.0)  # whoever waited for the command would not be back
    sender = alerts(told, command=f"echo $$ > {tmp_path}/shell; exec sleep 600")
    for _ in range(3):
        sender.send("stop", {"text": "x"})
    wait_until(
        lambda: (tmp_path / "shell").exists() and (tmp_path / "shell").read_text(), PATIENCE, "it runs"
    )
    sender.close(0.1)
    wait_until(lambda: not is_alive(tmp_path / "shell"), PATIENCE, "it is killed")
    sender.send("stop", {"text": "y"})
    sender.close()


def test_a_failing_warning_is_no_failure(tmp_path: Path) -> None:
    def warn(text: str) -> None:
        raise OSError("the disk is full")

    settings = LaunchSettings(alert_command=f"echo x >> {tmp_path}/seen; exit 1")
    sender = Alerts(settings, run="r", run_dir=tmp_path, warn=warn)
    sender.send("incident", {})
    sender.send("incident", {})
    sender.close(PATIENCE)
    assert (tmp_path / "seen").read_text() == "x\nx\n"


LAUNCHER = """
import sys, time
from pathlib import Path
from holdfast.launch.alert import Alerts
from holdfast.config.settings import LaunchSettings

Alerts(LaunchSettings(alert_command=sys.argv[1]), run="r", run_dir=Path("."), warn=print).send("stop", {})
time.sleep(600)
"""


def test_no_command_outlives_a_killed_launcher(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    command = f"echo $$ > {tmp_path}/shell; exec sleep 600"
    with job(python(script, command), cwd=tmp_path) as running:
        wait_until(
            lambda: (tmp_path / "shell").exists() and (tmp_path / "shell").read_text(), PATIENCE, "it runs"
        )
        os.kill(running.pid, 9)
        wait_until(lambda: not is_alive(tmp_path / "shell"), PATIENCE, "the command is gone")
