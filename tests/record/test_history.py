"""An incident is kept flat, as releases before this one wrote and read it."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.policy.budgets import PastAttempt
from holdfast.policy.recovery import Decision
from holdfast.policy.results import Findings, How, Rerun, Settled, Trial, Window
from holdfast.policy.signs import Action
from holdfast.record.attempts import begin_attempt
from holdfast.record.directory import ControlDirectory
from holdfast.record.history import INCIDENT, keep_incident, past_attempts
from holdfast.record.lease import Fence, claim

OF_THE_DECISION = {
    "action": "lower_rung",
    "avoid": ["step_00000020-3fa9c1d2"],
    "rerun": {
        "step": 24,
        "bad": [],
        "can_exclude": False,
        "accept": False,
        "breach": True,
        "settles": False,
    },
    "trial": {"suspects": ["step_00000020-3fa9c1d2"], "until": 24},
    "verdict": "reproducible",
    "suspect": ["step_00000020-3fa9c1d2"],
    "acquit": ["step_00000010-0123abcd"],
    "skip": {"epoch": 0, "first": 3, "last": 4},
    "settled": [
        {"step": 24, "how": "shift", "window": None, "world_size": 0, "shown": True, "why": ""},
    ],
}
"""As the first release that decided on rejections has it in `incident.json`."""
FINDINGS = Findings(
    avoid=["step_00000020-3fa9c1d2"],
    rerun=Rerun(step=24, bad=[], breach=True),
    trial=Trial(suspects=["step_00000020-3fa9c1d2"], until=24),
    verdict="reproducible",
    suspect=["step_00000020-3fa9c1d2"],
    acquit=["step_00000010-0123abcd"],
    skip=Window(0, 3, 4),
    settled=[Settled(step=24, how=How.SHIFT, shown=True)],
)


def begun(folder: Path) -> tuple[ControlDirectory, Path]:
    control, _ = ControlDirectory.open_or_create(folder / "run")
    fence = Fence(control, claim(control, "launch", 60.0).epoch)
    number = begin_attempt(control, fence, "launch", 2).number
    return control, control.attempt(number) / INCIDENT


def test_an_incident_of_an_earlier_release_is_read_with_its_findings(tmp_path: Path) -> None:
    control, path = begun(tmp_path)
    told = {"number": 1, "launch": "launch", "outcome": "failed", "cause": "checkpoint", "exit_code": 16}
    path.write_text(json.dumps({**told, **OF_THE_DECISION, "culprit_node": "a", "cluster": "unknown here"}))
    (past,) = past_attempts(control)
    assert (past.cause, past.exit_code, past.culprit_node, past.action) == (
        "checkpoint",
        16,
        "a",
        "lower_rung",
    )
    assert past.decided == FINDINGS


def test_an_incident_is_written_flat_and_read_again_as_it_was(tmp_path: Path) -> None:
    control, path = begun(tmp_path)
    failed = PastAttempt(number=1, launch="launch", outcome="failed", cause="checkpoint", exit_code=16)
    fields = {name: getattr(FINDINGS, name) for name in Findings.__struct_fields__}
    decision = Decision(
        action=Action.LOWER_RUNG,
        exit_code=0,
        reason="r",
        evidence=["e"],
        restarts_left=2,
        rotate_by=1,
        **fields,
    )
    keep_incident(control, failed, decision)
    kept = json.loads(path.read_text())
    assert "decided" not in kept
    assert {name: kept[name] for name in OF_THE_DECISION} == OF_THE_DECISION
    (past,) = past_attempts(control)
    assert past.decided == FINDINGS
    assert past.action == "lower_rung"
