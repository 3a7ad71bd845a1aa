"""Replicas between nodes with networks of their own, one of which is cut off in the middle of a transfer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from kit.harness import finish, job, wait_until
from kit.nodes.namespaces import missing, network
from kit.nodes.peering import MIB, Lab, holds, leader, left, sender

WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)


def test_a_node_that_is_cut_off_mid_transfer_costs_the_deadline_and_is_gone_on_with(tmp_path: Path) -> None:
    """Must hold of A5: a peer that disappears costs at most its deadline and leaves no record."""
    lab = Lab(tmp_path)
    ours, theirs = lab.place("a"), lab.place("b")
    copy = lab.copy(ours, size=128 * MIB)
    with (
        network(2) as net,
        leader(lab, theirs, linger=1, towards=net.address(0), wrap=lambda c: net.inside(1, c)) as peer,
    ):
        assert peer.host == net.address(1), "its address is the one that others reach"

        def sending(seconds: float) -> list[str]:
            return net.inside(0, sender(lab, peer.port, ours, copy, seconds, host=peer.host))

        with job(sending(2.0), cwd=tmp_path) as cut_off:
            wait_until(lambda: left(theirs), 20, "it is sending")
            os.kill(peer.server, signal.SIGSTOP)  # only so that the cut comes in the middle
            net.cut(1)
            began = time.monotonic()
            os.kill(peer.server, signal.SIGCONT)
            failed = cut_off.wait(20)
            assert time.monotonic() - began < 4.0
        assert failed.code != 0
        assert "PeerError" in failed.err, failed.text
        assert theirs.records() == []
        net.mend(1)
        done = finish(sending(20.0), cwd=tmp_path)
        assert done.out.strip() == theirs.place, done.text
    assert holds(theirs, copy[0])
    assert left(theirs) == []
