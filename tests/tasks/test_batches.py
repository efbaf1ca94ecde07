"""Rows, micro-batches and masks: what is computed together never changes what is computed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from conf.errors import DataError
from tasks.models import make_tiny_model
from tasks.trainer import batches
from tasks.trainer.batches import Row, Samples
from tasks.trainer.model import TokenLogprobs, load_policy, load_reference

VOCABULARY = 97


def make_samples(sizes: Sequence[tuple[int, Sequence[int]]], seed: int = 0) -> Samples:
    """Groups of (prompt tokens, response tokens of each member), of random ids."""
    random = np.random.default_rng(seed)
    groups, prompts, responses = [], [], []
    for g, (prompt, lengths) in enumerate(sizes):
        ids = random.integers(0, VOCABULARY, prompt)
        for length in lengths:
            groups.append(f"g{g}")
            prompts.append(ids)
            responses.append(random.integers(0, VOCABULARY, length))
    starts = np.concatenate([[0], np.cumsum([len(r) for r in responses])])
    return Samples(groups, prompts, starts, np.concatenate(responses), {})


SAMPLES = make_samples([(5, [3, 1, 6]), (2, [4, 4]), (9, [2, 7, 5, 1])])


def small_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    return AutoModelForCausalLM.from_config(config).eval()


def weighted_sum(samples: Samples, logprobs: Tensor) -> Tensor:
    """A scalar that every token moves differently."""
    return (logprobs * torch.linspace(-1, 1, len(samples.response_ids))).sum()


def naive_gradients(lm: PreTrainedModel, samples: Samples, temperature: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of the response tokens, one sample at a time by the model's own forward, and gradients."""
    parts = []
    for i, prompt in enumerate(samples.prompts):
        response = samples.response_ids[samples.starts[i] : samples.starts[i + 1]]
        ids = torch.tensor(np.concatenate([prompt, response]))
        logits = lm(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        parts.append((logits / temperature).log_softmax(-1)[torch.arange(len(response)), ids[len(prompt) :]])
    found = torch.cat(parts)
    return found.detach(), _backward(lm, weighted_sum(samples, found))


def batched_gradients(
    lm: PreTrainedModel, samples: Samples, temperature: float, share: int, max_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    model = TokenLogprobs(lm, None)
    found = torch.zeros(len(samples.response_ids))
    total = torch.zeros(())
    weights = torch.linspace(-1, 1, len(samples.response_ids))
    everything = np.ones(len(samples.response_ids), bool)
    for rows in batches.micro_batches(batches.make_rows(samples, range(len(samples)), share), max_tokens, 0, 1):
        batch = batches.collate(samples, rows, everything)
        logprobs, _ = model(*batch.inputs(), temperature)
        found[batch.tokens] = logprobs.detach()
        total = total + (logprobs * weights[batch.tokens]).sum()
    return found, _backward(lm, total)


def _backward(lm: PreTrainedModel, scalar: Tensor) -> dict[str, Tensor]:
    lm.zero_grad()
    scalar.backward()
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(("share", "max_tokens"), [(0, 1), (0, 40), (0, 1000), (20, 30), (100, 1), (100, 1000)])
def test_log_probabilities_and_gradients_are_those_of_one_sample_at_a_time(
    kind: str, share: int, max_tokens: int
) -> None:
    lm = small_model(kind)
    expected, gradients = naive_gradients(lm, SAMPLES, temperature=0.7)
    found, own = batched_gradients(lm, SAMPLES, 0.7, share, max_tokens)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, atol=2e-5, rtol=1e-4)


def test_entropy_is_that_of_the_distribution_after_temperature() -> None:
    lm = small_model("llama")
    batch = batches.collate(SAMPLES, [Row((0,), 8)], np.ones(len(SAMPLES.response_ids), bool))
    _, entropy = TokenLogprobs(lm, None)(*batch.inputs(), 2.0)
    logits = lm(input_ids=batch.input_ids).logits[0, 4:7] / 2.0
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())


def test_only_wanted_tokens_are_selected() -> None:
    wanted = np.zeros(len(SAMPLES.response_ids), bool)
    wanted[[1, 4, 6]] = True
    batch = batches.collate(SAMPLES, batches.make_rows(SAMPLES, [0, 1, 2], 100), wanted)
    assert batch.tokens.tolist() == [1, 4, 6]
    assert batch.targets.tolist() == SAMPLES.response_ids[[1, 4, 6]].tolist()


def test_a_shared_row_holds_the_prompt_once_and_restarts_positions() -> None:
    samples = make_samples([(2, [2, 1])])
    (row,) = batches.make_rows(samples, [0, 1], share_tokens=5)
    batch = batches.collate(samples, [row], np.ones(3, bool))
    assert batch.input_ids[0].tolist() == [*samples.prompts[0], *samples.response_ids]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 2]
    assert batch.select.tolist() == [1, 2, 1]
    assert batch.mask is not None
    assert batch.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_a_group_that_does_not_fit_is_computed_in_ordinary_rows() -> None:
    samples = make_samples([(2, [2, 1])])
    assert batches.make_rows(samples, [0, 1], share_tokens=4) == [Row((0,), 4), Row((1,), 3)]


def test_a_group_with_two_prompts_is_refused() -> None:
    samples = replace(SAMPLES, groups=["g0"] * len(SAMPLES))
    with pytest.raises(DataError, match="g0: its samples must have one prompt"):
        batches.make_rows(samples, range(len(samples)), 100)


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 120), st.integers(1, 4))
def test_micro_batches_hold_every_row_once_fit_the_budget_and_are_equally_many(
    lengths: list[int], max_tokens: int, ranks: int
) -> None:
    rows = [Row((i,) if i % 2 else (i, -i - 1), length) for i, length in enumerate(lengths)]
    packed = [batches.micro_batches(rows, max_tokens, rank, ranks) for rank in range(ranks)]
    held = [row for own in packed for batch in own for row in batch]
    assert sorted(held, key=lambda row: row.samples) == sorted(rows, key=lambda row: row.samples)
    assert len({len(own) for own in packed}) == 1
    for batch in (batch for own in packed for batch in own):
        assert len(batch) <= 1 or len(batch) * max(row.length for row in batch) <= max_tokens
        assert len({len(row.samples) > 1 for row in batch}) <= 1  # shared and ordinary rows never mix


@given(LENGTHS, st.integers(1, 4))
def test_no_rank_has_more_than_one_row_over_its_part_of_the_tokens(lengths: list[int], ranks: int) -> None:
    shares = batches.split_rows([Row((i,), length) for i, length in enumerate(lengths)], ranks)
    loads = [sum(row.length for row in share) for share in shares]
    assert max(loads) <= sum(lengths) / ranks + max(lengths)


def test_mini_batches_keep_groups_whole_and_take_every_sample_once() -> None:
    parts = batches.mini_batches(SAMPLES, 2, seed=0, number=1, epoch=0)
    assert sorted(i for part in parts for i in part) == list(range(len(SAMPLES)))
    groups = [{SAMPLES.groups[i] for i in part} for part in parts]
    assert groups[0] & groups[1] == set()


def test_the_order_of_mini_batches_follows_from_seed_number_and_pass() -> None:
    samples = make_samples([(1, [1])] * 20)

    def order(**changes: int) -> list[list[int]]:
        return batches.mini_batches(samples, 4, **{"seed": 0, "number": 1, "epoch": 0, **changes})

    assert order() == order()
    assert all(order() != order(**{name: 7}) for name in ("seed", "number", "epoch"))


def test_there_are_never_more_mini_batches_than_groups() -> None:
    assert len(batches.mini_batches(SAMPLES, 8, seed=0, number=1, epoch=0)) == 3


def table(**changes: list[list[float]]) -> pa.Table:
    columns = {
        "group_id": ["a", "a", "b"],
        "prompt_ids": [[1, 2], [1, 2], [3]],
        "response_ids": [[4], [5, 6], [7]],
        "advantages": [[0.5], [1.0, 2.0], [-1.0]],
    }
    return pa.table({**columns, **changes})


def test_samples_are_read_from_any_chunking_and_slice() -> None:
    whole = Samples.from_table(table(), ["advantages"])
    pieces = pa.concat_tables([table().slice(0, 1), table().slice(1, 2)])
    sliced = Samples.from_table(pa.concat_tables([table(), table()]).combine_chunks().slice(3, 3), ["advantages"])
    for other in (Samples.from_table(pieces, ["advantages"]), sliced):
        assert other.groups == whole.groups == ["a", "a", "b"]
        assert [p.tolist() for p in other.prompts] == [[1, 2], [1, 2], [3]]
        assert other.starts.tolist() == [0, 1, 3, 4]
        assert other.columns["advantages"].tolist() == [0.5, 1.0, 2.0, -1.0]


def test_columns_of_unequal_length_are_refused_with_the_sample() -> None:
    with pytest.raises(DataError, match="sample 1: advantages must have one value for each response token, expected 2"):
        Samples.from_table(table(advantages=[[0.5], [1.0], [-1.0]]), ["advantages"])


def test_an_empty_response_is_refused_with_the_sample() -> None:
    with pytest.raises(DataError, match="sample 1: response_ids must hold at least one token"):
        Samples.from_table(table(response_ids=[[4], [], [7]]))


def test_an_untrained_policy_and_its_reference_agree_bit_for_bit_in_bfloat16(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", say=lambda _: None)
    batch = batches.collate(SAMPLES, [Row((0, 1, 2), 15)], np.ones(len(SAMPLES.response_ids), bool))
    policy, (reference, digest) = load_policy(path, "bf16"), load_reference(path, "bf16")
    with torch.no_grad():
        expected, _ = policy(*batch.inputs(), 1.0)
        found, _ = reference(*batch.inputs(), 1.0)
    assert torch.equal(found, expected)
    assert len(digest) == 64
    assert reference.lm.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
