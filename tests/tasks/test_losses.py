"""Losses by numbers worked by hand, and against an independent loop over tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from tasks import losses


def loss_of_ratio(ratio: float, advantage: float, low: float = 0.2, high: float = 0.2) -> float:
    return losses.ppo_clip(tensor([math.log(ratio)]), tensor([0.0]), tensor([advantage]), low, high).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 3.0, -3.0),
        (1.1, 2.0, -2.2),  # inside the range: -r A
        (1.5, 2.0, -2.4),  # above it, good token: held at 1.2
        (1.5, -2.0, 3.0),  # above it, bad token: not held
        (0.5, 2.0, -1.0),  # below it, good token: not held
        (0.5, -2.0, 1.6),  # below it, bad token: held at 0.8
    ],
)
def test_ppo_clip_holds_only_moves_that_would_gain(ratio: float, advantage: float, loss: float) -> None:
    assert loss_of_ratio(ratio, advantage) == pytest.approx(loss, rel=1e-6)


def test_the_upper_range_may_be_wider_than_the_lower() -> None:
    assert loss_of_ratio(1.5, 1.0, low=0.2, high=0.28) == pytest.approx(-1.28, rel=1e-6)
    assert loss_of_ratio(0.5, -1.0, low=0.2, high=0.28) == pytest.approx(0.8, rel=1e-6)


def test_a_ratio_of_probabilities_02_and_04_is_2() -> None:
    sums = losses.ratio_sums(tensor([math.log(0.4)]), tensor([math.log(0.2)]), tensor([1.0]), 0.2, 0.2)
    assert sums["ratio"].item() == pytest.approx(2.0, rel=1e-6)


def test_the_gradient_of_a_token_on_policy_is_minus_its_advantage() -> None:
    logprobs = tensor([-1.0, -2.0], requires_grad=True)
    losses.ppo_clip(logprobs, logprobs.detach(), tensor([0.5, -3.0]), 0.2, 0.2).sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor([-0.5, 3.0]))


def test_a_token_with_advantage_zero_has_no_gradient_whatever_its_ratio() -> None:
    logprobs = tensor([-1.0, 30.0, -30.0], requires_grad=True)
    losses.ppo_clip(logprobs, torch.zeros(3), torch.zeros(3), 0.2, 0.2).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.zeros(3))


def test_kl_estimates_by_hand() -> None:
    # policy probability 0.5, reference 0.25: d = log(0.25 / 0.5) = -log 2
    arguments = (tensor([math.log(0.5)]), tensor([math.log(0.25)]))
    assert losses.kl_estimate(*arguments, "k1").item() == pytest.approx(math.log(2), rel=1e-6)
    assert losses.kl_estimate(*arguments, "k2").item() == pytest.approx(math.log(2) ** 2 / 2, rel=1e-6)
    assert losses.kl_estimate(*arguments, "k3").item() == pytest.approx(0.5 - 1 + math.log(2), rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimates_have_the_divergence_as_their_mean(estimator: str) -> None:
    policy, reference = tensor([0.7, 0.2, 0.1]), tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / reference).log()).sum()
    mean = (policy * losses.kl_estimate(policy.log(), reference.log(), estimator)).sum()  # type: ignore[arg-type]
    torch.testing.assert_close(mean, exact)


@given(st.lists(st.tuples(*[st.floats(-5, 0, width=32)] * 2), min_size=1, max_size=8))
def test_k2_and_k3_are_never_negative_and_zero_on_equal_weights(pairs: list[tuple[float, float]]) -> None:
    policy, reference = tensor(pairs).T
    for estimator in ("k2", "k3"):
        assert (losses.kl_estimate(policy, reference, estimator) >= -1e-6).all()  # type: ignore[arg-type]
        assert losses.kl_estimate(policy, policy, estimator).abs().max() == 0  # type: ignore[arg-type]


def test_clipped_counts_tokens_whose_gradient_vanished() -> None:
    ratio, advantages = tensor([1.5, 1.5, 0.5, 0.5, 1.0, 1.5]), tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    logprobs = ratio.log().requires_grad_()
    losses.ppo_clip(logprobs, torch.zeros(6), advantages, 0.2, 0.2).sum().backward()
    assert logprobs.grad is not None
    vanished = ((logprobs.grad == 0) & (advantages != 0)).sum()
    sums = losses.ratio_sums(logprobs.detach(), torch.zeros(6), advantages, 0.2, 0.2)
    assert sums["clipped"].item() == vanished.item() == 2


def test_mismatch_by_hand() -> None:
    # trainer 0.5 and 0.25, engine 0.25 and 0.5: w = 2 and 0.5
    sums = losses.mismatch_sums(tensor([0.5, 0.25]).log(), tensor([0.25, 0.5]).log())
    assert sums["logprob_abs_diff"].item() == pytest.approx(2 * math.log(2), rel=1e-6)
    assert sums["k3_kl"].item() == pytest.approx((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2)), rel=1e-5)
    assert losses.effective_share(sums["weight"].item(), sums["weight_squared"].item(), 2) == pytest.approx(
        2.5**2 / (2 * 4.25), rel=1e-6
    )


def test_equal_weights_are_all_effective() -> None:
    assert losses.effective_share(weight=3.0, weight_squared=3.0, tokens=3) == 1.0


def test_the_loss_agrees_with_a_loop_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(scale: float) -> Tensor:
        return torch.randn(200, generator=generator) * scale

    old, advantages = -draw(1).abs(), draw(1)
    logprobs = old + draw(0.5)
    found = losses.ppo_clip(logprobs, old, advantages, 0.1, 0.3)
    for live, before, advantage, loss in zip(*(x.tolist() for x in (logprobs, old, advantages, found)), strict=True):
        ratio = math.exp(live - before)
        held = 0.9 if ratio < 0.9 else 1.3 if ratio > 1.3 else ratio
        assert loss == pytest.approx(max(-ratio * advantage, -held * advantage), rel=1e-4, abs=1e-6)


# -- off-policy corrections


OLD, BEHAVIOR = tensor([0.4, 0.1, 0.9]).log(), tensor([0.2, 0.2, 0.3]).log()  # w = 2, 0.5, 3


def test_importance_weights_by_hand() -> None:
    assert losses.importance_weights(OLD, BEHAVIOR).tolist() == pytest.approx([2, 0.5, 3], rel=1e-6)
    whole = losses.importance_weights(OLD, BEHAVIOR, tensor([0, 0, 1]))  # 2 * 0.5, and 3 alone
    assert whole.tolist() == pytest.approx([1, 1, 3], rel=1e-6)
    assert losses.importance_weights(tensor([]), tensor([]), tensor([], dtype=torch.int64)).tolist() == []


def test_a_product_over_many_tokens_stays_finite() -> None:
    weights = losses.importance_weights(torch.zeros(1000), torch.full((1000,), -5.0), torch.zeros(1000).long())
    assert weights[0].item() == pytest.approx(math.exp(20), rel=1e-5)
    small = losses.importance_weights(torch.full((1000,), -5.0), torch.zeros(1000), torch.zeros(1000).long())
    assert small[0].item() == 0.0


def test_truncation_and_masking_by_hand() -> None:
    weights = tensor([2.0, 0.5, 3.0, 0.4, 5.0, 5.1])
    assert losses.truncated_weights(weights, 2.5).tolist() == pytest.approx([2, 0.5, 2.5, 0.4, 2.5, 2.5])
    assert losses.masked_weights(weights, 0.0, 2.5).tolist() == pytest.approx([2, 0.5, 0, 0.4, 0, 0])
    assert losses.masked_weights(weights, 0.5, 5.0).tolist() == pytest.approx([2, 0.5, 3, 0, 5, 0])  # IcePop's range


def test_decoupled_ppo_by_hand() -> None:
    # sampled at 0.2, 0.4 when the update began, 0.5 now, A = 1: w 2, ratio to the anchor 1.25, held at 1.2
    weight = losses.importance_weights(tensor([0.4]).log(), tensor([0.2]).log())
    loss = weight * losses.ppo_clip(tensor([0.5]).log(), tensor([0.4]).log(), tensor([1.0]), 0.2, 0.2)
    assert loss.item() == pytest.approx(-2.4, rel=1e-6)


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=20))
def test_on_policy_tokens_weigh_one_and_no_weight_exceeds_its_bound(pairs: list[tuple[float, float]]) -> None:
    old, behavior = tensor([a for a, _ in pairs]), tensor([b for _, b in pairs])
    assert losses.importance_weights(old, old).tolist() == [1.0] * len(pairs)
    weights = losses.importance_weights(old, behavior)
    assert losses.truncated_weights(weights, 2.0).max() <= 2.0
    masked = losses.masked_weights(weights, 0.5, 2.0)
    assert all(w == 0 or 0.5 <= w <= 2.0 for w in masked.tolist())
