"""`ratchet fsck`: every object and reference of a run against each other. Changes nothing, also beside a running run.

What is written while it looks is no fault. References are listed before the ledger is read, because the ledger knows of
every version before anything refers to it; a version whose folder has gone is asked for again; unfinished files count
only where no process has the run. A kill between a stage's commit and its account leaves the ledger
behind, which the next start makes good: groups are compared up to the iterations that may be under way.
"""

import hashlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pyarrow as pa

from conf.errors import DataError, RatchetError
from conf.load import load
from data.checkpoints import check_files, read_checkpoint
from data.issued import PROMPTS, issued_groups
from data.ledger import Ledger, RunInfo, VersionRow
from data.leftovers import TOMBSTONES, leftovers, size
from data.manifest import Manifest
from data.metrics import read_metrics
from data.objects import open_regular
from data.package import PackageManifest
from data.refs import DatasetRef
from data.retention import checkpoints, damaged_checkpoints
from data.run_lock import lock_holder
from data.store import REFERENCE, Store
from data.versions import LABEL
from data.weights import DELETING, verify

OBJECT = re.compile(r"([0-9a-f]{64})\.(arrow|json)")
LEDGER = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.sqlite-journal")
FOLDERS = ("data", "weights", "checkpoints", "logs")
KNOWN = (*LEDGER, *FOLDERS, "lock", "config.yaml", "metrics.parquet", "prefect.txt")
NEEDED = ("SEALED", "PUBLISHING", "COMMITTED")  # states in which the folder must be there, and whole
AGREED = ("run", "number", "content", "parent", "optimizer_step", "dataset", "rollback_of")  # of ledger and manifest
CHECKPOINT = "checkpoint"  # recorded like a stage, but commits no dataset

RESTORE = "restore it from a backup"
LOST_DATA = f"{RESTORE}; without it neither this stage nor what followed from it can be read or replayed"
LOST_WEIGHTS = f"{RESTORE}; a version that is not the newest can be done without"
NOT_OURS = "move it away"

Progress = Callable[[int, int], None]  # (bytes looked at, bytes in all)


@dataclass(frozen=True)
class Finding:
    """One line of the report. A note asks for nothing."""

    problem: bool
    what: str  # a path below the run's folder, or a row of the ledger
    message: str  # expected, found, what to do

    def __str__(self) -> str:
        return f"{'problem' if self.problem else 'note'}: {self.what}: {self.message}"


def fsck(run_dir: Path, progress: Progress = lambda done, total: None) -> list[Finding]:
    """All problems, then all notes. Raises RunError where there is no run."""
    report, ledger = _Report(run_dir), None
    try:
        ledger = Ledger(run_dir / "ledger.sqlite", read_only=True)
    except DataError as error:
        report.problem("ledger.sqlite", f"{error}; {RESTORE}; the rest was checked without it")
    try:
        _Check(run_dir, ledger, report, progress).run()
    finally:
        if ledger:
            ledger.close()
    return sorted(report.findings, key=lambda finding: not finding.problem)


@dataclass
class _Report:
    root: Path
    findings: list[Finding] = field(default_factory=list)

    def problem(self, what: Path | str, message: str) -> None:
        self.findings.append(Finding(True, self._name(what), message))

    def note(self, what: Path | str, message: str) -> None:
        self.findings.append(Finding(False, self._name(what), message))

    def _name(self, what: Path | str) -> str:
        return str(what.relative_to(self.root)) if isinstance(what, Path) else what

    @contextmanager
    def expecting(self, what: Path | str, remedy: str) -> Iterator[None]:
        """What goes wrong inside is a problem of `what`."""
        try:
            yield
        except RatchetError as error:
            self._wrong(what, str(error), remedy)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException, sqlite3.Error) as error:
            self._wrong(what, f"cannot be read: {type(error).__name__}: {error}", remedy)

    @contextmanager
    def expecting_while_there(self, path: Path, remedy: str) -> Iterator["_Report"]:
        """What is found inside counts only if the path is still there: a run, or `ratchet gc`, deletes beside us."""
        found = _Report(self.root)
        with found.expecting(path, remedy):
            yield found
        if path.exists():
            self.findings += found.findings

    def _wrong(self, what: Path | str, message: str, remedy: str) -> None:
        self.problem(what, f"{message.replace(f'{self.root}/', '')}; {remedy}")


class _Check:
    def __init__(self, root: Path, ledger: Ledger | None, report: _Report, progress: Progress) -> None:
        self.root, self.ledger, self.report = root, ledger, report
        self.store = Store(root, root.name)
        holder = lock_holder(root)
        self.held = holder is not None and holder[1]
        self.info: RunInfo | None = None
        self.versions: dict[int, VersionRow] = {}
        self.ahead = 0  # iterations that may be under way before the newest
        self._progress, self._done = progress, 0
        self._total = sum(size(root / name) for name in ("data/objects", "weights", "checkpoints"))

    def run(self) -> None:
        self._files()
        references: list[tuple[int, str]] = []
        with self.report.expecting("data/stages", RESTORE):
            references = self.store.stages()
        if self.ledger:
            with self.report.expecting("ledger.sqlite", f"{RESTORE}; the rest was checked without it"):
                self._rows(self.ledger)
        self._settings()
        manifests = self._manifests(references)
        self._objects(manifests)
        self._packages()
        self._checkpoints()
        if self.ledger and self.info:
            with self.report.expecting("ledger.sqlite", RESTORE):
                self._groups(self.ledger, manifests)

    def _looked_at(self, count: int) -> None:
        self._done += count
        self._progress(self._done, max(self._done, self._total))

    # ---------------------------------------------------------------- names

    def _files(self) -> None:
        """Links out of the run, files that are nobody's, and what a killed process left."""
        unfinished = leftovers(self.root)
        for path in unfinished if not self.held else ():
            self.report.note(path, f"{size(path):,} bytes, unfinished; the next start or `ratchet gc` removes it")
        for path in sorted(self.root.iterdir()):
            if path.name in KNOWN:
                self._refuse_links(path)
            elif path not in unfinished and path.suffix != ".tmp":  # which was made meanwhile
                self.report.note(path, "is not Ratchet's; left alone")
        self._closed("data", re.compile(f"objects|stages|staging|{TOMBSTONES}"))
        self._closed("data/objects", OBJECT)
        self._closed("data/stages", re.compile(r"\d{6,}"))
        for folder in sorted(self.root.glob("data/stages/*")):
            self._closed(f"data/stages/{folder.name}", REFERENCE, f"{folder.name}/")
        self._closed("weights", re.compile(f"staging|{LABEL.pattern}"))
        self._closed("checkpoints", re.compile(r"\d{6}(\.damaged)?"))

    def _refuse_links(self, path: Path) -> None:
        def unread(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # else the folder went meanwhile
                raise error

        with self.report.expecting(path, "make it readable"):
            inside = os.walk(path, onerror=unread) if path.is_dir() and not path.is_symlink() else []
            for entry in (path, *sorted(Path(folder, name) for folder, *names in inside for name in chain(*names))):
                if entry.is_symlink():
                    found = f"found a link to {entry.readlink()}"
                    self.report.problem(entry, f"expected a file or folder of the run, {found}; {NOT_OURS}")

    def _closed(self, name: str, known: re.Pattern[str], prefix: str = "") -> None:
        """Nothing in the folder but what is known, or unfinished."""
        folder = self.root / name
        if folder.is_symlink() or not folder.is_dir():
            return
        for path in sorted(folder.iterdir()):
            unfinished = path.name.endswith(".tmp") or path.name.startswith((DELETING, "."))
            if not known.fullmatch(f"{prefix}{path.name}") and not unfinished:
                self.report.problem(path, f"expected no such file here; {NOT_OURS}")

    # ---------------------------------------------------------------- ledger

    def _rows(self, ledger: Ledger) -> None:
        problem = self.report.problem
        for damage in ledger.damage():
            problem("ledger.sqlite", f"{damage}; {RESTORE}")
        self.info = ledger.run_info()
        engines = ledger.engines()  # a version is there before an engine has it
        self.versions = {row.number: row for row in ledger.versions()}
        if self.info and self.info.run != self.root.name:
            problem("ledger.sqlite", f"expected run {self.root.name}, found {self.info.run}; rename the folder")
        if sorted(self.versions) != list(range(len(self.versions))):
            found = ", ".join(map(str, sorted(self.versions)))
            problem("ledger.sqlite", f"expected versions 0 to {len(self.versions) - 1}, found {found}; {RESTORE}")
        for row in self.versions.values():
            sealed = row.state not in ("EXPORTING", "ABANDONED")
            if sealed and not re.fullmatch(r"[0-9a-f]{64}", row.content or ""):
                what = f"expected a SHA-256 as content of a {row.state} version, found {row.content}"
                problem(f"ledger, version {row.number}", f"{what}; {RESTORE}")
        for number, holders in ledger.leases().items():
            if number in self.versions and self.versions[number].state == "DELETED":
                what = f"expected no lease of a DELETED version, found {', '.join(holders)}"
                problem(f"ledger, version {number}", f"{what}; its weights are gone")
        labels = {row.ref.label for row in self.versions.values() if row.content}
        for engine in engines:
            if engine.label and engine.label not in labels:
                what = f"expected the label of a version, found {engine.label}"
                problem(f"ledger, engine {engine.name}", f"{what}; the next start proves the engine again")
        for stage in ledger.accounts.stages():
            where = f"data/stages/{stage.iteration:06d}/{stage.node}.json"
            commits = stage.iteration > 0 and stage.node != CHECKPOINT  # iteration 0 is recovery
            if stage.state == "completed" and commits and not (self.root / where).exists():
                problem(where, f"expected what the stage committed, found nothing; {LOST_DATA}")

    def _settings(self) -> None:
        if self.ledger and not self.info:
            self.report.note("ledger.sqlite", "no run was started here yet")
            return
        remedy = f"{RESTORE}; the ledger has the settings too (table run, column resolved)"
        with self.report.expecting("config.yaml", remedy):
            loaded = load(self.root / "config.yaml")
            found, schedule = loaded.digest, loaded.experiment.schedule
            self.ahead = schedule.lag_limit + 1
            if self.info and found != self.info.config_digest:
                what = f"expected settings with digest {self.info.config_digest[:12]}, found {found[:12]}"
                self.report.problem("config.yaml", f"{what}; {remedy}")
        if (path := self.root / "metrics.parquet").exists():
            with self.report.expecting(path, "remove it; the next iteration writes it again from the ledger"):
                read_metrics(path)

    # ---------------------------------------------------------------- data

    def _manifests(self, references: list[tuple[int, str]]) -> dict[str, Manifest]:
        """Every manifest that a stage's reference leads to, by digest, each proven with its files."""
        found: dict[str, Manifest] = {}
        waiting: list[tuple[str, str]] = []  # digest, who refers to it
        for iteration, stage in references:
            path = self.root / "data" / "stages" / f"{iteration:06d}" / f"{stage}.json"
            with self.report.expecting(path, LOST_DATA):
                manifest = self.store.committed(iteration, stage)
                waiting += [(manifest.digest, str(path.relative_to(self.root)))] if manifest else []
        for digest, user in waiting:  # which grows
            if digest in found:
                continue
            with self.report.expecting(user, LOST_DATA):
                manifest = found[digest] = self.store.manifest_of(digest)
                own = f"a parent of {user}"
                waiting += [(parent.digest, own) for parent in manifest.parents if isinstance(parent, DatasetRef)]
                self._policies(manifest, user)
                self.store.prove(manifest)
        return found

    def _policies(self, manifest: Manifest, what: str) -> None:
        """Every version that a dataset names is the ledger's, with one content."""
        if not self.info:
            return
        named = [manifest.policy, *(parent for parent in manifest.parents if not isinstance(parent, DatasetRef))]
        for policy in filter(None, named):
            row = self.versions.get(policy.number)
            if row is None or row.content is None or row.ref != policy:
                self.report.problem(what, f"expected a version of the ledger, found {policy}, there {row}; {RESTORE}")
        states = {row.ref.label: row.state for row in self.versions.values() if row.content}
        for label in manifest.facts.policy_versions:
            if (state := states.get(label, "unknown to the ledger")) in ("unknown to the ledger", "ABANDONED"):
                self.report.problem(what, f"expected tokens of published versions, found {label}, {state}; {RESTORE}")

    def _objects(self, manifests: Mapping[str, Manifest]) -> None:
        """Every object has the content its name says; one that nothing refers to is worth a note."""
        used = {f"{digest}.json" for digest in manifests}
        used |= {f"{file.sha256}.arrow" for manifest in manifests.values() for file in manifest.files}
        trained = {row.dataset.rpartition("@")[2] for row in self.versions.values() if row.dataset}
        for path in sorted((self.root / "data" / "objects").glob("*")):
            match = OBJECT.fullmatch(path.name)
            if not match:
                continue
            self._looked_at(size(path))
            if path.name in used:
                continue  # proven with its manifest
            with self.report.expecting_while_there(path, "remove it: nothing refers to it") as found:
                if (digest := _digest(path)) != match[1]:
                    what = f"expected the SHA-256 in its name, found {digest}"
                    found.problem(path, f"{what}; remove it: nothing refers to it")
                elif path.stem[:12] not in trained and not self.held:
                    found.note(path, "nothing refers to it; `ratchet gc` removes it")

    # ---------------------------------------------------------------- weights

    def _packages(self) -> None:
        folders = {path.name: path for path in sorted((self.root / "weights").glob("[0-9]*")) if path.is_dir()}
        if self.info and self.ledger:
            self.versions = {row.number: row for row in self.ledger.versions()}  # a row comes before its folder
        for name, folder in folders.items():
            if match := LABEL.fullmatch(name):
                self._package(folder, int(match[1]))
        for row in self.versions.values():
            needed = row.content and row.state in NEEDED
            if needed and not (self.root / "weights" / row.ref.label).is_dir():
                state = self._state(row.number)  # asked last: it is not needed any more before its folder goes
                if state in NEEDED:
                    what = f"expected the weights of a {state} version, found no such folder"
                    self.report.problem(f"weights/{row.ref.label}", f"{what}; {LOST_WEIGHTS}")

    def _state(self, number: int) -> str:
        """The version's state now."""
        return self.ledger.version(number).state if self.ledger else ""

    def _package(self, folder: Path, number: int) -> None:
        if self.info and number not in self.versions:
            what = f"expected a version of the ledger, there is none with number {number}"
            self.report.problem(folder, f"{what}; the ledger is older than the weights (from a backup?), or {NOT_OURS}")
            return
        count, found = size(folder), _Report(self.root)
        with found.expecting(folder, LOST_WEIGHTS):
            manifest = verify(folder, every_tensor=True).manifest
            if self.info:
                self._agree(folder, manifest, self.versions[number], found)
        self._looked_at(count)
        state = self._state(number) if self.info else ""
        if state not in NEEDED and not folder.exists():
            return  # deleted while we looked
        if state == "DELETED":
            self.report.problem(folder, f"expected nothing of a DELETED version, found {count:,} bytes; {NOT_OURS}")
        elif found.findings and state in ("RETIRED", "ABANDONED", "QUARANTINED"):
            self.report.note(folder, f"damaged, and {state}: not used any more; `ratchet gc` removes it")
        else:
            self.report.findings += found.findings

    def _agree(self, folder: Path, manifest: PackageManifest, row: VersionRow, report: _Report) -> None:
        for name in AGREED:
            expected, found = getattr(row, name), getattr(manifest, name)
            if expected != found and not (name == "content" and expected is None):  # sealed, then killed
                what = f"{name}: expected {expected!r} as in the ledger, found {found!r}"
                report.problem(folder, f"{what}; {LOST_WEIGHTS}")
        if self.info and manifest.config_digest != self.info.config_digest:
            what = f"expected config digest {self.info.config_digest[:12]}, found {manifest.config_digest[:12]}"
            report.problem(folder, f"{what}; {LOST_WEIGHTS}")

    # ---------------------------------------------------------------- checkpoints

    def _checkpoints(self) -> None:
        before = ""
        for folder in checkpoints(self.root):
            otherwise = f"resumes from {before}" if before else "replays every update from its recorded dataset"
            count, before = size(folder), folder.name
            with self.report.expecting_while_there(folder, f"remove the folder; the run then {otherwise}"):
                check_files(folder, read_checkpoint(folder).files)
            self._looked_at(count)
        for folder in damaged_checkpoints(self.root):
            self.report.note(folder, "put aside as damaged; `ratchet gc` removes it")

    # ---------------------------------------------------------------- groups

    def _groups(self, ledger: Ledger, manifests: Mapping[str, Manifest]) -> None:
        """Issued are those of data.issued; of an iteration that was trained none waits; trained ones were rows."""
        prompts = {m.iteration: m for m in manifests.values() if m.stage == PROMPTS}
        updates = {m.iteration: m for m in manifests.values() if m.policy and _training_data(m)}
        issued: dict[int, dict[str, str | None]] = {}
        for group, iteration, outcome in ledger.groups.rows():
            issued.setdefault(iteration, {})[group] = outcome
        under_way = max(max(prompts, default=0) - self.ahead, max(updates, default=0))  # updates come in order
        for iteration in sorted(issued.keys() | prompts.keys()):
            if iteration >= under_way:
                continue
            what, own = f"ledger, groups of iteration {iteration}", issued.get(iteration, {})
            with self.report.expecting(what, RESTORE):
                expected = self._issued(prompts[iteration], manifests.values()) if iteration in prompts else set()
                if wrong := sorted(expected ^ own.keys()):
                    message = f"expected the {len(expected)} groups it has sent, found {len(own)}, first {wrong[0]}"
                    self.report.problem(what, f"{message}; {RESTORE}")
                if iteration in updates:
                    self._outcomes(what, own, updates[iteration])

    def _issued(self, prompts: Manifest, manifests: Iterable[Manifest]) -> set[str]:
        rollouts = [m for m in manifests if m.kind == "rows" and prompts.dataset in m.parents]
        return {group for group, _ in issued_groups(self.store, prompts, rollouts[0] if rollouts else None)}

    def _outcomes(self, what: str, own: Mapping[str, str | None], update: Manifest) -> None:
        if waiting := sorted(group for group, outcome in own.items() if outcome is None):
            message = f"expected an outcome for each after the update, {len(waiting)} wait, first {waiting[0]}"
            self.report.problem(what, f"{message}; {RESTORE}")
        trained = {group for group, outcome in own.items() if outcome == "trained"}
        rows = self._group_ids(_training_data(update)[0])
        if wrong := sorted(rows ^ trained):
            message = f"expected the {len(rows)} groups of the update's rows trained, found {len(trained)}"
            self.report.problem(what, f"{message}, first {wrong[0]}; {RESTORE}")

    def _group_ids(self, dataset: DatasetRef) -> set[str]:
        return set(self.store.read(dataset, ["group_id"])["group_id"].to_pylist())


def _training_data(update: Manifest) -> list[DatasetRef]:
    return [parent for parent in update.parents if isinstance(parent, DatasetRef)]


def _digest(path: Path) -> str:
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
