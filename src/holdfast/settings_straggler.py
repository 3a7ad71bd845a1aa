"""Settings of the straggler detector: a section of the tree in `settings.py`.

The names are those that users of nvidia-resiliency-ext know, so that a file can be taken over. `gpu` in them
stands for the rank's device, a CPU too.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.settings_fields import LONGEST_WAIT


class StragglerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Finding the rank that the others wait for."""

    enabled: Annotated[
        bool,
        "Measure what each rank spends in its sections, and compare the ranks at every report. Turn it on "
        "where steps take longer than they should and nobody knows why.",
    ] = False
    report_time_interval: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds between two reports; a rank is named after two of three reports in a row. Lower it to be "
        "told sooner, raise it where step times vary much.",
    ] = 300.0
    calc_relative_gpu_perf: Annotated[
        bool,
        "Whether a rank is compared with the others. Turn it off where ranks have different work, as the "
        "stages of a pipeline have.",
    ] = True
    calc_individual_gpu_perf: Annotated[
        bool,
        "Whether a rank is compared with its own best report of this attempt. Turn it off where the work of "
        "a step grows by design.",
    ] = True
    gpu_relative_perf_threshold: Annotated[
        float,
        Meta(gt=0, le=1),
        "Speed relative to the median of the other ranks below which a rank is slow. Raise it to find "
        "smaller differences, lower it where ranks differ by nature.",
    ] = 0.7
    gpu_individual_perf_threshold: Annotated[
        float,
        Meta(gt=0, le=1),
        "Speed relative to its own best below which a rank is slow. Raise it to find smaller losses.",
    ] = 0.7
    num_gpu_perf_scores_to_print: Annotated[
        int,
        Meta(ge=0, le=10_000),
        "How many of the best and of the worst scores each report prints; 0 prints none. Raise it to see "
        "more ranks in the log.",
    ] = 5
    profiling_interval: Annotated[
        int,
        Meta(ge=1, le=1_000_000),
        "Measure every so many steps; 1 means all. Raise it where steps are very short.",
    ] = 1
    enable_logging: Annotated[
        bool,
        "Whether reports and the ranks that are named go to the log; the journal has them anyway. Turn it "
        "off where the log is for other things.",
    ] = True
    stop_if_detected: Annotated[
        bool,
        "Whether the run saves and stops, as when asked to, once a rank is named. Turn it on where a slow "
        "run costs more than the time until somebody has replaced the machine.",
    ] = False
    exclude_if_detected: Annotated[
        bool,
        "Whether the run saves and `holdfast run` goes on without the device, or the node, that is named, if "
        "a spare can take its place. Turn it on where there are spares.",
    ] = False
