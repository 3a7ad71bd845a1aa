"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.cli.app import main as main
else:
    __getattr__ = offers(__name__)
