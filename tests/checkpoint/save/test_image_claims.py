"""The work on an image is shared out so that everything is done once, whoever comes first or dies."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format import fingerprint
from holdfast.checkpoint.format.layout import Item, Layout, Shard
from holdfast.checkpoint.save import image
from holdfast.checkpoint.save.image import Claims, ItemRun
from holdfast.errors import TornSnapshotError
from kit.harness import wait_until

RUNS = st.lists(st.integers(0, 6), max_size=5)


@given(runs=RUNS, turns=st.lists(st.integers(0, 3), max_size=80))
def test_each_run_is_given_out_once_in_whatever_order_they_are_asked_for(
    runs: list[int], turns: list[int]
) -> None:
    led: dict[int, int] = {}
    given_out: list[ItemRun] = []
    with Claims(runs, forks=False) as claims:

        def lead_on(shard: int) -> bool:
            if not claims.next_run(shard):
                return False
            given_out.append(ItemRun(shard, led[shard]))
            led[shard] += 1
            return True

        for turn in turns:
            if turn == 0 and (shard := claims.lead()) is not None:
                led[shard] = 0
            elif turn == 1 and (run := claims.help()) is not None:
                given_out.append(run)
            elif turn > 1 and led:
                lead_on(list(led)[turn % len(led)])
        while (shard := claims.lead()) is not None:
            led[shard] = 0
        for shard in led:
            while lead_on(shard):
                assert led[shard] <= runs[shard]
        assert claims.help() is None
    assert list(led) == list(range(len(runs)))
    assert sorted(given_out) == [
        ItemRun(shard, at) for shard, count in enumerate(runs) for at in range(count)
    ]


def test_helpers_take_what_a_leader_would_come_to_last_where_most_is_left() -> None:
    with Claims([2, 4], forks=False) as claims:
        assert claims.lead() == 0
        assert claims.next_run(0)
        assert [claims.help() for _ in range(3)] == [ItemRun(1, 3), ItemRun(1, 2), ItemRun(1, 1)]


def test_nothing_is_given_out_once_somebody_has_failed() -> None:
    with Claims([3, 3], forks=False) as claims:
        assert claims.lead() == 0
        assert claims.next_run(0)
        claims.stop()
        assert not claims.next_run(0)
        assert claims.lead() is None
        assert claims.help() is None


class SlowWords:
    """Reads so slowly that another process would come between, if it could."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getitem__(self, at: int) -> int:
        found: int = self._words[at]
        time.sleep(0.001)
        return found

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value


def test_forks_are_given_each_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, ready = [4, 0, 11, 3], mmap.mmap(-1, 4)
    with Claims(counts, forks=True) as claims:
        monkeypatch.setattr(claims, "_words", SlowWords(claims._words))

        def work(number: int) -> str:
            ready[number] = 1
            wait_until(lambda: ready[:] == b"\1\1\1\1", 10, "all are there")
            return "".join(f"{run.shard} {run.at}\n" for run in everything(claims))

        forks = [in_fork(functools.partial(work, number)) for number in range(4)]
        lines = [line for fork in forks for line in answer(*fork).splitlines()]
    found = sorted(tuple(map(int, line.split())) for line in lines)
    assert found == [(shard, at) for shard, count in enumerate(counts) for at in range(count)]


def test_a_fork_that_dies_in_the_middle_of_a_claim_holds_nobody_up() -> None:
    with Claims([5], forks=True) as claims:
        held = mmap.mmap(-1, 1)

        def die_with_the_lock() -> str:
            with claims._lock:
                held[0] = 1
                signal.pause()
            return ""

        pid, reading = in_fork(die_with_the_lock)
        wait_until(lambda: held[0] == 1, 10, "the lock is held")
        waiting = in_fork(lambda: repr(claims.help()))
        os.kill(pid, signal.SIGKILL)
        assert answer(*waiting) == "ItemRun(shard=0, at=4)"
        assert answer(pid, reading) == ""


def everything(claims: Claims) -> list[ItemRun]:
    """What a worker is given, as it leads and then helps."""
    found = []
    while (shard := claims.lead()) is not None:
        at = 0
        while at < 100 and claims.next_run(shard):
            found.append(ItemRun(shard, at))
            at += 1
    while len(found) < 100 and (run := claims.help()) is not None:
        found.append(run)
    return found


# --- the digests --------------------------------------------------------------------------------------------


def laid_out(kind: str, gap: int = 0) -> tuple[bytearray, Layout, list[str]]:
    """Two shards of many items, `gap` bytes apart."""
    items, at = [], 0
    for number in range(24):
        items.append(Item(f"t{number}", at, 9000 + 50 * number, at + 64, 8000 + 50 * number))
        at += items[-1].length + gap
    memory = bytearray(os.urandom(at))
    half = items[9].offset
    shards = [Shard("__0_0.distcp", 0, half, 0, 9), Shard("__0_1.distcp", half, at - half, 9, 15)]
    prints = [
        fingerprint.of_bytes(memoryview(memory)[item.raw_offset : item.raw_offset + item.raw_length], kind)
        for item in items
    ]
    return memory, Layout(at, items, shards), prints


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("gap", [0, 7])
def test_leaders_and_helpers_together_digest_every_byte(
    forks: bool, gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "RUN", 1)  # each item is a run
    monkeypatch.setattr(image, "SLICE", 1000)
    monkeypatch.setattr(image, "LARGE", 1 if forks else 1 << 40)
    memory, layout, prints = laid_out("m", gap)
    for workers in (2, 5):
        found = image.digest_image(memoryview(memory), layout, prints, workers)
        for shard, entry in zip(layout.shards, found, strict=True):
            whole = memoryview(memory)[shard.start : shard.start + shard.size]
            assert (entry.size, entry.digest) == (shard.size, xxhash.xxh3_128_hexdigest(whole))
            for item, chunk in zip(layout.items_of(shard), entry.chunks, strict=True):
                own = memoryview(memory)[item.offset : item.offset + item.length]
                assert (chunk.offset, chunk.length) == (item.offset - shard.start, item.length)
                assert chunk.digest == xxhash.xxh3_128_hexdigest(own)
    if not gap:
        assert image.write_image(tmp_path, memoryview(memory), layout, prints, 3) == found
        written = b"".join((tmp_path / shard.path).read_bytes() for shard in layout.shards)
        assert written == memory


def test_a_torn_item_ends_the_work_of_all_threads_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "RUN", 1)
    memory, layout, prints = laid_out("x")
    memory[layout.items[0].raw_offset] ^= 1
    failed, begun = threading.Event(), []
    do_run, stop = image._do_run, Claims.stop

    def one(*args: Any) -> Any:
        name = args[3][0].name
        begun.append(name)
        if name != "t0":
            failed.wait(0.5)  # it was under way when the other failed
        return do_run(*args)

    def stopped(claims: Claims) -> None:
        stop(claims)
        failed.set()

    monkeypatch.setattr(image, "_do_run", one)
    monkeypatch.setattr(Claims, "stop", stopped)
    with pytest.raises(TornSnapshotError, match="t0: its bytes do not match"):
        image.digest_image(memoryview(memory), layout, prints, 2)
    assert len(begun) <= 3, "one for each thread"


@pytest.mark.parametrize(("kind", "numpy"), [("m", True), ("x", False)])
def test_numpy_is_imported_once_for_all_forks_and_only_where_it_is_needed(kind: str, numpy: bool) -> None:
    """Each fork would else take a tenth of a second for it, at each save."""
    script = f"""
import sys
from holdfast.checkpoint.save import image
from holdfast.checkpoint.format.layout import Item, Layout, Shard
image.LARGE = 1
layout = Layout(100, [Item("a", 0, 100, 0, 100)], [Shard("__0_0.distcp", 0, 100, 0, 1)])
forked = []
in_children = image.in_children
def look(shares):
    forked.append("numpy" in sys.modules)
    return in_children(shares)
image.in_children = look
image.digest_image(memoryview(bytes(100)), layout, [{fingerprint.of_bytes(bytes(100), kind)!r}], 2)
print(forked)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str([numpy]), done.stderr


# --- forks --------------------------------------------------------------------------------------------------


def in_fork(work: Callable[[], str]) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(writing, work().encode())
        os._exit(0)
    os.close(writing)
    return pid, reading


def answer(pid: int, reading: int) -> str:
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return told
