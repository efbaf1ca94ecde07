"""A skewed workload: one response in 32 is ten times longer. What overlap wins on it, and what it does to the lengths.

    python -m benchmarks.skewed [--iterations 4]

The plain alternative in the same run is `whole batches`: rewards begin when the batch is complete, and nothing else
runs meanwhile. The other ways differ in settings only. Each is a whole run (`rl_run`) on a real Prefect server, with
the product's own schedule, queue, rollout, client, reward workers, advantages, sealing, publishing and ledger.

Simulated, since a model's own lengths and a CPU's own speed say nothing about a GPU:

- the engine is tasks.engines.simulated in this process: it has SLOTS places, whoever comes when they are taken queues,
  and every running request gets a token each TOKEN_S, however many run. Its responses have the lengths that `length_of`
  says, whatever the weights; prompts cost nothing.
- the trainer sleeps UPDATE_S and exports random weights of a few kB; a reward sleeps REWARD_S for each sample.

So the figures compare ways to schedule, and are no throughput of anything. What an aborted response's length would have
been is known here, and not to the product: the true Kolmogorov-Smirnov distance of trained from issued lengths stands
beside what the product says, `bias/length` (of those that ended) and `bias/length_worst`, between which it must lie.
"""

import argparse
import asyncio
import json
import logging
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np

from conf.load import load_experiment
from conf.schema import Experiment
from data.ledger import Ledger
from data.package import Probe
from data.refs import DatasetRef
from data.store import Store
from flows import opening, prefect_server
from flows.bias import TRAINED, BiasReport, Comparison, Samples, compare, read_samples
from flows.graph import load_graph
from flows.preflight import prompt_source
from flows.run import rl_run
from flows.services import Services
from tasks.engines.fleet import Fleet
from tasks.engines.simulated import SimulatedEngine, SimulatedServer, _Request
from tasks.engines.toy import EOS, VOCABULARY, random_weights, score, write_model, write_shards
from tasks.reward import reward
from tasks.rewards.workers import RewardWorkers
from tasks.trainer.client import Export, Trainer, UpdateResult

GROUPS, SAMPLES, ONE_IN = 8, 4, 32
SHORT, TIMES = (20, 40), 10  # tokens of a short response, from and to; how much longer the long one is
SLOTS, TOKEN_S, STEP = 16, 0.004, 5  # STEP: tokens that come at once, so that the clock costs little
REWARD_S, UPDATE_S = 0.02, 0.3

whole_reward = replace(reward, streams=False)

EXPERIMENT = f"""
evaluate: {{every: 0}}
prompts: {{source: jsonl, per_iteration: {GROUPS}}}
rollout:
  samples_per_prompt: {SAMPLES}
  max_new_tokens: {SHORT[1] * TIMES}
  max_in_flight: {SLOTS}
  dtype: float32
reward: {{functions: {{verified: {{path: "benchmarks.verifier:verify", options: {{seconds: {REWARD_S}}}}}}}}}
update: {{checkpoint_every: 1000}}
bias: {{max_length: 1, max_reward: 1}} # the table shows it
graph:
  rollout:   {{stage: rollout,   needs: [prompts],   pool: rollout}}
  reward:    {{stage: reward,    needs: [rollout],   pool: cpu}}
  advantage: {{stage: advantage, needs: [reward],    pool: cpu}}
  update:    {{stage: update,    needs: [advantage], pool: train}}
  publish:   {{stage: publish,   needs: [update],    pool: rollout}}
"""
WHOLE = ["graph.reward.stage=benchmarks.skewed:whole_reward"]
AHEAD = ["schedule.kind=async", "schedule.max_lag=3", "update.correction.kind=ratio"]
MORE = "sampling.oversample=1.25"
WAYS = {
    "whole batches, sync": WHOLE,
    "streamed rewards, sync": [],
    "async": AHEAD,
    "async, rebuild": [*AHEAD, "rollout.kv_policy=rebuild"],
    "async, 1.25 in_order": [*AHEAD, MORE],
    "async, 1.25 fastest": [*AHEAD, MORE, "sampling.keep=fastest"],
}


def length_of(sample: str, groups: int) -> int:
    """Tokens of the response `i000001-g000-s00`, where an iteration has so many groups: exactly one in 32 is long."""
    iteration, group, member = (int(part[1:]) for part in sample.split("-"))
    block, place = divmod(((iteration - 1) * groups + group) * SAMPLES + member, ONE_IN)
    random = np.random.default_rng(block)
    short, long = random.integers(SHORT[0], SHORT[1], ONE_IN, endpoint=True), random.integers(ONE_IN)
    return int(short[place]) * (TIMES if place == long else 1)


class PacedServer(SimulatedServer):
    """With continuous batching, and tokens that take time. A pause of mode retract holds requests where they are."""

    def __init__(self, groups: int) -> None:
        super().__init__(random_weights(0))
        self.groups = groups
        self.slots = asyncio.Semaphore(SLOTS)
        self.queued: dict[str, asyncio.Future[Any]] = {}
        self.retracted: dict[str, _Request] = {}

    async def _answer(self, path: str, body: dict[str, Any]) -> httpx.Response:
        match path:
            case "/abort_request":
                if turn := self.queued.get(body["rid"]):
                    turn.cancel()
                if request := self.running.get(body["rid"]):
                    request.aborted = True
                return httpx.Response(200)
            case "/pause_generation" if body["mode"] == "retract":
                self.paused, self.retracted = True, dict(self.running)
                self.running.clear()
                return httpx.Response(200, json={"status": "ok"})
            case "/continue_generation":
                self.running.update(self.retracted)
                self.retracted = {}
        return await super()._answer(path, body)

    async def _generate(self, body: dict[str, Any]) -> httpx.Response:
        rid = body["rid"]
        if not rid.startswith("i"):  # a probe
            return await super()._generate(body)
        turn = self.queued[rid] = asyncio.ensure_future(self.slots.acquire())
        await asyncio.wait({turn})
        del self.queued[rid]
        if turn.cancelled():
            meta: dict[str, Any] = {"id": rid, "finish_reason": {"type": "abort"}}
            meta |= dict.fromkeys(("completion_tokens", "cached_tokens", "num_retractions"), 0)
            meta |= {"weight_versions": [], "output_token_logprobs": []}
            return httpx.Response(200, json={"output_ids": [], "meta_info": meta})
        try:
            return await super()._generate(body)
        finally:
            self.slots.release()

    async def _decode(self, request: _Request, rid: str, tokens: int, temperature: float) -> None:
        if not rid.startswith("i"):
            return await super()._decode(request, rid, tokens, temperature)
        left = length_of(rid[:16], self.groups)
        due = time.monotonic()
        while left and not request.aborted:
            now = min(STEP, left)
            due += now * TOKEN_S
            await asyncio.sleep(due - time.monotonic())  # so that what this process does late is made up for
            if self.paused:
                await self._until(lambda: not self.paused)
                due = time.monotonic()
            left -= now
            request.ids += [1 + len(request.ids) % (VOCABULARY - 1)] * now
            request.logprobs += [-1.0] * now
            request.labels += [self._span_label] * now
        if not left:
            request.ids[-1] = EOS
        return None


class SleepingTrainer:
    """Another random model after each update."""

    def __init__(self) -> None:
        self.number = 0

    async def update(self, dataset: DatasetRef, number: int, progress: Any) -> UpdateResult:
        await asyncio.sleep(UPDATE_S)
        self.number = number
        return UpdateResult({}, number, {})

    async def export(self, staging: Path, dtype: str, probe_ids: list[int]) -> Export:
        weights = random_weights(self.number)
        probe = Probe(tuple(probe_ids), score(weights, probe_ids))
        return Export(tuple(write_shards(staging, weights, ranks=1)), {}, probe)


@asynccontextmanager
async def services(experiment: Experiment, folder: Path, say: Any) -> AsyncIterator[Services]:
    groups = experiment.sampling.candidates(experiment.prompts.per_iteration)
    fleet = Fleet([SimulatedEngine("engine0", PacedServer(groups))])
    rewards = RewardWorkers(experiment.reward)
    await rewards.start()
    try:
        yield Services(prompt_source(experiment), fleet, cast(Trainer, SleepingTrainer()), rewards, {})
    finally:
        await fleet.close()
        await rewards.stop()


@dataclass(frozen=True)
class Result:
    samples_per_s: float  # trained ones, from the first iteration's start to the last one's end
    trained: float  # mean length, tokens
    issued: float  # the same of all that were sent, had they come to their end
    long: int  # trained responses that are the long ones
    expected: float  # how many would be, without bias
    distance: float  # Kolmogorov-Smirnov, of the lengths of `trained` from those of `issued`
    told: Comparison  # what the product says of it
    crossed: int  # trained responses of more than one version
    lag: float  # mean over trained samples, updates
    discarded: int  # tokens generated for nothing, as far as the product knows


def result(folder: Path, experiment: Experiment) -> Result:
    groups = experiment.sampling.candidates(GROUPS)
    store, ledger = Store(folder, folder.name), Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        (session,), metrics, parts, spans = ledger.accounts.sessions(), ledger.accounts.metrics(), [], []
        lengths: dict[str, int] = {}  # by sample
        used: set[str] = set()
        graph = load_graph(experiment)
        for number in metrics:
            part = read_samples(store, ledger, graph, number, SAMPLES)
            update = store.committed(number, "update")
            assert part is not None
            assert update is not None
            (dataset,) = [parent for parent in update.parents if isinstance(parent, DatasetRef)]
            parts.append(part)
            rows = store.read(dataset, ["sample_id", "version_spans"])
            spans += rows["version_spans"].to_pylist()
            used |= set(rows["sample_id"].to_pylist())
            sent = [f"{group}-s{member:02d}" for group, _, _ in ledger.groups.rows(number) for member in range(SAMPLES)]
            lengths |= {sample: length_of(sample, groups) for sample in sent}
    finally:
        ledger.close()
    assert session.ready is not None
    assert session.accounted is not None
    issued = np.array(list(lengths.values()), np.float64)
    is_trained = np.array([sample in used for sample in lengths])
    trained = issued[is_trained]
    true = compare(issued, np.where(is_trained, TRAINED, "lost"))
    samples = Samples.concatenate(parts)
    assert sorted(trained) == sorted(samples.lengths[samples.trained])  # also of those that a publish interrupted
    told = BiasReport.of(samples).length
    assert true is not None
    assert told is not None
    lags = [values["off_policy/lag_mean"] for values in metrics.values()]
    discarded = sum(values.get("rollout/discarded_tokens", 0.0) for values in metrics.values())
    return Result(
        len(trained) / (session.accounted - session.ready), trained.mean(), issued.mean(), (trained > SHORT[1]).sum(),
        (issued > SHORT[1]).mean() * len(trained), true.distance, told, sum(len(own) > 1 for own in spans),
        sum(lags) / len(lags), int(discarded),
    )  # fmt: skip


def run(scratch: Path, name: str, overrides: list[str], iterations: int) -> Result:
    settings = [*overrides, f"runs_dir={scratch / 'runs'}"]
    folder = asyncio.run(rl_run(str(scratch / "skewed.yaml"), settings, iterations, name))
    return result(Path(folder), load_experiment(Path(folder) / "config.yaml"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=4)
    iterations = parser.parse_args().iterations
    logging.disable(logging.ERROR)
    opening.start_services = services  # all else of a run is the product's
    results = {}
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        prompts = [{"prompt": f"w{1 + i // 63 % 63} w{1 + i % 63} w1", "answer": ""} for i in range(1000)]
        (scratch / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        places = f"model: {{path: {write_model(scratch / 'model')}}}\n"
        experiment = EXPERIMENT.replace("{source: jsonl", f"{{source: jsonl, path: {scratch / 'prompts.jsonl'}")
        (scratch / "skewed.yaml").write_text(places + experiment)
        prefect_server.HOME = scratch / "prefect"
        with prefect_server.prefect_server():
            run(scratch, "first", [], 1)  # imports, connections
            for number, (way, overrides) in enumerate(WAYS.items()):
                results[way] = run(scratch, f"way-{number}", overrides, iterations)

    plain = next(iter(results.values())).samples_per_s
    print(f"{iterations} iterations of {GROUPS} groups of {SAMPLES}; 1 response in {ONE_IN} is {TIMES} times longer")
    print(f"{'':24}effective     to  trained  issued  long   un-  distance of  bias/length   mixed  mean  discarded")
    print(f"{'':24}samples/s  plain   tokens  tokens     biased  the lengths  to its worst  vers.   lag     tokens")
    for way, r in results.items():
        print(
            f"{way:24}{r.samples_per_s:9.1f}{r.samples_per_s / plain:7.2f}{r.trained:9.1f}{r.issued:8.1f}{r.long:6}"
            f"{r.expected:6.1f}{r.distance:13.3f}{r.told.distance:9.3f} {r.told.worst:.3f}{r.crossed:7}{r.lag:6.2f}"
            f"{r.discarded:11}"
        )


if __name__ == "__main__":
    main()
