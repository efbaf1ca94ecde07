"""The language model as the trainer sees it: token ids in, log-probabilities of the response tokens out."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from conf.errors import TrainerError
from tasks.trainer.batches import Batch
from tasks.trainer.export import weights_digest

# Rows of logits brought to float32 at a time: 32 x 50,000 x 4 bytes stay in the last-level cache.
_CHUNK = 32


class TokenLogprobs(nn.Module):
    """Log-probabilities at selected positions only: the head, a third of a small model's work, sees no other position.

    `autocast`: the dtype matrix products run in, or None for the weights' own.
    """

    def __init__(self, lm: PreTrainedModel, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.lm = lm
        self.autocast = autocast

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        select: Tensor,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability (n, differentiable) and entropy (n, not) of softmax(logits / temperature), in nats, float32.

        The arguments are `Batch.inputs()`, whose shapes stand at `Batch`.
        """
        with torch.autocast(input_ids.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            hidden = self.lm.get_decoder()(
                input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False
            ).last_hidden_state
            logits = self.lm.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, select))
        return _SelectedLogprobs.apply(logits, targets, temperature)


class _SelectedLogprobs(torch.autograd.Function):
    """log_softmax(logits / temperature)[targets] and entropy, with the probabilities kept in the logits' own memory.

    The plain composition holds logits, their float32 copy, log-probabilities and two gradients: five times as much.
    Overwriting is safe: a linear layer keeps its input, not its output, for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs)
        for i in range(0, len(targets), _CHUNK):
            rows = slice(i, i + _CHUNK)
            scaled = F.log_softmax(logits[rows].float() / temperature, dim=-1)
            logprobs[rows] = scaled.gather(1, targets[rows, None]).squeeze(1)
            probabilities = scaled.exp()
            entropy[rows] = -(probabilities * scaled).sum(-1)
            logits[rows] = probabilities
        ctx.save_for_backward(logits, targets, logprobs)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probabilities, targets, logprobs = ctx.saved_tensors
        grad = grads[0] / ctx.temperature
        # d log p(t) / d logit = [t] - p. The target's own entry comes from the float32 log-probability: in bfloat16
        # 1 - p would be 0 from p = 0.998 on.
        gradient = probabilities.mul_(-grad[:, None].to(probabilities.dtype))
        own = (grad * -torch.expm1(logprobs)).to(gradient.dtype)
        return gradient.scatter_(1, targets[:, None], own[:, None]), None, None


def load_policy(path: Path, precision: str) -> TokenLogprobs:
    """The model of a folder with float32 weights, without dropout; bf16: its matrix products run in bfloat16.

    Raises TrainerError where the folder holds no causal language model that this wrapper computes rightly.
    """
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,  # the default is to ask at the terminal
        )
    except (OSError, ValueError) as error:
        raise TrainerError(f"model.path must be a folder with a causal language model, but {path}: {error}") from error
    model = TokenLogprobs(lm.eval(), torch.bfloat16 if precision == "bf16" else None)
    _check_wrapper(model)
    return model


def load_reference(path: Path, precision: str) -> tuple[TokenLogprobs, str]:
    """The same model, frozen, and the content digest that a package of its float32 weights would have.

    Under bf16 the linear layers' weights are kept in bfloat16: autocast rounds them to that anyway, so an untrained
    policy and its reference agree bit for bit at half the memory.
    """
    model = load_policy(path, precision).requires_grad_(False)
    digest = weights_digest(model.lm)
    if model.autocast is not None:
        tied = {id(parameter) for parameter in model.lm.get_input_embeddings().parameters()}
        for module in model.modules():
            if isinstance(module, nn.Linear) and id(module.weight) not in tied:
                module.to(model.autocast)
    return model, digest


def shares_prefixes(lm: PreTrainedModel) -> bool:
    """Whether every layer attends to the whole context, which the mask of a shared row supposes."""
    return all(kind == "full_attention" for kind in getattr(lm.config, "layer_types", None) or [])


def _check_wrapper(model: TokenLogprobs) -> None:
    """Compare with the model's own forward on a few tokens: some architectures scale or cap logits after the head."""
    ids = torch.arange(1, 9)[None] % model.lm.config.vocab_size
    batch = Batch(ids, torch.arange(8)[None], None, torch.arange(7), ids[0, 1:], torch.arange(7))
    with torch.no_grad(), torch.autocast("cpu", dtype=model.autocast, enabled=model.autocast is not None):
        own = model.lm(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found, _ = model(*batch.inputs(), temperature=1.0)
    expected = own.gather(1, batch.targets[:, None]).squeeze(1)
    if not torch.allclose(found, expected, atol=0.05):
        raise TrainerError(
            f"model type {model.lm.config.model_type}: the trainer's log-probabilities must equal the model's own, "
            f"got {found.tolist()} instead of {expected.tolist()}; this architecture is not supported"
        )
