"""`holdfast ckpt ls` and `holdfast ckpt verify`, as a shell sees them."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.format.manifest import MANIFEST, METADATA
from holdfast.record.directory import ControlDirectory
from kit.checkpoints import ID, RUN, STEP, make_checkpoint, save_stock
from kit.commands import ckpt_process
from kit.harness import finish, holdfast

SHARD = "__0_0.distcp"
NAME = f"step_{STEP:08d}-{ID}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sound checkpoints, a stock directory, and a save that never committed."""
    root = tmp_path_factory.mktemp("prepared") / "root"
    make_checkpoint(root)
    make_checkpoint(root, step=140, id="aaaaaaaa", parent=ID, attempt=2)
    save_stock(root / "stock")
    staged = root / ".staging" / "step_00000160-bbbbbbbb" / "parts"
    staged.mkdir(parents=True)
    (root / "latest").write_text("step_00000140-aaaaaaaa\n")
    return root


@pytest.fixture
def root(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "root"))


def damage(directory: Path) -> None:
    data = bytearray((directory / SHARD).read_bytes())
    data[4321] ^= 0x10
    (directory / SHARD).write_bytes(data)


def test_ls_shows_every_kind_of_directory_newest_first(root: Path, tmp_path: Path) -> None:
    result = ckpt_process(tmp_path, "ls", root)
    assert result.code == 0, result.text
    lines = result.out.splitlines()
    header = ["step", "id", "parent", "attempt", "created", "size", "files", "world", "state"]
    assert lines[0].split() == header
    assert [line.split()[1] for line in lines[1:5]] == ["aaaaaaaa", ID, "stock", "bbbbbbbb"]
    assert lines[1].split()[2:4] == [ID, "2"]
    assert lines[1].endswith("latest")
    assert "complete, no digests" in lines[3]
    assert "staging" in lines[4]
    assert "Digests were not read" in result.out


def test_ls_json_says_the_same_for_programs(root: Path, tmp_path: Path) -> None:
    result = ckpt_process(tmp_path, "ls", "--json", root)
    assert result.code == 0, result.text
    listed = json.loads(result.out)
    assert listed["digests_read"] is False
    assert listed["latest"] == "step_00000140-aaaaaaaa"
    assert [(row["id"], row["state"], row["latest"]) for row in listed["checkpoints"]] == [
        ("aaaaaaaa", "complete", True),
        (ID, "complete", False),
        (None, "complete", False),
        ("bbbbbbbb", "staging", False),
    ]


def test_ls_names_what_is_not_whole_and_exits_1(root: Path, tmp_path: Path) -> None:
    """Scenario 7: a `latest` that names a partial directory is shown for what it is."""
    (root / "step_00000140-aaaaaaaa" / SHARD).unlink()
    result = ckpt_process(tmp_path, "ls", root)
    assert result.code == 1, result.text
    assert f"step_00000140-aaaaaaaa: missing: {SHARD}" in result.out
    (root / "latest").write_text("step_00000999-cccccccc")
    assert (
        "latest names 'step_00000999-cccccccc', which is not here" in ckpt_process(tmp_path, "ls", root).out
    )


def test_ls_of_a_run_directory_shows_standing(root: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    control, _ = ControlDirectory.open_or_create(run_dir)
    shutil.move(root, run_dir / "checkpoints")
    (control.standing / ID).mkdir(parents=True)
    (control.standing / ID / "000001-verified.json").write_text("{}")
    result = ckpt_process(tmp_path, "ls", "--json", run_dir)
    assert result.code == 0, result.text
    standing = {row["id"]: row.get("standing") for row in json.loads(result.out)["checkpoints"]}
    assert standing == {"aaaaaaaa": "committed", ID: "verified", None: None, "bbbbbbbb": None}
    assert "verified" in ckpt_process(tmp_path, "ls", run_dir).out


def test_verify_of_sound_checkpoints_exits_0_and_says_how_much_was_read(root: Path, tmp_path: Path) -> None:
    result = ckpt_process(tmp_path, "verify", root / NAME, "--run", RUN, "--world", "1")
    assert result.code == 0, result.text
    assert f"{NAME}: sound, 2 files" in result.out
    assert "1 checkpoint, nothing wrong found" in result.out
    assert "GB/s" in result.out
    assert result.err == ""


def test_verify_names_each_problem_and_file_and_exits_1(root: Path, tmp_path: Path) -> None:
    damage(root / NAME)
    (root / "step_00000140-aaaaaaaa" / METADATA).unlink()
    result = ckpt_process(tmp_path, "verify", root)
    assert result.code == 1, result.text
    assert "  altered              __0_0.distcp  expected digest " in result.out
    assert "  missing-metadata     .metadata  expected " in result.out
    assert "3 checkpoints, 2 not sound" in result.out


def test_verify_json_parses_and_carries_reasons(root: Path, tmp_path: Path) -> None:
    damage(root / NAME)
    result = ckpt_process(tmp_path, "verify", "--json", root)
    assert result.code == 1, result.text
    report = json.loads(result.out)
    assert report["sound"] is False
    assert [row["sound"] for row in report["checkpoints"]] == [True, False, True]
    (problem,) = report["checkpoints"][1]["problems"]
    assert (problem["reason"], problem["path"]) == ("altered", SHARD)
    assert report["checkpoints"][2]["digests_missing"] is True
    assert report["bytes_checked"] > 0


def test_verify_refuses_another_run_or_world(root: Path, tmp_path: Path) -> None:
    assert ckpt_process(tmp_path, "verify", root / NAME, "--run", "run-b").code == 1
    result = ckpt_process(tmp_path, "verify", root / NAME, "--world", "2")
    assert result.code == 1
    assert "wrong-world" in result.out


def test_a_stock_directory_is_complete_and_plainly_without_digests(root: Path, tmp_path: Path) -> None:
    result = ckpt_process(tmp_path, "verify", root / "stock")
    assert result.code == 0, result.text
    assert "no digests" in result.out
    (root / "stock" / METADATA).unlink()
    result = ckpt_process(tmp_path, "verify", root / "stock")
    assert result.code == 1
    assert "missing-metadata" in result.out


def test_hostile_contents_end_in_a_clear_line_and_1(root: Path, tmp_path: Path) -> None:
    """A manifest of 100 MB, and names that would steer a terminal."""
    (root / NAME / MANIFEST).write_bytes(b"\0" * 100_000_000)
    (root / "step_00000140-aaaaaaaa" / "\x1b[2Jgone\n").write_text("x")
    for command in ("ls", "verify"):
        result = ckpt_process(tmp_path, command, root)
        assert result.code == 1
        assert "unreadable-manifest" in result.out
        assert "\x1b" not in result.out
        assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["verify", "nowhere"], "no such directory"),
        (["ls", "nowhere"], "no such directory"),
        (["verify", "file"], "not a directory"),
        (["ls", "file"], "not a directory"),
        (["verify", "empty"], "no checkpoints here"),
        (["verify"], "Missing argument"),
        (["verify", "empty", "--world", "0"], "--world"),
    ],
)
def test_usage_errors_exit_2_and_say_what_is_wrong(args: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    result = ckpt_process(tmp_path, *args)
    assert result.code == 2, result.text
    assert said in result.err
    assert "Traceback" not in result.err


def test_ls_of_an_empty_root_is_fine(tmp_path: Path) -> None:
    result = ckpt_process(tmp_path, "ls", tmp_path)
    assert result.code == 0
    assert "no checkpoints" in result.out


def test_neither_command_imports_torch(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from holdfast.cli.app import app\n"
        f"for args in (['ls', {str(root)!r}], ['verify', {str(root)!r}]):\n"
        "    try:\n"
        "        app(['ckpt', *args])\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        "    if args[0] == 'ls':  # `verify` looks at the values of what has no digests, with numpy\n"
        "        assert 'numpy' not in sys.modules\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'torch'))\n"
    )
    result = finish([sys.executable, "-c", code], cwd=tmp_path)
    assert result.code == 0, result.text
    assert result.out.splitlines()[-1] == "[]"


def test_a_terminal_sees_a_progress_bar_on_stderr_only(root: Path, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    try:
        done = subprocess.run(
            holdfast("ckpt", "verify", "--json", str(root)),
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=terminal, stdin=subprocess.DEVNULL, timeout=60,
            env=os.environ | {"TERM": "xterm"}, check=False,
        )  # fmt: skip
        shown = os.read(controller, 65536)
    finally:
        os.close(controller)
        os.close(terminal)
    assert done.returncode == 0
    assert json.loads(done.stdout)["sound"] is True
    assert b"verifying" in shown
