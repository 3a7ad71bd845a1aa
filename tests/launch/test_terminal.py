"""An incident in one line, from records of this and other releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.launch.terminal import ShownDecision, line_of_record
from holdfast.policy.recovery import Decision
from holdfast.policy.signs import Action
from holdfast.record.attempts import FailureRecord


def failure(exit_code: int, message: str = "", node: str = "node-b") -> FailureRecord:
    return FailureRecord(rank=1, node=node, pid=7, exit_code=exit_code, at=0.0, message=message)


def test_a_kill_and_its_restart() -> None:
    decided = ShownDecision(action="restart", reason="why", restarts_left=2)
    line = line_of_record(
        attempt=3, cause="infrastructure", root=failure(-9), decision=decided, step=412, max_restarts=3
    )
    assert line == (
        "attempt 3: rank 1 on node-b killed by SIGKILL (infrastructure) at step 412 → restart, 2 of 3 left"
    )


def test_an_error_and_its_stop() -> None:
    decision = ShownDecision(action="stop", exit_code=1, reason="the same error repeated", restarts_left=2)
    line = line_of_record(attempt=2, cause="job", root=failure(1, "ValueError: no\nluck"), decision=decision)
    assert line == (
        "attempt 2: rank 1 on node-b ended with exit code 1: ValueError: no luck (job) "
        "→ stop with code 1: the same error repeated"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"action": "rotate"}, "restart on other devices, 2 of 3 left"),
        (
            {"action": "exclude", "exclude": [{"node": "b", "device": None}], "spares": ["c"]},
            "restart without b on spare c, 2 of 3 left",
        ),
        (
            {"action": "exclude", "exclude": [{"node": "b", "device": "3", "reason": "ecc"}]},
            "restart without device 3 of b, 2 of 3 left",
        ),
        (
            {"action": "lower_rung", "avoid": ["step_00000120-3fa9c1d2"]},
            "restart from an older checkpoint, below step_00000120-3fa9c1d2, 2 of 3 left",
        ),
        (
            {"action": "lower_rung", "suspect": ["step_00000120-3fa9c1d2"], "verdict": "reproducible"},
            "reproducible: restart from an older checkpoint, below step_00000120-3fa9c1d2, which is suspect, "
            "2 of 3 left",
        ),
        (
            {"action": "restart", "skip": {"epoch": 0, "first": 7, "last": 8}, "verdict": "reproducible"},
            "reproducible: restart without batches 7 to 8, 2 of 3 left",
        ),
        ({"action": "wait"}, "wait for capacity"),
        ({"action": "requeue"}, "give the job back to its scheduler"),
        ({"action": "pray"}, "pray, 2 of 3 left"),
        ({"action": "shrink", "exclude": "of another shape"}, "restart with fewer nodes"),
    ],
)
def test_each_action_has_its_words_and_an_unknown_one_its_name(fields: dict[str, Any], expected: str) -> None:
    decided = ShownDecision.of({"restarts_left": 2, "reason": "", **fields})
    line = line_of_record(
        attempt=1, cause="", root=None, decision=decided, max_restarts=3, detail="node c left"
    )
    assert line == f"attempt 1: node c left → {expected}"


def test_before_the_decision_the_line_ends_early() -> None:
    assert line_of_record(attempt=1, cause="", root=None, decision=None) == "attempt 1: failed"


@settings(deadline=None)
@given(
    attempt=st.integers(0, 10**6),
    cause=st.text(max_size=20),
    code=st.integers(-70, 300),
    message=st.text(max_size=2000),
    node=st.text(max_size=300),
    fields=st.dictionaries(
        st.sampled_from(["action", "reason", "exclude", "avoid", "spares", "restarts_left", "exit_code"]),
        st.text(max_size=500) | st.integers() | st.lists(st.text(max_size=50), max_size=5) | st.none(),
    ),
)
def test_it_is_always_one_bounded_line_that_no_terminal_obeys(
    attempt: int, cause: str, code: int, message: str, node: str, fields: dict[str, Any]
) -> None:
    line = line_of_record(
        attempt=attempt,
        cause=cause,
        root=failure(code, message, node),
        decision=ShownDecision.of(fields),
        step=4,
    )
    assert line.isprintable()
    assert len(line) < 3000


def test_it_reads_this_releases_record(tmp_path: Path) -> None:
    decision = Decision(action=Action.STOP, exit_code=22, reason="spent", evidence=["x"], restarts_left=0)
    raw = msgspec.json.decode(msgspec.json.encode(decision))
    assert ShownDecision.of(raw) == ShownDecision.of(decision)
