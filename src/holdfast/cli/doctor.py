"""`holdfast doctor`: what is wrong with this node, or all nodes of the job, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.arguments import CONFIG

if TYPE_CHECKING:
    from holdfast.cluster.slurm import SlurmJob
    from holdfast.health.all_nodes import Report


def doctor(
    run_dir: Annotated[
        Path | None, typer.Argument(help="The run's directory; without it, the setting run.dir.")
    ] = None,
    config: CONFIG = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    all_nodes: Annotated[
        bool, typer.Option("--all-nodes", help="On every node of the Slurm job that this runs in.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compute nothing on GPUs; driver and kernel log are still asked.")
    ] = False,
    lines: Annotated[bool, typer.Option("--lines", hidden=True, help="What --all-nodes asks for.")] = False,
) -> None:
    """Try this node out: memory, space, shared memory, limits, clock, storage, GPUs and the kernel's log.

    Exits with 0 if all is well, 1 if there are warnings, 2 if something is critical, 3 if all that was looked
    at is well but something could not be. Changes nothing; what it writes to try storage is removed.
    """
    from holdfast.cluster.node_name import node_name
    from holdfast.config import load
    from holdfast.health.all_nodes import ask_all_nodes, lines_of, merge
    from holdfast.health.examination import examine, places_of
    from holdfast.policy.health import EXIT_CODES

    keywords = {"run_dir": str(run_dir)} if run_dir is not None else {}
    settings = load(config, keywords=keywords).settings
    if all_nodes:
        given = [str(run_dir.absolute())] if run_dir is not None else []
        given += ["--config", str(config.absolute())] if config is not None else []
        report = ask_all_nodes(_job(), [*given, *(["--quick"] if quick else [])])
    else:
        name = node_name(settings.launch.node_name)
        report = merge([examine(places_of(settings), name=name, quick=quick)])
    if lines:
        typer.echo("\n".join(line for one in report.nodes for line in lines_of(one)))
    else:
        _print_json(report) if as_json else _print(report)
    raise typer.Exit(EXIT_CODES[report.status])


def _job() -> SlurmJob:
    from holdfast.cluster.slurm import current_job
    from holdfast.errors import UsageError

    job = current_job()
    if job is None:
        raise UsageError(
            "--all-nodes asks Slurm, and this is no Slurm job. Run it inside the job, or without --all-nodes "
            "on each node"
        )
    return job


def _print_json(report: Report) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(report).decode())


def _print(report: Report) -> None:
    from holdfast.cli.output import print_columns
    from holdfast.journal.text import plural, printable
    from holdfast.policy.health import Status

    rows = [(one.node, result) for one in report.nodes for result in one.results]
    rows += [("all", result) for result in report.between]
    many = len(report.nodes) > 1
    lines = [
        [*([node] if many else []), result.status.upper(), result.name, printable(result.found)]
        for node, result in rows
    ]
    print_columns(lines)
    bad = [(node, result) for node, result in rows if result.status is not Status.OK]
    if bad:
        typer.echo("\nWhat to do:")
    for node, result in bad:
        where = f"{node}, " if many else ""
        typer.echo(f"  {where}{result.name}: {printable(result.fix) or 'nothing is known to do'}")
    counts = {status: sum(result.status is status for _, result in rows) for status in Status}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    typer.echo(f"\n{plural(len(report.nodes), 'node')}: {report.status} ({told})")
