"""Every column of every dataset, declared once: type, shape, unit, producer and meaning.

Shape letters: N rows (samples), P prompt tokens, R response tokens, S spans. A list column holds one list a row.
"""

from dataclasses import dataclass

import pyarrow as pa

SPAN = pa.struct([("label", pa.string()), ("start", pa.int32()), ("end", pa.int32())])


@dataclass(frozen=True)
class Column:
    name: str
    type: pa.DataType
    shape: str
    unit: str
    producer: str
    meaning: str
    nullable: bool = False

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, self.nullable)


_ALL = [
    # prompts: one row a prompt
    Column("group_id", pa.string(), "N", "", "prompts", "the prompt's group: iteration and position, fixed width"),
    Column("prompt_index", pa.int64(), "N", "", "prompts", "position in the prompt source, counted over epochs"),
    Column("prompt_text", pa.string(), "N", "", "prompts", "the user's message, for reward functions and readers"),
    Column("prompt_ids", pa.list_(pa.int32()), "N,P", "token ids", "prompts", "the prompt after the chat template"),
    Column("answer", pa.string(), "N", "", "prompts", "the reference answer"),
    Column("prompt_data", pa.string(), "N", "JSON", "prompts", "whatever else the source knows of the prompt"),
    # rollout: one row a sample; carries the prompt columns on
    Column(
        "sample_id", pa.string(), "N", "", "rollout", "the row key: group and member, fixed width, unique in the run"
    ),
    Column("response_ids", pa.list_(pa.int32()), "N,R", "token ids", "rollout", "the tokens the engine generated"),
    Column(
        "response_mask",
        pa.list_(pa.bool_()),
        "N,R",
        "",
        "rollout",
        "true where a token was generated and may be trained on",
    ),
    Column(
        "behavior_logprobs",
        pa.list_(pa.float32()),
        "N,R",
        "nats",
        "rollout",
        "log-probability of each token under the weights that generated it, from the engine; never written again",
    ),
    Column(
        "version_spans",
        pa.list_(SPAN),
        "N,S",
        "tokens",
        "rollout",
        "which version generated which tokens, from the engine",
    ),
    Column("policy_version", pa.int64(), "N", "", "rollout", "number of the version of the first token"),
    Column(
        "finish_reason",
        pa.string(),
        "N",
        "",
        "rollout",
        "stop or length, from the engine; deadline: cut off by rollout.sample_deadline_s",
    ),
    Column("response_text", pa.string(), "N", "", "rollout", "the response decoded, for reward functions and readers"),
    Column("engine", pa.string(), "N", "", "rollout", "name and boot of the engine that answered"),
    Column(
        "cached_tokens", pa.int32(), "N", "tokens", "rollout", "prompt tokens the engine took from its prefix cache"
    ),
    # reward
    Column(
        "rewards",
        pa.float64(),
        "N",
        "",
        "reward",
        "weighted sum of the components; null unless every outcome is ok",
        True,
    ),
    Column("reward_outcome", pa.string(), "N", "", "reward", "ok, timeout, error or nonfinite"),
    Column("reward_error", pa.string(), "N", "", "reward", "what went wrong; empty for ok"),
    # log-probabilities of other policies at the same tokens
    Column("ref_logprobs", pa.list_(pa.float32()), "N,R", "nats", "reference", "under the frozen reference model"),
    Column(
        "old_logprobs",
        pa.list_(pa.float32()),
        "N,R",
        "nats",
        "old_logprobs",
        "under the trainer's weights before the update",
    ),
    # advantage
    Column("advantages", pa.list_(pa.float32()), "N,R", "", "advantage", "advantage of each token"),
]

COLUMNS: dict[str, Column] = {c.name: c for c in _ALL}

REWARD_COMPONENT = "reward/"  # a column `reward/<name>` for each named reward


def column(name: str) -> Column:
    """The declaration of a column; `reward/<name>` and `<stage>.<name>` (a stage of one's own) are families.

    Raises KeyError for a name that nobody declared.
    """
    if name.startswith(REWARD_COMPONENT):
        return Column(name, pa.float64(), "N", "", "reward", "one named reward; null unless its outcome is ok", True)
    return COLUMNS[name]
