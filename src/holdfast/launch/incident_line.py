"""An incident in one line, from the records of a release that kept no account of it. Without torch.

`holdfast status` shows this line where there is no `account.json`. The records may be of any release: an
action that is not known here is shown by its own name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.control.attempts import FailureRecord
from holdfast.control.decisions import RECOVERY, decision_path
from holdfast.control.directory import ControlDirectory, read_record
from holdfast.journal.render import plural, printable
from holdfast.policy.recovery import describe_end

MESSAGE_LIMIT = 240

_ACTIONS = {
    "restart": "restart",
    "rotate": "restart on other devices",
    "lower_rung": "restart from an older checkpoint",
    "shrink": "restart with fewer nodes",
    "wait": "wait for capacity",
    "requeue": "give the job back to its scheduler",
}


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a recovery decision that is shown; read leniently, from any release's record."""

    action: str
    exit_code: int = 0
    reason: str = ""
    evidence: list[str] = []
    restarts_left: int | None = None
    exclude: list[dict[str, Any]] = []
    avoid: list[str] = []
    spares: list[str] = []
    verdict: str = ""
    suspect: list[str] = []
    skip: dict[str, Any] | None = None

    @classmethod
    def of(cls, decision: msgspec.Struct | dict[str, Any]) -> Decided:
        """Of a decision, or of what a record of one holds; what is of another shape is left out."""
        fields = msgspec.to_builtins(decision)
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError:
            return cls(action=str(fields.get("action", "?")), reason=str(fields.get("reason", "")))


def shown_decision(control: ControlDirectory, number: int) -> Decided | None:
    """What was decided about an attempt, by whichever release; None if nothing was."""
    found = read_record(decision_path(control, number, RECOVERY), dict)
    return Decided.of(found) if found is not None else None


def one_line(
    *,
    attempt: int,
    cause: str,
    root: FailureRecord | None,
    decision: Decided | None,
    step: int | None = None,
    max_restarts: int | None = None,
    detail: str = "",
) -> str:
    """`attempt 3: rank 1 on node-b killed by SIGKILL (infrastructure) at step 412 → restart, 2 of 3 left`."""
    what = _what(root) if root is not None else printable(detail, MESSAGE_LIMIT) or "failed"
    line = f"attempt {attempt}: {what}"
    if cause:
        line += f" ({printable(cause)})"
    if step is not None:
        line += f" at step {step}"
    return line if decision is None else f"{line} → {_next(decision, max_restarts)}"


def _what(root: FailureRecord) -> str:
    ended = describe_end(root.exit_code).replace("death by", "killed by")
    if root.exit_code >= 0:
        ended = f"ended with {ended}"
    if root.left:
        ended = "left with exit code 0 before its peers"
    text = f"rank {root.rank} on {printable(root.node)} {ended}"
    return f"{text}: {printable(root.message, MESSAGE_LIMIT)}" if root.message else text


def _next(decision: Decided, max_restarts: int | None) -> str:
    if decision.action == "stop":
        why = f": {printable(decision.reason, MESSAGE_LIMIT)}" if decision.reason else ""
        return f"stop with code {decision.exit_code}{why}"
    text = _ACTIONS.get(decision.action, printable(decision.action))
    out = [_named(one) for one in decision.exclude]
    if decision.action == "exclude":
        text = "restart"
    if out:
        text += f" without {printable(', '.join(out), MESSAGE_LIMIT)}"
    if decision.spares:
        text += f" on spare {printable(', '.join(decision.spares), MESSAGE_LIMIT)}"
    if decision.suspect:
        text += f", below {printable(decision.suspect[0])}, which is suspect"
    elif decision.avoid:
        text += f", below {printable(decision.avoid[-1])}"
    if decision.skip is not None:
        text += f" without batches {decision.skip.get('first', '?')} to {decision.skip.get('last', '?')}"
    if decision.verdict:
        text = f"{printable(decision.verdict)}: {text}"
    if decision.restarts_left is None or decision.action in ("wait", "requeue"):
        return text
    if max_restarts is None:
        return f"{text}, {plural(decision.restarts_left, 'restart')} left"
    return f"{text}, {decision.restarts_left} of {max_restarts} left"


def _named(exclusion: dict[str, Any]) -> str:
    node, device = exclusion.get("node", "?"), exclusion.get("device")
    return f"{node}" if device is None else f"device {device} of {node}"
