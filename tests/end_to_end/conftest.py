"""Where the end-to-end tests run, and the one undisturbed run that several of them look at."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.engines.server import SGLangServer
from tests.end_to_end.launches import RATCHET, ROOT, Launch, Place, launched
from tests.listening import listening

ITERATIONS = 2

# The tiny experiment on a model of this session, with a reward that varies and a stage of one's own.
EXPERIMENT = """\
extends: {root}/conf/tiny_arithmetic.yaml
model: {{path: {model}}}
reward:
  functions:
    letters: {{path: "tests.end_to_end.rewards:letters"}}
update: {{learning_rate: 1.0e-3}}
bias: {{max_length: 1, max_reward: 1}}  # drop_short drops by length on purpose
graph:
  extends: grpo
  drop_short: {{stage: "tests.own_stage:drop_short", needs: [rollout], pool: cpu, options: {{min_tokens: 5}}}}
  reward: {{needs: [drop_short]}}
  reference: {{needs: [drop_short]}}
"""

# Long enough that a signal arrives in the middle of a rollout or an update.
SLOW = """\
extends: {small}
prompts: {{per_iteration: 16}}
rollout: {{samples_per_prompt: 16, max_new_tokens: 200}}
iterations: 1
evaluate: {{every: 0}}
"""

# Notes down every key the run makes, in a file outside of it.
SPY = """\
import os, secrets
make = secrets.token_hex
def noted(length=None):
    key = make(length)
    with open(os.environ["KEYS"], "a") as file:
        file.write(key + chr(10))
    return key
secrets.token_hex = noted
"""


def _environment(prefect_home: Path) -> dict[str, str]:
    """As this process's, but with no Prefect server configured, and importing from the checkout."""
    own = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "RATCHET_CRASH_POINT")}
    return {**own, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(prefect_home)}


@pytest.fixture(scope="session")
def managed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place where each run starts its own SGLang and Prefect."""
    place = Place(tmp_path_factory.mktemp("managed"), _environment(tmp_path_factory.mktemp("prefect-home")))
    small = place.experiment("small", EXPERIMENT.format(root=ROOT, model=tiny_model))
    place.experiment("slow", SLOW.format(small=small))
    return place


@pytest.fixture(scope="session")
def external(
    tiny_model: Path, sglang_server: SGLangServer, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    """A place where runs use the session's SGLang, by its URL and keys, and the session's Prefect."""
    keys = {"E2E_KEY": sglang_server._api_key, "E2E_ADMIN_KEY": sglang_server._admin_key}
    environment = {**_environment(tmp_path_factory.mktemp("prefect-home")), **keys, "PREFECT_API_URL": prefect_api}
    place = Place(tmp_path_factory.mktemp("external"), environment)
    urls = f"rollout: {{urls: ['{sglang_server.connect().url}'], api_key_env: E2E_KEY, admin_key_env: E2E_ADMIN_KEY}}\n"
    small = place.experiment("small", EXPERIMENT.format(root=ROOT, model=tiny_model) + urls)
    place.experiment("slow", SLOW.format(small=small))
    return place


@dataclass(frozen=True)
class Finished:
    """The undisturbed run, and what was seen of it from outside."""

    place: Place
    folder: Path
    output: str
    keys: list[str]  # the API keys it made
    commands: set[str]  # every command line of its tree
    doors: set[tuple[str, str]]  # every socket on which a process of it listened; for a unix socket its folder's mode
    seconds_to_gone: float  # from its end to the end of its last process


@pytest.fixture(scope="session")
def finished(managed: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    commands: set[str] = set()
    doors: set[tuple[str, str]] = set()
    with launched(managed, "-c", SPY + RATCHET, "run", "small.yaml", KEYS=str(keys)) as launch:
        watch(launch, commands, doors)
        assert launch.wait() == 0, launch.output
        gone = launch.until_gone()
        made = [key for key in keys.read_text().split() if len(key) == 32]
        yield Finished(managed, managed.folder / "runs" / "small-001", launch.output, made, commands, doors, gone)


def watch(launch: Launch, commands: set[str], doors: set[tuple[str, str]]) -> None:
    """Collect the command lines of the launch's tree, and where it listens, until it ends."""
    while launch.process.poll() is None:
        tree = launch.tree()
        commands |= set(tree.values())
        doors |= {(kind, _mode(at) if kind == "unix" else at) for kind, at in listening(tree)}
        time.sleep(0.2)


def _mode(socket: str) -> str:
    """Who may enter the folder a unix socket lies in; an abstract socket has none, and anybody may connect."""
    try:
        return oct(Path(socket).parent.stat().st_mode & 0o777) if socket.startswith("/") else "none"
    except FileNotFoundError:
        return "gone"
