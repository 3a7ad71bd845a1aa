"""Starts the preloaded parent before torch is imported here, from a quick look at the command line.

torchrun's own parser needs torch, which takes longer to import than all the rest of a launch. So this only
guesses: a wrong guess is noticed when the command line has been read properly, and costs a second parent.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence

from holdfast.errors import NoProcessesError
from holdfast.launch.preload import ColdStart, Preload, PreloadedParent, Script
from holdfast.lines import VARIABLE as LOG_FORMAT
from holdfast.lines import is_known

WITHOUT_VALUE = (
    "--standalone", "--module", "-m", "--no-python", "--run-path", "--use-env", "--virtual-local-rank",
    "--no-preload", "--help", "-h",
)  # fmt: skip


ROOM = 14
"""Threads and processes that a launcher with one worker needs at least, beside its first thread."""


def insist_on_room() -> None:
    """NoProcessesError where not even the launcher's own threads can be started: before anything is made."""
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(ROOM):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise NoProcessesError(f"there is room for {len(started)}, at least {ROOM} are needed") from error
    finally:
        over.set()
        for thread in started:
            thread.join()


def choose_format(argv: Sequence[str]) -> None:
    """Lines that are written before the command line has been read have the form that it asks for, too; and
    what the workers inherit is there before their parent is started. Another word is refused by the parser.
    """
    asked = (_split(argv)[0].get("--log-format") or [""])[-1]
    if asked and is_known(asked):
        os.environ[LOG_FORMAT] = asked


def start_early(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> PreloadedParent | None:
    """A parent for the workers of this command line; None if there is to be none, or if it is not clear."""
    preload = guess(argv, dict(os.environ) if environment is None else dict(environment))
    if preload is None:
        return None
    try:
        return PreloadedParent(preload)
    except ColdStart:
        return None  # tried again, and said, when the workers are about to start


def guess(argv: Sequence[str], environment: dict[str, str]) -> Preload | None:
    flags, rest = _split(argv)
    if not rest or {"--help", "-h", "--no-python", "--run-path", "--no-preload"} & {*flags}:
        return None
    if environment.get("PET_NO_PRELOAD", "0") != "0":
        return None
    program = environment.get("PYTHON_EXEC", sys.executable)
    as_module = ["-m"] if {"-m", "--module"} & {*flags} else []
    try:
        script = Script.of([program, "-u", *as_module, *rest])
    except ColdStart:
        return None
    workers = (flags.get("--nproc-per-node") or [environment.get("PET_NPROC_PER_NODE", "1")])[-1]
    if workers != "1" and "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = "1"  # as torchrun sets it for more than one worker
    return Preload(tuple(flags.get("--preload", ())), script.first_path, environment)


def _split(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The flags with their values, and what follows them: the script and its own arguments."""
    flags: dict[str, list[str]] = {}
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] != "-":
        name, equals, value = argv[position].partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if not equals and name not in WITHOUT_VALUE:
            position += 1
            value = argv[position] if position < len(argv) else ""
        flags.setdefault(name, []).append(value)
        position += 1
    return flags, list(argv[position:])
