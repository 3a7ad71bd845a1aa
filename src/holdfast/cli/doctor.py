"""`holdfast doctor`: what is wrong with this node, or with all nodes of the job, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import CONFIG

if TYPE_CHECKING:
    from holdfast.cluster import SlurmJob
    from holdfast.config import Settings
    from holdfast.health import Check, DoctorReport, NodeReport


def doctor(
    run_dir: Annotated[
        Path | None, typer.Argument(help="The run's directory; without it, the setting run.dir.")
    ] = None,
    config: CONFIG = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    all_nodes: Annotated[
        bool, typer.Option("--all-nodes", help="Test every node of the Slurm job in which this runs.")
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Test the network with other nodes that are given the same option; see --nodes.",
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=2, help="On how many nodes --network is given.")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Compute nothing on GPUs; the driver and the kernel's log are still read."
        ),
    ] = False,
    lines: Annotated[bool, typer.Option("--lines", hidden=True, help="What --all-nodes asks for.")] = False,
) -> None:
    """Test this node: memory, space, limits, clock, storage, network, GPUs and the kernel's log.

    With --all-nodes, or with --network on each node, the nodes also test the network between them.

    Exits with 0 if everything is fine, 1 if there are warnings, 2 if something is critical, 3 if everything
    that was checked is fine but something could not be checked. Changes nothing; what it writes to test
    storage is removed.
    """
    from holdfast.cluster import node_name
    from holdfast.config import load
    from holdfast.health import (
        EXIT_CODES,
        TIMEOUT,
        ask_all_nodes,
        lines_of,
        merge,
        network_check,
        network_probe,
        network_seconds,
        site_checks,
    )

    keywords = {"run_dir": str(run_dir)} if run_dir is not None else {}
    settings = load(config, keywords=keywords).settings
    if all_nodes:
        given = [str(run_dir.absolute())] if run_dir is not None else []
        given += ["--config", str(config.absolute())] if config is not None else []
        job = _job()
        given += ["--quick"] if quick else _network_of(job)
        report = ask_all_nodes(job, given, TIMEOUT + (0 if quick else network_seconds(len(job.nodes))))
    else:
        name = node_name(settings.launch.node_name)
        more = site_checks(settings)
        if network is not None:
            more.append(network_probe(*_endpoint(network, nodes), name))
        else:
            more.append(network_check())
        report = merge([_examined(settings, name, quick=quick, more=more)])
    if lines:
        typer.echo("\n".join(line for one in report.nodes for line in lines_of(one)))
    else:
        _print_json(report) if as_json else _print(report)
    raise typer.Exit(EXIT_CODES[report.status])


def _examined(settings: Settings, name: str, *, quick: bool, more: list[Check]) -> NodeReport:
    from holdfast.health import examine, places_of

    limit = settings.health.max_uncorrected_errors
    return examine(places_of(settings), name=name, quick=quick, limit=limit, more=more)


FIRST_PORT, PORTS = 29500, 2000
"""The port where a job's nodes meet: chosen by the job's number, below those that the kernel gives away."""


def _network_of(job: SlurmJob) -> list[str]:
    """The flags by which the nodes of a job find each other; none for a single node."""
    if len(job.nodes) < 2:
        return []
    endpoint = f"{job.nodes[0]}:{FIRST_PORT + job.job_id % PORTS}"
    return ["--network", endpoint, "--nodes", str(len(job.nodes))]


def _endpoint(text: str, nodes: int | None) -> tuple[str, int]:
    from holdfast.errors import UsageError

    host, colon, port = text.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--network {text!r}: give HOST:PORT, a name or address of the first node and a port"
        )
    if nodes is None:
        raise UsageError("--network needs --nodes: how many nodes it is given on, including this one")
    return text, nodes


def _job() -> SlurmJob:
    from holdfast.cluster import current_job
    from holdfast.errors import UsageError

    job = current_job()
    if job is None:
        raise UsageError(
            "--all-nodes asks Slurm, and this is no Slurm job. Run it inside the job, or without --all-nodes "
            "on each node"
        )
    return job


def _print_json(report: DoctorReport) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(report).decode())


def _print(report: DoctorReport) -> None:
    from holdfast.base import plural, printable
    from holdfast.cli.output import print_columns
    from holdfast.health import HealthStatus

    rows = [(one.node, result) for one in report.nodes for result in one.results]
    rows += [("all", result) for result in report.between]
    many = len(report.nodes) > 1
    lines = [
        [*([node] if many else []), result.status.upper(), result.name, printable(result.found)]
        for node, result in rows
    ]
    print_columns(lines)
    bad = [(node, result) for node, result in rows if result.status is not HealthStatus.OK]
    if bad:
        typer.echo("\nWhat to do:")
    for node, result in bad:
        where = f"{node}, " if many else ""
        typer.echo(f"  {where}{result.name}: {printable(result.fix) or 'nothing is known to do'}")
    counts = {status: sum(result.status is status for _, result in rows) for status in HealthStatus}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    typer.echo(f"\n{plural(len(report.nodes), 'node')}: {report.status} ({told})")
