"""README says what is true: its graph and iteration are the files', its reward and stage work as they stand."""

import asyncio
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from conf.load import load
from flows.cli import main
from flows.graph import load_graph
from tasks.rewards import RewardInput

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(language: str, start: str) -> str:
    """The fenced block of README whose text contains `start`."""
    return next(code for code in re.findall(rf"```{language}\n(.*?)```", README, re.S) if start in code)


def test_the_graph_shown_is_the_one_that_runs() -> None:
    assert block("yaml", "needs: [prompts]") in (ROOT / "conf/graph/grpo.yaml").read_text()


def test_the_iteration_shown_is_the_one_that_runs() -> None:
    assert block("python", "async def iteration") in (ROOT / "flows/run.py").read_text()


def test_the_experiment_the_reward_and_the_stage_work_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("my_rewards.py").write_text(block("python", "def short"))
    Path("my_stages.py").write_text(block("python", "async def drop_short"))
    experiment = block("yaml", "conf/mine.yaml").replace(
        "smollm2_arithmetic.yaml", str(ROOT / "conf/smollm2_arithmetic.yaml")
    )
    Path("mine.yaml").write_text(experiment + block("yaml", "extends: grpo"))

    loaded = load("mine.yaml")
    graph = load_graph(loaded.experiment)
    assert graph.edges["advantage"].rows == ("rollout", "drop_short", "advantage")

    import my_rewards  # type: ignore[import-not-found]

    def sample(tokens: int) -> RewardInput:
        return RewardInput(prompt="", response="", answer="", data={}, finish_reason="stop", tokens=tokens)

    options = loaded.experiment.reward.functions["short"].options
    assert [my_rewards.short(sample(n), **options) for n in (8, 9)] == [1.0, 0.0]

    table = pa.table({"group_id": ["a", "a", "b"], "response_ids": [[1, 2, 3], [1], [1, 2, 3]]})
    inputs: Any = SimpleNamespace(table=table)
    selected: Any = asyncio.run(graph["drop_short"].stage.run(inputs, None, **graph["drop_short"].options))
    assert (list(selected.indices), selected.facts.dropped) == ([2], {"a": "short"})


def test_every_file_and_command_that_readme_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for link in re.findall(r"\]\((docs/[a-z]+\.md)\)", README):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target
    named = set(re.findall(r"ratchet ([a-z]+) ", README)) - {"runs"}
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = set(re.findall(r"^    (\w+)", capsys.readouterr().out, re.M))
    assert len(commands) > 10
    assert named <= commands


def test_nothing_was_left_to_fill_in() -> None:
    assert "@@" not in README
    assert textwrap.dedent(README) == README
