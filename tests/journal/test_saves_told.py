"""What `holdfast run` prints of a run's saves: one line for each event, from whichever process it comes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.journal import Event, JournalLine, Unknown, events
from holdfast.journal.events import SaveLines
from holdfast.journal.writer import JournalWriter
from holdfast.launch import terminal
from holdfast.launch.terminal import WRITERS, SavesTold
from kit.harness import REPO, finish, holdfast, wait_until

NAME = "step_00000120-3fa9c1d2"
COMMITTED = events.SaveCommitted(
    checkpoint=NAME, step=120, parent=None, bytes=2048, files=2, seconds=3.1, blocked_seconds=0.012
)
LOCAL = events.SaveCommitted(
    checkpoint=NAME,
    step=120,
    parent=None,
    bytes=2048,
    files=2,
    seconds=0.31,
    blocked_seconds=0.012,
    tier="local",
)
STORY: list[tuple[str, Event, str]] = [
    ("rank-0", events.SaveStarted(checkpoint=NAME, step=120), "scheduled: step 120, {}"),
    ("writer-0", LOCAL, "committed: step 120, {}, local, 2.0 KiB in 310 ms, training stood still for 12 ms"),
    (
        "writer-0",
        events.CopyReplicated(checkpoint=NAME, step=120, rank=0, node="b", seconds=0.8),
        "replicated: step 120, {}, rank 0's part on b in 800 ms",
    ),
    ("writer-0", COMMITTED, "drained: step 120, {}, to the checkpoint root, 2.0 KiB in 3.1 s"),
    (
        "drain",
        events.CopyDrained(checkpoint=NAME, step=120, remote="s3://b/r", bytes=2048, seconds=9.4),
        "drained: step 120, {}, to s3://b/r, 2.0 KiB in 9.4 s",
    ),
    (
        "read-back",
        events.CopyReadBack(checkpoint=NAME, step=120, bytes=2048, seconds=6.0),
        "verified: step 120, {}, read back, 2.0 KiB in 6.0 s",
    ),
    (
        "rank-0",
        events.SaveSkipped(checkpoint=NAME, step=120, reason="the one before\nis being written"),
        "skipped: step 120, {}, the one before is being written",
    ),
    (
        "drain",
        events.DrainFailed(checkpoint=NAME, step=120, remote="s3://b/r", error="403"),
        "not drained: step 120, {}, to s3://b/r: 403",
    ),
    (
        "writer-0",
        events.ReplicaFailed(checkpoint=NAME, step=120, rank=0, node="b", error="late"),
        "not replicated: step 120, {}, rank 0's part on b: late",
    ),
]


def test_each_event_of_a_save_has_its_line() -> None:
    lines = SaveLines()
    for _, event, expected in STORY:
        assert lines.line(event) == f"save {expected.format(NAME)}"
    assert lines.line(events.Warned(message="x")) is None
    assert lines.line(Unknown(event="newer", fields={})) is None
    alone = SaveLines().line(COMMITTED)
    assert (
        alone == f"save committed: step 120, {NAME}, global, 2.0 KiB in 3.1 s, training stood still for 12 ms"
    )


def test_the_page_shows_every_line_that_there_is() -> None:
    page = (REPO / "docs" / "guides" / "async-saves.md").read_text(encoding="utf-8")
    for _, event, expected in STORY:
        assert f"save {expected.partition(':')[0]}" in page
        assert f"`{event.__struct_config__.tag}`" in page


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LOOK", 0.01)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[dict[str, JournalWriter]]:
    writers = {who: JournalWriter(tmp_path, who, 3) for who in (*sorted(WRITERS), "rank-1", "writer-1")}
    yield writers
    for writer in writers.values():
        writer.close()


@pytest.mark.usefixtures("quick")
def test_what_any_process_journals_of_a_save_is_printed_by_the_agent_that_leads(
    tmp_path: Path, journal: dict[str, JournalWriter]
) -> None:
    before = JournalWriter(tmp_path, "rank-0", 2)
    before.write(events.SaveStarted(checkpoint="of an earlier attempt", step=1))
    said: list[str] = []
    told = SavesTold(tmp_path, said.append)
    told.follow(3, leads=True)
    for number, (who, event, expected) in enumerate(STORY):
        journal[who].write(event)
        wait_until(lambda: len(said) > number, 20, expected)  # noqa: B023 - called before it changes
    assert said == [f"save {expected.format(NAME)}" for _, _, expected in STORY]
    journal["writer-1"].write(LOCAL)
    told.follow(4, leads=False)
    journal["writer-0"].write(LOCAL)
    told.close()
    assert len(said) == len(STORY), "neither another rank's, nor what another agent tells"
    assert "holdfast-saves" not in {thread.name for thread in threading.enumerate()}
    before.close()


@pytest.mark.usefixtures("quick")
def test_a_flood_is_cut_and_what_was_left_out_is_counted(
    tmp_path: Path, journal: dict[str, JournalWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "MOST_A_MINUTE", 5)
    said: list[str] = []
    for step in range(12):
        journal["rank-0"].write(events.SaveStarted(checkpoint=NAME, step=step))
    told = SavesTold(tmp_path, said.append)
    told.follow(3, leads=True)
    told.close()
    assert [line.partition(":")[0] for line in said] == ["save scheduled"] * 5 + ["save lines left out"]
    assert "left out: 7" in said[-1]


@pytest.mark.usefixtures("quick")
def test_local_saves_at_every_step_do_not_drown_out_the_rest(
    tmp_path: Path, journal: dict[str, JournalWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    told = SavesTold(tmp_path, said.append)
    told.follow(3, leads=True)
    for _ in range(200):
        journal["writer-0"].write(LOCAL)
    journal["rank-0"].write(events.SaveStarted(checkpoint=NAME, step=7))
    wait_until(lambda: len(said) == 2, 20, "both are told")
    assert said[1].startswith("save scheduled")
    monkeypatch.setattr(terminal, "OFTEN", 0.0)
    journal["writer-0"].write(LOCAL)
    wait_until(lambda: len(said) == 3, 20, "the next one is told")
    assert said[2].endswith("(and 199 before it)")
    told.close()


@pytest.mark.usefixtures("quick")
def test_nothing_is_printed_where_it_is_off_or_cannot_be_read(
    tmp_path: Path, journal: dict[str, JournalWriter]
) -> None:
    journal["rank-0"].write(events.SaveStarted(checkpoint=NAME, step=1))
    said: list[str] = []
    for place, enabled in ((tmp_path, False), (tmp_path / "nowhere", True)):
        told = SavesTold(place, said.append, enabled=enabled)
        told.follow(3, leads=True)
        told.close()
    assert said == []


@pytest.mark.drill
def test_a_run_with_asynchronous_saves_tells_each_of_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(REPO / 'tests')!r})\n{SCRIPT}")
    remote = f"file://{tmp_path}/remote"
    settings = {
        "checkpoint.async_save": "true",
        "checkpoint.interval": "3",
        "checkpoint.remote_root": remote,
        "checkpoint.read_back_rate": "0",
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    result = finish(holdfast("run", "--run-dir", "run", *flags, str(script)), cwd=tmp_path, timeout=120)
    assert result.code == 0, result.text
    told = re.findall(r"^[\d:]{8} holdfast: save (\w+): step (\d+), step_\d{8}-\w+", result.err, re.MULTILINE)
    assert told, result.text
    for what in ("scheduled", "committed", "drained"):
        assert [step for kind, step in told if kind == what] == ["3", "6"], result.text
    assert ("verified", "3") in told, result.text
    again = finish(
        holdfast("run", "--run-dir", "quiet", *flags[:4], "--set", "launch.print_saves=false", str(script)),
        cwd=tmp_path,
        timeout=120,
    )
    assert again.code == 0, again.text
    assert "save scheduled" not in again.text


SCRIPT = """
import os, pathlib, time
from holdfast.record.launches import LaunchInfo
from kit.tiny import train

run_dir = pathlib.Path(LaunchInfo.from_environment(os.environ).run_dir)

def is_read_back():
    return any(b"copy_read_back" in one.read_bytes() for one in run_dir.glob("journal/*read-back*"))

def at_step(step, run):
    # A longer run would have more boundaries until the first checkpoint has been read back.
    deadline = time.monotonic() + 60
    while step == 6 and run_dir.name == "run" and not is_read_back() and time.monotonic() < deadline:
        run._session.saving.at_boundary()
        time.sleep(0.05)

train(run_dir, until=6, at_step=at_step)
"""


# --- the end of a run ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_the_last_line_says_what_was_met_and_never_waits_for_long(
    tmp_path: Path, journal: dict[str, JournalWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal that cannot be read in time must not be told as a run without an incident."""
    journal["rank-0"].write(events.AttemptStarted(epoch=1, world_size=1))
    journal["rank-0"].write(events.StepsDone(first=1, seconds=[0.1] * 7))
    said: list[str] = []
    told = SavesTold(tmp_path, said.append)
    told.follow(3, leads=True)
    told.finished("runs/a")
    assert said == ["finished: 7 steps, no incident"]
    released = threading.Event()

    def stuck(self: SavesTold, since: int) -> list[JournalLine]:
        released.wait(60)
        return []

    monkeypatch.setattr(terminal, "LAST_LINE", 0.1)
    monkeypatch.setattr(SavesTold, "_read", stuck)
    began = time.monotonic()
    told.finished("runs/a")
    released.set()
    assert time.monotonic() - began < 10
    assert said[1] == "finished: 7 steps; the journal could not be read in time: holdfast why runs/a"
    follower = SavesTold(tmp_path, said.append)
    follower.follow(3, leads=False)
    follower.finished("runs/a")
    assert len(said) == 2, "only the agent that leads says it"
