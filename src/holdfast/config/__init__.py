"""The settings: one typed tree, gathered from all sources and checked completely before anything starts.

For every setting there is, its type, range, default and the documentation made from them.
Promises: an unknown, contradictory or useless setting is refused or told, with its name and the fix.
Never: a setting that nothing reads; a guess at what was meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.config import sources
    from holdfast.config.fields import (
        ALERT_URL,
        FT_LAUNCHER,
        LONGEST_WAIT,
        SECTION_TIMEOUTS,
        is_step,
        mask,
        masked,
        wrong_address,
    )
    from holdfast.config.sections import (
        HealthSettings,
        InProcessSettings,
        StopSettings,
        StragglerSettings,
        ValidationSettings,
        parse_ranks,
        parse_signals,
    )
    from holdfast.config.settings import (
        FIELDS,
        CheckpointSettings,
        LaunchSettings,
        MonitorSettings,
        Settings,
        parse_failure_causes,
        parse_fresh_parts,
        parse_section_timeouts,
    )
    from holdfast.config.sources import FILE_LIMIT, NOT_SETTINGS, Effective, idle, load, parse_assignments
else:
    __getattr__ = offers(__name__)
