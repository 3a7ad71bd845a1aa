"""Rehearsed faults against real runs, the comparison of two runs, and the demo.

For showing, on the machine at hand, that a run survives what it claims to survive.
Promises: faults are real (signals, flipped bits); a claim is checked from evidence, bit by bit.
Never: touch a run that it did not start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.drill.demo import DemoResult, DemoView, demo_directory, run_demo
else:
    __getattr__ = offers(__name__)
