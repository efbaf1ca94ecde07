"""Any sequence of commits reads back as a plain in-memory model says, and as itself when repeated."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import DataError
from data.columns import Column
from data.refs import DatasetRef
from data.store import Facts, Store

OWN = {
    "i": Column("i", pa.int32(), "N", "", "own", ""),
    "s": Column("s", pa.string(), "N", "", "own", ""),
    "l": Column("l", pa.list_(pa.int32()), "N", "", "own", ""),
    "b": Column("b", pa.list_(pa.bool_()), "N", "", "own", ""),
    "f": Column("f", pa.float64(), "N", "", "own", "", nullable=True),
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "i": st.integers(-5, 5),
    "s": st.text(max_size=3),
    "l": st.lists(st.integers(-5, 5), max_size=3),
    "b": st.lists(st.booleans(), max_size=9),
    "f": st.none() | st.floats(allow_nan=False),
}


@dataclass(frozen=True)
class Modelled:
    ref: DatasetRef
    columns: dict[str, tuple[int, list[Any]]]  # name -> (step that wrote it, values)
    space: tuple[int, ...]  # the step that made the rows, then those that selected


def draw_table(data: st.DataObject, rows: int) -> pa.Table:
    """Some columns, cut into chunks at random places."""
    names = data.draw(st.lists(st.sampled_from(sorted(OWN)), min_size=1, max_size=3, unique=True))
    values = {n: data.draw(st.lists(VALUES[n], min_size=rows, max_size=rows)) for n in names}
    table = pa.table({n: pa.array(v, OWN[n].type) for n, v in values.items()})
    cut = data.draw(st.integers(0, rows))
    return pa.concat_tables([table.slice(0, cut), table.slice(cut)])


def written(step: int, table: pa.Table) -> dict[str, tuple[int, list[Any]]]:
    return {name: (step, values) for name, values in table.to_pydict().items()}


class Machine:
    def __init__(self, folder: Path, data: st.DataObject) -> None:
        self.store, self.data = Store(folder, "r"), data
        self.known: list[Modelled] = []

    def commit(self, step: int) -> None:
        kind = self.data.draw(st.sampled_from(["rows", "columns", "selection", "join"])) if self.known else "rows"
        getattr(self, kind)(step)

    def pick(self) -> Modelled:
        return self.data.draw(st.sampled_from(self.known))

    def rows(self, step: int) -> None:
        table = draw_table(self.data, self.data.draw(st.integers(0, 5)))
        table = table.append_column("sample_id", pa.array([f"{step}-{i}" for i in range(table.num_rows)], pa.string()))
        arguments = {"key": "sample_id", "facts": Facts(), "columns": tuple(OWN.values())}
        refs = {self.store.commit_rows(step, "rows", table, **arguments) for _ in range(2)}
        self.add(refs, written(step, table), (step,))

    def columns(self, step: int) -> None:
        given, table = self.pick(), draw_table(self.data, self.data.draw(st.integers(0, 5)))
        if table.num_rows != given.ref.rows or given.columns.keys() & set(table.column_names):
            with pytest.raises(DataError):
                self.store.commit_columns(step, "c", given.ref, table, facts=Facts(), columns=tuple(OWN.values()))
            return
        arguments = {"facts": Facts(), "columns": tuple(OWN.values())}
        refs = {self.store.commit_columns(step, "c", given.ref, table, **arguments) for _ in range(2)}
        self.add(refs, given.columns | written(step, table), given.space)

    def selection(self, step: int) -> None:
        given = self.pick()
        keep = [i for i in range(given.ref.rows) if self.data.draw(st.booleans())]
        table = draw_table(self.data, len(keep)) if self.data.draw(st.booleans()) else None
        if table is not None and given.columns.keys() & set(table.column_names):
            table = None
        arguments = {"facts": Facts(), "columns": tuple(OWN.values())}
        refs = {self.store.commit_selection(step, "s", given.ref, keep, table, **arguments) for _ in range(2)}
        kept = {name: (by, [values[i] for i in keep]) for name, (by, values) in given.columns.items()}
        self.add(refs, kept | ({} if table is None else written(step, table)), (*given.space, step))

    def join(self, step: int) -> None:
        a, b = self.pick(), self.pick()
        shared = a.columns.keys() & b.columns.keys()
        if a.space != b.space or any(a.columns[name][0] != b.columns[name][0] for name in shared):
            with pytest.raises(DataError):
                self.store.join([a.ref, b.ref])
            return
        self.add({self.store.join([a.ref, b.ref]), self.store.join([b.ref, a.ref])}, a.columns | b.columns, a.space)

    def add(self, refs: set[DatasetRef], columns: dict[str, tuple[int, list[Any]]], space: tuple[int, ...]) -> None:
        [ref] = refs  # a repeated commit is the same dataset
        self.known.append(Modelled(ref, columns, space))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sequence_of_commits_reads_as_the_model_says(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder), data)
        for step in range(1, data.draw(st.integers(2, 9)) + 1):
            machine.commit(step)
        for store in (machine.store, Store(Path(folder), "r")):
            for dataset in machine.known:
                expected = {name: values for name, (_, values) in dataset.columns.items()}
                assert store.read(dataset.ref).to_pydict() == expected
                some = data.draw(st.lists(st.sampled_from(sorted(expected)), unique=True, min_size=1))
                assert store.read(dataset.ref, some).to_pydict() == {name: expected[name] for name in some}
