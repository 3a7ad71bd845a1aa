"""`--run-path`: runs a script with `runpy.run_path`; if it raises, an error file is left, as by torchrun."""

from __future__ import annotations

import runpy
import sys


def main(script: str, *arguments: str) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.argv = [script, *arguments]
    record(runpy.run_path)(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
