"""Snapshots by fork for tests: a child that waits until the test lets it go on, and what it left."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from early_changes import content, lay_out
from holdfast.checkpoint import fingerprint, fork_child, fork_stage
from holdfast.checkpoint.fork_child import Work
from holdfast.checkpoint.fork_stage import ForkedCopy
from holdfast.checkpoint.writer import plain
from holdfast.launch import processes


class Gate:
    """Children wait at it before they copy anything. A byte of shared memory: they keep no descriptor."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2)

    def open(self) -> None:
        self._memory[0] = 1

    def close(self) -> None:
        self._memory[0] = 0

    @property
    def reached(self) -> bool:
        return self._memory[1] == 1

    def wait(self) -> None:
        self._memory[1] = 1
        deadline = time.monotonic() + 30.0
        while self._memory[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)


@contextlib.contextmanager
def gated() -> Iterator[Gate]:
    """Inside, children copy only once the gate is open."""
    gate = Gate()
    original = fork_child._copy

    def late(*arguments: Any) -> None:
        gate.wait()
        original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_child, "_copy", late)
        try:
            yield gate
        finally:
            gate.open()


class Taken:
    """A snapshot of some tensors by a fork, and what they held."""

    def __init__(self, state: dict[str, torch.Tensor], *, shares: int = 1, timeout: float = 20.0) -> None:
        pieces, size = lay_out(state)
        self.wanted = {piece.name: content(piece.tensor) for piece in pieces}
        self._places = {piece.name: (piece.offset, piece.nbytes) for piece in pieces}
        self.staging = os.memfd_create("test", os.MFD_CLOEXEC)
        os.pwrite(self.staging, b"\xaa" * size, 0)
        self._size = size
        works = [
            Work(plain(piece.tensor).numpy(), piece.offset, False, place)
            for place, piece in enumerate(pieces)
        ]
        known = [""] * len(works)
        self.flight: ForkedCopy = fork_stage.begin(works, self.staging, known, shares=shares, timeout=timeout)

    def await_done(self, timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while not self.flight.done():
            assert time.monotonic() < deadline, "the child does not report"
            time.sleep(0.002)

    def outcome(self) -> str:
        """exact, or what is wrong with it."""
        self.await_done()
        prints = self.flight.fingerprints()
        raw = os.pread(self.staging, self._size, 0)
        covered = bytearray(raw)
        for (name, (offset, length)), told in zip(self._places.items(), prints, strict=True):
            found = raw[offset : offset + length]
            if not fingerprint.matches(found, told):
                return f"{name} does not match its fingerprint"
            if found != self.wanted[name]:
                return f"{name} is silently wrong"
            covered[offset : offset + length] = b"\xaa" * length
        return "exact" if set(covered) == {0xAA} else "something beside the tensors was touched"

    def close(self) -> None:
        self.flight.end()
        os.close(self.staging)


@contextlib.contextmanager
def taken(state: dict[str, torch.Tensor], **settings: Any) -> Iterator[Taken]:
    """A snapshot, of which nothing is left afterwards."""
    snapshot = Taken(state, **settings)
    try:
        yield snapshot
    finally:
        snapshot.close()
        assert not alive(snapshot.flight.pid)


def alive(pid: int) -> bool:
    found = processes.read(pid)
    return found is not None and not found.ended


def children() -> set[int]:
    """Of this process, zombies too."""
    me = os.getpid()
    found = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return {int(pid) for pid in found}
