"""What one `holdfast run` is, as its parts share it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.config import Settings
from holdfast.control.directory import ControlDirectory
from holdfast.control.handover import LaunchInfo
from holdfast.launch.leadership import Leadership
from holdfast.launch.signals import StopSignals
from holdfast.launch.starting import Starter


@dataclass(kw_only=True)
class LaunchContext:
    control: ControlDirectory
    created: bool
    """Whether this agent created the run's directory and has still to journal that."""
    settings: Settings
    config: str
    command_line: dict[str, str]
    launch: str
    """This agent's proposal, then what all agents of the launch agreed on."""
    max_nodes: int
    signals: StopSignals
    leadership: Leadership
    starter: Starter

    def handover(self, attempt: int, epoch: int, node: str) -> LaunchInfo:
        return LaunchInfo(
            run_dir=str(self.control.path),
            run_id=self.control.run_id,
            launch=self.launch,
            attempt=attempt,
            epoch=epoch,
            node=node,
            config=self.config,
            command_line=self.command_line,
            lease_ttl=self.settings.control.lease_ttl,
        )
