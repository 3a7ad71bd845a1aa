"""Stopping on request inside a rank: signals, the stop file, the deadline, and agreeing on the last step.

For `Run`, and through `ShutdownHandler` for loops that do not use it.
Promises: all ranks stop after the same step, with one save, by the deadline, whatever their threads do.
Never: save inside a signal handler; keep signals that belong to the script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.stop.agreement import LastStep, RankStop, StopAgreement, signalled
    from holdfast.stop.handler import ShutdownHandler
    from holdfast.stop.signals import LoaderSignals, StopDeadline, StopFile, StopSignals, refuse_stop_file
else:
    __getattr__ = offers(__name__)
