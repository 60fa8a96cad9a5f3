"""Data of lm-eval's tasks from a folder instead of the Hugging Face Hub.

    FOLDER/NAME.jsonl                            one split, which is enough without examples in the prompt
    FOLDER/NAME/validation.jsonl, train.jsonl …  a file for each split, called as in the data set

The files hold the data set's own fields; `.parquet` and `.json` (a list) are read as well.
"""

import json
from pathlib import Path

import datasets
import pyarrow.parquet

from kernels import UserError
from zoo.arguments import first_line

SUFFIXES = (".jsonl", ".parquet", ".json")


class Splits(dict[str, datasets.Dataset]):
    """The splits of a data set in a folder, each read when it is used.

    Args:
        folder: Where the files are.
        name: Of the file or folder, without a suffix.
        source: The data set whose fields they must have, for error messages.

    Attributes:
        one_file: Whether one file is used for every split.

    Raises:
        UserError: The file does not exist.
    """

    def __init__(self, folder: Path, name: str, source: str) -> None:
        super().__init__()
        self.folder, self.name, self.source = folder, name, source
        single = _with_suffix(folder / name)
        self.one_file = not (folder / name).is_dir()
        if self.one_file and single is None:
            raise UserError(
                f"data: there is no {folder / name}.jsonl (nor .parquet, .json, nor a folder {name} with a file for "
                f"each split); it must hold {source}"
            )
        self._single = single

    def __missing__(self, split: str) -> datasets.Dataset:
        file = self._single if self.one_file else _with_suffix(self.folder / self.name / split)
        if file is None:
            raise UserError(
                f"data: there is no {self.folder / self.name / split}.jsonl (nor .parquet, .json); it must hold "
                f"the split {split} of {self.source}"
            )
        self[split] = read(file)
        return self[split]

    def __contains__(self, split: object) -> bool:
        return self.one_file or _with_suffix(self.folder / self.name / str(split)) is not None


def files_of(folder: Path, name: str) -> list[Path]:
    """The files of all splits of a data set in a folder; none if it is not there."""
    if (folder / name).is_dir():
        return sorted(file for file in (folder / name).iterdir() if file.suffix in SUFFIXES)
    single = _with_suffix(folder / name)
    return [] if single is None else [single]


def read(file: Path) -> datasets.Dataset:
    """The documents in a file.

    Raises:
        UserError: It cannot be read, or holds none.
    """
    try:
        if file.suffix == ".parquet":
            documents = datasets.Dataset(pyarrow.parquet.read_table(file))
        else:
            text = file.read_text(encoding="utf-8")
            rows = (
                json.loads(text) if file.suffix == ".json" else [json.loads(x) for x in text.split("\n") if x.strip()]
            )
            documents = datasets.Dataset.from_list(rows)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # of the JSON, the encoding, or the columns
        raise UserError(f"data: {file} cannot be read as documents: {first_line(error)}") from None
    if not len(documents):
        raise UserError(f"data: {file} holds no documents")
    return documents


def _with_suffix(path: Path) -> Path | None:
    files = (path.with_name(path.name + suffix) for suffix in SUFFIXES)
    return next((file for file in files if file.is_file()), None)
