"""Tables for terminals, made of what the other modules here work out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.account.incidents import Incident
from holdfast.journal.render import duration, plural

if TYPE_CHECKING:
    from rich.table import Table


def incident_table(found: list[Incident]) -> Table:
    """What happened, on what evidence, what was decided, and what it cost."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False, show_lines=False)
    table.add_column("#", justify="right")
    table.add_column("What happened", ratio=3, overflow="fold")
    table.add_column("Evidence", ratio=4, overflow="fold")
    table.add_column("Decision", ratio=3, overflow="fold")
    table.add_column("Time lost", justify="right", no_wrap=True)
    for incident in found:
        table.add_row(
            str(incident.number),
            Text(f"{incident.what}\nattempt {incident.attempt}, last known step {incident.failed_at_step}"),
            Text("\n".join(f"• {item}" for item in incident.evidence)),
            Text(incident.decision),
            Text(cost(incident)),
        )
    return table


def cost(incident: Incident) -> str:
    """What an incident cost, in two or three short lines."""
    lost = duration(incident.seconds_lost)
    if incident.overtaken_by is not None:
        first = f"{lost}, then incident {incident.overtaken_by}"
    else:
        first = f"{lost} so far" if incident.open else lost
    down = f"{duration(incident.seconds_down)} until it trained again"
    return f"{first}\n{down}\n{plural(incident.steps_lost, 'step')} done again"
