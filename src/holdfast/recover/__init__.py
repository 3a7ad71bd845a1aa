"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.recover.conduct import Wishes as Wishes
    from holdfast.recover.conduct import recover_plain_root as recover_plain_root
    from holdfast.recover.conduct import recover_run as recover_run
    from holdfast.recover.examine import open_run as open_run
    from holdfast.recover.report import Row as Row
    from holdfast.recover.report import plain_text as plain_text
else:
    __getattr__ = offers(__name__)
