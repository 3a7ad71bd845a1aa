"""Trying again, within a budget, what an object store did not do at the first try.

Guarantee: an operation is tried again only if the failure is one that time may cure (a busy or restarting
server, a lost connection, a part damaged on its way), with growing, jittered waits, and never beyond its
budget of attempts and seconds or the deadline of the whole job. All else fails at once, with what to do.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from holdfast.checkpoint.problems import Problem, printable
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.exit_codes import ExitCode

T = TypeVar("T")


class RemoteError(HoldfastError):
    """Something with the remote copies did not work; every local checkpoint is untouched."""


class RemoteRefusedError(RemoteError):
    """The store refused, and would refuse again: no permission, no such bucket, a wrong address."""

    exit_code = ExitCode.USAGE


class RemoteUnavailableError(RemoteError):
    """The store still failed when the budget for trying again was spent."""


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
            raise RemoteUnavailableError(f"cannot {what}: the time for this was over")

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
    """What went wrong, in one line, with what to do where that is known."""
    code, status = _response(error)
    name = type(error).__name__
    text = printable(" ".join(str(error).split()) or name, 400)
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
