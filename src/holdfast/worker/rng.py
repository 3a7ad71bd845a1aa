"""Every random number generator a rank draws from, captured and restored together."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from holdfast.checkpoint.state import Tracked


def capture_rng() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore what `capture_rng` gave, or seed everything where only a `seed` is known (another world)."""
    if "seed" in state:
        random.seed(state["seed"])
        torch.manual_seed(state["seed"])
        if "numpy" in sys.modules:
            import numpy

            numpy.random.seed(state["seed"] % 2**32)
        return
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        if len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        else:
            # Fewer or more devices are visible than when this was saved: the rank's own one is what matters.
            torch.cuda.set_rng_state(state["cuda"][min(torch.cuda.current_device(), len(state["cuda"]) - 1)])


class Randomness:
    """All of the above together with the generators that a run tracks."""

    def __init__(self, tracked: Tracked) -> None:
        self._generators = tracked.generators()

    def capture(self) -> Any:
        return capture_rng(), [generator.state_dict() for generator in self._generators]

    def restore(self, kept: Any) -> None:
        state, generators = kept
        restore_rng(state)
        for generator, saved in zip(self._generators, generators, strict=True):
            generator.load_state_dict(saved)
