"""Data loaders' worker processes and a signal to every process of a rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import ExitCode
from holdfast.journal.events import StopAsked
from holdfast.policy.requests import REPEATED
from holdfast.stop import signals
from holdfast.stop.signals import SparedWorker
from kit.harness import await_child, is_alive, wait_until
from kit.ranks.stopping_ranks import LIMIT, events, gate, ranks, reasons
from kit.tiny import Numbers

STOPPED = int(ExitCode.STOPPED)


def loader_with_workers(kind: str, context: str) -> Any:
    torch.manual_seed(7)
    loader: type[torch.utils.data.DataLoader[Any]] = torch.utils.data.DataLoader
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader
    return loader(
        Numbers(), batch_size=4, num_workers=1, multiprocessing_context=context, worker_init_fn=_mark_worker
    )


def _mark_worker(worker: int) -> None:
    """The user's own function, which runs as ever."""
    mark = Path(os.environ["STOPPING_PLACE"], f"worker{worker}")
    mark.with_suffix(".new").write_text(str(os.getpid()))
    mark.with_suffix(".new").rename(mark)


SOON = 0.3
"""Seconds after which a worker of these tests ends by a signal, unless its rank is stopping."""


@pytest.mark.parametrize(
    ("kind", "context"),
    [("plain", "fork"), ("stateful", "fork"), pytest.param("plain", "spawn", marks=pytest.mark.drill)],
)
def test_a_loaders_workers_outlive_a_signal_to_every_process_where_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, context: str
) -> None:
    """E2: as long as the rank needs them, because it has told them that it stops."""
    monkeypatch.setenv("STOPPING_PLACE", str(tmp_path))
    monkeypatch.setattr(signals, "REPEATED", SOON)  # one that is spawned does not see this
    with ranks(
        tmp_path,
        1,
        until=9,
        loader=lambda: loader_with_workers(kind, context),
        hook=gate(2),
        stop_exit_signal_handler_for_dataloader=True,
    ) as running:
        running.at("waiting")
        worker = int((tmp_path / "worker0").read_text())
        os.killpg(running.pids[0], signal.SIGTERM)
        wait_until(lambda: events(tmp_path, StopAsked), LIMIT, "the rank is asked")
        deadline = time.monotonic() + 3 * (SOON if context == "fork" else REPEATED)
        while time.monotonic() < deadline:
            assert is_alive(worker), running.errors()
            time.sleep(0.02)
        running.open_gate()
        assert running.wait() == [STOPPED], running.errors()
        assert reasons(tmp_path) == {2: ["stop"]}


def test_where_that_is_not_set_a_loaders_worker_dies_and_takes_the_step_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: the fault that the setting is for. torch raises in the rank when a worker is gone."""
    monkeypatch.setenv("STOPPING_PLACE", str(tmp_path))
    with ranks(
        tmp_path, 1, until=9, loader=lambda: loader_with_workers("plain", "fork"), hook=gate(2)
    ) as running:
        running.at("waiting")
        os.killpg(running.pids[0], signal.SIGTERM)
        assert running.wait() == [70], running.errors()
        assert "is killed by signal: Terminated" in running.errors()
        assert reasons(tmp_path) == {}


class _Flag:
    value = 0


def test_a_worker_whose_rank_is_not_stopping_ends_by_a_signal_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as the one by which multiprocessing ends its children: nobody waits for one for ever."""
    monkeypatch.setattr(signals, "REPEATED", SOON)
    pid = os.fork()
    if pid == 0:
        SparedWorker(None, [signal.SIGTERM], _Flag())(0)
        time.sleep(60)
        os._exit(0)

    def handled() -> bool:
        caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:\t")[2].split()[0]
        return bool(int(caught, 16) & (1 << (signal.SIGTERM - 1)))

    wait_until(handled, LIMIT, "the worker has its handler")
    os.kill(pid, signal.SIGTERM)
    assert await_child(pid, LIMIT) == 128 + signal.SIGTERM
