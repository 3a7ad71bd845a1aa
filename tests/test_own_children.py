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

from harness import REPO
from holdfast.checkpoint import writer_client
from holdfast.health import gpu_facts
from holdfast.launch.preload import Preload, PreloadedParent
from holdfast.own_child import own_child

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
    "checkpoint/drain.py": "holdfast.checkpoint.drain_process",
    "checkpoint/peer_host.py": "holdfast.checkpoint.peer_server",
    "checkpoint/read_back.py": "holdfast.checkpoint.read_back",
    "checkpoint/writer_client.py": "holdfast.checkpoint.writer_process",
    "drill/training.py": "holdfast",
    "health/all_nodes.py": "holdfast",
    "health/gpu.py": "holdfast.health.gpu_child",
    "health/gpu_facts.py": "holdfast.health.gpu_child",
    "inprocess/keeper_process.py": "holdfast.inprocess.keeper_process",
    "launch/keeper.py": "holdfast.launch.keeper",
}
"""Who starts a process of ours, and the module that it runs."""
INTERPRETERS = {
    "own_child.py",
    "control/launches.py",  # a record of what ran
    "cli/demo.py",  # where the command is installed
    "launch/launcher.py",  # the training script itself
    "launch/early.py",  # the same, before torch is imported
    "launch/forked_worker.py",  # a message
    "launch/orphan_guard.py",  # -I -S
    "launch/preload.py",  # by path; see test_the_preloaded_parent
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
        if "own_child" not in text and "executable" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "own_child":
                starting.add(relative)
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
                naming.add(relative)
    assert starting == set(CHILDREN)
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
        [sys.executable, "-m", "holdfast.launch.keeper"], capture_output=True, timeout=60, check=False
    )
    assert planted.exists()


def test_a_writer_as_a_trainer_starts_it(planted: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        process = writer_client.spawn(theirs.fileno())
        theirs.close()
    process.wait(60)
    assert not planted.exists(), planted.read_text()


def test_a_health_child_as_the_gate_starts_it(planted: Path) -> None:
    assert gpu_facts._ask_child("nvml", 60.0).problem
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
