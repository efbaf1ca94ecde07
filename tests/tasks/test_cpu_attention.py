"""Decoding for many sequences at once gives what attention for each sequence alone gives."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tasks.engines import cpu_attention


@pytest.mark.parametrize("gathered", [1, 20, 1000])  # one by one, several groups, all at once
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_batched_decoding_is_attention_of_each_sequence(
    monkeypatch: pytest.MonkeyPatch, gathered: int, heads: int, kv_heads: int
) -> None:
    monkeypatch.setattr(cpu_attention, "GATHERED_TOKENS", gathered)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 1, 12, 3])
    query = torch.randn(4, heads, 8, generator=generator)
    keys, values = (torch.randn(64, kv_heads, 8, generator=generator) for _ in range(2))
    slots = torch.randperm(64, generator=generator)[:60].view(4, 15)
    found = cpu_attention.batched_decode(query, torch.empty_like(query), keys, values, slots, lengths, 0.3)
    for b, length in enumerate(lengths):
        k, v = (cache[slots[b, :length]].movedim(0, 1) for cache in (keys, values))
        alone = scaled_dot_product_attention(query[b, :, None], k, v, scale=0.3, enable_gqa=True)[:, 0]
        torch.testing.assert_close(found[b], alone)
