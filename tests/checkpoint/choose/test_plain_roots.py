"""A directory of checkpoints without a run: inventoried, verified as far as can be, never a fresh start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.errors import ControlError, NoValidRungError
from holdfast.health.node import mount_of, why_not_first
from holdfast.record.directory import ControlDirectory
from kit.commands import command
from kit.harness import finish
from kit.tiny import tree


def saved(root: Path, name: str, **tensors: torch.Tensor) -> Path:
    state: dict[str, Any] = {
        "model": {"w": torch.ones(4, 3), "mask": torch.full((2,), -torch.inf), **tensors},
        "half": torch.zeros(5, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
        "note": {"lr": 0.1},
    }
    dcp.save(state, checkpoint_id=root / name, no_dist=True)
    return root / name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """As torch users have it: three steps, of which the newest was being written."""
    home = tmp_path / "ckpt"
    for step in (100, 200, 1000):
        saved(home, f"step_{step}")
    (home / "step_1100").mkdir()
    return home


def test_the_highest_step_that_holds_is_found_and_nothing_is_changed(root: Path) -> None:
    before = tree(root)
    found = holdfast.resolve_resume(root)
    assert (found.chosen, found.step, found.path) == ("step_1000", 1000, str(root / "step_1000"))
    assert (found.run, found.exit_code, found.digests_read) == ("", 0, False)
    assert [row.name for row in found.candidates] == ["step_1100", "step_1000", "step_200", "step_100"]
    assert "neither a manifest nor DCP metadata" in found.candidates[0].reasons[0]
    assert any("the check sums of 5 items match; it has no digests" in line for line in found.why)
    assert any("minus infinity, as masks have them, in model.mask" in line for line in found.why)
    assert found.require() is found
    assert tree(root) == before


def nan(path: Path) -> None:
    saved(path.parent, path.name, w=torch.tensor([[1.0, float("nan"), 1.0]] * 4))


def infinite(path: Path) -> None:
    saved(path.parent, path.name, half=torch.full((3,), torch.inf, dtype=torch.bfloat16))


def flipped(path: Path) -> None:
    shard = next(path.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    at = data.find(torch.ones(4, 3).numpy().tobytes())
    assert at > 0
    data[at + 2] ^= 1
    shard.write_bytes(data)


def cut(path: Path) -> None:
    shard = next(path.glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size - 100)


def without_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def of_another_shape(path: Path) -> None:
    """The metadata of a save with one row more, whose items are stored in as many bytes as these."""
    other = saved(path.parent.parent / "other", path.name, w=torch.ones(5, 3))
    assert (other / "__0_0.distcp").stat().st_size == (path / "__0_0.distcp").stat().st_size
    (path / ".metadata").write_bytes((other / ".metadata").read_bytes())


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (nan, "not-finite: .: there are values that are not numbers in 1 of its tensors: model.w"),
        (infinite, "not-finite"),
        (flipped, "altered: __0_0.distcp: model.w"),
        (of_another_shape, "expected 60 bytes of values, found 48"),
        (cut, "truncated"),
        (without_metadata, "missing-metadata"),
    ],
)
def test_what_can_be_seen_without_digests_is_seen(root: Path, harm: Any, said: str) -> None:
    harm(root / "step_1000")
    found = holdfast.resolve_resume(root)
    assert found.chosen == "step_200"
    (why,) = (line for line in found.why if line.startswith("not step_1000"))
    assert said in why


def test_when_none_holds_it_is_refused_and_no_fresh_start(root: Path) -> None:
    for path in root.glob("step_*00"):
        if any(path.iterdir()):
            cut(path)
    found = holdfast.resolve_resume(root)
    assert (found.chosen, found.exit_code, found.storage_alarm != []) == ("refused", 18, True)
    with pytest.raises(NoValidRungError):
        found.require()
    assert command("recover", root).code == 18
    assert command("ckpt", "locate", root, "--full").code == 18


def test_recover_and_locate_take_it_and_start_from_it(root: Path, tmp_path: Path) -> None:
    done = command("recover", "--json", root)
    told = json.loads(done.out)
    assert (done.code, told["resolution"]["chosen"], told["run"]) == (0, "step_1000", "")
    assert [one["stage"] for one in told["findings"]] == [
        "trigger", "classify", "storage", "locate", "verify", "rung", "command",
    ]  # fmt: skip
    assert f"--set checkpoint.resume_from={root / 'step_1000'}" in told["answer"]
    assert "fresh" not in done.out
    located = command("ckpt", "locate", root)
    assert located.code == 0
    assert f"would resume at step 1000 from {root / 'step_1000'}; no value was looked at" in located.out
    assert command("recover", root, "--run").code == 2, "nobody has said how"
    script = (
        "import os, pathlib; pathlib.Path('told').write_text(os.environ['HOLDFAST_CHECKPOINT_RESUME_FROM'])"
    )
    argv = [
        sys.executable,
        "-m",
        "holdfast",
        "recover",
        str(root),
        "--run",
        "--",
        sys.executable,
        "-c",
        script,
    ]
    ran = finish(argv, cwd=tmp_path)
    assert ran.code == 0, ran.text
    assert (tmp_path / "told").read_text() == str(root / "step_1000")


def test_neither_command_needs_torch(root: Path) -> None:
    code = (
        "import sys, holdfast\n"
        f"found = holdfast.resolve_resume({str(root)!r})\n"
        "print(found.chosen, 'torch' in sys.modules)\n"
    )
    assert finish([sys.executable, "-c", code], cwd=root.parent).out.split() == ["step_1000", "False"]


def test_a_run_that_begins_beside_plain_checkpoints_is_asked_what_is_meant(
    root: Path, tmp_path: Path
) -> None:
    """Its own resume builds the same ladder: it would otherwise throw away what was trained."""
    ControlDirectory.open_or_create(tmp_path / "run")
    found = holdfast.resolve_resume(tmp_path / "run", root=root)
    assert (found.chosen, found.exit_code) == ("refused", 18)
    assert any("checkpoint.resume_from to go on from it, or say 'fresh'" in line for line in found.why)
    assert holdfast.resolve_resume(tmp_path / "run", root=root, resume_from="fresh").chosen == "fresh start"
    named = holdfast.resolve_resume(tmp_path / "run", root=root, resume_from=str(root / "step_200"))
    assert named.step == 200


# --- what was there before ---------------------------------------------------------------------------------


def test_after_a_requeue_a_missing_directory_is_no_first_start(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert holdfast.resolve_resume(missing, environ={}).chosen == "fresh start"
    found = holdfast.resolve_resume(missing, environ={"SLURM_RESTART_COUNT": "1"})
    assert (found.chosen, found.exit_code) == ("refused", 24)
    assert "started this job again once" in found.why[0]
    with pytest.raises(ControlError):
        found.require()
    asked = holdfast.resolve_resume(missing, environ={"SLURM_RESTART_COUNT": "1"}, resume_from="fresh")
    assert asked.chosen == "fresh start"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_an_empty_mount_is_no_first_start(tmp_path: Path) -> None:
    mount = tmp_path / "fs with blank"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], check=True)
    try:
        told = [holdfast.resolve_resume(path) for path in (mount, mount / "runs" / "gpt")]
        codes = [command("recover", path).code for path in (mount, mount / "runs" / "gpt")]
        (mount / "other").touch()
        used = holdfast.resolve_resume(mount / "runs" / "gpt")
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
    assert [one.exit_code for one in told] == [24, 24]
    assert codes == [24, 24]
    assert f"{mount} (tmpfs, from tmpfs) is an empty mount" in told[0].why[0]
    assert used.chosen == "fresh start"


def test_what_should_be_mounted_and_is_not_is_named(tmp_path: Path) -> None:
    planned = tmp_path / "fstab"
    planned.write_text(
        f"# a comment\nserver:/x {tmp_path}/fs nfs defaults 0 0\nserver:/y /y nfs noauto 0 0\n"
    )
    assert why_not_first(tmp_path / "fs" / "run", planned=planned).startswith(
        f"{tmp_path}/fs should be mounted"
    )
    assert why_not_first(tmp_path / "fsother", planned=planned) == ""
    assert why_not_first(Path("/y/run"), planned=planned) == ""


def test_the_kernel_s_table_is_read(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /scratch\\040a rw,noatime shared:2 - lustre 10.0.0.1@o2ib:/fs rw,flock\n"
        "rubbish\n"
    )
    found = mount_of(Path("/scratch a/runs"), table)
    assert found is not None
    assert (found.kind, found.point, "flock" in found.options) == ("lustre", "/scratch a", True)
    other = mount_of(Path("/scratch abc"), table)
    assert other is not None
    assert other.kind == "ext4"
