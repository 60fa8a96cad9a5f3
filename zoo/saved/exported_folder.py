"""Exported folders: `config.yaml`, weights as safetensors, `tokenizer.json`; `hashes.json` lists the files."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kernels import UserError
from zoo.checkpoints.tensor_files import Weights, write_tensor_files
from zoo.files.atomic import exchange_folders, sync, sync_all
from zoo.files.hashing import digest, file_digest
from zoo.files.output import keep_others
from zoo.files.sealed_json import sealed, unsealed

HASHES = "hashes.json"
CONFIG, TOKENIZER = "config.yaml", "tokenizer.json"


class ExportedFiles:
    """The files of an exported folder, each read once and compared with `hashes.json`, if the folder has one.

    Raises:
        UserError: A file is missing or damaged; when its contents are first needed.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._texts: dict[str, bytes] = {}  # of small files

    @cached_property
    def _listed(self) -> dict[str, Any]:
        """The contents of `hashes.json`, after the check of all files that it lists; {} without it."""
        file = self._folder / HASHES
        if not file.exists():
            return {}
        advice = "without it, the files in its folder are loaded unchecked"
        try:
            written = file.read_bytes()
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}); {advice}.") from None
        contents = unsealed(written, str(file), advice=advice)
        files = contents.get("files")
        if sealed(contents) != written or not isinstance(files, dict):  # the seal does not cover white space
            raise UserError(f"{file} is damaged (it is not as it was written); {advice}.")
        for name, entry in files.items():
            path = self._folder / name
            if Path(name).name != name:
                raise UserError(f"{file} is refused: {name} is not in its folder.")
            if not path.is_file():
                raise UserError(f"{self._folder} is incomplete: {name} is missing.")
            if _entry(self._bytes(name) if name in (CONFIG, TOKENIZER) else path) != entry:
                raise UserError(
                    f"{path} is damaged: its bytes are not those that were exported (if you changed it yourself, "
                    f"delete {file})."
                )
        return contents

    def check(self) -> None:
        """Compare all files with the list, once."""
        _ = self._listed

    @property
    def signature(self) -> Any:
        """The signature of the config; None without one."""
        return self._listed.get("signature")

    def digest(self, file: Path) -> str:
        """The hash of a file with weights."""
        entry = self._listed.get("files", {}).get(file.name)
        return file_digest(file) if entry is None else entry["xxh3_128"]

    def read(self, name: str) -> bytes:
        """The bytes of `config.yaml` or `tokenizer.json`, which are those that were checked."""
        self.check()
        return self._bytes(name)

    def _bytes(self, name: str) -> bytes:
        if name not in self._texts:
            self._texts[name] = (self._folder / name).read_bytes()
        return self._texts[name]


def _entry(content: bytes | Path) -> dict[str, int | str]:
    if isinstance(content, Path):
        return {"bytes": content.stat().st_size, "xxh3_128": file_digest(content)}
    return {"bytes": len(content), "xxh3_128": digest(content)}


def hashes(files: Mapping[str, bytes | Path], signature: str | None) -> bytes:
    """The contents of `hashes.json` for files (name → content, or where it is) and the signature of their config."""
    return sealed({"files": {name: _entry(content) for name, content in files.items()}, "signature": signature})


def write_folder(
    folder: Path,
    files: Mapping[str, str],
    weights: Weights,
    max_bytes: int | None = None,
    *,
    hashed: bool = False,
    signature: str | None = None,
) -> None:
    """Write a folder that appears when all its files are complete; memory holds one shard of the weights at a time.

    The model of an existing folder is replaced in one step; other files there stay. Call `check_output` before.

    Args:
        folder: The folder.
        files: File name → text, such as `config.yaml`.
        weights: What to write as safetensors.
        max_bytes: Largest size of a file with weights; None for a single file.
        hashed: Whether to write `hashes.json`, with the `signature` of the config.

    Raises:
        UserError: The folder is not writable.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True) as temporary:
            partial = Path(temporary) / folder.name  # inside, as only its owner can read a temporary folder
            partial.mkdir()
            for name, text in files.items():
                (partial / name).write_bytes(text.encode())
            names = [*files, *write_tensor_files(weights, partial, max_bytes)]
            if hashed:
                (partial / HASHES).write_bytes(hashes({name: partial / name for name in names}, signature))
            sync_all(partial)
            if folder.is_dir():
                keep_others(folder, partial)
                exchange_folders(partial, folder)  # the old one is removed with the temporary folder
            else:
                partial.rename(folder)
                sync(folder.parent)
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror or error}") from error
