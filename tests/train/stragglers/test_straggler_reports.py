"""Reports on stragglers where something goes wrong: they cost the report, and no rank waits for another."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.checkpoint.state.tracked import Tracked
from holdfast.config.sections import StragglerSettings
from holdfast.config.sources import load
from holdfast.journal.events import StragglerFound, StragglersReported
from holdfast.journal.writer import JournalWriter
from holdfast.record.directory import ControlDirectory
from holdfast.record.group import join_group
from holdfast.record.launches import LaunchInfo
from holdfast.record.lease import Fence, claim
from holdfast.train.membership import Membership
from holdfast.train.stragglers.reports import Actions, Stragglers, make_stragglers
from holdfast.train.stragglers.scores import COMPUTE, Named, ScoreKind, StragglerFinding
from kit.ranks.together import LIMIT, together

STEPS = 40
"""Enough for the first steps, which are not measured, and three reports."""
ALWAYS = StragglerSettings(enabled=True, report_time_interval=1e-9)


def train(stragglers: Stragglers, sleeps: float = 0.0, at_step: Callable[[int], None] | None = None) -> None:
    for step in range(STEPS):
        stragglers.begin_step()
        with stragglers.section("augment"):
            time.sleep(sleeps)
        stragglers.end_step()
        if at_step is not None:
            at_step(step)
        stragglers.meet(step)
    stragglers.close()


def broken(*args: object) -> Any:
    del args
    raise RuntimeError("a fault of our own")


def test_scores_are_printed_where_nobody_set_up_logging_and_logged_where_somebody_did(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Under `holdfast run`; elsewhere they only ever go to the log."""
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    fence = Fence(control, claim(control, "one", 30.0).epoch)
    member = Membership(control, fence, 1, "one", JournalWriter(control.journal, "rank-0", 1))
    settings = load(
        keywords={"straggler_enabled": True, "straggler_report_time_interval": 1e-9, "run_dir": str(tmp_path)}
    ).settings
    here = LaunchInfo(run_dir="run", run_id="r", launch="one", attempt=1, epoch=1, node="n")

    def reported(launched: LaunchInfo | None) -> tuple[list[str], list[str]]:
        caplog.clear()
        detector = make_stragglers(
            settings, join_group(5.0), member, launched, Tracked(), stop=print, save=print
        )
        train(detector, sleeps=0.001)
        detector.close()
        return capfd.readouterr().err.splitlines(), [record.getMessage() for record in caplog.records]

    printed, logged = reported(here)
    assert printed, "level INFO is not shown by default"
    assert all(
        re.match(
            r"[\d:]{8} holdfast(\[rank 0\])?: straggler scores at step \d+ \(1.00 is full speed\): \w", line
        )
        for line in printed
    ), printed
    assert any("slowest first of 1 rank: rank 0 (" in line for line in printed), printed
    assert logged == []
    assert reported(None) == ([], [])
    with caplog.at_level(logging.INFO, "holdfast"):
        printed, logged = reported(here)
        assert printed == [], "not twice"
        assert any("straggler scores at step" in line for line in logged)
    member.journal.close()


def test_a_report_that_fails_costs_the_report_and_not_the_run() -> None:
    def refuse(event: object) -> None:
        raise OSError("no space")

    stragglers = Stragglers(ALWAYS, join_group(5.0), actions=Actions(tell=refuse))
    train(stragglers)
    assert stragglers.finding is not None


@pytest.mark.parametrize(
    ("what", "where"), [("planning", 0), ("measuring", 1), ("judging", 0), ("choosing", 0), ("stop", 0)]
)
def test_a_fault_of_our_own_on_one_rank_leaves_no_other_waiting_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, where: int
) -> None:
    """F1: it is told and costs the report, and nothing is done for what could not be judged."""

    def work(rank: int) -> Any:
        excluded: list[str] = []

        def exclude(named: Named, step: int) -> None:
            del step
            excluded.append(named.key)

        stopping = {"stop": broken} if what == "stop" else {"exclude": exclude}
        why_not = broken if what == "choosing" else None
        actions = Actions(tell=lambda event: None, why_not=why_not, **stopping)
        stragglers = Stragglers(ALWAYS, join_group(LIMIT), actions=actions)

        def fail(step: int) -> None:
            if rank == where and step == STEPS // 4:
                hit = {"planning": "_plan", "measuring": "_own"}.get(what)
                if hit is not None:
                    setattr(stragglers, hit, broken)
                if what == "judging":
                    stragglers._judge.judge = broken  # type: ignore[method-assign]

        train(stragglers, 0.01 if rank == 1 else 0.0, fail)
        said = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
        return [said, excluded]

    results = together(tmp_path, 2, work)
    (told,), _ = results[where]
    assert what in told
    assert f"rank {where} after step" in told
    assert results[1 - where][0] == []
    assert results[0][1] == results[1][1] == []


@pytest.mark.parametrize(
    ("refused", "excluded"),
    [([], "rank 2"), (["rank 2"], "rank 1"), (["rank 1", "rank 2", "node n0"], None)],
)
def test_of_several_named_at_once_one_is_excluded_and_the_journal_says_so_of_no_other(
    refused: list[str], excluded: str | None
) -> None:
    """F2: the worst of those that can be; each is asked about once, and the others are told."""
    asked: list[str] = []
    done: list[str] = []
    told: list[Any] = []

    def why_not(named: Named) -> str:
        asked.append(named.key)
        return "nothing can take its place" if named.key in refused else ""

    def named(rank: int | None, share: float) -> Named:
        kind = ScoreKind.NODE if rank is None else ScoreKind.COMPUTE
        return Named(kind=kind, section=COMPUTE, rank=rank, node="n0", relative=0.5, share=share)

    fresh = [named(1, 0.5), named(2, 0.9), named(None, 0.3)]
    actions = Actions(tell=told.append, exclude=lambda one, step: done.append(one.key), why_not=why_not)
    stragglers = Stragglers(ALWAYS, join_group(5.0), actions=actions)
    findings = iter([StragglerFinding(scores=[], named=fresh, fresh=fresh)])
    stragglers._judge.judge = lambda ranks: next(findings, StragglerFinding(scores=[]))  # type: ignore[method-assign]
    train(stragglers)
    assert done == ([excluded] if excluded else [])
    assert asked == ["rank 1", "rank 2", "node n0"]
    events = [one for one in told if isinstance(one, StragglerFound)]
    names = ["node n0" if one.rank is None else f"rank {one.rank}" for one in events]
    assert [name for name, one in zip(names, events, strict=True) if one.then == "exclude"] == done
    assert {one.then for one in events} <= {"exclude", "told"}
    for name, one in zip(names, events, strict=True):
        assert ("nothing can take its place" in one.why) == (name in refused)
        assert (f"now {excluded}" in one.why) == (bool(done) and name not in [*refused, excluded])


def test_so_many_steps_are_measured_that_timing_their_waits_costs_little(tmp_path: Path) -> None:
    """F3: 3 us a wait is at most 0.05 % of all steps."""
    cases = [(10, 0.5, 1), (166, 1.0, 1), (167, 1.0, 1), (167, 1.0, 5), (10**6, 1.0, 1), (0, 0.0, 1)]

    def work(rank: int) -> Any:
        del rank
        found = []
        for waits, step, interval in cases:
            chosen = StragglerSettings(enabled=True, profiling_interval=interval)
            stragglers = Stragglers(chosen, join_group(LIMIT), actions=Actions(tell=lambda event: None))
            assert stragglers._waits is not None
            stragglers._waits.count, stragglers._measured = 2 * waits, 2
            found.append(stragglers._one_in(step))
            stragglers.close()
        return found

    assert together(tmp_path, 2, work) == [[1, 1, 2, 5, 64, 1]] * 2


def test_a_rank_that_sees_no_mark_makes_no_other_look_late(tmp_path: Path) -> None:
    """Both sleep as long in their compute; only one can tell that from waiting."""

    def work(rank: int) -> Any:
        model = nn.Linear(4, 4)
        models = [model] if rank == 0 else []
        told: list[Any] = []
        stragglers = Stragglers(ALWAYS, join_group(LIMIT), models=models, actions=Actions(tell=told.append))
        for step in range(STEPS):
            stragglers.begin_step()
            with stragglers.section(COMPUTE):
                time.sleep(0.01)
                model(torch.ones(1, 4)).sum().backward()
                dist.all_reduce(model.weight.grad)
            stragglers.end_step()
            stragglers.meet(step)
        stragglers.close()
        reports = [one for one in told if isinstance(one, StragglersReported)]
        return [len(reports), [one.why for one in told if isinstance(one, StragglerFound)]]

    (reports, named), _ = together(tmp_path, 2, work)
    assert reports >= 2
    assert named == []
