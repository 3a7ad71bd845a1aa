"""An S3 bucket as a store of remote copies, through s3fs.

Every request that carries bytes carries their MD5, which the server compares before it accepts them, and its
answer names what it stored (the ETag); this must agree with what was sent, part by part, and again for the
assembled object. Where an ETag is not an MD5 (encryption with KMS keys), the bytes are not confirmed and get
read back.

s3fs's own repetitions are turned off: how often and how long is decided in one place (store.py).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from holdfast.checkpoint.remote.store import (
    IN_FLIGHT,
    Budget,
    Retrier,
    Store,
    is_absent,
    or_absent,
    part_size,
)

CONNECT_TIMEOUT = 10.0
READ_TIMEOUT = 60.0
REQUEST_TIMEOUT = 300.0
"""Seconds for one request as a whole, so that a stalled connection cannot hold a job."""
LISTED = 1000

ABORT_BUDGET = Budget(attempts=3, seconds=10.0)
"""Something has failed already when an upload is given up: this must not take long. The next start sweeps."""


def open_bucket(options: Mapping[str, Any]) -> Any:
    """An s3fs file system with our timeouts; credentials and endpoint come from the usual places."""
    import botocore.config
    import s3fs

    config: dict[str, Any] = {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
        "max_pool_connections": 4 * IN_FLIGHT,
    }
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        # MD5 does this already, and servers that are not Amazon's may not know the newer checksums.
        if name in botocore.config.Config.OPTION_DEFAULTS and f"AWS_{name.upper()}" not in os.environ:
            config[name] = "when_required"
    chosen = {**options, "config_kwargs": {**config, **options.get("config_kwargs", {})}}
    fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, **chosen)
    fs.retries = 1
    return fs


class S3Store(Store):
    def __init__(self, url: str, fs: Any, bucket: str, prefix: str) -> None:
        super().__init__(url)
        self._fs = fs
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    def _call(self, tries: Retrier, method: str, **arguments: Any) -> Any:
        timeout = tries.left(REQUEST_TIMEOUT)
        return self._fs.call_s3(method, Bucket=self._bucket, timeout=timeout, **arguments)

    # --- looking --------------------------------------------------------------------------------------------

    def folders(self, tries: Retrier) -> list[str]:
        pages = self._pages("list_objects_v2", tries, Prefix=self._prefix, Delimiter="/", MaxKeys=LISTED)
        found = (entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ()))
        return sorted(prefix.removeprefix(self._prefix).rstrip("/") for prefix in found)

    def keys(self, under: str, tries: Retrier) -> dict[str, int]:
        prefix = f"{self._prefix}{under}/" if under else self._prefix
        pages = self._pages("list_objects_v2", tries, Prefix=prefix, MaxKeys=LISTED)
        found = (entry for page in pages for entry in page.get("Contents", ()))
        return {entry["Key"].removeprefix(self._prefix): int(entry["Size"]) for entry in found}

    def _pages(self, method: str, tries: Retrier, **arguments: Any) -> Iterable[dict[str, Any]]:
        while True:
            page = tries(f"list {self.url}", lambda: self._call(tries, method, **arguments))
            yield page
            if not page.get("IsTruncated"):
                return
            if method == "list_objects_v2":
                arguments["ContinuationToken"] = page["NextContinuationToken"]
            else:
                arguments["KeyMarker"] = page["NextKeyMarker"]
                arguments["UploadIdMarker"] = page["NextUploadIdMarker"]

    def size(self, key: str, tries: Retrier) -> int | None:
        head = self._head(key, tries)
        return int(head["ContentLength"]) if head is not None else None

    def _head(self, key: str, tries: Retrier) -> dict[str, Any] | None:
        def look() -> dict[str, Any] | None:
            try:
                found: dict[str, Any] = self._call(tries, "head_object", Key=self._prefix + key)
            except Exception as error:
                if is_absent(error):
                    return None
                raise
            return found

        return tries(f"look at {self.url}/{key}", look)

    def read(self, key: str, start: int, end: int, tries: Retrier) -> bytes:
        path = f"{self._bucket}/{self._prefix}{key}"

        def read_range() -> bytes:
            try:
                return bytes(
                    self._fs.cat_file(path, start=start, end=end, timeout=tries.left(REQUEST_TIMEOUT))
                )
            except OSError as error:
                if "InvalidRange" in f"{error} {error.__cause__}":
                    return b""  # the object ends before `start`
                raise

        return or_absent(key, tries, f"read {self.url}/{key}", read_range)

    # --- storing --------------------------------------------------------------------------------------------

    def upload(self, key: str, parts: Iterable[bytes], size: int, tries: Retrier) -> bool:
        source = iter(parts)
        if size <= part_size(size):
            data = b"".join(source)
            digest = hashlib.md5(data, usedforsecurity=False)
            encoded = base64.b64encode(digest.digest()).decode()
            answer = tries(
                f"write {self.url}/{key}",
                lambda: self._call(
                    tries, "put_object", Key=self._prefix + key, Body=data, ContentMD5=encoded
                ),
            )
            return _etag(answer) == digest.hexdigest()
        return _Multipart(self, key, tries).send(source)

    def remove(self, keys: list[str], tries: Retrier) -> None:
        def remove_one(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._call(tries, "delete_object", Key=self._prefix + key)

        with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="holdfast-remote") as pool:
            for _ in pool.map(lambda key: tries(f"delete {self.url}/{key}", lambda: remove_one(key)), keys):
                pass

    def abort_uploads(self, under: list[str], before: float, tries: Retrier) -> list[str]:
        ours = set(under)
        aborted: list[str] = []
        pages = self._pages("list_multipart_uploads", tries, Prefix=self._prefix, MaxUploads=LISTED)
        for entry in [entry for page in pages for entry in page.get("Uploads", ())]:
            key = str(entry["Key"]).removeprefix(self._prefix)
            if key.partition("/")[0] in ours and entry["Initiated"].timestamp() < before:
                self.abort(key, entry["UploadId"], tries)
                aborted.append(key)
        return aborted

    def abort(self, key: str, upload: str, tries: Retrier) -> None:
        def abort_one() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._call(tries, "abort_multipart_upload", Key=self._prefix + key, UploadId=upload)

        tries(f"abort an upload to {self.url}/{key}", abort_one)


class _Multipart:
    """One object in parts: a few travel at a time, and what was begun is completed or aborted."""

    def __init__(self, store: S3Store, key: str, tries: Retrier) -> None:
        self._store = store
        self._key = key
        self._tries = tries
        self._what = f"write {store.url}/{key}"

    def _call(self, method: str, **arguments: Any) -> Any:
        full = self._store._prefix + self._key
        return self._tries(self._what, lambda: self._store._call(self._tries, method, Key=full, **arguments))

    def send(self, parts: Iterable[bytes]) -> bool:
        upload = self._call("create_multipart_upload")["UploadId"]
        try:
            sent = self._send_parts(upload, parts)
            return self._complete(upload, sent)
        except BaseException:
            with contextlib.suppress(Exception):
                self._store.abort(self._key, upload, Retrier(ABORT_BUDGET))
            raise

    def _send_parts(self, upload: str, parts: Iterable[bytes]) -> list[tuple[str, bytes]]:
        """(the server's ETag, our MD5) of each part, in order."""
        free = threading.Semaphore(IN_FLIGHT)
        failed = threading.Event()
        sent: list[Future[tuple[str, bytes]]] = []

        def done(future: Future[tuple[str, bytes]]) -> None:
            if future.exception() is not None:
                failed.set()
            free.release()

        with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="holdfast-remote") as pool:
            free.acquire()
            for number, part in enumerate(parts, start=1):
                sent.append(pool.submit(self._send_part, upload, number, part))
                sent[-1].add_done_callback(done)
                del part
                free.acquire()  # before the next part is read, so that no more than these are in memory
                if failed.is_set():
                    break
        return [future.result() for future in sent]

    def _send_part(self, upload: str, number: int, data: bytes) -> tuple[str, bytes]:
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        encoded = base64.b64encode(digest).decode()
        answer = self._call("upload_part", UploadId=upload, PartNumber=number, Body=data, ContentMD5=encoded)
        return _etag(answer), digest

    def _complete(self, upload: str, sent: list[tuple[str, bytes]]) -> bool:
        listed = [{"PartNumber": number, "ETag": tag} for number, (tag, _) in enumerate(sent, start=1)]
        whole = hashlib.md5(b"".join(digest for _, digest in sent), usedforsecurity=False).hexdigest()
        expected = f"{whole}-{len(sent)}"
        full = self._store._prefix + self._key

        def complete() -> str:
            parts = {"Parts": listed}
            try:
                return _etag(
                    self._store._call(
                        self._tries,
                        "complete_multipart_upload",
                        Key=full,
                        UploadId=upload,
                        MultipartUpload=parts,
                    )
                )
            except FileNotFoundError:
                # The answer to an earlier attempt may have been lost: then the object is there already.
                head = self._store._head(self._key, self._tries)
                if head is None or _etag(head) != expected:
                    raise
                return expected

        tag = self._tries(self._what, complete)
        return tag == expected and all(tag == digest.hex() for tag, digest in sent)


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')
