"""Reads a run and shows it: the report and the status. Changes nothing.

For one HTML file that needs nothing else, and for `holdfast status`, from the journal and the records.
Promises: cost grows with the length of the run only where it must; what is unknown is said to be.
Never: decide; show what comes from outside as anything but text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.observe.report import write_report
    from holdfast.observe.status import Status, StopState, incident_table, status_line, status_of, status_rows
else:
    __getattr__ = offers(__name__)
