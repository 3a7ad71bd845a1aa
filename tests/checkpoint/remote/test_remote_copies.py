"""Remote copies: what was pushed can be listed, verified, fetched and deleted; a cut leaves nothing half."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint.commit import Owner, sweep_staging
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import MANIFEST, CheckpointName, CheckpointRoot, Reason
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.read_back import unread
from holdfast.checkpoint.remote import store as remote_store
from holdfast.checkpoint.remote.copies import (
    QUARANTINE,
    Remote,
    open_remote,
    open_store,
    pull,
    split_copy_url,
)
from holdfast.checkpoint.remote.store import (
    PART,
    BadCopyError,
    Budget,
    FsspecStore,
    LocalCopyError,
    RemoteError,
    RemoteRefusedError,
    S3Store,
    open_bucket,
    part_size,
)
from holdfast.errors import ConfigError, LeaseLostError, UsageError
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, claim
from kit.checkpoints import ID, RUN, STEP, list_file, make_checkpoint, small_state
from kit.commands import ckpt
from kit.nodes.s3server import S3Server
from kit.tiny import counting_file_operations, tree

NAME = CheckpointName(STEP, ID)
QUICK = Budget(attempts=4, seconds=5.0, first_wait=0.01)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "PART", 64 * 1024)


Place = Callable[[], Remote]


@pytest.fixture(scope="module")
def connection(server: S3Server) -> Any:
    """One for all tests: making one takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        fs = open_bucket({})
        fs.connect()
        return fs


@pytest.fixture
def s3(connection: Any) -> Place:
    bucket = f"bucket-{os.urandom(4).hex()}"
    connection.call_s3("create_bucket", Bucket=bucket)
    return lambda: Remote(S3Store(f"s3://{bucket}/runs/a", connection, bucket, "runs/a"), QUICK)


@pytest.fixture(params=["s3", "file", "fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        made: Place = request.getfixturevalue("s3")
        return made
    folder = tmp_path / "remote"
    if request.param == "file":
        return lambda: Remote(open_store(f"file://{folder}"), QUICK)
    from fsspec.implementations.local import LocalFileSystem

    return lambda: Remote(FsspecStore("any://x", LocalFileSystem(), str(folder)), QUICK)


def big_state(seed: int = 0) -> dict[str, Any]:
    """Enough for several parts."""
    generator = torch.Generator().manual_seed(seed)
    return {**small_state(seed), "big": torch.randn(40_000, generator=generator)}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "root", state=big_state())


@pytest.fixture
def fence(tmp_path: Path) -> Fence:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    return Fence(control, claim(control, "x", 5.0).epoch)


OWNER = Owner(run=RUN, attempt=1, epoch=1)


def store_of(remote: Remote) -> Any:
    return remote._store


# --- there and back -----------------------------------------------------------------------------------------


def test_what_was_pushed_comes_back_bit_by_bit_and_stock_dcp_loads_it(
    place: Place, local: Path, tmp_path: Path, fence: Fence
) -> None:
    remote = place()
    copied = remote.push(local)
    assert copied.bytes == sum(len(data) for data in tree(local).values())
    assert remote.names() == [NAME]
    assert remote.verify(NAME)[1] == []
    other = CheckpointRoot(tmp_path / "elsewhere")
    pulled = pull(place(), NAME, other, fence=fence, owner=OWNER)
    assert tree(pulled.path) == tree(local)
    assert verify(pulled.path, run=RUN).sound
    assert pulled.quarantine is None
    assert not any(other.staging.iterdir())
    assert [entry.name for entry in other.path.iterdir() if not entry.name.startswith(".")] == [str(NAME)]
    state = big_state(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=pulled.path, no_dist=True)
    assert torch.equal(state["big"], big_state()["big"])


def test_a_second_push_of_the_same_does_nothing(s3: Place, local: Path) -> None:
    remote = s3()
    remote.push(local)
    before = store_of(remote).keys("", remote._tries())
    store_of(remote).upload = None  # would raise
    assert remote.push(local).already
    assert store_of(remote).keys("", remote._tries()) == before


def test_another_checkpoint_of_the_same_name_is_not_overwritten(
    place: Place, local: Path, tmp_path: Path
) -> None:
    remote = place()
    remote.push(local)
    other = make_checkpoint(tmp_path / "other", state=big_state(seed=2))
    with pytest.raises(RemoteRefusedError, match=r"holds another checkpoint of that name .* of its own"):
        remote.push(other)
    assert remote.verify(NAME)[1] == []


def test_the_store_confirms_the_bytes_on_s3_and_they_are_read_back_elsewhere(
    place: Place, local: Path
) -> None:
    remote = place()
    files = len(tree(local))
    assert remote.push(local).read_back == (0 if isinstance(store_of(remote), S3Store) else files)


def test_bytes_that_s3_does_not_confirm_are_read_back(
    s3: Place, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With KMS keys an ETag is not an MD5."""
    from holdfast.checkpoint.remote import store as remote_store

    etag = remote_store._etag
    monkeypatch.setattr(
        remote_store, "_etag", lambda answer: etag(answer)[::-1] if "Parts" not in answer else ""
    )
    remote = s3()
    monkeypatch.setattr(remote_store, "IN_FLIGHT", 2)
    with contextlib.suppress(RemoteError):
        remote.push(local)  # parts with wrong tags cannot be completed; single objects are read back
    monkeypatch.setattr(remote_store, "PART", 2**20)
    assert remote.push(local).read_back == len(tree(local))
    assert remote.verify(NAME)[1] == []


def test_a_checkpoint_is_not_deleted_while_it_is_pushed(place: Place, local: Path) -> None:
    seen: list[bool] = []

    def look() -> None:
        with unread(local) as free:
            seen.append(free)

    place().push(local, stop=look)
    assert seen
    assert not any(seen)


def test_parts_are_as_large_as_a_multipart_upload_needs() -> None:
    assert part_size(10) == remote_store.PART
    assert -(-(10**13) // part_size(10**13)) <= 10_000
    assert PART >= 5 * 2**20


# --- what is not right is not copied, and not taken ---------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "short", "long", "gone", "other manifest"])
def test_a_local_checkpoint_that_is_not_what_was_saved_is_not_copied(
    place: Place, local: Path, damage: str
) -> None:
    shard = local / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    if damage == "flip":
        data[-100] ^= 1
    elif damage == "short":
        data = data[:-1]
    elif damage == "long":
        data += b"x"
    shard.write_bytes(data)
    if damage == "gone":
        shard.unlink()
    expected = "0" * 32 if damage == "other manifest" else ""
    remote = place()
    with pytest.raises(LocalCopyError, match="was not copied"):
        remote.push(local, expected=expected)
    assert remote.names() == []
    assert (local / MANIFEST).exists()  # nothing local was touched
    if isinstance(store_of(remote), S3Store):
        fs = store_of(remote)._fs
        assert not fs.call_s3("list_multipart_uploads", Bucket=store_of(remote)._bucket).get("Uploads")


def spoil(remote: Remote, key: str, change: Callable[[bytearray], bytes | None]) -> None:
    """Rewrite a stored object behind the back of everything."""
    store, tries = store_of(remote), remote._tries()
    data = change(bytearray(store.read(key, 0, 10**9, tries)))
    store.remove([key], tries)
    if data is not None:
        store.upload(key, [bytes(data)], len(data), tries)


def flipped(data: bytearray) -> bytes:
    data[len(data) // 2] ^= 4
    return bytes(data)


BAD = {
    "flipped shard": ("__0_0.distcp", flipped, Reason.ALTERED),
    "short shard": ("__0_0.distcp", lambda data: data[:-7], Reason.TRUNCATED),
    "long shard": ("__0_0.distcp", lambda data: data + b"x", Reason.ALTERED),
    "no shard": ("__0_0.distcp", lambda data: None, Reason.MISSING),
    "flipped metadata": (".metadata", flipped, Reason.ALTERED),
    "flipped marker": (MANIFEST, flipped, Reason.UNREADABLE_MANIFEST),
    "short marker": (MANIFEST, lambda data: data[:-9], Reason.UNREADABLE_MANIFEST),
    "no marker": (MANIFEST, lambda data: None, Reason.NO_MANIFEST),
}


def test_a_bad_remote_copy_is_rejected_with_its_reason_and_nothing_local_changes(
    place: Place, local: Path, tmp_path: Path, fence: Fence
) -> None:
    remote = place()
    root = CheckpointRoot(tmp_path / "root")
    before = tree(root.path)
    for what, (file, change, reason) in BAD.items():
        remote.push(local)
        spoil(remote, f"{NAME}/{file}", change)
        with pytest.raises(BadCopyError, match=str(reason)) as caught:
            pull(remote, NAME, root, fence=fence, owner=OWNER)
        assert caught.value.problem.reason is reason, what
        assert tree(root.path) == before, what
        assert [problem.reason for problem in remote.verify(NAME)[1]] == [reason], what
        remote.delete(NAME)


def test_a_marker_that_cannot_be_read_vouches_for_nothing_and_the_copy_is_made_anew(
    place: Place, local: Path
) -> None:
    remote = place()
    remote.push(local)
    spoil(remote, f"{NAME}/{MANIFEST}", lambda data: data[:-9])
    spoil(remote, f"{NAME}/.metadata", flipped)
    assert remote.push(local).bytes > 0
    assert remote.verify(NAME)[1] == []


def test_a_copy_with_another_manifest_than_the_run_remembers_is_rejected(
    s3: Place, local: Path, tmp_path: Path, fence: Fence
) -> None:
    remote = s3()
    remote.push(local)
    with pytest.raises(BadCopyError, match="the run committed " + "0" * 32):
        pull(remote, NAME, CheckpointRoot(tmp_path / "r"), fence=fence, owner=OWNER, expected="0" * 32)


def test_a_pull_replaces_a_bad_local_directory_and_keeps_it_aside(
    s3: Place, local: Path, tmp_path: Path, fence: Fence
) -> None:
    remote = s3()
    remote.push(local)
    good = tree(local)
    root = CheckpointRoot(local.parent)
    for _ in range(2):
        (local / "__0_0.distcp").write_bytes(b"bad")
        pulled = pull(remote, NAME, root, fence=fence, owner=OWNER)
        assert tree(local) == good
        assert pulled.quarantine is not None
        assert (pulled.quarantine / "__0_0.distcp").read_bytes() == b"bad"
    assert os.listdir(root.path / QUARANTINE) == [
        pulled.quarantine.name
    ]  # one is evidence, more are a full disk
    assert root.names() == [NAME]


def test_a_cut_off_attempt_cannot_put_a_pulled_copy_in_place(
    s3: Place, local: Path, tmp_path: Path, fence: Fence
) -> None:
    remote = s3()
    remote.push(local)
    claim(ControlDirectory.open(tmp_path / "run"), "x", 5.0)
    with pytest.raises(LeaseLostError):
        pull(remote, NAME, CheckpointRoot(tmp_path / "r"), fence=fence, owner=OWNER)
    assert CheckpointRoot(tmp_path / "r").names() == []


# --- cut anywhere -------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@contextlib.contextmanager
def killed_at(remote: Remote, number: int, *, done: bool) -> Iterator[list[str]]:
    """Dead from the n-th request on, also for all cleaning up; `done`: the server still did the n-th."""
    fs = store_of(remote)._fs
    made: list[str] = []

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def request(*args: Any, **kwargs: Any) -> Any:
            made.append(str(args[0]))
            count = len(made)
            if count > number or (count == number and not done):
                raise Killed
            answer = call(*args, **kwargs)
            if count == number:
                raise Killed
            return answer

        return request

    fs.call_s3, fs.cat_file = wrap(fs.call_s3), wrap(fs.cat_file)
    try:
        yield made
    finally:
        del fs.call_s3, fs.cat_file


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_push_to_s3_cut_at_any_request_leaves_no_half_copy_and_the_next_one_succeeds(
    s3: Place, local: Path, done: bool, server: S3Server
) -> None:
    remote = s3()
    with killed_at(remote, 10**9, done=False) as requests:
        remote.push(local)
    assert requests.count("upload_part") >= 3
    remote.delete(NAME)
    finished = 0
    for number in range(1, len(requests) + 1):
        with killed_at(remote, number, done=done), pytest.raises(Killed):
            remote.push(local)
        if remote.names():
            finished += 1
            assert remote.verify(NAME)[1] == []
    assert finished == (1 if done else 0)  # only the last request, the marker's, makes it a copy
    bucket, client = store_of(remote)._bucket, server.client()
    assert client.list_multipart_uploads(Bucket=bucket)["Uploads"]  # the dead could not abort
    foreign = client.create_multipart_upload(Bucket=bucket, Key=f"runs/a/{NAME}-x/file")["UploadId"]
    other = client.create_multipart_upload(Bucket=bucket, Key=f"runs/ab/{NAME}/file")["UploadId"]
    assert remote.abort_uploads([NAME], before=0.0) == []  # none is that old
    assert remote.abort_uploads([NAME], before=2e10)
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert {upload["UploadId"] for upload in left} == {foreign, other}
    remote.delete(NAME)
    assert remote.push(local).bytes > 0
    assert remote.verify(NAME)[1] == []


@pytest.mark.parametrize(
    "done", [False, pytest.param(True, marks=pytest.mark.drill)], ids=["before", "after"]
)
def test_a_deletion_cut_at_any_request_never_leaves_a_marker_without_its_files(
    s3: Place, local: Path, done: bool
) -> None:
    remote = s3()
    remote.push(local)
    with killed_at(remote, 10**9, done=False) as requests:
        remote.delete(NAME)
    assert requests.index("delete_object") < requests.index("list_objects_v2")  # the marker is gone first
    for number in range(1, len(requests) + 1):
        remote.push(local)
        with killed_at(remote, number, done=done), pytest.raises(Killed):
            remote.delete(NAME)
        if remote.names():
            assert remote.verify(NAME)[1] == []
        remote.delete(NAME)
        assert remote.folders() == []


@pytest.mark.parametrize("act", ["push", "pull", "delete"])
def test_a_cut_at_any_file_operation_leaves_nothing_half(local: Path, tmp_path: Path, act: str) -> None:
    """`file://`: dead at the n-th operation, and nothing after it happens either."""
    url = f"file://{tmp_path}/remote"
    good = tree(local)
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    root = CheckpointRoot(tmp_path / "pulled")
    number = 0
    while True:
        fence = Fence(control, claim(control, "x", 5.0).epoch)
        owner = Owner(run=RUN, attempt=1, epoch=fence.epoch)
        if act != "push":
            open_remote(url).push(local)

        def die_at(seen: int, name: str, args: Any, last: int = number) -> None:
            if seen >= last:
                raise Killed

        try:
            with counting_file_operations(die_at):
                if act == "push":
                    open_remote(url).push(local)
                elif act == "pull":
                    pull(open_remote(url), NAME, root, fence=fence, owner=owner)
                else:
                    open_remote(url).delete(NAME)
        except Killed:
            number += 1
            if act == "pull":
                assert all(tree(root.path / str(name)) == good for name in root.names())
            elif open_remote(url).names():
                assert open_remote(url).verify(NAME)[1] == []
            if act == "pull":
                root.staging.mkdir(parents=True, exist_ok=True)
                fence = Fence(control, claim(control, "x", 5.0).epoch)
                sweep_staging(root, RUN, fence)
                assert not [path for path in root.staging.iterdir() if path.is_dir()]
            continue
        break
    assert number >= (5 if act == "delete" else 10)
    if act == "pull":
        assert tree(root.path / str(NAME)) == good
    elif act == "push":
        assert open_remote(url).verify(NAME)[1] == []
    else:
        assert open_remote(url).folders() == []


# --- addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["ls", "verify"])
def test_a_copy_that_is_deleted_after_it_was_listed_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    url = f"file://{tmp_path}/remote"
    older, newer = (
        make_checkpoint(tmp_path / "root", step=step, id=id * 8) for step, id in ((140, "a"), (160, "b"))
    )
    for one in (older, newer):
        open_remote(url, retry_seconds=5.0).push(one)
    real, done = Remote.manifest, list[int]()

    def first(self: Remote, name: CheckpointName, *more: Any) -> Any:
        if not done:
            done.append(Remote.delete(self, CheckpointName(140, "a" * 8)))
        return real(self, name, *more)

    monkeypatch.setattr(Remote, "manifest", first)
    told = ckpt(act, url)
    assert done
    assert told.code == 0, told.text
    assert "no-manifest" not in told.text
    assert "160" in told.out
    assert (f"{older.name}: deleted meanwhile" in told.out) is (act == "verify")
    monkeypatch.undo()
    named = ckpt("verify", f"{url}/{older.name}")
    assert (named.code, "no-manifest" in named.text) == (1, True), "asked for by name"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://x", "gone with its process"),
        ("https://host/x", "set AWS_ENDPOINT_URL"),
        ("s3://", "give a URL as s3://bucket/prefix"),
        ("some/path", "give a URL as s3://bucket/prefix"),
        ("file://rel/x", "three slashes"),
        ("nothing://x/y", "Protocol not known"),
        ("s3://key@bucket/x", "credentials come from the environment"),
    ],
)
def test_an_address_that_cannot_work_is_refused_with_the_reason(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.remote_root") as caught:
        open_remote(url)
    assert words in str(caught.value)


def test_a_url_of_one_checkpoint_is_told_from_its_root() -> None:
    assert split_copy_url(f"s3://b/x/{NAME}/") == ("s3://b/x", NAME)
    with pytest.raises(UsageError, match="must end in"):
        split_copy_url("s3://b/x")


def test_a_marker_that_lists_a_path_outside_is_not_believed(
    place: Place, local: Path, tmp_path: Path, fence: Fence
) -> None:
    """A store that others can write must not make a pull write outside of its directory."""
    remote = place()
    remote.push(local)
    manifest, _ = manifests.read(local)
    entry = list_file(local, "__0_0.distcp")
    outside = manifests.FileEntry(path="../out", size=entry.size, digest=entry.digest)
    forged = msgspec.structs.replace(manifest, files=[outside])
    spoil(remote, f"{NAME}/{MANIFEST}", lambda data: manifests.encode(forged)[0])
    with pytest.raises(BadCopyError, match="not allowed"):
        pull(remote, NAME, CheckpointRoot(tmp_path / "r"), fence=fence, owner=OWNER)
