"""lm-eval's task objects by name, with data from a folder, or from the Hugging Face Hub if that is wanted."""

import json
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import jinja2
import lm_eval.tasks
import numpy as np
from lightning.pytorch.utilities.seed import isolate_rng
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml  # has no public name; it is used here alone

from kernels import UserError
from mixers import did_you_mean
from zoo.arguments import first_line
from zoo.data import Tokenizer
from zoo.evaluation.lm_eval.local_data import Splits
from zoo.evaluation.lm_eval.paper_tasks import PAPER_TASKS, is_ruler

HUB = "hub"  # as `data`: let lm-eval download
THEIRS = Path(lm_eval.tasks.__file__).parent
ESSAY_NEEDLES: dict[str, dict[str, Any]] = {  # how RULER's tasks with needles in essays differ from the first
    "niah_single_2": {},
    "niah_single_3": {"type_needle_v": "uuids"},
    "niah_multikey_1": {"num_needle_k": 4},
    "niah_multivalue": {"num_needle_v": 4},
    "niah_multiquery": {"num_needle_q": 4},
}


def names(name: str, folder: Path | None = None) -> list[str]:
    """The tasks that a name of lm-eval refers to: one task, or the members of a group or tag, of a folder if given.

    Raises:
        UserError: lm-eval has no such name, or it is a group that changes its tasks.
    """
    return list(_members(manager(name, folder=folder), name, name))


def manager(name: str, metadata: dict[str, Any] | None = None, folder: Path | None = None) -> TaskManager:
    """lm-eval's index of tasks, reduced to those that one task needs, or those of a folder."""
    listed = PAPER_TASKS.get(name)
    if folder is None and listed is None and not is_ruler(name):
        return _everything()
    folder = folder or THEIRS / ("ruler" if listed is None else listed.folder)
    return TaskManager(include_path=folder, include_defaults=False, metadata=metadata)


@cache
def _everything() -> TaskManager:
    """The whole index: reading it takes ten seconds."""
    return TaskManager()


def _members(index: TaskManager, name: str, group: str) -> Iterator[str]:
    entry = index.task_index.get(name)
    if entry is None:
        hint = did_you_mean(name, [*index.task_index, *PAPER_TASKS]) or "."
        raise UserError(f"tasks: lm-eval has no task {name!r}{hint}")
    if entry.kind.name == "TAG":
        yield from sorted(entry.tags)
    elif entry.kind.name == "GROUP":
        for member in entry.cfg["task"]:
            if not isinstance(member, str):
                raise UserError(f"tasks: lm_eval/{group} is a group that changes its tasks; name them one by one")
            yield from _members(index, member, group)
    else:
        yield name


def build(
    name: str,
    data: str,
    file: str,
    *,
    seed: int,
    shots: int | None,
    metadata: dict[str, Any],
    folder: Path | None = None,
) -> ConfigurableTask:
    """One task of lm-eval, with its documents.

    Args:
        name: Of a single task.
        data: The folder with its file (see `local_data`), or `hub`.
        file: The file or folder there, without a suffix.
        seed: Of the examples in prompts, and of generated documents.
        shots: How many examples come before each question; None for the task's own number.
        metadata: What lm-eval passes to tasks that generate their documents.
        folder: The folder that defines the task; None for lm-eval's own.

    Raises:
        UserError: The data is not there or does not fit, or the task cannot be done.
    """
    with quiet(), isolate_rng():
        random.seed(seed)  # what generates documents draws from the global generators
        np.random.seed(seed)
        task = _load(name, data, file, metadata, folder)
    if shots is not None:
        task.set_config(key="num_fewshot", value=shots)
    elif task.config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=seed)
    if task.config.num_fewshot and task.fewshot_cfg.samples is None and getattr(task.dataset, "one_file", False):
        raise UserError(
            f"data: lm_eval/{name} with {task.config.num_fewshot} examples takes them from another split, so it needs "
            f"a folder {Path(data) / file} with a file for each split, and not one file"
        )
    unsafe = getattr(task, "UNSAFE_CODE", False)
    if unsafe or getattr(task, "MULTIMODAL", False):
        what = "runs code that the model writes" if unsafe else "is not about text alone"
        raise UserError(f"tasks: lm_eval/{name} {what}; the zoo does not do that")
    return task


def _load(name: str, data: str, file: str, metadata: dict[str, Any], folder: Path | None) -> ConfigurableTask:
    try:
        index = manager(name, metadata, folder)
        local = Path(data).expanduser() if data not in ("", HUB) else None
        task_class = _task_class(index, name, local, file)
        return index.load({"group": "one", "task": [{"task": name, "class": task_class}]})["tasks"][name]
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"lm_eval/{name}: it cannot be imported: {first_line(error.__cause__ or error)}") from None
    except OSError as error:  # all errors of connections are
        raise UserError(
            f"lm_eval/{name}: its data cannot be downloaded ({first_line(error)}); put it into a folder"
        ) from None
    except (LookupError, TypeError, AttributeError, ValueError, jinja2.UndefinedError) as error:
        if data == HUB:
            raise
        raise UserError(
            f"data: the documents of lm_eval/{name} in {data} lack what the data set has "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


def _task_class(index: TaskManager, name: str, folder: Path | None, file: str) -> type[ConfigurableTask]:
    """Return a subclass of a task's class that reads its documents from a folder and shows no progress bar.

    Args:
        index: Lists the task.
        name: Of the task.
        folder: Where its file is; None for documents that lm-eval downloads or generates.
        file: The file or folder there, without a suffix.
    """
    base = load_yaml(index.task_index[name].yaml_path).get("class", _Configured)

    class LocalTask(base):  # type: ignore[misc, valid-type]
        def download(self, *args: Any, **kwargs: Any) -> None:
            if folder is None or (is_ruler(name) and name not in ESSAY_NEEDLES):
                super().download(*args, **kwargs)
                return
            config = f" ({self.DATASET_NAME})" if self.DATASET_NAME else ""
            documents = Splits(folder, file, f"{self.DATASET_PATH}{config}")
            self.dataset = _needles_in(documents["train"], name, self.config.metadata) if is_ruler(name) else documents

        def build_all_requests(self, **kwargs: Any) -> None:
            with redirect_stderr(StringIO()):  # of the bar; `evaluate` has one
                super().build_all_requests(**kwargs)

    return LocalTask


class _Configured(ConfigurableTask):
    """A task that is defined by its config alone, under the constructor that lm-eval expects of a `class`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})


def _needles_in(essays: datasets.Dataset, name: str, metadata: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """Documents of a task of RULER, as lm-eval generates them from the essays that it downloads."""
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE, download_dataset, get_tokenizer
    from lm_eval.tasks.ruler.prepare_niah import generate_samples

    settings = {"type_needle_k": "words", "type_needle_v": "numbers", "num_samples": 500} | ESSAY_NEEDLES[name]
    settings |= {"template": TEMPLATE, "TOKENIZER": get_tokenizer(metadata["tokenizer"]), "type_haystack": "essay"}
    words = " ".join(essays["text"]).split()
    return download_dataset(generate_samples(words, max_seq_length=n, **settings) for n in metadata["max_seq_lengths"])


def tokenizer_folder(tokenizer: Tokenizer) -> TemporaryDirectory[str]:
    """A folder from which `transformers` loads the tokenizer, for tasks that generate prompts of a length."""
    folder = TemporaryDirectory()
    tokenizer.save(folder.name)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (Path(folder.name) / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars of `datasets`, since `evaluate` has one, and lm-eval's warnings of every default."""
    log, bars = logging.getLogger("lm_eval"), not datasets.are_progress_bars_disabled()
    level = log.level
    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        log.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
