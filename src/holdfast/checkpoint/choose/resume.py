"""Resume: the whole group goes down the ladder together and takes the first rung that all can use.

Guarantee: every rank ends with the same checkpoint, or every rank raises; nobody waits without a deadline.

Rank 0 proposes a rung through the store. Every rank loads and verifies what it needs of it and answers. If
all answers are good, rank 0 writes the attempt's head and then fixes the decision, which the others read; if
one is bad, it proposes the next rung. There is no collective in this: a group that cannot form one can still
decide, and a rank that dies is noticed when the deadline of the rank waiting for it passes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from holdfast.base import Bounded, plural, read_regular, size
from holdfast.checkpoint import Owner, open_root, reading
from holdfast.checkpoint.choose.ladder import (
    ALARM,
    AVOIDED,
    BAD,
    FRESH,
    PROBE_SIZE,
    USED,
    Ladder,
    Rung,
    RungLook,
    RungOutlook,
    look_at,
    refuse_named,
    take_inventory,
    walk_down,
)
from holdfast.checkpoint.choose.load import Heads, LoadedState, load, load_stock
from holdfast.checkpoint.choose.taking import load_foreign
from holdfast.checkpoint.copies import AssembledShards, Assembly, LocalInventory
from holdfast.checkpoint.foreign import ForeignLayout, name_function, recognise
from holdfast.checkpoint.format import (
    MANIFEST,
    METADATA,
    CheckpointName,
    CheckpointRoot,
    Reason,
    is_url,
    parse_name,
)
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.remote import (
    Remote,
    RemoteError,
    RemoteUnavailableError,
    open_remote,
    pull,
    pull_named,
    pull_standing_of,
)
from holdfast.checkpoint.state import LeftOut, Tracked, misfit, tracked_by_nobody
from holdfast.errors import CheckpointError, HoldfastError, IncompleteStateError, NoValidRungError, UsageError
from holdfast.health import try_storage
from holdfast.journal import JournalWriter
from holdfast.journal.events import (
    CopyFetched,
    DecisionMade,
    RejectedOption,
    Resumed,
    RungRejected,
    StorageAlarm,
    Warned,
)
from holdfast.record import (
    ControlDirectory,
    Decisions,
    Fence,
    Group,
    HeadRecord,
    Pin,
    Standing,
    StandingBook,
    hand_out,
    note_root,
    pinned,
    read_key,
    read_timeline,
    use_up,
    write_head,
)

log = logging.getLogger("holdfast.checkpoint")

SOURCES = {"own": "on the nodes themselves", "peer": "from peers", "global": "from the checkpoint root"}
HEADS = (MANIFEST, METADATA)
HANDED_OUT_FROM = 4 << 20
"""Bytes of these from which on rank 0 reads them for all."""
PATIENCE = 60.0
"""Seconds that the storage has to store and give back a little data."""

T = TypeVar("T")


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    rung: Rung | None
    """None: start fresh, unless `refusal` says why not."""
    path: str = ""
    refusal: str = ""
    asks: Literal["", "holds", "verified"] = ""
    """If set, the places say what they hold of it, by their records or after reading it; nothing is loaded,
    and no verdict follows."""
    assembly: str = ""
    """Path of the list that says which place each shard comes from; empty: all lie under `path`."""
    fresh: list[str] = []
    """Parts that begin anew, whatever the checkpoint holds of them."""
    directory: str = ""
    """With `assembly`: where the global tier has the checkpoint, if it has it."""
    handed_out: bool = False
    """Whether rank 0 reads for all what is about the whole checkpoint: they meet for that at once."""


class LoadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    problem: str = ""
    """Why this rank cannot use the rung's bytes; another rung may do."""
    unfit: str = ""
    """Why the checkpoint does not fit the script; no other rung will do."""
    samples: int = 0
    tokens: int = 0
    """This rank's share of the whole job's samples and tokens."""
    bad: list[str] = []
    """Copies whose bytes were found wrong while other copies could be used."""
    used: dict[str, int] = {}
    """Bytes that were read, by source, where there was more than one: own, peer, global."""
    left_out: LeftOut = LeftOut()
    """What this rank does not track of what the checkpoint holds."""


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a proposal, for all ranks."""

    go_on: bool
    """Whether another proposal follows."""
    unfit: str = ""
    samples: int = 0
    tokens: int = 0
    """Of all ranks together, according to what they loaded."""


class ResumeDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed once per attempt, durable before anyone trains."""

    chosen: str
    step: int
    rung: Rung | None
    rejected: list[RejectedOption]
    evidence: list[str]


class Resumer:
    """Resumes one attempt."""

    def __init__(
        self,
        *,
        control: ControlDirectory,
        fence: Fence,
        group: Group,
        root: CheckpointRoot,
        attempt: int,
        tracked: Tracked,
        journal: JournalWriter,
        load_timeout: float,
        decision_timeout: float,
        remote: Callable[[], Remote] | None = None,
        retry_seconds: float = 120.0,
        avoid: Collection[str] = (),
        local: LocalInventory | None = None,
        local_unseen: bool = False,
        needs_data: bool = False,
        fresh_parts: Sequence[str] = (),
        began: str = "",
        names: str = "",
    ) -> None:
        """`remote` opens, on rank 0, the store to fetch a rung from if its local copy is missing or bad.

        `avoid` names rungs that an ordinary resume of this attempt leaves out, by a decision of recovery.
        `local` knows what the places of the local tier hold, if there is one; `local_unseen`: there is one,
        but this attempt cannot use it. `needs_data`: this script has a data feed, so a checkpoint must hold
        its position. `fresh_parts` begin anew if the run begins from a rung that it was told to begin from:
        one that is named now, one that lies elsewhere, or the one named `began`, from which it began before.
        `names`: the function that says which stored name is which, for checkpoints of other projects.
        """
        self._control = control
        self._fence = fence
        self._group = group
        self._root = root
        self._attempt = attempt
        self._tracked = tracked
        self._journal = journal
        self._load_timeout = load_timeout
        self._decision_timeout = decision_timeout
        self._avoid = avoid
        self._local = local
        self._local_unseen = local_unseen
        self._needs_data = needs_data
        self._fresh_parts = list(fresh_parts)
        self._began = began
        self._names = names
        self._claims: set[CheckpointName] = set()
        """On rank 0: what the local tier may hold, by its records."""
        self._numbers = itertools.count()
        self._bad_copies: list[str] = []
        """On rank 0: copies of what is proposed whose bytes are wrong, whether or not others can be used."""
        self._sources: list[str] = []
        """Where the shards of what is proposed come from, in words."""
        self.taken: Proposal | None = None
        """What was loaded in the end, and from where."""
        self.counted = (0, 0)
        """Samples and tokens of all ranks together, according to what they loaded."""
        self._pin: Pin | None = None
        """What an operator pinned, as rank 0 found it at the start of the search."""
        self._decisions = Decisions(control, fence, attempt, group.store)
        self._fetcher = Fetcher(
            remote=remote,
            root=root,
            run=control.run_id,
            fence=fence,
            attempt=attempt,
            journal=journal,
            timeout=load_timeout,
            retry_seconds=retry_seconds,
        )

    def resume(self, resume_from: str, *, force: bool) -> tuple[ResumeDecision, LoadedState | None]:
        """The group's choice, and this rank's verified state (None for a fresh start)."""
        started = time.monotonic()
        if self._local is not None:
            self._local.report()
        if self._group.is_coordinator:
            decision, state = self._lead(resume_from, force=force)
            name = decision.rung.name if decision.rung else None
            seconds = time.monotonic() - started
            saved_by = state.manifest.world.size if state is not None and state.manifest else 0
            self._journal.write(
                Resumed(
                    checkpoint=name,
                    step=decision.step,
                    seconds=seconds,
                    world_size=self._group.world_size,
                    saved_by=saved_by,
                    bad_copies=self._bad_copies if name is not None else [],
                )
            )
            return decision, state
        return self._follow()

    # --- rank 0 ---------------------------------------------------------------------------------------------

    def _lead(self, resume_from: str, *, force: bool) -> tuple[ResumeDecision, LoadedState | None]:
        try:
            ladder = self._look(resume_from, force=force)
        except HoldfastError as error:
            self._propose(Proposal(rung=None, refusal=str(error)))
            raise
        walk = walk_down(ladder.rungs, partial(self._look_at, resume_from=resume_from), self._refuse)
        bad = [RejectedOption(row.name, row.reasons) for row in walk.rows if row.verdict == BAD]
        rejected = [*ladder.rejected, *bad]
        if walk.held is not None:
            number, rung, state = walk.held
            return self._fix(number, rung, rejected, resume_from), state
        if ladder.may_start_fresh:
            number = self._propose(Proposal(rung=None))
            return self._fix(number, None, rejected, resume_from), None
        refusal = self._refusal(ladder, rejected, resume_from)
        self._journal.write(
            DecisionMade(
                about="resume", chosen="refused", evidence=[refusal.splitlines()[0]], rejected=rejected
            )
        )
        self._propose(Proposal(rung=None, refusal=refusal))
        raise NoValidRungError(refusal)

    def _look_at(self, rung: Rung, resume_from: str) -> RungLook[tuple[int, Rung, LoadedState]]:
        """Have all ranks load it. If they could: the number of the proposal, and this rank's state."""
        problems: list[str] = []
        self._bad_copies = []
        while True:
            offer, found = self._offer(rung)
            problems += found
            if offer is not None and offer.assembly:
                self._bad_copies += found
            if offer is not None:
                fresh, handed_out = self._fresh_from(rung, resume_from), self._hands_out(offer)
                offer = msgspec.structs.replace(offer, fresh=fresh, handed_out=handed_out)
                number = self._propose(offer)
                state, mine = self._try(offer)
                found, unfit = self._gather(number, mine, state.names if state is not None else ())
                if unfit:
                    self._conclude(number, Conclusion(go_on=False, unfit=unfit))
                    raise IncompleteStateError(unfit)
                if not found and state is not None:
                    self.taken = offer
                    row = RungOutlook(name=rung.name, step=rung.step, verdict=USED)
                    return RungLook(row, (number, rung, state))
                self._conclude(number, Conclusion(go_on=True))
                problems += found + self._find_bad_copies(offer)
            why_not = self._fetcher.fetch(rung, problems)
            if why_not is not None:
                reasons = problems + why_not
                return RungLook(RungOutlook(name=rung.name, step=rung.step, verdict=BAD, reasons=reasons))

    def _refuse(self, row: RungOutlook, bad: list[str]) -> None:
        assert row.step is not None
        self._journal.write(RungRejected(checkpoint=row.name, step=row.step, reasons=row.reasons))
        if refusal := blame_storage(self._journal, bad, self._root.path):
            self._propose(Proposal(rung=None, refusal=refusal))
            raise NoValidRungError(refusal)

    def _fresh_from(self, rung: Rung, resume_from: str) -> list[str]:
        named = resume_from != "auto" and self._pin is None
        return self._fresh_parts if named or rung.path or rung.name == self._began else []

    def _hands_out(self, offer: Proposal) -> bool:
        """Whether rank 0 alone is to read the manifest and `.metadata`.

        Of a checkpoint of very many ranks each would read more there than of its own share.
        """
        if self._group.process_group is None or offer.assembly or offer.rung is None:
            return False
        if not offer.rung.manifest:
            return False
        with contextlib.suppress(OSError):
            return sum((Path(offer.path) / name).stat().st_size for name in HEADS) >= HANDED_OUT_FROM
        return False

    def _offer(self, rung: Rung) -> tuple[Proposal | None, list[str]]:
        """How a rung can be loaded (None if it cannot), and what was found wrong with copies of it."""
        self._sources = []
        path, inspection = look_at(rung, self._root, self._control.run_id)
        problems = [str(problem) for problem in inspection.problems]
        whole = Proposal(rung=rung, path=str(path))
        name = CheckpointName(rung.step, rung.id)
        if self._local is None or name not in self._claims:
            return (None, problems) if problems else (whole, [])
        home = self._local.home(name, rung.manifest, path)
        if home is None:
            problems.append("unreadable-manifest: the local tier's manifest is gone or not the expected one")
            return (None, problems) if inspection.problems else (whole, problems)
        in_global = not inspection.problems
        number, assembly, bad = self._ask_places(rung, home, "holds", in_global=in_global)
        if not assembly.complete:
            shown = ", ".join(assembly.missing[:3])
            bad.append(f"missing {plural(len(assembly.missing), 'file')} on all nodes, first {shown}")
            return None, bad + problems
        self._sources = self._local.describe(name, assembly)
        written = self._local.publish(number, assembly)
        return Proposal(rung=rung, path=str(home), assembly=written, directory=str(path)), bad

    def _ask_places(
        self, rung: Rung, home: Path, what: Literal["holds", "verified"], *, in_global: bool
    ) -> tuple[int, Assembly, list[str]]:
        """The question's number, what the places hold of a rung, and what they found bad in it."""
        assert self._local is not None
        number = self._propose(Proposal(rung=rung, path=str(home), asks=what))
        self._answer_as_place(number, rung, home, what)
        return number, *self._local.gather(number, manifests.read(home)[0], in_global=in_global)

    def _find_bad_copies(self, offer: Proposal) -> list[str]:
        """Some rank found no right bytes. Those who hold copies find out which are wrong, for all resumes."""
        if not offer.assembly or offer.rung is None:
            return []
        return self._ask_places(offer.rung, Path(offer.path), "verified", in_global=False)[2]

    def _look(self, resume_from: str, *, force: bool) -> Ladder:
        """The ladder, after making sure that the root can be written: better now than at the first save."""
        try:
            open_root(self._root)
            self._fetcher.open()
            self._note_root()
            self._claims = self._local.claims() if self._local is not None else set()
            self._pin = pinned(self._control)
            if self._pin is None and is_url(resume_from):
                if not force and (ladder := self._refuse_url(resume_from)) is not None:
                    return ladder
                resume_from = str(self._fetcher.named(resume_from))
            asks = self._pin is not None or resume_from != "fresh"
            ladder = take_inventory(
                self._control,
                self._root,
                resume_from,
                force=force,
                copies={*self._fetcher.names(), *self._claims} if asks else (),
                avoid=self._avoid,
                pin=self._pin,
                local_unseen=self._local_unseen,
            )
            for rung in ladder.avoided:
                self._journal.write(RungRejected(checkpoint=rung.name, step=rung.step, reasons=[AVOIDED]))
            return ladder
        except OSError as error:
            raise UsageError(
                f"the checkpoint root {self._root.path} cannot be used: {error}. "
                "Set checkpoint.root to a directory that this job can write"
            ) from error

    def _refuse_url(self, url: str) -> Ladder | None:
        """The empty ladder of a remote copy that was condemned; learned before its bytes are fetched."""
        path = self._fetcher.standing_of(url)
        name = parse_name(path.name)
        assert name is not None
        return refuse_named(
            Rung(name=str(name), step=name.step, id=name.id, manifest="", path=str(path)), self._control
        )

    def _note_root(self) -> None:
        """From now on all who judge a checkpoint find its root; earlier judgements are published now."""
        note_root(self._control, self._root.path, self._fetcher.url)
        book = StandingBook(self._control, self._root.path)
        for problem in book.publish_all(self._fence, map(str, self._root.names())):
            self._journal.write(Warned(message=problem))

    def _gather(self, number: int, mine: LoadAnswer, names: Sequence[str] = ()) -> tuple[list[str], str]:
        """What is wrong, each thing once with the ranks that found it, and the first misfit.

        `names`: of all that the checkpoint holds and some rank has to track.
        """
        left_out = [mine.left_out]
        found_by: dict[str, list[int]] = {mine.problem: [0]} if mine.problem else {}
        unfit = mine.unfit
        used = Counter(mine.used)
        self._note_bad(mine.bad)
        samples, tokens = mine.samples, mine.tokens
        deadline = time.monotonic() + self._load_timeout
        for rank in range(1, self._group.world_size):
            left = max(0.0, deadline - time.monotonic())
            what = f"rank {rank}'s answer to the proposed checkpoint"
            raw = read_key(self._group.store, f"resume/{number}/answer/{rank}", left, what)
            answer = msgspec.json.decode(raw, type=LoadAnswer)
            if answer.problem:
                found_by.setdefault(answer.problem, []).append(rank)
            unfit = unfit or (f"rank {rank}: {answer.unfit}" if answer.unfit else "")
            left_out.append(answer.left_out)
            used.update(answer.used)
            samples, tokens = samples + answer.samples, tokens + answer.tokens
            self._note_bad(answer.bad)
        self.counted = samples, tokens
        if not found_by and not unfit and (nobody := tracked_by_nobody(left_out, names)):
            where = "on any rank" if self._group.world_size > 1 else ""
            unfit = str(
                misfit([f"{name}: in the checkpoint, but not tracked {where}".rstrip() for name in nobody])
            )
        if used:
            read = [f"{size(used[source])} {where}" for source, where in SOURCES.items() if used[source]]
            self._sources.append(f"read {', '.join(read)}")
        wrong = {text.split()[1].rstrip(":") for text in found_by if text.startswith(f"{Reason.ALTERED} ")}
        problems = [  # a copy that one rank found altered is gone for the next one, which reports only that
            f"{problem} (found by {_ranks(ranks)})"
            for problem, ranks in found_by.items()
            if not any(problem.startswith(f"{Reason.MISSING} {path}:") for path in wrong)
        ]
        return problems, unfit

    def _note_bad(self, found: list[str]) -> None:
        """Note each copy once: two ranks that read different parts of it report different bytes."""
        known = {text.partition(": bytes ")[0] for text in self._bad_copies}
        self._bad_copies += [text for text in found if text.partition(": bytes ")[0] not in known]

    def _fix(
        self, number: int, rung: Rung | None, rejected: list[RejectedOption], resume_from: str
    ) -> ResumeDecision:
        decision = ResumeDecision(
            chosen=rung.name if rung else FRESH,
            step=rung.step if rung else 0,
            rung=rung,
            rejected=rejected,
            evidence=self._evidence(rung, resume_from),
        )
        head = HeadRecord(
            attempt=self._attempt,
            checkpoint=(rung.id or None) if rung else None,
            step=decision.step,
            source=rung.path if rung else "",
        )
        write_head(self._control, self._fence, head)
        decision = self._decisions.decide("resume", ResumeDecision, lambda: decision)
        if self._pin is not None:
            use_up(self._control, self._fence, self._pin, self._attempt)
        self._record_standing(rung)
        self._journal.write(
            DecisionMade(
                about="resume", chosen=decision.chosen, evidence=decision.evidence, rejected=rejected
            )
        )
        samples, tokens = self.counted
        self._conclude(number, Conclusion(go_on=False, samples=samples, tokens=tokens))
        return decision

    def _record_standing(self, rung: Rung | None) -> None:
        """What was loaded is verified; what the new head has left behind is abandoned."""
        book = StandingBook(self._control, self._root.path)
        if rung is not None and rung.id and rung.manifest:
            name = str(CheckpointName(rung.step, rung.id))
            why = f"every digest matched when attempt {self._attempt} loaded it"
            if book.of(name) in (Standing.COMMITTED, Standing.ABANDONED):
                book.append(self._fence, name, Standing.VERIFIED, [why])
        source = f"step {rung.step}" if rung else "nothing"
        for record in read_timeline(self._control).abandoned:
            name = str(CheckpointName(record.step, record.id))
            if book.of(name) in (Standing.COMMITTED, Standing.VERIFIED, Standing.PROVEN):
                why = f"attempt {self._attempt} went on from {source} instead"
                book.append(self._fence, name, Standing.ABANDONED, [why])

    def _evidence(self, rung: Rung | None, resume_from: str) -> list[str]:
        asked = "" if resume_from == "auto" else f"resume_from = {resume_from!r}; "
        if self._pin is not None:
            asked = f"pinned by {self._pin.request.describe()}; "
        if rung is None:
            return [f"{asked}the run has no checkpoint on its lineage"]
        if not rung.manifest:
            other = recognise(Path(rung.path))
            if other is not None and other.layout is not ForeignLayout.DCP:
                return [f"{asked}a checkpoint of another project ({other.layout}); no digests to check"]
            return [f"{asked}a plain DCP directory, complete by its metadata; no digests to check"]
        which = "the newest usable checkpoint" if self._pin is None else "the pinned checkpoint"
        found = f"{asked}{which}; all digests matched on {self._group.world_size} ranks"
        return [found, *self._sources]

    def _refusal(self, ladder: Ladder, rejected: list[RejectedOption], resume_from: str) -> str:
        reasons = "\n".join(f"  {option.option}: {'; '.join(option.why)}" for option in rejected)
        if self._pin is not None:
            what = f"the pinned checkpoint {self._pin.checkpoint} may not be used"
            return (
                f"{what} (pinned by {self._pin.request.describe()}), under {self._root.path}\n{reasons}\n"
                f"Pin another one, or remove the pin with `holdfast control unpin {self._control.path}`"
            )
        what = f"no checkpoint may be used (resume_from = {resume_from!r}, {len(ladder.rungs)} were tried)"
        return (
            f"{what} under {self._root.path}\n{reasons or '  none was found'}\n"
            "Look with `holdfast ckpt ls`; name one with checkpoint.resume_from, or start over with "
            "resume_from = 'fresh', which leaves these where they are"
        )

    def _propose(self, proposal: Proposal) -> int:
        """Put a proposal to the others; returns its number."""
        number = next(self._numbers)
        self._group.store.set(f"resume/{number}/proposal", msgspec.json.encode(proposal).decode())
        return number

    def _conclude(self, number: int, verdict: Conclusion) -> None:
        self._group.store.set(f"resume/{number}/verdict", msgspec.json.encode(verdict).decode())

    # --- every other rank -----------------------------------------------------------------------------------

    def _follow(self) -> tuple[ResumeDecision, LoadedState | None]:
        number = 0
        while True:
            proposal = self._read(f"resume/{number}/proposal", Proposal, "rank 0's proposal")
            if proposal.refusal:
                raise NoValidRungError(proposal.refusal)
            state, rung = None, proposal.rung
            if rung is not None and proposal.asks:
                self._answer_as_place(number, rung, Path(proposal.path), proposal.asks)
                number += 1
                continue
            if rung is not None:
                state, answer = self._try(proposal)
                key = f"resume/{number}/answer/{self._group.rank}"
                self._group.store.set(key, msgspec.json.encode(answer).decode())
            verdict = self._read(f"resume/{number}/verdict", Conclusion, "rank 0's verdict")
            if verdict.unfit:
                raise IncompleteStateError(verdict.unfit)
            if not verdict.go_on:
                self.taken = proposal
                self.counted = verdict.samples, verdict.tokens
                timeout = self._decision_timeout
                return self._decisions.await_decision("resume", ResumeDecision, timeout), state
            number += 1

    def _read(self, key: str, kind: type[T], what: str) -> T:
        timeout = self._decision_timeout + self._load_timeout
        return msgspec.json.decode(read_key(self._group.store, key, timeout, what), type=kind)

    def _answer_as_place(self, number: int, rung: Rung, home: Path, what: str) -> None:
        assert self._local is not None  # all ranks have it, or none has
        name = CheckpointName(rung.step, rung.id)
        self._local.answer(number, name, rung.manifest, home, thorough=what == "verified")

    def _try(self, proposal: Proposal) -> tuple[LoadedState | None, LoadAnswer]:
        """Load a rung; whatever is wrong with it becomes an answer, so that no rank goes silent."""
        rung, path = proposal.rung, Path(proposal.path)
        assert rung is not None
        try:
            heads = self._heads(path) if proposal.handed_out else None  # first: the others wait for it
            with reading(path), self._shards(rung, proposal) as shards:
                # `reading`: a rung named by path may be another run's, whose lease we do not hold.
                if rung.manifest:
                    rank, world = self._group.rank, self._group.world_size
                    state = load(
                        path,
                        rung.manifest,
                        self._tracked,
                        rank,
                        world,
                        shards=shards,
                        needs_data=self._needs_data,
                        fresh=proposal.fresh,
                        heads=heads,
                    )
                    counted = state.own["counters"]
                    return state, LoadAnswer(
                        samples=counted["samples"],
                        tokens=counted["tokens"],
                        left_out=state.left_out,
                        used=dict(shards.used) if shards is not None else {},
                        bad=shards.bad if shards is not None else [],
                    )
                found = recognise(path)
                if found is not None and found.layout is not ForeignLayout.DCP:
                    foreign = load_foreign(
                        found,
                        self._tracked,
                        self._group.rank,
                        self._group.world_size,
                        needs_data=self._needs_data,
                        fresh=proposal.fresh,
                        names=name_function(self._names),
                    )
                    return foreign, LoadAnswer()
                stock = load_stock(path, self._tracked, needs_data=self._needs_data, fresh=proposal.fresh)
                return stock, LoadAnswer()
        except CheckpointError as error:
            return None, LoadAnswer(problem=str(error))
        except HoldfastError as error:
            return None, LoadAnswer(unfit=str(error))
        except OSError as error:
            return None, LoadAnswer(problem=f"unreadable: {error}")
        except Exception as error:  # noqa: BLE001 - a script that cannot take the state must not leave peers waiting
            return None, LoadAnswer(unfit=f"{type(error).__name__} while loading {rung.name}: {error}")

    def _heads(self, path: Path) -> Heads:
        """What rank 0 reads for all. Whatever goes wrong there, the others are not left waiting for it."""
        found: list[bytes | None] = [None, None]
        failed: Exception | None = None
        if self._group.is_coordinator:
            try:
                found = [read_regular(path / name, manifests.MAX_MANIFEST_BYTES) for name in HEADS]
            except (OSError, MemoryError) as error:
                failed = error
        try:
            manifest, metadata = [hand_out(self._group, one) for one in found]
        except RuntimeError as error:
            raise CheckpointError(f"unreadable: rank 0 could not hand {path} out: {error}") from error
        if failed is not None or manifest is None or metadata is None:
            raise CheckpointError(f"unreadable: {failed or f'rank 0 could not read {path}'}") from failed
        return Heads(manifest, metadata)

    @contextlib.contextmanager
    def _shards(self, rung: Rung, proposal: Proposal) -> Iterator[AssembledShards | None]:
        """Where this rank gets the shards from, if not from the directory itself."""
        if not proposal.assembly or self._local is None:
            yield None
            return
        name = CheckpointName(rung.step, rung.id)
        shards = self._local.shards(name, proposal.assembly, Path(proposal.directory))
        try:
            yield shards
        finally:
            shards.close()


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def blame_storage(journal: JournalWriter, bad: list[str], directory: Path) -> str:
    """Why no other rung may be tried after these `bad` ones in a row; empty if one may.

    Two in a row that cannot be used, whatever is wrong with them (wrong bytes, missing shards, nothing to
    read), suggest that the fault lies not in them but in the storage. So, before anything more is believed,
    something is written there, made durable, moved, read back from the disk and not from memory, and
    compared.
    """
    if len(bad) != ALARM:
        return ""
    trying = Bounded(lambda: try_storage(directory, PROBE_SIZE).problem, "probe")
    found = trying.result() if trying.ended(PATIENCE) else f"{directory} did not answer within {PATIENCE:g} s"
    journal.write(StorageAlarm(checkpoints=bad, place=str(directory), probe=found))
    alarm = f"{' and '.join(bad)}, one after the other, cannot be used, so {directory} was tried"
    if not found:
        log.warning("holdfast: storage alarm: %s; it works, and the next older checkpoint is tried", alarm)
        return ""
    return (
        f"storage alarm: {alarm}: {found}. Nothing else stored there is trusted, and nothing was "
        "changed. Repair the storage, or set checkpoint.root to another copy, then start again"
    )


# What a resume asks of the remote: to say which rungs it could fetch, and to fetch one.
#
# Guarantee: all that is fetched during one resume takes at most `timeout` seconds in total, so that the other
# ranks, which wait for the next proposal longer than that, are not left behind. A rung is fetched at most
# once.


def open_at_start(url: str, *, retry_seconds: float, insist: bool, journal: JournalWriter) -> Remote:
    """The remote of a starting run, seen to work: an error names checkpoint.remote_root and what to do.

    Without `insist` (a restart of a run that already trains) a store that does not answer is only a warning:
    the local checkpoints may do, and copying begins when it answers again. What no wait can cure is always an
    error.
    """
    remote = open_remote(url, retry_seconds=retry_seconds)
    try:
        remote.check()
    except RemoteUnavailableError as error:
        if insist:
            raise
        journal.write(Warned(message=f"going on without remote copies for now: {error}"))
    return remote


class Fetcher:
    """Fetches for one resume; without a remote it only says that there is none."""

    def __init__(
        self,
        *,
        remote: Callable[[], Remote] | None,
        root: CheckpointRoot,
        run: str,
        fence: Fence,
        attempt: int,
        journal: JournalWriter,
        timeout: float,
        retry_seconds: float,
    ) -> None:
        self._opening = remote
        self._remote: Remote | None = None
        self._root = root
        self._fence = fence
        self._owner = Owner(run=run, attempt=attempt, epoch=fence.epoch)
        self._journal = journal
        self._left = timeout
        self._retry_seconds = retry_seconds
        self._names: set[CheckpointName] = set()
        self._tried: set[str] = set()

    def open(self) -> None:
        """Open the remote, if there is one; an error says what to set or to do."""
        if self._opening is not None and self._remote is None:
            started = time.monotonic()
            self._remote = self._opening()
            self._left -= time.monotonic() - started

    def names(self) -> set[CheckpointName]:
        """Checkpoints that have a copy; none, with a warning, if the remote does not answer."""
        if self._remote is not None:
            started = time.monotonic()
            try:
                self._names = set(self._remote.names(started + self._left))
            except RemoteError as error:
                self._journal.write(Warned(message=f"resuming without remote copies: {error}"))
            self._left -= time.monotonic() - started
        return self._names

    def fetch(self, rung: Rung, problems: list[str]) -> list[str] | None:
        """None if a good copy of the rung is in place now; else what to add to its problems."""
        name = parse_name(rung.name)
        on_line = bool(rung.manifest) and not rung.path
        if self._remote is None or name is None or name not in self._names or not on_line:
            return []
        if rung.name in self._tried:
            return ["its remote copy was fetched, and could not be used either"]
        self._tried.add(rung.name)
        started = time.monotonic()
        try:
            pulled = pull(
                self._remote,
                name,
                self._root,
                fence=self._fence,
                owner=self._owner,
                expected=rung.manifest,
                deadline=started + self._left,
            )
        except RemoteError as error:
            return [str(error)]
        except OSError as error:
            return [f"its remote copy could not be stored here: {error}"]
        finally:
            self._left -= time.monotonic() - started
        self._journal.write(
            CopyFetched(
                checkpoint=rung.name,
                step=rung.step,
                remote=self._remote.url,
                bytes=pulled.copied.bytes,
                seconds=pulled.copied.seconds,
                because=problems,
                quarantine=str(pulled.quarantine or ""),
            )
        )
        return None

    @property
    def url(self) -> str:
        """The remote's address; empty if there is none, or it was not opened yet."""
        return self._remote.url if self._remote is not None else ""

    def standing_of(self, url: str) -> Path:
        """Learn how the checkpoint that a URL names was judged; returns where it would be stored."""
        started = time.monotonic()
        try:
            return pull_standing_of(url, self._root, timeout=self._left, retry_seconds=self._retry_seconds)
        finally:
            self._left -= time.monotonic() - started

    def named(self, url: str) -> Path:
        """The checkpoint that a URL names, as a local directory."""
        return pull_named(
            url,
            self._root,
            fence=self._fence,
            owner=self._owner,
            timeout=self._left,
            retry_seconds=self._retry_seconds,
        )
