"""The straggler detector in real ranks: who is named, what comes of it, and what is refused."""

from __future__ import annotations

import logging
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.checkpoint.state.tracked import Tracked
from holdfast.config.sections import StragglerSettings
from holdfast.config.sources import load
from holdfast.errors import ConfigError, ExitCode, RerunWantedError, Stopped, UsageError
from holdfast.journal.events import Resumed, StopAsked, StopSaved, StragglerFound, StragglersReported, Warned
from holdfast.journal.writer import JournalWriter
from holdfast.record.attempts import begin_attempt
from holdfast.record.directory import ControlDirectory
from holdfast.record.group import join_group
from holdfast.record.launches import LaunchInfo
from holdfast.record.lease import Fence, claim
from holdfast.record.operator import excluded
from holdfast.train.membership import Membership
from holdfast.train.stragglers.reports import Actions, Stragglers, make_stragglers, other_detector
from holdfast.train.stragglers.scores import COMPUTE, INPUT, OTHER, Named, ScoreKind
from kit.harness import REPO, Result, finish
from kit.harness import holdfast as command_of
from kit.ranks.straggling import train
from kit.ranks.together import together
from kit.runs import journalled
from kit.tiny import checkpoints


def found(place: Path) -> list[StragglerFound]:
    return journalled(place, StragglerFound)


# --- who is named


CASES = [
    ("sleep", "compute", COMPUTE),
    ("input", "input", INPUT),
    ("inside", "section", "meets"),
    pytest.param("burn", "compute", COMPUTE, marks=pytest.mark.drill),
    pytest.param("section", "section", "augment", marks=pytest.mark.drill),
    pytest.param("other", "other", OTHER, marks=pytest.mark.drill),
    pytest.param("plain", "other", OTHER, marks=pytest.mark.drill),
]


@pytest.mark.parametrize(("how", "kind", "section"), CASES)
def test_the_rank_that_is_late_is_named_and_by_default_only_told(
    tmp_path: Path, how: str, kind: str, section: str
) -> None:
    """Scenario 19: one rank sleeps → flagged relative to the others; the run goes on."""
    assert together(tmp_path, 2, lambda rank: train(rank, tmp_path / "run", how)) == [50, 50]
    seen = found(tmp_path)
    assert {(one.rank, one.kind, one.section, one.then) for one in seen} == {(1, kind, section, "told")}
    assert "rank 1" in seen[0].why
    report = journalled(tmp_path, StragglersReported)[-1]
    assert report.ranks == [0, 1]
    relative = report.relative
    assert relative[0] == 1.0
    assert relative[1] is not None
    assert relative[1] < 0.5
    assert report.waiting[0] > report.waiting[1]  # the victim is the one that waits


@pytest.mark.parametrize("how", ["none", "hidden"])
def test_nobody_is_named_where_nobody_is_late_or_nobody_can_know(tmp_path: Path, how: str) -> None:
    """A rank that waits inside a section, in a way that is not seen, is a victim and not named."""
    until = 40 if how == "hidden" else 250
    together(tmp_path, 2, lambda rank: train(rank, tmp_path / "run", how, until=until))
    assert journalled(tmp_path, StragglersReported)
    assert found(tmp_path) == []


def test_stop_if_detected_saves_and_stops_all_ranks(tmp_path: Path) -> None:
    """Scenario 19, F2: with stop → one save, and every rank exits with 31."""

    def work(rank: int) -> Any:
        try:
            train(rank, tmp_path / "run", "sleep", until=2000, straggler_stop_if_detected=True)
        except Stopped as stopped:
            return stopped.code
        return "went on"

    assert together(tmp_path, 2, work) == [int(ExitCode.STOPPED)] * 2
    (asked,) = journalled(tmp_path, StopAsked)
    assert asked.source == "straggler"
    assert "rank 1" in asked.detail
    (saved,) = journalled(tmp_path, StopSaved)
    assert saved.checkpoint
    assert [path.name for path in checkpoints(tmp_path / "run")] == [saved.checkpoint]
    assert [one.then for one in found(tmp_path)] == ["stop"]


def launched(place: Path, slow: str, until: int, devices: str, *given: str) -> Result:
    """`holdfast run` of two ranks that really are processes, with DDP."""
    script = REPO / "tests" / "scripts" / "train" / "train_straggling.py"
    command = command_of("run", "--run-dir", "run", "--nproc-per-node", "2", "--no-preload", str(script))
    given = ("run", "sleep", slow, "0.05", str(until), *given)
    return finish([*command, *given], cwd=place, env={"CUDA_VISIBLE_DEVICES": devices}, timeout=240)


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_under_the_launcher_a_straggler_stops_the_whole_run(tmp_path: Path) -> None:
    """Scenario 19, F2: saved once, code 31."""
    done = launched(tmp_path, "1", 3000, "", "straggler_stop_if_detected=true")
    assert done.code == ExitCode.STOPPED, done.text
    assert "holdfast[rank 0]: straggler scores at step " in done.err, "printed by default"
    (saved,) = journalled(tmp_path, StopSaved)
    assert [path.name for path in checkpoints(tmp_path / "run")] == [saved.checkpoint]


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_a_slow_device_is_excluded_and_a_spare_one_takes_its_place(tmp_path: Path) -> None:
    """F2: the run saves, goes on from there on the other device, and nothing is named any more."""
    done = launched(tmp_path, "device-1", 150, "0,1,2", "straggler_exclude_if_detected=true")
    assert done.code == 0, done.text
    control = ControlDirectory.open(tmp_path / "run")
    assert [(out.device, out.by) for out in excluded(control)] == [("1", "recovery")]
    assert [(one.rank, one.device, one.then) for one in found(tmp_path)] == [(1, "1", "exclude")]
    starts = journalled(tmp_path, Resumed)
    assert len(starts) == 2
    assert starts[1].step > 0


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_where_nothing_can_take_its_place_the_run_goes_on_and_does_not_ask_again(tmp_path: Path) -> None:
    done = launched(tmp_path, "device-1", 150, "0,1", "straggler_exclude_if_detected=true")
    assert done.code == 0, done.text
    assert excluded(ControlDirectory.open(tmp_path / "run")) == []
    assert [one.then for one in found(tmp_path)] == ["exclude", "told"]
    assert "attempt 1 of this launch asked to exclude it" in found(tmp_path)[1].why


def test_a_new_launch_may_ask_for_a_place_again_and_the_same_one_does_not(tmp_path: Path) -> None:
    """There may be a spare by then; a restart for nothing is made once a launch at most."""
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    fence = Fence(control, claim(control, "one", 30.0).epoch)
    settings = load(
        keywords={"run_dir": str(tmp_path / "run"), "straggler_exclude_if_detected": True}
    ).settings
    named = Named(kind=ScoreKind.COMPUTE, section=COMPUTE, rank=1, node="n0", device="1", share=0.5)
    seen = []
    for launch in ("one", "one", "two"):
        number = begin_attempt(control, fence, launch, 1).number
        member = Membership(control, fence, number, launch, JournalWriter(control.journal, "rank-0", number))
        stragglers = make_stragglers(
            settings, join_group(5.0), member, None, Tracked(), stop=print, save=print
        )
        seen += stragglers._actions.fates([named])
        with pytest.raises(RerunWantedError):
            stragglers._act(named, 12)
        stragglers.close()
        member.journal.close()
    assert [one.then for one in seen] == ["exclude", "told", "exclude"]
    assert "attempt 1 of this launch asked to exclude it" in seen[1].why


def test_the_detector_works_without_a_run(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        model = nn.Linear(8, 8)
        told: list[str] = []
        with holdfast.StragglerDetector(
            models=[model],
            node="here",
            on_found=lambda named: told.append(named.describe()),
            report_time_interval=0.1,
        ) as detector:
            for _ in range(40):
                detector.begin_step()
                with detector.section("input"):
                    time.sleep(0.02 if rank == 1 else 0.0)
                with detector.compute():
                    model(torch.ones(4, 8)).sum().backward()
                    dist.all_reduce(model.weight.grad)
                detector.end_step()
            named = [one.rank for one in detector.finding.named] if detector.finding else None
        return [told, named]

    first, second = together(tmp_path, 2, work)
    assert len(first[0]) == 1
    assert first[0][0].startswith("rank 1 (here) is slow in getting its input")
    assert first[1] == [1]
    assert second == [[], None]


# --- never two at once


def test_a_second_detector_of_our_own_is_refused(tmp_path: Path) -> None:
    """Scenario 24: two straggler detectors → the second fails at start-up, by name."""
    first = holdfast.StragglerDetector()
    try:
        with pytest.raises(UsageError, match=r"two detectors.*another Run or StragglerDetector of Holdfast"):
            holdfast.StragglerDetector()
        with pytest.raises(UsageError, match=r"straggler\.enabled = false"):
            holdfast.Run(run_dir=tmp_path / "run", straggler_enabled=True)
        assert not (tmp_path / "run").exists()
    finally:
        first.close()
    holdfast.StragglerDetector().close()


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    module = types.ModuleType(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_of_two_runs_in_a_process_the_second_is_refused_at_its_start(tmp_path: Path) -> None:
    """Scenario 24: both were made before either was at work."""
    model = nn.Linear(2, 2)
    first, second = (
        holdfast.Run(run_dir=tmp_path / name, straggler_enabled=True, stop_exit_signal_handler=False)
        for name in ("one", "two")
    )
    for run in (first, second):
        run.track(model=model)
    first.start()
    try:
        with pytest.raises(UsageError, match="two detectors of stragglers at once: another Run"):
            second.start()
    finally:
        first.close()
        second.close()


class _Configured:
    """As Megatron's is: one instance, on or off."""

    _configured = True
    _instance = types.SimpleNamespace(_off=False)


@pytest.mark.parametrize(
    ("module", "attributes"),
    [
        ("nvidia_resiliency_ext.straggler", {"Detector": types.SimpleNamespace(initialized=True)}),
        (
            "nvidia_resiliency_ext.attribution.straggler",
            {"Detector": types.SimpleNamespace(initialized=True)},
        ),
        ("megatron.core.utils", {"StragglerDetector": _Configured}),
    ],
)
def test_another_librarys_detector_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, attributes: dict[str, object]
) -> None:
    """Scenario 24."""
    pretend(monkeypatch, module, **attributes)
    with pytest.raises(UsageError, match=module.replace(".", r"\.")):
        holdfast.Run(run_dir=tmp_path / "run", straggler_enabled=True)
    assert not (tmp_path / "run").exists()


def test_a_detector_that_is_there_and_off_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "nvidia_resiliency_ext.straggler", Detector=types.SimpleNamespace(initialized=False))
    off = types.SimpleNamespace(_configured=True, _instance=types.SimpleNamespace(_off=True))
    pretend(monkeypatch, "megatron.core.utils", StragglerDetector=off)
    assert other_detector() == ""


def test_one_that_comes_later_switches_ours_off_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = StragglerSettings(enabled=True, report_time_interval=1e-9)
    told: list[object] = []
    stragglers = Stragglers(chosen, join_group(5.0), actions=Actions(tell=told.append))
    pretend(monkeypatch, "nvidia_resiliency_ext.straggler", Detector=types.SimpleNamespace(initialized=True))
    for step in range(40):
        stragglers.begin_step()
        stragglers.end_step()
        stragglers.meet(step)
    assert told == []
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "nvidia_resiliency_ext.straggler.Detector was switched on during the run" in said
    assert "Holdfast's is off from here on" in said
    stragglers.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"straggler_stop_if_detected": True}, "nothing is detected"),
        ({"straggler_enabled": True, "straggler_exclude_if_detected": True}, "needs the launcher"),
        (
            {
                "straggler_enabled": True,
                "straggler_exclude_if_detected": True,
                "straggler_stop_if_detected": True,
            },
            "either stops or goes on",
        ),
        (
            {
                "straggler_enabled": True,
                "straggler_calc_relative_gpu_perf": False,
                "straggler_calc_individual_gpu_perf": False,
            },
            "nothing is compared",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        holdfast.Run(run_dir=tmp_path / "run", **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"straggler_stop_if_detected": True, "stop_exit_signal_handler": False},
            r"stop_if_detected = True .* set stop\.exit_signal_handler = true",
        ),
        ({"straggler_exclude_if_detected": True, "launch_max_restarts": 0}, "launch.max_restarts = 0"),
    ],
)
def test_settings_that_cannot_work_under_the_launcher_are_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    """`holdfast run` would end such ranks unsaved, or has no attempt to go on in."""
    info = LaunchInfo(
        run_dir=str(tmp_path / "run"), run_id="a1b2", launch="l1", attempt=1, epoch=1, node="here"
    )
    for name, value in info.to_environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        holdfast.Run(run_dir=tmp_path / "run", straggler_enabled=True, **settings)


def test_without_the_launcher_the_ranks_stop_by_themselves_whoever_has_the_signals(tmp_path: Path) -> None:
    holdfast.Run(
        run_dir=tmp_path / "run",
        straggler_enabled=True,
        straggler_stop_if_detected=True,
        stop_exit_signal_handler=False,
    ).close()


def test_an_unknown_setting_of_the_detector_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"reporting_interval.*report_time_interval"):
        holdfast.StragglerDetector(reporting_interval=3)
    with pytest.raises(UsageError, match="report_time_interval"):
        holdfast.StragglerDetector(report_time_interval=-1)


def test_a_run_without_the_detector_measures_nothing(tmp_path: Path) -> None:
    assert train(0, tmp_path / "run", "none", until=12, straggler_enabled=False) == 12
    assert journalled(tmp_path, StragglersReported) == []
    assert journalled(tmp_path, Warned) == []
