"""Rows of tables: Parquet files, and data sets of Hugging Face."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torchmars.config.source import DataSource
from torchmars.core.errors import UserError, needs_package
from torchmars.data.corpus import Input, Sizes, open_place
from torchmars.data.documents import LostFile, Record, TextPart
from torchmars.data.hub import in_a_line, load_dataset

ROWS = 256  # read at once of a Parquet file
TEXT = ("string", "large_string")  # Arrow's types


def open_table(name: str) -> Any:
    """Open a Parquet file. Raises `LostFile`, and an `OSError` of the disk."""
    with needs_package("pyarrow", f"reading {name}"):
        import pyarrow.parquet
    opened = open_place(name)
    try:
        # pre_buffer would hold all row groups in memory.
        table = pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=2**20)
        table.schema_arrow.names  # noqa: B018, which the footer may not have either
        return table
    except (pyarrow.ArrowException, OSError) as error:
        opened.seek(0)
        start = opened.read(100).lstrip()
        if start.startswith((b"<", b"version https://git-lfs")):
            raise LostFile(f"it is no Parquet file, but begins with {start[:30]!r}") from None
        raise lost_file(error) from None


def lost_file(error: Exception) -> LostFile:
    """Return Arrow's error on a file's content; an error of the disk is raised as it is."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    return LostFile(f"from here on it cannot be read ({in_a_line(error)})")


def row_groups(whole: Input, field: str, size: int) -> list[Input]:
    """Return a Parquet file as runs of row groups, of at least `size` bytes.

    Raises `UserError` if it has no column of text of this name. A file that cannot be read is left
    to whoever reads its rows.
    """
    try:
        table = open_table(whole.name)
    except LostFile:
        return [whole]
    with table:
        check_column(table.schema_arrow, field, whole.name)
        if whole.size <= size:
            return [whole]
        rows = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
    inputs: list[Input] = []
    begin, first, total = 0, 0, sum(rows)
    for group, count in enumerate(rows, start=1):
        first += count
        if whole.size * first // total - begin >= size or group == len(rows):
            start = inputs[-1].end if inputs else 0
            end = whole.size if group == len(rows) else whole.size * first // total
            inputs.append(Input(whole.name, end - begin, start or 0, group))
            begin = end
    return inputs or [whole]


def check_column(schema: Any, field: str, name: str) -> None:
    """Raise `UserError` if a Parquet file has no column of text of this name, or several."""
    count = schema.names.count(field)
    if count != 1:
        has = f"has {count} columns {field!r}" if count else f"has no column {field!r}"
        raise UserError(
            f"data.source: {name} {has}: name one of {', '.join(schema.names)} (parquet:GLOB:FIELD)"
        )
    kind = schema.field(field).type
    if str(kind) not in TEXT:
        raise UserError(
            f"data.source: the column {field!r} of {name} is {kind}, not text "
            f"({' or '.join(TEXT)}): name another one (parquet:GLOB:FIELD)"
        )


def parquet_parts(each: Input, source: DataSource, sizes: Sizes) -> Iterator[TextPart]:
    """Yield the rows of a Parquet file, or of some of its row groups.

    Raises `UserError` if it has no column of text of the source's name.
    """
    try:
        table = open_table(each.name)
    except LostFile as damage:
        yield TextPart(each.name, [damage], 0, "row", each.size)
        return
    with table:
        check_column(table.schema_arrow, source.field, each.name)
        groups = range(each.begin, table.num_row_groups if each.end is None else each.end)
        counts = [table.metadata.row_group(n).num_rows for n in range(groups.stop)]
        first, count = sum(counts[: groups.start]), sum(counts[groups.start :])
        values = column_values(table, source.field, list(groups))
        yield from row_parts(each, values, sizes.block, first, count)


def column_values(table: Any, field: str, groups: list[int]) -> Iterator[bytes | None]:
    """Yield a column's values in UTF-8. Raises `LostFile`."""
    import pyarrow

    try:
        for batch in table.iter_batches(ROWS, row_groups=groups, columns=[field]):
            column = batch.column(batch.schema.get_field_index(field))
            # As bytes, so that a value that is not UTF-8 is one damaged record.
            yield from column.cast(pyarrow.large_binary()).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise lost_file(error) from None


def dataset_parts(shard: Input, source: DataSource, sizes: Sizes) -> Iterator[TextPart]:
    """Yield a shard of a data set of Hugging Face.

    Raises `UserError` for whatever its files or its network raise.
    """
    data = load_dataset(source).shard(num_shards=shard.end, index=shard.begin)
    try:
        yield from row_parts(shard, (row.get(source.field) for row in data), sizes.block)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"cannot read shard {shard.begin} of the data set {shard.name} "
            f"({in_a_line(error)}): start again to continue; what is done is kept"
        ) from None


def row_parts(
    each: Input, rows: Iterator[Any], size: int, first: int = 0, count: int = 0
) -> Iterator[TextPart]:
    """Yield values of rows, of which the first has a number, in parts of about `size` bytes.

    `count` is the number of all rows, if it is known. If they cannot be read to the end, why is the
    last value.
    """
    last, done, read = False, 0, 0
    while not last:
        values: list[Record] = []
        length = 0
        try:
            for value in islice(rows, size):
                text = value if isinstance(value, (bytes, str)) else None
                values.append(text)
                length += len(text or b"") + 1
                if length >= size:
                    break
            else:
                last = True
        except LostFile as damage:
            values.append(damage)
            last = True
        done += len(values)
        share = each.size if last else each.size * done // count if count else 0
        if values or last:
            yield TextPart(each.name, values, first, "row", share - read)
        read = share
        first += len(values)
