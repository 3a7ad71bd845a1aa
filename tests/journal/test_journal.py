"""The journal's files: several writers, a reader at the same time, crashes, full disks, other releases."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.lines import duration, moment, printable
from holdfast.journal import EVENT_NAMES, AnyEvent, Event, Unknown, condense, event_name
from holdfast.journal import writer as writers
from holdfast.journal.events import (
    AttemptEnded,
    DecisionMade,
    RejectedOption,
    StepsDone,
    Warned,
    WorkerFailed,
    decode_loss,
    encode_loss,
)
from holdfast.journal.line import parse_line
from holdfast.journal.reader import JournalReader, read_journal
from holdfast.journal.writer import JournalWriter
from kit.harness import finish, job, python, wait_until


def script(path: Path, text: str) -> Path:
    path.write_text(
        "import os, sys, signal, resource\nfrom pathlib import Path\n"
        "from holdfast.journal.writer import JournalWriter\n"
        "from holdfast.journal.events import Warned\n"
        "from holdfast.journal.reader import *\n" + text
    )
    return path


# --- several writers, one reader


def test_no_line_is_lost_or_mixed_while_several_processes_write_and_a_reader_polls(tmp_path: Path) -> None:
    program = script(
        tmp_path / "write.py",
        """
writer = JournalWriter(Path("journal"), f"rank-{sys.argv[1]}", 1)
for number in range(400):
    writer.write(Warned(message=f"{sys.argv[1]}:{number}:" + "x" * (number * 37 % 5000)))
""",
    )
    reader = JournalReader(tmp_path / "journal")
    seen = []
    with (
        job(python(program, "0"), cwd=tmp_path) as first,
        job(python(program, "1"), cwd=tmp_path) as second,
        job(python(program, "2"), cwd=tmp_path) as third,
    ):
        jobs = (first, second, third)

        def all_ended() -> bool:
            seen.extend(reader.poll())
            return all(one.process.poll() is not None for one in jobs)

        wait_until(all_ended, 30, "the writers end")
        assert [one.wait().code for one in jobs] == [0, 0, 0]
    seen.extend(reader.poll())
    assert reader.unreadable == 0
    for rank in range(3):
        mine = [line for line in seen if line.who == f"rank-{rank}"]
        assert [line.seq for line in mine] == list(range(400)), "in order, without a gap"
        for number, line in enumerate(mine):
            assert line.body == Warned(message=f"{rank}:{number}:" + "x" * (number * 37 % 5000))


def test_threads_of_one_writer_do_not_mix_their_lines(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "rank-0", 1)
    threads = [
        threading.Thread(target=lambda: [writer.write(Warned(message="y" * 3000)) for _ in range(100)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line.seq for line in read_journal(tmp_path)] == list(range(400))


# --- crashes


def test_sigkill_at_any_moment_leaves_whole_lines_and_at_most_one_torn_end(tmp_path: Path) -> None:
    program = script(
        tmp_path / "write.py",
        """
writer = JournalWriter(Path("journal"), f"rank-{sys.argv[1]}", 1)
print("writing", flush=True)
while True:
    writer.write(Warned(message="z" * 200_000))
""",
    )
    for rank in range(4):
        with job(python(program, str(rank)), cwd=tmp_path) as running:

            def written(rank: int = rank) -> int:
                return sum(path.stat().st_size for path in tmp_path.glob(f"journal/*-rank-{rank}-*"))

            wait_until(lambda rank=rank, written=written: written() > 900_000 * (rank + 1), 20, "it grows")
            running.signal(signal.SIGKILL)
            running.wait()
    reader = JournalReader(tmp_path / "journal")
    lines = reader.poll()
    assert reader.unreadable == 0
    for rank in range(4):
        mine = [line for line in lines if line.who == f"rank-{rank}"]
        assert mine
        assert [line.seq for line in mine] == list(range(len(mine)))
        assert all(line.body == Warned(message="z" * 200_000) for line in mine)


def test_a_torn_last_line_waits_for_its_rest(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "rank-0", 1)
    writer.write(Warned(message="whole"))
    writer.write(Warned(message="torn"))
    data = writer.path.read_bytes()
    path = writer.path
    path.write_bytes(data[:-10])
    reader = JournalReader(tmp_path)
    assert [line.body for line in reader.poll()] == [Warned(message="whole")]
    assert reader.poll() == []
    with path.open("ab") as file:
        file.write(data[-10:])
    assert [line.body for line in reader.poll()] == [Warned(message="torn")]
    assert reader.unreadable == 0


def test_a_torn_line_that_never_gets_its_rest_is_skipped_when_its_file_goes_on(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "rank-0", 1)
    writer.path.write_bytes(b'{"v":1,"at":1.0,"who":"rank-0","attempt":1,"seq":0,"bo')
    writer.write(Warned(message="after"))
    reader = JournalReader(tmp_path)
    assert [line.body for line in reader.poll()] == [Warned(message="after")]
    assert reader.unreadable == 1


# --- file systems that refuse


def test_a_full_disk_does_not_raise_and_is_reported_once_writing_works(tmp_path: Path) -> None:
    """The file-size limit gives what a full disk gives: a short write, then an error."""
    program = script(
        tmp_path / "full.py",
        """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = JournalWriter(Path("journal"), "rank-0", 1)
writer.write(Warned(message="before"))
size = writer.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, resource.RLIM_INFINITY))
for number in range(3):
    writer.write(Warned(message=f"lost {number}"))
assert writer.path.stat().st_size == size + 40, "the limit tore a line"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write(Warned(message="after"))
reader = JournalReader(Path("journal"))
messages = [(line.seq, line.body.message) for line in reader.poll()]
assert messages == [(0, "before"), (1, "3 earlier events could not be written"), (2, "after")], messages
assert reader.unreadable == 1
""",
    )
    result = finish(python(program), cwd=tmp_path)
    assert result.code == 0, result.text
    assert result.err.count("cannot write the journal") == 1, result.text
    assert "the run goes on without it" in result.err


def test_an_unusable_directory_does_not_raise_and_is_reported_once_writing_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "journal"
    folder.write_text("a file where the directory should be")
    writer = JournalWriter(folder, "agent-a", 1)
    with caplog.at_level(logging.ERROR, "holdfast.journal"):
        writer.write(Warned(message="one"))
        writer.write(Warned(message="two"))
    assert len(caplog.records) == 1
    assert str(writer.path) in caplog.text
    folder.unlink()
    writer.write(Warned(message="three"))
    messages = [line.body.message for line in read_journal(folder) if isinstance(line.body, Warned)]
    assert messages == ["2 earlier events could not be written", "three"]


def test_values_that_json_cannot_carry_do_not_raise(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "agent-a", 1)
    writer.write(WorkerFailed(rank=0, node="a", pid=1, exit_code=1, message="bad bytes \udcff here"))
    writer.write(DecisionMade(about="x", chosen="y", evidence=[], details={"path": Path("p"), "big": 2**80}))
    loop: list[object] = []
    loop.append(loop)
    writer.write(DecisionMade(about="x", chosen="endless", evidence=[], details={"loop": loop}))
    writer.write(Warned(message="after"))
    first, second, lost, last = [line.body for line in read_journal(tmp_path)]
    assert isinstance(first, WorkerFailed)
    assert first.message == "bad bytes \\udcff here"
    assert isinstance(second, DecisionMade)
    assert second.details["path"] == "p"
    assert (lost, last) == (Warned(message="1 earlier events could not be written"), Warned(message="after"))


# --- other releases, and garbage


def test_an_event_of_a_newer_release_is_kept() -> None:
    line = parse_line(
        b'{"v":2,"at":1.5,"who":"r","attempt":1,"seq":0,"new":1,"body":{"event":"rotated","x":[1]}}'
    )
    assert line is not None
    assert line.body == Unknown(event="rotated", fields={"x": [1]})
    assert event_name(line.body) == "rotated"
    assert line.body.render().text == "rotated (from a newer release): x=[1]"


def test_a_known_event_whose_fields_changed_their_type_is_kept_and_added_fields_are_ignored() -> None:
    frame = b'{"v":2,"at":1,"who":"r","attempt":1,"seq":0,"body":%b}'
    changed = parse_line(frame % b'{"event":"warned","message":{"text":"t"}}')
    assert changed is not None
    assert changed.body == Unknown(event="warned", fields={"message": {"text": "t"}})
    added = parse_line(frame % b'{"event":"warned","message":"t","hint":"h"}')
    assert added is not None
    assert added.body == Warned(message="t")


def test_garbage_is_counted_and_skipped(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "rank-0", 1)
    writer.write(Warned(message="good"))
    garbage = [b"\xff\xfe", b"{}", b"[]", b"null", b'{"v":1', b"[" * 100_000, b'{"v":1,"at":1e999}',
               b"\0" * 50, b'{"v":1,"at":1,"who":"r","attempt":1,"seq":0,"body":[]}']  # fmt: skip
    (tmp_path / "junk.jsonl").write_bytes(b"\n\n".join(garbage) + b"\n")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.jsonl").mkdir()
    reader = JournalReader(tmp_path)
    assert [line.body for line in reader.poll()] == [Warned(message="good")]
    assert reader.unreadable == len(garbage)


@given(st.binary(max_size=200))
def test_any_bytes_parse_to_a_line_or_to_nothing(raw: bytes) -> None:
    parse_line(raw)


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none") == []


def test_lines_of_one_writer_keep_their_order_when_its_clock_is_set_back(tmp_path: Path) -> None:
    def put(name: str, at: float, who: str, seq: int) -> None:
        line = {
            "v": 1,
            "at": at,
            "who": who,
            "attempt": 1,
            "seq": seq,
            "body": {"event": "warned", "message": ""},
        }
        with (tmp_path / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    put("a.jsonl", 10.0, "a", 0)
    put("a.jsonl", 7.0, "a", 1)  # set back by three seconds
    put("a.jsonl", 11.0, "a", 2)
    put("b.jsonl", 9.0, "b", 0)
    put("b.jsonl", 10.5, "b", 1)
    order = [(line.who, line.seq) for line in read_journal(tmp_path)]
    assert order == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("a", 2)]


# --- events


TEXT = st.text(max_size=20)
SIMPLE: dict[object, st.SearchStrategy[object]] = {
    str: TEXT,
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    type(None): st.none(),
    Any: st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
    RejectedOption: st.builds(RejectedOption, TEXT, st.lists(TEXT, max_size=2)),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    arguments = [values_of(argument) for argument in get_args(kind)]
    if get_origin(kind) is list:
        return st.lists(arguments[0], max_size=3)
    if get_origin(kind) is dict:
        return st.dictionaries(arguments[0], arguments[1], max_size=3)
    return st.one_of(arguments)


def events_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: values_of(hints[name]) for name in kind.__struct_fields__})


EVENTS = st.one_of([events_of(kind) for kind in get_args(AnyEvent)])


@settings(max_examples=200, deadline=None)
@given(event=EVENTS, who=TEXT, attempt=st.integers(0, 10**6), at=st.floats(0, 4e9))
def test_every_event_survives_the_file(event: Event, who: str, attempt: int, at: float) -> None:
    raw = msgspec.json.encode({"v": 1, "at": at, "who": who, "attempt": attempt, "seq": 3, "body": event})
    line = parse_line(raw)
    assert line is not None
    assert line.body == event
    assert type(line.body) is type(event)
    assert (line.at, line.who, line.attempt, line.seq) == (at, who, attempt, 3)
    shown = line.body.render()
    assert all(text.isprintable() for text in [shown.text, *shown.details])


@pytest.mark.parametrize("kind", get_args(AnyEvent), ids=lambda kind: kind.__name__)
def test_every_event_renders_itself(kind: type[Event]) -> None:
    assert "render" in vars(kind)


def test_the_events_that_are_read_are_all_that_there_are() -> None:
    """One that is missing in the union would come back as unknown."""
    ours = {kind for kind in Event.__subclasses__() if kind.__module__.startswith("holdfast.")}
    assert ours == set(get_args(AnyEvent))


def test_every_event_has_its_own_name() -> None:
    assert len(set(EVENT_NAMES)) == len(EVENT_NAMES) == len(get_args(AnyEvent))


@given(st.none() | st.floats())
def test_a_loss_keeps_its_meaning_also_when_it_is_not_finite(loss: float | None) -> None:
    raw = msgspec.json.encode(StepsDone(first=1, seconds=[1.0], loss=[encode_loss(loss)]))
    back = decode_loss(msgspec.json.decode(raw, type=StepsDone).loss[0])
    assert (back is None) == (loss is None)
    if loss is not None and back is not None:
        assert back == loss or (math.isnan(back) and math.isnan(loss))


# --- texts


def test_text_from_a_worker_cannot_steer_a_terminal() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07 bell\rover\u202egnp.exe\ud800 end\n\nnext"
    shown = printable(hostile)
    assert shown.isprintable()
    assert "\\x1b[2J" in shown
    assert shown.endswith("end next")
    assert len(printable("x" * 10**7)) == 500


def test_steps_are_condensed_and_say_when_a_loss_is_not_finite() -> None:
    event = StepsDone(first=120, seconds=[0.042] * 61, loss=[3.21, *[None] * 59, 3.05])
    assert event.render().text == "steps 120–180, loss 3.21 → 3.05, 42 ms a step"
    assert (
        StepsDone(first=7, seconds=[2.0], loss=["nan"]).render().text
        == "step 7, loss NaN (1 not finite), 2.0 s a step"
    )
    assert AttemptEnded(outcome="failed", exit_code=-9).render().text == "attempt failed, killed by SIGKILL"
    assert StepsDone(first=7, seconds=[0.5, 0.5]).render().text == "steps 7–8, 500 ms a step"


def test_joining_rank_0s_batches_leaves_the_given_lines_alone() -> None:
    from kit.journals import Journal

    run = Journal().start().steps(1, 20, batch=10)
    run.write(StepsDone(first=1, seconds=[0.1] * 20), "rank-1")  # every rank does the same steps
    run.steps(21, 40)
    run.fail().steps(41, 42)
    before = msgspec.json.encode(run.lines)
    batches = [line.body for line in condense(run.lines) if isinstance(line.body, StepsDone)]
    assert [(body.first, len(body.seconds), len(body.loss)) for body in batches] == [(1, 40, 40), (41, 2, 2)]
    assert msgspec.json.encode(run.lines) == before


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0421, "42 ms"),
        (0.9996, "1.0 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_reading_a_journal_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, holdfast.journal.reader, holdfast.journal.writer, holdfast.journal.line, "
        "holdfast.observe.report, holdfast.cli.status; sys.exit('torch' in sys.modules)"
    )
    assert finish([sys.executable, "-c", code], cwd=tmp_path).code == 0


def test_a_file_system_that_does_not_answer_holds_nobody_up_and_costs_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = JournalWriter(tmp_path, "rank-0", 1)
    writer.write(Warned(message="0"))
    answers, real = threading.Event(), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (answers.wait(60), real(fd, data))[1])
    began = time.monotonic()
    for number in range(1, 20):
        writer.write(Warned(message=str(number)))
    writer.close()
    assert time.monotonic() - began < 5.0
    assert caplog.text.count("the file system does not answer") == 1
    answers.set()
    wait_until(lambda: len(list(read_journal(tmp_path))) == 20, 20, "what waited is written")
    assert [line.body.message for line in read_journal(tmp_path)] == [str(n) for n in range(20)]  # type: ignore[attr-defined]


def test_what_waits_for_a_file_system_is_bounded_and_what_did_not_fit_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "MOST_WAITING", 5)
    writer = JournalWriter(tmp_path, "rank-0", 1)
    answers, real = threading.Event(), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (answers.wait(60), real(fd, data))[1])
    for number in range(9):
        writer.write(Warned(message=str(number)))
    answers.set()
    wait_until(lambda: not writer._aside._waiting, 20, "what waited is written")
    writer.write(Warned(message="last"))
    writer.close()
    told = [line.body.message for line in read_journal(tmp_path)]  # type: ignore[attr-defined]
    assert "4 earlier events could not be written" in told
    assert [word for word in told if word.isdigit()] == ["0", "1", "2", "3", "4"]
    assert told[-1] == "last"


@pytest.mark.parametrize("at", [6.8e16, -6.8e16, 1e300, float("nan"), float("inf")])
def test_a_time_that_no_clock_has_is_shown_all_the_same(at: float) -> None:
    assert moment(at) == "a time out of range"
    assert moment(0.0).startswith(("1970-01-01", "1969-12-31"))
