"""One rank's part in finding the rank that the others wait for.

Guarantee: a step costs a few readings of clocks, and no exchange. The ranks meet a few times in each interval
(`LOOKS`), at the same step on all of them: rank 0 says whether a report is due and after how many steps to
look again, and for a report each rank sends it one letter of fixed size. Both go over the group made for
saves, whose collectives never mix with those of training. What goes wrong in a report is told and costs the
report, never the run.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from holdfast.control.group import Group
from holdfast.errors import UsageError
from holdfast.policy.rejection import Place
from holdfast.policy.straggler_times import (
    COMPUTE,
    INPUT,
    OTHER,
    Finding,
    Limits,
    Named,
    RankTimes,
    summarise,
)
from holdfast.policy.stragglers import ENOUGH_STEPS, Judge
from holdfast.settings_straggler import StragglerSettings
from holdfast.worker.gradient_mark import GradientMark
from holdfast.worker.section_times import DeviceTimes, HostTimes, Section, Times
from holdfast.worker.slots import before_steps
from holdfast.worker.straggler_actions import TOLD, Actions, Fate
from holdfast.worker.straggler_letters import letter_of, padded, read_letter
from holdfast.worker.straggler_report import Tally, event_of, found_event, lines_of

log = logging.getLogger("holdfast")

LOOKS = 4
"""Times in an interval at which the ranks meet: so often it is seen that steps take longer than before."""
WARM_UP = 4
"""First steps of an attempt, which are not measured: they compile, allocate and fill caches."""
FIRST_LOOK = 4
"""Steps after those at which the ranks meet for the first time."""

T = TypeVar("T")
_NOTHING = contextlib.nullcontext()


class Stragglers:
    """Measures this rank's steps. Every rank makes the same calls of `end_step`."""

    _active: ClassVar[weakref.ref[Stragglers] | None] = None

    def __init__(
        self,
        chosen: StragglerSettings,
        group: Group,
        *,
        models: Iterable[nn.Module] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
        place: Place | None = None,
        device: torch.device | None = None,
        actions: Actions,
    ) -> None:
        refuse_another()
        Stragglers._active = weakref.ref(self)
        self._chosen = chosen
        self._group = group
        self._alone = group.process_group is None
        self._place = place or Place("")
        self._actions = actions
        self._times: Times = HostTimes()
        if device is not None and device.type == "cuda":
            self._times = DeviceTimes(device)
        self._mark = GradientMark([] if self._alone else models, self._times.mark)
        self._judge = Judge(
            Limits(
                relative=chosen.gpu_relative_perf_threshold if chosen.calc_relative_gpu_perf else None,
                individual=chosen.gpu_individual_perf_threshold if chosen.calc_individual_gpu_perf else None,
            )
        )
        self._count = 0
        self._next_look = WARM_UP + FIRST_LOOK
        self._since = time.monotonic()
        self._counted = 0
        self._measuring = self._spoiled = False
        self._off = False
        self._failed: set[str] = set()
        self._hooks = before_steps(list(optimizers), self._ready)
        self._tally = Tally()
        self.finding: Finding | None = None
        """What the last report came to; on rank 0."""

    # --- the loop -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The step begins, with getting its batch; right after the one before it."""
        self._spoiled = False
        self._measuring = not self._off and self._count % self._chosen.profiling_interval == 0
        if self._measuring:
            self._times.begin()

    def section(
        self, name: str, around: contextlib.AbstractContextManager[None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A named span of the step; `around` is entered before it and left after it."""
        return Section(self._times, name, around) if self._measuring else around or _NOTHING

    def input(self) -> contextlib.AbstractContextManager[None]:
        return self.section(INPUT)

    def around(self, function: Callable[..., T]) -> Callable[..., T]:
        """The function as section `compute`; what comes after it is waiting, until `arrived`."""
        if not self._measuring:
            return function
        times, waiting = self._times, not self._alone

        def timed(*args: Any, **kwargs: Any) -> T:
            times.enter(COMPUTE)
            try:
                return function(*args, **kwargs)
            finally:
                times.leave(waiting=waiting)

        return timed

    def arrived(self) -> None:
        """Whatever this rank waited for is there."""
        if self._measuring:
            self._times.arrived()

    def _ready(self, optimizer: torch.optim.Optimizer, *unused: object) -> None:
        """Whoever steps has all gradients."""
        del optimizer, unused
        self.arrived()

    def spoil(self) -> None:
        """Something that is no part of training takes time in this step: do not count it."""
        self._spoiled = True

    def end_step(self) -> None:
        """The step is complete: what follows is none of it."""
        if self._off:
            return
        if self._measuring:
            self._measuring = False
            if not self._spoiled:
                self._times.end()
        self._mark.end_step()
        self._count += 1
        if self._count == WARM_UP:
            self._begin_report()

    def meet(self, step: int) -> Finding | None:
        """After every step, on all ranks alike: a report, if one is due. Its result, on rank 0."""
        return self._look(step) if self._count >= self._next_look and not self._off else None

    def close(self) -> None:
        self._off = True
        self._measuring = False
        self._mark.close()
        for hook in self._hooks:
            hook.remove()
        if Stragglers._active is not None and Stragglers._active() is self:
            Stragglers._active = None

    # --- meeting --------------------------------------------------------------------------------------------

    def _begin_report(self) -> None:
        self._since, self._counted, self._mark.seen = time.monotonic(), self._count, 0
        self._times.take()

    def _safely(self, what: str, step: int, work: Callable[[], T], otherwise: T) -> T:
        """What `work` comes to, or what says nothing: a rank must not fail here and leave the others waiting
        in an exchange for its word. The same thing that fails again is told once."""
        try:
            return work()
        except Exception:
            if what not in self._failed:
                self._failed.add(what)
                log.exception(
                    "holdfast: stragglers: %s failed on rank %d after step %d; this report does without it, "
                    "training goes on, and it is not told again. The cause is below",
                    what,
                    self._group.rank,
                    step,
                )
            return otherwise

    def _look(self, step: int) -> Finding | None:
        wait = [0, ENOUGH_STEPS, 0]
        due, steps, off = self._told_by_rank_0(self._safely("planning a report", step, self._plan, wait))
        self._next_look = self._count + steps
        if off:
            self.close()
            return None
        return self._report(step) if due else None

    def _plan(self) -> list[int]:
        """Rank 0's word: whether a report is due, steps until the next look, whether to end all this."""
        if not self._group.is_coordinator:
            return [0, 0, 0]
        if other := other_detector():
            log.warning(
                "holdfast: %s was switched on during the run; two detectors of stragglers must not measure "
                "at once, so Holdfast's is off from here on",
                other,
            )
            return [0, 1, 1]
        interval = self._chosen.report_time_interval
        elapsed = time.monotonic() - self._since
        steps = max(1, self._count - self._counted)
        enough = steps >= ENOUGH_STEPS * self._chosen.profiling_interval
        due = enough and elapsed >= interval * (1 - 0.5 / LOOKS)
        left = interval if due else max(interval - elapsed, 0.0)
        wanted = min(left, interval / LOOKS) / max(elapsed / steps, 1e-6)
        least = 1 if enough and not due else ENOUGH_STEPS
        return [int(due), max(least, min(int(wanted), 10**9)), 0]

    def _told_by_rank_0(self, numbers: list[int]) -> list[int]:
        if self._group.process_group is None:
            return numbers
        word = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(word, src=0, group=self._group.process_group)
        return [int(value) for value in word.tolist()]

    def _report(self, step: int) -> Finding | None:
        seconds = time.monotonic() - self._since
        silent = letter_of(RankTimes(rank=self._group.rank))
        letters = self._gather(
            self._safely("measuring", step, lambda: letter_of(self._own()), silent),
        )
        self._safely("measuring", step, self._begin_report, None)
        finding = None
        if letters is not None:
            found = [read_letter(letter, rank) for rank, letter in enumerate(letters)]
            finding = self._safely("judging the ranks", step, lambda: self._judge.judge(found), None)
        fates: list[Fate] = []
        if finding is not None:
            self.finding = told = finding
            fates = [Fate(one, TOLD, one.describe()) for one in told.fresh]
            fates = self._safely("choosing", step, lambda: self._actions.fates(told.fresh), fates)
            self._safely("telling", step, lambda: self._tell(found, told, fates, step, seconds), None)
        self._act(next((fate.named for fate in fates if fate.then != TOLD), None), step)
        return finding

    def _own(self) -> RankTimes:
        steps = self._times.take()
        # Time on a core is never waiting where waiting sleeps, as it does in gloo; others may spin.
        no_core = self._times.on_device or not (self._alone or "gloo" in self._group.backend)
        hidden: frozenset[str] = frozenset()
        marked = self._alone or self._mark.seen > 0
        if not marked:
            self._mark.look_again()
            if not no_core:
                hidden = frozenset({COMPUTE if any(COMPUTE in one for one in steps) else OTHER})
        sections, noise = summarise(steps, hides_waits=hidden, device=no_core)
        return RankTimes(
            rank=self._group.rank,
            node=self._place.node,
            device=self._place.device,
            steps=len(steps),
            noise=noise,
            marked=marked,
            sections=sections,
        )

    def _gather(self, letter: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's letter, on rank 0."""
        if self._group.process_group is None:
            return [letter]
        letters = None
        if self._group.is_coordinator:
            letters = [torch.empty_like(letter) for _ in range(self._group.world_size)]
        dist.gather(letter, letters, dst=0, group=self._group.process_group)
        return letters

    # --- what comes of it -----------------------------------------------------------------------------------

    def _tell(
        self, ranks: Sequence[RankTimes], finding: Finding, fates: Sequence[Fate], step: int, seconds: float
    ) -> None:
        event = event_of(ranks, finding, step, seconds)
        self._actions.tell(event)
        self._tally.count(event, finding)
        if self._chosen.enable_logging:
            for line in lines_of(finding, self._chosen.num_gpu_perf_scores_to_print, step):
                self._actions.say(line)
        for fate in fates:
            if self._chosen.enable_logging:
                log.warning("holdfast: straggler: %s%s", fate.why, self._tally.so_far(fate.named))
            self._actions.tell(found_event(fate, step))
        for line in self._tally.still_slow() if self._chosen.enable_logging else []:
            log.warning("holdfast: straggler: %s", line)

    def _act(self, named: Named | None, step: int) -> None:
        """Do what was chosen on rank 0; nobody is named on the others."""
        if self._actions.exclude is not None:
            written = self._safely(
                "saying whom to exclude", step, lambda: padded(msgspec.json.encode(named)), padded(b"null")
            )
            named = self._named_by_rank_0(written)
            if named is not None:
                self._actions.exclude(named, step)
        elif self._actions.stop is not None and named is not None:
            stop, why = self._actions.stop, named.describe()
            self._safely("asking for a stop", step, lambda: stop(why), None)

    def _named_by_rank_0(self, letter: torch.Tensor) -> Named | None:
        if self._group.process_group is not None:
            dist.broadcast(letter, src=0, group=self._group.process_group)
        return msgspec.json.decode(letter.numpy().tobytes(), type=Named | None)


def refuse_another() -> None:
    """Raise if something else in this process looks for stragglers: two would measure each other."""
    active = Stragglers._active() if Stragglers._active is not None else None
    other = "another Run or StragglerDetector of Holdfast" if active is not None else other_detector()
    if other:
        raise UsageError(
            f"two detectors of stragglers at once: {other} is at work in this process. Use one of them: set "
            "straggler.enabled = false, or shut the other one down before the run starts"
        )


def other_detector() -> str:
    """The name of another library's detector that is switched on in this process; empty if there is none."""
    for name in ("nvidia_resiliency_ext.attribution.straggler", "nvidia_resiliency_ext.straggler"):
        detector = getattr(sys.modules.get(name), "Detector", None)
        if getattr(detector, "initialized", False) is True:
            return f"{name}.Detector"
    megatron = getattr(sys.modules.get("megatron.core.utils"), "StragglerDetector", None)
    instance = getattr(megatron, "_instance", None)
    if getattr(megatron, "_configured", False) is True and getattr(instance, "_off", True) is False:
        return "megatron.core.utils.StragglerDetector"
    return ""
