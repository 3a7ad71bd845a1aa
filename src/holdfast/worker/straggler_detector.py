"""StragglerDetector: finds the rank that the others wait for, without a Run.

```python
detector = holdfast.StragglerDetector(models=[model], optimizers=[optimizer], report_time_interval=60)
for step in range(steps):
    detector.begin_step()
    with detector.section("input"):
        batch = next(batches)
    with detector.compute():
        model(batch).sum().backward()
    optimizer.step()
    finding = detector.end_step()
detector.close()
```
Every rank makes the same calls. `end_step` returns what a report came to, on rank 0 and only where one was
made; the ranks it names are those that are late, never those that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import msgspec
import torch
from torch import nn

from holdfast.cluster.node_name import node_name
from holdfast.control.devices import own_place
from holdfast.control.group import Group, join_group, leave_group
from holdfast.errors import UsageError
from holdfast.journal.base import Event
from holdfast.policy.straggler_times import COMPUTE, Finding, Named
from holdfast.settings_straggler import StragglerSettings
from holdfast.worker.straggler_actions import Actions
from holdfast.worker.stragglers import Stragglers, refuse_another

EXCHANGE = 600.0
"""Seconds that ranks wait for each other in an exchange of theirs."""


class StragglerDetector:
    """The straggler detector by itself. The settings are those of section `straggler`, without `enabled`,
    `stop_if_detected` and `exclude_if_detected`: what is done about a rank is the script's to say."""

    def __init__(
        self,
        *,
        models: Iterable[nn.Module] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
        device: torch.device | None = None,
        on_found: Callable[[Named], object] | None = None,
        node: str = "",
        **settings: object,
    ) -> None:
        """`models`: whose gradients show when a rank's own work is done; `optimizers`: whose step ends the
        waiting for them. `device`: a CUDA device, to measure by its clock. `on_found` is called on rank 0."""
        refuse_another()
        self._chosen = _settings(settings)
        self._on_found = on_found
        self._group: Group | None = join_group(EXCHANGE)
        self._stragglers = Stragglers(
            self._chosen,
            self._group,
            models=models,
            optimizers=optimizers,
            place=own_place(node_name(node)),
            device=device,
            actions=Actions(tell=_untold),
        )
        self._step = 0

    def begin_step(self) -> None:
        self._stragglers.begin_step()

    def section(self, name: str) -> AbstractContextManager[None]:
        """A named span of the step. `input` and `compute` have their meaning; it should not wait for others,
        but for `compute`, whose end may, after its last gradient."""
        return self._stragglers.section(name)

    def compute(self) -> AbstractContextManager[None]:
        return self._stragglers.section(COMPUTE)

    def end_step(self) -> Finding | None:
        """The step is complete. What a report came to, on rank 0, if one was due."""
        self._step += 1
        self._stragglers.end_step()
        finding = self._stragglers.meet(self._step)
        if finding is not None and self._on_found is not None:
            for named in finding.fresh:
                self._on_found(named)
        return finding

    @property
    def finding(self) -> Finding | None:
        """What the last report came to, on rank 0."""
        return self._stragglers.finding

    def close(self) -> None:
        """Give everything back, on all ranks together."""
        self._stragglers.close()
        if self._group is not None:
            leave_group(self._group)
            self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del error, trace
        if kind is None:
            self.close()
        else:
            self._stragglers.close()


def _settings(given: dict[str, object]) -> StragglerSettings:
    allowed = {field.name for field in msgspec.structs.fields(StragglerSettings)}
    allowed -= {"enabled", "stop_if_detected", "exclude_if_detected"}
    if unknown := sorted(set(given) - allowed):
        raise UsageError(
            f"StragglerDetector({', '.join(unknown)}=…): there is no such setting; there are "
            f"{', '.join(sorted(allowed))}"
        )
    try:
        return msgspec.convert({**given, "enabled": True}, StragglerSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"StragglerDetector: {error}") from error


def _untold(event: Event) -> None:
    """Without a run there is no journal."""
    del event
