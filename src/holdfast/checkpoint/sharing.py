"""Which tensors several ranks hold alike, and whether they still do.

One rank stores such a tensor for all. That is right only while they are alike, so every save checks it: each
rank adds one number to a sum over all ranks, and the sum is zero if nothing has drifted apart. For each set
of ranks that share some tensors, their digests are weighted with random coefficients that add up to nothing,
so that a difference between them goes unseen about once in 2^60.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import xxhash


class Sharing(msgspec.Struct, frozen=True):
    """Names that exactly these ranks hold alike."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]


def find_sharings(digests: Sequence[Mapping[str, str]]) -> list[Sharing]:
    """Pure: from every rank's digests by name, who shares what with the lowest rank that has it."""
    holders: dict[str, list[int]] = {}
    first: dict[str, str] = {}
    for rank, mine in enumerate(digests):
        for name, digest in mine.items():
            if first.setdefault(name, digest) == digest:
                holders.setdefault(name, []).append(rank)
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in sorted(holders.items()):
        if len(ranks) > 1:
            by_ranks.setdefault(tuple(ranks), []).append(name)
    return [Sharing(ranks, tuple(names)) for ranks, names in by_ranks.items()]


def term(sharings: Sequence[Sharing], rank: int, digests: Mapping[str, str]) -> int:
    """What this rank adds to the sum; all terms add up to 0 modulo 2^64 if ranks still hold the same."""
    total = 0
    for sharing in sharings:
        contents = xxhash.xxh3_64_intdigest("".join(digests[name] for name in sharing.names).encode())
        total += _coefficient(sharing.ranks, rank) * contents
    return total % (1 << 64)


def _coefficient(ranks: tuple[int, ...], rank: int) -> int:
    if rank != ranks[-1]:
        return _odd(rank)
    return -sum(_odd(other) for other in ranks[:-1])


def _odd(rank: int) -> int:
    return xxhash.xxh3_64_intdigest(rank.to_bytes(8, "little")) | 1
