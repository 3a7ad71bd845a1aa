"""The run's secret: what agents of different nodes prove to each other that they belong to the same run.

Kept in the control directory, readable by its owner only: who can read it could change the run's records
anyway. It never travels; a challenge is answered with a code made from it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from holdfast.control.directory import ControlDirectory
from holdfast.errors import ControlError
from holdfast.files import create_exclusive, explain_os_error, read_regular

SECRET = "secret"
LENGTH = 64


def run_secret(control: ControlDirectory) -> bytes:
    """The run's secret; made by whoever asks first."""
    path = control.path / SECRET
    try:
        if not path.exists():
            create_exclusive(path, secrets.token_hex(LENGTH // 2).encode(), mode=0o600)
        found = read_regular(path, 4096)
    except OSError as error:
        raise explain_os_error(error, "use", path) from error
    if len(found) != LENGTH:
        raise ControlError(
            f"{path} has {len(found)} bytes, expected {LENGTH}; it was changed by something else. "
            "Delete it while the run is not running; it is made again"
        )
    return found


def prove(secret: bytes, *parts: bytes) -> bytes:
    """What only somebody who knows the secret can say about these parts."""
    code = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        code.update(len(part).to_bytes(8, "big") + part)
    return code.digest()


def proves(code: bytes, secret: bytes, *parts: bytes) -> bool:
    return hmac.compare_digest(code, prove(secret, *parts))
