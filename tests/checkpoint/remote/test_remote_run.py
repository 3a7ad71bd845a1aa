"""A run with remote copies resumes from them bit by bit, and neither slows down nor dies with the store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.checkpoint.remote.copies import QUARANTINE, open_remote, open_store
from holdfast.checkpoint.remote.store import Budget, RemoteRefusedError, RemoteUnavailableError, Retrier
from holdfast.errors import ConfigError, NoValidRungError, UsageError
from holdfast.journal.events import CopyDeleted, CopyDrained, CopyFetched, DrainFailed, RungRejected, Warned
from kit.commands import ckpt, ckpt_json
from kit.damage import flip, flip_shard
from kit.harness import REPO, finish, wait_until
from kit.harness import holdfast as holdfast_command
from kit.nodes.s3server import Proxy, S3Server, proxy
from kit.runs import events_in
from kit.tiny import Outcome, checkpoints, train


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Proxy]]:
    name = f"bucket-{os.urandom(4).hex()}"
    server.client().create_bucket(Bucket=name)
    with proxy(server.port) as standing:
        monkeypatch.setenv("AWS_ENDPOINT_URL", standing.endpoint)
        yield f"s3://{name}/runs/a", standing


def there(url: str) -> list[str]:
    return [str(name) for name in open_remote(url).names()]


def test_a_run_whose_checkpoints_are_all_lost_resumes_bitwise_from_the_bucket(
    tmp_path: Path, bucket: tuple[str, Proxy], reference: Outcome
) -> None:
    """A new machine: an empty root, the same run directory."""
    url, _ = bucket
    run_dir = tmp_path / "run"
    train(run_dir, until=6, checkpoint_remote_root=url)
    names = [path.name for path in checkpoints(run_dir)]
    assert there(url) == names
    shutil.rmtree(run_dir / "checkpoints")
    outcome = train(run_dir, checkpoint_remote_root=url)
    assert outcome.started_at == 6
    assert outcome.parameters == reference.parameters
    assert all(outcome.losses[step] == reference.losses[step] for step in outcome.losses)
    fetched = events_in(run_dir, CopyFetched)
    assert [event.checkpoint for event in fetched] == names[:1]
    assert "missing" in fetched[0].because[0]
    assert len(there(url)) == 3


def test_a_bad_local_checkpoint_is_replaced_by_its_copy_before_the_ladder_goes_lower(
    tmp_path: Path, reference: Outcome
) -> None:
    run_dir, url = tmp_path / "run", f"file://{tmp_path}/remote"
    train(run_dir, until=6, checkpoint_remote_root=url)
    newest = checkpoints(run_dir)[0]
    flip_shard(newest)
    outcome = train(run_dir, checkpoint_remote_root=url)
    assert outcome.started_at == 6
    assert outcome.parameters == reference.parameters
    (event,) = events_in(run_dir, CopyFetched)
    assert "altered" in event.because[0]
    assert Path(event.quarantine).is_dir()
    assert Path(event.quarantine).parent.name == QUARANTINE
    assert events_in(run_dir, RungRejected) == []


def test_a_copy_that_is_bad_too_is_refused_with_both_reasons_and_the_rung_below_is_used(
    tmp_path: Path, reference: Outcome
) -> None:
    run_dir, url = tmp_path / "run", f"file://{tmp_path}/remote"
    train(run_dir, until=6, checkpoint_remote_root=url)
    newest = checkpoints(run_dir)[0]
    for root in (run_dir / "checkpoints", tmp_path / "remote"):
        flip(next((root / newest.name).glob("*.distcp")))
    outcome = train(run_dir, checkpoint_remote_root=url)
    assert outcome.started_at == 3
    assert outcome.parameters == reference.parameters
    (event,) = events_in(run_dir, RungRejected)
    assert len(event.reasons) == 2
    assert "the remote copy file://" in event.reasons[1]
    assert "altered" in event.reasons[1]
    assert newest.is_dir()  # nothing local changed


def test_a_run_directory_that_is_lost_too_can_go_on_from_a_url(tmp_path: Path, reference: Outcome) -> None:
    url = f"file://{tmp_path}/remote"
    train(tmp_path / "run", until=6, checkpoint_remote_root=url)
    shutil.rmtree(tmp_path / "run")
    outcome = train(tmp_path / "new", checkpoint_resume_from=f"{url}/{there(url)[0]}")
    assert outcome.started_at == 6
    assert outcome.parameters == reference.parameters
    with pytest.raises(UsageError, match=r"checkpoint\.resume_from = 'file://.* cannot be used.*no marker"):
        train(tmp_path / "other", checkpoint_resume_from=f"{url}/step_00000009-00000000")


@pytest.mark.parametrize("kind", ["file", pytest.param("s3", marks=pytest.mark.drill)])
def test_a_condemned_checkpoint_is_refused_by_its_url_too(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """Issue point 17: standing travels to copies on object stores, with the run or without it."""
    url = f"file://{tmp_path}/remote" if kind == "file" else request.getfixturevalue("bucket")[0]
    run_dir = tmp_path / "run"
    train(run_dir, until=6, checkpoint_remote_root=url)
    six, three = there(url)
    settings: dict[str, Any] = {"checkpoint_save_at_end": False}
    assert ckpt("condemn", run_dir, six, "--reason", "why", "--yes").code == 0
    with pytest.raises(NoValidRungError, match=r"condemned: set checkpoint\.force.*operator: why"):
        train(tmp_path / "new", until=7, checkpoint_resume_from=f"{url}/{six}", **settings)
    assert not list((tmp_path / "new" / "checkpoints" / "imported").glob("step_*")), "no byte was fetched"
    assert [row["standing"] for row in ckpt_json("ls", url)["checkpoints"]] == ["condemned", None]
    assert ckpt("acquit", run_dir, six, "--reason", "why", "--yes").code == 0
    assert train(tmp_path / "new", until=7, checkpoint_resume_from=f"{url}/{six}", **settings).started_at == 6
    # What did not reach the store is made up for at the next start.
    assert ckpt("condemn", run_dir, three, "--reason", "bad", "--yes").code == 0
    store = open_store(url)
    store.remove(list(store.keys(".standing", Retrier(Budget()))), Retrier(Budget()))
    assert open_remote(url).judged() == []
    train(run_dir, until=1, checkpoint_remote_root=url, checkpoint_resume_from="fresh", **settings)
    assert {str(name) for name in open_remote(url).judged()} == {six, three}
    with pytest.raises(NoValidRungError, match="condemned"):
        train(tmp_path / "third", until=4, checkpoint_resume_from=f"{url}/{three}", **settings)


def test_what_retention_gives_up_is_deleted_remotely_too(tmp_path: Path) -> None:
    run_dir, url = tmp_path / "run", f"file://{tmp_path}/remote"
    first: list[str] = []

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 4:  # the drain process is at work, so that it must be told of what goes from now on
            first.extend(wait_until(lambda: there(url), 20, "the first copy"))

    settings = {"checkpoint_interval": 2, "checkpoint_keep_last": 2, "checkpoint_remote_root": url}
    settings |= {"checkpoint_read_back": False}
    train(run_dir, until=12, at_step=at_step, **settings)
    kept = [path.name for path in checkpoints(run_dir)]
    assert first[-1] not in kept
    assert there(url) == kept
    assert first[-1] in [event.checkpoint for event in events_in(run_dir, CopyDeleted)]


def test_a_slow_store_does_not_slow_the_training(tmp_path: Path, bucket: tuple[str, Proxy]) -> None:
    url, standing = bucket
    seen: dict[int, float] = {}

    def at_step(step: int, run: holdfast.Run) -> None:
        standing.delay = 0.2  # each request, from the first step on
        seen[step] = time.monotonic()

    train(tmp_path / "run", until=6, checkpoint_interval=2, at_step=at_step, checkpoint_remote_root=url)
    drained = events_in(tmp_path / "run", CopyDrained)
    assert len(drained) == 3  # the end waits for them
    assert all(event.seconds > 0.5 for event in drained)
    assert seen[6] - seen[1] < sum(event.seconds for event in drained) / 2


@pytest.mark.drill
def test_training_goes_on_when_the_store_is_gone_and_copies_are_made_up_for(
    tmp_path: Path, bucket: tuple[str, Proxy], reference: Outcome
) -> None:
    url, standing = bucket
    run_dir = tmp_path / "run"

    def at_step(step: int, run: holdfast.Run) -> None:
        standing.fault = lambda head: b""

    train(run_dir, until=6, at_step=at_step, checkpoint_remote_root=url, checkpoint_remote_retry_seconds=0.3)
    assert len(checkpoints(run_dir)) == 2
    assert events_in(run_dir, DrainFailed)
    standing.fault = lambda head: None
    assert there(url) == []
    outcome = train(run_dir, checkpoint_remote_root=url)
    assert outcome.parameters == reference.parameters
    assert there(url) == [path.name for path in checkpoints(run_dir)]


def test_a_store_that_cannot_work_is_an_error_at_the_start_and_the_run_is_free_again(
    tmp_path: Path, bucket: tuple[str, Proxy]
) -> None:
    url, standing = bucket
    run_dir = tmp_path / "run"
    with pytest.raises(
        RemoteRefusedError, match=r"checkpoint\.remote_root = 's3://not-there/x' .*create the"
    ):
        train(run_dir, checkpoint_remote_root="s3://not-there/x")
    with pytest.raises(ConfigError, match=r"checkpoint\.remote_root = 'memory://x'"):
        train(run_dir, checkpoint_remote_root="memory://x")
    standing.fault = lambda head: b""
    with pytest.raises(RemoteUnavailableError, match=r"checkpoint\.remote_root"):
        train(run_dir, checkpoint_remote_root=url, checkpoint_remote_retry_seconds=0.2)
    assert train(run_dir, until=3).started_at == 0


def test_without_a_remote_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, holdfast.checkpoint.remote.drain, holdfast.checkpoint.remote.drain;"
        "sys.exit(bool({'torch', 'numpy', 'fsspec', 's3fs', 'botocore', 'asyncio'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.drill
def test_two_ranks_go_on_from_a_fetched_copy_when_one_of_them_finds_the_local_one_bad(tmp_path: Path) -> None:
    """The other rank waits while rank 0 fetches; both then load what was fetched."""
    url = f"file://{tmp_path}/remote"
    script = str(REPO / "tests" / "scripts" / "train" / "train_tiny.py")
    command = holdfast_command("run", "--nproc-per-node", "2", "--run-dir", "run", script)
    env = {"TINY_OUT": "out", "TINY_WRAP": "fsdp", "HOLDFAST_CHECKPOINT_REMOTE_ROOT": url}
    first = finish(command, cwd=tmp_path, env=env | {"TINY_UNTIL": "6"}, timeout=90)
    assert first.code == 0, first.text
    newest, older = checkpoints(tmp_path / "run")
    assert there(url) == [newest.name, older.name]
    flip(sorted(newest.glob("*.distcp"))[-1])  # what the last rank wrote, and only it reads
    second = finish(command, cwd=tmp_path, env=env | {"TINY_UNTIL": "9"}, timeout=90)
    assert second.code == 0, second.text
    (event,) = events_in(tmp_path / "run", CopyFetched)
    assert event.checkpoint == newest.name
    assert "altered" in event.because[0]
    assert len(there(url)) == 3


def test_remote_copies_can_be_listed_and_verified_by_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    train(tmp_path / "run", until=6, checkpoint_remote_root=url)
    newest, older = there(url)
    (tmp_path / "remote" / older / "holdfast.json").unlink()
    listed = finish(holdfast_command("ckpt", "ls", url), cwd=tmp_path)
    assert listed.code == 0, listed.text
    assert "complete" in listed.out
    assert "unfinished" in listed.out
    good = finish(holdfast_command("ckpt", "verify", f"{url}/{newest}"), cwd=tmp_path)
    assert good.code == 0, good.text
    flip(next((tmp_path / "remote" / newest).glob("*.distcp")))
    bad = finish(holdfast_command("ckpt", "verify", "--json", url), cwd=tmp_path)
    assert bad.code == 1
    assert json.loads(bad.out)["checkpoints"][0]["problems"][0]["reason"] == "altered"


def test_the_warnings_are_none_when_all_is_well(tmp_path: Path) -> None:
    train(tmp_path / "run", until=3, checkpoint_remote_root=f"file://{tmp_path}/remote")
    assert events_in(tmp_path / "run", Warned) == []
