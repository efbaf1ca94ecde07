"""The client of a real SGLang server, and how the server lives and dies. What SGLang itself does: tests/contract."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, EngineError
from conf.schema import Experiment, Model, Rollout
from data.columns import SPAN
from tasks.engines.answer import Aborted, BadAnswer, parse_generation
from tasks.engines.client import Engine, Mark, Refused, Sampling, Span, Unavailable, check_bracket
from tasks.engines.server import SGLangServer, read_limits, server_options, to_arguments
from tests.engines_fixture import make_server

LABEL = "000001-0123456789ab"
PROMPT = [72, 101, 108, 108, 111]


def with_engine(server: SGLangServer, use: Callable[[Engine], Awaitable[Any]]) -> Any:
    """Run `use` with a client that takes work for LABEL."""

    async def run() -> Any:
        engine = server.connect()
        engine.ready_label = LABEL
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def generate(engine: Engine, rid: str, prompt: list[int] = PROMPT, **changes: Any) -> Awaitable[Any]:
    arguments = {"sampling": Sampling(8, 1.0), "extra_key": LABEL, "timeout_s": 60, **changes}
    return engine.generate(rid=rid, prompt_ids=prompt, **arguments)


# -- what is never sent


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "has no tokens"),
        ([1, 259], r"token id 259 is outside the vocabulary \[0, 259\)"),
        ([-1], "token id -1 is outside"),
        ([1] * 513, "exceed the context length 512"),
        ([1] * 505, "505 prompt tokens . 8 new tokens exceed the context length 512"),
    ],
)
def test_a_request_that_would_be_refused_or_kill_the_server_is_not_sent(
    sglang_server: SGLangServer, prompt: list[int], message: str
) -> None:
    async def run(engine: Engine) -> None:
        with pytest.raises(Refused, match=f"bad-0001.*{message}"):
            await generate(engine, "bad-0001", prompt)
        assert (await generate(engine, "good-0001")).ids

    with_engine(sglang_server, run)


def test_an_engine_gets_work_for_no_version_but_its_own(sglang_server: SGLangServer) -> None:
    async def run(engine: Engine) -> None:
        with pytest.raises(EngineError, match="READY for 000001-0123456789ab, request r-1 is for 000002-other"):
            await generate(engine, "r-1", extra_key="000002-other")
        engine.ready_label = ""
        with pytest.raises(EngineError, match="READY for no version"):
            await generate(engine, "r-2")

    with_engine(sglang_server, run)


def test_a_request_past_its_deadline_is_unavailable(sglang_server: SGLangServer) -> None:
    async def run(engine: Engine) -> None:
        with pytest.raises(Unavailable, match=r"request late-1 had no answer in 0.001 s"):
            await generate(engine, "late-1", timeout_s=0.001)

    with_engine(sglang_server, run)


# -- what is not believed


ASKED: dict[str, int] = {"vocab_size": 10, "prompt_tokens": 3, "max_new_tokens": 2}


def answer(**meta: Any) -> dict[str, Any]:
    """A right answer of two tokens, with parts of meta_info replaced."""
    right = {
        "finish_reason": {"type": "stop", "matched": 7},
        "completion_tokens": 2,
        "cached_tokens": 0,
        "num_retractions": 0,
        "output_token_logprobs": [[-0.5, 5, None], [-1.5, 7, None]],
        "weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}],
    }
    return {"output_ids": [5, 7], "meta_info": {**right, **meta}}


def test_a_right_answer_is_taken_as_it_is() -> None:
    got = parse_generation(answer(), **ASKED)
    assert (got.ids, got.logprobs, got.finish_reason) == ((5, 7), (-0.5, -1.5), "stop")
    assert got.spans == (Span("a", 0, 1), Span("b", 1, 2))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (
            {"finish_reason": {"type": "abort", "message": "Aborted"}},
            "must be stop or length, got abort after 2 tokens",
        ),
        ({"finish_reason": {"type": "tool"}}, "must be stop or length"),
        ({"finish_reason": None}, "missing or of the wrong type"),
        ({"completion_tokens": 3}, "3 completion tokens are reported, 2 came"),
        ({"output_token_logprobs": [[-0.5, 5, None]]}, "expected 2 log-probabilities, one a token, got 1"),
        ({"output_token_logprobs": [[-0.5, 5, None], [-1.5, 8, None]]}, "must be of token 7, is of token 8"),
        ({"output_token_logprobs": [[-0.5, 5, None], [None, 7, None]]}, "must be finite and <= 0, got None"),
        ({"output_token_logprobs": [[-0.5, 5, None], [0.1, 7, None]]}, "must be finite and <= 0, got 0.1"),
        ({"output_token_logprobs": [[-0.5, 5, None], [float("nan"), 7, None]]}, "must be finite"),
        ({"output_token_logprobs": [[-0.5, 5, None], [-1e39, 7, None]]}, "must be finite and <= 0, got -1e.39"),
        ({"output_token_logprobs": [[-0.5, 5, None], [False, 7, None]]}, "must be finite and <= 0, got False"),
        ({"cached_tokens": 4}, "cached_tokens must be 0 to 3, got 4"),
        ({"cached_tokens": float("inf")}, "cached_tokens must be 0 to 3, got inf"),
        ({"num_retractions": -1}, "num_retractions must be 0 to 1000000, got -1"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 1}]}, "must cover 2 tokens"),
        ({"weight_versions": [{"version": "a", "start": 1, "end": 2}]}, "without gap or overlap"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 2.0}]}, "without gap or overlap"),
        ({"weight_versions": [{"version": 7, "start": 0, "end": 2}]}, "without gap or overlap"),
        ({"weight_versions": None}, "missing or of the wrong type"),
    ],
)
def test_a_wrong_answer_is_refused(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        parse_generation(answer(**meta), **ASKED)


def test_an_answer_without_log_probabilities_is_refused() -> None:
    without = answer()
    del without["meta_info"]["output_token_logprobs"]
    with pytest.raises(BadAnswer, match="output_token_logprobs"):
        parse_generation(without, **ASKED)


def test_more_tokens_than_were_asked_for_are_refused() -> None:
    with pytest.raises(BadAnswer, match="expected at most 1 tokens, got 2"):
        parse_generation(answer(), **{**ASKED, "max_new_tokens": 1})


def test_what_was_cut_off_comes_with_its_tokens_checked_like_any_other() -> None:
    cut = {"finish_reason": {"type": "abort", "message": "Aborted"}}
    with pytest.raises(Aborted) as found:
        parse_generation(answer(**cut), **ASKED)
    whole = parse_generation(answer(), **ASKED)
    assert found.value.partial == replace(whole, finish_reason="abort")
    none = {"completion_tokens": 0, "output_token_logprobs": [], "weight_versions": [{"version": "a"}]}
    with pytest.raises(Aborted) as found:
        parse_generation({**answer(**cut, **none), "output_ids": []}, **ASKED)
    assert found.value.partial.ids == found.value.partial.spans == ()
    with pytest.raises(BadAnswer, match="must be of token 7") as bad:
        parse_generation(answer(**cut, output_token_logprobs=[[-0.5, 5, None], [-1.5, 8, None]]), **ASKED)
    assert not isinstance(bad.value, Aborted)


@pytest.mark.parametrize("tokens", [0, 2], ids=["never begun", "retracted"])
def test_what_was_cut_off_in_the_engines_queue_comes_without_its_counts(tokens: int) -> None:
    cut = answer(finish_reason={"type": "abort", "message": "Abort in waiting queue"}, completion_tokens=tokens)
    meta = {name: value for name, value in cut["meta_info"].items() if name not in ("cached_tokens", "num_retractions")}
    meta["output_token_logprobs"] = meta["output_token_logprobs"][:tokens]
    with pytest.raises(Aborted) as found:
        parse_generation({"output_ids": cut["output_ids"][:tokens], "meta_info": meta}, **ASKED)
    assert found.value.partial.ids == (5, 7)[:tokens]
    assert (found.value.partial.cached_tokens, found.value.partial.retractions) == (0, 0)
    whole = answer()
    del whole["meta_info"]["cached_tokens"]
    with pytest.raises(BadAnswer, match="cached_tokens"):
        parse_generation(whole, **ASKED)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([10**400, -(10**400)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """A right answer with one to three things changed, as it comes over the wire."""
    content = {"answer": answer(id="r-1", finish_reason={"type": draw(st.sampled_from(["stop", "abort"]))})}
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(places(content)))
        match draw(st.sampled_from(["replace", "nudge", "delete", "repeat"])):
            case "nudge" if type(container[key]) in (int, float) and abs(container[key]) < 1e9:
                container[key] += draw(st.sampled_from([-1, 1, 0.5]))
            case "delete" if container is not content:
                del container[key]
            case "repeat" if isinstance(container, list):
                container.insert(key, container[key])
            case _:
                container[key] = draw(VALUES)
    text = json.dumps(content["answer"]).encode()
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


class Scripted(Engine):
    """The client of a server that says `content` to everything."""

    content = b""

    def __init__(self) -> None:
        super().__init__("engine0", "http://engine0", vocab_size=10, context_length=512, boot="boot-1")
        self.ready_label = LABEL
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=self.content))
        self._http = httpx.AsyncClient(base_url=self.url, transport=transport)


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@settings(max_examples=300, deadline=None)
@given(content=answers())
def test_any_answer_is_a_bad_one_or_a_whole_one(scripted: Scripted, content: bytes) -> None:
    scripted.content = content
    try:
        got = asyncio.run(scripted.generate(
            rid="r-1", prompt_ids=[1, 2, 3], sampling=Sampling(2, 1.0), extra_key=LABEL, timeout_s=60
        ))  # fmt: skip
    except Aborted as error:
        got = error.partial
        if not got.ids:
            return
    except BadAnswer:
        return
    assert 1 <= len(got.ids) <= 2
    assert all(type(i) is int and 0 <= i < 10 for i in got.ids)
    logprobs = np.array(got.logprobs, np.float32)
    assert len(logprobs) == len(got.ids)
    assert np.isfinite(logprobs).all()
    assert (logprobs <= 0).all()
    assert [span.start for span in got.spans] == [0, *(span.end for span in got.spans[:-1])]
    assert got.spans[-1].end == len(got.ids)
    assert pa.array([[asdict(span) for span in got.spans]], pa.list_(SPAN)).null_count == 0
    assert 0 <= got.cached_tokens <= 3


# -- who the server is


def test_the_boot_label_stays_readable_after_an_update(sglang_server: SGLangServer, tiny_model: Path) -> None:
    async def run(engine: Engine) -> Mark:
        await engine.update_weights(str(tiny_model), LABEL, 60)
        return await engine.mark()

    mark = with_engine(sglang_server, run)
    assert (mark.boot, mark.label) == (sglang_server.connect().boot, LABEL)
    assert mark.boot.startswith("boot-")


def test_a_bracket_notices_changed_weights_under_the_same_label(
    sglang_server: SGLangServer, tiny_model: Path, tiny_tensors: dict[str, Any], tmp_path: Path
) -> None:
    from tests.engines_fixture import changed, make_package

    other = make_package(tmp_path, tiny_model, 1, changed(tiny_tensors, 1))

    async def run(engine: Engine) -> None:
        await engine.update_weights(str(tiny_model), LABEL, 60)
        before = {"engine0": await engine.mark()}
        check_bracket(before, {"engine0": await engine.mark()})
        await engine.update_weights(str(other.folder), LABEL, 60)
        with pytest.raises(EngineError, match="engine0 changed while the batch was open"):
            check_bracket(before, {"engine0": await engine.mark()})

    with_engine(sglang_server, run)


def test_keys_are_neither_in_the_process_list_nor_in_the_log(sglang_server: SGLangServer) -> None:
    keys = {sglang_server._api_key, sglang_server._admin_key}
    seen = b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))
    log = sglang_server.log.read_text()
    assert len(keys) == 2
    assert not [key for key in keys if key.encode() in seen or key in log]
    assert "'api_key': '***'" in log  # SGLang does print them


def test_another_server_on_the_port_is_not_taken_for_this_one(
    sglang_server: SGLangServer, tiny_model: Path, tmp_path: Path
) -> None:
    class Late(SGLangServer):
        """Its own server never came up; another run's listens on the port."""

        def _launch(self) -> None:
            self._boot, self._port = "boot-mine", sglang_server._port
            self._process = subprocess.Popen(["sleep", "60"], start_new_session=True, text=True)

    server = Late("engine0", server_options(Experiment(model=Model(str(tiny_model))), 0, 1), {}, tmp_path / "log")
    with pytest.raises(EngineError, match="another server answers"):
        asyncio.run(server.start(30))
    assert not server.alive
    server._api_key = sglang_server._api_key  # even one that takes the key is told by its label
    with pytest.raises(EngineError, match="expected the label boot-mine, got "):
        asyncio.run(server.start(30))


# -- life and death


def test_a_server_that_ends_during_its_start_is_an_error_with_its_last_words(tiny_model: Path, tmp_path: Path) -> None:
    server = make_server("engine0", tiny_model, tmp_path / "log")
    server._options["no_such_option"] = 1
    with pytest.raises(EngineError, match=r"(?s)engine0 ended with status 2.*unrecognized arguments: --no-such-option"):
        asyncio.run(server.start(120))
    assert not server.alive


def test_a_server_that_is_not_ready_in_time_is_stopped(tiny_model: Path, tmp_path: Path) -> None:
    server = make_server("engine0", tiny_model, tmp_path / "log")
    with pytest.raises(EngineError, match=r"was not ready after 0\.1 s"):
        asyncio.run(server.start(0.1))
    assert not server.alive


OWNER = """
    import asyncio, sys
    from pathlib import Path
    from tests.engines_fixture import make_server

    async def main():
        server = make_server("engine0", Path(sys.argv[1]), Path(sys.argv[2]))
        start = asyncio.create_task(server.start(300))
        while not server.pid:
            await asyncio.sleep(0.01)
        print(server.pid, flush=True)
        await start
        print("ready", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


def session(sid: int) -> list[int]:
    """Live processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == sid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("moment", ["while it starts", "when it is ready"])
def test_the_whole_server_dies_with_its_owner(tiny_model: Path, tmp_path: Path, moment: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(OWNER), str(tiny_model), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        sid = int(owner.stdout.readline())
        try:
            if moment == "when it is ready":
                assert owner.stdout.readline() == "ready\n"
            else:
                while len(session(sid)) < 3:  # SGLang's own children are being spawned
                    time.sleep(0.005)
            assert len(session(sid)) >= 3
        finally:
            owner.send_signal(signal.SIGKILL)
    until = time.monotonic() + 15
    while (left := session(sid)) and time.monotonic() < until:
        time.sleep(0.1)
    if left:
        os.killpg(sid, signal.SIGKILL)
    assert left == []


# -- options


def test_options_become_arguments_under_sglangs_names() -> None:
    options = {"tp_size": 2, "enable_mixed_chunk": True, "disable_radix_cache": False, "lora_paths": ["a", "b"]}
    assert to_arguments(options) == ["--tp-size", "2", "--enable-mixed-chunk", "--lora-paths", "a", "b"]


def test_engines_of_a_gpu_pool_take_devices_of_their_own(tiny_model: Path) -> None:
    experiment = Experiment(model=Model(str(tiny_model), "cuda"), rollout=Rollout(sglang={"tp_size": 2}))
    second = server_options(experiment, 1, 2)
    assert (second["device"], second["base_gpu_id"], second["tp_size"]) == ("cuda", 2, 2)
    assert "attention_backend" not in second


def test_limits_come_from_the_model(tiny_model: Path, tmp_path: Path) -> None:
    limits = read_limits(tiny_model, {}, dtype_bytes=4)
    # 2 layers x (key + value) x 2 heads x 16 x 4 bytes
    assert (limits.vocab_size, limits.context_length, limits.kv_bytes) == (259, 512, 2 * 2 * 2 * 16 * 4)
    assert read_limits(tiny_model, {"context_length": 128}).context_length == 128
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    with pytest.raises(ConfigError, match="must have 'hidden_size'"):
        read_limits(tmp_path, {})
