"""A real Slurm on this machine: munged, slurmctld and four slurmd, each a node. Needs root and the packages.

Where the machine allows namespaces, every node has a host name, an address and a network of its own, so that
jobs find each other by name as on a cluster. Where it does not, all nodes share the machine's; then a job has
to be told an endpoint (`SlurmCluster.endpoint`).

Guarantee: nothing is left behind. Every daemon and every process of every job carries a marker in its
environment; the end of the `with` block kills what has it and removes the directory with keys, sockets, spool
and logs, whatever the test did. A killed test process takes its daemons with it.

Nothing is shared with a Slurm that the machine may run otherwise, or with another test process: directory,
ports, munge key and socket are this cluster's own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.harness import MARKER, wait_until
from kit.nodes import namespaces
from kit.nodes.namespaces import Network

NODES = ("n1", "n2", "n3", "n4")
_CONTROLLER = "controller"
_HOSTS = (*NODES, _CONTROLLER)
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "setpriv")
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"})
KILL_WAIT = 20
"""Seconds from SIGTERM to SIGKILL when Slurm ends a job; what a save has after a preemption without grace."""
REQUEUE_WAIT = 5
"""Seconds before a requeued job may start again: the lifetime of credentials, 120 by default, at least 5."""
_PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to outgoing connections, which could otherwise be in the way."""

_CONF = """\
ClusterName={tag}
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket,cred_expire={requeue_wait}
CredType=cred/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait}
InactiveLimit=0
MinJobAge=3600
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=300
MessageTimeout=30
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE MaxTime=INFINITE
PartitionName=graced Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if os.geteuid() != 0:
        return "NO REAL SLURM: its daemons need root; preemption, requeue and time limits are not tested"
    if absent := [name for name in COMMANDS if shutil.which(name) is None]:
        return (
            f"NO REAL SLURM: {', '.join(absent)} not found; preemption, requeue and time limits are not "
            "tested. `make packages` installs what is needed"
        )
    return ""


class SlurmCluster:
    """Partitions `low` (default) and `graced` (60 s of grace) yield to `high`; nodes are given whole."""

    def __init__(self, home: Path, network: Network | None) -> None:
        self.home = home
        self.network = network
        self.marker = uuid.uuid4().hex
        self.conf = home / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """For commands that talk to this cluster, and for its jobs: nothing of an outer Slurm."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HOLDFAST_", "SLURM", "SBATCH_", "PYTEST_"))
        }
        return kept | {
            "SLURM_CONF": str(self.conf), MARKER: self.marker, "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip

    @property
    def endpoint(self) -> str:
        """For a rendezvous that cannot name a node; empty where nodes have names of their own."""
        return "" if self.network is not None else f"127.0.0.1:{_free_ports(1)[0]}"

    # Commands ---------------------------------------------------------------------------------------------

    def command(self, *words: str, timeout: float = 30.0, check: bool = True, cwd: Path | None = None) -> str:
        """The output of one of Slurm's commands; the test fails if it does, with what it said."""
        done = subprocess.run(
            self._inside(_CONTROLLER, words), env=self.env, cwd=cwd or self.home, capture_output=True,
            text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def sbatch(self, script: Path, *flags: str, cwd: Path) -> str:
        """Submit a batch script; its output goes where the script says. Returns the job's number."""
        answer = self.command("sbatch", "--parsable", *flags, str(script), cwd=cwd)
        return answer.strip().partition(";")[0]

    def submit(self, text: str, *flags: str, cwd: Path, name: str = "job") -> str:
        """The same for the text of a script, with output to `NAME-%A.out` or `NAME-%A_%a.out`, appended."""
        script = cwd / f"{name}.sh"
        script.write_text(text)
        task = "_%a" if any(flag.startswith("--array") for flag in flags) else ""
        return self.sbatch(script, f"--output={name}-%A{task}.out", "--open-mode=append", *flags, cwd=cwd)

    def scontrol(self, *words: str, check: bool = True) -> str:
        return self.command("scontrol", *words, check=check)

    def squeue(self, *flags: str) -> str:
        return self.command("squeue", "--noheader", *flags)

    def scancel(self, *words: str) -> None:
        self.command("scancel", *words)

    # Jobs and nodes ---------------------------------------------------------------------------------------

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` knows: JobState, Restarts, NodeList, Reason, Comment, ExitCode …"""
        line = self.scontrol("--oneliner", "show", "job", job).splitlines()[0]
        return dict(re.findall(r"(?:^|\s)([A-Za-z][\w:/-]*)=(.*?)(?=\s+[A-Za-z][\w:/-]*=|\s*$)", line))

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def restarts(self, job: str) -> int:
        return int(self.job(job)["Restarts"])

    def nodes_of(self, job: str) -> list[str]:
        """The nodes that a job runs on, or ran on last."""
        return self.command("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def exit_code(self, job: str) -> int:
        """Of the batch script; a death by signal as a negative number."""
        code, _, killed = self.job(job)["ExitCode"].partition(":")
        return -int(killed) if int(killed) else int(code)

    def wait_for(self, job: str, *states: str, timeout: float = 60.0, restarts: int | None = None) -> str:
        """Until a job is in one of these states, after so many restarts; fails if it ended otherwise."""
        deadline = time.monotonic() + timeout
        while True:
            found = self.job(job)
            state = found["JobState"]
            if state in states and restarts in (None, int(found["Restarts"])):
                return state
            hopeless = state in ENDED and restarts in (None, int(found["Restarts"]))
            if hopeless or time.monotonic() > deadline:
                wanted = " or ".join(states) + (f" after {restarts} restarts" if restarts is not None else "")
                raise AssertionError(f"job {job} is {state}, not {wanted}: {found}\n{self.output(job)}")
            time.sleep(0.1)

    def output(self, job: str) -> str:
        """What the job's batch script and its steps have written so far."""
        path = Path(self.job(job).get("StdOut", ""))
        return path.read_text(errors="replace") if path.is_file() else ""

    def said(self, job: str, text: str, *, timeout: float = 60.0) -> None:
        """Until a job's output has this; fails at once if the job ends without it."""
        deadline = time.monotonic() + timeout
        while text not in self.output(job):
            ended = self.state(job) in ENDED and text not in self.output(job)
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"job {job} did not say {text!r}:\n{self.output(job)}")
            time.sleep(0.1)

    def processes(self, job: str, containing: str) -> dict[int, str]:
        """Live processes of a job whose command line has this text: pid → node."""
        found: dict[int, str] = {}
        for pid, environ, words in self._marked():
            if environ.get("SLURM_JOB_ID") == job and containing in words:
                found[pid] = environ.get("SLURMD_NODENAME", "")
        return found

    def kill(self, job: str, containing: str) -> None:
        """SIGKILL to the processes of a job whose command line has this text."""
        for pid in self.processes(job, containing):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end_within(self, job: str, least: float) -> None:
        """Move a running job's end near: as far away as its start, but not nearer than `least` seconds.

        So short that half of the job's time is over: earlier than that nobody stops for a time limit.
        """
        started = time.mktime(time.strptime(self.job(job)["StartTime"], "%Y-%m-%dT%H:%M:%S"))
        end = time.time() + max(least, time.time() - started)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end))
        self.scontrol("update", f"JobId={job}", f"EndTime={moment}")

    def drain(self, node: str, reason: str = "a test drains it") -> None:
        self.scontrol("update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def node_states(self) -> dict[str, str]:
        rows = self.command("sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=low").split("\n")
        return dict(row.split() for row in rows if row.strip())

    def clear(self) -> None:
        """Between two tests: no job, every node idle."""
        self.scancel("--user=root", "--quiet")
        wait_until(lambda: not self.squeue(), 60, "cancelled jobs leave the queue")
        left = [pid for pid, environ, _ in self._marked() if environ.get("SLURM_JOB_ID")]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node, state in self.node_states().items():
            if state.rstrip("*") not in ("idle", "allocated", "mixed", "completing"):
                self.scontrol("update", f"NodeName={node}", "State=RESUME", check=False)
        self._wait_until_idle()

    # Life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for attempt in range(3):  # a port may be taken between its choice and its use
            self._configure()
            try:
                self._start_daemons()
                return
            except AssertionError:
                if attempt == 2:
                    raise
                self._end()

    def _configure(self) -> None:
        self.home.chmod(0o755)
        (self.home / "state").mkdir(exist_ok=True)
        key = self.home / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        ports = _free_ports(1 + len(NODES))
        here = [socket.gethostname()] * len(NODES) if self.network is None else NODES
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr={self.address(name)} Port={port} CPUs=2"
            for name, host, port in zip(NODES, here, ports[1:], strict=True)
        )
        names = "".join(f"{self.address(name)} {name}\n" for name in NODES)
        (self.home / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        # Nothing here uses cgroups; named, the machine's are not looked at, which fails in some containers.
        cgroups = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.home}/cgroup\n"
        (self.home / "cgroup.conf").write_text(cgroups)
        self.conf.write_text(
            _CONF.format(
                tag=self.home.name.lower(), host=socket.gethostname(), address=self.address(_CONTROLLER),
                home=self.home, ports=ports, nodes=nodes,
                kill_wait=KILL_WAIT, requeue_wait=REQUEUE_WAIT,
            )
        )  # fmt: skip

    def _start_daemons(self) -> None:
        home = self.home
        self._daemon(
            "munged", "munged", "--foreground", "--force", f"--key-file={home}/munge.key",
            f"--socket={home}/munge.socket", f"--pid-file={home}/munged.pid",
            f"--log-file={home}/munged.log", f"--seed-file={home}/munge.seed", "--num-threads=2",
        )  # fmt: skip
        wait_until(lambda: (home / "munge.socket").exists() or self._dead(), 20, "munged listens")
        self._daemon("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        for name in NODES:
            self._daemon(name, "slurmd", "-D", "-N", name, "-f", str(self.conf))
        self._wait_until_idle()

    def _daemon(self, name: str, *words: str) -> None:
        if self.network is not None and name in NODES:
            setting_up = f'hostname {name} && mount --bind {self.home}/hosts /etc/hosts && exec "$@"'
            words = ("unshare", "--mount", "--uts", "sh", "-c", setting_up, "sh", *words)
        words = self._inside(name, ("setpriv", "--pdeathsig", "KILL", *words))
        with (self.home / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                words, env=self.env, cwd=self.home,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _inside(self, host: str, words: tuple[str, ...]) -> tuple[str, ...]:
        """The command line that runs a command in a host's network."""
        if self.network is None:
            return words
        number = _HOSTS.index(host if host in NODES else _CONTROLLER)
        return ("nsenter", f"--net={self.network.namespace(number)}", *words)  # `ip netns exec` hides /sys

    def address(self, host: str) -> str:
        return "127.0.0.1" if self.network is None else self.network.address(_HOSTS.index(host))

    def _dead(self) -> list[str]:
        return [name for name, daemon in self._daemons.items() if daemon.poll() is not None]

    def _wait_until_idle(self, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        states: dict[str, str] = {}
        while True:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                states = self.node_states()
            if len(states) == len(NODES) and set(states.values()) == {"idle"}:
                return
            if self._dead() or time.monotonic() > deadline:
                raise AssertionError(f"daemons ended: {self._dead()}; nodes: {states}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self, lines: int = 25) -> str:
        """The last lines of every daemon's log."""
        found = []
        for path in sorted([*self.home.glob("*.log"), *self.home.glob("*.out")]):
            last = path.read_text(errors="replace").splitlines()[-lines:]
            found.append(f"--- {path.name}\n" + "\n".join(last))
        return "\n".join(found)

    def stop(self) -> None:
        self._end()
        shutil.rmtree(self.home, ignore_errors=True)

    def _end(self) -> None:
        """No orderly end: the controller would wait for its nodes, and nothing of its state is kept."""
        deadline = time.monotonic() + 20
        while left := [pid for pid, _, _ in self._marked()]:
            assert time.monotonic() < deadline, f"processes of the cluster cannot be killed: {left}"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in self._daemons.values():
                daemon.poll()
            time.sleep(0.02)
        for daemon in self._daemons.values():
            daemon.wait(10)
        self._daemons.clear()

    def _marked(self) -> Iterator[tuple[int, dict[str, str], str]]:
        """Every live process with this cluster's marker: pid, environment, command line."""
        wanted = f"{MARKER}={self.marker}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                raw = (entry / "environ").read_bytes().split(b"\0")
                if wanted not in raw:
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X"):
                    continue
                environ = dict(
                    pair.decode(errors="replace").partition("=")[::2] for pair in raw if b"=" in pair
                )
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield int(entry.name), environ, words


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, 200):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} free ports among 200 between {_PORTS.start} and {_PORTS.stop}")


@functools.cache
def _namespaces_allowed() -> bool:
    if shutil.which("ip") is None or namespaces.missing():
        return False
    probe = ["unshare", "--mount", "--uts", "sh", "-c", "mount --bind /etc/hosts /etc/hosts"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(namespaces.network(len(_HOSTS))) if _namespaces_allowed() else None
        # Not below pytest's directories: a socket's path has at most 107 characters.
        cluster = SlurmCluster(Path(tempfile.mkdtemp(prefix="hfslurm")), own)
        stack.callback(cluster.stop)
        cluster.start()
        yield cluster


@pytest.fixture(scope="session")
def slurm_session() -> Iterator[SlurmCluster]:
    """One cluster for all tests of this test process (each worker of xdist has its own)."""
    if reason := missing():
        pytest.skip(reason)
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_session: SlurmCluster) -> Iterator[SlurmCluster]:
    """A real Slurm with four idle nodes; what a test leaves running is cancelled after it."""
    yield slurm_session
    slurm_session.clear()
