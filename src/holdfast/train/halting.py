"""A rank's readiness to stop when asked: brings together, for `Run`, the signals, the agreement, how its
messages travel, and the deadline.

A stop is asked for by a signal to this rank; with the launcher, by its agent, which hears of all other
requests; without it, by the stop file and the job's time limit, which rank 0 checks once a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from holdfast.cluster import TimeLimit, current_job, job_found, node_name
from holdfast.config import Settings, parse_signals
from holdfast.errors import ExitCode
from holdfast.journal import Event
from holdfast.journal.events import StopAgreed, StopAsked, StopForced, StopHastened, StopSaved, Warned
from holdfast.policy import (
    Deadline,
    Grace,
    Source,
    StopRequest,
    closer_by,
    deadline,
    does_not_fit,
    say_grace,
)
from holdfast.process import from_whom
from holdfast.record import Group
from holdfast.stop import LastStep, LoaderSignals, RankStop, StopDeadline, StopFile, StopSignals, signalled
from holdfast.train.beats import Beats, Prepare
from holdfast.train.membership import Membership
from holdfast.train.saves import Kept

log = logging.getLogger("holdfast")


class Halting:
    """One for a run's process. Everything but `close` may be called from any thread."""

    _newest: ClassVar[Halting | None] = None
    """The owner of the signals: that of the run that was made last."""

    def __init__(self, counter: Callable[[], int]) -> None:
        self.stopping = LastStep(counter)
        self.deadline = StopDeadline(self._forced)
        self._rank = int(os.environ.get("RANK", "0"))
        self._node = node_name()
        self._timeout = 0.0
        self._patience = 0.0
        self._signals: StopSignals | None = None
        self._beats: Beats | None = None
        self._over_store: RankStop | None = None
        self._member: Membership | None = None
        self._last_save: Callable[[], float | None] = lambda: None
        self._wish: StopRequest | None = None
        self._watched: TimeLimit | None = None
        self._loaders: LoaderSignals | None = None

    @property
    def takes_sigterm(self) -> bool:
        return self._signals is not None and self._signals.takes(signal.SIGTERM)

    @property
    def asked_by(self) -> str:
        """The signal, or whatever else it was, that asked for a stop; empty if nothing did."""
        if self._wish is not None:
            return self._wish.signal or self._wish.detail
        return self.stopping.why if self.stopping.asked else ""

    # --- getting ready --------------------------------------------------------------------------------------

    def watch(self, settings: Settings) -> None:
        """Take the signals, as the settings say. From here on none is lost."""
        chosen = settings.stop
        self._node = node_name(settings.launch.node_name)
        self._timeout, self._patience = chosen.shutdown_timeout_sec, settings.control.decision_timeout
        earlier, Halting._newest = Halting._newest, self
        if earlier is not None:
            earlier.give_signals_back()
        if chosen.exit_signal_handler_for_dataloader:
            self._loaders = LoaderSignals(parse_signals(chosen.exit_signal))
        if chosen.exit_signal_handler:
            self._signals = StopSignals(
                parse_signals(chosen.exit_signal),
                self._on_signal,
                self._on_second_signal,
                instead="stop.exit_signal_handler = false",
            )
            self._signals.install()

    def heed(self, beats: Beats) -> None:
        """There may be an agent: what it says about stopping counts, and it hears of this rank's signals."""
        self._beats = beats
        if self._wish is not None:
            self._pass_on(self._wish)

    def spare(self, loader: object) -> None:
        """This loader is the run's: its worker processes survive a request to stop, if that is set."""
        if self._loaders is not None:
            self._loaders.spare(loader)

    def joined(
        self, settings: Settings, group: Group, member: Membership, last_save: Callable[[], float | None]
    ) -> None:
        """The attempt is known; if no agent speaks for the group, its ranks speak to each other."""
        self._member, self._rank, self._last_save = member, group.rank, last_save
        self.deadline.write_to(member.control.attempt(member.attempt) / "stop" / f"rank_{group.rank}.txt")
        if self._beats is not None and self._beats.watched:
            return
        self._over_store = RankStop(
            self.stopping,
            group.store,
            group.rank,
            group.world_size,
            heard=self._heard,
            agreed=self._agreed,
            unanswered=self._unanswered,
            hastened=self._hasten,
            look=self._requests(settings) if group.is_coordinator else None,
        )
        if self._wish is not None:
            self._over_store.wish(self._wish)

    def _requests(self, settings: Settings) -> Callable[[], StopRequest | None]:
        """What rank 0 checks once a second."""
        file = StopFile(settings.stop_file(), self._warn)
        job, ahead = current_job(), settings.slurm.preempt_time
        limit = TimeLimit(job, ahead, on_grace=self._tell_grace, on_ending=self._ending)
        self._watched = limit
        if job is not None:
            self._write(job_found(job, job.ends_at, settings.slurm.requeue))
        return lambda: file.request() or limit.due(time.time())

    # --- being asked ----------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        wish = signalled(number, self._sender(number), self._rank, self._node)
        again = self.stopping.asked
        self.arm(self._timeout)
        self._pass_on(wish)
        if not again:  # last, because whoever reads our output may be what hangs
            log.warning("holdfast: %s: the run is to save and stop", wish.detail)

    def _on_second_signal(self, number: signal.Signals) -> None:
        saved = "its state is saved, but the process did not end: " if self.deadline.saved else ""
        sender = self._sender(number)
        why = f"{saved}{number.name}{from_whom(sender)} came to rank {self._rank} a second time"
        if self._beats is not None:
            self._beats.wish(why, number.name, now=True)
        self._forced(why, "")

    def _sender(self, number: signal.Signals) -> str:
        if self._signals is None:
            return ""
        # Under the launcher a rank's parent is its agent.
        launched = self._beats is not None and self._beats.watched
        return self._signals.sender(number, os.getppid() if launched else None)

    def ask(self, source: Source, detail: str) -> None:
        """Something in this rank itself asks for the stop. From any thread."""
        if self._wish is not None:
            return  # it is stopping already
        self._pass_on(
            StopRequest(source=source, detail=detail, node=self._node, rank=self._rank, at=time.time())
        )

    def _pass_on(self, wish: StopRequest) -> None:
        self._wish = wish
        if self._beats is not None and self._beats.watched:
            self._beats.wish(wish.detail, wish.signal, source=str(wish.source), sender=wish.sender)
        elif self._over_store is not None:
            self._over_store.wish(wish)

    def arm(self, timeout: float, lead: float | None = None) -> float | None:
        """Mind the deadline that these two set; returns the seconds until it."""
        self._tell_loaders()
        limit = deadline(timeout, lead)
        self.deadline.arm(limit.seconds, limit.why)
        return limit.seconds

    def prepare(self, asked: Prepare) -> int:
        """The agent says that the run is to stop; returns what this rank promises."""
        promise = self.stopping.prepare(asked.why, asked.ago)
        self._tell_loaders()
        self.deadline.arm(asked.seconds, f"{asked.seconds or 0.0:.0f} s after the agent said: {asked.why}")
        # Not here: the journal's disk may be slow, and everyone is waiting for the promise.
        threading.Thread(target=self._judge, args=(asked.seconds,), daemon=True).start()
        return promise

    def _tell_loaders(self) -> None:
        if self._loaders is not None:
            self._loaders.asked()

    def agree(self, step: int) -> None:
        """The agent names the step."""
        self.stopping.agreed(step)

    def _heard(self, request: StopRequest) -> None:
        """A request counts for the whole group, and there is no agent to journal it."""
        ends_at = self._watched.ends_at if self._watched is not None else None
        lead = request.lead if ends_at is None else max(0.0, ends_at - time.time())
        seconds = self.arm(self._timeout, lead)
        if self._watched is not None:
            self._watched.ask_again()
        if self._rank == 0:
            grace = self._watched.grace if self._watched is not None else None
            log.warning(
                "holdfast: asked to stop: %s; %s%s",
                request.detail,
                "no deadline is set" if seconds is None else f"{seconds:.0f} s until the hard deadline",
                closer_by(grace, request, Deadline(seconds, "")),
            )
            self._write(
                StopAsked(
                    source=str(request.source),
                    detail=request.detail,
                    node=request.node,
                    rank=request.rank,
                    sender=request.sender,
                    seconds=seconds,
                )
            )
        self._judge(seconds)

    def _tell_grace(self, grace: Grace) -> None:
        """At the start: say whether a save fits into the time the scheduler leaves when it ends the job."""
        took = self._last_save()
        told = say_grace(grace, took)
        if does_not_fit(grace, took):
            self._warn(told)
        else:
            log.info("holdfast: %s", told)

    def _ending(self, seconds: float) -> None:
        """It is the scheduler that is ending the job: rank 0 has asked it."""
        if self._over_store is not None:
            self._over_store.hasten(seconds)

    def _hasten(self, lead: float) -> None:
        """The deadline of a stop that is under way comes closer."""
        found = self.deadline.hasten(lead) if self.stopping.asked else None
        if found is not None and found.seconds is not None and self._rank == 0:
            log.warning("holdfast: the stop must be over within %.1f s: %s", found.seconds, found.why)
            self._write(StopHastened(seconds=found.seconds, why=found.why))
            self._judge(found.seconds)

    def _agreed(self, step: int) -> None:
        self._write(StopAgreed(step=step, after=round(self.stopping.seconds, 3)))

    def _unanswered(self, who: str) -> None:
        """No agreement will come: a rank that waits for it, or in a collective for the missing one, ends."""
        self.deadline.arm(0.0, f"{who}, so there is no step after which all ranks stop")

    def _judge(self, seconds: float | None) -> None:
        """Rank 0 says so when a save takes longer than there is time."""
        took = self._last_save() if self._rank == 0 else None
        if took is not None and seconds is not None and took > seconds:
            self._warn(
                f"the last save took {took:.1f} s, and {seconds:.0f} s are left until the hard deadline of "
                "the stop: the state may not be saved. Set stop.shutdown_timeout_sec, or the scheduler's "
                "warning time, to more than one save takes"
            )

    # --- the loop -------------------------------------------------------------------------------------------

    def reached(self, step: int) -> bool:
        """Whether the loop is to stop here; see `LastStep.reached`."""
        left = self.deadline.left
        return self.stopping.reached(step, self._patience if left is None else left + self._patience)

    def saved(self, kept: Kept, step: int) -> None:
        """The state of the last step is safe: however this process ends now, it has stopped as asked."""
        self.deadline.saved = True
        if self._signals is not None:
            self._signals.code = int(ExitCode.STOPPED)
        if self._rank == 0:
            after = round(self.stopping.seconds, 3)
            self._write(
                StopSaved(
                    step=step,
                    checkpoint=str(kept.name) if kept.name is not None else "",
                    already=kept.already,
                    seconds=round(kept.seconds, 3),
                    after=after,
                )
            )
            what = f"{kept.name} holds the state" if kept.name is not None else "there was nothing to save"
            if kept.name is not None and kept.name.step != step:
                what = f"its state is bad, so {kept.name} is what the run goes on from"
            log.warning("holdfast: stopped after step %d, %.1f s after it was asked: %s", step, after, what)

    def close(self, outcome: str, step: int) -> None:
        """The run is over: `finished`, stopped as `asked`, or in another way, and then the deadline stays."""
        if self._over_store is not None:
            self._over_store.close(step, failed=outcome == "failed")
        if self._watched is not None:
            with contextlib.suppress(Exception):
                self._watched.close()
        if outcome == "asked":
            return  # a repeated signal must not end this process in another way
        self.give_signals_back()
        if outcome == "finished" or not self.stopping.asked:
            self.deadline.disarm()

    def give_signals_back(self) -> None:
        if Halting._newest is self:  # it must not keep alive what the run trained
            Halting._newest = None
        if self._signals is not None:
            self._signals.close()

    # --- telling --------------------------------------------------------------------------------------------

    def _forced(self, why: str, stacks: str) -> None:
        self._write(StopForced(why=why, rank=self._rank, stacks=stacks))

    def _warn(self, told: str) -> None:
        self._write(Warned(message=told))
        log.warning("holdfast: %s", told)

    def _write(self, event: Event) -> None:
        if self._member is not None:
            self._member.journal.write(event)
