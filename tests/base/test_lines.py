"""Lines of Holdfast's own: their two forms, their colours, and what is told of a long wait."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest

from holdfast.account.incidents import Incident
from holdfast.account.words import back_line, closing_line
from holdfast.base.bounded import TOLD_AGAIN, Waiting, in_words, is_due, is_rewritten, span
from holdfast.base.lines import (
    CLEAR,
    GREEN,
    RED,
    LineKind,
    LineSource,
    LiveLine,
    OutputLine,
    as_json,
    as_text,
    has_colour,
    install,
    is_taken,
    kind_of,
    level_of,
    painted,
    rewrites,
    speak,
)
from kit.golden import lines_of_ours
from kit.harness import REPO, finish, holdfast, python

SCRIPT = str(REPO / "tests" / "scripts" / "faults" / "meet_a_fault.py")
RUN = ["run", "--nproc-per-node", "2", "--run-dir", "run", "--set", "launch.node_name=here"]
FIELDS = ["time", "level", "source", "rank", "host", "attempt", "kind", "text"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def line(text: str = "all is well", **other: object) -> OutputLine:
    told = {"at": 0.0, "source": LineSource.LAUNCHER, "rank": None, "host": "h", "attempt": 1, "text": text}
    kind = kind_of(text)
    return OutputLine(**{**told, "kind": kind, "level": level_of(kind), **other})  # type: ignore[arg-type]


# --- the forms ----------------------------------------------------------------------------------------------


def test_a_rank_is_told_from_the_launcher_and_both_tell_the_time() -> None:
    assert re.fullmatch(r"[\d:]{8} holdfast: all is well", as_text(line()))
    assert re.fullmatch(
        r"[\d:]{8} holdfast\[rank 3\]: all is well", as_text(line(source=LineSource.RANK, rank=3))
    )
    assert as_text(line(source=LineSource.COMMAND)) == "holdfast: all is well"


def test_a_line_as_json_is_one_line_with_a_time_that_has_a_zone() -> None:
    shown = as_json(line("warning: two\nlines", more={"wait": {"what": "x"}}))
    assert "\n" not in shown
    found = json.loads(shown)
    assert [*found] == [*FIELDS, "wait"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}[+-]\d\d:\d\d", found["time"])
    assert (found["level"], found["kind"], found["text"]) == ("warning", "warning", "two\nlines")


def test_sentences_are_known_by_their_beginnings() -> None:
    incident = mock.Mock(spec=Incident, steps_lost=2, seconds_lost=1.0, account=None, traced=False)
    assert kind_of(back_line(incident, 5)) is LineKind.BACK
    assert kind_of(closing_line([], [], 5, "run")) is LineKind.FINISHED
    assert kind_of(in_words(Waiting("a node", 5.0, None))) is LineKind.WAIT
    assert kind_of("rank 1 was killed") is LineKind.MESSAGE


def test_only_a_terminal_that_knows_colours_gets_them() -> None:
    usual = {"TERM": "xterm"}
    assert has_colour(usual, terminal=True)
    assert not has_colour(usual, terminal=False)
    assert not has_colour({"TERM": "xterm", "NO_COLOR": "1"}, terminal=True)
    assert rewrites({"TERM": "xterm", "NO_COLOR": "1"}, terminal=True), "to write over a line is no colour"
    for term in ("dumb", ""):
        assert not has_colour({"TERM": term}, terminal=True)
        assert not rewrites({"TERM": term}, terminal=True)


def test_colours_change_nothing_but_the_colour() -> None:
    shown = "11:22:33 holdfast: rank 1 was killed\n  why:  nobody knows\n  done: why: it is"
    coloured = painted(shown, LineKind.INCIDENT)
    assert f"{RED}rank 1 was killed" in coloured
    assert coloured.count("\x1b[1m") == 2, "the labels at the beginning of a line, and no other word"
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == shown
    assert painted("11:22:33 holdfast: parked", LineKind.MESSAGE) == "11:22:33 holdfast: parked"


# --- who takes what is logged -------------------------------------------------------------------------------


def test_what_a_script_takes_by_its_own_logging_is_not_written_twice() -> None:
    script = (
        "import logging, sys, holdfast\n"
        "if sys.argv[1] == 'own': logging.basicConfig(format='MINE %(message)s')\n"
        "logging.getLogger('holdfast').warning('holdfast: %s', 'look')\n"
        "logging.getLogger('holdfast').info('holdfast: more')\n"
    )
    env = {"RANK": "2", "HOLDFAST_LAUNCH": '{"attempt": 4}'}

    def said(own: str, **more: str) -> str:
        return finish([python("")[0], "-c", script, own], cwd=REPO, env={**env, **more}).err

    assert said("own") == "MINE holdfast: look\n"
    assert re.fullmatch(r"[\d:]{8} holdfast\[rank 2\]: look\n", said("no"))
    found = json.loads(said("no", HOLDFAST_LOG_FORMAT="json"))
    assert (found["source"], found["rank"], found["attempt"], found["level"]) == ("rank", 2, 4, "warning")
    assert said("no", HOLDFAST_VERBOSITY="debug").endswith("]: more\n"), "debug shows what is of level INFO"


def test_installing_twice_leaves_one_handler() -> None:
    log = logging.getLogger("holdfast")
    before = len(log.handlers)
    install()
    assert len(log.handlers) == max(before, 1)
    other = logging.StreamHandler(io.StringIO())
    log.addHandler(other)
    try:
        assert is_taken(logging.getLogger("holdfast.control"))
    finally:
        log.removeHandler(other)


# --- a long wait --------------------------------------------------------------------------------------------


def times_told(until: float, step: float = 0.5) -> list[float]:
    told: list[float] = []
    waited = 0.0
    while waited <= until:
        if is_due(waited, told[-1] if told else None):
            told.append(waited)
        waited += step
    return told


def test_a_wait_is_told_at_growing_intervals() -> None:
    assert times_told(2.5) == []
    assert times_told(700) == [3, 30, 60, 120, 300, 600]
    assert times_told(4 * 3600, 10.0)[-3:] == [7200, 10800, 14400], "then as often as every hour"
    assert len(times_told(24 * 3600, 10.0)) < 40


def test_a_wait_that_is_looked_at_seldom_is_told_once_for_all_that_was_missed() -> None:
    assert is_due(700, 3.0)
    assert not is_due(701, 700)
    assert is_due(TOLD_AGAIN[5], 700)


def test_the_line_on_a_terminal_is_rewritten_every_second() -> None:
    assert not is_rewritten(2.9, None)
    assert is_rewritten(3.0, None)
    assert not is_rewritten(3.5, 3.0)
    assert is_rewritten(4.0, 3.0)


def test_a_wait_says_what_for_how_long_so_far_and_at_most() -> None:
    told = in_words(Waiting("2 nodes to join (1 here)", 95.0, 600.0))
    assert told == "waiting for 2 nodes to join (1 here): 1 min 35 s so far, at most 10 min"
    assert in_words(Waiting("x", 5.2, None)) == "waiting for x: 5 s so far, no limit"
    assert [span(one) for one in (0, 59.6, 3599, 3600, 7260)] == [
        "0 s",
        "1 min",
        "59 min 59 s",
        "1 h 00 min",
        "2 h 01 min",
    ]


def test_a_live_line_is_written_over_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("HOLDFAST_LOG_FORMAT", raising=False)
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        monkeypatch.setattr("sys.stderr", stream)
        live = LiveLine(LineSource.LAUNCHER)
        for waited in range(12):
            live(Waiting("storage", float(waited), 30.0))
        live.over()
        speak("it is back", source=LineSource.LAUNCHER)
    shown = terminal.getvalue()
    assert shown.count("\r") == 9
    assert shown.count("\n") == 1
    assert shown.endswith(f"it is back{CLEAR}\n")
    assert f"\r{CLEAR}" in shown, "cleared when it is over"
    assert re.fullmatch(
        r"\S+ holdfast: waiting for storage: 3 s so far, at most 30 s\n\S+ holdfast: it is back\n",
        file.getvalue(),
    )


def test_a_live_line_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    LiveLine(LineSource.LAUNCHER)(Waiting("x" * 500, 5.0, None))
    assert len(terminal.getvalue().removesuffix(f"{CLEAR}\r")) < 80, "what wraps cannot be written over"


# --- real launches ------------------------------------------------------------------------------------------


def test_with_json_every_line_of_ours_parses_and_an_incident_has_its_account_as_fields(
    tmp_path: Path,
) -> None:
    result = finish(holdfast(*RUN, "--log-format", "json", SCRIPT, "NaN batch"), cwd=tmp_path, timeout=180)
    assert result.code == 0, result.text
    found = [json.loads(one) for one in result.err.splitlines()]
    assert all([*one][: len(FIELDS)] == FIELDS for one in found)
    told = [one for one in found if "step 25 is dropped on all ranks" in one["text"]]
    assert [(one["source"], one["attempt"]) for one in told] == [("launcher", 1)], found
    assert found[-1]["kind"] == "finished"


@pytest.mark.drill
def test_an_incident_in_json(tmp_path: Path) -> None:
    result = finish(
        holdfast(*RUN, SCRIPT, "killed rank"),
        cwd=tmp_path,
        env={"HOLDFAST_LOG_FORMAT": "json"},
        timeout=180,
    )
    assert result.code == 0, result.text
    # What gloo's or torch's C++ writes by itself is no line of ours.
    found = [json.loads(one) for one in result.err.splitlines() if one.startswith("{")]
    incident = next(one for one in found if one["kind"] == "incident")
    assert (incident["source"], incident["attempt"], incident["level"]) == ("launcher", 1, "warning")
    account = incident["account"]
    assert account["who"] == "rank 1 on here"
    assert account["what"].startswith("was killed by SIGKILL")
    assert account["why"]
    assert "restarting from step 20" in account["done"]
    assert account["next"]
    assert {"back", "finished", "save", "resume"} <= {one["kind"] for one in found}
    assert not re.search(r"^[\d:]{8} holdfast", result.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("given", "env", "told"),
    [
        (["--log-format", "yaml"], {}, "argument --log-format: invalid choice: 'yaml'"),
        (
            [],
            {"HOLDFAST_LOG_FORMAT": "yaml"},
            "HOLDFAST_LOG_FORMAT = 'yaml' (environment): allowed is text, json",
        ),
    ],
)
def test_another_form_is_refused_before_anything_starts(
    given: list[str], env: dict[str, str], told: str, tmp_path: Path
) -> None:
    result = finish(holdfast(*RUN, *given, SCRIPT, "killed rank"), cwd=tmp_path, env=env)
    assert result.code == 2
    assert told in result.err
    assert not (tmp_path / "run").exists()


def test_what_is_wrong_with_the_settings_is_told_in_json_too(tmp_path: Path) -> None:
    result = finish(
        holdfast(*RUN, "--set", "launch.nonsense=1", "--log-format=json", SCRIPT, "x"), cwd=tmp_path
    )
    assert result.code == 2
    found = json.loads(result.err)
    assert (found["kind"], found["level"]) == ("error", "error")
    assert "launch.nonsense" in found["text"]


def on_a_terminal(argv: list[str], cwd: Path, **env: str) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(argv, cwd=cwd, stdout=theirs, stderr=theirs, env={**os.environ, **env})
    os.close(theirs)
    shown, ends = b"", time.monotonic() + 180
    while time.monotonic() < ends:
        if select.select([ours], [], [], 0.5)[0]:
            try:
                read = os.read(ours, 65536)
            except OSError:  # nobody has it open any more
                break
            shown += read
    os.close(ours)
    assert process.wait(30) == 0, shown.decode(errors="replace")
    return shown.decode()


def test_a_terminal_gets_colours_and_the_same_words_as_a_pipe(tmp_path: Path) -> None:
    argv = holdfast(*RUN, SCRIPT, "killed rank")
    shown = on_a_terminal(argv, tmp_path, TERM="xterm", NO_COLOR="")
    assert f"{RED}rank 1 on here was killed by SIGKILL" in shown
    assert f"{GREEN}back at step" in shown
    assert f"{GREEN}finished: " in shown
    assert "\x1b[1mwhy:\x1b[0m" in shown
    bare = re.sub(r"\x1b\[[\d;]*[mK]", "", shown).replace("\r", "")
    assert "done: restarting from step 20: 4 steps to redo (restart 1 of 3)" in lines_of_ours(bare)


@pytest.mark.drill
def test_a_terminal_without_colours_gets_no_escape_codes(tmp_path: Path) -> None:
    shown = on_a_terminal(holdfast(*RUN, SCRIPT, "NaN batch"), tmp_path, TERM="dumb")
    assert "\x1b" not in shown
    assert "holdfast: finished: " in shown


def test_a_wait_for_nodes_is_told_while_it_goes_on(tmp_path: Path) -> None:
    several = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    conf = ["--rdzv-conf", "join_timeout=6"]
    result = finish(holdfast(*RUN, *several, *conf, SCRIPT, "killed rank"), cwd=tmp_path, timeout=120)
    assert result.code == 28, result.text
    told = re.findall(r"holdfast: (waiting for .*)", result.err)
    assert told == ["waiting for 2 nodes to join (1 here): 3 s so far, at most 6 s"]
