"""What the kernel says of processes is read in one place, and read right."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from holdfast.process import proc
from kit.harness import REPO

SOURCE = REPO / "src" / "holdfast"
READERS = {
    "process/proc.py",
    "process/local_wire.py",  # the address of a socket whose path is too long
    # Of machines, not of processes:
    "health/node.py",  # mounts, cgroups
    "health/network.py",  # ports
    "cluster/devices.py",  # the driver
}


def test_one_module_reads_what_the_kernel_says_of_processes() -> None:
    reading = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and str(node.value).startswith("/proc"):
                reading.add(str(path.relative_to(SOURCE)))
    assert reading == READERS


def test_psutil_is_imported_only_where_it_is_asked() -> None:
    code = "import sys; from holdfast.process import proc; proc.everyone(); sys.exit('psutil' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_threads_of_a_user_are_counted() -> None:
    """At least this process's own; and there is no such user as the other."""
    assert proc.threads_of(os.getuid()) >= len(proc.thread_ids(os.getpid()))
    assert proc.threads_of(2**31 - 7) == 0


def test_the_memory_that_a_process_has_for_itself() -> None:
    before = proc.private_bytes(os.getpid())
    kept = bytearray(os.urandom(1 << 20) * 64)
    assert proc.private_bytes(os.getpid()) - before > len(kept) // 2
    assert proc.private_bytes(2**22 + 1) == 0


def test_how_a_child_ended_is_known_before_it_is_reaped() -> None:
    child = os.fork()
    if child == 0:
        os._exit(7)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        found = proc.read(child)
        assert found is not None
        assert found.ended
        assert proc.exit_code_of(child) == 7
    finally:
        os.waitpid(child, 0)
    assert proc.read(child) is None
    assert proc.exit_code_of(child) == 0
    assert proc.exit_code_of(os.getpid()) == 0


def test_this_process_as_the_kernel_sees_it(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        assert file.fileno() in proc.descriptors()
        assert proc.file_of(file.fileno()) == str(tmp_path / "open")
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert child.pid in proc.children()
        assert proc.descends(child.pid, os.getpid())
        assert proc.status(child.pid)["Name"] in ("sleep", "python", "python3")
    finally:
        child.kill()
        child.wait()
    assert proc.status(child.pid) == {}
    start, end = proc.place_of_arguments()
    assert 0 < start < end
