"""Publishing a 500 MB package to a real SGLang server, against the plain alternative: `python -m benchmarks.publish`.

Plain: `cp` of the shard, `sha256sum` of the copy, and one /update_weights_from_disk. Ratchet: `publish_to_engines` of
the sealed package, with every check. Both in turn on the same server; the medians and their ratio are printed. The
engine is warm and the files are in the page cache for both. Export and sealing, the trainer's part, are not in it.
"""

import asyncio
import hashlib
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from conf.schema import Experiment, Model, Prompts, Publish, Rollout
from data.ledger import Ledger
from data.model_files import model_tensors
from data.package import FileInfo, Probe, Receipt, TensorInfo
from data.refs import PolicyRef
from data.weights import seal
from tasks.engines.client import Engine, Sampling
from tasks.engines.server import managed_engines
from tasks.publish import publish_to_engines

ROUNDS = 5
TARGET = 1.5
PROBE_IDS = tuple(range(300, 316))
SHARD = "model-00001-of-00001.safetensors"


def make_model(folder: Path) -> None:
    """A random Llama of 262 M parameters: 525 MB in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    text = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def seal_version(run: Path, model: Path, number: int, probe: Probe) -> PolicyRef:
    """Version `number`: the model with a scaled final norm, so that every version differs."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * (1 + number / 64)
    staging = run / "weights" / "staging" / str(number)
    staging.mkdir(parents=True)
    save_file(tensors, staging / SHARD)
    infos = tuple(
        TensorInfo(
            name,
            "bfloat16",
            tuple(t.shape),
            hashlib.sha256(t.contiguous().view(torch.uint8).numpy().data).hexdigest(),
            SHARD,
            0,
        )
        for name, t in tensors.items()
    )
    with open(staging / SHARD, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    shard = FileInfo(SHARD, (staging / SHARD).stat().st_size, digest)
    return seal(
        staging,
        run / "weights",
        [Receipt(0, 1, (shard,), infos)],
        model=model,
        expected_tensors=model_tensors(model, "bfloat16"),
        run="benchmark",
        number=number,
        parent=number - 1 if number else None,
        optimizer_step=number,
        dataset="",
        config_digest="",
        code_digest="",
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        probe=probe,
        probe_tolerance=10.0,  # speed is measured here, and the probe's cost does not depend on its outcome
    ).manifest.ref


async def plain(engine: Engine, run: Path, policy: PolicyRef) -> float:
    """Seconds for cp + sha256sum + one load."""
    source, target = run / "weights" / policy.label, run / "plain"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    began = time.perf_counter()
    subprocess.run(["cp", source / SHARD, target / SHARD], check=True)
    subprocess.run(["sha256sum", target / SHARD], check=True, stdout=subprocess.DEVNULL)
    await engine.update_weights(str(target), f"plain-{policy.label}", 600)
    return time.perf_counter() - began


async def measure(root: Path) -> None:
    model, run = root / "model", root / "run"
    make_model(model)
    run.mkdir()
    experiment = Experiment(
        model=Model(str(model)),
        prompts=Prompts(max_tokens=64),
        rollout=Rollout(max_new_tokens=64, max_in_flight=8),
        publish=Publish(keep_versions=ROUNDS + 1),
    )
    ledger = Ledger(run / "ledger.sqlite")
    ledger.open_run("benchmark", "", "")
    probe = Probe(PROBE_IDS, (-10.0,) * (len(PROBE_IDS) - 1))
    times: dict[str, list[float]] = {"plain": [], "ratchet": []}
    async with managed_engines(experiment, run) as fleet:
        engine = fleet[0]
        await engine.generate_unready(
            rid="warm-up", prompt_ids=PROBE_IDS, sampling=Sampling(1, 0.0), extra_key="warm-up", timeout_s=600
        )
        for number in range(ROUNDS):
            policy = seal_version(run, model, number, probe)
            ledger.allocate_version(f"v{number}", number - 1 if number else None, number, "")
            ledger.set_version(number, "SEALED", policy.content)
            times["plain"].append(await plain(engine, run, policy))
            for row in ledger.engines():  # the plain load is nobody's version: Q3 would refuse it
                ledger.set_engine(row.name, row.boot, "DIRTY", "", "")
            began = time.perf_counter()
            published = await publish_to_engines(policy, run / "weights", fleet, ledger, experiment)
            times["ratchet"].append(time.perf_counter() - began)
            print(
                f"round {number + 1}: plain {times['plain'][-1]:.2f} s, ratchet {times['ratchet'][-1]:.2f} s "
                f"(install {published.install_s:.2f}, verify {published.verify_s:.2f})",
                flush=True,
            )
    ledger.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["ratchet"] / medians["plain"]
    print(
        f"publish of {published.bytes / 1e6:.0f} MB: ratchet {medians['ratchet']:.2f} s, "
        f"cp + sha256sum + load {medians['plain']:.2f} s, ratio {ratio:.2f} (target <= {TARGET})"
    )


def main() -> None:
    root = Path(tempfile.mkdtemp(prefix="ratchet-publish-"))
    try:
        asyncio.run(measure(root))
    finally:
        for folder in (root / "run" / "weights").glob("[0-9]*"):
            folder.chmod(0o755)
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
