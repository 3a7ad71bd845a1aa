"""`holdfast ckpt ls` and `ckpt verify --tier` of a run with a local tier, as a shell sees them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.inspection import Judge, list_copies
from holdfast.checkpoint.copies.tier import REPLICAS, WHERE
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import MANIFEST, METADATA, CheckpointName
from kit.commands import ckpt_process
from kit.damage import flip
from kit.harness import Result, finish
from kit.nodes.local_places import (
    METADATA_BYTES,
    SHARD,
    SHARDS,
    LocalRun,
    manifest_of,
    two_tiers,
)

BOTH = CheckpointName(100, "aaaaaaaa")
ONLY_LOCAL = CheckpointName(120, "3fa9c1d2")


@pytest.fixture
def run(tmp_path: Path) -> LocalRun:
    return two_tiers(tmp_path, BOTH, ONLY_LOCAL)


def verify(run: LocalRun, tier: str, *more: str | Path, node: int = 0) -> Result:
    local = run.nodes[node].path.parent
    return ckpt_process(local.parent, "verify", "--tier", tier, "--local-dir", local, run.control.path, *more)


def copies(result: Result) -> dict[tuple[str, int, str], list[str]]:
    """By checkpoint, rank and tier: the reasons why a copy is not sound."""
    return {
        (row["checkpoint"], row["rank"], row["tier"]): [problem["reason"] for problem in row["problems"]]
        for row in json.loads(result.out)["copies"]
    }


# --- ls -----------------------------------------------------------------------------------------------------


def test_ls_shows_where_each_steps_copies_are_and_those_that_only_nodes_have(
    run: LocalRun, tmp_path: Path
) -> None:
    """Issue 5, item 7."""
    result = ckpt_process(tmp_path, "ls", run.control.path)
    assert result.code == 0, result.text
    lines = result.out.splitlines()
    assert lines[0].split()[-2:] == ["standing", "copies"]
    assert lines[1].split()[:2] == [str(ONLY_LOCAL.step), ONLY_LOCAL.id]
    assert lines[1].endswith("local only  committed  local on 2 nodes · replicas 2/2")
    assert lines[2].split()[:2] == [str(BOTH.step), BOTH.id]
    assert lines[2].endswith("complete    committed  global · local on 2 nodes · replicas 2/2")
    assert "as recorded" in result.out


def test_ls_says_for_each_node_what_it_was_given_and_what_it_has_confirmed(
    run: LocalRun, tmp_path: Path
) -> None:
    folder = local_manifest.folder(run.control, ONLY_LOCAL)
    (folder / REPLICAS / f"0.{run.nodes[1].place}").unlink()
    result = ckpt_process(tmp_path, "ls", "--copies", run.control.path)
    assert result.code == 0, result.text
    assert f"{ONLY_LOCAL}: local on 2 nodes · replicas 1/2" in result.out
    assert f"  node-1  {run.nodes[0].place}  own rank 0; replicas of rank 1, confirmed" in result.out
    assert f"  node-2  {run.nodes[1].place}  own rank 1; replicas of rank 0, not confirmed" in result.out


def test_ls_json_has_all_of_it(run: LocalRun, tmp_path: Path) -> None:
    result = ckpt_process(tmp_path, "ls", "--json", run.control.path)
    newest, other = json.loads(result.out)["checkpoints"]
    assert (newest["name"], newest["state"], newest["path"]) == (str(ONLY_LOCAL), "local only", None)
    assert newest["world"] == 2
    assert newest["size"] == 2 * SHARDS * SHARD + len(METADATA_BYTES)
    assert newest["copies"]["global"] is False
    assert other["copies"]["global"] is True
    local = newest["copies"]["local"]
    assert (local["nodes"], local["replicas_planned"], local["replicas_confirmed"]) == (2, 2, 2)
    assert local["places"][0] == {
        "place": run.nodes[0].place,
        "node": "node-1",
        "own": [0],
        "replicas_planned": [1],
        "replicas_confirmed": [1],
    }


def test_ls_works_where_the_run_has_no_checkpoint_root_yet(run: LocalRun, tmp_path: Path) -> None:
    shutil.move(run.control.path / "checkpoints", tmp_path / "elsewhere")
    result = ckpt_process(tmp_path, "ls", run.control.path)
    assert result.code == 0, result.text
    assert result.out.count("local only") == 2
    result = ckpt_process(tmp_path, "ls", "--root", tmp_path / "elsewhere", run.control.path)
    assert result.code == 0, result.text
    assert "global · local on 2 nodes" in result.out


def test_ls_survives_records_that_cannot_be_read(run: LocalRun, tmp_path: Path) -> None:
    folder = local_manifest.folder(run.control, ONLY_LOCAL)
    (folder / WHERE).write_bytes(b"{")
    shutil.rmtree(folder / REPLICAS)
    result = ckpt_process(tmp_path, "ls", run.control.path)
    assert result.code == 0, result.text
    assert "local, not recorded where" in result.out
    (folder / MANIFEST).write_bytes(b"{}\n")
    result = ckpt_process(tmp_path, "ls", run.control.path)
    assert result.code == 1, result.text
    assert f"{ONLY_LOCAL}: unreadable-manifest: local/{ONLY_LOCAL}/holdfast.json: " in result.out


def test_ls_does_not_take_a_manifest_that_was_never_committed_for_a_checkpoint(
    run: LocalRun, tmp_path: Path
) -> None:
    next(run.control.attempt(1).glob(f"commits/*-{ONLY_LOCAL.id}.json")).unlink()
    result = ckpt_process(tmp_path, "ls", "--json", run.control.path)
    assert json.loads(result.out)["checkpoints"][0]["state"] == "not committed"


# --- verify --tier ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "ranks"),
    [("local", [(0, "local")]), ("peer", [(1, "peer")]), ("all", [(0, "local"), (1, "peer")])],
)
def test_verify_reads_the_copies_of_this_node_that_a_tier_names(
    run: LocalRun, tier: str, ranks: list[tuple[int, str]]
) -> None:
    result = verify(run, tier, "--json", str(ONLY_LOCAL.step))
    assert result.code == 0, result.text
    assert copies(result) == {(str(ONLY_LOCAL), rank, kind): [] for rank, kind in ranks}
    report = json.loads(result.out)
    assert report["bytes_checked"] == len(ranks) * SHARDS * SHARD
    assert (report["node"], report["place"]) == ("node-1", run.nodes[0].place)


def test_verify_of_a_whole_run_reads_every_tier_and_says_how_much(run: LocalRun) -> None:
    result = verify(run, "local")
    assert result.code == 0, result.text
    assert f"{ONLY_LOCAL} rank 0, local, on node-1: sound, 2 files, 6.0 kB" in result.out
    assert "2 copies, nothing wrong found; 12.0 kB read" in result.out


def test_verify_of_the_global_tier_needs_no_local_directory(run: LocalRun, tmp_path: Path) -> None:
    directory = run.control.path / "checkpoints" / str(BOTH)
    result = ckpt_process(tmp_path, "verify", "--tier", "global", "--json", run.control.path)
    report = json.loads(result.out)
    assert [row["path"] for row in report["checkpoints"]] == [str(directory)]
    # What stands here for DCP's metadata is no pickle, and that is all that is wrong.
    assert [p["reason"] for p in report["checkpoints"][0]["problems"]] == ["unreadable-metadata"]
    (directory / "__0_0.distcp").write_bytes(b"x")
    result = ckpt_process(tmp_path, "verify", "--tier", "global", run.control.path, BOTH.id)
    assert result.code == 1, result.text
    assert "truncated" in result.out


def test_verify_of_the_global_tier_refuses_another_manifest_than_was_committed(
    run: LocalRun, tmp_path: Path
) -> None:
    other = manifest_of(name=BOTH, run=run.control.run_id, created=1.0)
    (run.control.path / "checkpoints" / str(BOTH) / MANIFEST).write_bytes(manifests.encode(other)[0])
    result = ckpt_process(tmp_path, "verify", "--tier", "global", run.control.path)
    assert result.code == 1, result.text
    assert "was committed under this name" in result.out


def test_a_flipped_byte_is_named_with_its_chunk_and_only_for_its_copy(run: LocalRun) -> None:
    flip(run.nodes[0].images / f"00001.{ONLY_LOCAL.id}", SHARD + 100)
    result = verify(run, "all", str(ONLY_LOCAL))
    assert result.code == 1, result.text
    assert f"{ONLY_LOCAL} rank 0, local, on node-1: sound" in result.out
    assert f"{ONLY_LOCAL} rank 1, peer, on node-1: not sound" in result.out
    assert "  altered              __1_1.distcp  expected digest " in result.out
    assert "bad chunks at bytes 0–700" in result.out
    assert "2 copies, 1 not sound" in result.out
    assert verify(run, "all", str(ONLY_LOCAL), node=1).code == 0


def test_each_fault_has_its_reason(run: LocalRun) -> None:
    tier = run.nodes[0]
    os.truncate(tier.images / f"00000.{ONLY_LOCAL.id}", 10)
    (tier.images / f"00001.{ONLY_LOCAL.id}").unlink()
    (tier.copies / f"{BOTH}.00000.json").write_text("{")
    result = verify(run, "all", "--json")
    assert result.code == 1, result.text
    assert copies(result) == {
        (str(BOTH), None, "local"): ["unreadable"],
        (str(BOTH), 1, "peer"): [],
        (str(ONLY_LOCAL), 0, "local"): ["truncated", "truncated"],
        (str(ONLY_LOCAL), 1, "peer"): ["missing"],
    }
    assert (tier.copies / f"{BOTH}.00000.json").exists()  # looking moves nothing


def test_a_copy_is_judged_only_by_the_manifest_that_was_committed(run: LocalRun) -> None:
    """Scenario: somebody replaced the manifest, the copies and the records alike; the commit record tells."""
    folder = local_manifest.folder(run.control, ONLY_LOCAL)
    other = manifest_of(name=ONLY_LOCAL, run=run.control.run_id, created=1.0)
    (folder / MANIFEST).write_bytes(manifests.encode(other)[0])
    result = verify(run, "local", "--json", str(ONLY_LOCAL))
    assert result.code == 1
    assert copies(result) == {(str(ONLY_LOCAL), 0, "local"): ["unreadable-manifest"]}
    (folder / MANIFEST).unlink()
    assert copies(verify(run, "local", "--json", ONLY_LOCAL.id)) == {
        (str(ONLY_LOCAL), 0, "local"): ["no-manifest"]
    }


def test_the_manifest_in_the_root_judges_copies_that_the_control_directory_has_forgotten(
    run: LocalRun,
) -> None:
    local_manifest.forget(run.control, BOTH)
    assert copies(verify(run, "local", "--json", str(BOTH))) == {(str(BOTH), 0, "local"): []}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x" * len(METADATA_BYTES), "altered"),
        (METADATA_BYTES + b"x", "unreadable"),
        (None, "missing-metadata"),
    ],
)
def test_the_metadata_that_all_copies_need_is_judged_too(
    run: LocalRun, data: bytes | None, reason: str
) -> None:
    path = local_manifest.folder(run.control, ONLY_LOCAL) / METADATA
    path.unlink() if data is None else path.write_bytes(data)
    result = verify(run, "peer", "--json")
    assert result.code == 1
    found = copies(result)
    assert found.pop((str(ONLY_LOCAL), None, "local")) == [reason]
    assert set(map(tuple, found.values())) == {()}


def test_another_manifest_in_the_root_judges_nothing(run: LocalRun) -> None:
    local_manifest.forget(run.control, BOTH)
    other = manifest_of(name=BOTH, run=run.control.run_id, created=1.0)
    (run.control.path / "checkpoints" / str(BOTH) / MANIFEST).write_bytes(manifests.encode(other)[0])
    assert copies(verify(run, "local", "--json", str(BOTH))) == {(str(BOTH), 0, "local"): ["no-manifest"]}


def test_a_manifest_of_another_run_judges_nothing(run: LocalRun) -> None:
    name = run.commit(manifest_of(name=CheckpointName(140, "bbbbbbbb"), run="somebody else"))
    assert copies(verify(run, "local", "--json", str(name))) == {(str(name), 0, "local"): ["wrong-run"]}


def test_a_copy_that_is_given_up_while_it_is_looked_at_is_no_fault(run: LocalRun) -> None:
    tier = run.nodes[0]
    (record,) = list_copies(tier, ["local"], ONLY_LOCAL).records
    assert tier.drop(record)
    inspection = Judge(run.control, None).inspect(tier, record)
    assert inspection.gone
    assert inspection.sound


def test_a_record_under_another_copys_name_is_unreadable(run: LocalRun) -> None:
    folder = run.nodes[0].copies
    (folder / f"{ONLY_LOCAL}.00000.json").rename(folder / f"{ONLY_LOCAL}.00005.json")
    result = verify(run, "local", "--json", str(ONLY_LOCAL))
    assert copies(result) == {
        (str(ONLY_LOCAL), None, "local"): ["unreadable"],
        (str(ONLY_LOCAL), 0, "local"): ["missing"],
    }


def test_a_copy_of_a_checkpoint_that_was_never_committed_is_not_sound(run: LocalRun) -> None:
    next(run.control.attempt(1).glob(f"commits/*-{ONLY_LOCAL.id}.json")).unlink()
    assert copies(verify(run, "local", "--json", ONLY_LOCAL.id)) == {
        (str(ONLY_LOCAL), 0, "local"): ["no-manifest"]
    }


def test_a_copy_that_was_recorded_for_this_node_and_is_gone_is_missing_if_asked_for(run: LocalRun) -> None:
    for path in run.nodes[0].copies.glob(f"{ONLY_LOCAL}.*"):
        path.unlink()
    assert verify(run, "all").out.count(str(ONLY_LOCAL)) == 0
    result = verify(run, "all", "--json", str(ONLY_LOCAL))
    assert result.code == 1
    assert copies(result) == {
        (str(ONLY_LOCAL), 0, "local"): ["missing"],
        (str(ONLY_LOCAL), 1, "peer"): ["missing"],
    }


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--tier", "nowhere", "run"], "--tier"),
        (["--tier", "local", "run"], "no local directory is known"),
        (["--tier", "local", "--local-dir", "node-3", "run"], "this node holds nothing of run"),
        (["--tier", "local", "--local-dir", "node-1", "node-1"], "is not a run directory"),
        (["--tier", "local", "--local-dir", "node-1", "run", "999"], "has no checkpoint '999'"),
        (["--tier", "local", "--local-dir", "node-1", "run", "1", "2"], "at most one checkpoint"),
        (["--tier", "local", "--local-dir", "node-1", "--world", "2", "run"], "leave out --run and --world"),
        (["--local-dir", "node-1", "run"], "belong to --tier"),
    ],
)
def test_usage_errors_exit_2_and_say_what_is_wrong(
    run: LocalRun, args: list[str], said: str, tmp_path: Path
) -> None:
    del run
    result = ckpt_process(tmp_path, "verify", *args)
    assert result.code == 2, result.text
    assert said in result.err
    assert "Traceback" not in result.err


def test_verify_all_on_a_node_without_copies_reads_the_root(run: LocalRun, tmp_path: Path) -> None:
    result = ckpt_process(
        tmp_path, "verify", "--tier", "all", "--local-dir", tmp_path, "--json", run.control.path
    )
    report = json.loads(result.out)
    assert (len(report["checkpoints"]), report["copies"], report["place"]) == (1, [], None)


def test_none_of_it_imports_torch(run: LocalRun, tmp_path: Path) -> None:
    local, run_dir = str(run.nodes[0].path.parent), str(run.control.path)
    code = (
        "import sys\n"
        "from holdfast.cli.app import app\n"
        f"for args in (['ckpt', 'ls', {run_dir!r}], ['clean', '--dry-run', {local!r}],\n"
        f"             ['ckpt', 'verify', '--tier', 'local', '--local-dir', {local!r}, {run_dir!r}]):\n"
        "    try:\n"
        "        app(args)\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')))\n"
    )
    result = finish([sys.executable, "-c", code], cwd=tmp_path)
    assert result.code == 0, result.text
    assert result.out.splitlines()[-1] == "[]"
