"""What settings must not say together, and settings that say nothing.

Each check yields (dotted field, message); `conf.load` puts the place before it. Whether the graph's columns fit is
checked in `flows.graph`.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from conf.fields import Problem
from conf.pools import DEVICE, ROLES, co_located, devices_of_engine, devices_used, pools_meant
from conf.schema import Experiment, Pool

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# Options that Ratchet sets itself, by SGLang's name: where to say it instead.
SGLANG = {
    "model_path": "model.path",
    "model": "model.path",
    "tokenizer_path": "model.path",
    "device": "model.device",
    "dtype": "rollout.dtype",
    "load_format": "safetensors, which cannot hold code",
    "random_seed": "seed",
    "host": "",
    "port": "",
    "api_key": "",
    "admin_api_key": "",
    "weight_version": "",
    "skip_server_warmup": "",
    "sleep_on_idle": "",
    "log_level_http": "",
    "config": "rollout.sglang",
}
# Options of SGLang that would let somebody in; there is no setting that allows them.
SGLANG_DOORS = {
    "trust_remote_code": "it runs code from the model's folder",
    "enable_custom_logit_processor": "it runs code from requests",
    "dist_init_addr": "it listens on the network without a key",
    "nccl_init_addr": "it listens on the network without a key",
    "gated_launch_port": "it listens on the network without a key",
    "disaggregation_mode": "it listens on the network without a key",
    "kv_events_config": "it listens on the network without a key",
    "load_publish_endpoint": "it listens on the network without a key",
    "grpc_mode": "it starts another server",
    "grpc_port": "it starts another server",
    "smg_grpc_mode": "it starts another server",
    "smg_http_sidecar_port": "it starts another server",
    "sidecar": "it starts another server",
}
SGLANG_CPU = {"attention_backend": "", "mem_fraction_static": "max_total_tokens bounds memory on a CPU"}
SGLANG_CUDA = {
    "base_gpu_id": "pools.<name>.devices",
    "mem_fraction_static": "pools.<name>.memory_share",
    "enable_memory_saver": "pools.<name>.roles",
}
# Caches outside the engine's memory, which no flush empties. A request that goes on under new weights still looks there
# under its old version's key, and would find that version's KV.
LASTING_KV = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv")

# The same for DeepSpeed.
DEEPSPEED = {
    "train_batch_size": "prompts.per_iteration and rollout.samples_per_prompt",
    "train_micro_batch_size_per_gpu": "update.micro_batch_tokens",
    "gradient_accumulation_steps": "update.mini_batches",
    "optimizer": "update.learning_rate, update.weight_decay and update.adam_beta1 and 2",
    "scheduler": "update.warmup_steps",
    "gradient_clipping": "update.max_grad_norm",
    "bf16": "update.precision",
    "fp16": "update.precision",
    "torch_autocast": "update.precision",
    "zero_optimization.stage": "update.zero_stage",
    "steps_per_print": "",
}


def contradictions(experiment: Experiment) -> Iterator[Problem]:
    """Settings that cannot hold together."""
    yield from _names(experiment)
    yield from _prompts(experiment)
    yield from _engines(experiment)
    yield from _update(experiment)
    yield from _pools(experiment)
    yield from _graph(experiment)
    yield from _sampling(experiment)
    yield from _schedule(experiment)


def without_effect(experiment: Experiment, given: Collection[str]) -> Iterator[Problem]:
    """Settings that were given and change nothing, or not what they seem to. `given` holds dotted fields."""
    for field, reason in _idle(experiment):
        if any(name == field or name.startswith(field + ".") for name in given):
            yield field, f"has no effect: {reason}"
    stages = {node.stage for node in experiment.graph.values()}
    if "reference" in stages and experiment.update.kl.coef == 0 and not _has_own_stage(experiment):
        yield "update.kl.coef", "is 0, so the stage reference has no effect (graph: grpo_without_reference has none)"
    if experiment.rollout.top_p < 1 or experiment.rollout.top_k > 0:
        yield (
            "rollout.top_p" if experiment.rollout.top_p < 1 else "rollout.top_k",
            "truncates the distribution, but log-probabilities are those before truncation: ratios are biased",
        )
    if experiment.schedule.ahead and (both := co_located(experiment.pools)):
        yield "schedule.kind", f"overlaps nothing but rewards: pool {both} generates and trains in turn"
    sampling = experiment.sampling
    if sampling.filter != "none" and sampling.max_rounds == 1:
        yield "sampling.max_rounds", "is 1, so no prompt is sent in the place of a group that sampling.filter drops"
    if sampling.oversample > 1 and sampling.keep == "fastest":
        yield (
            "sampling.keep",
            "is fastest: what is slow is dropped, so the trained responses are shorter than the generated ones",
        )


def _names(experiment: Experiment) -> Iterator[Problem]:
    if not RUN_NAME.fullmatch(experiment.name):
        yield "name", f"must be letters, digits, ., - or _, since it names a folder, got {experiment.name!r}"
    if not experiment.model.path:
        yield "model.path", "must name the folder of the starting model, got ''"
    for name, function in experiment.reward.functions.items():
        if not IMPORT_PATH.fullmatch(function.path):
            yield f"reward.functions.{name}.path", f"must be `package.module:function`, got {function.path!r}"


def _prompts(experiment: Experiment) -> Iterator[Problem]:
    prompts, held_out = experiment.prompts, experiment.evaluate.prompts if experiment.evaluate.every else 0
    if prompts.source != "reasoning_gym":
        if not prompts.path:
            yield "prompts.path", f"must name the file to read, since prompts.source is {prompts.source}, got ''"
        return
    if not prompts.task:
        yield "prompts.task", "must name a reasoning-gym task, got ''"
    if {"size", "seed"} & prompts.task_options.keys():
        yield "prompts.task_options", "must not set size or seed: they are prompts.size and seed"
    drawn = experiment.sampling.candidates(prompts.per_iteration)
    if prompts.size < drawn + held_out:
        most = "prompts.per_iteration" if drawn == prompts.per_iteration else "those an iteration may send (sampling)"
        needed = f"{most} {drawn} + evaluate.prompts {held_out}"
        yield "prompts.size", f"must be >= {drawn + held_out} ({needed}), got {prompts.size}"


def _engines(experiment: Experiment) -> Iterator[Problem]:
    rollout = experiment.rollout
    if rollout.kv_policy == "keep" and not rollout.accept_stale_kv:
        yield (
            "rollout.kv_policy",
            "must be pin or rebuild, or rollout.accept_stale_kv must declare that training may use tokens computed "
            "from KV of older weights, got 'keep'",
        )
    if rollout.kv_policy == "rebuild":
        for option in rollout.sglang.keys() & set(LASTING_KV):
            yield (
                f"rollout.sglang.{option}",
                "must not be set under rollout.kv_policy: rebuild: what it keeps survives the flush at an update",
            )
    if rollout.top_k == 0:
        yield "rollout.top_k", "must be >= 1, or -1 for all tokens, got 0"
    for index, url in enumerate(rollout.urls):
        if problem := _url_problem(url):
            yield f"rollout.urls[{index}]", f"must be {problem}, got {url!r}"
    for url, count in Counter(url.rstrip("/") for url in rollout.urls).items():
        if count > 1:
            yield "rollout.urls", f"must name each server once, got {url} {count} times"
    for name, pool in experiment.pools.items():
        if rollout.urls and "rollout" in pool.roles and pool.engines not in (1, len(rollout.urls)):
            yield f"pools.{name}.engines", f"must be {len(rollout.urls)}, as many as rollout.urls, got {pool.engines}"
        engines, needed = len(rollout.urls) or pool.engines, experiment.publish.min_engines
        if "rollout" in pool.roles and needed > engines:
            yield "publish.min_engines", f"must be <= {engines}, the engines of pool {name}, got {needed}"
    owned = SGLANG | (SGLANG_CUDA if experiment.model.device == "cuda" else SGLANG_CPU)
    for option in rollout.sglang:
        name = option.replace("-", "_").strip("_")
        if name != option:
            yield f"rollout.sglang.{option}", f"must be written as {name}"
        # SGLang's argparse takes any unambiguous beginning for the whole option
        for full, instead in owned.items():
            if full == name or (full.startswith(name) and name not in owned):
                yield f"rollout.sglang.{option}", _not_yours(full, instead)
        for full, reason in SGLANG_DOORS.items():
            if full.startswith(name):
                yield f"rollout.sglang.{option}", f"must not be set: {reason} (SGLang's {full})"


def _url_problem(url: str) -> str:
    """What an engine's URL must be and is not; empty if it is fine."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or re.search(r"\s", url):
        return "an http:// or https:// URL"
    if parts.username or parts.password:
        return "without a user and password (keys come from rollout.api_key_env)"
    return "without path, query and fragment" if parts.path.strip("/") or parts.query or parts.fragment else ""


def _not_yours(option: str, instead: str) -> str:
    return f"must not be set: Ratchet sets {option} itself" + (f" ({instead})" if instead else "")


def _update(experiment: Experiment) -> Iterator[Problem]:
    update = experiment.update
    groups = experiment.prompts.per_iteration
    if update.mini_batches > groups:  # a mini-batch holds whole groups
        message = f"must be <= {groups}, the groups of an iteration (prompts.per_iteration), got {update.mini_batches}"
        yield "update.mini_batches", message
    for option, instead in DEEPSPEED.items():
        if _has(update.deepspeed, option.split(".")):
            yield f"update.deepspeed.{option}", _not_yours(option, instead)


def _has(options: Any, path: list[str]) -> bool:
    return not path or (isinstance(options, Mapping) and path[0] in options and _has(options[path[0]], path[1:]))


def _pools(experiment: Experiment) -> Iterator[Problem]:
    pools = experiment.pools
    for name, pool in pools.items():
        if not pool.roles:
            yield f"pools.{name}.roles", f"must name at least one of {', '.join(ROLES)}"
        for index, role in enumerate(pool.roles):
            if role not in ROLES:
                yield f"pools.{name}.roles[{index}]", f"must be one of {', '.join(ROLES)}, got {role!r}"
        yield from _devices(name, pool, experiment)
    for role in ("rollout", "train"):
        having = [name for name, pool in pools.items() if role in pool.roles]
        if len(having) != 1:
            listed = ", ".join(having) or "none"
            yield "pools", f"must hold one pool with role {role} (engines and ranks: its size), got {listed}"
    if (both := co_located(pools)) and experiment.rollout.urls:
        yield (
            f"pools.{both}.roles",
            "must not hold both rollout and train with rollout.urls: devices of external engines cannot be handed over",
        )
    claimed: dict[str, str] = {}
    for name, pool in pools.items():
        for device in dict.fromkeys(pool.devices):
            if (other := claimed.setdefault(device, name)) != name:
                yield (
                    f"pools.{name}.devices",
                    f"must not name {device}, which pool {other} has: only one pool with both roles shares devices",
                )


def _devices(name: str, pool: Pool, experiment: Experiment) -> Iterator[Problem]:
    field, kind = f"pools.{name}.devices", experiment.model.device
    for index, device in enumerate(pool.devices):
        if not DEVICE.fullmatch(device):
            yield f"{field}[{index}]", f"must be a device like cpu:0 or cuda:0, got {device!r}"
        elif device.partition(":")[0] != kind:
            yield f"{field}[{index}]", f"must be a {kind} device, since model.device is {kind}, got {device!r}"
    for device, count in Counter(pool.devices).items():
        if count > 1:
            yield field, f"must name each device once, got {device} {count} times"
    if pool.devices:
        engines, ranks = devices_used(pool, experiment)
        if engines > len(pool.devices) and not experiment.rollout.urls:
            each = devices_of_engine(experiment)
            what = f"must name >= {engines} devices ({pool.engines} engines with {each} each), got {len(pool.devices)}"
            yield field, what
        if ranks > len(pool.devices):
            yield field, f"must name >= {ranks} devices, one for each of pools.{name}.ranks, got {len(pool.devices)}"


def _graph(experiment: Experiment) -> Iterator[Problem]:
    if not experiment.graph:
        yield "graph", "must declare the stages or name a ready-made graph (graph: grpo), got none"
        return
    for name, node in experiment.graph.items():
        meant = pools_meant(experiment.pools, node.pool)
        if not meant:
            known = ", ".join(experiment.pools)
            yield f"graph.{name}.pool", f"must be one of the pools {known}, or a role that one has, got {node.pool!r}"
        elif len(meant) > 1:
            yield f"graph.{name}.pool", f"must name one of {', '.join(meant)}: each has the role {node.pool!r}"
    stages = {node.stage for node in experiment.graph.values()}
    own = _has_own_stage(experiment)
    recomputed = experiment.update.old_logprobs == "recomputed"
    if recomputed and "old_logprobs" not in stages and not own:
        yield (
            "update.old_logprobs",
            "must be behavior, or the graph needs a stage old_logprobs (as grpo_recomputed has)",
        )
    if not recomputed and "old_logprobs" in stages:
        yield "update.old_logprobs", "must be recomputed, since the graph has a stage old_logprobs, got 'behavior'"
    correction = experiment.update.correction
    if correction.kind in ("tis", "mis") and not recomputed:
        yield (
            "update.correction.kind",
            "must be none or ratio, or update.old_logprobs recomputed: with behavior the loss's ratio has these "
            f"weights, got {correction.kind!r}",
        )
    if correction.kind == "ratio" and recomputed:
        yield (
            "update.correction.kind",
            "must be none, tis or mis, or update.old_logprobs behavior: with recomputed the loss's ratio is not to the "
            "behaviour policy, got 'ratio'",
        )
    if correction.low >= correction.high:
        yield "update.correction.low", f"must be < update.correction.high {correction.high}, got {correction.low}"
    if experiment.update.kl.coef > 0 and "reference" not in stages and not own:
        yield "update.kl.coef", f"must be 0, or the graph needs a stage reference, got {experiment.update.kl.coef}"
    if experiment.evaluate.every > 0 and "evaluate" not in stages:
        yield "evaluate.every", f"must be 0, or the graph needs a stage evaluate, got {experiment.evaluate.every}"
    if "reward" in stages and not experiment.reward.functions:
        yield "reward.functions", "must name at least one, since the graph has a stage reward, got none"


def _sampling(experiment: Experiment) -> Iterator[Problem]:
    sampling, rollout = experiment.sampling, experiment.rollout
    if rollout.sample_deadline_s >= rollout.timeout_s:
        yield (
            "rollout.sample_deadline_s",
            f"must be < rollout.timeout_s {rollout.timeout_s:g}, which gives a request up without its tokens, "
            f"got {rollout.sample_deadline_s:g}",
        )
    filtered, stages = sampling.filter != "none", {node.stage for node in experiment.graph.values()}
    if filtered and not {"reward", "filter"} <= stages:
        yield "sampling.filter", "must be none, or the graph needs the stages reward and filter (as dapo has)"
    if not filtered and "filter" in stages:
        yield "sampling.filter", "must be zero_variance, since the graph has a stage filter, got 'none'"
    if not filtered and sampling.oversample == 1:
        return
    field = "sampling.filter" if filtered else "sampling.oversample"
    rollouts = {name: node for name, node in experiment.graph.items() if node.stage == "rollout"}
    if [node.needs for node in rollouts.values()] != [["prompts"]]:
        yield field, "needs a graph with one node of stage rollout, with needs: [prompts], which sends them one by one"
    for name, node in experiment.graph.items() if filtered else ():
        if node.stage == "reward" and node.needs != list(rollouts):
            needed = f"must be [{', '.join(rollouts)}], since sampling.filter judges groups while others are generated"
            yield f"graph.{name}.needs", f"{needed}, got {node.needs}"


def _schedule(experiment: Experiment) -> Iterator[Problem]:
    schedule, groups = experiment.schedule, experiment.sampling.candidates(experiment.prompts.per_iteration)
    if schedule.kind == "async":
        if schedule.max_lag == 0:
            yield "schedule.max_lag", "must be >= 1, or schedule.kind sync, which has no lag, got 0"
        elif schedule.publish_every > schedule.max_lag + 1:
            yield (
                "schedule.publish_every",
                f"must be <= {schedule.max_lag + 1} (schedule.max_lag + 1), or a rollout waits for ever for weights "
                f"that are fresh enough, got {schedule.publish_every}",
            )
    else:
        if schedule.max_lag not in (0, schedule.lag_limit):
            yield (
                "schedule.max_lag",
                f"must be {schedule.lag_limit}, the lag of schedule.kind {schedule.kind}, or schedule.kind async, "
                f"got {schedule.max_lag}",
            )
        if schedule.publish_every != 1:
            yield (
                "schedule.publish_every",
                f"must be 1, or schedule.kind async: {schedule.kind} publishes each update, "
                f"got {schedule.publish_every}",
            )
    if 0 < schedule.queue_groups < groups:
        yield (
            "schedule.queue_groups",
            f"must be >= {groups}, the most groups of a batch (prompts.per_iteration and sampling), or no batch ever "
            f"gets in, got {schedule.queue_groups}",
        )
    batch = groups * experiment.rollout.samples_per_prompt * experiment.rollout.max_new_tokens
    if 0 < schedule.queue_tokens < batch:
        yield (
            "schedule.queue_tokens",
            f"must be >= {batch}, the most tokens of a batch (its groups x rollout.samples_per_prompt x "
            f"rollout.max_new_tokens), or no batch ever gets in, got {schedule.queue_tokens}",
        )
    if schedule.ahead and experiment.update.correction.kind == "none":
        yield (
            "update.correction.kind",
            f"must be declared, since schedule.kind {schedule.kind} trains on data that is up to {schedule.lag_limit} "
            "update(s) old: ratio (the clipped ratio to the behaviour policy), tis or mis, got 'none'",
        )
    if schedule.kind == "async" and experiment.evaluate.every % schedule.publish_every:
        yield (
            "evaluate.every",
            f"must be a multiple of schedule.publish_every {schedule.publish_every}, since only published weights are "
            f"evaluated, got {experiment.evaluate.every}",
        )


def _has_own_stage(experiment: Experiment) -> bool:
    """A stage of one's own may produce or consume any column: then `flows.graph`, which can import it, decides."""
    return any(":" in node.stage for node in experiment.graph.values())


def _idle(experiment: Experiment) -> Iterator[Problem]:
    """Fields that change nothing under the other settings, with the reason."""
    e = experiment
    if e.prompts.source == "reasoning_gym":
        for name in ("path", "prompt_field", "answer_field"):
            yield f"prompts.{name}", "prompts.source is reasoning_gym"
    else:
        for name in ("task", "task_options", "size"):
            yield f"prompts.{name}", f"prompts.source is {e.prompts.source}"
    if e.rollout.urls:
        for name in ("sglang", "start_timeout_s"):
            yield f"rollout.{name}", "the engines are external (rollout.urls)"
    else:
        for name in ("api_key_env", "admin_key_env"):
            yield f"rollout.{name}", "Ratchet starts the engines and makes their keys"
    if e.rollout.sample_deadline_s == 0:
        yield "rollout.on_deadline", "rollout.sample_deadline_s is 0"
    if e.sampling.filter == "none":
        for name in ("max_rounds", "on_exhausted"):
            yield f"sampling.{name}", "sampling.filter is none"
    if e.sampling.oversample == 1:
        yield "sampling.keep", "sampling.oversample is 1, so no group is started that is not needed"
    if e.rollout.kv_policy != "keep":
        yield "rollout.accept_stale_kv", f"rollout.kv_policy is {e.rollout.kv_policy}"
    if e.advantage.estimator == "rloo":
        yield "advantage.normalize_std", "rloo does not divide by a deviation"
    if e.advantage.estimator == "rloo" or not e.advantage.normalize_std:
        yield "advantage.epsilon", "nothing is divided by a deviation"
    if e.update.kl.coef == 0:
        yield "update.kl.estimator", "update.kl.coef is 0"
    if e.update.correction.kind in ("none", "ratio"):
        for name in ("level", "low", "high"):
            yield f"update.correction.{name}", f"update.correction.kind is {e.update.correction.kind}"
    if e.update.correction.kind == "tis":
        yield "update.correction.low", "update.correction.kind is tis"
    if not e.schedule.ahead:
        for name in ("queue_groups", "queue_tokens"):
            yield f"schedule.{name}", "schedule.kind is sync: one batch at a time"
    else:
        yield "update.max_logprob_diff", "where updates lie between, engine and trainer are apart by what those learned"
        yield from _idle_queue(e)
    if e.evaluate.every == 0:
        for name in ("prompts", "samples_per_prompt", "temperature"):
            yield f"evaluate.{name}", "evaluate.every is 0"
    elif e.evaluate.temperature == 0 and e.evaluate.samples_per_prompt > 1:
        yield "evaluate.samples_per_prompt", "at temperature 0 every sample of a prompt is the same"
    if not any(node.stage == "reward" for node in e.graph.values()):
        yield "reward", "the graph has no stage reward"
    used = {pool for node in e.graph.values() for pool in pools_meant(e.pools, node.pool)}
    for name, pool in e.pools.items():
        yield from _idle_pool(name, pool, name in used, e)


def _idle_queue(experiment: Experiment) -> Iterator[Problem]:
    """Of the lag limit and the queue's bound in groups each lets some batches run ahead: the smaller one decides."""
    schedule, batch = experiment.schedule, experiment.sampling.candidates(experiment.prompts.per_iteration)
    ahead, most = schedule.lag_limit, schedule.most_groups(batch)
    held = schedule.queue_groups // batch
    if schedule.queue_groups >= most:
        reason = f"a lag of at most {ahead} lets no more than {most} groups be there ({ahead + 1} batches of {batch})"
        yield "schedule.queue_groups", reason
    elif 0 < held < ahead and schedule.publish_every == 1:
        reason = f"schedule.queue_groups {schedule.queue_groups} has room for {held} batch(es) of {batch}"
        yield "schedule.max_lag", f"{reason}, so no sample gets more than {held} update(s) old"


def _idle_pool(name: str, pool: Pool, used: bool, experiment: Experiment) -> Iterator[Problem]:
    rollout, train, external = "rollout" in pool.roles, "train" in pool.roles, bool(experiment.rollout.urls)
    if not used:
        yield f"pools.{name}", "no node of the graph runs in it"
    if not rollout:
        yield f"pools.{name}.engines", "the pool has no role rollout"
        yield f"pools.{name}.memory_share", "the pool has no role rollout"
    elif external:
        yield f"pools.{name}.memory_share", "the engines are external (rollout.urls)"
    elif experiment.model.device == "cpu":
        yield f"pools.{name}.memory_share", "model.device is cpu, where rollout.sglang.max_total_tokens bounds memory"
    if not train:
        yield f"pools.{name}.ranks", "the pool has no role train"
    if not (rollout or train):
        for field in ("threads", "devices"):
            yield f"pools.{name}.{field}", "the pool has neither role rollout nor train"
    elif external and not train:
        yield f"pools.{name}.devices", "the engines are external (rollout.urls)"
