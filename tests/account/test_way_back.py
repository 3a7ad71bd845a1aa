"""The time from a fault to the first step after it, by phase: what adds up, and what is told."""

from __future__ import annotations

import ast
import itertools
import os
import re
import signal
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.account import incidents_of, ledger_of, remarks_of
from holdfast.account.incidents import Incident
from holdfast.account.ledger import PHASES, UNKNOWN, Phase, PhaseEnd, largest, split, together
from holdfast.account.words import back_line, closing_line, cost_of, phases_text
from holdfast.base import duration
from holdfast.journal import Event, JournalLine, read_journal
from holdfast.journal.events import (
    Account,
    AttemptEnded,
    AttemptStarted,
    DecisionMade,
    FunctionRestarted,
    LoadTimes,
    RankStarted,
    RestartFaulted,
    RestartPlanned,
    Resumed,
    StepsDone,
    Warned,
    WorkerFailed,
    WorkersStarted,
)
from holdfast.observe.report import report_html
from holdfast.observe.status import LastIncident, Status, _with_way_back, status_rows
from holdfast.record import ControlDirectory
from kit.harness import REPO, finish, holdfast, job, wait_until
from kit.journals import START, Journal, killed_and_corrupted

SCRIPT = REPO / "tests" / "scripts" / "faults" / "tell_the_time.py"
Told = list[tuple[float, str, int, Event]]
"""Seconds after START, writer, attempt, event."""


def lines_of(told: Told) -> list[JournalLine]:
    return [
        JournalLine(v=1, at=START + at, who=who, attempt=attempt, seq=seq, body=event)  # type: ignore[arg-type]
        for seq, (at, who, attempt, event) in enumerate(sorted(told, key=lambda one: one[0]))
    ]


def ready(
    process: float, torch: float, ours: tuple[float, float], start: float, search: float, loaded: float,
    load: LoadTimes | None = None,
) -> RankStarted:  # fmt: skip
    return RankStarted(
        process=START + process, torch=START + torch, importing=START + ours[0], imported=START + ours[1],
        start=START + start, search=START + search, loaded=START + loaded, load=load,
    )  # fmt: skip


def launched(at: float = -50, paused: float = 0.0, launcher: str = "holdfast run") -> AttemptStarted:
    began = START + at if launcher == "holdfast run" else 0.0
    return AttemptStarted(epoch=1, world_size=2, launcher=launcher, launched=began, paused=paused)


def killed() -> Told:
    """Rank 1 is killed at 100, its end written down at 102; the run trains again at 131."""
    return [
        (0, "agent-a", 1, launched()),
        (1, "agent-a", 1, WorkersStarted(node="a", pids={0: 1, 1: 2})),
        (3, "rank-0", 1, ready(1, 2, (2, 2.5), 2.5, 2.7, 2.9)),
        (99, "rank-0", 1, StepsDone(first=1, seconds=[1.0])),
        (102, "agent-a", 1, WorkerFailed(rank=1, node="a", pid=2, exit_code=-9, at=START + 100)),
        (105, "agent-a", 1, DecisionMade(about="recovery", chosen="restart", evidence=[])),
        (105.5, "agent-a", 1, AttemptEnded(outcome="failed", noticed=START + 101, stopped=START + 103)),
        (107, "agent-a", 2, launched()),
        (110, "agent-a", 2, WorkersStarted(node="a", pids={0: 3, 1: 4})),
        (123, "rank-0", 2, Resumed(checkpoint=None, step=0, seconds=4.0)),
        (125, "rank-0", 2, ready(109, 113, (115, 116), 118, 119, 123.5, LoadTimes(2.0, 1.0, 0.5, 0.0, 100))),
        (131, "rank-0", 2, StepsDone(first=1, seconds=[5.0], data=3.0)),
    ]  # fmt: skip


KILLED = {
    "detect": 1, "stop": 2, "decide": 2, "meet": 2, "start": 3, "import": 4, "setup": 5, "join": 1,
    "load": 4.5, "prepare": 1.5, "data": 3, "first step": 2,
}  # fmt: skip


def by_name(incident: Incident) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in incident.phases}


def only(told: Told) -> Incident:
    (incident,) = incidents_of(lines_of(told))
    return incident


def test_every_phase_from_the_fault_to_the_first_step_is_told() -> None:
    incident = only(killed())
    assert incident.at == START + 100
    assert incident.seconds_down == 31
    # from 115 to 116 Holdfast was imported; before and after that, and from 125 to 126, the script got ready
    assert by_name(incident) == KILLED
    (load,) = [phase for phase in incident.phases if phase.name == "load"]
    assert dict(load.parts) == {"read": 2.0, "digest": 1.0, "copy": 0.5, "the rest": 1.0}
    assert phases_text(incident.phases) == "setup 5.0 s, load 4.5 s, import 4.0 s"


def test_the_three_largest_are_named_where_the_cost_is_told() -> None:
    incident = only(killed())
    assert "31.0 s until it trained again (setup 5.0 s, load 4.5 s, import 4.0 s)" in cost_of(incident)
    assert "(setup 5.0 s, load 4.5 s, import 4.0 s), 1 step done again: " in back_line(incident, 1)


def test_parts_of_a_load_that_ran_side_by_side_add_up_to_the_load() -> None:
    told = killed()
    told[10] = (125, "rank-0", 2, ready(109, 113, (115, 116), 118, 119, 123.5, LoadTimes(9.0, 9.0, 4.5, 4.5)))
    (load,) = [phase for phase in only(told).phases if phase.name == "load"]
    assert dict(load.parts) == {"read": 1.5, "digest": 1.5, "copy": 0.75, "check": 0.75}


def test_what_took_long_to_import_is_named_within_the_setup() -> None:
    told = killed()
    began = ready(109, 113, (115, 116), 118, 119, 123.5)
    began = msgspec.structs.replace(began, imports={"torch._dynamo": 3.0, "transformers": 0.5})
    told[10] = (125, "rank-0", 2, began)
    (setup,) = [phase for phase in only(told).phases if phase.name == "setup"]
    assert dict(setup.parts) == {
        "import of torch._dynamo": 3.0, "import of transformers": 0.5, "the rest": 1.5,
    }  # fmt: skip


def test_a_pause_and_a_time_without_a_launch_are_phases_of_their_own() -> None:
    told = killed()
    told[7] = (107, "agent-a", 2, launched(paused=1.25))
    assert by_name(only(told)) == {**KILLED, "pause": 1.25, "meet": 0.75}
    told[7] = (107, "agent-a", 2, launched(at=106.5))
    assert by_name(only(told)) == {**KILLED, "queue": 1.5, "meet": 0.5}


def test_after_a_launch_that_was_lost_the_time_until_the_next_one_is_the_queues() -> None:
    told = [one for one in killed() if not isinstance(one[3], WorkerFailed | DecisionMade | AttemptEnded)]
    told[4] = (107, "agent-a", 2, launched(at=106))
    found = by_name(only(told))
    assert found == {
        name: seconds
        for name, seconds in {**KILLED, "queue": 7, "meet": 1}.items()
        if name not in ("detect", "stop", "decide")
    }


def test_of_a_leader_that_was_lost_it_is_not_known_when_that_was_noticed() -> None:
    told = [one for one in killed() if not isinstance(one[3], WorkerFailed | AttemptEnded)]
    told.append((105.5, "agent-b", 1, AttemptEnded(outcome="lost")))
    found = by_name(only(told))
    assert found[UNKNOWN] == 6  # from the last sign of life at 99 to the decision at 105
    assert "queue" not in found
    assert found["meet"] == 2


@pytest.mark.parametrize(("launcher", "phase"), [("none", "queue"), ("torchrun", UNKNOWN)])
def test_without_the_launcher_the_ranks_own_part_is_told(launcher: str, phase: str) -> None:
    told: Told = [
        (0, "rank-0", 1, launched(launcher=launcher)),
        (99, "rank-0", 1, StepsDone(first=1, seconds=[1.0])),
        (100, "rank-0", 1, AttemptEnded(outcome="failed")),
        (118.5, "rank-0", 2, launched(launcher=launcher)),
        *killed()[-3:],
    ]
    again = {name: KILLED[name] for name in ("setup", "join", "load", "prepare", "data", "first step")}
    assert by_name(only(told)) == {phase: 9, **again, "import": 5}


def test_a_restart_in_place_has_its_phases_too() -> None:
    fault = RestartFaulted(iteration=0, member=1, kind="exception", rank=1, at=START + 100, ended=1)
    told: Told = [
        *killed()[:4],
        (103, "agent-a", 1, DecisionMade(about="recovery", chosen="restart", evidence=[])),
        (103.1, "agent-a", 1, AttemptEnded(outcome="failed", stopped=START + 102)),
        (103.2, "agent-a", 2, launched()),
        (104, "agent-a", 2, RestartPlanned(iteration=1, world_size=2, seconds=4, ended=1)),
        (110, "rank-0", 2, fault),
        (110, "rank-0", 2, FunctionRestarted(iteration=1, rank=0, seconds=3, at=START + 105)),
        (110, "rank-1", 2, FunctionRestarted(iteration=1, rank=1, seconds=2, at=START + 106)),
        (111, "rank-0", 2, ready(1, 2, (2, 2.5), 107, 108, 110)),
        (114, "rank-0", 2, StepsDone(first=1, seconds=[3.0])),
    ]
    here = {
        "stop": 2.0,
        "decide": 1,
        "meet": 2,
        "setup": 2,
        "join": 1,
        "load": 2,
        "prepare": 1,
        "first step": 3,
    }
    assert by_name(only(told)) == here
    without = [one for one in told if not isinstance(one[3], DecisionMade)]
    without[4] = (103.1, "rank-0", 1, AttemptEnded(outcome="failed"))
    # rank 1 was the last to leave, at 104; the plan came 4 s after the fault
    found = by_name(only(without))
    assert (found["stop"], found["meet"]) == (4, 1)
    assert "decide" not in found


def test_a_rank_that_was_done_long_before_is_not_when_it_failed() -> None:
    told = killed()
    done = WorkerFailed(rank=2, node="a", pid=3, exit_code=0, left=True, at=START + 40)
    assert by_name(only([*told, (102, "agent-a", 1, done)])) == KILLED


def test_an_older_releases_journal_tells_what_it_told() -> None:
    run = killed_and_corrupted()
    for incident in incidents_of(run.lines):
        assert not incident.traced
        assert "(" not in cost_of(incident)
        assert "until it trained again" in cost_of(incident)
        assert "(" not in back_line(incident, 27)
        assert sum(phase.seconds for phase in incident.phases) == incident.seconds_down
        assert {"load", "first step", UNKNOWN} <= {phase.name for phase in incident.phases}
    found = incidents_of(run.lines)
    assert "until it trained again" not in closing_line(found, remarks_of(run.lines, found), 60, "run")


def test_what_began_is_not_known_to_have_ended_while_nobody_says_so() -> None:
    told = killed()[:9]
    found = by_name(only([*told, (120, "agent-a", 2, Warned(message="still here"))]))
    assert found == {"detect": 1, "stop": 2, "decide": 2, "meet": 2, "start": 3, UNKNOWN: 10}


def test_ways_back_are_summed_for_the_ledger() -> None:
    lines = lines_of(killed())
    ways = [incident.phases for incident in incidents_of(lines)]
    ledger = ledger_of(lines, [*ways, *ways])
    assert {phase.name: phase.seconds for phase in ledger.back} == {
        name: 2 * seconds for name, seconds in KILLED.items()
    }
    assert [name for name, _ in ledger.parts()] == [name for name, _ in ledger_of([]).parts()]
    assert ledger.whole == pytest.approx(131)


def test_a_phase_that_hardly_counts_is_not_named() -> None:
    assert [phase.name for phase in largest([Phase("load", 99), Phase("meet", 1), Phase("start", 0)])] == [
        "load"
    ]


def test_the_report_has_the_largest_first_and_every_phase_in_its_details() -> None:
    page = report_html(lines_of(killed()), title="run")
    top, _, rest = page.partition('id="incidents"')
    assert "(setup 5.0 s, load 4.5 s, import 4.0 s)" in top
    for name, seconds in KILLED.items():
        assert re.search(rf">{name} {duration(seconds)}[ <]", rest), name
    assert "read 2.0 s, digest 1.0 s, copy 500 ms, the rest 1.0 s" in rest
    assert "From the faults to the next steps: 31.0 s, setup 5.0 s" in page


def test_the_status_says_it_from_the_ends_of_the_files_alone(tmp_path: Path) -> None:
    control = ControlDirectory.open_or_create(tmp_path / "run")[0]
    lines = lines_of(killed())
    early = [line for line in lines if line.attempt == 1 and isinstance(line.body, StepsDone)]
    late = JournalLine(
        v=1, at=START + 200, who="rank-0", attempt=2, seq=0, body=StepsDone(first=2, seconds=[1.0] * 40_000)
    )
    control.journal.mkdir(exist_ok=True)
    for line in [*early * 40_000, *lines, *[late] * 4]:
        path = control.journal / f"{line.attempt:06d}-{line.who}-1.jsonl"
        with path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
    incident = LastIncident(attempt=1, text="it failed")
    read = time.process_time()
    known = _with_way_back(incident, control, sorted(path.name for path in control.journal.iterdir()), 2)
    assert time.process_time() - read < 1
    assert (known.text, known.seconds_down, known.phases) == ("it failed", 31, KILLED)
    (row,) = [
        row
        for row in status_rows(Status(at=START + 300, run="r", run_dir="run", incident=known))
        if row.label == "incident"
    ]
    assert row.text == "it failed; trained again after 31.0 s: setup 5.0 s, load 4.5 s, import 4.0 s"


# --- whatever the lines say


times = st.floats(min_value=2.0**30, max_value=2.0**31 - 1, allow_nan=False)
moments = st.one_of(st.none(), times)
anything = st.one_of(st.just(0.0), times, st.floats(allow_nan=False, allow_infinity=False))


@given(times, times, st.lists(st.tuples(st.sampled_from(sorted(PHASES)), st.one_of(moments, anything))))
@settings(max_examples=200, deadline=None)
def test_phases_add_up_exactly_and_are_never_negative(
    begin: float, end: float, marks: list[tuple[str, float | None]]
) -> None:
    phases = split(begin, end, [PhaseEnd(*mark) for mark in marks])
    assert sum(phase.seconds for phase in phases) == max(0.0, end - begin)
    assert all(phase.seconds > 0 for phase in phases)
    assert sum(phase.seconds for phase in together([phases, phases])) == 2 * max(0.0, end - begin)


FIELDS = ["at", "noticed", "stopped", "launched", "process", "torch", "importing", "imported", "start"]
FIELDS += ["search", "loaded", "seconds", "paused", "data", "began"]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_lines_are_missing_or_late_the_phases_of_each_incident_add_up(data: st.DataObject) -> None:
    told: Told = []
    for at, who, attempt, event in itertools.chain(killed(), in_place()):
        if not data.draw(st.booleans()) and data.draw(st.booleans()):
            continue
        fields = {
            name: data.draw(anything)
            for name in FIELDS
            if isinstance(getattr(event, name, None), float)
            and not isinstance(event, RestartFaulted)
            and data.draw(st.booleans())
        }
        moved = data.draw(st.one_of(st.just(at), st.floats(-1e6, 1e6)))
        told.append((moved, who, attempt, msgspec.structs.replace(event, **fields)))
    for incident in incidents_of(lines_of(told)):
        assert sum(phase.seconds for phase in incident.phases) == incident.seconds_down
        assert all(phase.seconds > 0 for phase in incident.phases)
        for phase in incident.phases:
            assert all(seconds > 0 for _, seconds in phase.parts)
            assert not phase.parts or sum(seconds for _, seconds in phase.parts) == phase.seconds
        cost_of(incident)


def in_place() -> Told:
    fault = RestartFaulted(iteration=0, member=1, kind="exception", rank=1, at=START + 140, ended=2)
    account = Account(attempt=2, cause="job", who="rank 1", what="raised", step=1, began=START + 139)
    return [
        (141, "agent-a", 2, fault),
        (141.5, "agent-a", 2, account),
        (142, "agent-a", 2, AttemptEnded(outcome="failed", stopped=START + 141)),
        (143, "agent-a", 3, RestartPlanned(iteration=1, world_size=2, seconds=3, ended=2)),
        (144, "rank-0", 3, FunctionRestarted(iteration=1, rank=0, seconds=1, at=START + 143)),
        (145, "rank-0", 3, ready(109, 113, (115, 116), 143.5, 144, 144.5)),
        (150, "rank-0", 3, StepsDone(first=1, seconds=[3.0] * 4)),
    ]


def test_a_journal_in_the_making_shows_no_phase_without_a_fault() -> None:
    run = Journal().start().steps(1, 5)
    assert incidents_of(run.lines) == []
    assert ledger_of(run.lines).back == ()


# --- a real fault


def last_step_of(place: Path, attempt: int, rank: int) -> tuple[int, int]:
    """The last step that a rank has done, and its process."""
    told = place / f"steps-{attempt}-{rank}"
    step, pid = told.read_text().split() if told.exists() and told.read_text() else ("0", "0")
    return int(step), int(pid)


@pytest.mark.drill
def test_the_phases_of_a_real_kill_are_those_that_others_saw(tmp_path: Path) -> None:
    """Two ranks, one is killed; what the script and this test saw by their own clocks is what is told."""
    with job(
        holdfast("run", "--nproc-per-node", "2", "--run-dir", "run", str(SCRIPT)), cwd=tmp_path
    ) as launch:
        wait_until(lambda: last_step_of(tmp_path, 0, 1)[0] >= 12, 60, "step 12")
        killed_at = time.time()
        os.kill(last_step_of(tmp_path, 0, 1)[1], signal.SIGKILL)
        result = launch.wait(90)
    assert result.code == 0, result.text
    (incident,) = incidents_of(read_journal(tmp_path / "run" / "journal"))
    saw = {rank: ast.literal_eval((tmp_path / f"moments-1-{rank}").read_text()) for rank in (0, 1)}
    told, ends = by_name(incident), dict[str, float]()
    assert sum(told.values()) == incident.seconds_down
    assert UNKNOWN not in told
    cursor = incident.at
    for name, seconds in told.items():
        cursor += seconds
        ends[name] = cursor
    print(told, saw[0], killed_at)
    assert killed_at <= incident.at < killed_at + 0.5
    assert ends["start"] == pytest.approx(saw[0]["began"], abs=0.5)
    assert ends["setup"] == pytest.approx(saw[0]["setup"], abs=0.1)
    assert told["setup"] > 0.6
    assert ends["data"] == pytest.approx(saw[0]["data"], abs=0.1)
    assert told["data"] == pytest.approx(0.3, abs=0.2)
    assert 0.2 < told["first step"] < 0.7
    assert ends["first step"] == pytest.approx(saw[0]["first step"], abs=0.1)
    assert incident.at + incident.seconds_down == pytest.approx(ends["first step"])
    back = phases_text(incident.phases)
    assert back.count(",") == 2
    assert f"({back})" in result.err
    assert back in finish(holdfast("why", "run"), cwd=tmp_path).out
    assert back in finish(holdfast("status", "run"), cwd=tmp_path).out
