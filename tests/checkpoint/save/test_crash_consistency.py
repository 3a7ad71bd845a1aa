"""SIGKILL at any file operation of a save: the newest commit is complete, and nothing older is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.checkpoint.format.structure import verify
from kit.tiny import around_scheduled_save, checkpoints, counting_file_operations, die, forked, train, tree


def save_and_count(
    run_dir: Path, step: int, on_operation: Callable[[int, str, tuple[Any, ...]], None]
) -> None:
    """Train to `step`, with every file operation of the save after it reported."""

    def at_step(now: int, run: holdfast.Run) -> None:
        if now == step:
            around_scheduled_save(run, lambda: counting_file_operations(on_operation))

    train(run_dir, until=step + 1, at_step=at_step, checkpoint_save_at_end=False)


def operations_of_a_save(directory: Path) -> list[str]:
    seen: list[str] = []
    save_and_count(directory, 6, lambda number, name, args: seen.append(name))
    return seen


def killed_at(run_dir: Path, point: int) -> None:
    def on_operation(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == point:
            die()

    assert forked(lambda: save_and_count(run_dir, 6, on_operation)) == -9


def check_after_kill(run_dir: Path, reference: Any) -> None:
    found = checkpoints(run_dir)
    assert [path.name[:13] for path in found] in (["step_00000003"], ["step_00000006", "step_00000003"])
    for path in found:
        assert verify(path).sound, verify(path).problems
    before = {path.name: tree(path) for path in found}
    outcome = train(run_dir, until=9)
    assert outcome.started_at == (6 if len(found) == 2 else 3)
    assert outcome.parameters == reference.parameters
    assert {s: reference.losses[s] for s in outcome.losses} == outcome.losses
    assert {s: reference.samples[s] for s in outcome.samples} == outcome.samples
    for name, contents in before.items():
        assert tree(run_dir / "checkpoints" / name) == contents, "a committed checkpoint was modified"
    staging = [path.name for path in (run_dir / "checkpoints" / ".staging").iterdir()]
    assert not [name for name in staging if not name.startswith(".")], "stale staging was not swept"


def test_a_save_makes_the_operations_that_the_kill_points_are_chosen_from(tmp_path: Path) -> None:
    seen = operations_of_a_save(tmp_path / "run")
    assert {"open", "write", "fsync", "rename", "link", "mkdir"} <= set(seen)
    assert seen.count("fsync") >= 8


def test_sigkill_at_points_all_over_a_save_leaves_the_newest_commit_complete(tmp_path: Path) -> None:
    """Scenario 5; case Lightning#688, #19970. Every eighth operation, and all around the rename."""
    reference = train(tmp_path / "reference", until=9)
    seen = operations_of_a_save(tmp_path / "count")
    renames = [number for number, name in enumerate(seen) if name == "rename"]
    points = sorted({*range(0, len(seen), 8), *(r + d for r in renames for d in (-1, 0, 1)), len(seen) - 1})
    resumed_from_new = 0
    for point in points:
        run_dir = tmp_path / f"run-{point}"
        killed_at(run_dir, point)
        resumed_from_new += len(checkpoints(run_dir)) == 2
        check_after_kill(run_dir, reference)
    assert 0 < resumed_from_new < len(points), "both sides of the commit were hit"


@pytest.mark.drill
def test_sigkill_at_every_operation_of_a_save(tmp_path: Path) -> None:
    """Scenario 5, exhaustively."""
    reference = train(tmp_path / "reference", until=9)
    for point in range(len(operations_of_a_save(tmp_path / "count"))):
        killed_at(tmp_path / f"run-{point}", point)
        check_after_kill(tmp_path / f"run-{point}", reference)


def test_a_diagnostic_save_killed_midway_leaves_the_commit_of_that_step_bit_identical(tmp_path: Path) -> None:
    """Scenario 6: the diagnostic save of a step never touches the committed checkpoint of that step."""
    run_dir = tmp_path / "run"

    def at_step(now: int, run: holdfast.Run) -> None:
        if now == 4:
            newest = checkpoints(run_dir)[0]
            (tmp_path / "before").write_text(repr(sorted(tree(newest).items())))
            run._in_step = False  # between steps 3 and 4, as a validator would be
            with counting_file_operations(lambda number, name, args: die() if number == 9 else None):
                run.save(diagnostic=True)

    assert forked(lambda: train(run_dir, until=6, at_step=at_step) and None) == -9
    newest = checkpoints(run_dir)[0]
    assert newest.name.startswith("step_00000003")
    assert repr(sorted(tree(newest).items())) == (tmp_path / "before").read_text()
    assert list((run_dir / "checkpoints" / "diagnostic" / ".staging").iterdir()), "the kill came midway"
    assert train(run_dir, until=6).started_at == 3


def test_a_diagnostic_save_lives_apart_and_is_never_a_rung(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def at_step(now: int, run: holdfast.Run) -> None:
        if now == 5:
            run._in_step = False
            assert run.save(diagnostic=True).step == 4
            run._in_step = True
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        train(run_dir, until=6, at_step=at_step)
    diagnostic = list((run_dir / "checkpoints" / "diagnostic").glob("step_00000004-*"))
    assert len(diagnostic) == 1
    assert verify(diagnostic[0]).sound
    assert (run_dir / "checkpoints" / "latest").read_text().startswith("step_00000003")
    assert train(run_dir, until=6).started_at == 3
