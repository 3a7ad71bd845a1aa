"""Stand-ins for machines that are ill: an `nvidia-smi` that says what a test wants, mounts of their own."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kit.harness import REPO

MNT_DETACH = 2

ROW = {
    "index": "0",
    "uuid": "GPU-aaaa",
    "pci.bus_id": "00000000:3B:00.0",
    "name": "NVIDIA H200",
    "memory.total": "143771",
    "memory.used": "4",
    "temperature.gpu": "31",
    "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.uncorrected.aggregate.total": "0",
    "retired_pages.pending": "[N/A]",
    "clocks_event_reasons.active": "0x0000000000000001",
}
SECOND = {"index": "1", "uuid": "GPU-bbbb", "pci.bus_id": "00000000:5E:00.0"}


def nvidia_smi(
    folder: Path,
    rows: list[dict[str, str]],
    *,
    remapped: dict[str, tuple[str, str]] | None = None,
    unknown: tuple[str, ...] = (),
    fails: str = "",
    hangs: bool = False,
    held: list[tuple[str, int, str]] | None = None,
) -> dict[str, str]:
    """A program of that name, first in PATH: the environment that has it. Rows are changes to `ROW`.

    `held`: who holds memory: device, pid, MiB. `folder / "asked"` has a line for each time it was asked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(
        f"""#!{sys.executable}
import sys, time
rows = {[ROW | row for row in rows]!r}
remapped = {remapped or {}!r}
asked = sys.argv[1]
with open({str(folder / "asked")!r}, "a") as told:
    told.write(asked + "\\n")
if {hangs!r}:
    time.sleep(300)
if {fails!r}:
    print({fails!r})
    sys.exit(9)
name, _, fields = asked.partition("=")
fields = fields.split(",")
for field in fields:
    if field in {unknown!r}:
        print(f'Field "{{field}}" is not a valid field to query.')
        sys.exit(2)
if name == "--query-compute-apps":
    for row in {held or []!r}:
        print(", ".join(map(str, row)))
elif name == "--query-gpu":
    for row in rows:
        print(", ".join(row.get(field, row["clocks_event_reasons.active"]) for field in fields))
else:
    for row in rows:
        if row["uuid"] in remapped:
            print(", ".join([row["uuid"], *remapped[row["uuid"]]]))
"""
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@contextmanager
def hung_mount(path: Path, longest: float = 60.0) -> Iterator[None]:
    """A file system there whose server never answers: whoever looks at it waits until this is over."""
    if not may_mount():
        pytest.skip("a file system that hangs needs root and /dev/fuse")
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/dev/fuse").open("r+b", buffering=0) as server:
        options = f"fd={server.fileno()},rootmode=40000,user_id=0,group_id=0"
        if libc.mount(b"hangs", os.fsencode(path), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        # Whoever still waits when it is closed gets an error, so that a test that hangs on it fails instead.
        limit = threading.Timer(longest, server.close)
        limit.start()
        try:
            yield
        finally:
            limit.cancel()
            libc.umount2(os.fsencode(path), MNT_DETACH)


def may_mount() -> bool:
    """Whether this process can make mounts, and one that hangs."""
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[None]:
    """A file system of its own there, which can be filled."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    """Use up all the space that there is."""
    with path.open("wb", buffering=0) as filler:
        size = 1 << 20
        while size:
            try:
                filler.write(bytes(size))
            except OSError:
                size //= 2


def inside_mounts(setup: str, command: list[str]) -> list[str]:
    """The command line that runs `setup` (shell) in a mount namespace of its own, and then the command."""
    script = f"{setup} && exec {shlex.join(command)}"
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]


@pytest.fixture(scope="session")
def mount_namespaces() -> None:
    """For tests that use `inside_mounts`: skips them where that cannot be."""
    why = "unshare not found"
    if shutil.which("unshare") is not None:
        probe = inside_mounts(f"mount -t tmpfs tmpfs {shlex.quote(tempfile.gettempdir())}", ["true"])
        done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=30)
        why = (done.stderr.strip() or f"unshare ended with {done.returncode}") if done.returncode else ""
    if why:
        pytest.skip(f"NO MOUNT NAMESPACES: {why}; bad storage and kernel logs are not tested")


@pytest.fixture(scope="session")
def slow_io(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What makes a disk slow, to be preloaded: see scripts/faults/slow_io.c."""
    library = tmp_path_factory.mktemp("slow") / "slow_io.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "a C compiler is part of what the tests need"
    source = str(REPO / "tests" / "scripts" / "faults" / "slow_io.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)
    return library
