"""`holdfast plan`: what saving and failing cost, and how often to save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.account import ObservedCosts, Spread
    from holdfast.policy import Cadence, Costs

DAY = 86400.0
HOUR = 3600.0
LARGEST = 31_536_000
"""In seconds or hours: the same limit as for settings."""


@dataclass(frozen=True)
class SourcedNumber:
    """A number and where it came from."""

    value: float
    source: str


def plan(
    run_dir: Annotated[
        Path | None, typer.Argument(help="The run's directory; its journal gives the numbers.")
    ] = None,
    mtbf: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Mean time between failures of the whole job.")
    ] = None,
    save_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="From the call of a save to its commit.")
    ] = None,
    blocked_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="How long a save holds training up.")
    ] = None,
    step_seconds: Annotated[float | None, typer.Option(metavar="S", help="One step of training.")] = None,
    restart_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="From a failure to the first step after it.")
    ] = None,
    interval: Annotated[
        int | None, typer.Option(metavar="STEPS", min=1, help="The present interval, to compare with.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Nodes of the job.")] = None,
    node_mtbf: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Mean time between failures of one node.")
    ] = None,
    local_save_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="From the call of a local save to its commit.")
    ] = None,
    local_blocked_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="How long a local save holds training up.")
    ] = None,
    local_share: Annotated[
        float | None, typer.Option(metavar="PART", help="The share of time for local saves, as in 0.01.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Say how often to save: from a run's journal, from the numbers given, or both (a given number takes
    precedence).
    """
    import msgspec

    from holdfast.policy import Costs
    from holdfast.policy import choose_interval as choose

    _check(
        {
            "--mtbf": mtbf,
            "--save-seconds": save_seconds,
            "--blocked-seconds": blocked_seconds,
            "--step-seconds": step_seconds,
            "--restart-seconds": restart_seconds,
            "--node-mtbf": node_mtbf,
            "--local-save-seconds": local_save_seconds,
            "--local-blocked-seconds": local_blocked_seconds,
        }
    )
    if local_share is not None and not 0 < local_share <= 0.5:
        raise UsageError(f"--local-share {local_share:g}: give a number above 0 and at most 0.5")
    seen = _observed(run_dir)
    known = _costs(seen, save_seconds, blocked_seconds, step_seconds, restart_seconds)
    known["mtbf"] = _mtbf(seen, mtbf, nodes, node_mtbf)
    costs = Costs(**{name: number.value for name, number in known.items()})
    chosen = choose(costs, known["mtbf"].source)
    present = interval or (seen.interval if seen is not None else None)
    found = _document(known, costs, chosen, present, given_mtbf=mtbf is not None or node_mtbf is not None)
    found["local"] = _local(seen, costs.step, local_save_seconds, local_blocked_seconds, local_share)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        _print(known, chosen, found)


# --- where the numbers come from


def _check(numbers: dict[str, float | None]) -> None:
    wrong = [
        f"{flag} {value:g}"
        for flag, value in numbers.items()
        if value is not None and not 0 < value <= LARGEST
    ]
    if wrong:
        raise UsageError(f"{', '.join(wrong)}: give a number above 0 and at most {LARGEST}")


def _observed(run_dir: Path | None) -> ObservedCosts | None:
    if run_dir is None:
        return None
    from holdfast.account import observed_costs
    from holdfast.journal import read_journal

    if not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} is not a run directory: it has no run.json. Give the run's --run-dir")
    return observed_costs(read_journal(run_dir / "journal"))


def _costs(
    seen: ObservedCosts | None,
    save: float | None,
    blocked: float | None,
    step: float | None,
    restart: float | None,
) -> dict[str, SourcedNumber]:
    from holdfast.policy import DEFAULT_RESTART

    found = {
        "step": _known(step, seen.step if seen else None, "step"),
        "blocked": _known(blocked, seen.blocked if seen else None, "save"),
        "commit": _known(save, seen.commit if seen else None, "save"),
        "restart": _known(restart, seen.down if seen else None, "incident")
        or SourcedNumber(DEFAULT_RESTART, "assumed; it does not change the interval, only the overhead"),
    }
    if found["blocked"] is None and found["commit"] is not None:
        found["blocked"] = SourcedNumber(
            found["commit"].value, "the whole save; --blocked-seconds if it is less"
        )
    flags = {"step": "--step-seconds", "commit": "--save-seconds"}
    missing = [flag for name, flag in flags.items() if found[name] is None]
    if missing:
        where = (
            "the journal has not measured it yet" if seen is not None else "there is no RUN_DIR to observe"
        )
        raise UsageError(f"{' and '.join(missing)} needed: {where}")
    known = {name: number for name, number in found.items() if number is not None}
    if known["commit"].value < known["blocked"].value:
        if save is not None and blocked is not None:
            raise UsageError(
                f"--blocked-seconds {blocked:g} is more than --save-seconds {save:g}: a save lets training "
                "go on no later than it is committed"
            )
        name, limit = ("blocked", save) if save is not None else ("commit", known["blocked"].value)
        known[name] = SourcedNumber(limit or 0.0, "follows from the other one, which was given")
    return known


def _known(given: float | None, seen: Spread | None, what: str) -> SourcedNumber | None:
    from holdfast.base import duration, plural

    if given is not None:
        return SourcedNumber(given, "given")
    if seen is None:
        return None
    return SourcedNumber(
        seen.median, f"observed: median of {plural(seen.count, what)}, 9 in 10 within {duration(seen.p90)}"
    )


def _mtbf(
    seen: ObservedCosts | None, given: float | None, nodes: int | None, node_mtbf: float | None
) -> SourcedNumber:
    from holdfast.base import plural
    from holdfast.policy import mtbf_of

    if (nodes is None) != (node_mtbf is None):
        raise UsageError("--nodes and --node-mtbf belong together: give both, or --mtbf for the whole job")
    if node_mtbf is not None and nodes is not None:
        if given is not None:
            raise UsageError("--mtbf and --node-mtbf are two ways to say the same: give one of them")
        each = f"{plural(nodes, 'node')}, each with an MTBF of {node_mtbf:g} h"
        return SourcedNumber(node_mtbf * HOUR / nodes, f"given: {each}")
    if given is not None:
        return SourcedNumber(given * HOUR, "given")
    found = mtbf_of(seen.running, seen.failures) if seen is not None else mtbf_of(0.0, 0)
    return SourcedNumber(found.seconds, found.source)


def _local(
    seen: ObservedCosts | None,
    step: float,
    save: float | None,
    blocked: float | None,
    share: float | None,
) -> dict[str, Any] | None:
    """The cadence of the local tier; None if nothing is known of its saves. What they slow steps down by is
    measured in a run only."""
    from holdfast.policy import LOCAL_SHARE, LocalCosts, least_local_interval

    commit = _known(save, seen.local_commit if seen else None, "local save")
    held_up = _known(blocked, seen.local_blocked if seen else None, "local save")
    if commit is None and held_up is None:
        return None
    if commit is None or held_up is None:
        needed = "--local-save-seconds" if commit is None else "--local-blocked-seconds"
        raise UsageError(f"{needed} needed too: what a local save costs is both")
    wanted = LOCAL_SHARE if share is None else share
    costs = LocalCosts(step=step, blocked=held_up.value, commit=commit.value)
    steps = least_local_interval(costs, wanted)
    return {
        "costs": {
            name: {"seconds": number.value, "source": number.source}
            for name, number in (("blocked", held_up), ("commit", commit))
        },
        "interval": {"steps": steps, "seconds": steps * step},
        "share": costs.share(steps),
        "wanted_share": wanted,
        "present": seen.local_interval if seen is not None else None,
        "set": f"[checkpoint]\nnon_persistent_save_interval = {steps}\n",
        "auto": '[checkpoint]\nnon_persistent_save_interval = "auto"\n'
        + (f"non_persistent_save_share = {share:g}\n" if share is not None else ""),
    }


# --- what is said


def _document(
    known: dict[str, SourcedNumber], costs: Costs, chosen: Cadence, present: int | None, *, given_mtbf: bool
) -> dict[str, Any]:
    """The answer for programs; the text for people is made from it too."""
    from holdfast.policy import concerns, overhead

    best = chosen.interval_steps
    rows = [
        ("half", max(1, best // 2)),
        ("chosen", best),
        ("double", best * 2),
        ("four times", best * 4),
    ]
    if present is not None:
        rows.append(("present", present))
    table = []
    for name, steps in rows:
        lost = overhead(steps * costs.step, costs)
        seconds = steps * costs.step
        table.append(
            {
                "interval": name,
                "steps": steps,
                "seconds": seconds,
                "overhead": lost,
                "lost_seconds_per_day": lost * DAY,
            }
        )
    warnings = [f"at the chosen interval, {text}" for text in chosen.warnings]
    if present is not None and present != best:
        warnings += [f"at present, {text}" for text in concerns(present, costs).values()]
    auto = '[checkpoint]\ninterval = "auto"\n'
    if given_mtbf:
        auto += f"mtbf_hours = {float(f'{costs.mtbf / HOUR:.6g}')}\n"
    return {
        "costs": {name: {"seconds": number.value, "source": number.source} for name, number in known.items()},
        "optima": {"young": chosen.young, "daly": chosen.daly, "least_overhead": chosen.optimal},
        "interval": {"steps": best, "seconds": chosen.interval_seconds},
        "overhead": chosen.expected_overhead,
        "lost_seconds_per_day": chosen.expected_overhead * DAY,
        "evidence": chosen.evidence,
        "table": table,
        "warnings": warnings,
        "set": {"fixed": f"[checkpoint]\ninterval = {best}\n", "auto": auto},
    }


NAMES = {
    "step": "one step",
    "blocked": "a save blocks training for",
    "commit": "a save is committed after",
    "restart": "from a failure to the next step",
    "mtbf": "mean time between failures",
}


def _print(known: dict[str, SourcedNumber], chosen: Cadence, document: dict[str, Any]) -> None:
    from holdfast.base import duration, plural

    for name, words in NAMES.items():
        number = known[name]
        typer.echo(f"{words:<32} {duration(number.value):>12}   {number.source}")
    typer.echo("\nTime between saves")
    for words, value in (
        ("Young 1974", chosen.young),
        ("Daly 2006", chosen.daly),
        ("least expected overhead", chosen.optimal),
    ):
        typer.echo(f"  {words:<30} {duration(value):>12}")
    steps = plural(chosen.interval_steps, "step")
    typer.echo(
        f"\nSave every {steps} ({duration(chosen.interval_seconds)}). Expected overhead: "
        f"{chosen.expected_overhead:.2%}, or {duration(document['lost_seconds_per_day'])} a day."
    )
    for note in chosen.evidence[3:]:
        typer.echo(f"  {note}")
    typer.echo(f"\n  {'interval':<12} {'steps':>14} {'time':>14} {'overhead':>10} {'lost a day':>14}")
    for row in document["table"]:
        typer.echo(
            f"  {row['interval']:<12} {row['steps']:>14} {duration(row['seconds']):>14} "
            f"{row['overhead']:>10.2%} {duration(row['lost_seconds_per_day']):>14}"
        )
    typer.echo("\nTo set it:")
    typer.echo(_indented(document["set"]["fixed"]))
    typer.echo("or, to have it chosen anew from what the run measures:")
    typer.echo(_indented(document["set"]["auto"]))
    if document["local"] is not None:
        _print_local(document["local"])
    for text in document["warnings"]:
        typer.echo(f"Warning: {text}.")


def _print_local(local: dict[str, Any]) -> None:
    from holdfast.base import duration, plural

    interval = local["interval"]
    typer.echo("To the local tier")
    for name, words in (("blocked", "a save blocks training for"), ("commit", "a save is committed after")):
        number = local["costs"][name]
        typer.echo(f"  {words:<30} {duration(number['seconds']):>12}   {number['source']}")
    typer.echo(
        f"\nSave locally every {plural(interval['steps'], 'step')} ({duration(interval['seconds'])}): "
        f"{local['share']:.2%} of the time, of at most {local['wanted_share']:.2%}, and what steps beside a "
        "save take longer, which only a run can measure."
    )
    if local["present"]:
        typer.echo(f"At present: every {plural(local['present'], 'step')}.")
    typer.echo("\nTo set it:")
    typer.echo(_indented(local["set"]))
    typer.echo("or, to have it chosen from what the run measures, slower steps included:")
    typer.echo(_indented(local["auto"]))


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
