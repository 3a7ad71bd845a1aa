"""What lies in the current directory is not imported by the processes that we start."""

from __future__ import annotations

import ast
import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.save import handoff as writer
from holdfast.health import gpu
from holdfast.launch.workers.preload import Preload, PreloadedParent
from holdfast.process.companion import own_child
from kit.harness import REPO

SOURCE = REPO / "src" / "holdfast"
PLANTED = (
    "xxhash",
    "msgspec",
    "psutil",
    "json",
    "socket",
    "struct",
    "tempfile",
    "torch",
    "holdfast",
    "fsspec",
)
CHILDREN = {
    "checkpoint/remote/drain.py": "holdfast.checkpoint.remote.drain",
    "checkpoint/copies/peer_process.py": "holdfast.checkpoint.copies.peer_process",
    "checkpoint/read_back.py": "holdfast.checkpoint.read_back",
    "checkpoint/save/handoff.py": "holdfast.checkpoint.save.writer_process",
    "drill/faults.py": "holdfast",
    "health/examination.py": "holdfast",
    "health/gpu.py": "holdfast.health.gpu",
    "restart/keeper_process.py": "holdfast.restart.keeper_process",
    "launch/workers/orphans.py": "holdfast.launch.workers.orphans",
}
"""Who starts a process of ours, and the module that it runs."""
STARTING = ("own_child", "start_child")
INTERPRETERS = {
    "process/companion.py",
    "record/launches.py",  # a record of what ran
    "cli/run.py",  # where the command is installed
    "launch/command.py",  # the training script itself
    "launch/workers/preload.py",  # the same; and the parent, see test_the_preloaded_parent
    "launch/workers/forked_worker.py",  # a message
    "process/guard.py",  # -I -S
}
"""Who else names the interpreter."""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory full of modules that say that they were imported; they must not."""
    place = tmp_path / "project"
    place.mkdir()
    for name in PLANTED:
        said = tmp_path / "imported"
        (place / f"{name}.py").write_text(f"open({str(said)!r}, 'a').write({name + chr(10)!r})\n")
    monkeypatch.chdir(place)
    return tmp_path / "imported"


def test_every_process_of_ours_is_started_in_one_way() -> None:
    starting, naming = set(), set()
    for path in SOURCE.rglob("*.py"):
        relative, text = str(path.relative_to(SOURCE)), path.read_text()
        if not any(name in text for name in STARTING) and "executable" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in STARTING:
                starting.add(relative)
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
                naming.add(relative)
    assert starting - {"process/companion.py"} == set(CHILDREN)
    assert naming == INTERPRETERS


@pytest.mark.parametrize("module", sorted(set(CHILDREN.values())))
def test_a_child_imports_nothing_from_the_current_directory(module: str, planted: Path) -> None:
    if module != "holdfast":
        assert importlib.util.find_spec(module) is not None
    subprocess.run(
        own_child(module), stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )  # it finds no arguments, and ends
    assert not planted.exists(), planted.read_text()


def test_without_that_the_planted_modules_are_imported(planted: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "holdfast.launch.workers.orphans"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert planted.exists()


def test_a_writer_as_a_trainer_starts_it(planted: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        process = writer.spawn(theirs.fileno())
        theirs.close()
    process.wait(60)
    assert not planted.exists(), planted.read_text()


def test_a_health_child_as_the_gate_starts_it(planted: Path) -> None:
    assert gpu._ask_child("nvml", 60.0).problem
    assert not planted.exists(), planted.read_text()


def test_the_preloaded_parent(planted: Path, tmp_path: Path) -> None:
    """Its own imports come before the script's folder is on the path, and the current one never is."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "json.py").write_text(f"open({str(planted)!r}, 'a').write('json of the script')\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    parent = PreloadedParent(Preload((), str(scripts), environment))
    try:
        parent.wait()
    finally:
        parent.close()
    assert not planted.exists(), planted.read_text()
