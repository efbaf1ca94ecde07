"""The policy on one rank: log-probabilities and updates. Every rank calls every method in step with the others."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from conf.errors import TrainerError
from conf.schema import Correction
from data.crash import crash_point
from tasks import losses
from tasks.trainer import batches
from tasks.trainer.batches import Batch, Row, Samples
from tasks.trainer.engine import apply_step, build_engine
from tasks.trainer.memory import Offloaded, offload
from tasks.trainer.model import TokenLogprobs, load_policy, load_reference, shares_prefixes
from tasks.trainer.spec import Spec

Progress = Callable[[int, int], None]  # (samples done, samples in all) on this rank


class Learner:
    """`step` counts optimizer steps of the run. `control` is a gloo group, for what does not lie on the device."""

    def __init__(self, spec: Spec, control: Any) -> None:
        self.spec = spec
        self.control = control
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.step = 0
        policy = load_policy(Path(spec.model), spec.update.precision)
        self.share_tokens = min(spec.update.share_prefix_tokens, spec.update.micro_batch_tokens)
        if not shares_prefixes(policy.lm):
            self.share_tokens = 0
        self.engine = build_engine(policy, spec.update)
        self._reference: TokenLogprobs | None = None
        self.reference_digest = (
            ""  # of the reference's float32 weights, as a package's content digest; known once loaded
        )

    @property
    def policy(self) -> TokenLogprobs:
        return self.engine.module

    def reference(self) -> TokenLogprobs:
        """The frozen starting model, loaded when first asked for. Each rank holds all of it."""
        if self._reference is None:
            model, self.reference_digest = load_reference(Path(self.spec.model), self.spec.update.precision)
            self._reference = model.to(self.engine.device)
        return self._reference

    def offload(self) -> Offloaded:
        """Everything off the device, until the reload of what it gives."""
        return offload(self.engine, *filter(None, [self._reference]))

    def logprobs(self, model: TokenLogprobs, samples: Samples, progress: Progress) -> np.ndarray:
        """Log-probability after temperature of every response token: float32, T, on every rank."""
        wanted = np.ones(len(samples.response_ids), bool)
        found = torch.zeros(len(wanted))
        done, micro = 0, self._micro_batches(samples, range(len(samples)))
        with torch.no_grad():
            for rows in micro:
                batch = batches.collate(samples, rows, wanted).to(self.engine.device)
                values, _ = model(*batch.inputs(), self.spec.temperature)
                found[batch.tokens.cpu()] = values.cpu()
                done += _count(rows)
                progress(done, sum(map(_count, micro)))
        dist.all_reduce(found, group=self.control)  # each token was computed on one rank
        return found.numpy()

    def probe(self, ids: Sequence[int]) -> list[float]:
        """log p(ids[i] | ids[:i]) for i >= 1, at temperature 1 as engines report a prompt's log-probabilities."""
        row = torch.tensor([ids])
        select = torch.arange(len(ids) - 1)
        batch = Batch(row, torch.arange(len(ids))[None], None, select, row[0, 1:], select).to(self.engine.device)
        with torch.no_grad():
            return self.policy(*batch.inputs(), 1.0)[0].tolist()

    def update(self, samples: Samples, number: int, progress: Progress) -> dict[str, float]:
        """One update: `epochs` passes of `mini_batches` optimizer steps; gives its metrics.

        samples.columns: response_mask, behavior_logprobs, advantages; old_logprobs and ref_logprobs where settings ask.
        Raises TrainerError, before the weights change, for a non-finite loss or gradient and for log-probabilities too
        far from the engine's.
        """
        settings = self.spec.update
        samples, corrected = _corrected(samples, settings.correction)
        steps = [
            self._plan(samples, part)
            for epoch in range(settings.epochs)
            for part in batches.mini_batches(
                samples, settings.mini_batches, seed=self.spec.seed, number=number, epoch=epoch
            )
        ]
        done, total = 0, sum(_count(rows) for step in steps for rows in step.micro)
        measured = _Measured()
        for i, step in enumerate(steps):
            sums: dict[str, float] = {}
            for k, rows in enumerate(step.micro):
                self.engine.set_gradient_accumulation_boundary(k == len(step.micro) - 1)
                _merge(sums, self._backward(samples, rows, step.tokens))
                done += _count(rows)
                progress(done, total)
            sums = self._over_ranks(sums)
            self._check(sums, f"update {number}, optimizer step {i + 1}", first=i == 0)
            crash_point(f"trainer/{number}/step.before/{self.rank}")
            norm, rate = apply_step(self.engine, settings, self.step)
            self.step += 1
            crash_point(f"trainer/{number}/step.after/{self.rank}")
            measured.add(sums, step, norm, rate)
        return measured.metrics() | corrected

    def _plan(self, samples: Samples, part: Sequence[int]) -> "_Step":
        """The samples of one optimizer step that are computed, as this rank's micro-batches.

        A sample whose advantages are all 0 adds exactly nothing to the gradient of the clipped objective (its ratio is
        multiplied by 0), so without a KL term it is left out; its tokens still count in the mean. Where that leaves
        nothing, one sample is computed all the same: the engine's and the trainer's log-probabilities are compared in
        every update, and the optimizer steps with a zero gradient as PyTorch would (momentum and weight decay act).
        """
        mask = samples.columns["response_mask"]
        moving = mask if self.spec.update.kl.coef else mask & (samples.columns["advantages"] != 0)
        trainable, useful = samples.any_by_sample(mask), samples.any_by_sample(moving)
        kept = [i for i in part if useful[i]] or [i for i in part if trainable[i]][:1]
        if not kept:
            raise TrainerError(f"samples of {samples.groups[part[0]]} and on: expected tokens to train on, got none")
        tokens = sum(int(mask[samples.starts[i] : samples.starts[i + 1]].sum()) for i in part)
        return _Step(self._micro_batches(samples, kept), tokens, len(part), len(kept))

    def _micro_batches(self, samples: Samples, chosen: Sequence[int]) -> list[list[Row]]:
        rows = batches.make_rows(samples, chosen, self.share_tokens)
        return batches.micro_batches(rows, self.spec.update.micro_batch_tokens, self.rank, self.ranks)

    def _backward(self, samples: Samples, rows: Sequence[Row], tokens: int) -> dict[str, float]:
        """Forward and backward of one micro-batch; gives sums over its tokens, and the ratio's extremes."""
        settings = self.spec.update
        device = self.engine.device
        batch = batches.collate(samples, rows, samples.columns["response_mask"]).to(device)
        at = batch.tokens.cpu().numpy()
        given = {name: torch.from_numpy(column[at]).to(device) for name, column in samples.columns.items()}
        old = given["behavior_logprobs" if settings.old_logprobs == "behavior" else "old_logprobs"]
        low, high = settings.clip_ratio, settings.clip_ratio_high

        logprobs, entropy = self.engine(*batch.inputs(), self.spec.temperature)
        loss = losses.ppo_clip(logprobs, old, given["advantages"], low, high)
        if "weights" in given:
            loss = loss * given["weights"]
        loss = loss.sum()
        sums: dict[str, Tensor] = {"pg_loss": loss.detach()}
        if settings.kl.coef:
            kl = losses.kl_estimate(logprobs, given["ref_logprobs"], settings.kl.estimator).sum()
            sums["kl"] = kl.detach()
            loss = loss + settings.kl.coef * kl
        # DeepSpeed takes the mean over ranks; the token mean is a sum over all of them.
        self.engine.backward(loss * (self.ranks / tokens))

        live = logprobs.detach()
        sums |= {"loss": loss.detach(), "entropy": entropy.sum(), "tokens": torch.tensor(float(len(at)))}
        sums |= losses.ratio_sums(live, old, given["advantages"], low, high)
        sums |= losses.mismatch_sums(live, given["behavior_logprobs"])
        if len(at):
            log_ratio = live - old
            sums |= {"max_log_ratio": log_ratio.max(), "max_inverse": -log_ratio.min()}
        return {name: float(value) for name, value in sums.items()}

    def _over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        """The same on every rank: sums added, extremes compared."""
        if self.ranks == 1:
            return sums
        everywhere: list[dict[str, float]] = [{}] * self.ranks
        dist.all_gather_object(everywhere, sums, group=self.control)
        total: dict[str, float] = {}
        for part in everywhere:
            _merge(total, part)
        return total

    def _check(self, sums: dict[str, float], where: str, *, first: bool) -> None:
        if not all(math.isfinite(value) for value in sums.values()):
            broken = ", ".join(f"{name} {value}" for name, value in sums.items() if not math.isfinite(value))
            outcome = "nothing was changed" if first else "earlier steps were applied, so the trainer must restart"
            raise TrainerError(f"{where}: the loss and its parts must be finite, got {broken}; {outcome}")
        difference = sums["logprob_abs_diff"] / sums["tokens"]
        if first and difference > self.spec.update.max_logprob_diff:
            raise TrainerError(
                f"{where}: engine and trainer differ by {difference:.4f} in mean absolute log-probability over "
                f"{sums['tokens']:.0f} tokens, allowed are {self.spec.update.max_logprob_diff} "
                "(update.max_logprob_diff); nothing was changed"
            )


def _corrected(samples: Samples, correction: Correction) -> tuple[Samples, dict[str, float]]:
    """The samples with a column `weights`, as `correction` declares, and its metrics over the trained tokens."""
    if correction.kind in ("none", "ratio"):
        return samples, {}
    mask = samples.columns["response_mask"]
    old, behavior = (torch.from_numpy(samples.columns[name][mask]) for name in ("old_logprobs", "behavior_logprobs"))
    of_sample = torch.from_numpy(np.repeat(np.arange(len(samples)), np.diff(samples.starts))[mask])
    raw = losses.importance_weights(old, behavior, of_sample if correction.level == "sequence" else None)
    if correction.kind == "tis":
        kept = losses.truncated_weights(raw, correction.high)
    else:
        kept = losses.masked_weights(raw, correction.low, correction.high)
    weights = np.zeros(len(mask), np.float32)
    weights[mask] = kept.numpy()
    metrics = {
        "rollout_correction/is_mean": kept.mean().item(),
        "rollout_correction/is_max": raw.max().item(),
        "rollout_correction/masked_fraction": (kept == 0).float().mean().item(),
        "rollout_correction/truncated_fraction": ((kept != raw) & (kept > 0)).float().mean().item(),
    }
    return replace(samples, columns={**samples.columns, "weights": weights}), metrics


def _count(rows: Sequence[Row]) -> int:
    return sum(len(row.samples) for row in rows)


def _merge(total: dict[str, float], part: dict[str, float]) -> None:
    for name, value in part.items():
        if name.startswith("max_"):
            total[name] = max(total.get(name, -math.inf), value)
        else:
            total[name] = total.get(name, 0.0) + value


@dataclass(frozen=True)
class _Step:
    micro: list[list[Row]]  # this rank's micro-batches
    tokens: int  # the mean's denominator: trainable tokens of all samples, computed or not, on all ranks
    samples: int
    computed: int


@dataclass
class _Measured:
    """Metrics of one update over its optimizer steps."""

    sums: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)  # sums of the first step, before any weight changed
    steps: list[tuple[_Step, float, float]] = field(default_factory=list)  # step, gradient norm, learning rate

    def add(self, sums: dict[str, float], step: _Step, norm: float, rate: float) -> None:
        self.first = self.first or dict(sums)
        _merge(self.sums, sums)
        self.steps.append((step, norm, rate))

    def metrics(self) -> dict[str, float]:
        """By the field's names. Means are over computed tokens, losses over all trainable ones, the norm over steps."""
        sums, first, n = self.sums, self.first, self.sums["tokens"]
        trainable = sum(step.tokens for step, _, _ in self.steps)
        found = {
            "actor/loss": sums["loss"] / trainable,
            "actor/pg_loss": sums["pg_loss"] / trainable,
            "actor/approx_kl": sums["approx_kl"] / n,
            "actor/clipfrac": sums["clipped"] / n,
            "actor/entropy": sums["entropy"] / n,
            "actor/ratio_mean": sums["ratio"] / n,
            "actor/ratio_min": math.exp(-sums["max_inverse"]),
            "actor/ratio_max": math.exp(sums["max_log_ratio"]),
            "actor/grad_norm": sum(norm for _, norm, _ in self.steps) / len(self.steps),
            "actor/lr": self.steps[-1][2],
            "actor/tokens": trainable,
            "actor/tokens_computed": n,
            "actor/samples": sum(step.samples for step, _, _ in self.steps),
            "actor/samples_computed": sum(step.computed for step, _, _ in self.steps),
            "mismatch/logprob_abs_diff": first["logprob_abs_diff"] / first["tokens"],
            "mismatch/k3_kl": first["k3_kl"] / first["tokens"],
            "mismatch/ess": losses.effective_share(first["weight"], first["weight_squared"], int(first["tokens"])),
        }
        if "kl" in sums:
            found["actor/kl"] = sums["kl"] / n
        return found
