"""Reads a run and shows it: the report and the status. Changes nothing.

For one HTML file that needs nothing else, and for `holdfast status`, from the journal and the records.
Promises: the cost does not grow with the length of the run where it need not; what is unknown is said to
be.
Never: decide; show what comes from outside as anything but text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.observe.chart import losses as losses
    from holdfast.observe.report import write_report as write_report
    from holdfast.observe.status import Status as Status
    from holdfast.observe.status import StopState as StopState
    from holdfast.observe.status import incident_table as incident_table
    from holdfast.observe.status import look as look
    from holdfast.observe.status import rows as rows
    from holdfast.observe.status import short as short
else:
    __getattr__ = offers(__name__)
