"""The settings of result validation: a section of the tree in `holdfast.settings`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.settings_fields import LARGEST_COUNT

DEFERRED = "validation.deferred"
DEFERRED_REFUSES = {
    "validation.rerun_mode": ("validate_results", "report_determinism_stats"),
    "validation.nan_policy": ("skip",),
}
"""What is done before the optimizer steps, which deferred checks cannot be in time for."""
DEFERRED_ALLOWS = {"validation.rerun_mode": "disabled", "validation.nan_policy": "warn, raise or rollback"}


def parse_ranks(text: str) -> frozenset[int]:
    """The ranks that a text such as "0,3" names; ValueError says what is wrong with it."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise ValueError("write whole numbers with commas between them, as 0,3")
    return frozenset(int(part) for part in parts)


class ValidationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checking results, re-running rejected steps, and probation after a resume."""

    rerun_mode: Annotated[
        Literal["disabled", "validate_results", "report_determinism_stats"],
        "What is done about a rejected step before anything else: nothing, re-run it, or re-run every step "
        "and measure how much results differ. Set validate_results when devices cannot be trusted.",
    ] = "disabled"
    check_for_nan_in_loss: Annotated[
        bool,
        "Whether a step whose loss is NaN or infinite is rejected. Turn it off only for a loss that may be.",
    ] = True
    check_for_nan_in_grad: Annotated[
        bool,
        "Whether a step whose gradients hold a NaN or an infinity is rejected; a gradient scaler's own "
        "overflow is not. Turn it off when gradients are sparse and that is normal.",
    ] = True
    check_for_spiky_loss: Annotated[
        bool,
        "Whether a step whose loss is spiky_loss_factor times the largest seen is rejected. Set it "
        "together with rerun_mode.",
    ] = False
    spiky_loss_factor: Annotated[
        float,
        Meta(gt=1, le=1e6),
        "How many times the largest loss seen so far counts as a spike. Raise it for a loss that jumps "
        "honestly.",
    ] = 10.0
    check_for_outlier_loss: Annotated[
        bool,
        "Whether a step whose loss is far outside the recent ones (median and spread of a window) is "
        "rejected. More sensitive than the spike test; set it together with rerun_mode.",
    ] = False
    outlier_loss_factor: Annotated[
        float,
        Meta(gt=1, le=1e6),
        "How many spreads above the window's median counts as an outlier. Lower it to catch smaller jumps.",
    ] = 12.0
    deferred: Annotated[
        bool,
        "Whether checks on a GPU are read some steps later, so that no step waits for the device. A bad "
        "step is then found after the optimizer used it: it can be rolled back, not re-run, skipped or "
        "dropped.",
    ] = False
    rerun_tolerance: Annotated[
        float,
        Meta(ge=0, le=1),
        "Relative difference up to which two runs of one step count as equal. Set what "
        "report_determinism_stats measured where results are not repeatable to the bit.",
    ] = 0.0
    on_transient: Annotated[
        Literal["accept", "stop"],
        "What to do with a step that was rejected once and not again: go on with the second result, or stop.",
    ] = "accept"
    max_transients: Annotated[
        int,
        Meta(ge=1, le=LARGEST_COUNT),
        "Transient faults after which a device counts as bad. Lower it to be rid of flaky devices sooner.",
    ] = 3
    nan_policy: Annotated[
        Literal["warn", "skip", "raise", "rollback"],
        "What happens to a non-finite step; it never reaches the optimizer. warn: dropped on all ranks, "
        "with a warning. skip: dropped quietly. raise: the run stops. rollback: dropped, and after "
        "max_consecutive of them the run goes back past its newest checkpoint.",
    ] = "warn"
    max_consecutive: Annotated[
        int,
        Meta(ge=1, le=LARGEST_COUNT),
        "Non-finite steps in a row after which the run stops, or rolls back if nan_policy says so.",
    ] = 10
    probation_steps: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Steps after a resume in which an anomaly makes what was loaded suspect; 0 turns probation off. "
        "Raise it when bad state shows late; keep it above 3.",
    ] = 10
    skip_bad_data: Annotated[
        bool,
        "Whether the samples of a step that fails on every device and from every checkpoint are left out, "
        "instead of leaving the step to nan_policy. All ranks leave out the same ones; the journal says "
        "which.",
    ] = False
    corruption_watch_interval: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Every so many steps a micro-batch is computed again, on a neighbour rank where there is one, and "
        "compared; 0 is off. Costs one more forward and backward each time.",
    ] = 0
    error_injection_rate: Annotated[
        float,
        Meta(ge=0, le=1),
        "Share of steps in which a false result is made up, to rehearse; 0 is off. Needs rerun_mode.",
    ] = 0.0
    error_injection_type: Annotated[
        Literal["correct_result", "transient_error", "persistent_error"],
        "What is rehearsed: a bad result that comes from the work itself, one that passes, or one that "
        "comes from the device.",
    ] = "transient_error"
    error_injection_step: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "The one step in which a false result is made up, whatever the rate; 0 is none.",
    ] = 0
    error_injection_ranks: Annotated[
        str,
        Meta(max_length=200),
        "Ranks that get false results, as 0,3; empty means all. With persistent_error it is their devices "
        "at the first false result that stay bad, unless error_injection_device names one.",
    ] = ""
    error_injection_device: Annotated[
        str,
        Meta(max_length=200),
        "The device that gives false results, as node/device or device, with persistent_error.",
    ] = ""
