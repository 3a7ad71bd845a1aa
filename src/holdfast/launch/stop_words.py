"""What the ranks of one node have said about stopping, in one attempt."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.worker.beat_messages import Halted, Promise, Wish

StopWord = Wish | Promise | Halted


@dataclass
class StopWords:
    """By global rank. The first word of each kind stays, but for a wish that has become urgent."""

    wishes: dict[int, Wish] = field(default_factory=dict)
    promises: dict[int, int] = field(default_factory=dict)
    """The step that it does not go past before it knows where all stop."""
    halted: dict[int, int] = field(default_factory=dict)
    """The step after which it stopped, its state being safe."""

    def take(self, rank: int, word: StopWord) -> None:
        if isinstance(word, Wish):
            if word.now or rank not in self.wishes:
                self.wishes[rank] = word
        elif isinstance(word, Promise):
            self.promises.setdefault(rank, word.step)
        else:
            self.halted.setdefault(rank, word.step)

    def copy(self) -> StopWords:
        return StopWords(dict(self.wishes), dict(self.promises), dict(self.halted))


@dataclass(frozen=True)
class Hearing:
    """Who of a node's ranks can be spoken to."""

    there: frozenset[int]
    """Has said hello and listens."""
    done: frozenset[int]
    """Has said that its training is over."""
    defer: frozenset[int] = frozenset()
    """Takes SIGTERM as a request to save together: only SIGKILL ends it at once."""
