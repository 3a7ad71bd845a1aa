"""Data loaders' worker processes and a signal to every process of a rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import await_child, wait_until
from holdfast.exit_codes import ExitCode
from holdfast.journal.cluster_events import StopAsked
from holdfast.policy.stopping import REPEATED
from holdfast.worker.loader_signals import SparedWorker
from stopping_ranks import LIMIT, events, gate, ranks, reasons
from tiny import Numbers

STOPPED = int(ExitCode.STOPPED)


def loader_with_workers(kind: str, context: str) -> Any:
    torch.manual_seed(7)
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=context)
    return torch.utils.data.DataLoader(
        Numbers(), batch_size=4, num_workers=1, multiprocessing_context=context, worker_init_fn=_mark_worker
    )


def _mark_worker(worker: int) -> None:
    Path(os.environ["STOPPING_PLACE"], f"worker{worker}").touch()


@pytest.mark.parametrize(
    ("kind", "context", "spared"),
    [("plain", "fork", True), ("plain", "spawn", True), ("stateful", "fork", True), ("plain", "fork", False)],
)
def test_a_loaders_workers_outlive_a_signal_to_every_process_where_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, context: str, spared: bool
) -> None:
    """E2. The fault first: where it is not set, the worker dies and takes the step with it."""
    monkeypatch.setenv("STOPPING_PLACE", str(tmp_path))

    def loader() -> Any:
        return loader_with_workers(kind, context)

    with ranks(
        tmp_path,
        1,
        until=9,
        loader=loader,
        hook=gate(2),
        stop_exit_signal_handler_for_dataloader=spared,
    ) as running:
        running.at("waiting")
        os.killpg(running.pids[0], signal.SIGTERM)
        wait_until(lambda: events(tmp_path, StopAsked), LIMIT, "the rank is asked")
        if spared:
            time.sleep(0.2)  # for a worker to die of it, which it must not
        running.open_gate()
        code = running.wait()[0]
        if spared:
            assert code == STOPPED, running.errors()
            assert kind == "stateful" or (tmp_path / "worker0").exists()  # the user's own function ran too
            assert reasons(tmp_path) == {2: ["stop"]}
        else:
            assert code in (70, STOPPED)  # torch raises when it sees the worker gone, perhaps a step later


class _Flag:
    value = 0


def test_a_worker_whose_rank_is_not_stopping_ends_by_a_signal_after_all() -> None:
    """Such as the one by which multiprocessing ends its children: nobody waits for one for ever."""
    pid = os.fork()
    if pid == 0:
        SparedWorker(None, [signal.SIGTERM], _Flag())(0)
        time.sleep(60)
        os._exit(0)
    started = time.monotonic()
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() - started < 1.5 * REPEATED + LIMIT:
        with_handler = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:\t")[2].split()[0]
        if int(with_handler, 16) & (1 << (signal.SIGTERM - 1)):
            break
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert await_child(pid, 10 * REPEATED) == 128 + signal.SIGTERM
