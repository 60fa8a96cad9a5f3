"""Records of JSON-lines and Parquet files and of Hugging Face data sets, one document each."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernels.errors import UserError
from zoo.arguments import first_line
from zoo.data.text.files import TextFile

BYTE_ORDER_MARK = "\ufeff"  # some editors write it at the start of a file, where it is not text
DATASETS = "datasets:"  # how the names of Hugging Face data sets begin
FORMATS = ("arrow", "csv", "json", "parquet", "text")  # of files that the library reads, at a path or a URL


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
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{self.key}.path: {where} is not JSON ({error}).") from None
                yield self._document_of(record, where)

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
                    for value in rows.column(0):
                        row += 1
                        where = f"{file}, row {row},"
                        with self._decoding(where):  # strings of Parquet may hold any bytes
                            record = {column: value.as_py()}
                        yield self._document_of(record, where)
        except pyarrow.ArrowException as error:
            raise UserError(f"{self.key}.path: {file} is not a readable Parquet file ({first_line(error)}).") from error

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
        with self._decoding(where):
            return data.decode()

    @contextmanager
    def _decoding(self, where: str) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:
            problem = f"{error.reason} at byte {error.start}"
            raise UserError(f"{self.key}.path: {where} is not UTF-8 text ({problem}).") from None

    def dataset(self, path: str) -> Iterator[str]:
        """The rows of a data set `datasets:NAME[:CONFIG[:SPLIT]]` or of files `datasets:FORMAT:FILES`, streamed."""
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
        if name not in FORMATS:
            return datasets.load_dataset_builder(name, config)
        documents = {"sample_by": "document"} if name == "text" else {}
        return datasets.load_dataset_builder(name, data_files=config, **documents)

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
    """The name, the config or the files, and the split of a data set."""
    name, _, rest = path.removeprefix(DATASETS).partition(":")
    config, _, split = (rest, "", "") if name in FORMATS else rest.partition(":")
    return name, config or None, split or "train"
