"""Exact on a GPU: the kinds that need one, and others whose state lies there, against the plain loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.worlds.exactness import Case, Kill, Lab
from kit.worlds.kinds import KINDS

pytestmark = pytest.mark.gpu

NEED_IT = [kind.name for kind in KINDS.values() if kind.needs == "gpu"]
TOO = [
    "AdamW fused",
    "BatchNorm and dropout",
    "EMA in fp32 of a bf16 model",
    "GradScaler that skips steps",
    "a generator of one's own, tracked",
    "torch.compile by inductor",
]
"""Worth a look on a device as well: fused kernels, generators and buffers that live there."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("exact"))
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["foreground", "asynchronous"])
@pytest.mark.parametrize("name", [*NEED_IT, *TOO])
def test_on_a_gpu_it_is_exact(lab: Lab, name: str, mode: str) -> None:
    lab.check(Case(name, mode=mode, kills=(Kill("after", 8),), device="cuda"))


def test_every_snapshot_of_a_capturable_optimizer_is_exact(lab: Lab) -> None:
    """Its step counts are on the device, and a save every step is taken while the next one is queued."""
    lab.check(
        Case(
            "Adam capturable", mode="asynchronous", interval=1, kills=(Kill("everything", 7),), device="cuda"
        )
    )
