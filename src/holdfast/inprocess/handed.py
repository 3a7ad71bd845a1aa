"""What the launcher hands to members: one environment variable, HOLDFAST_RESTART, as JSON.

A process that finds it has its keeper in its node's agent, and meets the others in the attempt's store.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast.control.handover import read_handover

VARIABLE = "HOLDFAST_RESTART"


class Handed(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    """Of the store."""
    keeper: str
    """Path of the keeper's socket."""
    members: int
    """How many there are on all nodes."""
    node: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Handed | None:
        """The hand-over, or None for a process whose launcher keeps no members."""
        return read_handover(environ, VARIABLE, cls)

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}
