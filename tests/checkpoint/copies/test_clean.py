"""`holdfast clean`: what dead runs left on a node goes, and nothing that somebody uses or may need."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.copies import tier as local_clean
from holdfast.checkpoint.copies.tier import FoundPlace, LocalTier, Rules, judge, look, places_under, remove
from holdfast.checkpoint.format.manifest import CheckpointName
from holdfast.errors import UsageError
from holdfast.record.attempts import HeadRecord
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.lease import LeaseKeeper, claim
from holdfast.record.lineage import CommitRecord
from kit.harness import REPO, Result, finish, holdfast, wait_until
from kit.nodes.local_places import NAME, RUN, keep_copy, manifest_of, place

OTHER = "ba9876543210"
DAY = 24 * 3600.0
ANY = Rules(older_than=0.0)


def clean(cwd: Path, *args: str | Path) -> Result:
    return finish(holdfast("clean", *map(str, args)), cwd=cwd)


def grow_old(tier: LocalTier, hours: float = 48.0) -> LocalTier:
    then = time.time() - hours * 3600
    for path in [tier.path, *tier.path.rglob("*")]:
        os.utime(path, (then, then), follow_symlinks=False)
    return tier


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


@pytest.fixture
def old(local: Path) -> LocalTier:
    """A place of a run whose directory cannot be seen from here, untouched for two days."""
    tier = place(local)
    keep_copy(tier, 0, manifest_of())
    return grow_old(tier)


def place_of_a_run(local: Path, run_dir: Path, *, in_root: bool) -> LocalTier:
    """An old place of a run whose only checkpoint is here, and perhaps in the checkpoint root too."""
    control, _ = ControlDirectory.open_or_create(run_dir)
    LeaseKeeper(control, claim(control, "test", 2.0), lambda _why: None).release()
    create_record(control.attempt(1) / "head.json", HeadRecord(attempt=1, checkpoint=None, step=0))
    commit = CommitRecord(id=NAME.id, step=NAME.step, parent=None, attempt=1, manifest="0" * 32)
    create_record(control.attempt(1) / "commits" / f"{NAME.step:012d}-{NAME.id}.json", commit)
    if in_root:
        (run_dir / "checkpoints" / str(NAME)).mkdir(parents=True)
    tier = place(local, control.run_id, run_dir=run_dir)
    keep_copy(tier, 0, manifest_of())
    return grow_old(tier)


@contextmanager
def user_of(tier: LocalTier, tmp_path: Path) -> Iterator[None]:
    """Another process that uses a place."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from holdfast.checkpoint.copies.tier import LocalTier\n"
        f"with LocalTier.at(Path({str(tier.path)!r})).in_use():\n"
        "    print('here', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield
    finally:
        process.kill()
        process.communicate(timeout=10)


# --- what goes and what stays -------------------------------------------------------------------------------


def test_what_a_dead_run_left_is_removed_and_nothing_of_it_stays(old: LocalTier, tmp_path: Path) -> None:
    young = place(old.path.parent, OTHER)
    result = clean(tmp_path, "--yes", old.path.parent)
    assert result.code == 0, result.text
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0] == ["run", "node", "newest", "size", "age", "in", "use", "run", "is", "why"]
    assert lines[1][:4] == ["removed", RUN, "node-1", str(NAME)]
    assert lines[2][:2] == ["kept", OTHER]
    assert "1 place kept, 1 removed, " in result.out
    assert os.listdir(old.path.parent) == [young.path.name]


def test_a_dry_run_says_the_same_and_changes_nothing(old: LocalTier, tmp_path: Path) -> None:
    before = sorted(str(path) for path in old.path.rglob("*"))
    result = clean(tmp_path, "--dry-run", "--json", old.path.parent)
    assert result.code == 0, result.text
    (row,) = json.loads(result.out)["places"]
    assert row["would_remove"] is True
    assert row["removed"] is False
    assert (row["run"], row["node"], row["newest"], row["in_use"]) == (RUN, "node-1", str(NAME), False)
    assert row["run_state"] == "not known"
    assert row["bytes"] > 0
    assert row["age_seconds"] >= 47 * 3600
    assert sorted(str(path) for path in old.path.rglob("*")) == before


def test_without_yes_and_without_a_terminal_nothing_is_removed(old: LocalTier, tmp_path: Path) -> None:
    result = clean(tmp_path, old.path.parent)
    assert result.code == 2, result.text
    assert "Add --yes" in result.err
    assert places_under(old.path.parent)


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, 1), ("y", 0, 0)])
def test_a_person_is_shown_what_would_go_and_asked(
    old: LocalTier, tmp_path: Path, answer: str, code: int, left: int
) -> None:
    controller, terminal = pty.openpty()
    try:
        os.write(controller, f"{answer}\n".encode())
        done = subprocess.run(
            holdfast("clean", str(old.path.parent)),
            cwd=tmp_path, stdin=terminal, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(controller)
        os.close(terminal)
    assert done.returncode == code, done.stderr
    assert "would remove" in done.stdout
    assert "Remove 1 place?" in done.stderr
    assert len(places_under(old.path.parent)) == left


def test_a_place_in_use_is_never_removed_whatever_is_asked(old: LocalTier, tmp_path: Path) -> None:
    with user_of(old, tmp_path):
        result = clean(tmp_path, "--yes", "--force", "--older-than", "0", "--run", RUN, old.path.parent)
        assert result.code == 0, result.text
        assert "in use: a process on this node holds it" in result.out
        assert [tier.place for tier in places_under(old.path.parent)] == [old.place]
    assert clean(tmp_path, "--yes", "--run", RUN, old.path.parent).code == 0
    assert os.listdir(old.path.parent) == []


def test_somebody_who_comes_between_the_look_and_the_removal_keeps_the_place(
    old: LocalTier, tmp_path: Path
) -> None:
    (found,) = look(old.path.parent)
    assert not judge(found, ANY, os.geteuid()).keep
    with user_of(old, tmp_path):
        outcome = remove(found, ANY)
    assert outcome.verdict.keep
    assert "in use" in outcome.verdict.reason
    assert old.records()


def test_a_place_that_changes_between_the_look_and_the_removal_is_judged_again(old: LocalTier) -> None:
    rules = Rules(older_than=DAY)
    (found,) = look(old.path.parent)
    keep_copy(old, 1, manifest_of())
    outcome = remove(found, rules)
    assert outcome.verdict.keep
    assert "changed" in outcome.verdict.reason
    assert len(old.records()) == 2


def test_the_only_newer_checkpoint_of_a_run_is_kept_unless_it_is_named(local: Path, tmp_path: Path) -> None:
    tier = place_of_a_run(local, tmp_path / "run", in_root=False)
    result = clean(tmp_path, "--yes", local)
    assert "holds a checkpoint that is newer than any in the checkpoint root" in result.out
    assert tier.records()
    (found,) = look(local)
    assert found.run_state == "over"
    for rules in (
        Rules(DAY, force=True),
        Rules(DAY, keep_resumable=False),
        Rules(DAY, runs=(tier.record.run,)),
    ):
        assert not judge(found, rules, os.geteuid()).keep
    assert clean(tmp_path, "--yes", "--run", tier.record.run, local).code == 0
    assert os.listdir(local) == []


def test_a_checkpoint_that_the_root_has_too_does_not_keep_a_place(local: Path, tmp_path: Path) -> None:
    place_of_a_run(local, tmp_path / "run", in_root=True)
    (found,) = look(local)
    assert not found.ahead
    assert not judge(found, Rules(DAY), os.geteuid()).keep


def test_the_place_of_a_run_that_is_live_elsewhere_needs_force(local: Path, tmp_path: Path) -> None:
    tier = place_of_a_run(local, tmp_path / "run", in_root=True)
    control = ControlDirectory.open(tmp_path / "run")
    keeper = LeaseKeeper(control, claim(control, "test", 30.0), lambda _why: None)
    try:
        (found,) = look(local)
        assert found.run_state == "live"
        assert judge(found, Rules(DAY, runs=(tier.record.run,)), os.geteuid()).keep
        assert not judge(found, Rules(DAY, force=True), os.geteuid()).keep
    finally:
        keeper.release()
    (found,) = look(local)
    assert found.run_state == "over"


def test_a_run_directory_that_was_made_anew_does_not_keep_the_old_runs_place(
    local: Path, tmp_path: Path
) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    keeper = LeaseKeeper(control, claim(control, "test", 30.0), lambda _why: None)
    grow_old(place(local, run_dir=tmp_path / "run"))
    (found,) = look(local)
    keeper.release()
    assert (found.run_state, found.ahead) == ("over", False)


def test_only_what_is_ours_and_a_place_is_touched(old: LocalTier, tmp_path: Path) -> None:
    """No place.json, a link to a place, a file with a run's name, somebody's hidden directory."""
    local = old.path.parent
    elsewhere = grow_old(place(tmp_path / "elsewhere", OTHER))
    (local / ("a" * 12)).mkdir()
    (local / OTHER).symlink_to(elsewhere.path)
    (local / ("c" * 12)).write_text("x")
    (local / ".hidden").mkdir()
    (old.path / "images" / "link").symlink_to(elsewhere.path)
    result = clean(tmp_path, "--yes", "--older-than", "0", "--force", local)
    assert result.code == 0, result.text
    assert sorted(os.listdir(local)) == sorted([".hidden", "a" * 12, OTHER, "c" * 12])
    assert (elsewhere.path / "place.json").exists()


def test_a_place_of_another_user_is_left_alone(old: LocalTier) -> None:
    (found,) = look(old.path.parent)
    assert judge(found, Rules(0.0, force=True, runs=(RUN,)), os.geteuid() + 1).keep


@given(
    found=st.builds(
        FoundPlace,
        path=st.just("/x"),
        run=st.sampled_from([RUN, OTHER]),
        run_dir=st.just("/r"),
        node=st.just("n"),
        newest=st.sampled_from([None, CheckpointName(1, "aaaaaaaa")]),
        bytes=st.just(1),
        age=st.floats(-1e6, 1e6),
        in_use=st.booleans(),
        owner=st.sampled_from([1, 2]),
        run_state=st.sampled_from(["live", "over", "not known"]),
        ahead=st.booleans(),
        left_over=st.just(False),
    ),
    rules=st.builds(
        Rules,
        older_than=st.sampled_from([0.0, DAY]),
        runs=st.sampled_from([(), (RUN,)]),
        keep_resumable=st.booleans(),
        force=st.booleans(),
    ),
)
def test_no_rules_remove_what_is_used_or_not_ours_and_force_removes_no_less(
    found: FoundPlace, rules: Rules
) -> None:
    verdict = judge(found, rules, 1)
    assert verdict.reason
    if not verdict.keep:
        assert not found.in_use
        assert found.owner == 1
        assert not rules.runs or found.run in rules.runs
        assert rules.runs or found.age >= rules.older_than
        assert found.run_state != "live" or rules.force
        assert not judge(found, msgspec.structs.replace(rules, force=True), 1).keep


# --- cut short, and raced -----------------------------------------------------------------------------------


def test_a_removal_that_is_cut_leaves_nothing_that_looks_like_a_place(old: LocalTier, tmp_path: Path) -> None:
    code = (
        "import os, shutil\n"
        "from pathlib import Path\n"
        "from holdfast.checkpoint.copies import tier\n"
        "shutil.rmtree = lambda path, **others: os._exit(9)\n"
        f"(found,) = tier.look(Path({str(old.path.parent)!r}))\n"
        "tier.remove(found, tier.Rules(0.0))\n"
    )
    assert finish([sys.executable, "-c", code], cwd=tmp_path).code == 9
    assert places_under(old.path.parent) == []
    (left,) = os.listdir(old.path.parent)
    assert left.startswith(f".{RUN}.")
    again = place(old.path.parent)
    assert again.records() == []
    result = clean(tmp_path, "--yes", old.path.parent)
    assert result.code == 0, result.text
    assert "left by a removal that was cut short" in result.out
    assert os.listdir(old.path.parent) == [RUN]


def test_users_that_come_while_places_are_removed_always_have_a_whole_one(
    local: Path, tmp_path: Path
) -> None:
    """Two processes open and use the same place again and again while it is removed under them."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from holdfast.checkpoint.copies.tier import LocalTier\n"
        "for number in range(150):\n"
        f"    tier = LocalTier.open(Path({str(local)!r}), {RUN!r}, node='n', run_dir=Path('r'))\n"
        "    with tier.in_use():\n"
        "        mine = tier.images / f'{os.getpid():09d}.0'\n"
        "        mine.write_text('x')\n"
        "        assert LocalTier.at(tier.path).place == tier.place\n"
        "        assert mine.exists() and (tier.path / 'copies').is_dir()\n"
    )
    users = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    removed = 0

    def users_are_done() -> bool:
        nonlocal removed
        for found in look(local) if local.exists() else ():
            removed += not remove(found, ANY).verdict.keep
        return all(user.poll() is not None for user in users)

    try:
        wait_until(users_are_done, 60, "two users of a place")
    finally:
        for user in users:
            user.kill()
    assert [user.communicate(timeout=10)[1] for user in users] == ["", ""]
    assert removed > 0


def test_a_place_that_is_removed_after_it_was_opened_is_made_again(old: LocalTier) -> None:
    (found,) = look(old.path.parent)
    remove(found, ANY)
    assert not old.path.exists()
    with old.in_use():
        assert LocalTier.at(old.path).place == old.place
        (found,) = look(old.path.parent)
        assert found.in_use
        assert remove(found, ANY).verdict.keep


def test_a_place_that_is_removed_just_before_it_is_locked_is_made_again(
    old: LocalTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is got on a file that has no name any more, and so protects nothing."""
    (found,) = look(old.path.parent)
    flock = fcntl.flock

    def remove_first(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        assert not remove(found, ANY).verdict.keep
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with old.in_use():
        (found,) = look(old.path.parent)
        assert found.in_use


def test_a_user_waits_for_a_removal_that_is_under_way(old: LocalTier) -> None:
    inside = threading.Event()

    def use() -> None:
        with old.in_use():
            inside.set()

    with local_clean._alone(old.path) as alone:
        assert alone
        user = threading.Thread(target=use)
        user.start()
        assert not inside.wait(0.2)
    assert inside.wait(10)
    user.join(10)


def test_what_cannot_be_deleted_is_told_and_exits_1(
    old: LocalTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **others: object) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    (found,) = look(old.path.parent)
    outcome = remove(found, ANY)
    assert "Input/output error" in outcome.error
    assert places_under(old.path.parent) == []


# --- asked wrongly ------------------------------------------------------------------------------------------


def test_the_directory_comes_from_the_settings_if_none_is_named(old: LocalTier, tmp_path: Path) -> None:
    settings = tmp_path / "holdfast.toml"
    settings.write_text(
        "[checkpoint]\nasync_save = true\nnon_persistent_ckpt_type = 'local'\n"
        f"non_persistent_local_ckpt_dir = '{old.path.parent}'\n"
    )
    result = clean(tmp_path, "--config", settings, "--dry-run")
    assert result.code == 0, result.text
    assert "would remove" in result.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no local directory is known"),
        (["nowhere"], "no such directory"),
        (["--older-than", "-1", "."], "--older-than"),
    ],
)
def test_usage_errors_exit_2_and_say_what_is_wrong(args: list[str], said: str, tmp_path: Path) -> None:
    result = clean(tmp_path, *args)
    assert result.code == 2, result.text
    assert said in result.err


def test_the_local_tier_refuses_a_place_that_is_a_link_or_not_ours(tmp_path: Path) -> None:
    """On a shared /dev/shm anybody may have made a directory with a run's name before us."""
    elsewhere = place(tmp_path / "elsewhere", OTHER)
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / RUN).symlink_to(elsewhere.path)
    with pytest.raises(UsageError, match="a link or belongs to somebody else"):
        place(tmp_path / "local")


def test_the_file_that_says_in_use_makes_no_place_look_new(old: LocalTier) -> None:
    with old.in_use():
        pass
    (found,) = look(old.path.parent)
    assert found.age > DAY


# --- after a Slurm job --------------------------------------------------------------------------------------


def epilog(old: LocalTier, tmp_path: Path, user: str) -> Result:
    """The example, adjusted as its reader would."""
    text = (REPO / "examples" / "slurm" / "epilog.sh").read_text()
    script = tmp_path / "epilog.sh"
    command = tmp_path / "holdfast"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(holdfast())} "$@"\n')
    command.chmod(0o755)
    text = text.replace("/opt/holdfast/bin/holdfast", str(command))
    text = text.replace('"/dev/shm/holdfast-${SLURM_JOB_USER:-}"', str(old.path.parent))
    assert str(old.path.parent) in text
    script.write_text(text)
    return finish(["/bin/sh", str(script)], cwd=tmp_path, env={"SLURM_JOB_USER": user, "SLURM_JOB_ID": "7"})


@pytest.mark.skipif(os.geteuid() != 0, reason="an epilog runs as root")
def test_the_epilog_gives_the_memory_back_at_the_end_of_a_job(local: Path, tmp_path: Path) -> None:
    """Also a fresh one that a resume would want; only what another job uses stays."""
    tier = place_of_a_run(local, tmp_path / "run", in_root=False)
    keep_copy(tier, 1, manifest_of())
    with user_of(tier, tmp_path):
        assert epilog(tier, tmp_path, "root").code == 0
        assert tier.records()
    result = epilog(tier, tmp_path, "root")
    assert result.code == 0, result.text
    assert "1 removed" in result.out
    assert os.listdir(local) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="an epilog runs as root")
def test_the_epilog_touches_nothing_of_another_user_and_never_drains_a_node(
    old: LocalTier, tmp_path: Path
) -> None:
    assert epilog(old, tmp_path, "nobody").code == 0
    assert epilog(old, tmp_path, "").code == 0
    assert old.records()
