"""Opening a run: which folder, one owner, its services, and the state it continues from."""

import asyncio
import gc
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from conf.errors import ConfigError, RunError
from conf.load import Loaded, changed, load
from conf.pools import co_located
from conf.schema import Experiment
from data.ledger import Ledger, RunInfo
from data.leftovers import clean_up
from data.metrics import accounted
from data.refs import PolicyRef
from data.run_lock import lock_run
from data.store import Store
from flows.balance import check_resumed
from flows.clocks import Clocks
from flows.devices import claimed
from flows.display import Display, LineTable, Quiet
from flows.doctor import remember_flow_run
from flows.graph import Graph, GraphNode
from flows.pool_time import CLAIM, PUBLISH, STARTING, WORKING
from flows.pools import Leases
from flows.preflight import preflight, warnings
from flows.recovery import checkpoint_if_due, recover
from flows.schedule import Window
from flows.services import Services, start_services
from flows.waits import POOL, Clock
from tasks.handover import Handover
from tasks.publish import publish_to_engines
from tasks.stage import Context, GroupStream

DISPLAY: ContextVar[Display | None] = ContextVar("display", default=None)

FINISHED = "finished"


@dataclass
class Run:
    """An opened run: what its iterations share. One process has it at a time."""

    name: str
    folder: Path
    loaded: Loaded
    graph: Graph
    store: Store
    ledger: Ledger
    clocks: Clocks
    services: Services
    leases: Leases
    display: Display
    history: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics by iteration
    trained: PolicyRef | None = None  # of the newest committed update, or what the run began or was rolled back to
    moved: float = field(default_factory=time.monotonic)  # when something last went on in it
    streams: WeakValueDictionary[tuple[int, str], GroupStream] = field(default_factory=WeakValueDictionary)
    window: Window = field(init=False)  # the iterations under way

    def __post_init__(self) -> None:
        self.window = Window(self.experiment, self.graph)

    @property
    def experiment(self) -> Experiment:
        return self.loaded.experiment

    @property
    def table(self) -> LineTable:
        return LineTable(self.experiment.iterations, [(node.name, node.stage.role) for node in self.graph])

    @property
    def pools(self) -> list[str]:
        """Those that the graph uses, in its order."""
        return list(dict.fromkeys(node.pool for node in self.graph))

    @property
    def config_digest(self) -> str:
        return self.loaded.digest

    def due(self, iteration: int) -> list[GraphNode]:
        """The nodes that run in an iteration, in graph order: without those that skip it and whatever needs them."""
        due: dict[str, GraphNode] = {}
        for node in self.graph:
            if node.stage.every(self.experiment, iteration) and all(need in due for need in node.needs):
                due[node.name] = node
        return list(due.values())

    def remaining(self) -> range:
        """Iterations still to do or to account for. They end in order, so the first open one decides.

        Those that had begun before a roll-back are over, as they are.
        """
        done = [*accounted(self.history)]
        done += [row.iteration for row in self.ledger.versions() if row.rollback_of is not None]
        return range(max(done, default=0) + 1, self.experiment.iterations + 1)

    def policy(self) -> PolicyRef:
        """The newest committed version. Raises RunError before the first."""
        if (policy := self.ledger.committed()) is None:
            raise RunError(f"run {self.name} has no committed policy version yet")
        return policy

    def stream(self, iteration: int, rollout: str) -> GroupStream:
        """The groups of a rollout node as they come: one object for all who ask while one of them has it."""
        found = self.streams.get((iteration, rollout))
        if found is None:
            found = self.streams[iteration, rollout] = GroupStream()
        return found

    def held(self) -> PolicyRef:
        """The version whose weights the trainer holds; the newest committed one may be older."""
        return self.policy() if self.trained is None else self.ledger.live(self.trained)

    def progress(self, iteration: int, node: str, done: int, total: int, unit: str) -> None:
        self.moved = time.monotonic()
        self.display.stage_progress(iteration, node, done, total, unit)

    @contextmanager
    def clock(self, iteration: int, node: GraphNode, *, name: str = "", kind: str = "") -> Iterator[Clock]:
        """Time an attempt of the node, or of what goes by `name` and works where the node does; ends in the ledger.

        kind: what its work is, where that is not what the node's is.
        """
        kind = kind or (PUBLISH if node.stage.name == "publish" else WORKING)
        with self.clocks.timed(Clock(iteration, name or node.name, node.pool, node.stage.role, kind)) as clock:
            yield clock

    def measure(self, iteration: int, name: str, value: float) -> None:
        self.history.setdefault(iteration, {})[name] = value
        self.ledger.accounts.record_metrics(iteration, {name: value})

    def context(self, iteration: int, node: str, clock: Clock) -> Context:
        """What the attempt that `clock` times may use."""
        return Context(
            experiment=self.experiment,
            run_dir=self.folder,
            store=self.store,
            ledger=self.ledger,
            prompts=self.services.prompts,
            engines=self.services.engines,
            trainer=self.services.trainer,
            rewards=self.services.rewards,
            config_digest=self.config_digest,
            iteration=iteration,
            node=node,
            policy=self.held() if self.graph[node].stage.role == "train" else self.policy(),
            progress=partial(self.progress, iteration, node),
            measure=lambda name, value: self.measure(iteration, name, value),
            spend=clock.spend,
            stream=self.stream(iteration, node) if self.graph[node].stage.name == "rollout" else None,
        )

    async def checkpoint_if_due(self, iteration: int) -> None:
        await checkpoint_if_due(self, iteration)


@asynccontextmanager
async def open_run(
    experiment: str, overrides: Sequence[str], iterations: int | None, name: str | None
) -> AsyncIterator[Run]:
    """Load, check, lock, claim devices, start the services, recover; on leaving stop those, whatever happened."""
    began = time.time()
    loaded = load_run(experiment, overrides, iterations)
    graph = await asyncio.to_thread(preflight, loaded)
    display = DISPLAY.get() or Quiet()
    for warning in warnings(loaded):
        display.message(f"warning: {warning}")
    folder = choose_run(loaded, name)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_run(folder):
        ledger = Ledger(folder / "ledger.sqlite")
        try:
            continued = _enter(folder, loaded, ledger)
            with ledger.accounts.session(began):
                clocks = Clocks(ledger)
                display.message(f"run {folder} ({'continued' if continued else 'new'})")
                remember_flow_run(folder)
                if cleaned := clean_up(folder, ledger):
                    display.message(cleaned)
                store = Store(folder, folder.name)
                check_resumed(store, ledger, graph, ledger.accounts.metrics())
                async with (
                    clocks.kept(),
                    own_devices(loaded.experiment, folder, clocks, display.message),
                    start_services(loaded.experiment, folder, display.message) as services,
                ):
                    handover = co_located_handover(loaded.experiment, services, ledger, folder)
                    run = Run(
                        folder.name, folder, loaded, graph, store, ledger, clocks, services,
                        Leases(loaded.experiment.pools, handover), display, ledger.accounts.metrics(),
                    )  # fmt: skip
                    await recover(run)
                    ledger.accounts.session_ready(time.time())
                    display.message(run.table.header)
                    yield run
                    ledger.finish_run(FINISHED)
        finally:
            ledger.close()
            gc.freeze()  # or the interpreter's last collection goes through all of torch: 1.3 s, 7 s on a busy machine


@asynccontextmanager
async def own_devices(
    experiment: Experiment, folder: Path, clocks: Clocks, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Hold the run's devices for the block; where another run has them, the wait is in the ledger from its beginning.

    It may take hours, in which nothing starts.
    """
    clock = Clock(0, CLAIM, kind=STARTING)
    async with AsyncExitStack() as held:
        with ExitStack() as attempt:

            def tell(message: str) -> None:  # a claim has something to say where it waits
                if clock.under_way and clock not in clocks:
                    attempt.enter_context(clocks.timed(clock))
                    clocks.write()
                say(message)

            with clock.waiting(POOL, "another run has the devices"):
                await held.enter_async_context(claimed(experiment, folder, tell))
        yield


def co_located_handover(experiment: Experiment, services: Services, ledger: Ledger, folder: Path) -> Handover | None:
    """For a pool that both generates and trains; None where two pools do."""
    if not co_located(experiment.pools):
        return None

    async def prove() -> None:
        if (policy := ledger.committed()) is None:
            raise RunError(f"run {folder.name} has no committed policy version yet that its engines could serve")
        await publish_to_engines(policy, folder / "weights", services.engines, ledger, experiment)

    return Handover(services.engines, services.trainer, services.offloaded, ledger, experiment, prove)


def load_run(experiment: str, overrides: Sequence[str], iterations: int | None) -> Loaded:
    """The experiment; `iterations` replaces its own."""
    if iterations is not None and iterations < 1:
        raise ConfigError(f"iterations must be >= 1, got {iterations}")
    return load(experiment, [*overrides, *([f"iterations={iterations}"] if iterations is not None else [])])


def choose_run(loaded: Loaded, name: str | None) -> Path:
    """The named run; else the newest run of this experiment if it is not finished; else the next free number."""
    runs = Path(loaded.experiment.runs_dir)
    if name:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise RunError(f"run must be a plain folder name (letters, digits, '.', '_', '-'), got {name!r}")
        return runs / name
    newest = _numbered(loaded)[-1:]
    if newest and not ((info := run_info(newest[0])) and info.state == FINISHED):
        return newest[0]
    return runs / next_free_name(loaded)


def next_free_name(loaded: Loaded) -> str:
    newest = _numbered(loaded)[-1:]
    return f"{loaded.experiment.name}-{int(newest[0].name[-3:]) + 1 if newest else 1:03d}"


def _numbered(loaded: Loaded) -> list[Path]:
    return sorted(Path(loaded.experiment.runs_dir).glob(f"{loaded.experiment.name}-[0-9][0-9][0-9]"))


def run_info(folder: Path) -> RunInfo | None:
    """What the folder's ledger says of the run; None where there is no run yet."""
    path = folder / "ledger.sqlite"
    if not path.exists():
        return None
    ledger = Ledger(path, read_only=True)
    try:
        return ledger.run_info()
    finally:
        ledger.close()


def _enter(folder: Path, loaded: Loaded, ledger: Ledger) -> bool:
    """Register a new run, or check that the settings are those it was started with. True if it continues."""
    info = ledger.run_info()
    config = folder / "config.yaml"
    if info is not None and info.config_digest != loaded.digest:
        fields = changed(load(config).resolved, loaded.resolved)
        listed = ", ".join(f"{name}: {before!r} -> {after!r}" for name, (before, after) in fields.items())
        raise RunError(
            f"run {folder} was started with other settings ({listed}); "
            "restore them, or start another run (--new, or --run NAME)"
        )
    if info is not None and info.state == FINISHED:
        done = max(ledger.accounts.metrics(), default=0)
        if loaded.experiment.iterations <= done:
            raise RunError(
                f"run {folder} is finished ({done} iterations): `ratchet show {folder}` prints it; "
                f"`--iterations {done + 10}` continues it, `--new` starts another"
            )
    staged = config.with_suffix(".tmp")
    staged.write_text(loaded.text)
    os.replace(staged, config)
    ledger.open_run(folder.name, loaded.digest, loaded.text)
    return info is not None
