import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from conf.errors import Conflict, DataError
from data.columns import Column
from data.objects import Objects
from data.refs import DatasetRef, PolicyRef
from data.store import Facts, Store
from tests.data.rollouts import V1, V2, rewards, rollout, table

POLICY = PolicyRef("r", 1, "ab" * 32, 1, "r/000001/advantage@0123")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "r", "r")


def commit(store: Store, iteration: int = 1) -> DatasetRef:
    return store.commit_rows(iteration, "rollout", rollout(), key="sample_id", facts=Facts(logprob_kind="temperature"))


def objects(tmp_path: Path, suffix: str) -> list[Path]:
    return sorted((tmp_path / "r/data/objects").glob(f"*{suffix}"))


# ---- what is committed is what is read


def test_rows_columns_and_a_selection_read_back_joined(store: Store) -> None:
    rows = commit(store)
    rewarded = store.commit_columns(1, "reward", rows, rewards([1.0, None, 3.0, 4.0]), facts=Facts())
    kept = store.commit_selection(1, "filter", rewarded, [0, 2], table({"reward_error": ["x", "y"]}), facts=Facts())
    last = store.commit_columns(
        1, "advantage", kept, table({"advantages": [[1.0, 1.0], [2.0, 2.0, 2.0]]}), facts=Facts()
    )

    assert store.read(rows).equals(rollout())
    assert store.read(rewarded).select(rollout().column_names).equals(rollout())
    assert store.read(last, ["rewards", "advantages", "sample_id", "reward_error"]).to_pydict() == {
        "rewards": [1.0, 3.0],
        "advantages": [[1.0, 1.0], [2.0, 2.0, 2.0]],
        "sample_id": ["g1-0", "g2-0"],
        "reward_error": ["x", "y"],
    }
    assert (last.rows, last.iteration, last.stage, last.versions) == (2, 1, "advantage", (V1, V2))


def test_a_selection_of_a_selection_counts_in_the_rows_it_was_given(store: Store) -> None:
    first = store.commit_selection(1, "a", commit(store), [1, 2, 3], None, facts=Facts())
    second = store.commit_selection(1, "b", first, [0, 2], None, facts=Facts())
    assert store.read(second, ["sample_id"])["sample_id"].to_pylist() == ["g1-1", "g2-1"]
    assert store.manifest(second).facts.policy_versions == {V1: 1, V2: 1}


def test_a_selection_may_keep_nothing(store: Store) -> None:
    none = store.commit_selection(1, "filter", commit(store), [], rewards([]), facts=Facts())
    assert store.read(none).num_rows == 0
    assert none.versions == ()


def test_another_process_finds_and_reads_what_was_committed(store: Store, tmp_path: Path) -> None:
    ref = commit(store)
    again = Store(tmp_path / "r", "r")
    assert again.find(1, "rollout") == ref
    assert again.find(1, "reward") is None
    assert again.find(2, "rollout") is None
    assert again.read(ref).equals(rollout())


def test_a_policy_is_found_by_the_stage_that_committed_it(store: Store) -> None:
    rows = commit(store)
    assert store.commit_policy(1, "update", POLICY, parents=[rows], facts=Facts(metrics={"actor/lr": 0.5})) == POLICY
    assert store.find(1, "update") == POLICY
    manifest = store.committed(1, "update")
    assert manifest is not None
    assert (manifest.policy, manifest.parents, manifest.facts.metrics) == (POLICY, (rows,), {"actor/lr": 0.5})


def test_the_manifest_holds_every_fact_and_the_file_holds_the_same(store: Store, tmp_path: Path) -> None:
    facts = Facts(
        policy_versions={V1: 4, V2: 3},
        sampling={"temperature": 0.7, "top_k": -1},
        logprob_kind="after_temperature",
        tokenizer_digest="t",
        reward_code_digest="w",
        config_digest="c",
        dropped={"g3": "timeout", "g4": "timeout", "g5": "refused"},
        dropped_lengths={"g3": {"stop": [4, 9], "length": [64]}},
        cursor={"epoch": 0, "position": 16},
        metrics={"reward/mean": 0.25},
    )
    ref = store.commit_rows(3, "rollout", rollout(), key="sample_id", parents=[POLICY], facts=facts)
    manifest = store.manifest(ref)
    assert manifest.facts == facts
    assert manifest.parents == (POLICY,)

    path = tmp_path / "r/data/stages/000003/rollout.json"
    text = json.loads(path.read_bytes())
    assert text["facts"]["dropped_counts"] == {"timeout": 2, "refused": 1}
    [file] = objects(tmp_path, ".arrow")
    metadata = json.loads(pa.ipc.open_file(str(file)).schema.metadata[b"ratchet"])
    assert metadata == {name: value for name, value in text.items() if name != "files"}
    assert text["files"][0]["sha256"] == file.stem
    assert path.samefile(tmp_path / f"r/data/objects/{ref.digest}.json")
    assert file.stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o444


def test_equal_content_has_equal_bytes_however_it_is_chunked(store: Store, tmp_path: Path) -> None:
    ref = commit(store)
    whole = pa.concat_tables([rollout()] * 3)
    pieces = pa.concat_tables([whole.slice(4, 1), whole.slice(5, 2), whole.slice(3, 1).slice(0, 0), whole.slice(7, 1)])
    for other in (
        pieces,
        whole.combine_chunks().slice(4, 4),
        pa.Table.from_pylist(rollout().to_pylist(), rollout().schema),
    ):
        facts = Facts(logprob_kind="temperature")
        assert store.commit_rows(1, "rollout", other, key="sample_id", facts=facts) == ref
    assert len(objects(tmp_path, "")) == 2


def test_what_lies_under_a_null_is_not_content(store: Store) -> None:
    rows, null = commit(store), np.array([False, True, False, False])
    hidden = [pa.array(np.array([1.0, x, 3.0, 4.0]), mask=null) for x in (7.0, 8.0)]
    refs = {store.commit_columns(1, "reward", rows, pa.table({"rewards": h}), facts=Facts()) for h in hidden}
    assert len(refs) == 1


def test_reading_copies_nothing_unless_a_selection_applies(store: Store) -> None:
    rows = commit(store)
    rewarded = store.commit_columns(1, "reward", rows, rewards([1.0] * 4), facts=Facts())
    before = pa.total_allocated_bytes()
    read = store.read(rewarded)
    assert pa.total_allocated_bytes() == before
    assert read["behavior_logprobs"].num_chunks == 1
    kept = store.read(store.commit_selection(1, "filter", rewarded, [1], None, facts=Facts()))
    assert pa.total_allocated_bytes() > before
    assert kept["behavior_logprobs"].to_pylist() == [[0.0]]


def test_opening_a_store_creates_nothing(tmp_path: Path) -> None:
    assert Store(tmp_path / "absent", "r").find(1, "rollout") is None
    assert not (tmp_path / "absent").exists()


# ---- what a commit refuses


def test_an_existing_column_cannot_be_written_again(store: Store) -> None:
    rows = commit(store, 7)
    again = rollout().select(["behavior_logprobs"])
    message = "behavior_logprobs is already written by iteration 7's rollout; columns are appended, never rewritten"
    with pytest.raises(DataError, match=message):
        store.commit_columns(7, "reward", rows, again, facts=Facts())
    with pytest.raises(DataError, match=message):
        store.commit_selection(7, "filter", rows, [0, 1, 2, 3], again, facts=Facts())
    assert store.find(7, "reward") is None


def test_new_columns_must_be_as_long_as_the_rows(store: Store) -> None:
    rows = commit(store)
    with pytest.raises(DataError, match=r"must have 4 rows.*got 3"):
        store.commit_columns(1, "reward", rows, rewards([1.0] * 3), facts=Facts())
    with pytest.raises(DataError, match=r"must have 2 rows.*got 4"):
        store.commit_selection(1, "filter", rows, [0, 1], rewards([1.0] * 4), facts=Facts())


@pytest.mark.parametrize("indices", [[1, 0], [1, 1], [-1, 2], [0, 4], [0.0, 1.0], [[0], [1]], [True, False]])
def test_a_selection_must_be_increasing_positions_in_range(store: Store, indices: list[int]) -> None:
    with pytest.raises(DataError, match="iteration 1's filter: a selection must be"):
        store.commit_selection(1, "filter", commit(store), indices, None, facts=Facts())


def test_generated_rows_must_keep_the_rollout_contract(store: Store) -> None:
    bad = rollout({"finish_reason": ["abort", "stop", "stop", "stop"]})
    with pytest.raises(DataError, match="sample g1-0: finish_reason"):
        store.commit_rows(1, "rollout", bad, key="sample_id", facts=Facts())
    with pytest.raises(DataError, match="group g2 is declared dropped"):
        store.commit_rows(1, "rollout", rollout(), key="sample_id", facts=Facts(dropped={"g2": "late"}))


def test_declared_versions_must_be_those_of_the_rows(store: Store) -> None:
    with pytest.raises(DataError, match=rf"rollout declares the versions .*'{V1}': 7.* but its rows have .*'{V1}': 4"):
        store.commit_rows(1, "rollout", rollout(), key="sample_id", facts=Facts(policy_versions={V1: 7}))


def test_a_users_column_needs_its_declaration(store: Store) -> None:
    rows, own = commit(store), Column("bucket", pa.int32(), "N", "", "mine", "")
    bucket = pa.table({"bucket": pa.array([1, 2, 3, 4], pa.int32())})
    with pytest.raises(DataError, match="column bucket is not declared"):
        store.commit_columns(1, "mine", rows, bucket, facts=Facts())
    ref = store.commit_columns(1, "mine", rows, bucket, facts=Facts(), columns=[own])
    assert store.read(ref, ["bucket"])["bucket"].to_pylist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".", "..", ".hidden", "x" * 101, "a\n"])
def test_a_stage_name_cannot_leave_its_folder(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="a stage's name must be"):
        store.commit_rows(1, name, rollout(), key="sample_id", facts=Facts())
    assert not (tmp_path / "r").exists()
    with pytest.raises(DataError, match="a stage's name must be"):
        store.find(1, name)


def test_facts_that_are_not_plain_json_are_refused(store: Store) -> None:
    with pytest.raises(DataError, match="facts of iteration 1's rollout must be plain JSON"):
        store.commit_rows(1, "rollout", rollout(), key="sample_id", facts=Facts(metrics={"x": float("nan")}))


# ---- joins


def test_parallel_stages_join_in_any_order_and_feed_a_commit(store: Store) -> None:
    rows = commit(store)
    rewarded = store.commit_columns(1, "reward", rows, rewards([1.0, 2.0, 3.0, 4.0]), facts=Facts())
    logprobs = table({"ref_logprobs": [[-1.0, -1.0], [-1.0], [-1.0] * 3, [-1.0]]})
    reference = store.commit_columns(1, "reference", rows, logprobs, facts=Facts())
    joined = store.join([rewarded, reference])
    assert joined == store.join([reference, rewarded, reference])
    assert store.join([rewarded]) == store.join([rewarded, rewarded]) == rewarded
    assert set(store.manifest(joined).parents) == {rewarded, reference}
    assert joined.versions == (V1, V2)
    kept = store.commit_selection(1, "advantage", joined, [3], table({"advantages": [[0.5]]}), facts=Facts())
    read = store.read(kept, ["sample_id", "rewards", "ref_logprobs", "advantages"]).to_pylist()
    assert read == [{"sample_id": "g2-1", "rewards": 4.0, "ref_logprobs": [-1.0], "advantages": [0.5]}]


def test_columns_before_and_after_a_shared_selection_join(store: Store) -> None:
    rewarded = store.commit_columns(1, "reward", commit(store), rewards([1.0, 2.0, 3.0, 4.0]), facts=Facts())
    kept = store.commit_selection(1, "filter", rewarded, [2], None, facts=Facts())
    a = store.commit_columns(1, "a", kept, table({"reward_error": ["late"]}), facts=Facts())
    b = store.commit_columns(1, "b", kept, table({"reward_outcome": ["ok"]}), facts=Facts())
    read = store.read(store.join([a, b]), ["rewards", "reward_error", "reward_outcome"]).to_pylist()
    assert read == [{"rewards": 3.0, "reward_error": "late", "reward_outcome": "ok"}]


def test_what_does_not_hold_the_same_rows_cannot_be_joined(store: Store) -> None:
    rows, other = commit(store), commit(store, 2)
    kept = store.commit_selection(1, "filter", rows, [0, 1], None, facts=Facts())
    cut = store.commit_selection(1, "cut", rows, [0, 2], None, facts=Facts())
    first = store.commit_columns(1, "reward", rows, rewards([1.0] * 4), facts=Facts())
    second = store.commit_columns(1, "reward2", rows, rewards([2.0] * 4), facts=Facts())
    with pytest.raises(
        DataError, match=r"r/000001/rollout.*r/000002/rollout.*iteration 1's rollout.*iteration 2's rollout"
    ):
        store.join([rows, other])
    with pytest.raises(DataError, match=r"r/000001/cut.*r/000001/filter.*the selection of iteration 1's cut"):
        store.join([kept, cut])
    with pytest.raises(DataError, match=r"different rows.*filter and all rows"):
        store.join([first, kept])
    with pytest.raises(
        DataError, match="column rewards is written by iteration 1's reward and by iteration 1's reward2"
    ):
        store.join([first, second])


# ---- retries, conflicts and crashes


def test_a_repeated_commit_is_one_success_and_other_content_a_conflict(store: Store, tmp_path: Path) -> None:
    ref = commit(store)
    assert commit(store) == ref
    with pytest.raises(
        Conflict, match=rf"iteration 1's rollout of run r is committed as {ref.digest}.*replaced by [0-9a-f]+"
    ):
        store.commit_rows(1, "rollout", rollout({"response_text": ["", "", "", ""]}), key="sample_id", facts=Facts())
    assert store.find(1, "rollout") == ref
    assert list((tmp_path / "r/data/staging").iterdir()) == []


class Crash(BaseException):
    """What no `except` of the store may swallow."""


def crash_at(monkeypatch: pytest.MonkeyPatch, step: int, after: bool) -> Callable[[], int]:
    """Raise before or after the step-th call that changes the disk; returns the count of calls so far."""
    count = 0
    for name in ("link", "fsync", "fchmod", "mkdir"):
        real = getattr(os, name)

        def call(*args: object, real: Callable[..., object] = real, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count != step:
                return real(*args, **kwargs)
            if after:
                real(*args, **kwargs)
            raise Crash

        monkeypatch.setattr(os, name, call)
    monkeypatch.setattr(Path, "unlink", lambda *a, **k: None)  # the dead do not clean up
    return lambda: count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_step_leaves_nothing_or_the_whole_dataset(tmp_path: Path, after: bool) -> None:
    selection = ([0, 3], rewards([1.0, 2.0]))
    for step in range(1, 100):
        run_dir = tmp_path / f"{step}"
        rows = commit(Store(run_dir, "r"))
        with pytest.MonkeyPatch.context() as patch:
            calls = crash_at(patch, step, after)
            with contextlib.suppress(Crash):
                Store(run_dir, "r").commit_selection(1, "filter", rows, *selection, facts=Facts())
            done = calls() < step
        survivor = Store(run_dir, "r")
        found = survivor.find(1, "filter")
        retried = survivor.commit_selection(1, "filter", rows, *selection, facts=Facts())
        assert found in (None, retried)
        assert survivor.read(retried, ["rewards", "sample_id"]).to_pylist() == [
            {"rewards": 1.0, "sample_id": "g1-0"},
            {"rewards": 2.0, "sample_id": "g2-1"},
        ]
        if done:
            assert step > 10  # files, manifest, reference: each is synced, linked and synced again
            return
    pytest.fail("the commit never ended")


def test_a_full_disk_commits_nothing_and_gives_the_space_back(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        (tmp_path / "r/data/objects").mkdir(parents=True)
        (tmp_path / "r/data/staging").mkdir()
        with pytest.raises(OSError, match="No space left"):
            commit(store)
    assert list((tmp_path / "r/data/staging").iterdir()) == []
    assert store.find(1, "rollout") is None
    assert store.read(commit(store)).num_rows == 4


def test_threads_that_commit_the_same_agree_and_of_those_that_differ_one_wins(store: Store, tmp_path: Path) -> None:
    def attempt(text: str) -> DatasetRef | Conflict:
        try:
            own = Store(tmp_path / "r", "r")
            return own.commit_rows(1, "rollout", rollout({"response_text": [text] * 4}), key="sample_id", facts=Facts())
        except Conflict as conflict:
            return conflict

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(attempt, ["a", "b"] * 8))
    winner = store.find(1, "rollout")
    assert isinstance(winner, DatasetRef)
    assert outcomes.count(winner) == 8
    assert sum(isinstance(o, Conflict) for o in outcomes) == 8
    assert len(set(store.read(winner)["response_text"].to_pylist())) == 1


def test_processes_that_commit_the_same_stage_agree(store: Store, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tests.data.test_store import *;"
        "print(commit(Store(pathlib.Path(sys.argv[1]), 'r')).digest)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "r")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digests = {child.communicate(timeout=60)[0].strip() for child in children}
    assert digests == {commit(store).digest}


# ---- damage is found, whatever it is


@pytest.fixture
def damaged(store: Store, tmp_path: Path) -> tuple[DatasetRef, Callable[[Path, bytes], None]]:
    """A dataset with every kind of file, and what overwrites one of them behind the store's back."""
    rewarded = store.commit_columns(1, "reward", commit(store), rewards([1.0, 2.0, 3.0, 4.0]), facts=Facts())
    ref = store.commit_selection(1, "filter", rewarded, [0, 2], None, facts=Facts())
    assert store.read(ref).num_rows == 2  # also: a store that has verified it must notice later

    def overwrite(path: Path, data: bytes) -> None:
        times = path.stat()
        path.chmod(0o644)
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return ref, overwrite


def test_no_changed_byte_is_ever_read(
    store: Store, tmp_path: Path, damaged: tuple[DatasetRef, Callable[[Path, bytes], None]]
) -> None:
    ref, overwrite = damaged
    used = [*objects(tmp_path, ".arrow"), tmp_path / f"r/data/objects/{ref.digest}.json"]
    assert len(used) == 4
    for path in used:
        data = path.read_bytes()
        for position in range(0, len(data), 1 + len(data) // 60):
            for reader in (store, Store(tmp_path / "r", "r")):
                overwrite(path, data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
                with pytest.raises(DataError, match=path.stem):
                    reader.read(ref)
        overwrite(path, data)
        assert store.read(ref).num_rows == 2


def test_a_file_that_is_cut_extended_or_gone_is_named(
    store: Store, tmp_path: Path, damaged: tuple[DatasetRef, Callable[[Path, bytes], None]]
) -> None:
    ref, overwrite = damaged
    for path in objects(tmp_path, ".arrow"):
        data = path.read_bytes()
        for changed in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
            overwrite(path, changed)
            with pytest.raises(DataError, match=rf"{path.name}.*must have {len(data)} bytes, got {len(changed)}"):
                store.read(ref)
        path.unlink()
        with pytest.raises(DataError, match=f"{path.name} is missing"):
            store.read(ref)
        path.write_bytes(data)


def test_swapped_files_are_found(
    store: Store, tmp_path: Path, damaged: tuple[DatasetRef, Callable[[Path, bytes], None]]
) -> None:
    first = store.commit_columns(1, "a", damaged[0], table({"reward_error": ["x", "y"]}), facts=Facts())
    second = store.commit_columns(1, "b", damaged[0], table({"reward_error": ["z", "w"]}), facts=Facts())
    a, b = (tmp_path / f"r/data/objects/{store.manifest(r).files[-1].sha256}.arrow" for r in (first, second))
    assert a.stat().st_size == b.stat().st_size
    swap = tmp_path / "swap"
    a.rename(swap), b.rename(a), swap.rename(b)
    for ref in (first, second):
        with pytest.raises(DataError, match="must have the SHA-256 in its name"):
            store.read(ref)


def rewrite(store: Store, tmp_path: Path, ref: DatasetRef, write: Callable[[Path, pa.Table], None]) -> DatasetRef:
    """A forger who replaces the reward file, and makes file name, manifest and reference fit to it."""
    manifest = store.manifest(ref)
    [old] = [f for f in manifest.files if f.columns == ("rewards",)]
    current = pa.ipc.open_file(str(tmp_path / f"r/data/objects/{old.sha256}.arrow")).read_all()
    sha256, size = Objects(tmp_path / "r/data").put(".arrow", lambda path: write(path, current))
    files = tuple(replace(f, sha256=sha256, size=size) if f == old else f for f in manifest.files)
    forged = replace(manifest, files=files).sealed()
    Objects(tmp_path / "r/data").put(".json", lambda path: path.write_bytes(forged.to_bytes()) and None)
    return forged.dataset


def as_file(path: Path, content: pa.Table) -> None:
    with pa.ipc.new_file(str(path), content.schema) as writer:
        writer.write_table(content)


def as_stream(path: Path, content: pa.Table) -> None:
    with pa.ipc.new_stream(str(path), content.schema) as writer:
        writer.write_table(content)


def without_metadata(path: Path, content: pa.Table) -> None:
    as_file(path, content.replace_schema_metadata(None))


def beside_other_rows(path: Path, content: pa.Table) -> None:
    facts = json.loads(content.schema.metadata[b"ratchet"])
    as_file(path, content.replace_schema_metadata({"ratchet": json.dumps({**facts, "row_keys": "0" * 64})}))


def with_another_type(path: Path, content: pa.Table) -> None:
    narrow = pa.table({"rewards": content["rewards"].cast(pa.float32())})
    as_file(path, narrow.replace_schema_metadata(content.schema.metadata))


def with_fewer_rows(path: Path, content: pa.Table) -> None:
    as_file(path, content.slice(1))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (as_stream, "is not an Arrow IPC file"),
        (without_metadata, "has no ratchet metadata"),
        (beside_other_rows, "must lie beside rows with the key digest"),
        (with_another_type, "must have the schema"),
        (with_fewer_rows, "must have 4 rows, got 3"),
    ],
)
def test_a_file_with_the_right_digest_must_still_be_what_its_manifest_says(
    store: Store,
    tmp_path: Path,
    damaged: tuple[DatasetRef, Callable[[Path, bytes], None]],
    write: Callable[[Path, pa.Table], None],
    message: str,
) -> None:
    with pytest.raises(DataError, match=message):
        store.read(rewrite(store, tmp_path, damaged[0], write))


def test_offsets_and_utf8_are_validated_even_where_every_digest_fits(store: Store, tmp_path: Path) -> None:
    """What `Table.validate()` alone lets pass: it takes `full=True`."""
    offsets, data = pa.py_buffer(b"".join(i.to_bytes(4, "little") for i in (0, 1, 2, 3, 4))), pa.py_buffer(b"ab\xffd")
    reversed_offsets = pa.py_buffer(b"".join(i.to_bytes(4, "little") for i in (0, 3, 1, 3, 4)))
    rows = commit(store)
    for name, buffers in {
        "utf8": [None, offsets, data],
        "offsets": [None, reversed_offsets, pa.py_buffer(b"abcd")],
    }.items():
        bad = pa.table({"reward_error": pa.Array.from_buffers(pa.string(), 4, buffers)})
        ref = store.commit_columns(1, name, rows, bad, facts=Facts())
        with pytest.raises(DataError, match="is not valid Arrow"):
            store.read(ref)


def test_an_edited_manifest_or_stage_reference_is_found(
    store: Store, tmp_path: Path, damaged: tuple[DatasetRef, Callable[[Path, bytes], None]]
) -> None:
    ref, overwrite = damaged
    stages = tmp_path / "r/data/stages/000001"
    reference, other = stages / "filter.json", (stages / "reward.json").read_bytes()
    data = reference.read_bytes()
    overwrite(reference, data.replace(b'"temperature"', b'"temperaturE"').replace(b'"rows":2', b'"rows":3'))
    with pytest.raises(DataError, match="has no such manifest: it was changed"):
        store.find(1, "filter")
    with pytest.raises(DataError, match="the manifest was changed"):
        store.read(ref)  # a hard link: the object changed with it
    reference.unlink()
    reference.write_bytes(other)
    with pytest.raises(DataError, match="must hold iteration 1's filter of run r, got iteration 1's reward"):
        store.find(1, "filter")
    reference.write_bytes(b"")
    with pytest.raises(DataError, match="has no such manifest"):
        store.find(1, "filter")


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text + b" ",
        lambda text: text.replace(b'"format":2', b'"format":3'),
        lambda text: text.replace(b'"run":"r"', b'"nur":"r"'),
        lambda text: text.replace(b'"dropped_counts":{}', b'"dropped_counts":{"late":1}'),
        lambda text: text[:-1],
        lambda text: b"[]",
    ],
)
def test_a_manifest_that_this_store_would_not_write_is_refused_whatever_its_name(
    store: Store, tmp_path: Path, edit: Callable[[bytes], bytes]
) -> None:
    ref = commit(store)
    text = edit((tmp_path / f"r/data/objects/{ref.digest}.json").read_bytes())
    digest, _ = Objects(tmp_path / "r/data").put(".json", lambda path: path.write_bytes(text) and None)
    with pytest.raises(DataError, match=r"manifest (has format 3|cannot be read|is not in canonical form)"):
        store.read(replace(ref, digest=digest))


@pytest.mark.parametrize("changes", [{"rows": 5}, {"stage": "reward"}, {"iteration": 2}, {"versions": ()}])
def test_a_reference_must_say_what_its_manifest_says(store: Store, changes: dict[str, object]) -> None:
    with pytest.raises(DataError, match="does not describe its manifest"):
        store.read(replace(commit(store), **changes))


def test_a_reference_to_another_run_or_to_no_digest_is_refused(store: Store) -> None:
    rows = commit(store)
    with pytest.raises(DataError, match="belongs to run 'other', this is the store of run 'r'"):
        store.read(replace(rows, run="other"))
    with pytest.raises(DataError, match="belongs to run 'other'"):
        store.commit_policy(1, "update", replace(POLICY, run="other"), parents=[], facts=Facts())
    with pytest.raises(DataError, match="expected a SHA-256"):
        store.read(replace(rows, digest="../../../etc/passwd"))
    with pytest.raises(DataError, match="is missing"):
        store.read(replace(rows, digest="0" * 64))
    with pytest.raises(DataError, match="has no column invented; it has sample_id"):
        store.read(rows, ["invented"])


def test_a_run_folder_copied_from_another_run_is_refused(store: Store, tmp_path: Path) -> None:
    commit(store)
    shutil.copytree(tmp_path / "r", tmp_path / "s")
    with pytest.raises(DataError, match="of run s, got iteration 1's rollout of run r"):
        Store(tmp_path / "s", "s").find(1, "rollout")


@pytest.mark.parametrize("target", ["objects", "stages", "stages/000001", "staging"])
def test_a_folder_that_is_a_symlink_is_refused(store: Store, tmp_path: Path, target: str) -> None:
    ref, folder = commit(store), tmp_path / "r/data" / target
    folder.rename(tmp_path / "outside")
    folder.symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match="is a symlink"):
        store.commit_columns(1, "reward", ref, rewards([1.0] * 4), facts=Facts())


def test_a_file_that_is_a_symlink_or_no_file_is_refused(store: Store, tmp_path: Path) -> None:
    ref = commit(store)
    [path] = objects(tmp_path, ".arrow")
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match=f"{path.name} is a symlink"):
        store.read(ref)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match=f"{path.name} is not a regular file"):
        store.read(ref)


def test_a_damaged_object_is_not_taken_for_the_same_content(
    store: Store, tmp_path: Path, damaged: tuple[DatasetRef, Callable[[Path, bytes], None]]
) -> None:
    [path] = [tmp_path / f"r/data/objects/{store.manifest(damaged[0]).files[0].sha256}.arrow"]
    damaged[1](path, path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=f"{path.name} is damaged: expected SHA-256"):
        commit(store)
