"""The dataset store of one run: append-only column files, manifests, atomic commits, verified reads.

    store.commit_rows(7, "rollout", table, key="sample_id", facts=facts)     one file with all columns of the rows
    store.commit_columns(7, "reward", rollout, table, facts=facts)           one more file beside it, new columns only
    store.commit_selection(7, "filter", reward, indices, None, facts=facts)  a file with the rows to keep
    store.read(ref, ["rewards"])                                             mapped, verified, joined by position

A dataset is the list of files in its manifest, upstream first. The hard link `stages/000007/reward.json` to the
manifest is the commit: before it nothing refers to what was written, after it everything is durable. A retry that
produces equal content is the same success; other content is a `Conflict`.
"""

import hashlib
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import Conflict, DataError
from data.columns import Column
from data.files import digest_of_keys, fingerprint, parse, prove, with_metadata, write_table
from data.manifest import JSON, Facts, FileInfo, Manifest
from data.objects import Identity, Objects, make_folder, map_file, real_folder, sync_folder
from data.refs import DatasetRef, PolicyRef, Ref
from data.rows import check_rollout, check_unique, declare, tokens_per_version

__all__ = ["JSON", "Facts", "FileInfo", "Manifest", "Store"]

STAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
REFERENCE = re.compile(rf"(\d{{6,}})/({STAGE_NAME.pattern})\.json")
SETTLED_NS = 100_000_000  # the kernel stamps files at its tick, 1 to 10 ms
SELECTION = pa.schema([pa.field("selection", pa.int64(), nullable=False)])


class Store:
    """The datasets of a run, below `run_dir/data`. Opening one reads and creates nothing."""

    def __init__(self, run_dir: Path, run: str) -> None:
        self.run = run
        self._root = Path(run_dir) / "data"
        self._objects = Objects(self._root)
        # Digest -> the file that was hashed and validated. Hashing 200 MB costs 0.15 s, and five stages read the same
        # rollout in one process. A file that was touched since has another inode, size, mtime or ctime: hashed again.
        # A file younger than the clock's grain could change without showing it, so it is not remembered yet.
        self._verified: dict[str, Identity] = {}

    # ---------------------------------------------------------------- commits

    def commit_rows(
        self,
        iteration: int,
        stage: str,
        table: pa.Table,
        *,
        key: str,
        parents: Sequence[Ref] = (),
        facts: Facts,
        columns: Sequence[Column] = (),
    ) -> DatasetRef:
        """New rows, each with its own value in the string column `key`. Generated rows must pass `check_rollout`.

        `columns` declares a user's columns. Raises DataError for rows that break a contract, Conflict if the stage is
        committed with other content.
        """
        table = declare(table, columns)
        check_unique(table, key)
        if "behavior_logprobs" in table.column_names:
            check_rollout(table, dropped=facts.dropped)
        if "version_spans" in table.column_names:
            facts = _with_versions(facts, tokens_per_version(table), stage)
        keys = digest_of_keys(table[key])
        new = Manifest("rows", self.run, iteration, stage, table.num_rows, key, keys, (), tuple(parents), facts)
        return self._commit(self._with_file(new, "rows", table)).dataset

    def commit_columns(
        self,
        iteration: int,
        stage: str,
        inputs: DatasetRef,
        table: pa.Table,
        *,
        facts: Facts,
        columns: Sequence[Column] = (),
    ) -> DatasetRef:
        """New columns for the rows of `inputs`, in their order. Raises DataError for a column that exists upstream."""
        upstream = self.manifest(inputs)
        table = declare(table, columns)
        _check_new_columns(upstream, table, upstream.rows)
        facts = _with_versions(facts, upstream.facts.policy_versions, stage)
        new = replace(upstream, kind="columns", iteration=iteration, stage=stage, parents=(inputs,), facts=facts)
        return self._commit(self._with_file(new, "columns", table)).dataset

    def commit_selection(
        self,
        iteration: int,
        stage: str,
        inputs: DatasetRef,
        indices: Sequence[int] | np.ndarray | pa.Array,
        table: pa.Table | None,
        *,
        facts: Facts,
        columns: Sequence[Column] = (),
    ) -> DatasetRef:
        """The rows of `inputs` to keep, as strictly increasing positions, and optionally new columns for them."""
        upstream = self.manifest(inputs)
        positions = _positions(indices, upstream.rows, f"iteration {iteration}'s {stage}")
        if table is not None:
            table = declare(table, columns)
            _check_new_columns(upstream, table, len(positions))
        kept = self.read(inputs, [c for c in (upstream.key, "version_spans") if c in upstream.columns]).take(positions)
        tokens = tokens_per_version(kept) if "version_spans" in upstream.columns else upstream.facts.policy_versions
        new = replace(
            upstream,
            kind="selection",
            iteration=iteration,
            stage=stage,
            rows=len(positions),
            row_keys=digest_of_keys(kept[upstream.key]),
            parents=(inputs,),
            facts=_with_versions(facts, tokens, stage),
        )
        new = self._with_file(new, "selection", pa.table([positions], schema=SELECTION))
        return self._commit(new if table is None else self._with_file(new, "columns", table)).dataset

    def commit_policy(
        self, iteration: int, stage: str, policy: PolicyRef, *, parents: Sequence[Ref], facts: Facts
    ) -> PolicyRef:
        """That this stage produced this version: sealed it or brought it to the engines."""
        _check_run(self.run, policy.run, f"policy {policy.label}")
        new = Manifest("policy", self.run, iteration, stage, 0, "", "", (), tuple(parents), facts, policy)
        self._commit(new)
        return policy

    def join(self, refs: Sequence[DatasetRef]) -> DatasetRef:
        """One dataset with the columns of all, which must hold the same rows under the same selections.

        The order of `refs` does not matter. The result is readable and an input of commits like any other; it belongs
        to no stage. Raises DataError for other rows, another selection, or a column that two datasets wrote.
        """
        unique = sorted(set(refs), key=lambda r: (r.iteration, r.stage, r.digest))
        if not unique:
            raise DataError("a join needs one dataset or more, got none")
        if len(unique) == 1:
            return unique[0]
        manifests = [self.manifest(ref) for ref in unique]
        first = manifests[0]
        joined = Manifest(
            kind="join",
            run=self.run,
            iteration=max(m.iteration for m in manifests),
            stage="+".join(dict.fromkeys(m.stage for m in manifests)),
            rows=first.rows,
            key=first.key,
            row_keys=first.row_keys,
            files=_union(manifests),
            parents=tuple(unique),
            facts=replace(Facts(), policy_versions=first.facts.policy_versions),
        ).sealed()
        self._put_manifest(joined)
        return joined.dataset

    def _with_file(self, manifest: Manifest, kind: Any, table: pa.Table) -> Manifest:
        """Write one column file, with the manifest's facts in its schema metadata, and list it."""
        self._stage_path(manifest.iteration, manifest.stage)  # a wrong name is found before anything is written
        facts = manifest.sealed().to_json()
        del facts["files"]  # each file has its digest there; this one cannot know its own
        schema = with_metadata(table.schema, facts)
        sha256, size = self._objects.put(".arrow", lambda path: write_table(table, schema, path))
        file = FileInfo(
            kind=kind,
            iteration=manifest.iteration,
            stage=manifest.stage,
            columns=tuple(table.column_names),
            sha256=sha256,
            size=size,
            rows=table.num_rows,
            schema=fingerprint(schema),
            row_keys=manifest.row_keys,
        )
        return replace(manifest, files=(*manifest.files, file))

    def _put_manifest(self, manifest: Manifest) -> None:
        self._objects.put(".json", lambda path: _write(manifest.to_bytes(), path))
        self._objects.sync()

    def _commit(self, manifest: Manifest) -> Manifest:
        """Store the manifest, then link the stage's reference to it. That link is the commit."""
        target = self._stage_path(manifest.iteration, manifest.stage)
        manifest = manifest.sealed()
        self._put_manifest(manifest)
        if not real_folder(target.parent.parent).is_dir():
            make_folder(target.parent.parent)
        make_folder(target.parent)
        try:
            os.link(self._objects.path(manifest.digest, ".json"), target)
        except FileExistsError:
            existing = self.committed(manifest.iteration, manifest.stage)
            if existing is None or existing.digest != manifest.digest:
                raise Conflict(
                    f"iteration {manifest.iteration}'s {manifest.stage} of run {self.run} is committed as "
                    f"{existing and existing.digest}, and cannot be replaced by {manifest.digest}"
                ) from None
        sync_folder(target.parent)  # also where the link existed: its writer may not have come this far
        return manifest

    # ---------------------------------------------------------------- reads

    def find(self, iteration: int, stage: str) -> Ref | None:
        """What the stage committed in that iteration; None if nothing."""
        manifest = self.committed(iteration, stage)
        return manifest.ref if manifest else None

    def committed(self, iteration: int, stage: str) -> Manifest | None:
        """The manifest of what the stage committed, dataset or policy; None if nothing."""
        path = self._stage_path(iteration, stage)
        real_folder(path.parent)
        if not os.path.lexists(path):
            return None
        digest = hashlib.sha256(map_file(path)[0]).hexdigest()
        if not self._objects.path(digest, ".json").exists():
            raise DataError(f"{path} has the SHA-256 {digest}, but the store has no such manifest: it was changed")
        manifest = self.manifest_of(digest)
        if (manifest.run, manifest.iteration, manifest.stage) != (self.run, iteration, stage):
            raise DataError(
                f"{path} must hold iteration {iteration}'s {stage} of run {self.run}, "
                f"got iteration {manifest.iteration}'s {manifest.stage} of run {manifest.run}"
            )
        return manifest

    def stages(self) -> list[tuple[int, str]]:
        """(iteration, stage) of everything committed, in order."""
        folder = real_folder(self._root / "stages")
        names = [f"{real_folder(path.parent).name}/{path.name}" for path in folder.glob("*/*")]
        return sorted((int(match[1]), match[2]) for match in map(REFERENCE.fullmatch, names) if match)

    def referenced(self, datasets: Collection[str] = ()) -> set[str]:
        """File names of every object that a stage's reference leads to; `datasets` are ids of datasets in use beside.

        Raises DataError where a manifest on the way is missing or damaged: what it leads to is then not known.
        """
        short = {dataset.rpartition("@")[2] for dataset in datasets}
        known = [path.stem for path in self._objects.folder.glob("*.json")] if short else []
        waiting = [digest for digest in known if digest[:12] in short]
        for iteration, stage in self.stages():
            manifest = self.committed(iteration, stage)
            waiting += [manifest.digest] if manifest else []
        found: set[str] = set()
        while waiting:
            digest = waiting.pop()
            if f"{digest}.json" not in found:
                manifest = self.manifest_of(digest)
                found |= {f"{digest}.json", *(f"{file.sha256}.arrow" for file in manifest.files)}
                waiting += [parent.digest for parent in manifest.parents if isinstance(parent, DatasetRef)]
        return found

    def manifest(self, ref: DatasetRef) -> Manifest:
        """The manifest that `ref` names. Raises DataError if it is missing, changed, or not what `ref` says."""
        _check_run(self.run, ref.run, f"dataset {ref.id}")
        manifest = self.manifest_of(ref.digest)
        if manifest.kind == "policy" or manifest.dataset != ref:
            raise DataError(f"reference {ref} does not describe its manifest, which is {manifest.ref}")
        return manifest

    def manifest_of(self, digest: str) -> Manifest:
        """The manifest with this SHA-256. Raises DataError if it is missing or changed."""
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise DataError(f"expected a SHA-256 as a dataset's digest, got {digest!r}")
        path = self._objects.path(digest, ".json")
        real_folder(path.parent)
        data, _ = map_file(path)
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise DataError(f"{path} must have the SHA-256 in its name, got {found}: the manifest was changed")
        return Manifest.from_bytes(data.to_pybytes())

    def prove(self, manifest: Manifest) -> None:
        """Prove every file of a dataset, as `read` does for the columns it is asked for, and the keys of its rows."""
        for file in manifest.files:
            self._load(file, manifest.key)
        if manifest.key:
            found = digest_of_keys(self.read(manifest.dataset, [manifest.key])[manifest.key])
            if found != manifest.row_keys:
                raise DataError(
                    f"{manifest.dataset.id} must have rows with the key digest {manifest.row_keys[:12]}, "
                    f"got {found[:12]}"
                )

    def read(self, ref: DatasetRef, columns: Sequence[str] | None = None) -> pa.Table:
        """The dataset's columns, all or those named, with its selections applied.

        Files are mapped, not copied; only a selection copies. Every file that is read is proven first: size, SHA-256,
        `validate(full=True)`, schema, row keys. Raises DataError naming the file, what was expected and what was found.
        """
        manifest = self.manifest(ref)
        files = manifest.columns
        names = list(files) if columns is None else list(columns)
        unknown = [name for name in names if name not in files]
        if unknown:
            raise DataError(f"{ref.id} has no column {', '.join(unknown)}; it has {', '.join(files)}")
        joined: dict[str, tuple[pa.Field, pa.ChunkedArray]] = {}
        kept: pa.Array | None = None  # positions of the final rows in the row space of the file at hand
        for file in reversed(manifest.files):
            if file.kind == "selection":
                positions = self._load(file, manifest.key)["selection"]
                kept = positions if kept is None else positions.take(kept)
            elif wanted := [name for name in names if files[name] == file]:
                table = self._load(file, manifest.key).select(wanted)
                table = table if kept is None else table.take(kept)
                joined |= {name: (table.schema.field(name), table[name]) for name in wanted}
        wrong = {name: len(values) for name, (_, values) in joined.items() if len(values) != manifest.rows}
        if wrong:
            raise DataError(f"{ref.id} must have {manifest.rows} rows, but its columns have {wrong}")
        return pa.table([joined[name][1] for name in names], schema=pa.schema([joined[name][0] for name in names]))

    def staging(self) -> Path:
        """The folder for unfinished files, on the filesystem of the objects."""
        self._objects.prepare()
        return self._objects.staging

    def _load(self, file: FileInfo, key: str) -> pa.Table:
        """One column file, mapped and proven."""
        path = self._objects.path(file.sha256, ".arrow")
        what = f"{path} ({file.kind} of {file.writer})"
        real_folder(path.parent)
        buffer, identity = map_file(path)
        if self._verified.get(file.sha256) == identity:
            return parse(buffer, what)
        table = prove(buffer, file, key, what)
        if time.time_ns() - identity.ctime_ns > SETTLED_NS:
            self._verified[file.sha256] = identity
        return table

    def _stage_path(self, iteration: int, stage: str) -> Path:
        if not STAGE_NAME.fullmatch(stage):
            raise DataError(f"a stage's name must be letters, digits, '_', '-' or '.', got {stage!r}")
        if iteration < 0:
            raise DataError(f"iteration must be >= 0, got {iteration}")
        return self._root / "stages" / f"{iteration:06d}" / f"{stage}.json"


# -------------------------------------------------------------------- checks


def _check_run(own: str, other: str, what: str) -> None:
    if own != other:
        raise DataError(f"{what} belongs to run {other!r}, this is the store of run {own!r}")


def _check_new_columns(upstream: Manifest, table: pa.Table, rows: int) -> None:
    if table.num_rows != rows:
        raise DataError(f"{upstream.dataset.id}: new columns must have {rows} rows, as it has, got {table.num_rows}")
    for name in table.column_names:
        if (file := upstream.columns.get(name)) is not None:
            raise DataError(f"{name} is already written by {file.writer}; columns are appended, never rewritten")


def _positions(indices: Any, rows: int, what: str) -> pa.Array:
    values = np.asarray(indices)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise DataError(f"{what}: a selection must be a list of row positions, got {values.ndim}d {values.dtype}")
    values = values.astype(np.int64)
    wrong = np.flatnonzero((values < 0) | (values >= rows) | (np.diff(values, prepend=-1) <= 0))
    if wrong.size:
        found = f"{values[wrong[0]]} at index {wrong[0]}"
        raise DataError(f"{what}: a selection must be strictly increasing positions in 0..{rows - 1}, got {found}")
    return pa.array(values)


def _with_versions(facts: Facts, found: Mapping[str, int], stage: str) -> Facts:
    """Facts with the token counts that the rows have. A stage that declares others is wrong."""
    if facts.policy_versions and dict(facts.policy_versions) != dict(found):
        raise DataError(f"{stage} declares the versions {dict(facts.policy_versions)}, but its rows have {dict(found)}")
    return replace(facts, policy_versions=dict(found))


def _union(manifests: Sequence[Manifest]) -> tuple[FileInfo, ...]:
    """All files, space by space: the rows and their columns, a selection, the columns beside it, and so on."""
    first, *others = manifests
    spaces = [_spaces(m) for m in manifests]
    for other, its_spaces in zip(others, spaces[1:], strict=True):
        if other.files[0] != first.files[0]:
            raise DataError(
                f"cannot join {first.dataset.id} with {other.dataset.id}: the rows of one come from "
                f"{first.files[0].writer}, of the other from {other.files[0].writer}"
            )
        ours, theirs = ([files[0] for files in s[1:]] for s in (spaces[0], its_spaces))
        if ours != theirs:
            raise DataError(
                f"cannot join {first.dataset.id} with {other.dataset.id}: they keep different rows, "
                f"{_describe(ours)} and {_describe(theirs)}"
            )
    files = tuple(dict.fromkeys(f for space in zip(*spaces, strict=True) for files in space for f in files))
    writers: dict[str, FileInfo] = {}
    for file in files:
        for name in file.columns if file.kind != "selection" else ():
            if name in writers:
                raise DataError(f"cannot join: column {name} is written by {writers[name].writer} and by {file.writer}")
            writers[name] = file
    return files


def _spaces(manifest: Manifest) -> list[list[FileInfo]]:
    """The files grouped by the row space they lie in; each space after the first begins with its selection."""
    spaces: list[list[FileInfo]] = []
    for file in manifest.files:
        if file.kind != "columns":
            spaces.append([])
        spaces[-1].append(file)
    return spaces


def _describe(selections: Sequence[FileInfo]) -> str:
    return " then ".join(f"the selection of {s.writer}" for s in selections) or "all rows"


def _write(data: bytes, path: Path) -> None:
    path.write_bytes(data)
