"""What the store relies on in Arrow's files."""

import hashlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest

TABLE = pa.table({"n": pa.array(range(8), pa.int32()), "text": pa.array(["a", "b", "c", "d"] * 2)})


def written(table: pa.Table, rows: int = 4) -> bytes:
    """As an IPC file, so many rows a batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


def test_a_stream_cut_between_two_messages_reads_as_a_shorter_table_and_a_file_does_not() -> None:
    """Datasets are in the file format, and a stream is refused."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE.slice(0, 4))
        cut = sink.tell()
        writer.write_table(TABLE.slice(4))
    stream = sink.getvalue()
    assert pa.ipc.open_stream(stream.slice(0, cut)).read_all().equals(TABLE.slice(0, 4))
    with pytest.raises(pa.ArrowInvalid):
        pa.ipc.open_file(stream)
    whole = written(TABLE)
    for size in range(len(whole)):
        with pytest.raises(pa.ArrowInvalid):
            pa.ipc.open_file(pa.py_buffer(whole[:size]))


def test_only_full_validation_finds_bad_offsets_and_utf8_and_none_finds_a_changed_value() -> None:
    """Reading takes the digest and `validate(full=True)`."""

    def strings(ends: tuple[int, ...], data: bytes) -> pa.Table:
        offsets = pa.py_buffer(b"".join(end.to_bytes(4, "little") for end in ends))
        return pa.table({"text": pa.Array.from_buffers(pa.string(), 4, [None, offsets, pa.py_buffer(data)])})

    for bad in (strings((0, 3, 1, 3, 4), b"abcd"), strings((0, 1, 2, 3, 4), b"ab\xffd")):
        bad.validate()
        with pytest.raises(pa.ArrowInvalid):
            bad.validate(full=True)
    whole = bytearray(written(TABLE))
    whole[whole.index((3).to_bytes(4, "little") + (4).to_bytes(4, "little"))] = 99  # a value of n, somewhere
    changed = pa.ipc.open_file(pa.py_buffer(bytes(whole))).read_all()
    changed.validate(full=True)
    assert not changed.equals(TABLE)


def test_equal_tables_have_equal_bytes_only_where_they_are_chunked_alike() -> None:
    """`write_table` of data/files.py makes one chunk of everything and cuts it at fixed rows."""
    digests = {hashlib.sha256(written(TABLE)).digest() for _ in range(3)}
    assert len(digests) == 1
    pieces = pa.concat_tables([TABLE.slice(0, 3), TABLE.slice(3)])
    assert pieces.equals(TABLE)
    assert written(pieces) != written(TABLE)
    assert written(pieces.combine_chunks()) == written(TABLE)


def test_a_write_that_finds_no_space_raises_and_leaves_a_part(tmp_path: Path) -> None:
    """So a dataset is written in staging and linked when it is whole. The limit stands for a full disk."""
    code = """
        import resource, signal, sys
        import pyarrow as pa
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        table = pa.table({"n": pa.array(range(10_000))})
        try:
            with pa.OSFile(sys.argv[1], "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        except OSError as error:
            sys.exit(f"refused: {error}")
    """
    path = tmp_path / "x.arrow"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "refused: " in done.stderr
    assert path.stat().st_size == 10_000
