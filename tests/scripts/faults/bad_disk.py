"""Trains on a file system of its own that turns bad for a while. Run it in a mount namespace of its own.

`bad_disk.py DIRECTORY full|read-only|gone [setting=value …]`: between steps 5 and 8 the file system with
the checkpoints is full, read-only or unmounted. Prints what there is at the end, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import holdfast
from holdfast.checkpoint.format.structure import verify
from holdfast.journal.events import SaveFailed
from holdfast.journal.reader import read_journal
from kit import tiny


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


class Disk:
    """A small file system that can be hurt and healed."""

    def __init__(self, directory: Path) -> None:
        self.behind, self.path = directory / "behind", directory / "disk"
        self.behind.mkdir()
        self.path.mkdir()
        mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", self.behind)
        self.attach()

    def attach(self) -> None:
        mount("--bind", self.behind, self.path)

    def hurt(self, kind: str) -> None:
        if kind == "full":
            with (self.behind / "filler").open("wb", buffering=0) as filler:
                size = 1 << 16
                while size:
                    try:
                        filler.write(bytes(size))
                    except OSError:
                        size //= 2
        elif kind == "read-only":
            mount("-o", "remount,ro,bind", self.path)
        else:
            subprocess.run(["umount", "-l", str(self.path)], check=True)

    def heal(self, kind: str) -> None:
        if kind == "full":
            (self.behind / "filler").unlink()
        elif kind == "read-only":
            mount("-o", "remount,rw,bind", self.path)
        else:
            self.attach()


def main(directory: Path, kind: str, settings: dict[str, object]) -> None:
    torch.set_num_threads(1)
    mount("--make-rprivate", "/")
    disk = Disk(directory)

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 5:
            run.wait_for_saves()
            disk.hurt(kind)
        if step == 8:
            tiny.let_saves_end(run)
            disk.heal(kind)

    run_dir = directory / "run"
    outcome = tiny.train(run_dir, until=12, at_step=at_step, checkpoint_root=str(disk.path), **settings)
    found = sorted(path for path in disk.path.glob("step_*"))
    subprocess.run(["umount", "-l", str(disk.path)], check=True)
    beneath = sorted(os.listdir(disk.path))
    disk.attach()
    failed = [line.body for line in read_journal(run_dir / "journal") if isinstance(line.body, SaveFailed)]
    print(
        json.dumps(
            {
                "losses": outcome.losses,
                "checkpoints": {path.name[:13]: verify(path).sound for path in found},
                "failed": [[body.step, body.error] for body in failed],
                "beneath": beneath,
                "staging": [name for name in os.listdir(disk.path / ".staging") if not name.startswith(".")],
            }
        )
    )


if __name__ == "__main__":
    given = dict(pair.split("=", 1) for pair in sys.argv[3:])
    main(Path(sys.argv[1]), sys.argv[2], {key: json.loads(value) for key, value in given.items()})
