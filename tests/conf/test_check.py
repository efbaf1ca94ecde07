"""Settings that contradict each other are refused; settings without effect are told."""

from pathlib import Path

import pytest

from conf.check import DEEPSPEED, SGLANG, SGLANG_CPU
from conf.schema import GroupSampling
from tests.conf.experiments import MINIMAL, load_with, refusal


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["update.old_logprobs=recomputed"],
            "update.old_logprobs must be behavior, or the graph needs a stage old_logprobs",
        ),
        (["graph=grpo_recomputed"], "update.old_logprobs must be recomputed, since the graph has a stage old_logprobs"),
        (["sampling.filter=zero_variance"], "sampling.filter must be none, or the graph needs the stages reward and"),
        (["graph=dapo"], "sampling.filter must be zero_variance, since the graph has a stage filter, got 'none'"),
        (
            [
                "graph=dapo",
                "sampling.filter=zero_variance",
                "graph.mine={stage: 'm:s', needs: [rollout], pool: cpu}",
                "graph.reward.needs=[mine]",
            ],
            "graph.reward.needs must be [rollout], since sampling.filter judges groups while others are generated, got "
            "['mine']",
        ),
        (
            [
                "sampling.oversample=1.5",
                "graph.mine={stage: 'm:s', needs: [prompts], pool: cpu}",
                "graph.rollout.needs=[mine]",
            ],
            "sampling.oversample needs a graph with one node of stage rollout, with needs: [prompts]",
        ),
        (
            ["graph=dapo", "sampling.filter=zero_variance", "prompts={per_iteration: 8, size: 31}"],
            "prompts.size must be >= 32 (those an iteration may send (sampling) 32 + evaluate.prompts 0), got 31",
        ),
        (["sampling.oversample=0.5"], "sampling.oversample must be >= 1 and <= 16, got 0.5"),
        (
            ["rollout={sample_deadline_s: 600, timeout_s: 600}"],
            "rollout.sample_deadline_s must be < rollout.timeout_s 600, which gives a request up without its tokens",
        ),
        (["update.kl.coef=0.1"], "update.kl.coef must be 0, or the graph needs a stage reference, got 0.1"),
        (
            ["graph.evaluate=null", "evaluate.every=2"],
            "evaluate.every must be 0, or the graph needs a stage evaluate, got 2",
        ),
        (
            ["reward.functions.right=null"],
            "reward.functions must name at least one, since the graph has a stage reward",
        ),
        (
            ["reward.functions.right.path=module"],
            "reward.functions.right.path must be `package.module:function`, got 'module'",
        ),
        (["model.path=''"], "model.path must name the folder of the starting model, got ''"),
        (["name=a/b"], "name must be letters, digits, ., - or _, since it names a folder, got 'a/b'"),
        (["prompts.task=''"], "prompts.task must name a reasoning-gym task, got ''"),
        (["prompts.source=jsonl"], "prompts.path must name the file to read, since prompts.source is jsonl, got ''"),
        (["prompts.task_options.seed=1"], "prompts.task_options must not set size or seed"),
        (
            ["prompts.size=10", "evaluate.every=1", "evaluate.prompts=5"],
            "prompts.size must be >= 13 (prompts.per_iteration 8 +",
        ),
        (["update.mini_batches=9"], "update.mini_batches must be <= 8, the groups of an iteration"),
        (["graph.reward.pool=gpu"], "graph.reward.pool must be one of the pools rollout, train, cpu, or a role that"),
        (["graph=null"], "graph must be a mapping, got null"),
        (["pools.cpu.roles=[cpuu]"], "pools.cpu.roles[0] must be one of rollout, train, cpu, got 'cpuu'"),
        (["pools.cpu.roles=[]"], "pools.cpu.roles must name at least one of rollout, train, cpu"),
        (["pools.train=null"], "pools must hold one pool with role train (engines and ranks: its size), got none"),
        (
            ["pools.second={roles: [train]}"],
            "pools must hold one pool with role train (engines and ranks: its size), got train, second",
        ),
        (
            ["pools={train: null, rollout: null, all: {roles: [rollout, train]}}", "rollout.urls=['http://a']"],
            "pools.all.roles must not hold both rollout and train with rollout.urls",
        ),
        (
            ["pools={cpu: {roles: [cpu]}, more: {roles: [cpu]}}", "pools.cpu=null", "pools.other={roles: [cpu]}"],
            "graph.reward.pool must name one of more, other: each has the role 'cpu'",
        ),
        (["pools.train.devices=[gpu0]"], "pools.train.devices[0] must be a device like cpu:0 or cuda:0, got 'gpu0'"),
        (["pools.train.devices=['cpu:01']"], "pools.train.devices[0] must be a device like cpu:0 or cuda:0, got"),
        (
            ["pools.train.devices=['cuda:0']"],
            "pools.train.devices[0] must be a cpu device, since model.device is cpu, got 'cuda:0'",
        ),
        (
            ["pools.train.devices=['cpu:0', 'cpu:0']"],
            "pools.train.devices must name each device once, got cpu:0 2 times",
        ),
        (
            ["pools={rollout: {devices: ['cpu:0', 'cpu:1']}, train: {devices: ['cpu:1']}}"],
            "pools.train.devices must not name cpu:1, which pool rollout has: only one pool with both roles shares",
        ),
        (
            ["pools.train={ranks: 2, devices: ['cpu:0']}"],
            "pools.train.devices must name >= 2 devices, one for each of pools.train.ranks, got 1",
        ),
        (
            ["pools.rollout={engines: 2, devices: ['cpu:0', 'cpu:1', 'cpu:2']}", "rollout.sglang={tp_size: 2}"],
            "pools.rollout.devices must name >= 4 devices (2 engines with 2 each), got 3",
        ),
        (
            ["model.device=cuda", "rollout.sglang={mem_fraction_static: 0.5}"],
            "rollout.sglang.mem_fraction_static must not be set: Ratchet sets mem_fraction_static itself (pools.",
        ),
        (["schedule.max_lag=2"], "schedule.max_lag must be 0, the lag of schedule.kind sync, or schedule.kind async"),
        (
            ["schedule={kind: one_step_off, max_lag: 2}", "update.correction.kind=ratio"],
            "schedule.max_lag must be 1, the lag of schedule.kind one_step_off, or schedule.kind async, got 2",
        ),
        (["schedule.publish_every=2"], "schedule.publish_every must be 1, or schedule.kind async: sync publishes each"),
        (
            ["schedule.kind=async", "update.correction.kind=ratio"],
            "schedule.max_lag must be >= 1, or schedule.kind sync, which has no lag, got 0",
        ),
        (
            ["schedule={kind: async, max_lag: 2, publish_every: 4}", "update.correction.kind=ratio"],
            "schedule.publish_every must be <= 3 (schedule.max_lag + 1), or a rollout waits for ever",
        ),
        (
            ["schedule={kind: async, max_lag: 2}"],
            "update.correction.kind must be declared, since schedule.kind async trains on data that is up to 2 update",
        ),
        (
            ["schedule={kind: async, max_lag: 1, queue_groups: 7}", "update.correction.kind=ratio"],
            "schedule.queue_groups must be >= 8, the most groups of a batch",
        ),
        (
            ["schedule={kind: async, max_lag: 1, queue_tokens: 16383}", "update.correction.kind=ratio"],
            "schedule.queue_tokens must be >= 16384, the most tokens of a batch",  # 8 x 8 x 256
        ),
        (
            [
                "graph.evaluate={stage: evaluate, needs: [publish], pool: rollout}",
                "evaluate.every=3",
                "schedule={kind: async, max_lag: 1, publish_every: 2}",
                "update.correction.kind=ratio",
            ],
            "evaluate.every must be a multiple of schedule.publish_every 2, since only published weights are evaluated",
        ),
        (
            ["graph=grpo_recomputed", "update={old_logprobs: recomputed, correction: {kind: ratio}}"],
            "update.correction.kind must be none, tis or mis, or update.old_logprobs behavior",
        ),
        (
            ["rollout.kv_policy=keep"],
            "rollout.kv_policy must be pin or rebuild, or rollout.accept_stale_kv must declare",
        ),
        (
            ["rollout={kv_policy: rebuild, sglang: {hicache_storage_backend: file}}"],
            "rollout.sglang.hicache_storage_backend must not be set under rollout.kv_policy: rebuild",
        ),
        (["rollout.top_k=0"], "rollout.top_k must be >= 1, or -1 for all tokens, got 0"),
        (["rollout.urls=[ftp://a]"], "rollout.urls[0] must be an http:// or https:// URL, got 'ftp://a'"),
        (["rollout.urls=[http://]"], "rollout.urls[0] must be an http:// or https:// URL, got 'http://'"),
        (["rollout.urls=['http://a:x']"], "rollout.urls[0] must be an http:// or https:// URL, got 'http://a:x'"),
        (["rollout.urls=['http://u:p@a']"], "rollout.urls[0] must be without a user and password"),
        (
            ["rollout.urls=['http://a/v1']"],
            "rollout.urls[0] must be without path, query and fragment, got 'http://a/v1'",
        ),
        (["rollout.urls=['http://a', 'http://a/']"], "rollout.urls must name each server once, got http://a 2 times"),
        (
            ["rollout.urls=['http://a']", "pools.rollout.engines=2"],
            "pools.rollout.engines must be 1, as many as rollout.urls",
        ),
        (["publish.min_engines=2"], "publish.min_engines must be <= 1, the engines of pool rollout, got 2"),
        (
            ["rollout.urls=['http://a', 'http://b']", "publish.min_engines=3"],
            "publish.min_engines must be <= 2, the engines of pool rollout, got 3",
        ),
        (["rollout.sglang.tp-size=2"], "rollout.sglang.tp-size must be written as tp_size"),
        (["rollout.sglang={admin: x}"], "rollout.sglang.admin must not be set: Ratchet sets admin_api_key itself"),
        (
            ["update.deepspeed={bf16: {enabled: true}}"],
            "update.deepspeed.bf16 must not be set: Ratchet sets bf16 itself (update.pre",
        ),
    ],
)
def test_a_contradiction_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert f": {message}" in refusal(tmp_path, *overrides)


@pytest.mark.parametrize("option", [*SGLANG, *SGLANG_CPU])
def test_options_of_sglang_that_ratchet_sets_are_refused(tmp_path: Path, option: str) -> None:
    assert f"rollout.sglang.{option} must not be set: Ratchet sets {option} itself" in refusal(
        tmp_path, f"rollout.sglang.{option}=1"
    )


@pytest.mark.parametrize("option", DEEPSPEED)
def test_options_of_deepspeed_that_ratchet_sets_are_refused(tmp_path: Path, option: str) -> None:
    assert f"update.deepspeed.{option} must not be set" in refusal(tmp_path, f"update.deepspeed.{option}=1")


def test_other_options_pass_through(tmp_path: Path) -> None:
    e = load_with(
        tmp_path, "update.deepspeed.zero_optimization.overlap_comm=true", "rollout.sglang.tp_size=2"
    ).experiment
    assert e.update.deepspeed == {"zero_optimization": {"overlap_comm": True}}
    assert load_with(tmp_path, "model.device=cuda", "rollout.sglang.attention_backend=fa3").warnings == ()


@pytest.mark.parametrize("policy", ["{kv_policy: rebuild}", "{kv_policy: keep, accept_stale_kv: true}"])
def test_what_happens_to_kv_at_an_update_may_be_declared(tmp_path: Path, policy: str) -> None:
    assert load_with(tmp_path, f"rollout={policy}").warnings == ()


def test_a_contradiction_is_placed_where_its_field_was_set(tmp_path: Path) -> None:
    text = MINIMAL + "update:\n  kl:\n    coef: 0.5\n"
    assert refusal(tmp_path, text=text).startswith("x.yaml:7: update.kl.coef must be 0")


def test_a_stage_of_ones_own_may_produce_the_reference(tmp_path: Path) -> None:
    own = "graph.mine={stage: 'mine:reference', needs: [rollout], pool: cpu}"
    assert load_with(tmp_path, own, "update.kl.coef=0.1").warnings == ()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["graph=grpo"], "update.kl.coef is 0, so the stage reference has no effect"),
        (["update.kl.estimator=k1"], "update.kl.estimator has no effect: update.kl.coef is 0"),
        (
            ["advantage={estimator: rloo, normalize_std: true}"],
            "advantage.normalize_std has no effect: rloo does not divide",
        ),
        (["advantage={normalize_std: false, epsilon: 1}"], "advantage.epsilon has no effect: nothing is divided"),
        (["evaluate.prompts=3"], "evaluate.prompts has no effect: evaluate.every is 0"),
        (["evaluate={every: 1, samples_per_prompt: 4}"], "evaluate.samples_per_prompt has no effect: at temperature 0"),
        (["sampling.max_rounds=2"], "sampling.max_rounds has no effect: sampling.filter is none"),
        (["sampling.on_exhausted=train_fewer"], "sampling.on_exhausted has no effect: sampling.filter is none"),
        (["sampling.keep=fastest"], "sampling.keep has no effect: sampling.oversample is 1"),
        (["sampling={oversample: 1.5, keep: fastest}"], "sampling.keep is fastest: what is slow is dropped"),
        (["rollout.on_deadline=drop_group"], "rollout.on_deadline has no effect: rollout.sample_deadline_s is 0"),
        (["prompts.path=x"], "prompts.path has no effect: prompts.source is reasoning_gym"),
        (
            ["rollout={urls: ['http://a'], sglang: {tp_size: 2}}"],
            "rollout.sglang has no effect: the engines are external",
        ),
        (["rollout.api_key_env=X"], "rollout.api_key_env has no effect: Ratchet starts the engines"),
        (
            ["schedule.queue_groups=64"],
            "schedule.queue_groups has no effect: schedule.kind is sync",
        ),
        (
            [
                "schedule={kind: async, max_lag: 1}",
                "update.correction.kind=ratio",
                "pools.train=null",
                "pools.rollout.roles=[rollout, train]",
            ],
            "schedule.kind overlaps nothing but rewards: pool rollout generates and trains in turn",
        ),
        (
            ["update.correction={kind: ratio, high: 3}"],
            "update.correction.high has no effect: update.correction",
        ),
        (
            ["schedule={kind: async, max_lag: 4, queue_groups: 40}", "update.correction.kind=ratio"],
            "schedule.queue_groups has no effect: a lag of at most 4 lets no more than 40 groups be there",
        ),
        (
            ["schedule={kind: async, max_lag: 4, queue_groups: 23}", "update.correction.kind=ratio"],
            "schedule.max_lag has no effect: schedule.queue_groups 23 has room for 2 batch(es) of 8, so no sample gets "
            "more than 2 update(s) old",
        ),
        (
            ["update={max_logprob_diff: 1, correction: {kind: ratio}}", "schedule.kind=one_step_off"],
            "update.max_logprob_diff has no effect: where updates lie between",
        ),
        (["rollout.accept_stale_kv=true"], "rollout.accept_stale_kv has no effect: rollout.kv_policy is pin"),
        (["pools.gpu={roles: [cpu]}"], "pools.gpu has no effect: no node of the graph runs in it"),
        (["pools.rollout.memory_share=0.5"], "pools.rollout.memory_share has no effect: model.device is cpu, where"),
        (["pools.train.memory_share=0.5"], "pools.train.memory_share has no effect: the pool has no role rollout"),
        (["pools.cpu.devices=['cpu:0']"], "pools.cpu.devices has no effect: the pool has neither role rollout nor tr"),
        (
            ["pools.rollout.devices=['cpu:0']", "rollout.urls=['http://a']"],
            "pools.rollout.devices has no effect: the engines are external",
        ),
        (["pools.cpu.engines=2"], "pools.cpu.engines has no effect: the pool has no role rollout"),
        (["rollout.top_p=0.9"], "rollout.top_p truncates the distribution"),
    ],
)
def test_an_option_without_effect_is_told_with_its_place(tmp_path: Path, overrides: list[str], message: str) -> None:
    (warning,) = load_with(tmp_path, *overrides).warnings
    place, found, _ = warning.partition(message)
    assert found
    assert place in (f"override {overrides[0]!r}: ", f"{tmp_path}/x.yaml: ")  # the file: what is wrong is a default


@pytest.mark.parametrize("queue", [32, 39])
def test_a_queue_between_the_lag_and_one_batch_more_is_no_mistake(tmp_path: Path, queue: int) -> None:
    settings = f"schedule={{kind: async, max_lag: 4, queue_groups: {queue}}}"
    assert load_with(tmp_path, settings, "update.correction.kind=ratio").warnings == ()


def test_the_ready_made_graph_does_not_ask_for_evaluation(tmp_path: Path) -> None:
    assert load_with(tmp_path, "evaluate.every=0").warnings == ()


def test_a_filter_without_refill_is_told(tmp_path: Path) -> None:
    (warning,) = load_with(tmp_path, "graph=dapo", "sampling={filter: zero_variance, max_rounds: 1}").warnings
    assert "sampling.max_rounds is 1, so no prompt is sent in the place of a group" in warning


@pytest.mark.parametrize(
    ("oversample", "needed", "started", "candidates"),
    [(1.0, 8, 8, 32), (1.5, 8, 12, 48), (1.1, 10, 11, 44), (1.01, 8, 9, 36), (1.5, 0, 0, 0)],
)
def test_how_many_groups_are_started_and_sent_at_most(
    oversample: float, needed: int, started: int, candidates: int
) -> None:
    sampling = GroupSampling(filter="zero_variance", oversample=oversample, max_rounds=4)
    assert (sampling.started(needed), sampling.candidates(needed)) == (started, candidates)
    assert GroupSampling(oversample=oversample).candidates(needed) == started  # nothing is refilled
