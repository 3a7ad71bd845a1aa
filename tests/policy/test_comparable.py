"""When two failures are the same one: what is drawn anew in every run tells nothing, the class does."""

from __future__ import annotations

import string
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.budgets import PastAttempt
from holdfast.policy.evidence import comparable
from holdfast.policy.recovery import Decision, Situation, recover
from holdfast.policy.signs import Action, Cause

DRAWN = st.text(string.ascii_lowercase + string.digits + "_", min_size=8, max_size=8)
HEX = "0123456789abcdef"


def hexes(least: int, most: int) -> st.SearchStrategy[str]:
    return st.text(HEX, min_size=least, max_size=most)


PASSING = {
    "tmp": st.builds("/tmp/{}".format, DRAWN),
    "cache": st.builds("/tmp/cache_{}/kernel.o".format, DRAWN),
    "nested": st.builds("/scratch/7/tmp/job.{}/{}/x".format, st.integers(1, 10**7), DRAWN),
    "name": st.builds("tmp{}.lock".format, DRAWN),
    "shm": st.builds("/dev/shm/torch_{}_{}".format, st.integers(2, 4_194_304), hexes(8, 12)),
    "address": st.builds("0x{}".format, hexes(1, 16)),
    "pid": st.builds("(pid {})".format, st.integers(2, 4_194_304)),
    "uuid": st.uuids().map(str),
    "token": hexes(8, 32),
    "port": st.builds("node-a:{}".format, st.integers(1024, 65535)),
    "said port": st.builds("port={}".format, st.integers(1, 65535)),
    "clock": st.builds("{:%Y-%m-%d %H:%M:%S}".format, st.datetimes(datetime(1970, 1, 1))),
    "took": st.builds("after {:.3f} s".format, st.floats(0, 1e12)),
    "milliseconds": st.builds("{} ms".format, st.integers(0, 10**12)),
    "number": st.integers(10**5, 10**18).map(str),
    "size": st.builds("{:.2f} GiB".format, st.floats(0, 1e6)),
    "checkpoint": st.builds("step_00000040-{}".format, hexes(16, 16)),
}
ERRORS = [
    "RuntimeError", "ValueError", "OSError", "FileNotFoundError", "KeyError", "torch.OutOfMemoryError",
    "torch.distributed.DistBackendError", "Deadbeefdeadbeef", "Facadefacadefaca", "a.b.Tmpabcdefgh",
]  # fmt: skip


@pytest.mark.parametrize("kind", PASSING)
@given(st.data())
def test_what_is_drawn_anew_never_makes_another_failure(kind: str, data: st.DataObject) -> None:
    one, other = (data.draw(PASSING[kind]) for _ in range(2))
    around = data.draw(
        st.sampled_from(["RuntimeError: cannot open {} twice", "OSError: bad: '{}'", "{}: no"])
    )
    assert comparable(around.format(one)) == comparable(around.format(other))


@given(st.sampled_from(ERRORS), st.sampled_from(ERRORS), st.data())
def test_another_class_is_always_another_failure(one: str, other: str, data: st.DataObject) -> None:
    text = data.draw(st.one_of(*PASSING.values(), st.text(max_size=20)))
    assert (comparable(f"{one}: {text}") == comparable(f"{other}: {text}")) == (one == other)


@given(st.text())
def test_any_text_is_taken(text: str) -> None:
    assert comparable(comparable(text)) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ImportError: cannot import x from /home/u/a.py", "ImportError: cannot import x from /home/u/b.py"),
        ("ImportError: x in /tmp/tmpabcdefgh/a.py", "ImportError: x in /tmp/tmpabcdefgh/b.py"),
        ("RuntimeError: shapes (1x4 and 5x2)", "RuntimeError: shapes (1x4 and 6x2)"),
        ("KeyError: 'layers.11.weight'", "KeyError: 'layers.12.weight'"),
        (
            "CheckpointError: step_00000020-aaaaaaaaaaaaaaaa",
            "CheckpointError: step_00000040-aaaaaaaaaaaaaaaa",
        ),
    ],
)
def test_what_tells_causes_apart_stays(one: str, other: str) -> None:
    assert comparable(one) != comparable(other)


def outcome(cause: Cause, messages: list[str]) -> list[Decision]:
    """What is decided about attempts that end one after the other with these messages."""
    past: list[PastAttempt] = []
    decisions = []
    for number, message in enumerate(messages, 1):
        attempt = PastAttempt(
            number=number,
            launch="l",
            outcome="failed",
            cause=cause,
            exit_code=1,
            message=message,
            nodes=["a"],
        )
        decisions.append(recover(past, Situation(attempt=attempt, max_restarts=100)))
        past.append(attempt)
    return decisions


def test_a_failure_that_only_names_another_temporary_file_came_back() -> None:
    """It is not said again and again that it may not happen again, and the run ends as documented."""
    names = ["/tmp/cache_vzyqfd5e/x.o (ce4c533aa08c)", "/tmp/cache_vvscekix/x.o (7ce57fbacbaf)",
             "/tmp/cache_9qaveci8/x.o (ff305d7eccc8)"]  # fmt: skip
    unknown = outcome(Cause.UNKNOWN, [f"RuntimeError: cannot read {name}" for name in names])
    assert [one.action for one in unknown] == [Action.RESTART, Action.RESTART, Action.STOP]
    assert "may not happen again" in unknown[0].reason
    assert "the same failure came back once" in unknown[1].reason
    assert "the same failure came back 3 times" in unknown[2].reason
    own = outcome(Cause.JOB, [f"ValueError: cannot read {name}" for name in names[:2]])
    assert [one.action for one in own] == [Action.RESTART, Action.STOP]
    assert own[1].reason == "the same error repeated without progress"
