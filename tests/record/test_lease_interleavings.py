"""The lease under any interleaving of what its holders may do."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.base.files import replace_atomic
from holdfast.errors import LeaseLostError, RunIsLiveError
from holdfast.process.proc import Holder
from holdfast.record import lease
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Claim, Fence, LeaseBeat, claim, current_epoch, read_claim
from kit.control import FakeTime


class Interleavings(RuleBasedStateMachine):
    """Holders that claim, renew, release, stop and die in any order, on a clock turned by hand.

    The processes are pretended (a pid and a state), since thousands of real ones would take too long; the
    files and the code under test are real.
    """

    OWNERS = ("a", "b", "c", "d")
    TTL = 10.0

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.control = ControlDirectory.open_or_create(Path(self.folder.name))[0]
        self.state: dict[int, str] = {}
        self.claims: list[Claim] = []
        self.counts = 0
        self.clock = FakeTime(lambda seconds: self.live_ones_renew())
        self.claimant = 0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(lease, "time", self.clock)
        self.patch.setattr(lease, "is_here", lambda holder: holder.host == "here")
        self.patch.setattr(lease, "is_gone", self.is_gone)
        self.patch.setattr(lease, "this_process", self.this_process)

    def is_gone(self, holder: Holder) -> bool:
        return holder.host == "here" and self.state[holder.pid] == "dead"

    def this_process(self) -> Holder:
        host = "here" if self.claimant % 2 else "elsewhere"
        return Holder(host=host, boot="b", pid_namespace=1, pid=self.claimant, started=1)

    def write_beat(self, made: Claim, *, released: bool) -> None:
        self.counts += 1
        record = LeaseBeat(count=self.counts, at=self.clock.time(), released=released)
        path = self.control.lease / f"{made.epoch:08d}.beat"
        replace_atomic(path, msgspec.json.encode(record), durable=False)

    def live_ones_renew(self) -> None:
        for made in self.claims:
            if self.state[made.holder.pid] == "live":
                self.write_beat(made, released=False)

    @rule(owner=st.sampled_from(OWNERS), beats=st.booleans())
    def someone_claims(self, owner: str, beats: bool) -> None:
        self.claimant += 1
        self.state[self.claimant] = "live"
        before = self.claims[-1] if self.claims else None
        free = (
            before is None
            or before.owner == owner
            or self.state[before.holder.pid] in ("released", "dead", "stopped")
        )
        started = self.clock.now
        try:
            made = claim(self.control, owner, self.TTL)
        except RunIsLiveError:
            assert before is not None
            state = self.state[before.holder.pid]
            # A stopped holder may be refused only on a fresh beat of this host.
            assert not free or (state == "stopped" and before.holder.host == "here")
            return
        finally:
            assert self.clock.now - started <= 2.5 * self.TTL, "a claim waited too long"
        assert free, f"took the lease of a live holder: {made.evidence}"
        assert made.epoch == (before.epoch if before else 0) + 1
        self.claims.append(made)
        if beats:
            self.write_beat(made, released=False)

    @rule(pick=st.integers(0, 5), fate=st.sampled_from(["released", "dead", "stopped", "live"]))
    def something_happens_to_a_holder(self, pick: int, fate: str) -> None:
        if not self.claims:
            return
        made = self.claims[-1 - pick % len(self.claims)]
        state = self.state[made.holder.pid]
        if state in ("dead", "released") or (state == "stopped" and fate == "released"):
            return
        if fate == "released" or fate == "live":
            self.write_beat(made, released=fate == "released")
        self.state[made.holder.pid] = fate

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.live_ones_renew()

    @rule(seconds=st.floats(-1e6, 1e6))
    def the_wall_clock_is_set(self, seconds: float) -> None:
        offset = seconds
        clock = self.clock
        clock.time = lambda: clock.now + offset  # type: ignore[method-assign]

    @invariant()
    def only_the_newest_epoch_may_act(self) -> None:
        assert [made.epoch for made in self.claims] == list(range(1, len(self.claims) + 1))
        for made in self.claims[-4:]:
            fence = Fence(self.control, made.epoch, timeout=1.0)
            if made is self.claims[-1]:
                with fence.guard("act"):
                    pass
            else:
                with pytest.raises(LeaseLostError), fence.guard("act"):
                    pytest.fail("an old epoch acted")
        assert current_epoch(self.control) == len(self.claims)
        assert not self.claims or read_claim(self.control, len(self.claims)) == self.claims[-1]

    def teardown(self) -> None:
        self.patch.undo()
        self.folder.cleanup()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
