"""Where in a model a result that is not finite first appears. Only ever done while a step is run again.

Watched are the outputs of every module, and the gradients of every parameter as this rank computed them,
before anything was reduced: a NaN that came from another rank's gradients is not this rank's.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from holdfast.torch_internals import tree_leaves

MOST_CHARACTERS = 200


class Locator:
    """Watches models for as long as the `with` block lasts."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._handles: list[Any] = []
        self._seen: dict[int, torch.Tensor] = {}
        self.where = ""
        """The first part whose output was not finite although its input was; empty if none was found."""
        self.own_gradient = ""
        """The first parameter whose gradient was not finite on this rank itself."""

    def __enter__(self) -> Self:
        for model in self._models:
            for name, module in model.named_modules():
                shown = _shown(name)
                self._handles.append(module.register_forward_pre_hook(self._parameters_hook(shown)))
                self._handles.append(module.register_forward_hook(self._output_hook(shown)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], {}

    def _output_hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            del module
            if not self.where and not _finite(output) and _finite(inputs):
                self.where = name or "the model"

        return look

    def _parameters_hook(self, name: str) -> Any:
        """Parameters are found when they are used: what FSDP2 computes with exists only from then on."""

        def watch(module: nn.Module, inputs: Any) -> None:
            del inputs
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and id(parameter) not in self._seen:
                    self._seen[id(parameter)] = parameter  # held, so that its id stays its own
                    shown = f"{name}.{key}" if name else key
                    self._handles.append(parameter.register_hook(self._gradient_hook(shown)))  # type: ignore[no-untyped-call]

        return watch

    def _gradient_hook(self, name: str) -> Any:
        def look(gradient: torch.Tensor) -> None:
            if not self.own_gradient and not _finite(gradient):
                self.own_gradient = name

        return look


def _finite(tree: Any) -> bool:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            values = leaf.detach()
            values = values._values() if values.is_sparse else values
            if not bool(torch.isfinite(values).all()):
                return False
    return True


def _shown(name: str) -> str:
    return name.removeprefix("module.").removesuffix("module")[-MOST_CHARACTERS:] if name != "module" else ""
