"""Policy-gradient losses and their diagnostics as pure functions of per-token tensors. No I/O, no distribution.

Every argument is a float32 vector over the same trained tokens, in nats where it is a log-probability. Means over
tokens are left to the caller, who knows how many tokens the other micro-batches and ranks hold.
"""

from typing import Literal

import torch
from torch import Tensor


def ppo_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) for each token, with r = exp(logprobs - old_logprobs).

    PPO (arXiv:1707.06347, eq. 7); separate ranges below and above as in DAPO (arXiv:2503.14476, eq. 8).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """An estimate of KL(policy || reference) for each token sampled from the policy, with d = ref_logprobs - logprobs.

    k1 = -d; k2 = d^2 / 2; k3 = exp(d) - 1 - d (Schulman 2020, http://joschu.net/blog/kl-approx.html; k3 is the term of
    GRPO, arXiv:2402.03300, eq. 4).
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(d) - d


def ratio_sums(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> dict[str, Tensor]:
    """Sums over tokens of what the ratio r = exp(logprobs - old_logprobs) did to the loss.

    approx_kl: r - 1 - log r, which estimates KL(old || policy). clipped: tokens whose gradient the clip removed:
    r > 1 + high with a positive advantage or r < 1 - low with a negative one.
    """
    d = logprobs - old_logprobs
    ratio = torch.exp(d)
    clipped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    return {"approx_kl": (torch.expm1(d) - d).sum(), "clipped": clipped.float().sum(), "ratio": ratio.sum()}


def mismatch_sums(logprobs: Tensor, behavior_logprobs: Tensor) -> dict[str, Tensor]:
    """Sums over tokens of how far the trainer's probabilities are from the engine's, with w = exp(logprobs - behavior).

    logprob_abs_diff: |log w|. k3_kl: w - 1 - log w, which estimates KL(engine || trainer). weight, weight_squared: for
    `effective_share`.
    """
    d = logprobs - behavior_logprobs
    weight = torch.exp(d)
    return {
        "logprob_abs_diff": d.abs().sum(),
        "k3_kl": (torch.expm1(d) - d).sum(),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
    }


LARGEST_LOG_WEIGHT = 20.0  # a product over many tokens must stay finite


def importance_weights(old_logprobs: Tensor, behavior_logprobs: Tensor, sequences: Tensor | None = None) -> Tensor:
    """w = exp(old_logprobs - behavior_logprobs) for each token: how much likelier the trainer made it than the engine.

    With `sequences` (int64, the response of each token), the product over the tokens of its response, for each token.
    Multiplied with `ppo_clip`, whose ratio is against `old_logprobs`, they make decoupled PPO: the policy that the step
    stays near and the one that sampled are different ones (arXiv:2110.00641, eq. 3; AReaL, arXiv:2505.24298, eq. 5).
    """
    logs = old_logprobs - behavior_logprobs
    if sequences is not None:
        sums = torch.zeros(int(sequences.max()) + 1 if len(sequences) else 0, dtype=logs.dtype)
        logs = sums.index_add(0, sequences, logs)[sequences]
    return torch.exp(logs.clamp(max=LARGEST_LOG_WEIGHT))


def truncated_weights(weights: Tensor, high: float) -> Tensor:
    """min(w, high): truncated importance sampling, TIS (Ionides 2008; IMPALA, arXiv:1802.01561, section 4.1)."""
    return weights.clamp(max=high)


def masked_weights(weights: Tensor, low: float, high: float) -> Tensor:
    """w where low <= w <= high, else 0: masked importance sampling, MIS.

    At token level with a lower bound this is the range of IcePop (arXiv:2510.18855, section 3).
    """
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def effective_share(weight: float, weight_squared: float, tokens: int) -> float:
    """Effective sample size over sample size: (sum w)^2 / (n sum w^2), in (0, 1], 1 for equal weights (Kong 1992)."""
    return weight * weight / (tokens * weight_squared)
