"""Random corruption of any file of a checkpoint is always found, and told with the right reason."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.format.manifest import Reason
from holdfast.checkpoint.format.structure import verify
from kit.tiny import checkpoints, train

MANIFEST = {Reason.UNREADABLE_MANIFEST}
METADATA = {Reason.ALTERED, Reason.STALE_METADATA, Reason.TRUNCATED, Reason.EMPTY, Reason.UNREADABLE_METADATA}
SHARD = {Reason.ALTERED, Reason.TRUNCATED, Reason.EMPTY}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint, an older one of the same run, and one of another run."""
    home = tmp_path_factory.mktemp("detection")
    train(home / "run", until=6)
    train(home / "other", until=5, checkpoint_save_at_end=True)
    newest, older = checkpoints(home / "run")
    return newest, older, checkpoints(home / "other")[0]


def flip(data: bytes, chance: random.Random, other: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def zero_page(data: bytes, chance: random.Random, other: bytes) -> bytes:
    size = chance.choice([64, 512, 4096])
    at = chance.randrange(len(data)) // size * size
    return data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]


def truncate(data: bytes, chance: random.Random, other: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def append(data: bytes, chance: random.Random, other: bytes) -> bytes:
    return data + chance.randbytes(chance.randrange(1, 64))


def move_a_piece(data: bytes, chance: random.Random, other: bytes) -> bytes:
    start, length = chance.randrange(len(data)), chance.randrange(1, 300)
    target = chance.randrange(len(data))
    piece = data[start : start + length]
    return data[:target] + piece + data[target + len(piece) :]


def of_another(data: bytes, chance: random.Random, other: bytes) -> bytes:
    return other


def mixed_with_another(data: bytes, chance: random.Random, other: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + other[at:]


KINDS: list[Callable[[bytes, random.Random, bytes], bytes]] = [
    flip, zero_page, truncate, append, move_a_piece, of_another, mixed_with_another,
]  # fmt: skip


def corrupt_many(places: tuple[Path, Path, Path], count: int, seed: int) -> Counter[str]:
    """Corrupt, look, restore, `count` times. Returns how often each kind met each file."""
    newest, *others = places
    chance = random.Random(seed)
    files = sorted(path.name for path in newest.iterdir())
    met: Counter[str] = Counter()
    while met.total() < count:
        name, kind = chance.choice(files), chance.choice(KINDS)
        path = newest / name
        good = path.read_bytes()
        bad = kind(good, chance, (chance.choice(others) / name).read_bytes())
        if bad == good:
            continue  # nothing was changed: a zeroed page that held zeros
        path.write_bytes(bad)
        found = verify(newest)
        path.write_bytes(good)
        what = f"{kind.__name__} in {name}"
        assert not found.sound, f"unseen: {what}"
        allowed = {"holdfast.json": MANIFEST, ".metadata": METADATA}.get(name, SHARD)
        if name == "holdfast.json" and bad in [(other / name).read_bytes() for other in others]:
            allowed = set(Reason)  # a sound manifest of other files: everything else no longer fits
        assert found.problems[0].reason in allowed, f"{what}: {found.problems[0]}"
        met[what] += 1
    assert verify(newest).sound
    return met


def test_random_corruption_is_always_found(places: tuple[Path, Path, Path]) -> None:
    met = corrupt_many(places, 400, seed=1)
    assert len(met) == 3 * len(KINDS), "every kind met every file"


@pytest.mark.drill
def test_ten_thousand_random_corruptions_are_all_found(
    places: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    met = corrupt_many(places, 10_000, seed=2)
    with capsys.disabled():
        print(f"\n{met.total()} corruptions, {met.total()} found")


@pytest.mark.drill
def test_every_single_bit_of_the_manifest_and_every_byte_of_the_metadata_counts(
    places: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exhaustive where that is feasible."""
    newest = places[0]
    tried = 0
    for name, bits in (("holdfast.json", range(8)), (".metadata", (0, 7))):
        good = (newest / name).read_bytes()
        for at in range(len(good)):
            for bit in bits:
                bad = bytearray(good)
                bad[at] ^= 1 << bit
                (newest / name).write_bytes(bad)
                assert not verify(newest, files=[".metadata"]).sound, f"{name}, byte {at}, bit {bit}"
                tried += 1
        (newest / name).write_bytes(good)
    with capsys.disabled():
        print(f"\n{tried} flips, {tried} found")
