"""The run's secret, with which agents of different nodes prove to each other that they belong to one run.

It is kept in the control directory, readable only by its owner: whoever can read it could change the run's
records anyway. It never travels; a challenge is answered with a code made from it.

`SealedStore` uses it to prove what agents write into a store that anybody can reach. Guarantee: what was not
written by this run, for this key, is ignored, reported once, and never returned; a value that was
overwritten, deleted or reset to an older one is written again by whoever has seen it. So a stranger can make
agents do more work and, if it never stops, end a run with a clear error; but it cannot tell them anything.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from holdfast.base import create_exclusive, explain_os_error, read_regular
from holdfast.errors import ControlError, DecisionTimeoutError
from holdfast.record.directory import ControlDirectory

SECRET = "secret"
LENGTH = 64


def run_secret(control: ControlDirectory) -> bytes:
    """The run's secret, which is made when it is first asked for."""
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
            "Delete it while the run is not running; a new one will be made"
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


# --- connections whose other end has not proven anything

HANDSHAKE = 5.0
"""Seconds allowed for the proof."""
MOST_OF_ADDRESS, MOST_STRANGERS = 8, 64
"""How many connections may lack a proof, per address and in all; more for a moment, as ranks gather."""
MOMENT = 1.0
HARD_LIMIT = 256

K = TypeVar("K")


def to_cut(strangers: Mapping[K, tuple[str, float]], now: float) -> list[K]:
    """Which of the connections without a proof to cut, oldest first; each with its address and since when.

    So no newcomer is refused because of others that say nothing, and a proven connection is never cut.
    """
    found: list[K] = []
    left = len(strangers)
    of_address = Counter(address for address, _ in strangers.values())
    for key, (address, since) in sorted(strangers.items(), key=lambda one: one[1][1]):
        age = now - since
        many = left > MOST_STRANGERS or of_address[address] > MOST_OF_ADDRESS
        if age > HANDSHAKE or (many and age > MOMENT) or left > HARD_LIMIT:
            found.append(key)
            left -= 1
            of_address[address] -= 1
    return found


# --- values of a store that anybody can reach

SEAL = b"hf1"
TRIES = 10_000
"""How often one change is tried. Each try that fails let another process's change through."""
RESTORES = 20
"""How often one look writes a value again; the known value is returned in any case."""
MIND = 2.0
"""Seconds between two checks that what this process said still stands."""
FOREIGN = "foreign"
_SHOWN = 60


class _Value(msgspec.Struct, frozen=True):
    number: int
    """Counts the changes of a key, so that an older value can be recognised."""
    payload: bytes


class SealedStore:
    """The few methods of a c10d store, for text, sealed with the run's secret.

    `scope`: what the keys belong to (a round of a rendezvous); a value of another one proves nothing here.
    """

    def __init__(
        self, base: Any, secret: bytes, run: str, scope: str, tell: Callable[[str], None] | None = None
    ) -> None:
        self.base = base
        self.foreign = ""
        """The id of another run that writes here too: no garbage, but its nodes do not belong to this run."""
        self._secret, self._run, self._scope = secret, run, scope
        self._tell = tell
        self._told = False
        self._known: dict[str, _Value] = {}
        self._written: set[str] = set()
        self._minded = time.monotonic()
        self._me = secrets.token_hex(4)
        self._added = 0

    def within(self, prefix: str) -> SealedStore:
        """A part of this store, with keys of its own."""
        from torch.distributed import PrefixStore

        base = PrefixStore(prefix, self.base)
        return SealedStore(base, self._secret, self._run, f"{self._scope}/{prefix}", self._tell)

    def get(self, key: str) -> bytes:
        """Never waits. Raises RuntimeError if there is no value, as torch's stores do."""
        found = self._look(key)
        if found is None:
            raise RuntimeError(f"there is nothing at {key} that this run has written")
        return found

    def check(self, keys: list[str]) -> bool:
        return all(self._look(key) is not None for key in keys)

    def set(self, key: str, text: str) -> None:
        known = self._known.get(key)
        value = _Value(known.number + 1 if known is not None else 1, text.encode())
        self.base.set(key, self._seal(key, value))
        self._known[key] = value
        self._written.add(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """The value afterwards; one that is not ours counts as none."""
        known, wanted = self._known.get(key), expected.encode()
        seen = self._seal(key, known) if known is not None and known.payload == wanted else b""
        for _ in range(TRIES):
            value = _Value(known.number + 1 if known is not None else 1, desired.encode())
            sealed = self._seal(key, value)
            found = bytes(self.base.compare_set(key, seen, sealed))
            if found == sealed:
                self._known[key] = value
                self._written.add(key)
                return value.payload
            opened = self._open(key, found)
            if opened is not None and (known is None or opened.number >= known.number):
                self._known[key] = known = opened
                if opened.payload != wanted:
                    return opened.payload
            elif known is not None and known.payload != wanted:
                return self._look(key) or b""
            # TCPStore answers with the expected value if there is none at all.
            seen = b"" if found == seen else found
        raise self._given_up(key)

    def add(self, key: str, amount: int) -> int:
        """A count that only rises. Not the store's own: that one cuts the connection if it meets garbage."""
        for turn in range(TRIES):
            now = self._look(key) or b""
            count = int(now.split()[0]) if now else 0
            if not amount:
                return count
            self._added += 1  # so that no two processes write the same bytes and both believe they have won
            mine = f"{count + amount} {self._me}.{self._added}"
            if self.compare_set(key, now.decode(), mine) == mine.encode():
                return count + amount
            time.sleep(random.uniform(0, min(0.05, 0.001 * turn)))
        raise self._given_up(key)

    def mind(self) -> None:
        """From time to time, write again what this process has said and somebody has overwritten."""
        now = time.monotonic()
        if now - self._minded >= MIND:
            self._minded = now
            for key in list(self._written):
                self._look(key)

    def hail(self) -> None:
        """Tell the agents of the other run, who cannot read what we seal, that we are here."""
        self.base.set(f"{FOREIGN}/{self.foreign}", self._seal(FOREIGN, _Value(1, b"")))

    def hailed(self) -> bool:
        """Whether agents of another run, which `foreign` names, have told us that they are here; they learn
        that we know."""
        key = f"{FOREIGN}/{self._run}"
        if not self.base.check([key]) or not self._is_foreign(bytes(self.base.get(key))):
            return False
        self.base.set(f"{FOREIGN}/read", "1")
        return True

    def heard(self) -> bool:
        """Whether the agents that we hailed know."""
        return bool(self.base.check([f"{FOREIGN}/read"]))

    # -- inside ---------------------------------------------------------------------------------------------

    def _is_foreign(self, raw: bytes) -> bool:
        """Whether it has the form of something that another run has sealed."""
        parts = raw.split(b" ", 4)
        if len(parts) != 5 or parts[0] != SEAL or parts[1] == self._run.encode():
            return False
        self.foreign = parts[1].decode("ascii", "replace")[:_SHOWN]
        return True

    def _look(self, key: str) -> bytes | None:
        known = self._known.get(key)
        for _ in range(RESTORES):
            raw = bytes(self.base.get(key)) if self.base.check([key]) else b""
            found = self._open(key, raw)
            if found is not None and (known is None or found.number >= known.number):
                self._known[key] = found
                return found.payload
            if known is None:
                return None
            self.base.compare_set(key, raw, self._seal(key, known))
        return known.payload if known is not None else None

    def _code(self, key: str, value: _Value) -> str:
        said = (self._run, self._scope, key, str(value.number))
        return prove(self._secret, b"store", *(part.encode() for part in said), value.payload).hex()

    def _seal(self, key: str, value: _Value) -> bytes:
        head = f"{self._run} {value.number} {self._code(key, value)} ".encode()
        return SEAL + b" " + head + value.payload

    def _open(self, key: str, raw: bytes) -> _Value | None:
        if not raw:
            return None
        parts = raw.split(b" ", 4)
        if len(parts) == 5 and parts[0] == SEAL and parts[2].isdigit() and len(parts[2]) < 19:
            value = _Value(int(parts[2]), parts[4])
            if hmac.compare_digest(parts[3], self._code(key, value).encode()):
                return value
            if self._is_foreign(raw):
                return None
        self._tell_once(key, raw)
        return None

    def _tell_once(self, key: str, raw: bytes) -> None:
        if self._told or self._tell is None:
            return
        self._told = True
        self._tell(
            f"what is at {key!r} in the store of the rendezvous ({raw[:_SHOWN]!r}) was not written by this "
            "run and is ignored, as is everything else that this run did not write. Somebody else can reach "
            "the store: docs/guides/nodes.md says which network it must live in"
        )

    def _given_up(self, key: str) -> DecisionTimeoutError:
        return DecisionTimeoutError(
            f"{key!r} in the store of the rendezvous changed {TRIES} times under our hands: something else "
            "writes to it without end. Give the run a network or a port of its own, and start it again"
        )
