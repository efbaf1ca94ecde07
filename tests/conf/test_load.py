"""An experiment from files, overrides and interpolation, and the errors that name their place."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import conf
from conf import precision
from conf.errors import ConfigError
from conf.load import changed, escaped, load, load_experiment, ready_made_graphs
from conf.schema import Experiment
from conf.source import dump
from tests.conf.experiments import MINIMAL, load_with, refusal, write

FOLDER = Path(conf.__file__).parent
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_experiment_of_the_repository_loads_without_warnings(path: Path) -> None:
    loaded = load(path)
    assert loaded.experiment.name == path.stem
    assert loaded.warnings == ()


@pytest.mark.parametrize("name", ready_made_graphs())
def test_every_ready_made_graph_loads(tmp_path: Path, name: str) -> None:
    old = "recomputed" if name == "grpo_recomputed" else "behavior"
    filtered = "zero_variance" if name == "dapo" else "none"
    settings = (f"update.old_logprobs={old}", f"sampling.filter={filtered}")
    graph = load_with(tmp_path, f"graph={name}", *settings).experiment.graph
    assert {"rollout", "reward", "advantage", "update", "publish", "evaluate"} <= graph.keys()


def test_a_file_with_only_what_is_required_has_the_defaults_of_the_schema(tmp_path: Path) -> None:
    experiment = load_with(tmp_path).experiment
    assert experiment.rollout == Experiment().rollout
    assert experiment.pools == Experiment().pools
    assert experiment.name == "x"


def test_a_later_file_wins_and_lists_replace(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(
        tmp_path,
        MINIMAL + "seed: 1\niterations: 1\nrollout: {top_p: 0.5, urls: ['http://a', 'http://b']}\n",
        "base.yaml",
    )
    write(tmp_path, "extends: ../base.yaml\niterations: 2\nseed: 2\n", "below/middle.yaml")
    leaf = write(
        tmp_path, "extends: below/middle.yaml\nseed: 3\nrollout: {top_k: 5, urls: ['http://c']}\n", "leaf.yaml"
    )
    e = load_experiment(leaf, ["rollout.top_k=7", "rollout.top_k=8"])
    assert (e.seed, e.iterations, e.rollout.top_p, e.rollout.urls, e.rollout.top_k) == (3, 2, 0.5, ["http://c"], 8)


def test_sources_name_the_file_that_won(tmp_path: Path) -> None:
    base = write(tmp_path, MINIMAL + "seed: 1\niterations: 1\n", "base.yaml")
    leaf = write(tmp_path, "extends: base.yaml\n\nseed: 3\n", "leaf.yaml")
    sources = load(leaf, ["rollout.top_k=7"]).sources
    assert sources["iterations"] == f"{base}:6"
    assert sources["seed"] == f"{leaf}:3"
    assert sources["rollout.top_k"] == "override 'rollout.top_k=7'"
    assert "runs_dir" not in sources


def test_a_place_is_that_of_the_field_or_of_what_holds_it(tmp_path: Path) -> None:
    loaded = load_with(tmp_path, "seed=1", "prompts.size=99")
    assert loaded.place("seed") == "override 'seed=1'"
    assert loaded.place("prompts.task") == loaded.place("prompts.shuffle") == f"{tmp_path}/x.yaml:2"
    assert loaded.place("graph.reward.needs[0]").endswith("conf/graph/grpo.yaml:3")
    assert loaded.place("graph") == f"{tmp_path}/x.yaml:4"
    assert loaded.place("iterations") == f"{tmp_path}/x.yaml"


def test_interpolation_takes_another_settings_value(tmp_path: Path) -> None:
    e = load_with(tmp_path, "evaluate.temperature=${rollout.temperature}", "name=run-${seed}").experiment
    assert (e.evaluate.temperature, e.name) == (1.0, "run-0")


def test_overrides_reach_named_entries_and_free_options(tmp_path: Path) -> None:
    e = load_with(
        tmp_path, "pools.train.ranks=2", "rollout.sglang.tp_size=2", "prompts.task_options={a: [1, x]}"
    ).experiment
    assert e.pools["train"].ranks == 2
    assert e.pools["train"].roles == ["train"]
    assert e.rollout.sglang == {"tp_size": 2}
    assert e.prompts.task_options == {"a": [1, "x"]}


def test_a_graph_extends_a_ready_made_one(tmp_path: Path) -> None:
    text = """
  extends: grpo
  reference: null
  drop_short: {stage: "my.filters:drop_short", needs: [rollout], pool: cpu, options: {min_tokens: 2}}
  advantage: {needs: [reward, drop_short]}
"""
    path = write(tmp_path, MINIMAL.replace(" grpo_without_reference\n", text))
    graph = load_experiment(path).graph
    assert "reference" not in graph
    assert graph["drop_short"].options == {"min_tokens": 2}
    assert (graph["advantage"].stage, graph["advantage"].needs) == ("advantage", ["reward", "drop_short"])


def test_naming_a_graph_replaces_the_one_of_the_file_below(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "base.yaml")
    own = "graph: {rollout: {stage: rollout, needs: [prompts], pool: rollout}}\n"
    assert "update" in load_experiment(write(tmp_path, "extends: base.yaml\n" + own, "merged.yaml")).graph
    assert "reference" in load_experiment(write(tmp_path, "extends: base.yaml\ngraph: grpo\n", "named.yaml")).graph


def test_null_removes_a_default_pool(tmp_path: Path) -> None:
    text = "pools: {rollout: null, train: null, all: {roles: [rollout, train]}}\n"
    moved = [f"graph.{node}.pool=all" for node in ("rollout", "update", "publish", "evaluate")]
    assert load_with(tmp_path, *moved, text=text).experiment.pools.keys() == {"cpu", "all"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rollout:\n  temprature: 1\n",
            "x.yaml:6: rollout.temprature must be a known setting; did you mean temperature?",
        ),
        ("foo: 1\n", "x.yaml:5: foo must be a known setting; there is: name, seed, iterations"),
        (
            "rollout:\n  top_p: '1'\n",
            "x.yaml:6: rollout.top_p must be a number, got '1' (text: write it without quotes",
        ),
        ("rollout: {top_p: 1.5}\n", "x.yaml:5: rollout.top_p must be > 0 and <= 1, got 1.5"),
        ("rollout: {top_p: .nan}\n", "x.yaml:5: rollout.top_p must be a finite number, got nan"),
        ("rollout: {max_new_tokens: 1.5}\n", "x.yaml:5: rollout.max_new_tokens must be an integer, got 1.5"),
        ("rollout: {max_new_tokens: true}\n", "x.yaml:5: rollout.max_new_tokens must be an integer, got true"),
        ("seed: 99999999999999999999\n", "x.yaml:5: seed must fit in 64 bits, got 99999999999999999999"),
        ("rollout:\n", "x.yaml:5: rollout must be a mapping of settings, got null"),
        ("rollout: {urls: 'http://a'}\n", "x.yaml:5: rollout.urls must be a list, got 'http://a'"),
        ("rollout: {urls: [1]}\n", 'x.yaml:5: rollout.urls[0] must be text, got 1 (quote it: "1")'),
        ("rollout: {sglang: {a: [.inf]}}\n", "x.yaml:5: rollout.sglang.a[0] must be a finite number, got inf"),
        ("prompts: {shuffle: yes}\n", "x.yaml:5: prompts must be set once, got it again (first in line 2)"),
        (
            "advantage: {normalize_std: yes}\n",
            "x.yaml:5: advantage.normalize_std must be true or false, got 'yes' (text in YAML",
        ),
        ("advantage: {estimator: ppo}\n", "x.yaml:5: advantage.estimator must be one of grpo, rloo, got 'ppo'"),
        ("update: {zero_stage: true}\n", "x.yaml:5: update.zero_stage must be one of 0, 1, 2, 3, got true"),
        (
            "update: {timeout_s: '${nope}'}\n",
            "x.yaml:5: update.timeout_s must be a value or an interpolation: Interpolation key",
        ),
        ("update: {timeout_s: '${'}\n", "x.yaml:5: update.timeout_s must interpolate a setting by its full name"),
        (
            "update: {timeout_s: '${update.timeout_s}'}\n",
            "x.yaml:5: update.timeout_s must be a value or an interpolation: Rec",
        ),
        ("update: {timeout_s: '${seed}'}\n", "x.yaml:5: update.timeout_s must be > 0, got 0.0"),
        ("update: {timeout_s: '???'}\n", "x.yaml:5: update.timeout_s must have a value, got '???'"),
        (
            "pools: {../x: {roles: [cpu]}}\n",
            "x.yaml:5: pools.../x must be named by a letter, then letters, digits, - or _",
        ),
        ("pools: {gpu: null}\n", "x.yaml:5: pools.gpu must exist to be removed by null; did you mean cpu?"),
        ("extends: no.yaml\n", "x.yaml:5: extends must name a file, but there is no no.yaml"),
        ("extends: [a]\n", "x.yaml:5: extends must name a file, got a list"),
        ("extends: x.yaml\n", "x.yaml:5: extends must not lead in a circle, got back to x.yaml"),
    ],
)
def test_a_wrong_setting_is_refused_with_file_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text=MINIMAL + text).startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temprature=1", "rollout.temprature must be a known setting; did you mean temperature?"),
        ("rollout.temperature=0", "rollout.temperature must be > 0, got 0"),
        ("rollout.temperature", "must be written as dotted.field=value"),
        ("=1", "must be written as dotted.field=value"),
        ("rollout..top_p=1", "must be written as dotted.field=value"),
        ("name=", "must have a value, got nothing"),
        ("name=[", "is not YAML: "),
        ("seed.x=1", "seed must be an integer, got a mapping"),
        ("graph=ppo3", "graph must name a ready-made graph, got 'ppo3'; "),
        ("graph.rewrd=null", "graph.rewrd must exist to be removed by null; did you mean reward?"),
        ("graph.mine={stage: reward}", "graph.mine.pool must be given: pool it runs in"),
        ("extends=x.yaml", "extends must be a known setting; there is: "),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, override).startswith(f"override {override!r}: {message}")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, "seed=-1", "rollout.top_p=2", "iteratons=3").splitlines()) == 3


def test_an_unknown_graph_names_the_known_ones(tmp_path: Path) -> None:
    assert "there is: dapo, grpo, grpo_recomputed, grpo_without_reference" in refusal(tmp_path, "graph=zzz")


def test_the_digest_ignores_only_what_may_change_within_a_run(tmp_path: Path) -> None:
    first = load_with(tmp_path)
    assert load_with(tmp_path, "iterations=99", "name=y", "runs_dir=/tmp/z").digest == first.digest
    assert load_with(tmp_path, "pools.train.ranks=2", "update.zero_stage=3").digest == first.digest
    assert load_with(tmp_path, "pools.train.threads=1", "pools.rollout.engines=2").digest == first.digest
    on_a_full_disk = ("publish.keep_versions=3", "update.keep_checkpoints=1", "update.checkpoint_every=9")
    assert load_with(tmp_path, *on_a_full_disk, "bias.max_length=0.5").digest == first.digest
    for other in ("seed=1", "update.learning_rate=1", "update.warmup_steps=7", "rollout.sglang.tp_size=2"):
        assert load_with(tmp_path, other).digest != first.digest
    assert load_with(tmp_path, text="seed: 0 # the default\n").digest == first.digest


def test_changed_lists_fields_with_both_values(tmp_path: Path) -> None:
    before = load_with(tmp_path, "rollout.sglang.tp_size=2").resolved
    after = load_with(tmp_path, "rollout.top_p=0.5", "iterations=3", "pools.extra={roles: [cpu]}").resolved
    difference = changed(before, after)
    assert difference["rollout.top_p"] == (1.0, 0.5)
    assert difference["rollout.sglang.tp_size"] == (2, None)
    assert "iterations" not in difference
    assert [field for field in difference if field.startswith("pools")] == []
    assert changed(before, before) == {}


def test_a_literal_dollar_brace_survives_saving_and_loading(tmp_path: Path) -> None:
    loaded = load_with(tmp_path, r"prompts.system=say \${x} and \\\${y}")
    assert loaded.experiment.prompts.system == r"say ${x} and \${y}"
    assert load(write(tmp_path, loaded.text, "saved.yaml")).experiment == loaded.experiment


@pytest.mark.parametrize(
    ("device", "flags", "native"),
    [
        ("cpu", "flags\t\t: fpu avx512f avx512_bf16 amx_tile", True),
        ("cpu", "flags\t\t: fpu avx512f amx_bf16", True),
        ("cpu", "Features\t: fp asimd bf16", True),
        ("cpu", "flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("cpu", "model name\t: avx512_bf16", False),
        ("cuda", "flags\t\t: fpu avx2", True),
    ],
)
def test_auto_is_the_precision_that_the_device_computes(
    device: str, flags: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
    monkeypatch.setattr(precision, "CPU_INFO", tmp_path / "cpuinfo")
    loaded = load_with(tmp_path, f"model.device={device}", "rollout.dtype=auto", "update.precision=auto")
    chosen = ("bfloat16", "bf16") if native else ("float32", "fp32")
    assert (loaded.experiment.rollout.dtype, loaded.experiment.update.precision) == chosen
    assert (loaded.resolved["rollout"]["dtype"], loaded.resolved["update"]["precision"]) == chosen
    monkeypatch.setattr(precision, "CPU_INFO", tmp_path / "missing")
    assert load(write(tmp_path, loaded.text, "saved.yaml")).experiment == loaded.experiment  # what was chosen stays


def number_settings(declared: Any = Experiment, prefix: str = "") -> list[tuple[str, str, float]]:
    """(dotted field, bound's name, bound) of every bounded number outside named entries."""
    found = []
    for field in dataclasses.fields(declared):
        below: Any = field.default_factory
        if dataclasses.is_dataclass(below):
            found += number_settings(below, f"{prefix}{field.name}.")
        bounds = [(name, field.metadata[name]) for name in ("ge", "gt", "le", "lt")]
        found += [(prefix + field.name, name, bound) for name, bound in bounds if bound is not None]
    return found


@pytest.mark.parametrize(("field", "bound", "limit"), number_settings())
def test_every_bounded_number_refuses_what_lies_outside(tmp_path: Path, field: str, bound: str, limit: float) -> None:
    outside = {"ge": limit - 1, "gt": limit, "le": limit + 1, "lt": limit}[bound]
    assert f": {field} must be " in refusal(tmp_path, f"{field}={outside}")


TEXT = st.text() | st.text(alphabet="${}\\ab: ")
SETTINGS = {
    "seed": st.integers(0, 2**62),
    "iterations": st.integers(1, 10**6),
    "prompts.shuffle": st.booleans(),
    "prompts.system": TEXT,
    "prompts.task_options": st.dictionaries(
        st.text(), st.integers(-5, 5) | TEXT | st.none() | st.booleans(), max_size=3
    ),
    "rollout.temperature": st.floats(1e-6, 1e6),
    "rollout.top_p": st.floats(0, 1, exclude_min=True),
    "rollout.dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
    "rollout.urls": st.sampled_from([[], ["http://a:1"], ["http://a:1", "https://b"]]),
    "advantage.estimator": st.sampled_from(["grpo", "rloo"]),
    "update.learning_rate": st.floats(1e-12, 1),
    "update.zero_stage": st.sampled_from([0, 1, 2, 3]),
    "publish.keep_versions": st.integers(2, 99),
    "pools.train.ranks": st.integers(1, 64),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.fixed_dictionaries({}, optional=SETTINGS))
def test_any_valid_settings_round_trip(tmp_path: Path, chosen: dict[str, object]) -> None:
    assume("???" not in repr(chosen))
    loaded = load_with(tmp_path, *(f"{name}={dump(escaped(value))}" for name, value in chosen.items()))
    for name, expected in chosen.items():
        found: Any = loaded.resolved
        for part in name.split("."):
            found = found[part]
        assert found == expected
    again = load(write(tmp_path, loaded.text, "saved.yaml"))
    assert (again.experiment, again.digest) == (loaded.experiment, loaded.digest)


KEYS = st.sampled_from(
    [*(f.name for f in dataclasses.fields(Experiment)), "extends", "functions", "x", "stage", "task", "sglang"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet="${}:.?\\ ab'[", max_size=12)
JUNK = st.recursive(
    LEAVES, lambda c: st.lists(c, max_size=2) | st.dictionaries(KEYS | st.text(), c, max_size=4), max_leaves=12
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
@given(junk=JUNK, override=st.text(alphabet="seedprompts.task=:[]{}$ 1", max_size=20))
def test_junk_is_loaded_or_refused_cleanly(tmp_path: Path, junk: object, override: str) -> None:
    for text, overrides in ((dump(junk), []), (MINIMAL, [override])):
        with contextlib.suppress(ConfigError):
            load(write(tmp_path, text), overrides)
