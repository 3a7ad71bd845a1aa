"""Questions that an agent has put to its ranks, and the answers, which come in parts."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from holdfast.worker.beat_messages import ANSWER_LIMIT, Answer


@dataclass
class _Question:
    rank: int
    parts: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    answer: bytes | None = None


class Questions:
    """Those that are open. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Question] = {}
        self._numbers = itertools.count(1)

    def any(self) -> bool:
        return bool(self._open)

    def put(self, rank: int) -> int:
        """A new question to a rank: its number."""
        with self._lock:
            number = next(self._numbers)
            self._open[number] = _Question(rank)
            return number

    def await_answer(self, number: int, timeout: float) -> bytes | None:
        """The whole answer; None if there is none in time. The question is closed then."""
        with self._lock:
            question = self._open.get(number)
        if question is None:
            return None
        question.ended.wait(timeout)
        with self._lock:
            self._open.pop(number, None)
            return question.answer

    def take(self, rank: int, message: Answer) -> None:
        """A part of an answer has come. ValueError if it makes no sense."""
        with self._lock:
            question = self._open.get(message.ask)
            if question is None or question.rank != rank or question.ended.is_set():
                return  # it comes too late
            if message.parts == 0:
                question.ended.set()
                return
            if not 0 <= message.index < message.parts:
                raise ValueError(f"part {message.index} of {message.parts} of an answer")
            question.parts[message.index] = message.data
            question.size += len(message.data)
            if question.size > ANSWER_LIMIT:
                raise ValueError(f"an answer of more than {ANSWER_LIMIT} bytes")
            if len(question.parts) == message.parts:
                question.answer = b"".join(part for _, part in sorted(question.parts.items()))
                question.ended.set()

    def give_up(self, rank: int | None = None) -> None:
        """Nobody is left to answer: in this rank, or in any."""
        with self._lock:
            for question in self._open.values():
                if rank is None or question.rank == rank:
                    question.ended.set()
