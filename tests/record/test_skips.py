"""Data that is left out: recorded durably, the same on all ranks and in every attempt, to the exact batch."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.errors import ControlError, LeaseLostError, UsageError
from holdfast.journal.events import DataSkipped
from holdfast.journal.writer import JournalWriter
from holdfast.policy.results import Window
from holdfast.record.directory import ControlDirectory
from holdfast.record.group import Group
from holdfast.record.lease import Fence, claim
from holdfast.record.operator import Skip, read_skips, record_skip, skips
from holdfast.train.data.feed import DataFeed, follow_skips
from kit.runs import events_in
from kit.tiny import Numbers

BATCHES = 5
"""An epoch: 20 samples in batches of 4."""
WINDOWS = {
    "one in the middle": [Window(0, 2, 2)],
    "the first of an epoch": [Window(1, 0, 0)],
    "the last of an epoch": [Window(0, 4, 4)],
    "over the end of an epoch": [Window(0, 3, 4), Window(1, 0, 1)],
    "a whole epoch": [Window(1, 0, 4)],
    "two that overlap": [Window(0, 1, 3), Window(0, 2, 4)],
    "more than there is": [Window(0, 4, 99)],
}


# --- the records -------------------------------------------------------------------------------------------


def test_what_is_recorded_is_read_again_in_order_and_once(control: ControlDirectory, fence: Fence) -> None:
    assert skips(control) == []
    windows = [Window(3, 120, 122), Window(0, 0, 0), Window(3, 7, 9)]
    for window in (*windows, windows[0]):
        record_skip(control, fence, window, f"it fails on every device: {window.first}")
    assert skips(control) == windows
    assert len(os.listdir(control.path / "skips")) == 3
    first = read_skips(control)[0]
    assert (first.reason, first.lease) == ("it fails on every device: 120", fence.epoch)


@pytest.mark.parametrize("contents", [b"", b"garbage", b'{"window": {"epoch": 0, "first": 1, "last": 2}}'])
def test_a_record_with_damaged_contents_still_leaves_out_what_its_name_says(
    control: ControlDirectory, fence: Fence, contents: bytes
) -> None:
    record_skip(control, fence, Window(0, 5, 6), "bad")
    (path,) = (control.path / "skips").iterdir()
    path.write_bytes(contents)
    (skip,) = read_skips(control)
    assert skip.window == Window(0, 5, 6)
    assert "cannot be read" in skip.reason


@pytest.mark.parametrize("name", ["000002-epoch_x_batches_1_2.json", "what.json", "000002-.json"])
def test_a_name_that_says_nothing_is_an_error_and_never_a_guess(
    control: ControlDirectory, fence: Fence, name: str
) -> None:
    record_skip(control, fence, Window(0, 5, 6), "bad")
    (control.path / "skips" / name).write_bytes(b"{}")
    with pytest.raises(ControlError, match="does not say which batches are left out"):
        skips(control)


@pytest.mark.parametrize("window", [Window(0, 3, 2), Window(-1, 0, 0), Window(0, -1, 2)])
def test_a_window_that_is_none_is_refused(control: ControlDirectory, fence: Fence, window: Window) -> None:
    with pytest.raises(UsageError, match="is not a window of batches"):
        record_skip(control, fence, window, "bad")
    assert not (control.path / "skips").exists()


def test_a_stale_epoch_can_leave_nothing_out(control: ControlDirectory, fence: Fence) -> None:
    """Scenario 28."""
    claim(control, "launch", 5.0)
    with pytest.raises(LeaseLostError, match="refused to leave out batches 5 to 6 of epoch 0"):
        record_skip(control, fence, Window(0, 5, 6), "bad")
    assert not (control.path / "skips").exists()


# --- the feed ----------------------------------------------------------------------------------------------

Loader = Callable[[], Any]
LOADERS: dict[str, Loader] = {
    "replayed": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "stateful": lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True),
    "global": lambda: holdfast.GlobalBatches(Numbers(), 4, seed=3),
    "with a generator": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
}


def opened(loader: Loader, windows: Sequence[Window]) -> DataFeed:
    torch.manual_seed(11)
    random.seed(11)
    feed = DataFeed(loader())
    feed.follow(lambda: 0, [Skip(window=window) for window in windows])
    return feed


def draw(feed: DataFeed, steps: int) -> list[list[int]]:
    """The ids of so many batches; the loop draws random numbers of its own in between."""
    drawn = []
    for _ in range(steps):
        drawn.append([*feed.next()[0].tolist(), round(torch.rand(()).item(), 6)])
    return drawn


@pytest.mark.parametrize("where", WINDOWS)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resume_at_any_step_leaves_out_the_same_batches(kind: str, where: str) -> None:
    """Bitwise as a run that left them out without being interrupted: before, inside and after the window."""
    windows, loader = WINDOWS[where], LOADERS[kind]
    everything = draw(opened(loader, []), 15)
    whole = draw(opened(loader, windows), 10)
    left_out = [
        everything[window.epoch * BATCHES + at][:4]
        for window in windows
        for at in range(window.first, min(window.last, BATCHES - 1) + 1)
    ]
    used = [batch[:4] for batch in whole]
    assert not [batch for batch in left_out if batch in used[: 15 - len(left_out)]]
    assert used[0] == next(batch[:4] for batch in everything if batch[:4] not in left_out)
    for stop in range(1, 10):
        feed = opened(loader, windows)
        before = draw(feed, stop)
        state, rng = feed.state_dict(), torch.get_rng_state()
        again = opened(loader, windows)
        again.load_state_dict(state)
        torch.set_rng_state(rng)
        assert before + draw(again, 10 - stop) == whole, stop


@pytest.mark.parametrize("kind", LOADERS)
def test_a_window_recorded_after_the_checkpoint_is_left_out_wherever_the_resume_lands(kind: str) -> None:
    """The step failed, the window was recorded, and the run goes on from a checkpoint before or inside it."""
    loader = LOADERS[kind]
    everything = [batch[:4] for batch in draw(opened(loader, []), 10)]
    window = Window(0, 1, 3)
    for stop in range(1, 8):
        feed = opened(loader, [])
        draw(feed, stop)
        state, rng = feed.state_dict(), torch.get_rng_state()
        again = opened(loader, [window])
        again.load_state_dict(state)
        torch.set_rng_state(rng)
        # Of a later epoch, whose order may come from random numbers that a step left out would have drawn
        # before it, nothing can be said here.
        whole = range(stop, BATCHES if kind == "replayed" else len(everything))
        expected = [everything[at] for at in whole if not 1 <= at <= 3]
        assert [batch[:4] for batch in draw(again, len(expected))] == expected, stop


def test_a_loop_over_an_epoch_leaves_them_out_too() -> None:
    feed = opened(LOADERS["global"], [Window(0, 1, 3), Window(1, 0, 4)])
    assert len(list(feed)) == 2
    assert len(list(feed)) == 0
    assert len(list(feed)) == 5


def test_each_window_is_told_once_and_only_when_it_is_met() -> None:
    told: list[Window] = []
    feed = DataFeed(LOADERS["global"]())
    windows = [Window(0, 1, 3), Window(7, 0, 0)]
    feed.follow(lambda: 0, [Skip(window=w) for w in windows], lambda skip: told.append(skip.window))
    draw(feed, 1)
    assert told == []
    draw(feed, 6)
    assert told == [windows[0]]


def test_everything_left_out_is_told_and_not_looped_over_for_ever() -> None:
    feed = DataFeed(LOADERS["global"]())
    feed.follow(lambda: 0, [Skip(window=Window(epoch, 0, 99)) for epoch in range(3)])
    assert feed.next() is not None
    assert feed.epoch == 3


# --- which batches a step used -----------------------------------------------------------------------------


def test_the_window_of_a_step_covers_its_micro_batches_and_no_other_steps() -> None:
    done = 0
    feed = DataFeed(LOADERS["global"]())
    feed.follow(lambda: done, [Skip(window=Window(0, 2, 2))])
    assert feed.window() is None
    feed.next()
    feed.next()
    assert feed.window() == Window(0, 0, 1)
    done = 1
    assert feed.window() is None, "this step has drawn nothing yet"
    feed.next()
    assert feed.window() == Window(0, 3, 3), "batch 2 is left out"
    done = 2
    feed.next()
    feed.next()
    assert feed.window() == Window(1, 0, 0), "of a step over the end of an epoch, the later part"


def test_the_window_is_known_after_a_resume_and_without_a_run() -> None:
    feed = DataFeed(LOADERS["global"]())
    draw(feed, 7)
    assert feed.window() == Window(1, 1, 1)
    again = DataFeed(LOADERS["global"]())
    again.load_state_dict(feed.state_dict())
    assert again.window() is None
    again.next()
    assert again.window() == Window(1, 2, 2)


# --- all ranks ---------------------------------------------------------------------------------------------


def test_every_rank_leaves_out_what_rank_0_read_and_rank_0_tells_the_journal(
    control: ControlDirectory, fence: Fence
) -> None:
    record_skip(control, fence, Window(0, 1, 2), "NaN on every device")
    store = HashStore()
    drawn = []
    for rank in (0, 1):
        feed = DataFeed(holdfast.GlobalBatches(Numbers(), 4, seed=3, rank=rank, world_size=2))
        journal = JournalWriter(control.journal, f"rank-{rank}", 1)
        follow_skips(feed, control, Group(rank, 2, store, None), journal, lambda: 41, 5.0)
        if rank == 0:  # what only rank 1 sees must not matter
            record_skip(control, fence, Window(0, 0, 0), "too late for this attempt")
        drawn.append([sorted(feed.next()[0].tolist()) for _ in range(3)])
    whole = DataFeed(holdfast.GlobalBatches(Numbers(), 4, seed=3))
    batches = [sorted(whole.next()[0].tolist()) for _ in range(5)]
    assert [sorted(a + b) for a, b in zip(*drawn, strict=True)] == [batches[0], batches[3], batches[4]]
    skipped = events_in(control.path, DataSkipped)
    assert skipped == [DataSkipped(step=42, epoch=0, first=1, last=2, reason="NaN on every device")]


def test_records_that_cannot_be_read_end_all_ranks_with_the_same_error(control: ControlDirectory) -> None:
    (control.path / "skips").mkdir()
    (control.path / "skips" / "what.json").write_text("{}")
    store = HashStore()
    for rank in (0, 1):
        feed = DataFeed(LOADERS["global"]())
        journal = JournalWriter(control.journal, f"rank-{rank}", 1)
        with pytest.raises(ControlError, match="does not say which batches are left out"):
            follow_skips(feed, control, Group(rank, 2, store, None), journal, lambda: 0, 5.0)


# --- a whole run -------------------------------------------------------------------------------------------


def trained(run_dir: Path, until: int, window: Window | None) -> tuple[dict[int, str], bytes]:
    """Losses by step, and the parameters at the end; the window is recorded when the run starts."""
    torch.manual_seed(7)
    random.seed(7)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1), nn.Linear(12, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, control_lease_ttl=5.0)
    run.track(model=model, optimizer=optimizer)
    feed = run.feed(DataLoader(Numbers(), batch_size=4, shuffle=True))
    losses = {}
    with run:
        run.start()
        group, member = run._session.group, run._session.member
        if window is not None:
            record_skip(member.control, member.fence, window, "bad")
        follow_skips(feed, member.control, group, member.journal, lambda: run.step, 5.0)
        while run.step < until:
            run.begin_step()
            _, x = feed.next()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.record(loss=loss)
            losses[run.step + 1] = loss.item().hex()
            run.end_step(last=run.step + 1 >= until)
    return losses, b"".join(p.detach().numpy().tobytes() for p in model.parameters())


@pytest.mark.parametrize("stop", [2, 3, 4, 7])
def test_a_resumed_run_that_leaves_data_out_is_bitwise_the_one_that_was_not_interrupted(
    tmp_path: Path, stop: int
) -> None:
    """Issue 6: recorded once, left out on every resume again, position exact; stops before and after it."""
    window = Window(0, 3, 3)
    whole, parameters = trained(tmp_path / "whole", 9, window)
    first, _ = trained(tmp_path / "parts", stop, window)
    second, same = trained(tmp_path / "parts", 9, None)  # the record is there already
    assert first | second == whole
    assert same == parameters
    plain, _ = trained(tmp_path / "plain", 9, None)
    assert plain[3] == whole[3]
    assert plain[4] != whole[4]
