"""What a checkpoint of another project holds for whom."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.checkpoint.foreign.contents import generators_kept


def shards(*sizes: int) -> list[str]:
    """The names of all of them."""
    places = [""]
    for size in sizes:
        places = [f"{place}.{at}" if place else str(at) for place in places for at in range(size)]
    return [f"rng_state/shard_{place}_{'.'.join(map(str, sizes))}" for place in places]


@pytest.mark.parametrize(
    ("sizes", "world", "arguments", "expected"),
    [
        ((1, 1), 4, {}, ["0.0", "0.0", "0.0", "0.0"]),
        ((1, 2), 4, {}, ["0.0", "0.1", "0.0", "0.1"]),
        ((2, 2), 8, {}, ["0.0", "0.1", "0.0", "0.1", "1.0", "1.1", "1.0", "1.1"]),
        (
            (2, 2), 8, {"use_tp_pp_dp_mapping": True},
            ["0.0", "0.1", "1.0", "1.1", "0.0", "0.1", "1.0", "1.1"],
        ),
        ((2, 1), 4, {"context_parallel_size": 2}, ["0.0", "0.0", "1.0", "1.0"]),
        ((1, 2, 2), 4, {}, ["0.0.0", "0.1.0", "0.0.1", "0.1.1"]),
        ((1, 2), 3, {}, [None, None, None]),
    ],
)  # fmt: skip
def test_each_rank_has_the_generators_of_its_place_in_megatrons_order(
    sizes: tuple[int, ...], world: int, arguments: dict[str, Any], expected: list[str | None]
) -> None:
    names = shards(*sizes)
    found = [generators_kept(names, rank, world, arguments) for rank in range(world)]
    assert [name and name.removeprefix("rng_state/shard_").rpartition("_")[0] for name in found] == expected


def test_generators_that_are_not_there_are_nobodys() -> None:
    names = shards(1, 4)
    assert generators_kept([name for name in names if "_0.2_" not in name], 2, 4) is None
