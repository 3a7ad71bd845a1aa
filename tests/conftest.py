from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from kit.acting import Place, clean_place
from kit.control import book, control, fence
from kit.harness import is_alive, stood_at
from kit.nodes.fake_scontrol import Fake, installed
from kit.nodes.local_tier import memory
from kit.nodes.machines import mount_namespaces, slow_io
from kit.nodes.slurm_cluster import slurm, slurm_session
from kit.tiny import Outcome, train
from kit.untested import pytest_terminal_summary

__all__ = [
    "book",
    "control",
    "fence",
    "mount_namespaces",
    "pytest_terminal_summary",
    "slow_io",
    "slurm",
    "slurm_session",
]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# A red test must mean that the change under test broke something, so `make test` tries the same examples
# every time, however busy the machine is; `make drill` searches for new ones (a find becomes an @example of
# its test).
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", max_examples=500, deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """CPU results are bitwise repeatable only at equal thread counts."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_stacks_are_left() -> Iterator[None]:
    """Of children that a test has killed."""
    yield
    for path in stood_at(0).parent.glob(stood_at(0).name.replace("-0.", "-*.")):
        if not is_alive(int(path.stem.rpartition("-")[2])):
            path.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """What a test does about signals must not reach the next one."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        if after[number] != before[number]:
            signal.signal(number, before[number])
    assert after == before


@pytest.fixture(autouse=True)
def _no_deadline_is_left() -> Iterator[None]:
    """A run that stops on request ends its process by the deadline: none may stop in the tests' own."""
    yield
    for thread in threading.enumerate():
        if thread.name == "holdfast-deadline":
            thread.join(1.0)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _no_holdfast_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own HOLDFAST_* variables must not reach the tests."""
    import os

    for name in list(os.environ):
        if name.startswith("HOLDFAST_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 3, 6 and 9. Not to be changed: `run_dir` is a copy that may be."""
    run_dir = tmp_path_factory.mktemp("prepared") / "run"
    train(run_dir, until=9)
    return run_dir


@pytest.fixture
def run_dir(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "run"))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run to step 9 that nothing disturbs."""
    return train(tmp_path_factory.mktemp("reference") / "run", until=9)


@pytest.fixture(scope="session")
def longer_reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run to step 12 that nothing disturbs."""
    return train(tmp_path_factory.mktemp("reference") / "run", until=12)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in memory, gone afterwards."""
    with memory() as path:
        yield path


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Where real launchers act, and must leave nothing."""
    with clean_place(tmp_path) as found:
        yield found


@pytest.fixture
def fake_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return installed(tmp_path, monkeypatch)


@pytest.fixture
def a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs a script, as far as anybody can tell; one of pytest-xdist runs none."""
    script = tmp_path / "script" / "train.py"
    script.parent.mkdir()
    script.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
