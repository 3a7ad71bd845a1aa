"""What one `holdfast run` is, as its parts share it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.config import Settings
from holdfast.control.directory import ControlDirectory
from holdfast.control.exclusions import Exclusion, excluded
from holdfast.control.handover import LaunchInfo
from holdfast.launch.alert import Alerts
from holdfast.launch.attempt import Announcement
from holdfast.launch.gate import Gate
from holdfast.launch.keeper import Keeper
from holdfast.launch.leadership import Leadership
from holdfast.launch.learning import Learner
from holdfast.launch.monitor import Monitor
from holdfast.launch.orphans import Orphans
from holdfast.launch.saves_told import SavesTold
from holdfast.launch.scheduler import Scheduler
from holdfast.launch.signals import StopSignals
from holdfast.launch.starting import Starter
from holdfast.policy.capacity import Exclusion as Decided


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # somebody has deleted it
        return ""


@dataclass(kw_only=True)
class LaunchContext:
    control: ControlDirectory
    created: bool
    """Whether this agent created the run's directory and has still to journal that."""
    settings: Settings
    config: str
    command_line: dict[str, str]
    restarts_chosen: bool
    """Whether somebody gave launch.max_restarts, which is a default otherwise."""
    launch: str
    """This agent's proposal, then what all agents of the launch agreed on."""
    min_nodes: int
    max_nodes: int
    started_with: str
    """What this launch starts: see `launches.digest_of`."""
    alerts: Alerts
    signals: StopSignals
    scheduler: Scheduler
    gate: Gate
    leadership: Leadership
    orphans: Orphans
    keeper: Keeper
    starter: Starter
    monitor: Monitor
    learner: Learner
    saves: SavesTold
    leads: bool = False
    """Whether this agent led the last attempt."""
    last_words: str = ""
    """Why the launch ends, where its code alone does not say it."""
    directory: str = field(default_factory=_here)
    """Where this agent was started, and is."""
    earlier_launches: list[str] = field(default_factory=list)
    """Ids under which these agents met before the store's host was lost."""
    learned_exclusions: list[Decided] = field(default_factory=list)
    """What decisions of this launch excluded: known here before the record of it can be read everywhere."""

    @property
    def elastic(self) -> bool:
        """Whether the group may go on with fewer nodes than it began with."""
        return self.min_nodes < self.max_nodes

    def tend_starter(self) -> None:
        """Look after the parent of the workers; it is a child that is neither a worker nor an orphan."""
        self.starter.tend()
        if self.starter.parent_pid is not None:
            self.orphans.own(self.starter.parent_pid)

    def rename_launch(self) -> None:
        """A new id for what goes on after the loss of the store."""
        self.earlier_launches.append(self.launch)
        self.launch = uuid.uuid4().hex[:12]

    def exclusions(self) -> list[Exclusion]:
        """What is kept out of the run now."""
        found = excluded(self.control)
        known = {(one.node, one.device) for one in found}
        fresh = [one for one in self.learned_exclusions if (one.node, one.device) not in known]
        # Once its record can be read here, the records alone count: somebody may readmit what was excluded.
        self.learned_exclusions = fresh
        return found + [Exclusion(node=one.node, device=one.device, reason=one.reason) for one in fresh]

    def excluded_nodes(self) -> list[str]:
        """Whole nodes that are kept out, for whoever chooses the nodes of the next start."""
        return sorted({one.node for one in self.exclusions() if one.device is None})

    def handover(self, told: Announcement, node: str, local_rank: int) -> LaunchInfo:
        return LaunchInfo(
            run_dir=str(self.control.path),
            run_id=self.control.run_id,
            launch=self.launch,
            attempt=told.attempt,
            epoch=told.epoch,
            node=node,
            config=self.config,
            command_line=self.command_line,
            directory=self.directory,
            lease_ttl=self.settings.control.lease_ttl,
            avoid=told.avoid,
            rerun=told.rerun,
            trial=told.trial,
            restarts_left=told.restarts_left,
            device=told.arrangement.devices_of_ranks(node, {0: local_rank}).get(0, ""),
            monitor=str(self.monitor.path),
        )
