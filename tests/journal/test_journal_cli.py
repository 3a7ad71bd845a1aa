"""`holdfast journal`: for people, for programs, while the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from holdfast.journal.events import AttemptEnded, AttemptStarted, RunFinished, StepsDone, Warned
from holdfast.journal.writer import JournalWriter
from holdfast.record.directory import ControlDirectory
from kit.harness import finish, holdfast, job, wait_until
from kit.journals import Journal, killed_and_corrupted


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return killed_and_corrupted().store(tmp_path / "run")


def shown(run_dir: Path, *options: str) -> str:
    result = finish(holdfast("journal", str(run_dir), *options), cwd=run_dir.parent)
    assert result.code == 0, result.text
    assert result.err == ""
    return result.out


def test_people_see_one_line_an_event_with_decisions_and_their_evidence(run_dir: Path) -> None:
    text = shown(run_dir)
    assert "\x1b[" not in text, "no colours where there is no terminal"
    lines = text.splitlines()
    killed = next(line for line in lines if "rank 1 killed by SIGKILL" in line)
    assert killed.split()[2:4] == ["1", "agent-a"], "attempt, who"
    decided = next(index for index, line in enumerate(lines) if "decided resume: step_00000010" in line)
    assert lines[decided + 1].strip() == "because 4 files match their digests"
    assert lines[decided + 2].strip().startswith("not step_00000020-")
    assert "altered __0_0.distcp" in lines[decided + 2]
    assert lines[decided + 1].startswith(" " * 40)
    assert sum("steps 21–40, loss" in line for line in lines) == 1, "neighbouring batches are joined"


def test_programs_get_the_lines_exactly_as_they_are_in_the_files(run_dir: Path) -> None:
    newer = b'{"v":2,"at":4e9,"who":"rank-9","attempt":3,"seq":0,"body":{"event":"later","x":1},"more":[]}'
    (run_dir / "journal" / "new.jsonl").write_bytes(newer + b"\n")
    lines = shown(run_dir, "--json").splitlines()
    stored = [line for path in (run_dir / "journal").iterdir() for line in path.read_text().splitlines()]
    assert sorted(lines) == sorted(stored)
    assert lines[-1] == newer.decode()
    assert all(set(json.loads(line)) >= {"v", "at", "who", "attempt", "seq", "body"} for line in lines)
    times = [json.loads(line)["at"] for line in lines]
    assert times == sorted(times)


def test_events_are_chosen_by_attempt_name_and_age(run_dir: Path) -> None:
    second = [json.loads(line) for line in shown(run_dir, "--json", "--attempt", "2").splitlines()]
    assert {line["attempt"] for line in second} == {2}
    picked = shown(run_dir, "--json", "--event", "worker_failed", "--event", "resumed").splitlines()
    names = [json.loads(line)["body"]["event"] for line in picked]
    assert sorted(names) == ["resumed"] * 3 + ["worker_failed"] * 3
    assert shown(run_dir, "--since", "1") == ""
    JournalWriter(run_dir / "journal", "rank-7", 3).write(Warned(message="just now"))
    assert "just now" in shown(run_dir, "--since", "60")


def test_a_mistyped_event_is_refused_with_the_names_that_exist(run_dir: Path) -> None:
    result = finish(holdfast("journal", str(run_dir), "--event", "worker_faild"), cwd=run_dir)
    assert result.code == 2
    assert "worker_faild" in result.err
    assert "worker_failed" in result.err


@pytest.mark.parametrize("options", [(), ("--json",), ("--follow",), ("--report", "r.html")])
def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    result = finish(holdfast("journal", str(tmp_path), *options), cwd=tmp_path)
    assert result.code == 2
    assert "run.json" in result.err
    assert str(tmp_path) in result.err
    assert result.out == ""
    assert not (tmp_path / "r.html").exists()


def test_unreadable_lines_are_counted_on_stderr(run_dir: Path) -> None:
    (run_dir / "journal" / "junk.jsonl").write_bytes(b"junk\nmore junk\n")
    result = finish(holdfast("journal", str(run_dir), "--json"), cwd=run_dir)
    assert result.code == 0
    assert result.err == "holdfast: skipped 2 unreadable journal lines\n"
    assert all(json.loads(line) for line in result.out.splitlines())


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, options: list[str]) -> None:
    """As in `holdfast journal RUN | head -1`."""
    run = Journal().start().steps(1, 60_000, batch=20)
    for line in run.lines[5::2]:
        line.body = Warned(message="x" * 200)
    run.store(tmp_path)
    read, write = os.pipe()
    process = subprocess.Popen(
        holdfast("journal", str(tmp_path), *options), stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert os.read(read, 10)
    os.close(read)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


def test_follow_shows_what_comes_and_ends_with_the_run(tmp_path: Path) -> None:
    Journal().start().store(tmp_path)
    writer = JournalWriter(tmp_path / "journal", "rank-0", 1)
    with job(holdfast("journal", str(tmp_path), "--follow"), cwd=tmp_path) as running:
        wait_until(lambda: "attempt started" in running.output().out, 20, "what was there is shown")
        writer.write(StepsDone(first=1, seconds=[0.1, 0.1], loss=[2.5, 2.25]))
        wait_until(lambda: "steps 1–2, loss 2.5 → 2.25" in running.output().out, 20, "a new line is shown")
        assert running.process.poll() is None
        writer.write(RunFinished(step=2, samples=2, tokens=0))
        JournalWriter(tmp_path / "journal", "agent-a", 1).write(AttemptEnded(outcome="finished"))
        result = running.wait(20)
    assert result.code == 0, result.text
    assert "attempt finished" in result.out
    assert result.err == ""


def test_follow_ends_after_the_last_step_also_when_no_launcher_records_the_end(tmp_path: Path) -> None:
    Journal().start().store(tmp_path)
    JournalWriter(tmp_path / "journal", "rank-0", 1).write(RunFinished(step=2, samples=2, tokens=0))
    assert finish(holdfast("journal", str(tmp_path), "--follow"), cwd=tmp_path, timeout=20).code == 0


def test_follow_goes_on_when_a_finished_run_was_started_again_and_ctrl_c_is_quiet(run_dir: Path) -> None:
    JournalWriter(run_dir / "journal", "agent-a", 4).write(AttemptStarted(epoch=4, world_size=2))
    with job(holdfast("journal", str(run_dir), "--follow", "--json"), cwd=run_dir) as running:
        wait_until(lambda: '"epoch":4' in running.output().out, 20, "the new attempt is shown")
        JournalWriter(run_dir / "journal", "rank-0", 4).write(Warned(message="still here"))
        wait_until(lambda: "still here" in running.output().out, 20, "it still follows")
        running.signal(signal.SIGINT)
        result = running.wait(20)
    assert (result.code, result.err) == (0, ""), result.text


def test_follow_filters_too(tmp_path: Path) -> None:
    Journal().start().store(tmp_path)
    writer = JournalWriter(tmp_path / "journal", "rank-0", 1)
    with job(
        holdfast("journal", str(tmp_path), "-f", "--json", "--event", "warned"), cwd=tmp_path
    ) as running:
        writer.write(StepsDone(first=1, seconds=[0.1]))
        writer.write(Warned(message="look"))
        wait_until(lambda: running.output().out, 20, "the event is shown")
        writer.write(RunFinished(step=1, samples=1, tokens=0))
        result = running.wait(20)
    assert [msgspec.json.decode(line)["body"]["event"] for line in result.out.splitlines()] == ["warned"]


def test_the_report_is_written_and_named(run_dir: Path) -> None:
    destination = run_dir.parent / "report.html"
    assert shown(run_dir, "--report", str(destination)) == f"wrote {destination}\n"
    page = destination.read_text()
    assert page.startswith("<!doctype html>")
    assert "rank 1 killed by SIGKILL" in page


def test_a_report_that_cannot_be_written_is_an_error_that_names_it(run_dir: Path) -> None:
    destination = run_dir / "missing" / "report.html"
    result = finish(holdfast("journal", str(run_dir), "--report", str(destination)), cwd=run_dir)
    assert result.code == 2
    assert str(destination) in result.err
    assert "is not a directory; make it first" in result.err
    both = finish(holdfast("journal", str(run_dir), "--report", "r.html", "--json"), cwd=run_dir)
    assert both.code == 2
    assert not (run_dir / "r.html").exists()


def test_who_reads_only_the_beginning_has_seen_enough(tmp_path: Path) -> None:
    """`| head` is no failure; a disk that is full is, and told; standard output may be closed."""
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    with contextlib.closing(JournalWriter(control.journal, "launcher", 0)) as journal:
        for number in range(2000):  # more than a pipe's reader is waited for
            journal.write(Warned(message=f"{number} {'x' * 200}"))
    printed = shlex.join(holdfast("journal", str(tmp_path / "run")))
    for ending, code, told in (
        ("| head -1", 0, ""),
        ("> /dev/full", 1, "the output cannot be written: No space left on device"),
        (">&-", 0, ""),
    ):
        done = finish(["bash", "-c", f"set -o pipefail; {printed} {ending}"], cwd=tmp_path, timeout=60)
        assert done.code == code, (ending, done)
        assert told in done.err
        assert "Traceback" not in done.err
        assert len(done.err.splitlines()) == bool(told)
