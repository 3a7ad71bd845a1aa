"""The `holdfast` command. No logic of its own: each command calls the room that owns it.

For people and scripts: every command has help, `--json` where it makes sense, and documented exit codes.
Promises: bad input gets a clear error and a code, and loses nothing; only a few commands import torch.
Never: a traceback for something that can be said in a line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.cli.app import main
else:
    __getattr__ = offers(__name__)
