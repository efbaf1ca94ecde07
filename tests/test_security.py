"""The doors of docs/security.md that no other test file watches, each tried from outside."""

import asyncio
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from conf.check import SGLANG_DOORS
from conf.errors import ConfigError, EngineError, TrainerError
from conf.load import load
from conf.schema import Experiment, Model, Rollout
from data.model_files import check_model
from data.prompts import load_tokenizer
from flows.preflight import preflight
from tasks.engines.client import Engine, Refused
from tasks.engines.server import SGLangServer, external_keys, server_environment, server_options
from tasks.rewards.child import descendants
from tasks.trainer.client import Trainer
from tasks.trainer.model import load_policy
from tests.conf.experiments import MINIMAL, refusal, write
from tests.fakes.engine import Call, FakeEngine
from tests.listening import beyond_this_machine, listening

DOCUMENT = Path(__file__).parents[1] / "docs" / "security.md"


# -- keys and sockets of a live engine


def tree(server: SGLangServer) -> list[int]:
    return [server.pid, *descendants(server.pid)]


def test_an_engine_listens_on_loopback_and_in_its_own_private_folder_only(sglang_server: SGLangServer) -> None:
    found = listening(tree(sglang_server))
    assert ("tcp", "127.0.0.1") in found
    assert beyond_this_machine(found) == set()
    folders = {str(Path(path).parent) for kind, path in found if kind == "unix"}
    assert folders == {str(sglang_server._scratch)}
    assert sglang_server._scratch is not None
    assert sglang_server._scratch.stat().st_mode & 0o777 == 0o700


def test_an_engines_keys_are_in_no_environment_and_no_two_servers_share_one(sglang_server: SGLangServer) -> None:
    keys = [sglang_server._api_key, sglang_server._admin_key]
    seen = b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in tree(sglang_server))
    assert b"PATH=" in seen
    assert not [key for key in keys if key.encode() in seen]
    other = SGLangServer("other", {}, {}, Path("log"))
    assert len({*keys, other._api_key, other._admin_key}) == 4
    assert all(re.fullmatch(r"[0-9a-f]{32}", key) for key in keys)  # 128 bits


def test_an_engine_knows_the_options_that_are_refused(sglang_server: SGLangServer) -> None:
    """Else an upgrade of SGLang that renames one would open its door."""

    async def options() -> set[str]:
        engine = sglang_server.connect()
        try:
            return set(await engine.server_info())
        finally:
            await engine.close()

    assert {*SGLANG_DOORS, "load_format", "host", "api_key", "admin_api_key"} - asyncio.run(options()) == {
        "nccl_init_addr"  # another name of dist_init_addr
    }


class Payload:
    """What a pickle can do: run a command while it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def pickled_model(model: Path, folder: Path) -> Path:
    """The model with its weights as a pickle that leaves `folder/mark`."""
    bad = folder / "pickled"
    shutil.copytree(model, bad)
    (bad / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Payload(folder / "mark")}, bad / "pytorch_model.bin")
    return bad


def test_nobody_unpickles_weights(sglang_server: SGLangServer, tiny_model: Path, tmp_path: Path) -> None:
    bad = pickled_model(tiny_model, tmp_path)

    async def update() -> None:
        engine = sglang_server.connect()
        try:
            with pytest.raises(Refused, match="Cannot find any model weights"):
                await engine.update_weights(str(bad), "000001-0123456789ab", 60)
        finally:
            await engine.close()

    asyncio.run(update())
    with pytest.raises(TrainerError, match=r"safetensors"):
        load_policy(bad, "fp32")
    with pytest.raises(ConfigError, match=r"model.path must hold the weights as \*\.safetensors \(no pickles\)"):
        check_model(bad)
    assert not (tmp_path / "mark").exists()
    torch.load(bad / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "mark").exists()  # else the pickle was harmless, and nothing is proven


# -- code in a model's folder


def coded_model(model: Path, folder: Path, file: str = "config.json") -> Path:
    """The model with a class of its own, which leaves `folder/mark` when it is imported."""
    bad = folder / "coded"
    shutil.copytree(model, bad)
    (bad / "modeling_own.py").write_text(f"open({str(folder / 'mark')!r}, 'w')\n")
    settings = json.loads((bad / file).read_text())
    names = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    tokenizer = {"AutoTokenizer": ["modeling_own.Tokenizer", None]}
    changes = {"auto_map": names | tokenizer, "model_type": "own", "tokenizer_class": "OwnTokenizer"}
    (bad / file).write_text(json.dumps(settings | changes))
    return bad


def test_a_models_own_code_is_not_run_and_nobody_is_asked(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what transformers asks at a terminal
    bad = coded_model(tiny_model, tmp_path)
    with pytest.raises(TrainerError, match="trust_remote_code=True"):
        load_policy(bad, "fp32")
    bad = coded_model(tiny_model, tmp_path / "t", "tokenizer_config.json")
    with pytest.raises(ConfigError, match="trust_remote_code=True"):
        load_tokenizer(str(bad))
    assert not list(tmp_path.rglob("mark"))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_model_that_names_code_is_refused_before_anything_starts(tiny_model: Path, tmp_path: Path, file: str) -> None:
    bad = coded_model(tiny_model, tmp_path, file)
    with pytest.raises(ConfigError, match=r"model.path must hold no code, found modeling_own.py in .*: a model's own"):
        check_model(bad)
    (bad / "modeling_own.py").unlink()
    with pytest.raises(ConfigError, match=rf"but .*{file} names some \(auto_map\)"):
        check_model(bad)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON: "),
        (b"\xff", "is not JSON: "),
        (b"[" * 100_000, "is not JSON: "),
        (b"[]", "holds no JSON object"),
    ],
)
def test_a_model_whose_files_cannot_be_read_is_refused(
    tiny_model: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(tiny_model, bad)
    check_model(bad)
    (bad / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model.path must hold readable files, but .*config.json {message}"):
        check_model(bad)


def test_a_refused_model_is_placed_in_the_experiment(tiny_model: Path, tmp_path: Path) -> None:
    bad = coded_model(tiny_model, tmp_path)
    loaded = load(write(tmp_path, MINIMAL.replace("some/model", str(bad))))
    with pytest.raises(ConfigError, match=r"x\.yaml:1: model\.path must hold no code"):
        preflight(loaded)


# -- settings that would open a door


@pytest.mark.parametrize("option", SGLANG_DOORS)
def test_an_option_that_opens_a_door_is_refused_also_when_it_is_off(tmp_path: Path, option: str) -> None:
    for value in ("true", "false", "x"):
        message = refusal(tmp_path, f"rollout.sglang.{option}={value}")
        assert f"rollout.sglang.{option} must not be set: it " in message


@pytest.mark.parametrize(
    "option", ["trust", "trust_r", "enable_custom_logit", "dist_init", "disaggregation", "grpc", "h"]
)
def test_a_beginning_that_sglang_would_take_for_such_an_option_is_refused(tmp_path: Path, option: str) -> None:
    assert f"rollout.sglang.{option} must not be set" in refusal(tmp_path, f"rollout.sglang.{option}=true")


@pytest.mark.parametrize("option", ["trust-remote-code", "--trust-remote-code", "host", "--host"])
def test_another_spelling_does_not_help(tmp_path: Path, option: str) -> None:
    assert f"rollout.sglang.{option} must " in refusal(
        tmp_path, text=MINIMAL + f"rollout: {{sglang: {{{option}: 0.0.0.0}}}}\n"
    )


def test_an_engine_is_told_to_read_safetensors_and_to_stay_on_loopback(tiny_model: Path) -> None:
    for device in ("cpu", "cuda"):
        assert server_options(Experiment(model=Model(str(tiny_model), device)), 0, 1)["load_format"] == "safetensors"
        assert server_environment(device, 0, 0, 1)["GLOO_SOCKET_IFNAME"] == "lo"


# -- external engines


@pytest.mark.parametrize(
    "url", ["http://10.0.0.3:30000", "https://gpu7", "http://0.0.0.0:1", "http://[::]:1", "http://[fd00::2]:1"]
)
def test_an_engine_on_another_machine_must_have_both_keys(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(urls=["http://127.0.0.1:1", url], api_key_env="E_API", admin_key_env="E_ADMIN")
    with pytest.raises(ConfigError) as error:
        external_keys(rollout)
    assert str(error.value).startswith(f"rollout.urls: {url} is not on this machine, so it must have keys, but the ")
    assert "E_API (rollout.api_key_env) is not set" in str(error.value)
    monkeypatch.setenv("E_API", "a")
    with pytest.raises(ConfigError, match=r"E_ADMIN \(rollout.admin_key_env\) is not set"):
        external_keys(rollout)
    monkeypatch.setenv("E_ADMIN", "b")
    assert external_keys(rollout) == ("a", "b")


def test_an_engine_on_this_machine_may_go_without_keys() -> None:
    rollout = Rollout(
        urls=["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"], api_key_env="E_NO", admin_key_env="E_NO"
    )
    assert external_keys(rollout) == ("", "")


def test_a_run_with_a_far_engine_and_no_key_is_refused_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    text = (
        MINIMAL.replace("some/model", str(tiny_model)) + "rollout: {urls: ['http://10.0.0.3:1'], api_key_env: E_NO}\n"
    )
    with pytest.raises(ConfigError, match=r"rollout\.urls: http://10\.0\.0\.3:1 is not on this machine"):
        preflight(load(write(tmp_path, text)))


@pytest.mark.parametrize("status", [200, 400, 401, 500, 503])
def test_a_server_that_repeats_its_keys_does_not_bring_them_into_an_error(status: int) -> None:
    async def repeat(call: Call) -> web.StreamResponse:
        body = f'"{call.request.headers["Authorization"]} {call.engine.api_key} {call.engine.admin_key}"'
        return web.Response(status=status, text=body, content_type="application/json")

    async def run() -> str:
        async with FakeEngine(api_key="user-key", admin_key="admin-key") as fake:
            engine = Engine(
                "e0", fake.url, vocab_size=9, context_length=9, boot="", api_key="user-key", admin_key="admin-key"
            )
            fake.inject("/server_info", repeat)
            try:
                with pytest.raises(EngineError) as error:
                    await engine.server_info()
                return str(error.value)
            finally:
                await engine.close()

    message = asyncio.run(run())
    assert "***" in message
    assert "user-key" not in message
    assert "admin-key" not in message


# -- the trainer


def test_the_trainers_socket_lies_in_a_folder_for_this_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    async def look(self: Trainer, rank: int, folder: Path) -> Any:
        modes.append(folder.stat().st_mode & 0o777)
        raise RuntimeError("seen")

    monkeypatch.setattr(Trainer, "_spawn", look)
    previous = os.umask(0)
    try:
        with pytest.raises(RuntimeError, match="seen"):
            asyncio.run(Trainer(Experiment(model=Model("m")), tmp_path, "run").start())
    finally:
        os.umask(previous)
    assert modes == [0o700]


# -- the page


def test_every_proof_that_the_page_names_is_a_test() -> None:
    named = re.findall(r"`(test_\w+)`", DOCUMENT.read_text())
    known = {
        name
        for path in Path(__file__).parent.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 20
    assert set(named) - known == set()
