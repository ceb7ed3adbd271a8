"""Rows of tables: Parquet files, and data sets of Hugging Face."""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from torchmars.config.source import DataSource
from torchmars.core.errors import UserError, needs_package
from torchmars.core.places import place
from torchmars.data.corpus import Input, Sizes, in_a_line, load_dataset
from torchmars.data.documents import Damage, Record, TextPart
from torchmars.storage import storage_of

ROWS = 256  # read at once of a Parquet file
READERS = 8  # files whose columns are looked at side by side
# Arrow's names of types of text, as files have it: without the word that it is text, and where
# whoever wrote it had none.
TEXT = (
    *("string", "large_string", "string_view"),
    *("binary", "large_binary", "binary_view", "null"),
)


def parquet_parts(
    file: Input, source: DataSource, offset: int, lines: int, sizes: Sizes
) -> Iterator[TextPart]:
    """Yield a Parquet file from row `offset` on.

    Raises `UserError` if it has no column of text of the source's name.
    """
    field, size = source.field, sizes.block
    try:
        table = open_table(file.name)
    except Damage as damage:
        yield TextPart(file.name, [damage], offset, "row", offset, read=file.size, last=True)
        return
    with table:
        check_column(table.schema_arrow, field, file.name)
        rows = column_values(table, field, offset)
        yield from row_parts(file, rows, offset, size, table.metadata.num_rows)


def open_table(name: str) -> Any:
    """Open a Parquet file. Raises `Damage`."""
    with needs_package("pyarrow", f"reading {name}"):
        import pyarrow.parquet
    path = place(name, pattern=True)
    try:
        opened = path if isinstance(path, Path) else storage_of(path).open(path)
        # pre_buffer would hold all row groups in memory.
        table = pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=2**20)
        table.schema_arrow.names  # noqa: B018, which the footer may not have either
        return table
    except (pyarrow.ArrowException, OSError) as error:
        raise damage_of(error) from None


def column_values(table: Any, field: str, offset: int) -> Iterator[bytes | None]:
    """Yield a column's values in UTF-8 from row `offset` on. Raises `Damage`."""
    import pyarrow

    try:
        if is_null(table, field):
            raise Damage(f"its column {field!r} is null in all {table.metadata.num_rows:,} rows")
        for group in range(table.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            if offset >= count:
                offset -= count
                continue
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=[field]):
                column = batch.column(batch.schema.get_field_index(field))
                if isinstance(column.type, pyarrow.BaseExtensionType):
                    column = column.storage
                if pyarrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                # As bytes, so that a value that is not UTF-8 is one damaged record.
                yield from column.cast(pyarrow.large_binary()).to_pylist()[offset:]
                offset = max(0, offset - len(column))
    except (pyarrow.ArrowException, OSError) as error:
        raise damage_of(error) from None


def is_null(table: Any, field: str) -> bool:
    """Return whether a file with rows says that all values of a column are null."""
    metadata = table.metadata
    if str(table.schema_arrow.field(field).type) == "null":
        return bool(metadata.num_rows)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return bool(metadata.num_rows) and all(
        leaf.is_stats_set and leaf.statistics.null_count == group.num_rows
        for group in groups
        for leaf in map(group.column, range(group.num_columns))
        if leaf.path_in_schema == field
    )


def damage_of(error: Exception) -> Damage:
    """Return Arrow's error on a file's content; an error of the disk is raised as it is."""
    if isinstance(error, OSError) and error.errno is not None:  # of the disk, not the content
        raise error
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return Damage(f"from here on it cannot be read ({reason})")


def check_columns(files: Sequence[str], field: str) -> None:
    """Raise `UserError` for the first Parquet file that has no column of text of this name.

    A file that cannot be read is left to whoever reads its rows.
    """

    def check(name: str) -> None:
        with contextlib.suppress(Damage), open_table(name) as table:
            check_column(table.schema_arrow, field, name)

    with ThreadPoolExecutor(READERS) as threads:  # reads of a store answer late
        for _ in threads.map(check, files):
            pass


def check_column(schema: Any, field: str, name: str) -> None:
    """Raise `UserError` if a Parquet file has no column of text of this name, or several."""
    count = schema.names.count(field)
    if count > 1:
        raise UserError(
            f"data.source: {name} has {count} columns {field!r}, and which one is meant is not "
            "known: write it again with one"
        )
    if not count:
        raise UserError(
            f"data.source: {name} has no column {field!r}: name one of "
            f"{', '.join(schema.names)} (parquet:GLOB:FIELD)"
        )
    kind = schema.field(field).type
    inner = getattr(kind, "storage_type", kind)  # which an extension type has
    inner = inner.value_type if str(inner).startswith("dictionary<") else inner
    # Of bytes without a word on what they are, that they are text is found out by reading them.
    of_bytes = str(inner) in TEXT or inner is kind and str(kind).startswith("fixed_size_binary[")
    if not of_bytes:
        raise UserError(
            f"data.source: the column {field!r} of {name} is {kind}, not text: name another one "
            "(parquet:GLOB:FIELD)"
        )


def dataset_parts(
    shard: Input, source: DataSource, offset: int, lines: int, sizes: Sizes
) -> Iterator[TextPart]:
    """Yield a shard of a data set of Hugging Face from row `offset` on.

    Raises `UserError` for whatever its files or its network raise.
    """
    data = load_dataset(source).shard(num_shards=shard.shards, index=shard.shard)
    rows = (row.get(source.field) for row in islice(data, offset, None))
    try:
        yield from row_parts(shard, rows, offset, sizes.block)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"cannot read shard {shard.shard} of the data set {shard.name} "
            f"({in_a_line(error)}): start again to continue; what is done is kept"
        ) from None


def row_parts(
    source: Input, rows: Iterator[Any], first: int, size: int, count: int = 0
) -> Iterator[TextPart]:
    """Yield values of rows in parts of about `size` bytes; `count` is the number of all rows.

    If they cannot be read to the end, why is the last value.
    """
    last = False
    while not last:
        values: list[Record] = []
        length = 0
        try:
            while length < size:
                value = next(rows)
                text = value if isinstance(value, (bytes, str)) else None
                values.append(text)
                length += len(text or b"") + 1
        except StopIteration:
            last = True
        except Damage as damage:
            values.append(damage)
            last = True
        if values:
            begin, first = first, first + len(values)
            read = source.size if last else source.size * first // count if count else 0
            yield TextPart(source.name, values, begin, "row", first, read=read, last=last)
