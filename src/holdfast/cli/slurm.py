"""`holdfast slurm`: what Slurm says of this job, a batch script for a run, and queueing a job again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.output import CONFIG, JSON
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.cluster import JobRecord, SlurmJob

app = typer.Typer(
    help="Slurm jobs: show what is known about one, write scripts, queue a job again.", no_args_is_help=True
)

_COMMAND_AFTER = {"allow_extra_args": True, "ignore_unknown_options": False}


@app.command()
def info(as_json: JSON = False) -> None:
    """Say what is known about the job in which this runs: nodes, time left, restarts, whether it may return.

    Exits with 0, even outside Slurm.
    """
    import time

    from holdfast.cluster import current_job, slurm

    job = current_job()
    record = slurm.job_record(job.label) if job is not None else None
    job = slurm.as_named(job, record) if job is not None else None
    found = _document(job, record, time.time())
    if as_json:
        from holdfast.cli.output import print_json

        print_json(found)
    elif job is None:
        typer.echo("not inside a Slurm job")
    else:
        for line in _lines(job, record, found):
            typer.echo(line)


@app.command(context_settings=_COMMAND_AFTER)
def script(
    ctx: typer.Context,
    nodes: Annotated[int, typer.Option(help="Nodes that train.")] = 1,
    min_nodes: Annotated[
        int,
        typer.Option(
            help="Continue with as few as this many nodes when nodes are lost; 0: never with fewer."
        ),
    ] = 0,
    spares: Annotated[int, typer.Option(help="Additional nodes, which wait to take over.")] = 0,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs on each node, one rank for each.")] = 0,
    nproc_per_node: Annotated[int, typer.Option(help="Ranks on each node, if not one per GPU.")] = 0,
    time: Annotated[
        str, typer.Option(metavar="LIMIT", help="Time limit: MINUTES, HH:MM:SS, D-HH:MM:SS.")
    ] = "",
    partition: Annotated[str, typer.Option(help="Partition.")] = "",
    account: Annotated[str, typer.Option(help="Account.")] = "",
    job_name: Annotated[str, typer.Option(help="Name of the job.")] = "holdfast",
    array: Annotated[
        str, typer.Option(metavar="TASKS", help="A job array, such as 0-7: one run for each task.")
    ] = "",
    signal_lead: Annotated[
        int,
        typer.Option(metavar="SECONDS", help="How long before the limit Slurm signals the job; 0: never."),
    ] = 180,
    local_tier: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Keep local copies in this directory on each node, for example in /dev/shm."
        ),
    ] = "",
    run_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="The run's directory, which all nodes must see; by default runs/NAME."
        ),
    ] = "",
    log: Annotated[
        str, typer.Option(metavar="FILE", help="Output of the job, with sbatch's % patterns.")
    ] = "",
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="One task per rank, without `holdfast run`: no restarts inside the job."
        ),
    ] = False,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT,…", help="Where agents meet, if node names are not host names.")
    ] = "",
    holdfast: Annotated[
        str, typer.Option(metavar="COMMAND", help="How to call Holdfast on the nodes.")
    ] = "holdfast",
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="One more option of sbatch; repeatable.")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="LINE", help="A line of shell to run first, such as `source env`; repeatable."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the script to this file instead of stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write a batch script for a run: `holdfast slurm script --nodes 4 --gpus-per-node 8 -- train.py …`.

    It passes signals on, stops and saves ahead of the time limit, and is queued again when that is allowed.
    """
    import shlex

    from holdfast.cluster import JobLayout, render

    try:
        calling = shlex.split(holdfast)
    except ValueError as error:
        raise UsageError(f"--holdfast {holdfast!r}: {error}") from error
    text = render(
        JobLayout(
            command=ctx.args,
            nodes=nodes,
            min_nodes=min_nodes,
            spares=spares,
            gpus_per_node=gpus_per_node,
            processes_per_node=nproc_per_node,
            time=time,
            partition=partition,
            account=account,
            job_name=job_name,
            array=array,
            signal_lead=signal_lead,
            local_tier=local_tier,
            run_dir=run_dir,
            log=log,
            plain=plain,
            endpoints=rdzv_endpoint,
            holdfast=calling,
            extra=sbatch or [],
            setup=setup or [],
        )
    )
    if output is None:
        typer.echo(text, nl=False)
        return
    _write(output, text, force)
    typer.echo(f"wrote {output}; submit it with `sbatch {shlex.quote(str(output))}`")


@app.command()
def requeue(
    reason: Annotated[str, typer.Option(help="The reason; goes into the job's comment.")] = "",
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="A node to leave out next time; repeatable.")
    ] = None,
    exit_code: Annotated[
        int | None,
        typer.Option(
            metavar="CODE",
            help="The code with which the run ended: asks only if that is a reason to queue it again.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run's directory; its records say who asked it to stop."),
    ] = None,
    config: CONFIG = None,
    as_json: JSON = False,
) -> None:
    """Ask Slurm to queue again the job in which this runs; Slurm then ends it.

    With --exit-code and --run-dir it does so only if the run would, and not twice; a batch script calls it at
    its end. Exits with 0 if Slurm was asked or there was no need to ask, 1 if Slurm refused.
    """
    from holdfast.cluster import current_job, identified

    job = current_job()
    if job is None:
        raise UsageError("not inside a Slurm job: SLURM_JOB_ID is not set")
    job = identified(job)
    if exit_code is None:
        from holdfast.cluster import requeue_by_decision

        asked = requeue_by_decision(job, "auto", reason or "asked for by its script", exclude=exclude or [])
    else:
        from holdfast.cluster import requeue_at_the_end
        from holdfast.config import load

        setting = load(config).settings.slurm.requeue
        asked = requeue_at_the_end(job, setting, exit_code, run_dir, exclude or [])
    if as_json:
        from holdfast.cli.output import print_json

        print_json({"job": job.label, "asked": asked.asked, "reason": asked.reason, "exclude": asked.exclude})
    else:
        what = "was asked" if asked.asked else "was not asked"
        print(f"holdfast: Slurm {what} to queue job {job.label} again: {asked.reason}", file=sys.stderr)
    if asked.refused:
        raise typer.Exit(1)


def _write(path: Path, text: str, force: bool) -> None:
    import os

    from holdfast.base import check_output

    check_output(path, overwrite=force, option="--force")
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    flags |= os.O_TRUNC if force else os.O_EXCL
    try:
        with os.fdopen(os.open(path, flags, 0o755), "w", errors="surrogateescape") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


# --- what `info` shows


def _document(job: SlurmJob | None, record: JobRecord | None, now: float) -> dict[str, Any]:
    if job is None:
        return {"slurm": False}
    from holdfast.cluster import facts_of

    ends_at = (record.ends_at if record is not None else None) or job.ends_at
    facts = facts_of(job, record)
    return {
        "slurm": True,
        "job": job.label,
        "job_id": job.job_id,
        "array_job_id": job.array_job_id,
        "array_task_id": job.array_task_id,
        "components": job.components,
        "name": job.name,
        "user": job.user,
        "partition": (record.partition if record is not None else "") or job.partition,
        "nodes": job.nodes,
        "node": job.node,
        "tasks": job.tasks,
        "restarts": job.restarts,
        "state": record.state if record is not None else None,
        "ends_at": ends_at,
        "time_left": None if ends_at is None else ends_at - now,
        "may_requeue": facts.allowed if facts is not None else None,
        "preempted": facts.preempted if facts is not None else None,
        "comment": record.comment if record is not None else None,
        "exclude": record.exclude if record is not None else None,
    }


def _lines(job: SlurmJob, record: JobRecord | None, document: dict[str, Any]) -> list[str]:
    from holdfast.base import duration, plural, printable
    from holdfast.cli.output import show_time

    part = f" in partition {printable(document['partition'])}" if document["partition"] else ""
    lines = [f"job {job.label} ({printable(job.name)}){part}, queued again {plural(job.restarts, 'time')}"]
    names = ", ".join(map(printable, job.nodes[:16])) + (" …" if len(job.nodes) > 16 else "")
    lines.append(f"{plural(len(job.nodes), 'node')}: {names}" if job.nodes else "nodes: not known")
    if document["ends_at"] is None:
        lines.append("time limit: none, or not known")
    else:
        lines.append(
            f"ends at {show_time(document['ends_at'])}, in {duration(max(document['time_left'], 0.0))}"
        )
    if record is None:
        lines.append("Slurm could not be asked (scontrol is missing or does not answer)")
        return lines
    again = {True: "may be queued again", False: "may not be queued again", None: "not known whether it may"}
    lines.append(f"{record.state.lower()}; {again[document['may_requeue']]}")
    if document["preempted"]:
        lines.append("it is being preempted")
    if record.exclude:
        lines.append(f"without {', '.join(map(printable, record.exclude))}")
    if record.comment:
        lines.append(f"comment: {printable(record.comment)}")
    return lines
