"""Rows of tables: Parquet files, and data sets of Hugging Face."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from torchmars.config.source import DataSource
from torchmars.core.errors import UserError, missing_package
from torchmars.core.places import place
from torchmars.core.stores import store_of
from torchmars.data.corpus import Input, Sizes, in_a_line, load_dataset
from torchmars.data.documents import Damage, ReadPart, Record, TextPart

ROWS = 256  # read at once of a Parquet file


def parquet_parts(
    file: Input, source: DataSource, offset: int, lines: int, sizes: Sizes
) -> Iterator[ReadPart]:
    """Yield a Parquet file from row `offset` on.

    Raises `UserError` if it has no column of text of the source's name.
    """
    field, size = source.field, sizes.block
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_package("pyarrow", f"reading {file.name}") from None
    damaged = (pyarrow.ArrowException, OSError)
    try:
        # pre_buffer would hold all row groups in memory.
        path = place(file.name)
        opened = path if isinstance(path, Path) else store_of(path).open(path)
        table = pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=2**20)
    except damaged as error:
        part = TextPart(file.name, [damage_of(error)], offset, "row")
        yield ReadPart(part, offset, read=file.size, last=True)
        return
    with table:
        check_column(table.schema_arrow, field, file.name)
        rows = column_values(table, field, offset, damaged)
        yield from row_parts(file, rows, offset, size, table.metadata.num_rows)


def column_values(table: Any, field: str, offset: int, damaged: Any) -> Iterator[bytes | None]:
    """Yield a column's values in UTF-8 from row `offset` on. Raises `Damage`."""
    import pyarrow

    for group in range(table.num_row_groups):
        count = table.metadata.row_group(group).num_rows
        if offset >= count:
            offset -= count
            continue
        try:
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=[field]):
                column = batch.column(0)
                if pyarrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                # As bytes, so that a value that is not UTF-8 is one damaged record.
                yield from column.cast(pyarrow.large_binary()).to_pylist()[offset:]
                offset = max(0, offset - len(column))
        except damaged as error:
            raise damage_of(error) from None


def damage_of(error: Exception) -> Damage:
    """Return what Arrow says of a file's content; an error of the disk is raised as it is."""
    if isinstance(error, OSError) and error.errno is not None:  # of the disk, not the content
        raise error
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return Damage(f"from here on it cannot be read ({reason})")


def check_column(schema: Any, field: str, name: str) -> None:
    """Raise `UserError` if a Parquet file has no column of text of this name."""
    import pyarrow

    if field not in schema.names:
        raise UserError(
            f"data.source: {name} has no column {field!r}: name one of "
            f"{', '.join(schema.names)} (parquet:GLOB:FIELD)"
        )
    kind = schema.field(field).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if str(kind) not in ("string", "large_string", "string_view"):
        raise UserError(f"data.source: the column {field!r} of {name} is {kind}, not text")


def dataset_parts(
    shard: Input, source: DataSource, offset: int, lines: int, sizes: Sizes
) -> Iterator[ReadPart]:
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
            f"({in_a_line(error)}): start again to go on; what is done is kept"
        ) from None


def row_parts(
    source: Input, rows: Iterator[Any], first: int, size: int, count: int = 0
) -> Iterator[ReadPart]:
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
            part = TextPart(source.name, values, first, "row")
            first += len(values)
            read = source.size if last else source.size * first // count if count else 0
            yield ReadPart(part, first, read=read, last=last)
