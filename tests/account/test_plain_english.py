"""What people read is plain English: the words of the design stay in the journal's fields and the docs."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.account.answers import account_of_failure
from holdfast.account.words import incident_line, incident_text
from holdfast.errors import MEANINGS
from holdfast.launch.incident.hang import HangRecord, HangReport, RankEvidence, merge, summarise
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.evidence import Hang, Position
from holdfast.policy.recovery import Decision, recover
from holdfast.policy.results import Rejection
from holdfast.policy.signs import Action, Cause, activity, deed, origin
from holdfast.record.attempts import FailureRecord
from kit.worlds.recovery_worlds import GIVEN, Driver, Fault, Rejecting, drivers, faults, often, rejections

JARGON = re.compile(
    r"\b(sections?|group \d+|#\d+ of|rungs?|lower_rung|parked|rendezvous|probation|proven|fenced|lease"
    r"|cannot cure exit code|exit code 1[6-9]|exit code [23]\d)\b",
    re.I,
)
again = st.just(Fault(exit_code=16, cause=Cause.DATA))
"""The same step is rejected once more."""
SECTIONS = ("", "step", "setup", "loading", "checkpointing", "export")
RULES = ("section", "heartbeat", "out_of_section", "initial", "exiting", "hello")


def read(*texts: str) -> None:
    for text in texts:
        found = JARGON.search(text)
        assert found is None, f"{found and found[0]!r} in {text!r}"


def read_account(driver: Driver, attempt: PastAttempt, decision: Decision) -> None:
    """All that is told of this decision, wherever the failure came from."""
    situation = driver.situation(attempt, 0.0)
    root = FailureRecord(
        rank=0, node="a", pid=1, exit_code=attempt.exit_code, at=1.0, message=attempt.message
    )
    hang = Hang(rank=0, node="a", section=attempt.section, seconds=5.0, limit=4.0, missing=[1])
    for first, hangs in ((root, []), (None, [hang]), (None, [])):
        account = account_of_failure(situation, decision, first, [root], hangs=hangs, detail=attempt.message)
        shown = incident_text(account, "run").replace(f"(exit code {account.exit_code})", "")
        read(
            shown, incident_line(account), account.who, account.what, account.done, account.next, *account.why
        )
    read(decision.reason, *decision.evidence)


class Reading(Rejecting):
    """Reads what would be told of each decision."""

    def check(self, attempt: PastAttempt, decision: Decision) -> None:
        super().check(attempt, decision)
        read_account(self, attempt, decision)


@settings(deadline=None, max_examples=150)
@given(
    drivers,
    st.lists(rejections, min_size=1, max_size=2),
    st.lists(faults | often | again, min_size=1, max_size=25),
    st.sampled_from(["warn", "raise", "rollback"]),
)
def test_no_decision_is_told_in_the_words_of_the_design(
    driver: Driver, drawn: list[Rejection], sequence: list[Fault], policy: str
) -> None:
    reading = Reading(**{name: driver.__dict__[name] for name in GIVEN})
    reading.drawn, reading.nan_policy = drawn, policy
    reading.play(sequence)


@pytest.mark.parametrize("code", [17, 18, 19, 20, 24, 25])
def test_what_a_restart_cannot_cure_is_told_by_its_meaning_and_not_by_its_code(code: int) -> None:
    driver = Driver(max_restarts=3, rungs=[10])
    failed = driver.attempt(1, Fault(exit_code=code))
    decision = recover([], driver.situation(failed, 0.0))
    assert decision.action is Action.STOP
    read_account(driver, failed, decision)


def test_every_code_says_what_it_means_in_plain_words() -> None:
    for meaning, then in MEANINGS.values():
        read(meaning, then)


def test_actions_causes_and_places_have_words_of_their_own() -> None:
    read(*(deed(one) for one in Action), *(origin(one) for one in Cause))
    read(*(activity(one, exiting) for one in SECTIONS for exiting in (False, True)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("section", SECTIONS)
def test_a_hang_is_told_in_one_sentence(rule: str, section: str) -> None:
    for state in ("", "S", "T", "t", "D"):
        for missing, silent in (((), ()), ((1,), ()), ((), (1,)), ((1,), (2, 3))):
            for collective in ("", "all_reduce #412 of group 0"):
                record = HangRecord(
                    rank=0, node="a", section=section, rule=rule, seconds=5.0, limit=4.0, state=state,
                    where="train.py:71 in forward", collective=collective, missing=missing, silent=silent,
                )  # fmt: skip
                read(summarise(record))


def test_the_culprit_is_told_first_and_all_that_wait_alike_once() -> None:
    waits = Position(group="0", entered=7, name="all_reduce", waits_in=7, members=(0, 1, 2, 3))
    behind = Position(group="0", entered=6, name="all_reduce", members=(0, 1, 2, 3))
    hung = [
        HangRecord(rank=rank, node="a", section="step", seconds=5.0, limit=4.0, where=where)
        for rank, where in enumerate(
            ["train.py:71 in forward", "train.py:9 in load", *["train.py:71 in forward"] * 2]
        )
    ]
    ranks = [RankEvidence(rank=rank, pid=1, positions=[behind if rank == 1 else waits]) for rank in range(4)]
    found = merge([HangReport(node="a", at=0.0, seconds=0.0, hung=hung, ranks=ranks)], world=4)
    assert found.told == [
        "rank 1 stood still for 5 s in its training step (4 s are allowed): it was at train.py:9 in load",
        "ranks 0, 2-3 waited for rank 1 in an all_reduce (train.py:71 in forward)",
    ]
