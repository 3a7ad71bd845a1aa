"""What is left on disk after a power cut, by a small model of a file system.

The file operations of a save are recorded once. For any cut in that record the model tells which tree a disk
may hold afterwards, under two readings of what POSIX allows:

* `strict`: only what was fsynced is there. A file has the contents of its last fsync, a directory the names
  of its last fsync; whatever lies under a name that is not there is gone.
* `names_first`: all names are there, and what was written but not fsynced is lost (`torn`: half of it). This
  is how zero-length and torn files come about on journaling file systems.

A rename is atomic, and durable once either of its two directories was fsynced.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.format.structure import verify
from kit.tiny import Outcome, checkpoints, train

Operation = tuple[str, tuple[Any, ...]]


@contextmanager
def recording(trace: list[Operation], *, any_thread: bool = False) -> Iterator[None]:
    """Record this thread's file operations, with descriptors and relative names resolved to paths."""
    names = ("open", "write", "pwrite", "fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir")
    original = {name: getattr(os, name) for name in names}
    caller = threading.current_thread()

    def opened(fd: int) -> str:
        return str(Path(f"/proc/self/fd/{fd}").readlink())

    def full(path: Any, dir_fd: int | None) -> str:
        return str(Path(opened(dir_fd)) / path if dir_fd is not None else Path(path).absolute())

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not any_thread and threading.current_thread() is not caller:
                return original[name](*args, **kwargs)
            dir_fd = kwargs.get("dir_fd")
            before = not os.path.lexists(full(args[0], dir_fd)) if name == "open" else False
            data = bytes(args[1]) if name in ("write", "pwrite") else b""
            result = original[name](*args, **kwargs)
            if name == "open":
                if before:
                    trace.append(("create", (full(args[0], dir_fd),)))
            elif name == "write":
                trace.append(("write", (opened(args[0]), data[:result])))
            elif name == "pwrite":
                trace.append(("pwrite", (opened(args[0]), data[:result], args[2])))
            elif name == "fsync":
                trace.append(("fsync", (opened(args[0]),)))
            elif name in ("rename", "replace", "link"):
                ends = kwargs.get("src_dir_fd"), kwargs.get("dst_dir_fd")
                trace.append((name, (full(args[0], ends[0]), full(args[1], ends[1]))))
            else:
                trace.append((name, (full(args[0], dir_fd),)))
            return result

        return call

    for name in names:
        setattr(os, name, wrap(name))
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(os, name, function)


@dataclass
class File:
    now: bytearray
    durable: bytes = b""


@dataclass
class Directory:
    now: dict[str, File | Directory] = field(default_factory=dict)
    durable: dict[str, File | Directory] = field(default_factory=dict)


class Disk:
    """The model: everything below one directory, as it is now and as it is on the platters."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tree = self._read(root)

    def _read(self, path: Path) -> Directory:
        found: dict[str, File | Directory] = {}
        for entry in path.iterdir():
            if entry.is_dir():
                found[entry.name] = self._read(entry)
            else:
                data = entry.read_bytes()
                found[entry.name] = File(bytearray(data), data)
        return Directory(dict(found), dict(found))

    def _find(self, path: str) -> tuple[Directory, str]:
        parts = Path(path).relative_to(self._root).parts
        at = self._tree
        for part in parts[:-1]:
            below = at.now[part]
            assert isinstance(below, Directory)
            at = below
        return at, parts[-1] if parts else ""

    def apply(self, operation: Operation) -> None:
        name, args = operation
        if not Path(args[0]).is_relative_to(self._root):
            return
        parent, last = self._find(args[0])
        if name == "create":
            parent.now[last] = File(bytearray())
        elif name == "write":
            file = parent.now[last]
            assert isinstance(file, File)
            file.now += args[1]
        elif name == "pwrite":
            file = parent.now[last]
            assert isinstance(file, File)
            data, at = args[1], args[2]
            file.now.extend(bytes(max(0, at + len(data) - len(file.now))))
            file.now[at : at + len(data)] = data
        elif name == "mkdir":
            parent.now[last] = Directory()
        elif name in ("unlink", "rmdir"):
            del parent.now[last]
        elif name == "link":
            target, new = self._find(args[1])
            target.now[new] = parent.now[last]
        elif name in ("rename", "replace"):
            target, new = self._find(args[1])
            target.now[new] = parent.now.pop(last)
        elif name == "fsync":
            node = parent.now[last] if last else self._tree
            if isinstance(node, File):
                node.durable = bytes(node.now)
            else:
                self._sync(node)

    def _sync(self, directory: Directory) -> None:
        arrived = [node for name, node in directory.now.items() if directory.durable.get(name) is not node]
        directory.durable = dict(directory.now)
        for node in arrived:  # a rename into here takes the old name away with it
            self._forget(self._tree, node, directory)

    def _forget(self, at: Directory, node: File | Directory, keep: Directory) -> None:
        for name, below in list(at.durable.items()):
            if below is node and at is not keep and name not in at.now:
                del at.durable[name]
            elif isinstance(below, Directory):
                self._forget(below, node, keep)

    def write(self, destination: Path, reading: str) -> None:
        """Lay out what a disk may hold after a cut now."""
        self._lay(self._tree, destination, reading)

    def _lay(self, directory: Directory, destination: Path, reading: str) -> None:
        destination.mkdir()
        for name, node in (directory.durable if reading == "strict" else directory.now).items():
            if isinstance(node, Directory):
                self._lay(node, destination / name, reading)
            else:
                lost = len(node.now) - len(node.durable)
                torn = node.now[: len(node.durable) + lost // 2] if reading == "torn" else node.durable
                (destination / name).write_bytes(bytes(torn))


READINGS = ("strict", "names_first", "torn")


def check_cuts(
    directory: Path,
    recorded: tuple[Path, list[Operation]],
    cuts: Callable[[int], Iterable[int]],
    reference: Outcome,
) -> dict[str, set[int]]:
    """Cut, resume, compare, for each of `cuts(operations)`; at which steps resumes started, by reading.

    `recorded`: the run as it was before its save of step 6, and that save's operations.
    """
    before, trace = recorded
    run = str(directory / "run")  # what was recorded there is done to the copy made before the save
    moved = [
        (name, tuple(a.replace(run, str(before), 1) if isinstance(a, str) else a for a in args))
        for name, args in trace
    ]
    started: dict[str, set[int]] = {reading: set() for reading in READINGS}
    for cut in cuts(len(moved)):
        disk = Disk(before)
        for operation in moved[:cut]:
            disk.apply(operation)
        for reading in READINGS:
            run_dir = directory / f"{reading}-{cut}"
            disk.write(run_dir, reading)
            found = checkpoints(run_dir)
            assert found, f"{reading}, cut {cut}: nothing is left"
            assert found[-1].name.startswith("step_00000003"), "an older checkpoint was lost"
            for path in found:
                assert verify(path).sound, f"{reading}, cut {cut}: {verify(path).problems}"
            outcome = train(run_dir, until=9, checkpoint_save_at_end=False, checkpoint_interval=0)
            assert outcome.started_at == (6 if len(found) == 2 else 3)
            assert outcome.parameters == reference.parameters
            started[reading].add(outcome.started_at)
            shutil.rmtree(run_dir)
    return started
