"""What the places of an attempt really hold, found out at a resume.

Guarantee: a place is a source of a shard only if its record fits the manifest and its image is there, whole
in size; nothing is believed of the bytes. They are read once, by who loads them, and each chunk is compared
with its digest before it is used, from this source or the next one. File names say only what is worth
looking at.

Each place's leader says which checkpoints it has records of (`report`). For a rung that rank 0 proposes, each
leader answers with what it holds of it (`answer`), and rank 0 puts the answers together (`gather`). If then
some rank finds no right bytes of a file anywhere, every leader is asked once more, and reads all that it
holds of that rung (`thorough`), so that what is bad is known to be, and stays out of every later resume. What
is found bad is quarantined at once; a copy that is given up meanwhile is not bad, only gone.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from holdfast.checkpoint import local_manifest
from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.assembled import AssembledShards
from holdfast.checkpoint.identity import METADATA, CheckpointName, parse_name, saver_of
from holdfast.checkpoint.local_tier import CopyRecord, LocalTier
from holdfast.checkpoint.local_verify import look_at_copy, verify_copy
from holdfast.checkpoint.manifest import Manifest, ManifestError
from holdfast.checkpoint.places import PlaceMap
from holdfast.checkpoint.problems import Reason
from holdfast.control.decisions import Store, read_key
from holdfast.control.directory import ControlDirectory
from holdfast.files import read_regular, replace_atomic
from holdfast.journal.events import CopyQuarantined
from holdfast.journal.writer import JournalWriter
from holdfast.policy.assembly import Assembly, assemble, describe

MAX_ASSEMBLY_BYTES = 256 * 1024 * 1024


class _Sound(msgspec.Struct, frozen=True, kw_only=True):
    """What a place holds of a checkpoint."""

    files: list[str]
    bad: list[str]
    """What was found wrong, in words."""
    verified: bool
    """Whether every byte was read for this."""


class LocalInventory:
    """One rank's part in it, for one attempt."""

    def __init__(
        self,
        *,
        tier: LocalTier | None,
        places: PlaceMap,
        rank: int,
        control: ControlDirectory,
        store: Store,
        journal: JournalWriter,
        attempt: int,
        timeout: float,
        peer_timeout: float,
    ) -> None:
        """`timeout` is what verifying may take, `peer_timeout` what one read from a peer may.

        Without a tier this node holds nothing, and reads what others hold.
        """
        self._tier = tier
        self._places = places
        self._rank = rank
        self._control = control
        self._store = store
        self._journal = journal
        self._attempt = attempt
        self._timeout = timeout
        self._peer_timeout = peer_timeout
        self._node = places.of(rank).node
        self._leads = tier is not None and places.leads(rank)

    def report(self) -> None:
        """Every place's leader, before anything is proposed."""
        if self._leads and self._tier is not None:
            held = sorted({record.checkpoint for record in self._tier.records()})
            self._store.set(f"copies/claims/{self._rank}", msgspec.json.encode(held).decode())

    def claims(self) -> set[CheckpointName]:
        """On rank 0: checkpoints that some place has a record of."""
        found: set[CheckpointName] = set()
        deadline = time.monotonic() + self._timeout
        for info in self._places.usable():
            left = max(0.0, deadline - time.monotonic())
            what = f"what {info.node} holds in its local tier, from rank {info.leader}"
            raw = read_key(self._store, f"copies/claims/{info.leader}", left, what)
            names = map(parse_name, msgspec.json.decode(raw, type=list[str]))
            found |= {name for name in names if name is not None}
        return found

    def home(self, name: CheckpointName, digest: str, directory: Path) -> Path | None:
        """Where the manifest with this digest is, and the `.metadata` that it lists; None if nowhere."""
        for path in (local_manifest.folder(self._control, name), directory):
            with contextlib.suppress(ManifestError, OSError):
                if _has_metadata(path, _read(path, digest)):
                    return path
        return None

    def answer(
        self, number: int, name: CheckpointName, digest: str, home: Path, *, thorough: bool = True
    ) -> None:
        """A place's leader says what it holds of a checkpoint; `thorough`: after reading all of it."""
        if not self._leads or self._tier is None:
            return
        sound = _Sound(files=[], bad=[], verified=thorough)
        try:
            sound = self._look(self._tier, name, _read(home, digest), digest, thorough=thorough)
        except (ManifestError, OSError) as error:
            sound.bad.append(f"{self._node} could not verify its copies: {error}")
        self._store.set(f"copies/{number}/sound/{self._rank}", msgspec.json.encode(sound).decode())

    def _look(
        self, tier: LocalTier, name: CheckpointName, manifest: Manifest, digest: str, *, thorough: bool
    ) -> _Sound:
        sound = _Sound(files=[], bad=[], verified=thorough)
        threads = min(16, len(os.sched_getaffinity(0)))
        for record in tier.records():
            if record.name != name:
                continue
            if thorough:
                problems = verify_copy(tier, record, manifest, digest=digest, threads=threads)
            else:
                problems = look_at_copy(tier, record, manifest, digest=digest)
            if not problems:
                sound.files.extend(file.path for file in record.files)
                continue
            told = [str(problem) for problem in problems]
            if any(problem.reason is not Reason.MISSING for problem in problems):
                self._quarantine(tier, record, told)
            sound.bad.append(
                f"{record.kind} copy of rank {record.rank}'s part on {self._node}: {'; '.join(told)}"
            )
        return sound

    def _quarantine(self, tier: LocalTier, record: CopyRecord, told: list[str]) -> None:
        if tier.quarantine(record, "; ".join(told)):
            self._journal.write(
                CopyQuarantined(checkpoint=record.checkpoint, node=self._node, kind=record.kind, reasons=told)
            )

    def gather(self, number: int, manifest: Manifest, *, in_global: bool) -> tuple[Assembly, list[str]]:
        """On rank 0: where each shard can come from, and what was found bad on the way."""
        held: dict[str, list[str]] = {}
        bad: list[str] = []
        verified = True
        deadline = time.monotonic() + self._timeout
        for info in self._places.usable():
            left = max(0.0, deadline - time.monotonic())
            what = f"what {info.node} holds of the proposed checkpoint, from rank {info.leader}"
            raw = read_key(self._store, f"copies/{number}/sound/{info.leader}", left, what)
            sound = msgspec.json.decode(raw, type=_Sound)
            held[info.place] = sound.files
            bad += sound.bad
            verified = verified and sound.verified
        files = [entry.path for entry in manifest.files if entry.path != METADATA]
        return assemble(files, held, in_global=in_global, verified=verified), bad

    def describe(self, name: CheckpointName, assembly: Assembly) -> list[str]:
        """Where the shards come from, in words."""
        where = local_manifest.read_where(self._control, name)
        nodes = {**(where.nodes if where else {}), **self._places.nodes()}
        ranks = where.ranks if where else []
        saved_at = {}
        for path in assembly.sources:
            saver = saver_of(path)
            if saver is not None and saver < len(ranks):
                saved_at[path] = ranks[saver].place
        return describe(assembly, nodes, saved_at)

    def publish(self, number: int, assembly: Assembly) -> str:
        """On rank 0: leave it where every rank can read it; too large for the store where there are many."""
        path = self._control.attempt(self._attempt) / f"assembly-{number}.json"
        replace_atomic(path, msgspec.json.encode(assembly), durable=False)
        return str(path)

    def shards(self, name: CheckpointName, assembly: str, directory: Path) -> AssembledShards:
        """This rank's way to the shards, as rank 0 has published it."""
        found = msgspec.json.decode(read_regular(Path(assembly), MAX_ASSEMBLY_BYTES), type=Assembly)
        return AssembledShards(
            str(name),
            found,
            places=self._places,
            rank=self._rank,
            tier=self._tier,
            control=self._control,
            directory=directory,
            journal=self._journal,
            timeout=self._peer_timeout,
        )


def _read(path: Path, digest: str) -> Manifest:
    manifest, found = manifests.read(path)
    if found != digest:
        raise ManifestError(f"its digest is {found}; {digest} was committed under this name")
    return manifest


def _has_metadata(path: Path, manifest: Manifest) -> bool:
    listed = next((entry for entry in manifest.files if entry.path == METADATA), None)
    if listed is None:
        return False
    return manifests.digest_bytes(read_regular(path / METADATA, listed.size)) == listed.digest
