"""Where remote copies lie: objects under one URL (S3, a directory, whatever fsspec opens), with retries.

What the rest relies on: an object appears whole or not at all, under its final name, and is never renamed;
`upload` says whether the store itself confirmed the bytes by a checksum of its own; if not, the uploader
reads them back.

Stores: `s3://` (through s3fs), `file://` (with fsync), and whatever else fsspec opens (read back).

On S3, every request that carries bytes carries their MD5, which the server compares before it accepts them,
and its answer names what it stored (the ETag). This must agree with what was sent, part by part, and again
for the assembled object. Where an ETag is not an MD5 (encryption with KMS keys), the bytes are not confirmed
and get read back. s3fs's own retries are turned off: how often and how long to retry is decided here alone.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import random
import stat
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.base import entries, escaped, fsync_dir, make_dirs, unlink
from holdfast.checkpoint.format import Problem
from holdfast.errors import CheckpointError, ExitCode, HoldfastError

# Retrying, within a budget, what an object store did not do at the first attempt.
#
# Guarantee: an operation is tried again only if the failure is one that time may cure (a busy or restarting
# server, a lost connection, a part damaged on its way), with growing, jittered waits, and never beyond its
# budget of attempts and seconds or the deadline of the whole job. All else fails at once, saying what to do.


T = TypeVar("T")


class RemoteError(HoldfastError):
    """Something with the remote copies did not work; every local checkpoint is untouched."""


class RemoteRefusedError(RemoteError):
    """The store refused, and would refuse again: no permission, no such bucket, a wrong address."""

    exit_code = ExitCode.USAGE


class RemoteUnavailableError(RemoteError):
    """The store still failed when the budget for retries was spent."""


class BadCopyError(RemoteError, CheckpointError):
    """A remote copy is not what its manifest says."""

    def __init__(self, where: str, problem: Problem) -> None:
        super().__init__(f"the remote copy {where} is bad: {problem}")
        self.problem = problem


class LocalCopyError(RemoteError, CheckpointError):
    """The local checkpoint is not what its manifest says; it was not copied."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How long one operation is tried."""

    attempts: int = 10
    seconds: float = 120.0
    first_wait: float = 0.2
    longest_wait: float = 20.0


class Retrier:
    """Makes calls for one job: `tries("read x", call)`."""

    def __init__(self, budget: Budget, deadline: float | None = None) -> None:
        """`deadline` is on the monotonic clock and bounds all calls together."""
        self._budget = budget
        self._deadline = deadline
        self.repeated = 0
        """How often a call had to be made again."""

    def left(self, at_most: float) -> float:
        """Seconds that one request may take."""
        if self._deadline is None:
            return at_most
        return max(0.01, min(at_most, self._deadline - time.monotonic()))

    def check(self, what: str) -> None:
        """Raise if the whole job is out of time."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise RemoteUnavailableError(f"cannot {what}: the time for this is over")

    def __call__(self, what: str, call: Callable[[], T]) -> T:
        end = time.monotonic() + self._budget.seconds
        if self._deadline is not None:
            end = min(end, self._deadline)
        attempt = 0
        while True:
            self.check(what)
            attempt += 1
            try:
                return call()
            except HoldfastError:
                raise
            except Exception as error:
                if not is_foreign(error):
                    raise
                if not is_curable(error):
                    raise RemoteRefusedError(f"cannot {what}: {explain(error)}") from error
                wait = min(self._budget.longest_wait, self._budget.first_wait * 2 ** (attempt - 1))
                wait *= random.uniform(0.5, 1.0)  # many ranks or runs must not come back at the same moment
                spent = attempt >= self._budget.attempts or time.monotonic() + wait >= end
                if spent:
                    raise RemoteUnavailableError(
                        f"cannot {what}: {explain(error)} (the last of {attempt} attempts)"
                    ) from error
            self.repeated += 1
            time.sleep(wait)


# --- what an error means ------------------------------------------------------------------------------------

_CURABLE_CODES = frozenset(
    {
        "BadDigest", "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeout",
        "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "XAmzContentSHA256Mismatch",
        "XAmzContentChecksumMismatch",
    }
)  # fmt: skip
_CURABLE_STATUS = frozenset({408, 425, 429})
_LIBRARIES = (
    "aiohttp",
    "aiobotocore",
    "botocore",
    "fsspec",
    "s3fs",
    "gcsfs",
    "adlfs",
    "azure",
    "google",
    "asyncio",
)
_HOPELESS_NAMES = frozenset(
    {
        "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "NoRegionError",
        "ParamValidationError", "InvalidEndpointConfigurationError", "ProfileNotFound", "TokenRetrievalError",
    }
)  # fmt: skip
_HOPELESS_ERRNO = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR}
)


def _response(error: BaseException) -> tuple[str, int]:
    """The server's error code and HTTP status, where the error or its cause carries one."""
    seen: BaseException | None = error
    while seen is not None:
        response: Any = getattr(seen, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), int(status or 0)
        seen = seen.__cause__
    return "", 0


def is_foreign(error: Exception) -> bool:
    """Whether an error comes from the store or the way to it, and is not a mistake in this program."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in _LIBRARIES


def is_curable(error: Exception) -> bool:
    """Whether the same call may well succeed later."""
    code, status = _response(error)
    if code or status:
        return code in _CURABLE_CODES or status in _CURABLE_STATUS or status >= 500
    if type(error).__name__ in _HOPELESS_NAMES:
        return False
    if isinstance(error, PermissionError | FileNotFoundError | FileExistsError | NotADirectoryError):
        return False
    return not (isinstance(error, OSError) and error.errno in _HOPELESS_ERRNO)


def is_absent(error: BaseException) -> bool:
    """Whether the error says that an object is not there (a bucket that is not there is something else)."""
    code, status = _response(error)
    if code == "NoSuchBucket":
        return False
    return (
        isinstance(error, FileNotFoundError) or code in ("NoSuchKey", "NoSuchUpload", "404") or status == 404
    )


def explain(error: Exception) -> str:
    """What went wrong, in one line, and what to do, where that is known."""
    code, status = _response(error)
    name = type(error).__name__
    text = escaped(" ".join(str(error).split()) or name, 400)
    said = f"{code or status}: {text}" if (code or status) and (code or str(status)) not in text else text
    if code == "NoSuchBucket":
        return f"{said}; create the bucket, or correct checkpoint.remote_root or AWS_ENDPOINT_URL"
    if name in _HOPELESS_NAMES:
        return (
            f"{said}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role of the machine"
        )
    if isinstance(error, PermissionError) or status in (401, 403):
        return (
            f"{said}; the credentials must be allowed to list, get, put and delete here, and to abort uploads"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{said}; free some space there"
    if name in ("EndpointConnectionError", "ConnectTimeoutError") or isinstance(error, ConnectionError):
        return f"{said}; is the endpoint right (AWS_ENDPOINT_URL), and can this machine reach it?"
    return said


PART = 16 * 1024 * 1024
"""Bytes that travel in one request. Files larger than 10,000 of these get larger parts."""
IN_FLIGHT = 4
"""Requests at a time, and so the most parts in memory, however large a checkpoint is."""
MOST_PARTS = 10_000
UPLOADS = ".uploads"
"""Where a directory keeps what is not whole yet; an object store has a place of its own for that."""


def part_size(size: int) -> int:
    """Bytes per part for a file of this size: whole MiB, enough for a multipart upload to hold the file."""
    least = -(-size // MOST_PARTS)
    return PART if least <= PART else -(-least // 2**20) * 2**20


class Store(ABC):
    """Objects under `url`; keys are relative to it, with slashes. Every call is retried by `tries`."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def folders(self, tries: Retrier) -> list[str]:
        """Names directly under the URL that have something below them."""

    @abstractmethod
    def keys(self, under: str, tries: Retrier) -> dict[str, int]:
        """Every object below a folder: key → size."""

    @abstractmethod
    def size(self, key: str, tries: Retrier) -> int | None:
        """Bytes in an object; None if there is none."""

    @abstractmethod
    def read(self, key: str, start: int, end: int, tries: Retrier) -> bytes:
        """Bytes `start` to `end`; fewer if the object is shorter; FileNotFoundError if there is none."""

    @abstractmethod
    def upload(self, key: str, parts: Iterable[bytes], size: int, tries: Retrier) -> bool:
        """Store an object. Nothing appears if `parts` raises. True: the store confirmed every byte."""

    @abstractmethod
    def remove(self, keys: list[str], tries: Retrier) -> None:
        """Remove objects; one that is not there is as good as removed."""

    def abort_uploads(self, under: list[str], before: float, tries: Retrier) -> list[str]:
        """Abort unfinished uploads into these folders that began before `before` (seconds since 1970)."""
        del under, before, tries
        return []

    def stream(self, key: str, size: int, tries: Retrier) -> Iterator[bytes]:
        """An object's first `size` bytes, in order, read ahead; ends early if it is shorter."""
        step = PART // 2
        starts = range(0, size, step)
        with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="holdfast-remote") as pool:
            ahead: list[Future[bytes]] = []
            upcoming = iter(starts)
            try:
                for start in starts:
                    while len(ahead) < IN_FLIGHT and (ahead_of := next(upcoming, None)) is not None:
                        end = min(size, ahead_of + step)
                        ahead.append(pool.submit(self.read, key, ahead_of, end, tries))
                    data = ahead.pop(0).result()
                    yield data
                    if len(data) < min(size, start + step) - start:
                        return
            finally:
                for future in ahead:
                    future.cancel()


class LocalStore(Store):
    """A directory, for `file://`: a mounted share or a second disk. Objects are written aside, then moved."""

    def __init__(self, url: str, path: Path) -> None:
        super().__init__(url)
        self._path = path

    def folders(self, tries: Retrier) -> list[str]:
        def list_folders() -> list[str]:
            try:
                return sorted(entry.name for entry in self._path.iterdir() if entry.is_dir())
            except FileNotFoundError:
                return []

        return tries(f"list {self.url}", list_folders)

    def keys(self, under: str, tries: Retrier) -> dict[str, int]:
        def list_files() -> dict[str, int]:
            if (self._path / under).is_symlink():
                raise OSError(errno.ENOTDIR, "a symbolic link, not a directory of its own")
            paths = (
                Path(folder) / name for folder, _, names in os.walk(self._path / under) for name in names
            )
            return {str(path.relative_to(self._path)): path.lstat().st_size for path in paths}

        return tries(f"list {self.url}/{under}", list_files)

    def size(self, key: str, tries: Retrier) -> int | None:
        def look() -> int | None:
            try:
                return (self._path / key).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

        return tries(f"look at {self.url}/{key}", look)

    def read(self, key: str, start: int, end: int, tries: Retrier) -> bytes:
        def read_range() -> bytes:
            fd = os.open(self._path / key, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):  # a FIFO would be waited for, a device has no end
                    raise OSError(errno.EINVAL, "not a regular file", str(self._path / key))
                file.seek(start)
                return file.read(end - start)

        return or_absent(key, tries, f"read {self.url}/{key}", read_range)

    def upload(self, key: str, parts: Iterable[bytes], size: int, tries: Retrier) -> bool:
        del size
        path = self._path / key
        temporary = self._path / UPLOADS / f"{key.replace('/', '%')}.{uuid.uuid4().hex[:12]}"
        source = iter(parts)
        try:
            tries(f"make {temporary.parent}", lambda: make_dirs(temporary.parent))
            tries(f"make {path.parent}", lambda: make_dirs(path.parent))
            with tries(f"write {temporary}", lambda: temporary.open("xb", buffering=0)) as file:
                for part in source:
                    _write_whole(file.fileno(), part, tries, f"write {temporary}")
                tries(f"fsync {temporary}", lambda: os.fsync(file.fileno()))
            tries(f"write {path}", lambda: os.replace(temporary, path))
            tries(f"fsync {path.parent}", lambda: fsync_dir(path.parent))
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return False

    def remove(self, keys: list[str], tries: Retrier) -> None:
        for key in keys:
            self._remove_one(self._path / key, tries)
        for parent in {(self._path / key).parent for key in keys}:
            with contextlib.suppress(FileNotFoundError):
                fsync_dir(parent if parent.exists() else parent.parent)

    def abort_uploads(self, under: list[str], before: float, tries: Retrier) -> list[str]:
        def find() -> list[Path]:
            folder = self._path / UPLOADS
            found = [folder / name for name in entries(self._path, UPLOADS)]
            return [path for path in found if path.lstat().st_mtime < before]

        ours = set(under)
        left = [path for path in tries(f"list {self.url}", find) if path.name.partition("%")[0] in ours]
        for path in left:
            self._remove_one(path, tries)
        return [path.name.replace("%", "/") for path in left]

    def _remove_one(self, path: Path, tries: Retrier) -> None:
        names = path.relative_to(self._path).parts
        tries(f"delete {path}", lambda: unlink(self._path, *names))
        if len(names) > 1:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # a store of objects has no empty folders


def _write_whole(fd: int, data: bytes, tries: Retrier, what: str) -> None:
    view = memoryview(data)

    def write_some() -> int:
        return os.write(fd, view)

    while view:
        view = view[tries(what, write_some) :]


def _write_part(file: Any, part: bytes, once: Retrier, what: str) -> None:
    once(what, lambda: file.write(part))


class FsspecStore(Store):
    """Any other file system that fsspec opens. What its writes promise is not known: they are read back."""

    def __init__(self, url: str, fs: Any, path: str) -> None:
        super().__init__(url)
        self._fs = fs
        self._path = path.rstrip("/")

    def _full(self, key: str) -> str:
        return f"{self._path}/{key}" if key else self._path

    def _relative(self, path: str) -> str:
        return path.lstrip("/").removeprefix(self._path.lstrip("/")).lstrip("/")

    def folders(self, tries: Retrier) -> list[str]:
        def list_folders() -> list[str]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path, detail=True)
            except FileNotFoundError:
                return []
            return sorted(self._relative(entry["name"]) for entry in found if entry["type"] == "directory")

        return tries(f"list {self.url}", list_folders)

    def keys(self, under: str, tries: Retrier) -> dict[str, int]:
        def list_files() -> dict[str, int]:
            self._fs.invalidate_cache()
            found = self._fs.find(self._full(under), detail=True)
            return {self._relative(path): int(info["size"]) for path, info in found.items()}

        return tries(f"list {self.url}/{under}", list_files)

    def size(self, key: str, tries: Retrier) -> int | None:
        def look() -> int | None:
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self._full(key))["size"])
            except FileNotFoundError:
                return None

        return tries(f"look at {self.url}/{key}", look)

    def read(self, key: str, start: int, end: int, tries: Retrier) -> bytes:
        def read_range() -> bytes:
            return bytes(self._fs.cat_file(self._full(key), start=start, end=end))

        return or_absent(key, tries, f"read {self.url}/{key}", read_range)

    def upload(self, key: str, parts: Iterable[bytes], size: int, tries: Retrier) -> bool:
        del size
        what = f"write {self.url}/{key}"
        once = Retrier(Budget(attempts=1))  # fsspec's writers cannot take a part back
        full = self._full(key)
        tries(what, lambda: self._fs.makedirs(full.rpartition("/")[0], exist_ok=True))
        file = tries(what, lambda: self._fs.open(full, "wb"))
        try:
            for part in parts:
                _write_part(file, part, once, what)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()  # closing would store what has come so far
            raise
        once(what, file.close)
        return False

    def remove(self, keys: list[str], tries: Retrier) -> None:
        for key in keys:

            def remove_one(key: str = key) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._full(key))

            tries(f"delete {self.url}/{key}", remove_one)


def or_absent(key: str, tries: Retrier, what: str, call: Any) -> bytes:
    """Make a read; an absent object is an answer, not a refusal."""
    absent: list[bytes] = []

    def attempt() -> bytes:
        try:
            return bytes(call())
        except Exception as error:
            if is_absent(error):
                absent.append(b"")
                return b""
            raise

    data: bytes = tries(what, attempt)
    if absent:
        raise FileNotFoundError(key)
    return data


# --- an S3 bucket, through s3fs -----------------------------------------------------------------------------

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
