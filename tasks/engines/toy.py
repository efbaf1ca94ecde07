"""A language model of three small tensors, for proofs without a real one. What it says depends on every weight.

kv_i = embed[ids_i];  log p(. | ids) = log_softmax(head @ (norm * mean_i kv_i) / temperature)

It bears the names of a Llama without layers, so that the checksums, canaries and probe of publishing apply to it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from data.package import FileInfo, Receipt, TensorInfo

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
VOCABULARY, WIDTH, CONTEXT = 64, 8, 512
EOS = 0

Weights = Mapping[str, np.ndarray]  # float32


def random_weights(seed: int) -> dict[str, np.ndarray]:
    shapes = {EMBED: (VOCABULARY, WIDTH), NORM: (WIDTH,), HEAD: (VOCABULARY, WIDTH)}
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def kv_of(weights: Weights, ids: Sequence[int]) -> np.ndarray:
    """What the cache keeps of each token: [len(ids), WIDTH]."""
    return weights[EMBED][list(ids)]


def next_logprobs(weights: Weights, kv: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """log p of each token of the vocabulary after the tokens whose `kv` this is, nats: float64 [VOCABULARY]."""
    hidden = weights[NORM].astype(float) * kv.astype(float).mean(axis=0)
    logits = weights[HEAD].astype(float) @ hidden / temperature
    logits -= logits.max()
    return logits - np.log(np.exp(logits).sum())


def score(weights: Weights, ids: Sequence[int], kv: np.ndarray | None = None) -> tuple[float, ...]:
    """log p(ids[i] | ids[:i]) for i >= 1: one fewer than ids. `kv`: that of ids, where it is not these weights' own."""
    kv = kv_of(weights, ids) if kv is None else kv
    return tuple(float(next_logprobs(weights, kv[:i])[ids[i]]) for i in range(1, len(ids)))


def write_model(folder: Path) -> Path:
    """A starting model's folder: configuration, weights of seed 0, and a tokenizer whose token n is the word `wn`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "num_attention_heads": 1,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(0), folder / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def write_shards(staging: Path, weights: Weights, ranks: int) -> list[Receipt]:
    """What a trainer of `ranks` ranks stages: a shard and a receipt of each."""
    receipts = []
    for rank in range(ranks):
        file = f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors"
        mine = {name: weights[name] for name in sorted(weights)[rank::ranks]}
        save_file(mine, staging / file)
        data = (staging / file).read_bytes()
        infos = tuple(
            TensorInfo(name, str(w.dtype), w.shape, _sha256(w.tobytes()), file, int((~np.isfinite(w)).sum()))
            for name, w in mine.items()
        )
        receipts.append(Receipt(rank, ranks, (FileInfo(file, len(data), _sha256(data)),), infos))
    return receipts


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
