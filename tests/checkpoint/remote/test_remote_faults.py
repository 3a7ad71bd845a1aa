"""A store that fails: tried again within a budget if that may help, said at once and clearly if it cannot."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.format.manifest import CheckpointName
from holdfast.checkpoint.remote import store
from holdfast.checkpoint.remote.copies import Remote, open_store
from holdfast.checkpoint.remote.store import (
    BadCopyError,
    Budget,
    RemoteError,
    RemoteRefusedError,
    RemoteUnavailableError,
    Retrier,
)
from holdfast.errors import ExitCode, UsageError
from kit.checkpoints import ID, STEP, make_checkpoint, small_state
from kit.nodes.s3server import RESET, FirstN, Proxy, S3Server, answer, proxy

NAME = CheckpointName(STEP, ID)
QUICK = Budget(attempts=5, seconds=5.0, first_wait=0.01)


@pytest.fixture(scope="module")
def flaky(server: S3Server) -> Iterator[Proxy]:
    with proxy(server.port) as standing:
        yield standing


@pytest.fixture(scope="module")
def connection(flaky: Proxy) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", flaky.endpoint)
        fs = store.open_bucket({})
        fs.connect()
        return fs


@pytest.fixture
def remote(
    connection: object, flaky: Proxy, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Remote]:
    monkeypatch.setattr(store, "PART", 64 * 1024)
    bucket = f"bucket-{os.urandom(4).hex()}"
    server.client().create_bucket(Bucket=bucket)
    flaky.requests.clear()
    yield Remote(store.S3Store(f"s3://{bucket}/runs", connection, bucket, "runs"), QUICK)
    flaky.fault = flaky.lose = lambda head: None
    flaky.alter = lambda head, body: body


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {**small_state(), "big": torch.randn(50_000)}
    return make_checkpoint(tmp_path_factory.mktemp("root"), state=state)


FAULTS = {
    "500": answer(500, "InternalError"),
    "503": answer(503, "SlowDown"),
    "reset": RESET,
    "bad digest": answer(400, "BadDigest"),
}


@pytest.mark.parametrize(
    "fault",
    ["500", "reset", *(pytest.param(name, marks=pytest.mark.drill) for name in ("503", "bad digest"))],
)
def test_what_a_retry_may_cure_is_tried_again(remote: Remote, local: Path, flaky: Proxy, fault: str) -> None:
    flaky.fault = FirstN(3, FAULTS[fault], method="PUT")
    copied = remote.push(local)
    # aiohttp itself asks once more where a kept connection was reset
    assert copied.repeated == 3 or (fault == "reset" and copied.repeated >= 1)
    flaky.fault = FirstN(2, FAULTS[fault], method="GET")
    assert remote.verify(NAME)[1] == []


def test_a_store_that_goes_on_failing_is_given_up_within_the_budget(
    remote: Remote, local: Path, flaky: Proxy
) -> None:
    flaky.fault = FirstN(10**9, answer(503, "ServiceUnavailable"), method="PUT", path=".metadata")
    started = time.monotonic()
    with pytest.raises(RemoteUnavailableError, match=r"cannot write s3://.*/\.metadata: .*5 attempts"):
        remote.push(local)
    assert time.monotonic() - started < 5
    assert sum(".metadata" in line and line.startswith("PUT") for line in flaky.requests) == QUICK.attempts
    flaky.fault = lambda head: None
    assert remote.names() == []
    assert remote.push(local).bytes  # it works again when the store does


def test_parts_that_go_on_failing_abort_their_upload(
    remote: Remote, local: Path, flaky: Proxy, server: S3Server
) -> None:
    flaky.fault = FirstN(10**9, answer(500, "InternalError"), method="PUT", path="partNumber=2")
    with pytest.raises(RemoteUnavailableError):
        remote.push(local)
    assert any("uploadId" in line and line.startswith("DELETE") for line in flaky.requests)
    bucket = remote.url.split("/")[2]
    assert not server.client().list_multipart_uploads(Bucket=bucket).get("Uploads")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", "must be allowed to list, get, put and delete"),
        (403, "InvalidAccessKeyId", "must be allowed"),
        (404, "NoSuchBucket", "create the bucket, or correct checkpoint.remote_root"),
        (501, "NotImplemented", ""),
    ],
)
def test_what_no_retry_can_cure_fails_at_once_with_what_to_do(
    remote: Remote, flaky: Proxy, status: int, code: str, words: str
) -> None:
    flaky.fault = FirstN(10**9, answer(status, code))
    with pytest.raises(RemoteError, match=r"checkpoint\.remote_root = 's3://") as caught:
        remote.check()
    if status != 501:
        assert isinstance(caught.value, RemoteRefusedError)
        assert caught.value.exit_code == ExitCode.USAGE
        assert len(flaky.requests) == 1
    assert words in str(caught.value)
    assert "on purpose" in str(caught.value)


def test_the_check_at_a_start_leaves_nothing(remote: Remote, server: S3Server) -> None:
    remote.check()
    bucket = remote.url.split("/")[2]
    assert server.client().list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_a_bucket_that_may_be_read_but_not_written_is_refused_at_the_start(
    remote: Remote, flaky: Proxy
) -> None:
    flaky.fault = FirstN(10**9, answer(403, "AccessDenied"), method="PUT")
    with pytest.raises(RemoteRefusedError, match=r"cannot write .*must be allowed"):
        remote.check()


def test_a_server_that_does_not_answer_ends_the_check_by_its_deadline(
    remote: Remote, server: S3Server
) -> None:
    server.pause()
    try:
        started = time.monotonic()
        with pytest.raises(RemoteUnavailableError, match=r"checkpoint\.remote_root"):
            remote.check(timeout=1.0)
        assert time.monotonic() - started < 3
    finally:
        server.go_on()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UsageError, match=r"checkpoint\.remote_root .*pip install 'holdfast\[s3\]'"):
        open_store("s3://bucket/x")


def test_an_endpoint_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    remote = Remote(open_store("s3://bucket/x"), Budget(attempts=2, seconds=2.0, first_wait=0.01))
    with pytest.raises(RemoteUnavailableError, match="is the endpoint right"):
        remote.check()


@pytest.mark.parametrize("which", ["partNumber=2", "holdfast.json"])
def test_bytes_that_change_on_their_way_do_not_become_a_copy(
    remote: Remote, local: Path, flaky: Proxy, which: str
) -> None:
    """moto does not compare Content-MD5; its ETag tells, and then the bytes themselves."""

    def flip(head: bytes, body: bytes) -> bytes:
        line = head.split(b"\r\n")[0].decode()
        if line.startswith("PUT") and which in line:
            return body[:10] + bytes([body[10] ^ 1]) + body[11:]
        return body

    flaky.alter = flip
    with pytest.raises(BadCopyError, match="altered"):
        remote.push(local)
    flaky.alter = lambda head, body: body
    assert remote.names() == []
    assert remote.push(local).bytes
    assert remote.verify(NAME)[1] == []


def test_a_lost_answer_to_the_last_request_of_an_upload_is_no_failure(
    remote: Remote, local: Path, flaky: Proxy
) -> None:
    """The upload is complete; asked again, the server says that there is no such upload."""
    completing: list[bytes] = []

    def gone_by_then(head: bytes) -> bytes | None:
        if head.startswith(b"POST") and b"uploadId" in head.split(b"\r\n")[0]:
            completing.append(head)
            return answer(404, "NoSuchUpload") if len(completing) == 2 else None
        return None

    flaky.fault = gone_by_then
    flaky.lose = FirstN(1, answer(500, "InternalError"), method="POST", path="uploadId")
    copied = remote.push(local)
    assert copied.repeated >= 1
    assert remote.verify(NAME)[1] == []


def test_a_mistake_of_this_program_is_not_tried_again() -> None:
    calls: list[int] = []

    def mistaken() -> None:
        calls.append(1)
        raise TypeError("a mistake")

    with pytest.raises(TypeError):
        Retrier(QUICK)("do", mistaken)
    assert len(calls) == 1


def test_waits_grow_and_never_outlast_the_deadline() -> None:
    times: list[float] = []

    def failing() -> None:
        times.append(time.monotonic())
        raise ConnectionResetError("on purpose")

    started = time.monotonic()
    with pytest.raises(RemoteUnavailableError):
        Retrier(Budget(attempts=50, seconds=60.0, first_wait=0.05), started + 0.6)("do", failing)
    assert time.monotonic() - started < 5
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(waits) >= 2
    assert waits[-1] > waits[0]
