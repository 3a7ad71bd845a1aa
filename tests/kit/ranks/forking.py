"""Helpers of the tests of fast restarts: the same script as a new interpreter and as a forked worker."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.launch.workers.preload import Forked, PreloadedParent, Request, Script
from kit.harness import await_child

DEADLINE = 60.0


@dataclass
class Ended:
    code: int
    out: str
    err: str


TORCH = """
class cuda:
    is_initialized = staticmethod(lambda: False)

def initial_seed():
    return 0

class default_generator:
    seed = staticmethod(lambda: None)
"""


def without_torch(place: Path) -> None:
    """Scripts here find a torch that is imported in no time, for tests that need nothing of it."""
    (place / "torch.py").write_text(TORCH)


def command(*args: str) -> list[str]:
    return [sys.executable, "-u", *args]


@contextlib.contextmanager
def streams(stdin: str) -> Iterator[dict[int, int]]:
    """Files for the three standard streams."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        yield {0: given.fileno(), 1: out.fileno(), 2: err.fileno()}


def text_of(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(os.dup(descriptor)) as file:
        return file.read()


def cold(args: list[str], environment: Mapping[str, str], stdin: str = "") -> Ended:
    with streams(stdin) as files:
        process = subprocess.Popen(
            args, env=dict(environment), stdin=files[0], stdout=files[1], stderr=files[2],
            start_new_session=True,
        )  # fmt: skip
        code = process.wait(DEADLINE)
        return Ended(code, text_of(files[1]), text_of(files[2]))


def fork(
    parent: PreloadedParent, args: list[str], environment: Mapping[str, str], files: Mapping[int, int]
) -> Forked:
    return parent.fork({0: Request(Script.of(args), environment, files)})


def warm(parent: PreloadedParent, args: list[str], environment: Mapping[str, str], stdin: str = "") -> Ended:
    with streams(stdin) as files:
        forked = fork(parent, args, environment, files)
        forked.go()
        code = await_child(forked.pids[0], DEADLINE)
        return Ended(code, text_of(files[1]), text_of(files[2]))
