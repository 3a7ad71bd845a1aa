"""From the settings to the time limits of a rank, and whether all timeouts of a launch fit each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.config import Effective
from holdfast.control.timeouts import read_ft_state
from holdfast.errors import ConfigError
from holdfast.policy.timeouts import Limits, Timeouts, Value, apply, contradictions
from holdfast.settings import parse_section_timeouts
from holdfast.settings_fields import SECTION_TIMEOUTS

NCCL_WATCHDOG = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_NAMES = {
    "initial": "monitor.initial_rank_heartbeat_timeout",
    "heartbeat": "monitor.rank_heartbeat_timeout",
    "sections": SECTION_TIMEOUTS,
    "out_of_section": "monitor.rank_out_of_section_timeout",
}
"""Limits by the names they have in `Limits`."""


def limits_of(effective: Effective) -> Limits:
    """The limits that the settings ask for, tightened by an ft_state.json if they name one."""
    chosen = effective.settings.monitor
    limits = Limits(
        initial=chosen.initial_rank_heartbeat_timeout,
        heartbeat=chosen.rank_heartbeat_timeout,
        sections=parse_section_timeouts(chosen.rank_section_timeouts),
        out_of_section=chosen.rank_out_of_section_timeout,
        given=[name for name, key in _NAMES.items() if effective.sources[key] != "default"],
    )
    return apply(read_ft_state(Path(chosen.import_ft_state)), limits) if chosen.import_ft_state else limits


def check_timeouts(effective: Effective, environ: Mapping[str, str]) -> None:
    """Refuse timeouts of which one would hide another. For a run that `holdfast run` watches."""
    settings, sources = effective.settings, effective.sources

    def value(key: str) -> Value:
        seconds = settings.get(key)
        assert isinstance(seconds, float)
        return Value(seconds, f"{key} = {seconds:g} ({sources[key]})", sources[key] != "default")

    watchdog = _number(environ.get(NCCL_WATCHDOG, ""))
    found = contradictions(
        Timeouts(
            initial=value(_NAMES["initial"]),
            heartbeat=value(_NAMES["heartbeat"]),
            sections={
                name: Value(
                    seconds, f"{name}:{seconds:g} in {SECTION_TIMEOUTS} ({sources[SECTION_TIMEOUTS]})"
                )
                for name, seconds in parse_section_timeouts(settings.monitor.rank_section_timeouts).items()
            },
            save=value("checkpoint.timeout"),
            stop_grace=value("launch.stop_grace"),
            decision=value("control.decision_timeout"),
            collective_watchdog=(
                Value(watchdog, f"{NCCL_WATCHDOG} = {watchdog:g} (environment)") if watchdog else None
            ),
        )
    )
    if found:
        count = "1 contradiction" if len(found) == 1 else f"{len(found)} contradictions"
        raise ConfigError("\n  ".join([f"{count} among the timeouts; nothing was started:", *found]))


def refuse_without_launcher(effective: Effective) -> None:
    """Settings that only `holdfast run` can honour, given to a script that it did not start, are an error."""
    given = [key for key in effective.sources if key.startswith("monitor.")]
    given = [key for key in given if effective.sources[key] != "default"]
    if given:
        shown = "\n  ".join(
            f"{key} = {msgspec.json.encode(effective.settings.get(key)).decode()} ({effective.sources[key]})"
            for key in given
        )
        raise ConfigError(
            f"these settings need the launcher, and this script was not started by it:\n  {shown}\n"
            "Start it with `holdfast run`, which watches the ranks, or take these settings away"
        )


UNPROTECTED = (
    "not started by `holdfast run`: a hang is not found, and a failed rank is not restarted "
    "(checkpoints and resuming work all the same)"
)


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) and found > 0 else None
