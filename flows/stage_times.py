"""How long each stage takes: seconds or a distribution, or what a past run recorded.

All are drawn before a simulation starts, each stage's from its own seed: schedules are compared on the same times.
"""

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from conf.errors import ConfigError
from flows.steps import Took


@dataclass(frozen=True)
class Constant:
    seconds: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` times, in seconds."""
        return np.full(count, self.seconds)

    def quantile(self, u: np.ndarray) -> np.ndarray:
        return np.full(len(u), self.seconds)


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return self.quantile(rng.random(count))

    def quantile(self, u: np.ndarray) -> np.ndarray:
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True)
class LogNormal:
    mean: float
    sd: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return self.quantile(rng.random(count))

    def quantile(self, u: np.ndarray) -> np.ndarray:
        variance = math.log(1 + (self.sd / self.mean) ** 2)
        normal = NormalDist(math.log(self.mean) - variance / 2, math.sqrt(variance))
        inside = np.clip(u, 1e-12, 1 - 1e-12)  # the quantiles of 0 and 1 are infinite
        return np.exp([normal.inv_cdf(p) for p in inside])


Distribution = Constant | Uniform | LogNormal


@dataclass(frozen=True)
class Recorded:
    """What a stage took in a run, in the order of the iterations in which it ran."""

    took: Sequence[Took]

    def first(self, count: int) -> list[Took]:
        """From the start again where they are too few."""
        return [self.took[i % len(self.took)] for i in range(count)]


Time = Distribution | Recorded


def parse_time(text: str, what: str) -> Distribution:
    """`40`, `lognormal(MEAN,SD)` or `uniform(LOW,HIGH)`, in seconds. Raises ConfigError."""
    try:
        if match := re.fullmatch(r"(lognormal|uniform)\(([^,]+),([^,]+)\)", text.replace(" ", "")):
            first, second = float(match[2]), float(match[3])
            ordered = (
                0 < first < math.inf and 0 < second < math.inf
                if match[1] == "lognormal"
                else 0 <= first <= second < math.inf
            )
            if ordered:
                return LogNormal(first, second) if match[1] == "lognormal" else Uniform(first, second)
        elif 0 <= float(text) < math.inf:
            return Constant(float(text))
    except ValueError:
        pass
    raise ConfigError(
        f"{what} must be seconds >= 0, lognormal(MEAN,SD) with both > 0, or uniform(LOW,HIGH), got {text!r}"
    )


def longest(tail: Distribution, samples: int, rng: np.random.Generator, count: int) -> np.ndarray:
    """The longest of `samples` draws, `count` times, from one draw each: the quantile of u^(1/samples)."""
    return tail.quantile(rng.random(count) ** (1 / samples))


def generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
