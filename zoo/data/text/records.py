"""Records of JSON and Parquet files and of Hugging Face data sets, one document each."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernels.errors import UserError
from zoo.data.text.files import TextFile, first_line

BYTE_ORDER_MARK = "\ufeff"  # some editors write it at the start of a file, where it is not text
DATASETS = "datasets:"  # how the names of Hugging Face data sets begin


@dataclass(frozen=True)
class Records:
    """Reads the document of each record.

    Args:
        text_field: The field or column with it; dots lead into fields inside fields, unless a field has that name.
        key: The config key of the corpus, for messages.
    """

    text_field: str
    key: str

    def json_lines(self, file: TextFile) -> Iterator[str]:
        """One record a line."""
        with file.open() as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{file}, line {number},"
                text = self.decode(line, where).removeprefix(BYTE_ORDER_MARK).strip()
                if not text:
                    continue
                yield self._document_of(self._parsed(text, where), where)

    def json(self, file: TextFile) -> Iterator[str]:
        """JSON lines, if the first line is an object; otherwise the whole file is one object or an array."""
        with file.open() as content:
            first = next((line for line in content if line.strip()), b"")
            try:
                by_line = isinstance(json.loads(first.decode("utf-8-sig")), dict)
            except (ValueError, RecursionError):
                by_line = False
            rest = b"" if by_line else content.read()
        if by_line:
            yield from self.json_lines(file)
            return
        whole = self._parsed(self.decode(first + rest, str(file)).removeprefix(BYTE_ORDER_MARK).strip(), str(file))
        if not isinstance(whole, list):
            yield self._document_of(whole, str(file))
            return
        for number, record in enumerate(whole, start=1):
            where = f"{file}, item {number},"
            yield self._checked(record, where) if isinstance(record, str) else self._document_of(record, where)

    def _parsed(self, text: str, where: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.key}.path: {where} is not JSON ({error}).") from None

    def _document_of(self, record: Any, where: str) -> str:
        value, path = record, self.text_field
        while True:
            name, _, inside = (path, "", "") if isinstance(value, dict) and path in value else path.partition(".")
            if not isinstance(value, dict) or name not in value:
                if isinstance(value, dict):
                    reason = f"has: {', '.join(map(repr, value))}"
                else:
                    reason = f"is of type {type(value).__name__}, not an object"
                outside = self.text_field.removesuffix(path).rstrip(".")
                raise UserError(
                    f"{self.key}.path: {where} has no field {self.text_field!r} ({self.key}.text_field); "
                    f"{repr(outside) if outside else 'it'} {reason}."
                )
            value, path = value[name], inside
            if not path:
                return self._checked(value, where)

    def parquet(self, file: TextFile) -> Iterator[str]:
        """One record a row."""
        import pyarrow  # slow to import, and rarely needed
        from pyarrow import parquet

        try:
            with file.open() as content, parquet.ParquetFile(content) as table:
                names = table.schema_arrow.names
                if self.text_field not in names and self.text_field.partition(".")[0] not in names:
                    raise UserError(
                        f"{self.key}.path: {file} has no column {self.text_field!r} ({self.key}.text_field); "
                        f"it has: {', '.join(map(repr, names))}."
                    )
                column = self.text_field if self.text_field in names else self.text_field.partition(".")[0]
                row = 0
                for rows in table.iter_batches(batch_size=1024, columns=[column]):
                    for value in self._values(rows.column(0), f"{file}, row", row):
                        row += 1
                        yield self._document_of({column: value}, f"{file}, row {row},")
        except pyarrow.ArrowException as error:
            first_line = str(error).splitlines()[0]
            raise UserError(f"{self.key}.path: {file} is not a readable Parquet file ({first_line}).") from error

    def _values(self, column: Any, where: str, before: int) -> list[Any]:
        """The values of a column of Parquet, which promises UTF-8 and may hold anything; `before` rows came first."""
        try:
            return column.to_pylist()
        except UnicodeDecodeError:
            for row, value in enumerate(column, start=before + 1):
                try:
                    value.as_py()
                except UnicodeDecodeError as error:
                    problem = f"{error.reason} at byte {error.start}"
                    raise UserError(f"{self.key}.path: {where} {row}, is not UTF-8 text ({problem}).") from None
            raise

    def _checked(self, text: object, where: str) -> str:
        if not isinstance(text, str):
            raise UserError(
                f"{self.key}.path: {where} has {type(text).__name__} in the field {self.text_field!r}; "
                "a string is needed."
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
            raise UserError(f"{self.key}.path: {where} is not valid Unicode ({error.reason}).") from None
        return text

    def decode(self, data: bytes, where: str) -> str:
        """The text of UTF-8 data; a UserError if it is not text."""
        if b"\0" in data:
            raise UserError(f"{self.key}.path: {where} is binary (it has NUL bytes); UTF-8 text is needed.")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            problem = f"{error.reason} at byte {error.start}"
            raise UserError(f"{self.key}.path: {where} is not UTF-8 text ({problem}).") from None

    def dataset(self, path: str) -> Iterator[str]:
        """The rows of a data set `datasets:NAME[:CONFIG[:SPLIT]]`, streamed."""
        split = _parts(path)[2]
        with self._library_errors(path):
            rows = self._builder(path).as_streaming_dataset(split=split)
            for row, record in enumerate(rows, start=1):
                yield self._document_of(record, f"{path}, row {row},")

    def dataset_hash(self, path: str) -> str:
        """A hash that changes with the files of a data set, which are not read: of its revision, or sizes and times."""
        with self._library_errors(path):
            return str(self._builder(path).hash)

    def _builder(self, path: str) -> Any:
        try:
            import datasets
        except ImportError:
            raise UserError(f"{self.key}.path: {path} needs the package datasets; pip install datasets.") from None
        name, config, _ = _parts(path)
        return datasets.load_dataset_builder(name, config)

    @contextmanager
    def _library_errors(self, path: str) -> Iterator[None]:
        """Turn what the library raises, exceptions of any type, into a UserError."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{self.key}.path: {path} cannot be read ({first_line(error)}).") from error


def _parts(path: str) -> tuple[str, str | None, str]:
    """The name, config and split of `datasets:NAME[:CONFIG[:SPLIT]]`."""
    name, config, split, *_ = [*path.removeprefix(DATASETS).split(":", 2), "", ""]
    return name, config or None, split or "train"
