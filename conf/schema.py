"""Every setting of an experiment: type, default, unit, range and meaning. Defaults stand here and nowhere else.

`conf.load.load_experiment` fills these classes from YAML and checks them. Ranges are declared beside each field;
checks that involve several fields are in `conf.check`.
"""

# ruff: noqa: RUF009  (`setting` makes dataclass fields)

import math
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declare a field with its meaning, unit and range. A list, dict or dataclass default is copied per instance."""
    metadata = {"help": help, "unit": unit, "ge": ge, "gt": gt, "le": le, "lt": lt}
    if default is MISSING:
        return field(metadata=metadata)
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Model:
    path: str = setting("", "folder with the starting model: config.json, tokenizer and safetensors weights")
    device: Literal["cpu", "cuda"] = setting("cpu", "where the engines and the trainer run")


@dataclass(frozen=True)
class Prompts:
    source: Literal["reasoning_gym", "jsonl", "parquet"] = setting("reasoning_gym", "where prompts come from")
    task: str = setting("", "name of the reasoning-gym task (source: reasoning_gym)")
    task_options: dict[str, Any] = setting({}, "options of that task, under reasoning-gym's own names")
    path: str = setting("", "file to read (source: jsonl or parquet)")
    prompt_field: str = setting("prompt", "column of that file with the user's message")
    answer_field: str = setting("answer", "column of that file with the reference answer")
    size: int = setting(10_000, "prompts generated (source: reasoning_gym)", unit="prompts", ge=1)
    per_iteration: int = setting(8, "prompts drawn in each iteration; each becomes one group", unit="prompts", ge=1)
    shuffle: bool = setting(False, "draw in an order fixed by `seed`, another one in each epoch")
    system: str = setting("", "system message put before each prompt; empty: none")
    max_tokens: int = setting(
        1024, "longest prompt accepted; a longer one is refused by its index", unit="tokens", ge=1
    )


@dataclass(frozen=True)
class Rollout:
    samples_per_prompt: int = setting(8, "group size: samples drawn for each prompt", unit="samples", ge=2)
    max_new_tokens: int = setting(256, "longest response", unit="tokens", ge=1)
    temperature: float = setting(1.0, "sampling temperature", gt=0)
    top_p: float = setting(1.0, "nucleus sampling", gt=0, le=1)
    top_k: int = setting(-1, "sample from the k most likely tokens; -1: all", ge=-1)
    max_in_flight: int = setting(
        256, "requests of one rollout in flight at a time over all engines", unit="requests", ge=1
    )
    timeout_s: float = setting(600.0, "deadline of one request", unit="s", gt=0)
    retries: int = setting(2, "times a request is sent again after a failure that may pass", ge=0)
    max_failed_share: float = setting(
        0.25, "share of groups dropped for a failed sample above which the stage stops the run", ge=0, le=1
    )
    sample_deadline_s: float = setting(
        0.0,
        "time one sample of a training batch may take from its first sending, with its retries; 0: no deadline",
        unit="s",
        ge=0,
    )
    on_deadline: Literal["truncate", "drop_group"] = setting(
        "truncate",
        "what the deadline does to a sample; truncate: it keeps its tokens so far, with finish_reason `deadline`; "
        "drop_group: its whole group is dropped",
    )
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = setting(
        "bfloat16",
        "precision of the engines' weights; auto: bfloat16 on a GPU and on a CPU that computes it (AVX512-BF16, AMX), "
        "else float32, as found when the YAML is loaded",
    )
    kv_policy: Literal["pin", "rebuild", "keep"] = setting(
        "pin",
        "what a weight update does to running requests; pin: they finish under their weights; rebuild: their KV is "
        "computed again and they go on under the new weights, each token with its own version; keep: they go on with "
        "old KV under new weights, an approximation (needs accept_stale_kv)",
    )
    accept_stale_kv: bool = setting(
        False, "declares that training may use tokens whose KV is of older weights than their label (kv_policy: keep)"
    )
    urls: list[str] = setting([], "external SGLang servers; empty: Ratchet starts its own, one per engine of the pool")
    api_key_env: str = setting("SGLANG_API_KEY", "environment variable with the external servers' API key")
    admin_key_env: str = setting("SGLANG_ADMIN_API_KEY", "environment variable with the external servers' admin key")
    start_timeout_s: float = setting(300.0, "deadline for a managed engine to become ready", unit="s", gt=0)
    sglang: dict[str, Any] = setting({}, "options of the SGLang server, under SGLang's own names (tp_size: 2)")


@dataclass(frozen=True)
class GroupSampling:
    filter: Literal["none", "zero_variance"] = setting(
        "none",
        "zero_variance: a group whose rewards are all equal is not trained, and another prompt is sent in its place "
        "(dynamic sampling of DAPO, arXiv 2503.14476; needs a stage `filter`, as graph: dapo has)",
    )
    max_rounds: int = setting(
        4,
        "an iteration sends at most this many times the prompts of its first round",
        unit="rounds",
        ge=1,
    )
    on_exhausted: Literal["fail", "train_fewer"] = setting(
        "fail",
        "what happens when all of these are sent and too few groups have passed; train_fewer: those that passed are "
        "trained, and only an iteration without any stops the run",
    )
    oversample: float = setting(1.0, "groups started for each group needed", ge=1, le=16)
    keep: Literal["in_order", "fastest"] = setting(
        "in_order",
        "which groups are kept of more than are needed; in_order: all are finished, and the first in the order of the "
        "prompts are kept; fastest: the first to be complete, the rest is aborted: shorter, so biased to short answers",
    )

    @property
    def refills(self) -> bool:
        """Whether the groups that an iteration sends are known only once its rollout has ended."""
        return self.filter != "none" and self.max_rounds > 1

    def started(self, needed: int) -> int:
        """Groups to have under way for so many that are needed."""
        return math.ceil(self.oversample * needed - 1e-9)  # 1.1 x 10 is 11.000000000000002

    def candidates(self, needed: int) -> int:
        """The most groups that an iteration sends to get so many."""
        return self.started(needed) * (self.max_rounds if self.refills else 1)


@dataclass(frozen=True)
class RewardFunction:
    path: str = setting(MISSING, "import path of the function, `package.module:function`")
    weight: float = setting(1.0, "weight in the sum")
    options: dict[str, Any] = setting({}, "keyword arguments of the function")


@dataclass(frozen=True)
class Reward:
    functions: dict[str, RewardFunction] = setting(
        {}, "named rewards; each becomes a column, their weighted sum is `rewards`"
    )
    workers: int = setting(2, "worker processes", unit="processes", ge=1)
    timeout_s: float = setting(5.0, "time limit of one call", unit="s", gt=0)
    memory_mb: int = setting(1024, "address space a worker may add to what it has after start", unit="MiB", ge=64)
    on_failure: Literal["drop_group", "fail"] = setting(
        "drop_group",
        "what a timeout, an error or a non-finite value does: drop the sample's whole group, or stop the run",
    )
    max_failed_share: float = setting(0.25, "share of failed samples above which the stage stops the run", ge=0, le=1)


@dataclass(frozen=True)
class Advantage:
    estimator: Literal["grpo", "rloo"] = setting("grpo", "grpo: group mean and deviation; rloo: leave-one-out mean")
    normalize_std: bool = setting(True, "grpo: divide by the group's standard deviation (false: Dr. GRPO)")
    epsilon: float = setting(1e-6, "added to the standard deviation", gt=0)


@dataclass(frozen=True)
class KL:
    coef: float = setting(0.0, "weight of the KL term in the loss; 0: no term", ge=0)
    estimator: Literal["k1", "k2", "k3"] = setting("k3", "estimator of KL(policy || reference)")


@dataclass(frozen=True)
class Correction:
    kind: Literal["none", "ratio", "tis", "mis"] = setting(
        "none",
        "what answers for data of older weights; ratio: the loss's own clipped ratio to the behaviour policy "
        "(old_logprobs: behavior); importance weights pi_old / pi_behavior on the loss (old_logprobs: recomputed): "
        "tis truncates them at `high`, mis sets those outside [low, high] to 0 (IcePop: mis, token, 0.5 to 5)",
    )
    level: Literal["token", "sequence"] = setting("token", "weigh each token, or each response by its tokens' product")
    low: float = setting(0.0, "mis: smallest weight that counts", ge=0)
    high: float = setting(2.0, "largest weight that counts", gt=0)


@dataclass(frozen=True)
class Update:
    learning_rate: float = setting(1e-6, "AdamW's peak learning rate", gt=0)
    warmup_steps: int = setting(0, "optimizer steps of linear warm-up", unit="optimizer steps", ge=0)
    weight_decay: float = setting(0.0, "AdamW's weight decay", ge=0)
    adam_beta1: float = setting(0.9, "AdamW's first moment decay", ge=0, lt=1)
    adam_beta2: float = setting(0.999, "AdamW's second moment decay", ge=0, lt=1)
    max_grad_norm: float = setting(1.0, "global gradient norm is clipped to this; 0: no clipping", ge=0)
    epochs: int = setting(1, "passes over the iteration's samples", unit="passes", ge=1)
    mini_batches: int = setting(1, "optimizer steps in each pass", unit="optimizer steps", ge=1)
    micro_batch_tokens: int = setting(
        4096, "tokens computed at once on a rank; changes memory and speed, never the result", unit="tokens", ge=1
    )
    share_prefix_tokens: int = setting(
        1024,
        "a group's prompt is computed once where prompt and responses together fit in this; 0: never",
        unit="tokens",
        ge=0,
    )
    clip_ratio: float = setting(0.2, "PPO clip range below 1", gt=0, lt=1)
    clip_ratio_high: float = setting(0.2, "PPO clip range above 1", gt=0)
    old_logprobs: Literal["behavior", "recomputed"] = setting(
        "behavior",
        "denominator of the ratio: the engine's probabilities, or the trainer's own (needs a stage `old_logprobs`)",
    )
    correction: Correction = setting(Correction, "off-policy correction; a schedule that runs ahead needs one")
    kl: KL = setting(KL, "KL term against the reference model")
    precision: Literal["bf16", "fp32", "auto"] = setting(
        "bf16", "bf16: float32 weights computed under bfloat16 autocast; auto: as for rollout.dtype"
    )
    zero_stage: Literal[0, 1, 2, 3] = setting(0, "DeepSpeed ZeRO stage")
    checkpoint_every: int = setting(5, "iterations between training checkpoints", unit="iterations", ge=1)
    keep_checkpoints: int = setting(2, "training checkpoints kept", ge=1)
    max_logprob_diff: float = setting(
        0.2,
        "mean |log-probability of engine - of trainer| over the trained tokens above which the run stops; in step "
        "only, since the updates between have their part in it where a schedule runs ahead",
        gt=0,
    )
    start_timeout_s: float = setting(600.0, "deadline for the trainer to load", unit="s", gt=0)
    timeout_s: float = setting(3600.0, "deadline of one trainer command", unit="s", gt=0)
    deepspeed: dict[str, Any] = setting({}, "DeepSpeed configuration, under DeepSpeed's own names")


@dataclass(frozen=True)
class Publish:
    dtype: Literal["engine", "bfloat16", "float16", "float32"] = setting("engine", "precision of weight packages")
    drain_timeout_s: float = setting(
        60.0, "time running requests get to finish before they are aborted", unit="s", gt=0
    )
    timeout_s: float = setting(600.0, "deadline of one engine command", unit="s", gt=0)
    probe_tokens: int = setting(
        16, "length of the probe whose log-probabilities engine and trainer compare", unit="tokens", ge=2
    )
    probe_tolerance: float = setting(0.25, "mean |difference| allowed on the probe", gt=0)
    keep_versions: int = setting(3, "newest committed weight packages kept", ge=2)
    min_engines: int = setting(1, "engines that must be READY, or the version is not committed and the run stops", ge=1)
    max_restarts: int = setting(3, "restarts of one engine in one publish before it is taken out of its pool", ge=0)
    restart_backoff_s: float = setting(
        1.0, "wait before the first restart, doubled for each further one", unit="s", ge=0
    )


@dataclass(frozen=True)
class Schedule:
    kind: Literal["sync", "one_step_off", "async"] = setting(
        "sync",
        "sync: a rollout begins when the iteration before has ended; one_step_off: its rollout runs beside the update "
        "before it (lag 1); async: rollouts run ahead as far as max_lag and the queue allow",
    )
    max_lag: int = setting(
        0,
        "async: updates at most between the weights that generated a response's first token and those it trains; "
        "leave 0 for sync and one_step_off, whose lag is fixed at 0 and 1",
        unit="updates",
        ge=0,
    )
    publish_every: int = setting(
        1, "updates between publishes; the last iteration publishes too (async)", unit="updates", ge=1
    )
    queue_groups: int = setting(
        0,
        "groups issued and not yet taken by an update, at most; 0: those of max_lag + 1 batches (one_step_off: 2)",
        unit="groups",
        ge=0,
    )
    queue_tokens: int = setting(
        0,
        "response tokens of those groups, at most; under way they count as max_new_tokens; 0: no limit",
        unit="tokens",
        ge=0,
    )
    stall_timeout_s: float = setting(
        7200.0,
        "a stage that waits while nothing in the run moves for this long ends the run, naming what is stuck",
        unit="s",
        gt=0,
    )

    @property
    def lag_limit(self) -> int:
        return {"sync": 0, "one_step_off": 1}.get(self.kind, self.max_lag)

    def most_groups(self, batch: int) -> int:
        """Groups that the lag limit lets be issued and not yet taken by an update, where a batch has `batch` groups."""
        return (self.lag_limit + 1) * batch

    @property
    def ahead(self) -> bool:
        """Whether rollouts run beside updates of earlier iterations."""
        return self.kind != "sync"


@dataclass(frozen=True)
class Evaluate:
    every: int = setting(0, "iterations between evaluations; 0: never", unit="iterations", ge=0)
    prompts: int = setting(
        64, "fixed prompts, taken from the end of the source and never trained on", unit="prompts", ge=1
    )
    samples_per_prompt: int = setting(1, "samples for each", unit="samples", ge=1)
    temperature: float = setting(0.0, "sampling temperature; 0: greedy", ge=0)


@dataclass(frozen=True)
class Bias:
    max_length: float = setting(
        0.2,
        "Kolmogorov-Smirnov distance between the response lengths of trained and of issued samples above which each "
        "iteration warns; never more than the share of samples that are not trained on, or cut at their deadline; "
        "1: no warning",
        gt=0,
        le=1,
    )
    max_reward: float = setting(0.2, "the same for rewards, which a filter by reward changes on purpose", gt=0, le=1)


@dataclass(frozen=True)
class Pool:
    roles: list[str] = setting([], "what runs here: rollout, train, cpu")
    devices: list[str] = setting(
        [],
        "what its engines and ranks run on and the run claims for itself: cores `cpu:0` or GPUs `cuda:0`; empty: any "
        "core; as many GPUs as it needs, the first that no pool names",
    )
    engines: int = setting(1, "SGLang servers in this pool (role rollout)", ge=1)
    ranks: int = setting(1, "trainer processes in this pool (role train)", ge=1)
    threads: int = setting(0, "CPU threads of each engine or rank; 0: all cores, those of `devices` shared out", ge=0)
    memory_share: float = setting(
        0.0,
        "share of a GPU's memory that an engine has while it serves (SGLang's mem_fraction_static); 0: SGLang's choice",
        ge=0,
        lt=1,
    )


@dataclass(frozen=True)
class Node:
    stage: str = setting(MISSING, "a built-in stage's name, or the import path of one's own: `package.module:name`")
    pool: str = setting(MISSING, "pool it runs in: its name, or a role (rollout, train, cpu) that one pool has")
    needs: list[str] = setting([], "nodes whose output this one reads")
    options: dict[str, Any] = setting({}, "keyword arguments of a stage of one's own")


@dataclass(frozen=True)
class Experiment:
    name: str = setting("", "name of the runs; empty: the YAML file's name")
    seed: int = setting(0, "seeds prompt order and sampling", ge=0)
    iterations: int = setting(10, "RL iterations", unit="iterations", ge=1)
    runs_dir: str = setting("runs", "folder that holds the runs")
    model: Model = setting(Model, "the language model")
    prompts: Prompts = setting(Prompts, "where prompts come from")
    rollout: Rollout = setting(Rollout, "generation")
    sampling: GroupSampling = setting(GroupSampling, "which groups of samples are generated, and which are trained")
    reward: Reward = setting(Reward, "rewards")
    advantage: Advantage = setting(Advantage, "advantages")
    update: Update = setting(Update, "the optimizer step")
    publish: Publish = setting(Publish, "bringing new weights to the engines")
    evaluate: Evaluate = setting(Evaluate, "evaluation during the run")
    schedule: Schedule = setting(Schedule, "how far rollouts run ahead of updates")
    bias: Bias = setting(Bias, "when trained samples are no longer like the issued ones")
    pools: dict[str, Pool] = setting(
        {"rollout": Pool(roles=["rollout"]), "train": Pool(roles=["train"]), "cpu": Pool(roles=["cpu"])},
        "named sets of devices; those of the default are called rollout, train and cpu",
    )
    graph: dict[str, Node] = setting({}, "the stages; `graph: grpo` takes conf/graph/grpo.yaml")
