"""Prompt sources: every prompt once an epoch, from any cursor, in any portions; held-out prompts never."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, DataError
from conf.schema import Prompts
from data.prompts import Cursor, Prompt, PromptSource, encode_prompts, load_tokenizer, open_prompts, tokenizer_digest
from tasks.models import make_tiny_model

SHUFFLED = [0, 2, 1, 5, 4, 3, 6 + 5, 6 + 3, 6 + 2, 6 + 4, 6 + 1, 6 + 0]  # two epochs of 6 rows; old runs rely on it
JSONL = Prompts(source="jsonl", per_iteration=1)


def source(rows: int, held_out: int = 0, shuffle: bool = False, seed: int = 0) -> PromptSource:
    made = [(f"p{i}", f"a{i}", "{}") for i in range(rows)]
    return PromptSource("made", made, "digest", held_out=held_out, shuffle=shuffle, seed=seed)


def taken(prompts: PromptSource, cursor: Cursor, portions: Sequence[int]) -> tuple[list[int], Cursor]:
    indices: list[int] = []
    for n in portions:
        drawn, cursor = prompts.take(cursor, n)
        indices += [p.index for p in drawn]
    return indices, cursor


def write(path: Path, *lines: str | bytes) -> Prompts:
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return replace(JSONL, path=str(path))


# -- the cursor


def test_prompts_come_in_order_and_over_the_end_of_an_epoch() -> None:
    prompts = source(4, held_out=1)
    drawn, cursor = prompts.take(prompts.start(), 2)
    assert [(p.index, p.text, p.answer) for p in drawn] == [(0, "p0", "a0"), (1, "p1", "a1")]
    assert cursor == Cursor(0, 2)
    drawn, cursor = prompts.take(cursor, 3)  # row 2, then epoch 1: rows 0 and 1
    assert [(divmod(p.index, 4), p.text) for p in drawn] == [((0, 2), "p2"), ((1, 0), "p0"), ((1, 1), "p1")]
    assert cursor == Cursor(1, 2)


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    assert source(3).take(Cursor(0, 1), 2)[1] == Cursor(1, 0)


def test_a_shuffled_order_is_fixed_by_the_seed_for_ever() -> None:
    prompts = source(6, shuffle=True)
    assert taken(prompts, prompts.start(), [6, 6])[0] == SHUFFLED
    assert taken(source(6, shuffle=True, seed=1), Cursor(0, 0), [6])[0] != SHUFFLED[:6]


def test_held_out_prompts_are_the_last_ones_and_are_never_drawn() -> None:
    prompts = source(7, held_out=3, shuffle=True)
    assert [(p.index, p.text) for p in prompts.held_out()] == [(4, "p4"), (5, "p5"), (6, "p6")]
    drawn, _ = taken(prompts, prompts.start(), [4] * 20)
    assert {i % 7 for i in drawn} == {0, 1, 2, 3}
    assert len(set(drawn)) == len(drawn) == 80  # an index is unique over epochs, held-out ones included
    assert not set(drawn) & {4, 5, 6}


@given(data=st.data())
def test_any_portions_and_any_resume_give_one_sequence(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 12), "rows")
    held_out = data.draw(st.integers(0, rows - 1), "held out")
    prompts = source(rows, held_out, data.draw(st.booleans(), "shuffle"), data.draw(st.integers(0, 99), "seed"))
    epoch = rows - held_out
    portions = data.draw(st.lists(st.integers(1, epoch), min_size=1, max_size=12), "portions")
    whole, _ = taken(prompts, prompts.start(), [1] * sum(portions))
    assert taken(prompts, prompts.start(), portions)[0] == whole
    cut = data.draw(st.integers(0, len(portions)), "killed after")
    before, cursor = taken(prompts, prompts.start(), portions[:cut])
    resumed = Cursor.from_json(json.loads(json.dumps(cursor.to_json())))
    assert before + taken(prompts, resumed, portions[cut:])[0] == whole
    for first in range(0, len(whole) - epoch + 1, epoch):  # no skip and no repeat within an epoch
        assert sorted(divmod(i, rows) for i in whole[first : first + epoch]) == [
            (first // epoch, row) for row in range(epoch)
        ]


def test_more_prompts_than_there_are_is_refused() -> None:
    with pytest.raises(DataError, match="made: an epoch has 3 prompts, asked for 4 at once"):
        source(5, held_out=2).take(Cursor(0, 0), 4)
    with pytest.raises(DataError, match="an epoch has 3 prompts, the cursor stands at 3"):
        source(5, held_out=2).take(Cursor(0, 3), 1)


@pytest.mark.parametrize("value", [{}, {"epoch": 0}, {"epoch": -1, "position": 0}, {"epoch": 0, "position": 1.0}])
def test_a_cursor_that_is_none_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="needs epoch and position"):
        Cursor.from_json(value)


# -- sources


def test_a_jsonl_file_is_read_with_everything_else_it_knows(tmp_path: Path) -> None:
    settings = write(
        tmp_path / "p.jsonl", '{"prompt": "2+3", "answer": 5, "level": [1]}', "", '{"prompt": "ä", "answer": "b"}'
    )
    drawn, _ = open_prompts(settings, 0, 0).take(Cursor(0, 0), 2)
    assert drawn == [Prompt(0, "2+3", "5", '{"level": [1]}'), Prompt(1, "ä", "b", "{}")]


GOOD = '{"prompt": "p", "answer": "a"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "p", ', "p.jsonl:2: expected one JSON object a line"),
        (b'{"prompt": "\xff"}', "p.jsonl:2: expected one JSON object a line"),
        ('{"prompt": "x"}'.encode("utf-16"), "p.jsonl:2: expected one JSON object a line"),
        ("[" * 100_000, "p.jsonl:2: expected one JSON object a line: maximum recursion depth exceeded"),
        (
            '{"prompt": "p", "answer": ' + "9" * 5000 + "}",
            "p.jsonl:2: expected one JSON object a line: Exceeds the limit",
        ),
        ('{"prompt": "p", "answer": "a", "prompt": "q"}', "a line: 'prompt' is given twice"),
        (
            '{"prompt": "\\ud800", "answer": "a"}',
            "p.jsonl:2: must be Unicode text, got half a surrogate pair, '\\ud800'",
        ),
        ('{"prompt": "p", "answer": "a", "k": ["\\udfff"]}', "p.jsonl:2: must be Unicode text"),
        ("[1]", "p.jsonl:2: expected a JSON object, got list"),
        ('{"question": "p", "answer": "a"}', "p.jsonl:2: field 'prompt' is missing; found answer, question"),
        ('{"prompt": "p"}', "p.jsonl:2: field 'answer' is missing; found prompt"),
        ('{"prompt": " ", "answer": "a"}', "p.jsonl:2: prompt must be a text, got ' '"),
        ('{"prompt": "p", "answer": null}', "p.jsonl:2: answer must be a text or a whole number, got None"),
        ('{"prompt": "p", "answer": true}', "p.jsonl:2: answer must be a text or a whole number, got True"),
        ('{"prompt": "p", "answer": 0.5}', "p.jsonl:2: answer must be a text or a whole number, got 0.5"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: str | bytes, message: str) -> None:
    settings = write(tmp_path / "p.jsonl", GOOD, line)
    with pytest.raises(DataError) as caught:
        open_prompts(settings, 0, 0)
    assert message in str(caught.value)


def test_a_parquet_file_is_read_under_the_names_in_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"q": ["x", "y", "z"], "a": [1, 2, 3], "tags": [["t"], [], ["u"]]}), path, row_group_size=2)
    settings = Prompts(source="parquet", path=str(path), prompt_field="q", answer_field="a", per_iteration=1)
    drawn, _ = open_prompts(settings, 0, 0).take(Cursor(0, 1), 2)
    assert drawn == [Prompt(1, "y", "2", '{"tags": []}'), Prompt(2, "z", "3", '{"tags": ["u"]}')]
    with pytest.raises(DataError, match=r"p\.parquet:1: field 'prompt' is missing; found a, q, tags"):
        open_prompts(replace(settings, prompt_field="prompt"), 0, 0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        open_prompts(settings, 0, 0)


def spoilt_string(good: str, bad: bytes) -> pa.Array:
    offsets = np.array([0, len(good), len(good) + len(bad)], np.int32)
    return pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(good.encode() + bad)])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": spoilt_string("a", b"\xff"), "answer": ["1", "2"]}, "p.parquet:2: not readable: 'utf-8' codec"),
        (
            {"prompt": ["a", "b"], "answer": ["1", "2"], "more": spoilt_string("a", b"\xc0")},
            "p.parquet:2: not readable",
        ),
        ({"prompt": ["a", None], "answer": ["1", "2"]}, "p.parquet:2: prompt must be a text, got None"),
        ({"prompt": [b"a"], "answer": ["1"]}, "p.parquet:1: prompt must be a text, got b'a'"),
        ({"prompt": [["a"]], "answer": ["1"]}, "p.parquet:1: prompt must be a text, got ['a']"),
        ({"prompt": ["a"], "answer": [1.0]}, "p.parquet:1: answer must be a text or a whole number, got 1.0"),
    ],
)
def test_a_bad_row_of_a_parquet_file_is_named_by_its_number(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    with pytest.raises(DataError) as caught:
        open_prompts(replace(JSONL, source="parquet", path=str(tmp_path / "p.parquet")), 0, 0)
    assert message in str(caught.value)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["prompt", "answer", "answer"])
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(DataError, match="columns must have different names, got "):
        open_prompts(replace(JSONL, source="parquet", path=str(tmp_path / "p.parquet")), 0, 0)


def opens_or_is_refused(settings: Prompts) -> None:
    """What can be opened can also be drawn, written to a table and read as JSON; else the error names the file."""
    try:
        prompts = open_prompts(settings, 0, 0)
    except DataError as error:
        assert str(error).startswith(f"{settings.path}:")  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
        return
    except ConfigError as error:
        assert "per_iteration must be <= the prompts to draw from" in str(error)  # noqa: PT017
        return
    for prompt in [*prompts.take(prompts.start(), 1)[0], *prompts.held_out()]:
        pa.table({"text": [prompt.text], "answer": [prompt.answer], "data": [prompt.data]})
        assert isinstance(json.loads(prompt.data), dict)


spoiling = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.dictionaries(st.sampled_from(["prompt", "answer", "more", ""]), ANY | st.just("text"))


@spoiling
@given(st.lists(FIELDS.map(lambda fields: json.dumps(fields).encode()) | st.binary(max_size=30), max_size=3))
def test_any_lines_are_read_or_refused_by_file_and_line(tmp_path: Path, lines: list[bytes]) -> None:
    opens_or_is_refused(write(tmp_path / "p.jsonl", *lines))


@spoiling
@given(st.data())
def test_a_spoilt_parquet_file_is_read_or_refused_by_name(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["one", "two"], "answer": ["1", "2"], "more": [["a"], None]}), path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4), "bits")):
        content[data.draw(st.integers(0, len(content) - 1), "byte")] ^= 1 << data.draw(st.integers(0, 7), "bit")
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)), "kept")])
    opens_or_is_refused(replace(JSONL, source="parquet", path=str(path)))


def test_the_digest_of_a_file_source_follows_its_content(tmp_path: Path) -> None:
    digests = [open_prompts(write(tmp_path / "p.jsonl", *[GOOD] * n), 0, 0).digest for n in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]


CHAIN = Prompts(
    task="chain_sum",
    task_options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    size=20,
    per_iteration=4,
)


def test_reasoning_gym_gives_the_same_prompts_for_the_same_seed() -> None:
    first, again, other = (open_prompts(CHAIN, seed, 5) for seed in (3, 3, 4))
    drawn, cursor = first.take(first.start(), 4)
    assert cursor == Cursor(0, 4)
    assert again.take(again.start(), 4)[0] == drawn
    assert other.take(other.start(), 4)[0] != drawn
    assert first.digest == again.digest != other.digest
    assert len(first.held_out()) == 5
    for prompt in drawn:
        question = json.loads(prompt.data)["expression"]
        assert question in prompt.text
        assert eval(question) == int(prompt.answer)


def test_a_reasoning_gym_task_without_a_single_answer_has_an_empty_one() -> None:
    prompts = open_prompts(Prompts(task="propositional_logic", size=4, per_iteration=1), 0, 0)
    assert prompts.take(prompts.start(), 1)[0][0].answer == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(CHAIN, task="nope"), "Dataset 'nope' not registered"),
        (replace(CHAIN, task_options={"terms": 2}), "unexpected keyword argument 'terms'"),
        (replace(CHAIN, task_options={"min_terms": 9}), "max_terms must be >= min_terms"),
        (replace(JSONL, path="/no/such/file"), "prompts.path must be a jsonl file, got '/no/such/file'"),
        (replace(CHAIN, per_iteration=16), "chain_sum has 20, 5 are kept for evaluation, got 16"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Prompts, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_prompts(settings, 0, 5)
    assert message in str(caught.value)


# -- tokens


class Words:
    """A tokenizer whose token ids are the lengths of the words."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        assert options == {"add_generation_prompt": True, "return_dict": False}
        return self(" ".join(f"{m['role']} {m['content']}" for m in messages))["input_ids"]


PROMPT = Prompt(17, "one three", "", "{}")


@pytest.mark.parametrize(
    ("template", "system", "ids"),
    [
        (None, "", [3, 5]),
        (None, "be nice", [2, 4, 3, 5]),
        ("chatml", "", [4, 3, 5]),
        ("chatml", "be nice", [6, 2, 4, 4, 3, 5]),
    ],
)
def test_a_prompt_goes_through_the_chat_template_where_there_is_one(
    template: str | None, system: str, ids: list[int]
) -> None:
    assert encode_prompts(Words(template), [PROMPT, PROMPT], system, 6) == [ids, ids]


def test_a_prompt_too_long_or_empty_is_refused_by_its_index() -> None:
    with pytest.raises(DataError, match=r"prompt 17 must have 1 to 2 tokens \(prompts.max_tokens\), got 3"):
        encode_prompts(Words("chatml"), [PROMPT], "", 2)
    with pytest.raises(DataError, match=r"prompt 18 .* got 0"):
        encode_prompts(Words(None), [Prompt(18, "", "", "{}")], "", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", say=lambda text: None)


def test_the_real_tokenizer_opens_the_assistants_turn(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    assert load_tokenizer(str(model)) is tokenizer
    (ids,) = encode_prompts(tokenizer, [PROMPT], "be nice", 100)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nbe nice<|im_end|>\n<|im_start|>user\none three<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_tokenizer_digest_follows_tokenizer_files_only(tmp_path: Path) -> None:
    def digest(change: Callable[[], object]) -> str:
        change()
        return tokenizer_digest(tmp_path)

    with pytest.raises(ConfigError, match="must hold a tokenizer"):
        tokenizer_digest(tmp_path)
    first = digest(lambda: (tmp_path / "tokenizer.json").write_text("{}"))
    assert digest(lambda: (tmp_path / "config.json").write_text("{}")) == first
    assert digest(lambda: (tmp_path / "tokenizer.py").write_text("evil()")) == first
    second = digest(lambda: (tmp_path / "chat_template.jinja").write_text("a"))
    assert second != first
    assert digest(lambda: (tmp_path / "chat_template.jinja").write_text("b")) not in (first, second)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"must hold a tokenizer, got '{tmp_path}'"):
        load_tokenizer(str(tmp_path))
