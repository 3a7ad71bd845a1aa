"""Steps that are replayed: what earlier attempts settled about them, and the one whose rejection made this
attempt necessary, compared with how it was.

All ranks know the same: what the launcher told all of them, and what rank 0 read from the records.

Before it is computed, every rank that was bad then takes a mark of the state it begins from. When the step is
complete and was accepted at once, marks and devices say whether it was the device (see `policy.replay`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.checkpoint.state import Tracked
from holdfast.control.decisions import read_key
from holdfast.control.directory import ControlDirectory
from holdfast.control.group import Group
from holdfast.control.rejections import settled_steps
from holdfast.journal.events import Verdict
from holdfast.policy.rejection import (
    How,
    Kind,
    Place,
    RankResult,
    Rejection,
    Rerun,
    Settled,
    Trial,
    Window,
    settled_as,
)
from holdfast.policy.replay import Settling, judge_replay, settle
from holdfast.worker.rejecting import Rejecting, in_words
from holdfast.worker.state_mark import mark, same

KEY = "settled"


class Replayed:
    def __init__(
        self,
        rerun: Rerun | None,
        tracked: Tracked,
        group: Group,
        place: Place,
        rejecting: Rejecting,
        *,
        restarts_left: int | None = None,
        leaves_out: bool = False,
    ) -> None:
        """`leaves_out`: the launcher may leave a step's data out."""
        self._rerun = rerun if rerun is not None and not rerun.breach else None
        self._restarts_left = restarts_left
        self._leaves_out = leaves_out
        self.settled: list[Settled] = []
        """What is known of steps, from every attempt before this one."""
        self._tracked = tracked
        self._group = group
        self._place = place
        self._rejecting = rejecting
        self._now: list[tuple[Place, str]] | None = None
        """Each rank's place and mark."""

    def learn(self, control: ControlDirectory, timeout: float) -> None:
        """On all ranks after the resume: rank 0 reads what was settled, and tells the others."""
        if self._group.is_coordinator:
            self.settled = settled_steps(control)
            self._group.store.set(KEY, msgspec.json.encode(self.settled).decode())
            return
        raw = read_key(self._group.store, KEY, timeout, "the verdicts on steps that rank 0 has read")
        self.settled = msgspec.json.decode(raw, type=list[Settled])

    def known(self, how: How, step: int, window: Window | None) -> Settled | None:
        return settled_as(self.settled, how, step, window, self._group.world_size)

    def accepts(self, step: int, window: Window | None) -> bool:
        """Whether this step is to be accepted if it is rejected once more for a value that is finite."""
        told = self._rerun is not None and self._rerun.step == step and self._rerun.accept
        return told or self.known(How.ACCEPTED, step, window) is not None

    def settle(
        self,
        step: int,
        results: Sequence[RankResult],
        window: Window | None,
        *,
        rung: str,
        trial: Trial | None,
        ran_again: bool,
    ) -> Settling | None:
        """Why a step that is not finite needs no other attempt; None if the launcher has to be asked."""
        return settle(
            step,
            results,
            rung=rung,
            rerun=self._rerun,
            trial=trial,
            settled=self.known(How.TOLERATED, step, window),
            restarts_left=self._restarts_left,
            left_out=self._leaves_out and window is not None,
            ran_again=ran_again,
        )

    def before(self, step: int) -> None:
        """The step is about to be computed, on all ranks."""
        if self._rerun is None or self._rerun.step != step:
            return
        was_bad = any(one.rank == self._group.rank for one in self._rerun.bad)
        own = mark(self._tracked, buffers=True) if was_bad else ""
        told = self._rejecting.exchange_texts(f"{self._place.node}\n{self._place.device}\n{own}")
        self._now = []
        for text in told:
            node, device, state = text.split("\n")
            self._now.append((Place(node, device), state))

    def passed(self, step: int) -> None:
        """The step is complete, and nothing in it was rejected; every rank comes to the same verdict."""
        rerun, now = self._rerun, self._now
        if rerun is None or rerun.step != step or now is None:
            return
        self._rerun = None
        places = {rank: place for rank, (place, _) in enumerate(now)}
        states = {one.rank: same(one.state, now[one.rank][1]) for one in rerun.bad if one.rank in places}
        findings = judge_replay(rerun, places, states)
        guilty = [finding for finding in findings if finding.verdict == "device"]
        self._rejecting.transient([f for f in findings if f.verdict != "device"], step)
        for finding in guilty:
            assert finding.place is not None
            self._rejecting.tell(
                Verdict(
                    verdict="device",
                    step=step,
                    evidence=[finding.evidence],
                    node=finding.place.node,
                    device=finding.place.device,
                )
            )
        if not guilty:
            return
        evidence = [finding.evidence for finding in guilty]
        if rerun.can_exclude and self._rejecting.launched:
            self._rejecting.reject(
                Rejection(kind=Kind.DEVICE, step=step, reasons=evidence, accused=guilty[0].place)
            )
        self._rejecting.warn(f"{in_words(evidence)}. The run cannot go on without that device, and uses it")
