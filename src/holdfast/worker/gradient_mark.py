"""Finds the moment of a backward at which a rank's own work is done: when its last gradient is there.

Where gradients are reduced by torch's DDP, or by hand after the backward, what comes after the last gradient
is waiting for the others. A hook on that one parameter tells; which one it is shows in the first steps, in
which all parameters have a hook. A model whose gradients come another way (FSDP reduces its own) shows none,
and where the last one is another every time there is no mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

AGREE = 2
"""Steps in a row that must end with the same parameter."""
MOST_TRIES = 8
"""Steps after which it is given up: they end differently every time, and a wrong mark is worse than none."""


class GradientMark:
    """Calls `told` when the last gradient of a step's backward is there."""

    def __init__(self, models: Iterable[nn.Module], told: Callable[[], None]) -> None:
        self._told = told
        self._parameters = [
            parameter for model in models for parameter in model.parameters() if parameter.requires_grad
        ]
        self._hooks: list[RemovableHandle] = []
        self._last: int | None = None
        self._before: int | None = None
        self._same = self._tries = 0
        self._settled = False
        self.seen = 0
        """Times that it was told since this was last set to 0."""
        self._look_for_it()

    def end_step(self) -> None:
        """A step is complete."""
        if self._settled or self._last is None:
            return
        self._same = self._same + 1 if self._last == self._before else 1
        self._before, self._last = self._last, None
        self._tries += 1
        agreed = self._same >= AGREE
        if agreed or self._tries >= MOST_TRIES:
            self.close()
            self._settled = True
        if agreed:
            self._hooks = [_hook(self._parameters[self._before], self._mark)]

    def look_again(self) -> None:
        """It was not seen any more, or never: the model's last gradient may be another one now."""
        if self._settled:
            self.close()
            self._settled = False
            self._before, self._same, self._tries = None, 0, 0
            self._look_for_it()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look_for_it(self) -> None:
        for index, parameter in enumerate(self._parameters):

            def note(tensor: Tensor, index: int = index) -> None:
                del tensor
                self._last = index

            self._hooks.append(_hook(parameter, note))

    def _mark(self, tensor: Tensor) -> None:
        del tensor
        self.seen += 1
        self._told()


def _hook(parameter: Tensor, told: Callable[[Tensor], None]) -> RemovableHandle:
    found: RemovableHandle = parameter.register_post_accumulate_grad_hook(told)  # type: ignore[no-untyped-call]
    return found
