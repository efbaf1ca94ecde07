"""DeepSpeed's side of the trainer: its configuration, and optimizer steps that refuse a gradient that is not finite."""

import math
from typing import Any

import deepspeed
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from conf.errors import ConfigError, TrainerError
from conf.schema import Update


def deepspeed_config(update: Update) -> dict[str, Any]:
    """DeepSpeed's configuration: Ratchet's settings under DeepSpeed's names, with `update.deepspeed` merged in.

    Raises ConfigError where both set the same option.
    """
    adamw = {
        "lr": update.learning_rate,
        "betas": [update.adam_beta1, update.adam_beta2],
        "weight_decay": update.weight_decay,
        "torch_adam": True,  # DeepSpeed's own would be compiled at first use
        "fused": True,
        "amsgrad": False,  # its third moment is not in a checkpoint
    }
    ours = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed only reports with it
        "gradient_accumulation_steps": 1,  # micro-batches vary in number; the loss is divided by tokens instead
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {"stage": update.zero_stage},
        # Without ZeRO, DeepSpeed clips but tells nobody the norm: `apply_step` does both there.
        "gradient_clipping": update.max_grad_norm if update.zero_stage else 0.0,
        "steps_per_print": None,
        # `update.precision` rules instead; a checkpoint holds no loss scale.
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
    }
    return _merge(ours, update.deepspeed, "update.deepspeed")


def _merge(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in theirs.items():
        name = f"{where}.{key}"
        if key not in ours:
            merged[key] = value
        elif isinstance(ours[key], dict) and isinstance(value, dict):
            merged[key] = _merge(ours[key], value, name)
        else:
            raise ConfigError(f"{name} must not be set: Ratchet sets it itself, to {ours[key]!r}; remove it")
    return merged


def build_engine(model: nn.Module, update: Update) -> Any:
    """The model under DeepSpeed, in the process group that is already there."""
    # The shared-memory collective serves tensor-parallel inference only. Building it takes a compiler and half a
    # minute, and a build that is killed leaves a lock on which the next one waits for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(update))
    engine.eval()  # no dropout: the ratio compares one function at two weights, and no random state needs to be kept
    return engine


def learning_rate(update: Update, step: int) -> float:
    """The rate of optimizer step `step` (counted from 0): linear over the first `warmup_steps`, then constant."""
    return update.learning_rate * min(1.0, (step + 1) / max(1, update.warmup_steps))


def apply_step(engine: Any, update: Update, step: int) -> tuple[float, float]:
    """Clip the accumulated gradient and apply it as optimizer step `step`; gives (norm before clipping, learning rate).

    Raises TrainerError, with the weights as they were, where the norm is not finite.
    """
    rate = learning_rate(update, step)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    if update.zero_stage == 0:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        total = get_total_norm(gradients)
        norm = float(total)
        if math.isfinite(norm):
            if update.max_grad_norm and norm > update.max_grad_norm:
                clip_grads_with_norm_(engine.module.parameters(), update.max_grad_norm, total)
            engine.step()
    else:
        engine.step()  # ZeRO's optimizers skip a step whose gradient is not finite
        norm = float(engine.get_global_grad_norm()) if engine.was_step_applied() else math.inf
    if not math.isfinite(norm):
        raise TrainerError(
            f"optimizer step {step + 1}: the gradient's norm must be finite, got {norm}; the weights are as before"
        )
    return norm, rate
