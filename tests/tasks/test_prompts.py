"""Stage `prompts`: rows from the source, and a cursor that lives in the committed manifests alone."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.errors import DataError, StageError
from conf.schema import Experiment, Model, Prompts
from data.prompts import PromptSource
from data.store import Store
from tasks.prompts import prompts
from tasks.stage import Inputs, Rows
from tests.fakes.context import save_tokenizer


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Draw iteration `n` of a run from a source, and commit unless told otherwise."""
    save_tokenizer(tmp_path / "model")
    store = Store(tmp_path / "run", "demo")
    experiment = Experiment(model=Model(path=str(tmp_path / "model")), prompts=Prompts(per_iteration=2))

    def draw(iteration: int, digest: str = "digest", commit: bool = True) -> Rows:
        rows = [(f"w{10 + i} w{20 + i}", f"a{i}", "{}") for i in range(3)]
        source = PromptSource("made", rows, digest, held_out=0, shuffle=False, seed=0)
        context: Any = SimpleNamespace(
            experiment=experiment, store=store, prompts=source, iteration=iteration, node="prompts"
        )
        running: Any = prompts.run(Inputs({}, None, None), context)
        output = asyncio.run(running)
        assert isinstance(output, Rows)
        if commit:
            store.commit_rows(iteration, "prompts", output.table, key="group_id", facts=output.facts)
        return output

    return draw


def test_each_prompt_becomes_a_group_with_its_token_ids(run: Any) -> None:
    assert run(1).table.to_pydict() == {
        "group_id": ["i000001-g000", "i000001-g001"],
        "prompt_index": [0, 1],
        "prompt_text": ["w10 w20", "w11 w21"],
        "prompt_ids": [[10, 20], [11, 21]],
        "answer": ["a0", "a1"],
        "prompt_data": ["{}", "{}"],
    }


def test_an_iteration_goes_on_where_the_last_committed_one_stopped(run: Any) -> None:
    first = run(1)
    assert first.facts.cursor == {"epoch": 0, "position": 2, "source": "digest"}
    killed = run(2, commit=False)
    assert killed.table["prompt_index"].to_pylist() == [2, 3]  # epoch 0 row 2, epoch 1 row 0
    again = run(2)
    assert (again.table, again.facts) == (killed.table, killed.facts)
    assert run(3).table["prompt_index"].to_pylist() == [4, 5]


def test_an_iteration_without_a_predecessor_is_refused(run: Any) -> None:
    run(1)
    with pytest.raises(StageError, match="iteration 3 follows iteration 2, which has no prompts"):
        run(3)


def test_a_source_that_changed_during_the_run_is_refused(run: Any) -> None:
    run(1)
    with pytest.raises(
        DataError, match="source made changed during the run: iteration 1 drew from digest, now it is x"
    ):
        run(2, digest="x")
