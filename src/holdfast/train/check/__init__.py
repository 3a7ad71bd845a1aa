"""Whether a step's result may be used: checks, agreement, re-running, rejecting, and the corruption watch.

For losses, gradients, scalers and the user's checks, on all ranks together, before an optimizer uses the
result.
Promises: a step that is not finite reaches no optimizer on any rank; a re-run leaves no trace.
Never: a verdict from one bad result alone; a cost that the settings did not ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.train.check.checks import AgreedResult, Agreement, Checks, Severity
    from holdfast.train.check.judgement import Rejecting
    from holdfast.train.check.nan_detector import NaNDetector
    from holdfast.train.check.rerun import RecordedFeed, before_steps
    from holdfast.train.check.validation import Validation, make_validation, refuse_contradictions
else:
    __getattr__ = offers(__name__)
