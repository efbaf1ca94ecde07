"""One Arrow IPC file of a dataset: written so that equal content gives equal bytes, read back with proof.

The file format, never the stream format: a stream cut between two messages reads as a valid, shorter table.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import DataError
from data.columns import column
from data.manifest import FileInfo, canonical

# Rows in a record batch. Equal content must give equal bytes, so it is fixed; list offsets are 32 bits, so a batch must
# stay below 2^31 tokens: 131,071 tokens a row. Up to this many rows a column is read as one contiguous chunk.
BATCH_ROWS = 16_384
METADATA_KEY = b"ratchet"


def with_metadata(schema: pa.Schema, facts: dict[str, Any]) -> pa.Schema:
    """The schema with `facts` under the key `ratchet`, so that the file alone says where it comes from."""
    return schema.with_metadata({METADATA_KEY: canonical(facts)})


def fingerprint(schema: pa.Schema) -> str:
    """SHA-256 over name, type and nullability of every column."""
    lines = [f"{f.name}: {f.type}{'' if f.nullable else ' not null'}" for f in schema]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_of_keys(keys: pa.ChunkedArray) -> str:
    """SHA-256 over the keys' lengths in bytes, as int32, followed by the SHA-256 over their UTF-8."""
    lengths, data = hashlib.sha256(), hashlib.sha256()
    for chunk in keys.chunks:
        _, offsets, values = chunk.buffers()
        ends = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        lengths.update(np.diff(ends).tobytes())
        if values is not None:
            data.update(memoryview(values)[ends[0] : ends[-1]])
    lengths.update(data.digest())
    return lengths.hexdigest()


def write_table(table: pa.Table, schema: pa.Schema, path: Path) -> None:
    """Write the values of `table` under `schema`. The bytes depend on the values alone, not on chunks and slices."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, table.num_rows, BATCH_ROWS):
            # One batch at a time, so that memory stays flat where columns must be copied.
            columns = [_plain(values.slice(start, BATCH_ROWS)) for values in table.columns]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _plain(values: pa.ChunkedArray) -> pa.Array:
    """The values in one array whose buffers hold nothing else: the writer pads a slice with what follows it."""
    if values.num_chunks == 1 and values.null_count == 0:
        return _trimmed(values.chunk(0))
    array = _copy(values.chunks, values.type)
    # What lies under a null is arbitrary; a gather writes zeros there.
    return array.take(pa.array(np.arange(len(array)))) if array.null_count else array


def _trimmed(array: pa.Array) -> pa.Array:
    """An array without nulls, trimmed to its own values: token lists without a copy, anything else copied."""
    kind, size = array.type, len(array)
    if array.null_count == 0 and pa.types.is_list(kind):
        offsets = np.concatenate([[0], np.cumsum(array.value_lengths(), dtype=np.int32)]).astype(np.int32)
        return pa.Array.from_buffers(kind, size, [None, pa.py_buffer(offsets)], 0, children=[_trimmed(array.flatten())])
    if size and array.null_count == 0 and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        width = kind.bit_width // 8
        return pa.Array.from_buffers(
            kind, size, [None, array.buffers()[1].slice(array.offset * width, size * width)], 0
        )
    return _copy([array], kind)


def _copy(chunks: list[pa.Array], kind: pa.DataType) -> pa.Array:
    return pa.concat_arrays([*chunks, pa.array([], kind)])


def map_table(path: Path) -> pa.Table:
    """The table of a file that this program wrote a moment ago, memory-mapped: it outlives the file's name."""
    with pa.memory_map(str(path)) as source:
        return parse(source.read_buffer(), str(path))


def parse(buffer: pa.Buffer, what: str) -> pa.Table:
    """The table in the bytes of a file, without a copy. Raises DataError for anything else, a stream too."""
    try:
        return pa.ipc.open_file(pa.BufferReader(buffer)).read_all()
    except pa.ArrowException as error:
        raise DataError(f"{what} is not an Arrow IPC file: {error}") from error


def prove(buffer: pa.Buffer, file: FileInfo, key: str, what: str) -> pa.Table:
    """The table of a file whose bytes are what the manifest says, and whose content is what this program declares.

    A digest proves that the file is what was written, validation that what was written is well-formed: both are needed.
    """
    if buffer.size != file.size:
        raise DataError(f"{what} must have {file.size} bytes, got {buffer.size}: it was cut or extended")
    found = hashlib.sha256(buffer).hexdigest()
    if found != file.sha256:
        raise DataError(f"{what} must have the SHA-256 in its name, got {found}: its content was changed")
    table = parse(buffer, what)
    try:
        table.validate(full=True)
    except pa.ArrowException as error:
        raise DataError(f"{what} is not valid Arrow: {error}") from error
    _check_content(table, file, key, what)
    return table


def _check_content(table: pa.Table, file: FileInfo, key: str, what: str) -> None:
    """The file says what its manifest says, and its columns are what this program declares."""
    if (found := fingerprint(table.schema)) != file.schema:
        raise DataError(f"{what} must have the schema {file.schema[:12]}, got {found[:12]}: {table.schema.names}")
    if table.num_rows != file.rows:
        raise DataError(f"{what} must have {file.rows} rows, got {table.num_rows}")
    for field in table.schema if file.kind != "selection" else ():
        try:
            declared = column(field.name)
        except KeyError:
            continue  # a user's own column: the fingerprint is its declaration
        if not field.equals(declared.field):
            raise DataError(f"{what}: column {field.name} must be {declared.type}, got {field.type}")
    try:
        metadata = json.loads((table.schema.metadata or {})[METADATA_KEY])
        keys = metadata["row_keys"]
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{what} has no ratchet metadata: {error}") from error
    if keys == file.row_keys and file.kind == "rows":
        keys = digest_of_keys(table[key])
    if keys != file.row_keys:
        raise DataError(f"{what} must lie beside rows with the key digest {file.row_keys[:12]}, got {keys[:12]}")
