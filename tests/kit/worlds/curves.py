"""Healthy loss curves of many kinds, noisy and seeded, for the tests of the checks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

STEPS = 300

Curve = Callable[[random.Random, int], float]


def _student(rng: random.Random, freedom: int) -> float:
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(freedom / 2, 2) / freedom)


def _laplace(rng: random.Random) -> float:
    return rng.expovariate(1) * rng.choice((-1, 1))


KINDS: dict[str, Curve] = {
    "a plateau with 2 % of Gaussian noise": lambda r, t: 2.5 * (1 + 0.02 * r.gauss(0, 1)),
    "a plateau with 10 % of Gaussian noise": lambda r, t: 2.5 * (1 + 0.1 * r.gauss(0, 1)),
    "almost constant": lambda r, t: 0.7 * (1 + 1e-6 * r.gauss(0, 1)),
    "a power law as of a language model": lambda r, t: (2 + 9 * (t + 1) ** -0.4) * (1 + 0.03 * r.gauss(0, 1)),
    "an exponential fall to almost zero": lambda r, t: math.exp(-t / 60) * math.exp(0.2 * r.gauss(0, 1)),
    "small batches, log-normal 0.3": lambda r, t: (1 + 3 * math.exp(-t / 80)) * math.exp(0.3 * r.gauss(0, 1)),
    "single samples, log-normal 0.6": lambda r, t: (
        (1 + 3 * math.exp(-t / 80)) * math.exp(0.6 * r.gauss(0, 1))
    ),
    "single samples, exponentially distributed": lambda r, t: 0.05 + 2 * r.expovariate(1),
    "heavy tails, Student t with 5 degrees": lambda r, t: 3 * math.exp(0.05 * _student(r, 5)),
    "two kinds of data, mixed at random": lambda r, t: r.choice((1.8, 3.6)) * (1 + 0.03 * r.gauss(0, 1)),
    "one batch in twenty is of a hard kind": lambda r, t: (
        (5.0 if r.random() < 0.05 else 2.0) * (1 + 0.08 * r.gauss(0, 1))
    ),
    "a cyclic learning rate": lambda r, t: (2 + 0.6 * math.sin(t / 12)) * (1 + 0.04 * r.gauss(0, 1)),
    "a slow rise, as of a harder curriculum": lambda r, t: (1 + t / 200) * (1 + 0.03 * r.gauss(0, 1)),
    "bumps that grow and pass": lambda r, t: (
        (2 + 0.8 * math.exp(-((t % 130 - 65) ** 2) / 120)) * (1 + 0.03 * r.gauss(0, 1))
    ),
    "around zero, Gaussian": lambda r, t: r.gauss(0, 1),
    "around zero, Laplace": lambda r, t: 0.1 * _laplace(r),
    "negative, as a log-likelihood": lambda r, t: -3 - 2 * (1 - math.exp(-t / 50)) + 0.2 * r.gauss(0, 1),
}


def curves(of_each: int) -> Iterator[tuple[str, int, list[float]]]:
    """Kind, seed and losses."""
    for kind, curve in KINDS.items():
        for seed in range(of_each):
            rng = random.Random(f"{kind}/{seed}")
            yield kind, seed, [curve(rng, step) for step in range(STEPS)]
