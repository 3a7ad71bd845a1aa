"""The step whose rejection made this attempt necessary: compared with how it was, when it is replayed.

Before it is computed, every rank that was bad then takes a mark of the state it begins from. When the step is
complete and was accepted at once, marks and devices say whether it was the device (see `policy.replay`).
"""

from __future__ import annotations

from holdfast.checkpoint.state import Tracked
from holdfast.control.group import Group
from holdfast.journal.events import Verdict
from holdfast.policy.rejection import Kind, Place, Rejection, Rerun
from holdfast.policy.replay import judge_replay
from holdfast.worker.rejecting import Rejecting, in_words
from holdfast.worker.state_mark import mark, same


class Replayed:
    def __init__(
        self, rerun: Rerun | None, tracked: Tracked, group: Group, place: Place, rejecting: Rejecting
    ) -> None:
        self._rerun = rerun
        self._tracked = tracked
        self._group = group
        self._place = place
        self._rejecting = rejecting
        self._now: list[tuple[Place, str]] | None = None
        """Each rank's place and mark."""

    def accepts(self, step: int) -> bool:
        """Whether this step is to be accepted if it is rejected once more for a value that is finite."""
        return self._rerun is not None and self._rerun.step == step and self._rerun.accept

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
