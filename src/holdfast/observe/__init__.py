"""TODO"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.observe.chart import losses_by_attempt as losses_by_attempt
    from holdfast.observe.report import write_report as write_report
    from holdfast.observe.status import Status as Status
    from holdfast.observe.status import StopState as StopState
    from holdfast.observe.status import incident_table as incident_table
    from holdfast.observe.status import status_line as status_line
    from holdfast.observe.status import status_of as status_of
    from holdfast.observe.status import status_rows as status_rows
else:
    __getattr__ = offers(__name__)
