"""The gate before a node joins: its quick health checks, and what its devices reported during an attempt.

Guarantee: only what is critical keeps a node out, and only with `health.gate = "refuse"`; what could not be
checked never does. A node that is kept out is checked again every few seconds, and joins once it is well. The
gate itself never fails: on a fault in here the node takes part, and the fault is reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from holdfast.base import Bounded
from holdfast.cluster import devices_here, node_name, visible_devices
from holdfast.config import Settings
from holdfast.errors import ExitCode
from holdfast.health import (
    GATE_PATIENCE,
    RING,
    SLOW_RING,
    TOKEN,
    CheckResult,
    GateAnswer,
    Gpu,
    Gpus,
    HealthStatus,
    HeldMemory,
    ask_gpus,
    ask_holders,
    check_compute,
    compute_check,
    gate_network,
    gpu_check,
    judge_gate,
    judge_gpus,
    judge_history,
    judge_pairs,
    judge_reached,
    names_of,
    places_of,
    present,
    quick_checks,
    read_kernel_log,
    read_soon,
    ring_pairs,
    run_checks,
    site_checks,
    try_ring,
)
from holdfast.journal import JournalWriter
from holdfast.journal.events import HealthFailed, Warned
from holdfast.launch.nodes import StopRun, usable_devices
from holdfast.policy import DeviceError
from holdfast.process import guarded
from holdfast.record import (
    ControlDirectory,
    attempt_numbers,
    excluded,
    prove,
    record_device_errors,
    run_secret,
)

FRESH = 30.0
"""Seconds for which an answer holds."""
GO_PATIENCE = 3.0
"""Seconds to wait for the leader's word, and for the others' results."""
NETWORK_PATIENCE = 20.0
"""Seconds for which workers wait while the network is tried out; a healthy one takes a fraction of that."""
AGAIN = 5.0
"""Seconds after which a node that is kept out is checked again."""
EVIDENCE_TIMEOUT = 10.0
"""Seconds for which the driver may take, after an attempt, to say what its devices went through."""

MEMORY_PATIENCE = 30.0
"""Seconds for which a restart waits until the dead workers' device memory is free. A driver takes a second or
two to tear a context down, many seconds where the host is busy unpinning much memory."""
EMPTY = 512 * 1024 * 1024
"""Bytes in use on a device on which nobody computes: what the driver keeps for itself is less."""
MEMORY_LOOK = 0.25
"""Seconds between two looks. A driver takes a fraction of a second to answer as well."""
MEMORY_ANSWER = 5.0
"""Seconds that the driver may take to say who holds memory; a node must not be held up to find that out."""

MEND = "mend what failed, then run the same command"
"""What to do about a node that has no others beside it: more nodes would not help it."""


class Gate:
    """One for all attempts of an agent."""

    def __init__(
        self,
        settings: Settings,
        control: ControlDirectory,
        *,
        say: Callable[[str], None],
        alone: bool = False,
        look: Callable[[], list[CheckResult]] | None = None,
        kernel_log: Path | None = None,
    ) -> None:
        """`alone`: no other node could take this one's place, so there is nothing to wait for in parking."""
        self.node = node_name(settings.launch.node_name)
        self._mode = settings.health.gate
        self._control = control
        self._say = say
        self._alone = alone
        self._places = places_of(settings)
        self._site = site_checks(settings, guarded)
        self._look = look or self._run_checks
        self._kernel_log = kernel_log
        self._answer: GateAnswer | None = None
        self._until = 0.0
        self._told: tuple[str, ...] = ()
        self._before: set[tuple[int, str, float]] | None = None
        self._device_at: dict[str, str] = {}
        """Bus address → device name. Kept, because a device that falls off the bus is no longer listed."""
        self._uncorrected: dict[str, int] = {}
        self._asked: tuple[float, Gpus | None] = (0.0, None)
        self._attempts = 0
        self._used: int | None = None
        """Bytes in use on the fullest of this job's devices, after the last attempt; None if not known."""
        self._held: list[HeldMemory] = []
        """What dead workers still held when the present attempt's workers started."""
        self._tried: tuple[str, ...] = ()
        """The nodes between which the network was tried out last."""
        self._limit = settings.health.max_uncorrected_errors
        self._to_compute = True
        """Whether the devices must compute something at the next check: before the first attempt, after one
        in which a device reported an error, and until they have computed correctly."""

    # --- may it take part? ----------------------------------------------------------------------------------

    def why_unfit(self) -> str:
        """Why this node may not take part, for a person; empty if it may.

        Raises StopRun before the first attempt of a node that has no others beside it: waiting cures nothing.
        """
        answer = self._current()
        if answer.kept_out and self._alone and not self._attempts:
            raise StopRun(ExitCode.NO_CAPACITY, f"{self.node} does not take part: {answer.why}", MEND)
        return answer.why if answer.kept_out else ""

    def insist(self) -> None:
        """For nodes that cannot be parked (a static rendezvous): StopRun if this one may not take part."""
        answer = self._current()
        if answer.kept_out:
            raise StopRun(ExitCode.NO_CAPACITY, f"{self.node} does not take part: {answer.why}", MEND)

    def forget(self) -> None:
        """Something failed here: what was found before no longer says anything."""
        self._answer = None

    def _current(self) -> GateAnswer:
        if self._mode == "off":
            return GateAnswer()
        if self._answer is None or time.monotonic() >= self._until:
            self._answer = GateAnswer()
            with self._without_fail("the look at this node's health"):
                self._answer = judge_gate(self._look(), self._mode)
            self._until = time.monotonic() + (AGAIN if self._answer.kept_out else FRESH)
            with self._without_fail("the record of the health checks"):
                self._tell(self._answer)
        return self._answer

    @contextlib.contextmanager
    def _without_fail(self, what: str) -> Iterator[None]:
        """A fault in here must neither keep a healthy node out nor end a run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            self._say(f"warning: {what} failed by a fault of its own ({error!r:.200}); going on without it")

    def _tell(self, answer: GateAnswer) -> None:
        """Report it in the journal and on the terminal, once for each set of problems."""
        names = tuple(text.partition(":")[0] for text in answer.told)
        if names == self._told:
            return
        self._told = names
        if not answer.told:
            self._say(f"{self.node} is healthy again")
            return
        if not answer.kept_out:  # if it is kept out, whoever parks or ends it says so
            for text in answer.told:
                self._say(f"warning: health of {self.node}: {text}")
        number = max(attempt_numbers(self._control), default=0)
        journal = JournalWriter(self._control.journal, "gate", number)
        try:
            journal.write(
                HealthFailed(
                    node=self.node, status=answer.status, problems=answer.told, kept_out=answer.kept_out
                )
            )
        finally:
            journal.close()

    def _run_checks(self) -> list[CheckResult]:
        """Takes under a second in all if all is well; with GPUs, as long as the driver takes to answer."""
        checks = [*quick_checks(self._places, patience=GATE_PATIENCE), *self._site, gate_network()]
        if self._has_devices():
            checks.append(dataclasses.replace(gpu_check(), look=self._look_at_gpus))
            if self._to_compute:
                checks.append(compute_check(self._compute))
        results = run_checks(checks)
        # Computing takes seconds, for which a restart should not wait without need: see `keep_device_errors`.
        failed = (one.name.endswith("compute") and one.status is HealthStatus.CRITICAL for one in results)
        self._to_compute = any(failed)
        return results

    def _compute(self) -> list[CheckResult]:
        usable = usable_devices(devices_here(), self.node, excluded(self._control))
        return check_compute(devices=usable) if usable else []

    def _look_at_gpus(self) -> list[CheckResult]:
        at, last = self._asked
        # What the driver answered as evidence, after the workers' end, is reused: asking takes a while.
        gpus = last if last is not None and time.monotonic() - at < FRESH else ask_gpus()
        self._asked = (0.0, None)
        names = names_of(gpus.devices, visible_devices())
        for gpu in gpus.devices:
            if gpu.bus:
                known = self._device_at.get(gpu.bus, "")  # with one device fewer, its name may not be clear
                self._device_at[gpu.bus] = names.get(gpu.index) or known
            if gpu.uncorrected is not None:
                self._uncorrected[gpu.uuid or str(gpu.index)] = gpu.uncorrected
        # An excluded device is no reason to keep its node out; and this job may not be allowed to use what
        # `/dev` shows, so a count that differs does not prove that a device is lost.
        usable = usable_devices(devices_here(), self.node, excluded(self._control))
        ours = [gpu for gpu in gpus.devices if names.get(gpu.index) in usable]
        self._note_use(ours)
        mine = msgspec.structs.replace(gpus, devices=ours)
        return [*judge_gpus(mine, usable, insist=False, limit=self._limit), *self._history(usable)]

    def _history(self, usable: Sequence[str]) -> list[CheckResult]:
        """What the kernel's log says about the devices that may be used. If it says nothing, that is fine."""
        log = read_kernel_log(kmsg=self._kernel_log)
        reported: dict[str, list[tuple[float, int]]] = {}
        for error in log.errors:
            if (name := self._device_at.get(error.bus, "")) in usable:
                reported.setdefault(name, []).append((error.at, error.number))
        judged = [judge_history(name, errors) for name, errors in sorted(reported.items())]
        return [result for result in judged if result is not None]

    # --- the network between the nodes that have met --------------------------------------------------------

    def try_network(self, store: Any, rank: int, members: Sequence[str], towards: str) -> None:
        """Every node tries the next one out, once for each set of nodes. Problems are reported, but keep
        nobody out: one pair does not show which end is at fault.

        `store`: this round's; `members`: by their rank; `towards`: a host on the network that is used.
        """
        if self._mode == "off" or len(members) < 2:
            return
        with self._without_fail("the look at the network"):
            trying = Bounded(partial(self._try_network, store, rank, tuple(members), towards), "network")
            if not trying.ended(NETWORK_PATIENCE):
                self._say(f"warning: the network was not tried out within {NETWORK_PATIENCE:g} s; going on")
                return
            if told := trying.result():
                self._warn_of(told)

    def _try_network(self, store: Any, rank: int, members: tuple[str, ...], towards: str) -> list[str]:
        if rank == 0:  # one word for all: new nodes have not seen which were tried before
            store.set("ring/go", "0" if members == self._tried else "1")
        self._tried = members
        if read_soon(store, "ring/go", GO_PATIENCE) != b"1":
            return []
        token = prove(run_secret(self._control), b"ring")[:TOKEN]
        pair = try_ring(store, rank, len(members), members[rank], token, towards)
        results = judge_reached("the interface used", [pair]) if pair.problem else []
        store.set(f"ring/pair/{rank}", msgspec.json.encode(pair).decode())
        if rank == 0 and len(members) >= RING:
            results.append(judge_pairs(ring_pairs(store, len(members), GO_PATIENCE), SLOW_RING))
        grave = (HealthStatus.WARNING, HealthStatus.CRITICAL)
        return [one.describe() for one in results if one.status in grave]

    def _warn_of(self, told: list[str]) -> None:
        for text in told:
            self._say(f"warning: network of {self.node}: {text}")
        number = max(attempt_numbers(self._control), default=0)
        with contextlib.closing(JournalWriter(self._control.journal, "gate", number)) as journal:
            journal.write(
                HealthFailed(node=self.node, status=HealthStatus.WARNING, problems=told, kept_out=False)
            )

    # --- what the devices went through ----------------------------------------------------------------------

    def begin(self, node: str) -> None:
        """Workers start: what the devices have reported until now is not their doing.

        `node`: this node's name, now that it has met the others.
        """
        self.node = node
        self._attempts += 1
        self._before = None
        with self._without_fail("the look at the devices' errors"):
            if self._mode == "off" or not self._has_devices():
                return
            log = read_kernel_log(kmsg=self._kernel_log)
            self._before = None if log.problem else {error.identity for error in log.errors}

    def await_memory(self, dead: Collection[int], attempt: int, check: Callable[[], None]) -> None:
        """Wait, for a while, until the driver has freed the device memory of workers that are dead.

        Their processes are gone, but their contexts may not be, and new workers would find too little memory.
        Where the last look at the devices found them empty, nothing is asked. It is told once, with who holds
        what; at the deadline the attempt starts all the same, and what was still held is evidence if it runs
        out of memory. `check`, called while waiting, may raise what ends it.
        """
        self._held = []
        used, self._used = self._used, None  # it is about to change
        empty = used is not None and used < EMPTY
        if self._mode == "off" or not dead or empty or not self._has_devices():
            return
        began, told = time.monotonic(), False
        while held := self._held_by(dead):
            waited, who = time.monotonic() - began, "; ".join(map(str, held))
            if waited >= MEMORY_PATIENCE:
                text = f"{who} after {waited:.0f} s, though the processes have ended; starting all the same"
                self._say(f"warning: {text}")
                self._note(attempt, text)
                self._held = held
                return
            if not told:
                told = True
                self._say(f"waiting for memory of devices: {who} (at most {MEMORY_PATIENCE:.0f} s)")
            check()
            time.sleep(MEMORY_LOOK)
        if told:
            self._say(f"the devices' memory is free after {time.monotonic() - began:.1f} s")

    def _note_use(self, gpus: Sequence[Gpu]) -> None:
        used = [gpu.memory_used for gpu in gpus]
        known = [much for much in used if much is not None]
        self._used = max(known, default=0) if known and len(known) == len(used) else None

    def _held_by(self, dead: Collection[int]) -> list[HeldMemory]:
        found: list[HeldMemory] = []
        with self._without_fail("the look at the devices' memory"):
            found += [one for one in ask_holders(MEMORY_ANSWER) or [] if one.pid in dead]
        return found

    def _note(self, attempt: int, text: str) -> None:
        with contextlib.closing(JournalWriter(self._control.journal, "gate", attempt)) as journal:
            journal.write(Warned(message=f"{self.node}: {text}"))

    def _held_errors(self) -> list[DeviceError]:
        """What the workers of this attempt did not get, by device."""
        if not self._held:
            return []
        gpus = ask_gpus(EVIDENCE_TIMEOUT)
        names = names_of(gpus.devices, visible_devices())
        known = {gpu.uuid: names.get(gpu.index, "") for gpu in gpus.devices}
        return [
            DeviceError(
                node=self.node,
                device=known.get(one.device, ""),
                at=time.time(),
                held=one.nbytes or 1,
                message=f"{one} when this attempt began, though it belongs to one before",
            )
            for one in self._held
        ]

    def keep_device_errors(self, attempt: int) -> None:
        """After an attempt that failed: keep what the driver reported since it began, as evidence."""
        self.forget()
        with self._without_fail("the look at the devices' errors"):
            if self._mode != "off" and self._has_devices():
                errors = self.device_errors()
                self._to_compute = self._to_compute or bool(errors)
                errors += self._held_errors()
                record_device_errors(self._control, attempt, self.node, errors)

    def device_errors(self) -> list[DeviceError]:
        gpus = ask_gpus(EVIDENCE_TIMEOUT)
        if not gpus.problem:
            self._asked = (time.monotonic(), gpus)
            names = names_of(gpus.devices, visible_devices())
            self._note_use([gpu for gpu in gpus.devices if gpu.index in names])
        return [*self._xids(gpus), *self._uncorrectable(gpus)]

    def _xids(self, gpus: Gpus) -> list[DeviceError]:
        log = read_kernel_log(kmsg=self._kernel_log)
        if log.problem or self._before is None:
            return []
        names = names_of(gpus.devices, visible_devices())
        known = {gpu.bus: names.get(gpu.index, "") for gpu in gpus.devices if gpu.bus} | self._device_at
        return [
            DeviceError(
                node=self.node,
                device=known.get(error.bus, ""),
                at=error.at,
                xid=error.number,
                message=error.describe(),
            )
            for error in log.errors
            # A device that is known, but is not ours, is another job's.
            if error.identity not in self._before and (error.bus not in known or known[error.bus])
        ]

    def _uncorrectable(self, gpus: Gpus) -> list[DeviceError]:
        """Memory errors that ECC could not correct, counted since the last look."""
        names, found = names_of(gpus.devices, visible_devices()), []
        for gpu in gpus.devices:
            key, now = gpu.uuid or str(gpu.index), gpu.uncorrected
            before = self._uncorrected.get(key)
            if now is not None:
                self._uncorrected[key] = now
            if before is not None and now is not None and now > before and gpu.index in names:
                text = f"{now - before} memory errors beyond correction on gpu {gpu.index}"
                found.append(
                    DeviceError(
                        node=self.node,
                        device=names[gpu.index],
                        at=time.time(),
                        uncorrectable=True,
                        message=text,
                    )
                )
        return found

    def _has_devices(self) -> bool:
        return present() and bool(visible_devices())
