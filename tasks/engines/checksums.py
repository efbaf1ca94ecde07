"""What a CPU engine's checksums must be if its memory holds exactly a sealed package: computed from the package alone.

SGLang 0.5.23 sums a tensor on the CPU as the first 8 bytes of the SHA-256 of its bytes (managers/mm_utils.py,
`tensor_hash`), and keeps three kinds of tensors otherwise than the package: query, key and value are one tensor, gate
and up are one, and the vocabulary is padded with rows of zeros to a multiple of 64. Rows come first in memory, so the
bytes of a joined tensor are the bytes of its parts in order.
"""

import hashlib
import json
import math
import mmap
from pathlib import Path
from typing import Any

from data.package import Package, TensorInfo
from data.shards import WIDTHS, Entry, read_header

# Architectures whose SGLang classes keep exactly the tensors named below.
LLAMA_LIKE = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
READABLE = {"LlamaForCausalLM", "MistralForCausalLM"}  # those that answer /get_weights_by_name
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
VOCABULARY = {"model.embed_tokens.weight", "lm_head.weight"}
PADDING = 64  # rows; layers/vocab_parallel_embedding.py


def expected_checksums(package: Package, device: str, dtype: str) -> dict[str, str] | None:
    """{tensor name in the engine: checksum}, for an engine with one rank; None where it cannot be known from outside:
    another device or architecture, or an engine that converts the package to its own dtype."""
    tensors = {t.name: t for t in package.manifest.tensors}
    converted = any(t.dtype != dtype for t in tensors.values())
    if device != "cpu" or converted or _config(package)["architectures"][0] not in LLAMA_LIKE:
        return None
    places = {file: read_header(package.folder / file) for file in {t.file for t in tensors.values()}}
    wholes = {part: (whole, parts) for whole, parts in JOINED.items() for part in parts}
    found = {}
    for name, tensor in tensors.items():
        module = name.split(".")[-2]
        if module in wholes:
            whole, parts = wholes[module]
            joined = [tensors[name.replace(module, part)] for part in parts]
            found[name.replace(module, whole)] = _sum(package.folder, joined, places)
        elif name in VOCABULARY and tensor.shape[0] % PADDING:
            found[name] = _sum(package.folder, [tensor], places, -tensor.shape[0] % PADDING)
        else:
            found[name] = tensor.sha256[:16]
    return found


def readable_by_name(package: Package) -> bool:
    """Whether SGLang returns the right values for a tensor asked for by its Hugging Face name."""
    config = _config(package)
    if config["architectures"][0] not in READABLE:
        return False
    usual = config["hidden_size"] // config["num_attention_heads"]  # SGLang cuts key and value out by this size
    return config.get("head_dim") in (None, usual)


def _config(package: Package) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((package.folder / "config.json").read_text())
    return {"architectures": [""], **config}


def _sum(folder: Path, parts: list[TensorInfo], places: dict[str, dict[str, Entry]], zero_rows: int = 0) -> str:
    digest = hashlib.sha256()
    for part in parts:
        entry = places[part.file][part.name]
        with (
            open(folder / part.file, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
            memoryview(data) as whole,
            whole[entry.start : entry.end] as tensor,
        ):
            digest.update(tensor)
    digest.update(bytes(zero_rows * math.prod(parts[0].shape[1:]) * WIDTHS[parts[0].dtype]))
    return digest.hexdigest()[:16]
