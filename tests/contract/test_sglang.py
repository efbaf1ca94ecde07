"""What Ratchet relies on in SGLang 0.5.23, asked of a real server over plain HTTP.

Each test is one fact and says what rests on it. After an upgrade of SGLang, one that fails names what to change.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.engines.answer import BadAnswer, Sampling, parse_generation
from tasks.engines.server import SGLangServer
from tests.contract.conftest import living
from tests.contract.wire import Wire
from tests.engines_fixture import PROBE_IDS, Tensors, changed, true_logprobs

BASE, OTHER = "000001-base", "000002-other"
PROMPT = [72, 101, 108, 108, 111]
EOS = 257
LEFT_OUT = "model.layers.1.mlp.down_proj.weight"

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def other_tensors(tiny_tensors: Tensors) -> Tensors:
    return changed(tiny_tensors, 1)


@pytest.fixture(scope="module")
def folders(tiny_model: Path, other_tensors: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Weights an engine can load: `base` is what it started with, `other` differs in every tensor."""
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("weights")
    short = {name: t for name, t in other_tensors.items() if name != LEFT_OUT}
    for name, tensors in {"other": other_tensors, "short": short, "cut": other_tensors}.items():
        (root / name).mkdir()
        shutil.copy(tiny_model / "config.json", root / name)
        save_file(tensors, root / name / "model.safetensors")
    cut = root / "cut" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    return {"base": tiny_model, **{name: root / name for name in ("other", "short", "cut")}}


@pytest.fixture(scope="module")
def connected(sglang_server: SGLangServer) -> Iterator[Wire]:
    wire = Wire(sglang_server)
    yield wire
    wire.close()


@pytest.fixture
def wire(connected: Wire, folders: Folders) -> Iterator[Wire]:
    """The session's server, with the base weights and an empty cache."""
    connected.load(folders["base"], BASE).raise_for_status()
    yield connected
    connected.command("/continue_generation", {}).raise_for_status()


def meta(answer: httpx.Response) -> dict[str, Any]:
    return dict(answer.raise_for_status().json()["meta_info"])


def spans(answer: httpx.Response) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in meta(answer)["weight_versions"]]


def logprobs(answer: httpx.Response) -> list[float]:
    return [value for value, _, _ in meta(answer)["output_token_logprobs"]]


def scored(model: Path, tensors: Tensors, prompt: Sequence[int], answer: httpx.Response) -> list[float]:
    """transformers' log-probabilities of the answer's tokens, each after all before it."""
    return true_logprobs(model, tensors, [*prompt, *answer.json()["output_ids"]])[len(prompt) - 1 :]


def apart(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


# -- what a generation gives


def test_the_log_probability_is_that_of_the_distribution_after_temperature_and_before_top_p_and_top_k(
    wire: Wire, tiny_model: Path, tiny_tensors: Tensors
) -> None:
    """`behavior_logprobs` is stored as such, and the trainer's ratio divides by it. Sent with the product's options."""
    prompts = [PROMPT * n for n in range(1, 7)]  # decoded together, at different lengths
    sampling = Sampling(12, 0.5, top_p=0.9, top_k=20).to_sglang()
    for prompt, answer in [(p, wire.start(p, sampling=sampling)) for p in prompts]:
        got = answer.result()
        ids = [*prompt, *got.json()["output_ids"]]
        expected = true_logprobs(tiny_model, tiny_tensors, ids, temperature=0.5)[len(prompt) - 1 :]
        assert logprobs(got) == pytest.approx(expected, abs=1e-4)


def test_prompt_log_probabilities_are_at_temperature_1_and_one_a_token(
    wire: Wire, tiny_model: Path, tiny_tensors: Tensors
) -> None:
    """The probe of Q10 is compared with the trainer's numbers."""
    entries = meta(wire.generate(PROBE_IDS, 1, logprob_start_len=0))["input_token_logprobs"]
    assert [token for _, token, _ in entries] == list(PROBE_IDS)
    expected = true_logprobs(tiny_model, tiny_tensors, PROBE_IDS)
    assert [value for value, _, _ in entries[1:]] == pytest.approx(expected, abs=1e-4)


def test_greedy_answers_repeat(wire: Wire) -> None:
    """Evaluation is greedy."""
    greedy = {"temperature": 0.0}
    assert len({tuple(wire.generate(PROMPT, 12, greedy).json()["output_ids"]) for _ in range(2)}) == 1


def test_several_samples_of_one_request_differ(wire: Wire) -> None:
    """Not so with one seed a request: `sampling_seed` has no effect on this backend."""
    answers = wire.generate(PROMPT, 12, {"n": 4}).json()
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 4


def test_the_ids_of_an_answer_end_with_the_end_of_sequence_token(wire: Wire) -> None:
    """It is a token the model chose, so it is trained."""
    answer = wire.generate(PROMPT, 8, {"ignore_eos": False, "logit_bias": {str(EOS): 1e4}})
    assert answer.json()["output_ids"] == [EOS]
    assert meta(answer)["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta(answer)["completion_tokens"], len(logprobs(answer))) == (1, 1)


def test_extra_key_separates_the_prefix_cache(wire: Wire) -> None:
    """Each version's label is its key, so that KV of another version is never used."""
    keys = ("a", "a", "b")
    assert [meta(wire.generate(PROMPT, extra_key=key))["cached_tokens"] for key in keys] == [0, len(PROMPT) - 1, 0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "input_ids cannot be empty"),
        ([1] * 513, "longer than the model's context length (512 tokens)"),
        ([1] * 505, "exceeds the model's maximum context length of 512 tokens"),
    ],
    ids=["no token", "too long a prompt", "prompt and answer too long together"],
)
def test_a_request_that_cannot_fit_is_400(wire: Wire, prompt: list[int], message: str) -> None:
    """The client refuses the same before it sends; a 400 of an engine is never sent again."""
    answer = wire.generate(prompt, 8)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


# -- requests that a pause or an update meets


def test_a_request_across_an_update_in_place_has_a_span_for_each_version_and_keeps_its_old_kv(
    wire: Wire, folders: Folders, tiny_tensors: Tensors, other_tensors: Tensors
) -> None:
    """KV policy `keep`: the labels are right, the log-probabilities are those of neither version."""
    request = wire.pause_in_the_middle("in_place", PROMPT, 400)
    wire.load(folders["other"], OTHER, flush_cache=False).raise_for_status()
    assert not request.done()
    wire.command("/continue_generation", {}).raise_for_status()
    answer = request.result()
    cut = spans(answer)[0][2]
    assert spans(answer) == [(BASE, 0, cut), (OTHER, cut, 400)]
    assert meta(answer)["num_retractions"] == 0
    before = scored(folders["base"], tiny_tensors, PROMPT, answer)
    after = scored(folders["base"], other_tensors, PROMPT, answer)
    assert logprobs(answer)[:cut] == pytest.approx(before[:cut], abs=1e-3)
    assert apart(logprobs(answer)[cut:], before[cut:]) > 0.1
    assert apart(logprobs(answer)[cut:], after[cut:]) > 0.1


def test_an_update_that_should_flush_beside_a_running_request_fails_with_the_weights_changed(
    wire: Wire, folders: Folders
) -> None:
    """So a 400 of Q4 is no proof that the old weights are there: the engine is DIRTY."""
    before = wire.sums()
    request = wire.pause_in_the_middle("in_place", PROMPT, 400)
    answer = wire.load(folders["other"], OTHER)
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert "Weights were updated, but the cache was not flushed because requests are still running" in answer.text
    assert wire.label() == BASE
    assert not set(before.items()) & set(wire.sums().items())
    wire.command("/continue_generation", {}).raise_for_status()
    assert [version for version, _, _ in spans(request.result())] == [BASE, OTHER]


def test_retract_and_an_update_that_flushes_let_a_request_go_on_with_its_prefix_recomputed(
    wire: Wire, folders: Folders, tiny_tensors: Tensors, other_tensors: Tensors
) -> None:
    """KV policy `rebuild`: each segment's log-probabilities are those of its version, and no token is lost."""
    request = wire.pause_in_the_middle("retract", PROMPT, 400)
    answer = wire.load(folders["other"], OTHER)
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert (wire.label(), request.done()) == (OTHER, False)
    wire.command("/continue_generation", {}).raise_for_status()
    answer = request.result()
    cut = spans(answer)[0][2]
    assert spans(answer) == [(BASE, 0, cut), (OTHER, cut, 400)]
    assert meta(answer)["num_retractions"] == 1
    assert meta(answer)["finish_reason"]["type"] == "length"
    before = scored(folders["base"], tiny_tensors, PROMPT, answer)
    after = scored(folders["base"], other_tensors, PROMPT, answer)
    assert logprobs(answer) == pytest.approx([*before[:cut], *after[cut:]], abs=1e-3)


def test_a_flush_that_waits_is_refused_while_a_request_is_retracted_and_one_that_does_not_wait_is_not(
    wire: Wire,
) -> None:
    """A retracted request holds no KV. Under `rebuild`, only the update's own flush is needed."""
    request = wire.pause_in_the_middle("retract", PROMPT, 400)
    waiting = wire.command("/flush_cache?timeout=0.1")
    assert (waiting.status_code, waiting.text) == (400, "Timed out waiting for idle state.")
    assert wire.command("/flush_cache").status_code == 200
    wire.command("/continue_generation", {}).raise_for_status()
    assert meta(request.result())["completion_tokens"] == 400


def test_a_flush_is_refused_while_a_request_runs_paused_or_not(wire: Wire) -> None:
    """Its 200 is the proof that no reader of the weights is left (Q2)."""
    request = wire.pause_in_the_middle("in_place", PROMPT, 400)
    assert wire.command("/flush_cache").status_code == 400
    wire.command("/continue_generation", {}).raise_for_status()
    codes = [wire.command("/flush_cache").status_code]
    while not request.done():
        codes.append(wire.command("/flush_cache").status_code)
    assert meta(request.result())["completion_tokens"] == 400
    codes.append(wire.command("/flush_cache").status_code)
    # Refused until it ends; its answer may still be on its way to us when the first one is done.
    assert (codes[0], codes[-1]) == (400, 200)
    assert codes == sorted(codes, reverse=True)


def test_pausing_with_abort_ends_requests_with_their_tokens_so_far(wire: Wire) -> None:
    """200 and whole in form: only the finish reason says that it is no sample."""
    answer = wire.pause_in_the_middle("abort", PROMPT, 400).result()
    assert answer.status_code == 200
    assert meta(answer)["finish_reason"]["type"] == "abort"
    count = meta(answer)["completion_tokens"]
    assert 0 < count < 400
    assert (len(answer.json()["output_ids"]), len(logprobs(answer))) == (count, count)
    assert spans(answer) == [(BASE, 0, count)]


def test_a_request_that_comes_during_a_pause_waits_and_runs_under_the_weights_of_after(
    wire: Wire, folders: Folders
) -> None:
    """A request sent too late by a rollout is no reader of the old weights."""
    wire.command("/pause_generation", {"mode": "abort"}).raise_for_status()
    request = wire.start(PROMPT, rid="late-0001")
    wire.load(folders["other"], OTHER).raise_for_status()
    assert not request.done()
    wire.command("/continue_generation", {}).raise_for_status()
    assert spans(request.result()) == [(OTHER, 0, 8)]


def test_an_abort_takes_every_request_whose_id_begins_so(wire: Wire) -> None:
    """Request ids have a fixed width."""
    for group in range(20):
        requests = {member: wire.start(PROMPT, 500, rid=f"g{group:02d}-{member}") for member in ("1", "10", "2")}
        while wire.loads()["num_running_reqs"] < 3 and not any(request.done() for request in requests.values()):
            pass
        wire.command("/abort_request", {"rid": f"g{group:02d}-1"}).raise_for_status()
        reasons = {member: meta(request.result())["finish_reason"]["type"] for member, request in requests.items()}
        if reasons["1"] == reasons["10"] == "abort":  # else they had ended: a busy machine
            break
    assert reasons == {"1": "abort", "10": "abort", "2": "length"}


# -- weight updates


def test_the_label_and_path_are_those_of_the_newest_update(wire: Wire, folders: Folders) -> None:
    """Q8."""
    wire.load(folders["other"], OTHER).raise_for_status()
    info = wire.ask("/model_info")
    assert (info["weight_version"], info["model_path"]) == (OTHER, str(folders["other"]))


def test_every_tensor_has_a_checksum_that_is_of_its_values_and_every_rank_is_named(
    wire: Wire, folders: Folders
) -> None:
    """Q6 and the bracket around a batch. The checksums themselves: tasks/engines/checksums.py."""
    before = wire.sums()
    wire.load(folders["other"], OTHER).raise_for_status()
    other = wire.sums()
    assert other.keys() == before.keys()
    assert not set(before.items()) & set(other.items())
    wire.load(folders["base"], BASE).raise_for_status()
    assert wire.sums() == before
    (rank,) = wire.command("/weights_checker", {"action": "checksum"}).json()["ranks"]
    assert [(place["rank"], place["size"]) for place in rank["parallelism_info"]] == [(0, 1)]


def test_a_package_with_a_tensor_missing_is_a_success_that_keeps_the_old_values(wire: Wire, folders: Folders) -> None:
    """Neither the answer nor the label shows it: Q6 asks for every tensor's checksum."""
    before = wire.sums()
    answer = wire.load(folders["short"], OTHER)
    assert (answer.status_code, answer.json()["success"], wire.label()) == (200, True, OTHER)
    assert {name for name, value in wire.sums().items() if value == before[name]} == {LEFT_OUT}


def test_a_path_that_does_not_exist_is_400_and_the_old_weights_stay(wire: Wire, tmp_path: Path) -> None:
    before = wire.sums()
    answer = wire.load(tmp_path / "nowhere", OTHER)
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert (wire.label(), wire.sums()) == (BASE, before)


def test_without_a_flush_kv_of_the_old_weights_is_used(wire: Wire, folders: Folders) -> None:
    """Every update flushes, and the probe's first request must have no cached token."""
    wire.generate(PROMPT, extra_key="k").raise_for_status()
    wire.load(folders["other"], OTHER, flush_cache=False).raise_for_status()
    assert meta(wire.generate(PROMPT, extra_key="k"))["cached_tokens"] == len(PROMPT) - 1
    wire.load(folders["other"], OTHER).raise_for_status()
    assert meta(wire.generate(PROMPT, extra_key="k"))["cached_tokens"] == 0


def test_the_label_can_be_changed_alone(wire: Wire) -> None:
    """A label proves nothing about weights, and an engine whose label nobody of ours set is refused (Q3)."""
    before = wire.sums()
    wire.command("/update_weight_version", {"new_version": OTHER, "abort_all_requests": False}).raise_for_status()
    assert (wire.label(), wire.sums()) == (OTHER, before)
    assert spans(wire.generate(PROMPT)) == [(OTHER, 0, 8)]


def test_an_update_is_applied_although_its_caller_hung_up(wire: Wire, folders: Folders) -> None:
    """A timeout of Q4 says nothing about the weights."""
    body = json.dumps({"model_path": str(folders["other"]), "weight_version": OTHER}).encode()
    head = f"POST /update_weights_from_disk HTTP/1.1\r\nHost: x\r\nAuthorization: {wire.admin['Authorization']}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", wire.port)) as connection:
        connection.sendall(head.encode() + body)
    until = time.monotonic() + 60
    while wire.label() != OTHER:
        assert time.monotonic() < until


def test_first_rows_are_read_by_their_hugging_face_name(wire: Wire, tiny_tensors: Tensors) -> None:
    """Canaries (Q7), also of tensors the engine keeps joined."""
    for name, tensor in tiny_tensors.items():
        rows = wire.command("/get_weights_by_name", {"name": name, "truncate_size": 1}).raise_for_status().json()
        first = tensor[0] if tensor.ndim == 2 else tensor[:1]
        assert (rows[0] if tensor.ndim == 2 else rows) == first.tolist()
    unknown = wire.command("/get_weights_by_name", {"name": "model.nothing.weight", "truncate_size": 1})
    assert unknown.status_code == 400


# -- who may ask what

USERS = [("GET", "/model_info"), ("GET", "/server_info"), ("GET", "/v1/loads"), ("POST", "/generate")]
ADMINS = [
    ("/flush_cache", {}),
    ("/weights_checker", {"action": "checksum"}),
    ("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 1}),
    ("/pause_generation", {"mode": "abort"}),
    ("/continue_generation", {}),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}),
    ("/update_weight_version", {"new_version": BASE}),
    ("/abort_request", {"rid": "nobody"}),
    ("/release_memory_occupation", None),  # refused before it is read: with the right key it would end the server
]


def test_with_both_keys_set_each_route_takes_exactly_one(wire: Wire) -> None:
    """client.py sends each its own; whoever may generate cannot change weights."""
    request = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    for method, route in USERS:
        body = request if method == "POST" else None
        answers = [wire.http.request(method, route, json=body, headers=h) for h in (wire.user, wire.admin, {})]
        assert (route, *(a.status_code for a in answers)) == (route, 200, 401, 401)
    for route, body in ADMINS:
        answers = [wire.http.post(route, json=body, headers=h) for h in (wire.user, {})]
        assert (route, *(a.status_code for a in answers)) == (route, 401, 401)
        if body is not None:
            assert (route, wire.command(route, body).status_code) not in ((route, 401), (route, 403))


def test_server_info_prints_both_keys_to_whoever_may_generate(wire: Wire) -> None:
    """Nothing of it leaves client.py but what is named there."""
    text = json.dumps(wire.ask("/server_info"))
    for headers in (wire.user, wire.admin):
        assert headers["Authorization"].removeprefix("Bearer ") in text


def test_ready_and_health_are_open_and_a_paused_engine_is_not_ready(wire: Wire) -> None:
    """Q9. /health is not asked of a paused engine: it generates, and answers after 20 s."""
    assert [wire.http.get(route).status_code for route in ("/ready", "/health")] == [200, 200]
    for mode in ("abort", "in_place", "retract"):
        wire.command("/pause_generation", {"mode": mode}).raise_for_status()
        assert wire.http.get("/ready").status_code == 503
        wire.command("/continue_generation", {}).raise_for_status()
        assert wire.http.get("/ready").status_code == 200


# -- life and death


def test_an_idle_server_sleeps(wire: Wire, sglang_server: SGLangServer) -> None:
    """With `--sleep-on-idle`; without it, its scheduler takes 86% of a core from the trainer beside it."""
    wire.generate(PROMPT).raise_for_status()

    def cpu_seconds() -> float:
        found = 0.0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == sglang_server.pid:  # the session
                    found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    began, before = time.monotonic(), cpu_seconds()
    time.sleep(2)  # what is measured, not what is waited for
    assert (cpu_seconds() - before) / (time.monotonic() - began) < 0.3


# -- a server of its own, started again after each death


def assert_dies(server: SGLangServer, deed: Callable[[], Any]) -> None:
    """`deed` gets no answer, and every process of the server ends."""
    assert server._process
    with pytest.raises(httpx.TransportError):
        deed()
    server._process.wait(60)
    until = time.monotonic() + 60
    while in_group(server.pid) and time.monotonic() < until:
        pass
    assert not in_group(server.pid)


def in_group(group: int) -> bool:
    """Whether a process of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def test_a_truncated_file_kills_the_server_and_a_restart_has_the_base_weights_under_another_boot_label(
    mortal: SGLangServer, wire: Wire, folders: Folders
) -> None:
    """Q0 reads every byte before an engine does. A boot label can never look like a published version's."""
    base, first = wire.sums(), Wire(living(mortal))
    boot = mortal._boot
    first.load(folders["other"], OTHER).raise_for_status()
    assert_dies(mortal, lambda: first.load(folders["cut"], "000003-cut"))
    first.close()

    second = Wire(living(mortal))
    assert second.label() == mortal._boot != boot
    assert mortal._boot.startswith("boot-")
    assert second.sums() == base
    assert spans(second.generate(PROMPT)) == [(mortal._boot, 0, 8)]
    second.close()


def test_a_token_id_outside_the_vocabulary_is_read_as_zeros_or_kills_the_server(mortal: SGLangServer) -> None:
    """The client refuses both before it sends: [0, 259) is the vocabulary, [259, 320) the padding of the embedding.

    A request that runs meanwhile may even get a 200; what it holds is not taken for a sample.
    """
    wire = Wire(living(mortal))
    assert len(wire.generate([1, 319]).json()["output_ids"]) == 8
    running = wire.start(PROMPT, 500)
    while wire.loads()["num_running_reqs"] < 1 and not running.done():
        pass
    assert_dies(mortal, lambda: wire.generate([1, 320]))
    with suppress(httpx.TransportError, BadAnswer):
        assert len(parse_generation(running.result().json(), vocab_size=259).ids) == 500  # it had ended before
    wire.close()
