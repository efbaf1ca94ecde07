"""Bias by truncation and dropping: are the samples that were trained on like those that were issued?

Two distributions are compared, of response lengths and of rewards: F over the issued samples, G over the trained ones,
by the two-sample Kolmogorov-Smirnov statistic

    D = max_x |G(x) - F(x)|        0: alike, 1: apart (Smirnov 1939; scipy.stats.ks_2samp gives the same)

which has no unit and is at most the share of samples that was not trained on. With w_r the share and F_r the
distribution of those that were lost for reason r,

    G(x) - F(x) = sum_r w_r (G(x) - F_r(x))

so each reason has its part of D, and the parts add up. A sample that never ended has no length and one that was not
scored has no reward: D is over those that have, and `worst` is what it would be if all others lay where it is largest.
A response cut at its deadline is trained on as it is, but nobody knows how long it would have become: among the issued
ones its length is censored (Kaplan and Meier 1958), so for `worst` it is anywhere from there up.
Rewards of `surplus` groups, which nobody scored, are left out: the order of the prompts alone decided on those groups.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from conf.errors import RunError
from conf.load import load_experiment
from conf.schema import Bias
from data.ledger import Ledger
from data.manifest import Manifest
from data.refs import DatasetRef
from data.store import Store
from flows.balance import training_rows
from flows.graph import Graph, load_graph

TRAINED = "trained"
LEFT_OUT = "left_out"  # its group was trained, the sample was not
SURPLUS = "dropped/surplus"
DEADLINE = "deadline"  # finish_reason
CUT = "truncated/deadline"  # stands beside the fates, for samples of any that were cut
UNKNOWN = "unknown"  # the length of a sample that has none
LARGEST = 3  # reasons named in a warning


@dataclass(frozen=True)
class Samples:
    """Every issued sample of one iteration or more: arrays [N] in one order."""

    groups: np.ndarray  # group_id
    fates: np.ndarray  # trained, left_out or the outcome of the sample's group: dropped/<reason>
    lengths: np.ndarray  # response tokens; NaN: it never ended
    rewards: np.ndarray  # NaN: not scored
    finishes: np.ndarray  # finish_reason; empty: it never ended

    @property
    def trained(self) -> np.ndarray:
        return self.fates == TRAINED

    @property
    def ended(self) -> np.ndarray:
        return ~np.isnan(self.lengths)

    @property
    def truncated(self) -> np.ndarray:
        """Ended by anything but the model: a token limit, a deadline."""
        return self.ended & (self.finishes != "stop")

    @property
    def censored(self) -> np.ndarray:
        """Cut at a deadline: its true length is no less than the one it has. The token limit is no deadline: it is
        declared for every response alike, and what ended there is as long as a response may be."""
        return self.ended & (self.finishes == DEADLINE)

    @classmethod
    def concatenate(cls, parts: Sequence["Samples"]) -> "Samples":
        columns = ("groups", "fates", "lengths", "rewards", "finishes")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


@dataclass(frozen=True)
class Comparison:
    """Trained against issued samples by one value of each."""

    distance: float  # D of those with a value
    worst: float  # D at most, wherever the others and what is censored lie; at least `distance`
    parts: Mapping[str, float]  # fate -> its part of D; they add up to it. Negative: it counteracts
    without: Mapping[str, float]  # fate -> share of issued samples that have this fate and no value; CUT: are censored

    def accounts(self) -> Iterator[str]:
        """The fates that matter most, each with its part."""
        weight = {fate: self.parts.get(fate, 0) + self.without.get(fate, 0) for fate in {*self.parts, *self.without}}
        for fate in sorted(weight, key=lambda fate: (-weight[fate], fate))[:LARGEST]:
            known, unknown = self.parts.get(fate, 0.0), self.without.get(fate, 0.0)
            if weight[fate] >= 0.005:
                yield f"{fate} accounts for {_range(known, known + unknown)}"


def _range(low: float, high: float) -> str:
    shown = [f"{round(value, 2) + 0.0:.2f}" for value in (low, high)]  # + 0.0: no -0.00
    return " to ".join(dict.fromkeys(shown))


def compare(values: np.ndarray, fates: np.ndarray, censored: np.ndarray | None = None) -> Comparison | None:
    """Formulas above. None where no trained sample has a value. `censored` [N]: the true value is no less than this."""
    known, trained = ~np.isnan(values), fates == TRAINED
    if not (known & trained).any():
        return None
    points = np.unique(values[known])

    def share_up_to(chosen: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.sort(values[chosen]), points, side="right") / chosen.sum()

    g, f, u = share_up_to(known & trained), share_up_to(known), 1 - known.mean()
    at = int(np.abs(g - f).argmax())
    sign = math.copysign(1.0, g[at] - f[at])
    parts, without = {}, {}
    for fate in np.unique(fates):
        lost, missing = known & (fates == fate), ~known & (fates == fate)
        if fate != TRAINED and lost.any():
            parts[str(fate)] = float(sign * lost.sum() / known.sum() * (g[at] - share_up_to(lost)[at]))
        if missing.any():
            without[str(fate)] = float(missing.mean())
    cut = known & censored if censored is not None else np.zeros_like(known)
    if cut.any():
        without[CUT] = float(cut.mean())
    # The share of issued samples up to x is (1 - u) F(x), u more where all without a value lie below x, and less by
    # those that are censored at x or before where they all lie above.
    most = (1 - u) * f + u
    least = most - u - (cut.mean() * share_up_to(cut) if cut.any() else 0)
    worst = max(np.abs(g - least).max(), np.abs(g - most).max(), u)
    return Comparison(float(abs(g[at] - f[at])), float(worst), parts, without)


def length_bin(length: float) -> str:
    """`0`, `1`, `2`, `3-4`, `5-8`, `9-16`, ...: up to a power of two, or `unknown`."""
    if math.isnan(length):
        return UNKNOWN
    if length <= 2:
        return str(math.ceil(length))
    high = 1 << (math.ceil(length) - 1).bit_length()
    return f"{high // 2 + 1}-{high}"


# ---------------------------------------------------------------- from a run's data


def read_samples(store: Store, ledger: Ledger, graph: Graph, iteration: int, samples_per_prompt: int) -> Samples | None:
    """What became of the samples of an iteration. None before its update, and for rollouts without `response_ids`.

    A group that the rollout dropped has the lengths it committed. What is missing of `samples_per_prompt` never ended.
    """
    update = store.committed(iteration, graph.of_stage("update")[0].name)
    if update is None:
        return None
    trained = store.manifest(training_rows(update))
    rollout = store.committed(trained.files[0].iteration, trained.files[0].stage)
    if rollout is None or "response_ids" not in rollout.columns:
        return None
    names = [rollout.key, "group_id", "response_ids", *[n for n in ["finish_reason"] if n in rollout.columns]]
    rows = store.read(rollout.dataset, names)
    keys, groups = rows[rollout.key].to_pylist(), rows["group_id"].to_pylist()
    lengths = pc.list_value_length(rows["response_ids"]).to_pylist()
    finishes = rows["finish_reason"].to_pylist() if "finish_reason" in names else [""] * len(keys)
    used = set(store.read(trained.dataset, [trained.key])[trained.key].to_pylist())
    for group, by_reason in rollout.facts.dropped_lengths.items():
        for reason, ended in by_reason.items():
            keys += [""] * len(ended)  # in no row
            groups += [group] * len(ended)
            lengths += ended
            finishes += [reason] * len(ended)
    rewards = _rewards(store, update)
    outcomes = {group: outcome or "waiting" for group, _, outcome in ledger.groups.rows(iteration)}

    def fate(key: str, group: str) -> str:
        outcome = outcomes.get(group, "unknown")
        return TRAINED if key in used else LEFT_OUT if outcome == TRAINED else outcome

    members = Counter(groups)
    never = [group for group in outcomes for _ in range(samples_per_prompt - members[group])]
    fates = [fate(key, group) for key, group in zip(keys, groups, strict=True)]
    return Samples(
        np.array(groups + never, dtype=str),
        np.array(fates + [fate("", group) for group in never], dtype=str),
        np.array([float(n) for n in lengths] + [math.nan] * len(never)),
        np.array([rewards.get(key, math.nan) for key in keys] + [math.nan] * len(never)),
        np.array(finishes + [""] * len(never), dtype=str),
    )


def _rewards(store: Store, update: Manifest) -> dict[str, float]:
    """By row key, also of the rows that were dropped later; empty where nobody scores."""
    inputs = [store.manifest(parent) for parent in update.parents if isinstance(parent, DatasetRef)]
    file = next((dataset.columns["rewards"] for dataset in inputs if "rewards" in dataset.columns), None)
    scored = file and store.committed(file.iteration, file.stage)
    if not scored:
        return {}
    rows = store.read(scored.dataset, [scored.key, "rewards"])
    values = zip(rows[scored.key].to_pylist(), rows["rewards"].to_pylist(), strict=True)
    return {key: value for key, value in values if value is not None}


# ---------------------------------------------------------------- what is told of them


@dataclass(frozen=True)
class BiasReport:
    samples: Samples
    length: Comparison | None
    reward: Comparison | None

    @classmethod
    def of(cls, samples: Samples) -> "BiasReport":
        scored = ~(np.isnan(samples.rewards) & (samples.fates == SURPLUS))
        rewards = compare(samples.rewards[scored], samples.fates[scored])
        return cls(samples, compare(samples.lengths, samples.fates, samples.censored), rewards)

    def metrics(self) -> dict[str, float]:
        """`bias/*` and `truncated/*`, as declared in data/metrics.py."""
        s = self.samples
        values = {"bias/unknown_length": float(1 - s.ended.mean())}
        for name, found in (("length", self.length), ("reward", self.reward)):
            if found:
                values |= {f"bias/{name}": found.distance, f"bias/{name}_worst": found.worst}
        if s.ended.any():
            values["truncated/issued"] = float(s.truncated.sum() / s.ended.sum())
            for reason in np.unique(s.finishes[s.truncated]):
                values[f"truncated/issued/{reason}"] = float((s.finishes[s.ended] == reason).mean())
        if s.trained.any():
            values["truncated/trained"] = float(s.truncated[s.trained].mean())
        return values

    def warning(self, limits: Bias) -> str:
        """One line with what is beyond its limit, and for which reasons; empty where nothing is."""
        s, told = self.samples, []
        for name, found, limit, values in (
            ("length", self.length, limits.max_length, s.lengths),
            ("reward", self.reward, limits.max_reward, s.rewards),
        ):
            if found and found.worst > limit:
                told.append(
                    f"{name}s of trained samples are {_range(found.distance, found.worst)} from those of issued ones "
                    f"(bias.max_{name} {limit:g}; mean {_mean(values[s.trained])} against {_mean(values)}): "
                    f"{', '.join(found.accounts())}"
                )
        return "; ".join(told)

    def by_length(self) -> list[dict[str, str | int | float]]:
        """One row a length bin: samples issued and trained, share truncated, dropped groups by their mean length.

        A group of which no sample ended is of unknown length.
        """
        s = self.samples
        bins = np.array([length_bin(n) for n in s.lengths])
        dropped = Counter((length_bin(length), fate) for fate, length in self._dropped_groups())
        reasons = sorted({fate for _, fate in dropped})
        by_size = sorted({*bins, *(name for name, _ in dropped)}, key=lambda name: (name == UNKNOWN, _low(name)))
        rows: list[dict[str, str | int | float]] = []
        for name in by_size:
            own = bins == name
            rows.append(
                {
                    "length": str(name),
                    "issued": int(own.sum()),
                    "trained": int((own & s.trained).sum()),
                    "truncated": round(float(s.truncated[own].mean()), 4) if own.any() else 0.0,
                    **{f"groups {reason}": dropped[str(name), reason] for reason in reasons},
                }
            )
        return rows

    def _dropped_groups(self) -> Iterator[tuple[str, float]]:
        """(outcome, mean length of those that ended; NaN: none did) of each group that was not trained."""
        s = self.samples
        groups, first, of = np.unique(s.groups, return_index=True, return_inverse=True)
        ended = np.bincount(of, s.ended, len(groups))
        tokens = np.bincount(of, np.nan_to_num(s.lengths), len(groups))
        kept = np.bincount(of, s.trained | (s.fates == LEFT_OUT), len(groups)) > 0
        for group in np.flatnonzero(~kept):
            yield str(s.fates[first[group]]), tokens[group] / ended[group] if ended[group] else math.nan

    def summary(self) -> list[dict[str, str | int]]:
        """Issued and trained samples beside each other: how many, their lengths and their rewards."""
        s = self.samples
        rows: list[dict[str, str | int]] = []
        for name, own in (("issued", np.ones(len(s.fates), dtype=bool)), (TRAINED, s.trained)):
            lengths = s.lengths[own & s.ended]
            median, p95 = np.percentile(lengths, [50, 95]) if lengths.size else (math.nan, math.nan)
            rows.append(
                {
                    "samples": name,
                    "groups": len(np.unique(s.groups[own])),
                    "count": int(own.sum()),
                    "of unknown length": int((own & ~s.ended).sum()),
                    "truncated": f"{s.truncated[own & s.ended].mean():.1%}" if lengths.size else "-",
                    "mean": _mean(lengths),
                    "median": f"{median:g}",
                    "p95": f"{p95:g}",
                    "reward": _mean(s.rewards[own]),
                }
            )
        return rows

    def distances(self) -> Iterator[str]:
        """A line for lengths, one for rewards: how far trained samples are from issued ones, and for which reasons."""
        for name, found in (("length", self.length), ("reward", self.reward)):
            if found:
                reasons = ", ".join(found.accounts()) or "nothing was lost that changes it"
                yield f"{name}: Kolmogorov-Smirnov distance {_range(found.distance, found.worst)}: {reasons}"


def _mean(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    return f"{known.mean():.3g}" if known.size else "-"


def _low(name: str) -> int:
    return int(name.partition("-")[0]) if name != UNKNOWN else 0


def print_bias(run: str, iteration: int | None, console: Console) -> None:
    """The report over a run's finished updates, or over one. Raises RunError where there is none."""
    from flows.show import run_folder  # brings Prefect along

    folder = run_folder(run)
    experiment = load_experiment(folder / "config.yaml")
    report = BiasReport.of(
        _all_samples(folder, load_graph(experiment), iteration, experiment.rollout.samples_per_prompt)
    )
    console.print(_table(report.summary()))
    for line in report.distances():
        console.print(line, markup=False)
    console.print()
    console.print(_table(report.by_length()))
    if warning := report.warning(experiment.bias):
        console.print(f"warning: {warning}", markup=False)


def _all_samples(folder: Path, graph: Graph, iteration: int | None, samples_per_prompt: int) -> Samples:
    store, ledger = Store(folder, folder.name), Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        numbers = sorted({number for number, _ in store.stages()}) if iteration is None else [iteration]
        found = [read_samples(store, ledger, graph, number, samples_per_prompt) for number in numbers]
    finally:
        ledger.close()
    if parts := [part for part in found if part is not None]:
        return Samples.concatenate(parts)
    which = "an iteration" if iteration is None else f"iteration {iteration}"
    raise RunError(f"{folder} must have {which} that was trained on responses, but there is none")


def _table(rows: Sequence[Mapping[str, str | int | float]]) -> Table:
    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    return table
