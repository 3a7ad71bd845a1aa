"""`--run-path`: runs a script with `runpy.run_path`; if it raises, leaves an error file, as torchrun does.

Guarantee: nothing in this package's folder hides a module of the script's. The script's own folder comes
first on the path, as with `python script`.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder; in a forked worker it is the script's, which is put back below

import os
import runpy


def main(script: str, *arguments: str) -> None:
    if os.path.isfile(script) and not sys.flags.safe_path:  # noqa: PTH113 - runpy puts a directory there itself
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))  # noqa: PTH120
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.argv = [script, *arguments]
    record(runpy.run_path)(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
