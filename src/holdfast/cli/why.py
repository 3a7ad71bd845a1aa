"""`holdfast why`: the five answers about a run's last incident, or about one that is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import print_json, show_time
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.account.incidents import Incident
    from holdfast.account.remarks import Remark


def why(
    run_dir: Annotated[Path, typer.Argument(help="The run's directory (run.dir, --run-dir).")],
    attempt: Annotated[
        int | None, typer.Option(min=1, help="The attempt that failed; without it, the last one that did.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Say who failed first, what happened, why, what was done and what it cost, and what to do now.

    Exits with 0, or with 2 if there is no such run, or if the attempt did not fail.
    Changes nothing.
    """
    from dataclasses import asdict

    from holdfast.account.incidents import incidents, stops
    from holdfast.account.remarks import remarks
    from holdfast.journal.reader import read_journal

    if not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} is not a run directory: it has no run.json. Give the run's --run-dir")
    lines = read_journal(run_dir / "journal")
    found = incidents(lines)
    others = remarks(lines, found)
    asked = stops(lines)
    told = sorted([*found, *asked], key=lambda one: one.at)
    if attempt is None:
        chosen = told[-1] if told else None
    else:
        chosen = next((one for one in told if one.attempt == attempt), None)
        if chosen is None:
            failed = ", ".join(str(one.attempt) for one in found) or "none"
            raise UsageError(f"--attempt {attempt} did not fail in {run_dir}; attempts that did: {failed}")
    if as_json:
        print_json({"incident": _as_json(chosen), "others": [asdict(one) for one in others]})
        return
    stop = next((one for one in others if chosen in asked and _is_of(one, chosen)), None)
    if stop is not None:  # told with what the stop cost, which no incident knows
        _show_remark(stop, "stop on request")
    elif chosen is not None:
        _show(chosen, "stop on request" if chosen in asked else f"incident {chosen.number} of {len(found)}")
    elif not others:
        typer.echo("no incident: nothing in this run's journal has failed")
    else:
        stop = max(others, key=lambda one: (one.seconds, one.count))
        _show_remark(stop, "not a failure, but told")
    for one in [one for one in others if one is not stop] if attempt is None else []:
        times = f" ({one.count} times)" if one.count > 1 and one.kind not in ("dropped", "copy") else ""
        typer.echo(f"also, {show_time(one.at)}: {one.what}{times}\n  next  {one.next}")


def _is_of(one: Remark, stopped: Incident | None) -> bool:
    return one.kind == "stop" and stopped is not None and one.attempt == stopped.attempt


def _show_remark(one: Remark, which: str) -> None:
    from holdfast.account.remarks import answers_of

    typer.echo(f"{which}, attempt {one.attempt}, {show_time(one.at)}")
    for question, text in answers_of(one):
        typer.echo(f"  {question:<5} {text}")


def _show(incident: Incident, which: str) -> None:
    from holdfast.account.wording import five

    typer.echo(f"{which}, attempt {incident.attempt}, {show_time(incident.at)}")
    for question, text in five(incident):
        typer.echo(f"  {question:<5} {text}")
    for name in incident.account.files if incident.account is not None else []:
        typer.echo(f"  file  {name}")


def _as_json(incident: Incident | None) -> dict[str, object] | None:
    import msgspec

    if incident is None:
        return None
    told = msgspec.to_builtins(incident.account) if incident.account is not None else None
    return {
        "number": incident.number,
        "attempt": incident.attempt,
        "at": incident.at,
        "account": told,
        "what": incident.what,
        "refused": list(incident.refused),
        "resumed_step": incident.resumed_step,
        "seconds_lost": incident.seconds_lost,
        "seconds_down": incident.seconds_down,
        "steps_lost": incident.steps_lost,
        "failed_at_step": incident.failed_at_step,
        "open": incident.open,
    }
