"""The settings: one typed tree, gathered from all sources and checked completely before anything starts.

For every setting there is, its type, range, default and the documentation made from them.
Promises: an unknown, contradictory or useless setting is refused or told, with its name and the fix.
Never: a setting that nothing reads; a guess at what was meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.fronts import offers

if TYPE_CHECKING:
    from holdfast.config import sources as sources
    from holdfast.config.fields import ALERT_URL as ALERT_URL
    from holdfast.config.fields import FT_LAUNCHER as FT_LAUNCHER
    from holdfast.config.fields import LONGEST_WAIT as LONGEST_WAIT
    from holdfast.config.fields import SECTION_TIMEOUTS as SECTION_TIMEOUTS
    from holdfast.config.fields import is_step as is_step
    from holdfast.config.fields import mask as mask
    from holdfast.config.fields import masked as masked
    from holdfast.config.sections import HealthSettings as HealthSettings
    from holdfast.config.sections import InProcessSettings as InProcessSettings
    from holdfast.config.sections import StopSettings as StopSettings
    from holdfast.config.sections import StragglerSettings as StragglerSettings
    from holdfast.config.sections import ValidationSettings as ValidationSettings
    from holdfast.config.sections import parse_ranks as parse_ranks
    from holdfast.config.sections import parse_signals as parse_signals
    from holdfast.config.settings import FIELDS as FIELDS
    from holdfast.config.settings import CheckpointSettings as CheckpointSettings
    from holdfast.config.settings import LaunchSettings as LaunchSettings
    from holdfast.config.settings import MonitorSettings as MonitorSettings
    from holdfast.config.settings import Settings as Settings
    from holdfast.config.settings import parse_failure_causes as parse_failure_causes
    from holdfast.config.settings import parse_fresh_parts as parse_fresh_parts
    from holdfast.config.settings import parse_section_timeouts as parse_section_timeouts
    from holdfast.config.sources import FILE_LIMIT as FILE_LIMIT
    from holdfast.config.sources import NOT_SETTINGS as NOT_SETTINGS
    from holdfast.config.sources import Effective as Effective
    from holdfast.config.sources import idle as idle
    from holdfast.config.sources import load as load
    from holdfast.config.sources import parse_assignments as parse_assignments
else:
    __getattr__ = offers(__name__)
