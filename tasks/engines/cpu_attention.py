"""Decoding on a CPU server, one attention call for many sequences.

SGLang's `torch_native` backend calls attention once for each sequence: with 64 short ones that is 40% of the server's
time. This goes around its decode step through SGLang's own hooks (sglang.srt.plugins); everything else stays SGLang's.
"""

from collections.abc import Callable
from typing import Any

DECODE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode"
GATHERED_TOKENS = 32_768  # keys gathered at once, padding included; bounds memory, and waste where lengths differ


def register() -> None:
    """Before SGLang applies its hooks, in every process of the server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(DECODE, _decode, HookType.AROUND)


def _decode(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    special = kwargs.get("encoder_lens") is not None or kwargs.get("is_cross_attn")
    window = kwargs.get("sliding_window_size")
    if special or (window is not None and window > -1):
        return original(*args, **kwargs)
    _, query, output, keys, values, req_to_token, req_pool_indices, seq_lens = args[:8]
    return batched_decode(query, output, keys, values, req_to_token[req_pool_indices], seq_lens, kwargs.get("scaling"))


def batched_decode(
    query: Any, output: Any, keys: Any, values: Any, slots: Any, lengths: Any, scale: float | None
) -> Any:
    """Write attention of one new token for each of B sequences into `output`, and return it.

    query, output (B, heads, size); keys, values (slots, kv heads, size); slots (B, >= longest): where each token's key
    and value are; lengths (B). Query head h reads key head h // (heads / kv heads).
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    heads, kv_heads = query.shape[1], keys.shape[1]
    order = torch.argsort(lengths)  # similar lengths together: less padding
    start = 0
    while start < len(order):
        # As many as fit, judged by the longest sequence the group could have.
        count = max(1, GATHERED_TOKENS // int(lengths[order[-1]]))
        rows = order[start : start + count]
        longest = int(lengths[rows[-1]])
        at = slots[rows, :longest]
        within = torch.arange(longest) < lengths[rows, None]
        # Heads that share a key are further rows of the query: (B, kv heads, heads / kv heads, size).
        grouped = query[rows].view(len(rows), kv_heads, heads // kv_heads, -1)
        attended = scaled_dot_product_attention(
            grouped,
            keys[at].movedim(1, 2).to(query.dtype),
            values[at].movedim(1, 2).to(query.dtype),
            attn_mask=within[:, None, None, :],
            scale=scale,
        )
        output[rows] = attended.reshape(len(rows), heads, -1)
        start += count
    return output
