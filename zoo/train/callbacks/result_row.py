"""The results of a run, written when it ends."""

import functools
import json
import logging
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
import xxhash
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from kernels import UserError
from zoo.data.batch import NO_LOSS, Batch
from zoo.data.resumable import ResumableData
from zoo.files.sealed_json import write_sealed
from zoo.lm.size_table import mixer_names, parameters_without_embeddings
from zoo.train.callbacks.progress_bar import batches_of
from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.lightning_internals import number_rows_from
from zoo.train.metrics_file import finite
from zoo.train.results import read_row, result_table

log = logging.getLogger(__name__)

# validation batches on which the loss is measured with the outputs of all mixers set to zero: how much they matter
ZEROED_BATCHES = 4


class ResultRow(RunCallback):
    """Writes `results.json`, the results of a run in one row, and prints a short table.

    Losses are in nats per token; `val_bits_per_byte` is in bits per byte of the text. `status` is `complete`,
    `interrupted` (Ctrl-C, SIGTERM) or `failed`.
    """

    order = 180  # last, when all metrics are final

    def __init__(self) -> None:
        self._row: dict[str, Any] | None = None
        self._parameters = self._without_embeddings = 0
        self._earlier_seconds = 0.0  # of the process or processes that this one resumes
        self._start = time.perf_counter()
        self._trained = self._finishing = False
        self._first: tuple[float, int] | None = None  # when the first step of this process was done, and its tokens

    def state_dict(self) -> dict[str, Any]:
        """The time so far, to which a resumed run adds."""
        return {"wall_seconds": self._wall_seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier_seconds = state_dict["wall_seconds"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Count the parameters, before a strategy shards them."""
        self._parameters = pl_module.model.num_parameters()
        self._without_embeddings = parameters_without_embeddings(pl_module.model)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note that there are steps left to train, so that `on_train_end` will be called."""
        self._trained, self._first = True, None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Note the end of the first batch, which compiles."""
        if self._first is None:
            self._first = time.perf_counter(), pl_module.tokens_seen

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the loss without mixers, and write the row."""
        self._measure(trainer, pl_module, "complete", self._mixers_loss(trainer, pl_module))
        self._write(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table, now that the progress bar is gone."""
        if trainer.fast_dev_run and trainer.is_global_zero:
            Console().print("trainer.fast_dev_run: training and validation work; nothing is kept", style="dim")
        if self._row is not None and trainer.is_global_zero:
            Console().print(result_table(self._row))
            Console().print(_where(trainer, pl_module), style="dim", soft_wrap=True)

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, datamodule: L.LightningDataModule) -> None:
        """After `fit`: write the row of a run that had no steps left, but was killed before it wrote its row."""
        if self._trained or trainer.fast_dev_run:
            return
        folder = Path(trainer.default_root_dir)
        try:
            row = read_row(folder)
        except UserError as error:
            log.warning("%s It is written again.", error)
            row = None
        if row is None or (row["status"], row.get("steps")) != ("complete", trainer.global_step):
            self._finishing = True
            # so that the metrics of the validation go into the row of the last step
            number_rows_from(trainer, trainer.global_step - 1)
            trainer.validate(pl_module, datamodule=datamodule, verbose=False)
            for callback in trainer.callbacks:
                if isinstance(callback, RunCallback):
                    callback.complete(trainer, pl_module)
            self._write(trainer)  # last: a run with complete results is not looked at again
            self.on_fit_end(trainer, pl_module)
        elif trainer.is_global_zero:
            step = max(trainer.global_step, trainer.max_steps)
            Console().print(f"{folder} is complete; --trainer.max_steps above {step} trains it further")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure what the row says if `finish` runs the validation."""
        if self._finishing:
            self._measure(trainer, pl_module, "complete", self._mixers_loss(trainer, pl_module))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write the results so far."""
        if trainer.state.fn == "fit" and trainer.global_step > 0:
            stopped = isinstance(exception, KeyboardInterrupt | SIGTERMException) or trainer.received_sigterm
            with suppress(OSError):  # the disk may be full; the original exception is reported instead
                self._measure(trainer, pl_module, "interrupted" if stopped else "failed", {})
                self._write(trainer)

    def _wall_seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._start

    def _speed_by_clock(self, tokens: int) -> float | None:
        """Tokens per second of everything since the first batch; None without a second one."""
        if self._first is None or self._first[1] == tokens:
            return None
        start, first_tokens = self._first
        return (tokens - first_tokens) / (time.perf_counter() - start)

    def _mixers_loss(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        """The loss on the first validation batches, as is and with the mixers' outputs zeroed."""
        if trainer.val_dataloaders is None:
            return {}
        training = pl_module.training
        pl_module.eval()
        totals, count = [0.0, 0.0], 0
        loaders = trainer.val_dataloaders
        for loaded in islice(loaders[0] if isinstance(loaders, list | tuple) else loaders, ZEROED_BATCHES):
            batch: Batch = trainer.strategy.batch_to_device(loaded)
            count += int((batch.labels != NO_LOSS).sum())
            for index, mixers in enumerate((nullcontext(), pl_module.model.without_mixers())):
                with torch.no_grad(), mixers:
                    totals[index] += trainer.strategy.predict_step(batch, 0).nansum().item()
        pl_module.train(training)
        if not count:
            return {}
        return {"val_loss_same_batches": totals[0] / count, "val_loss_mixers_zeroed": totals[1] / count}

    def _measure(
        self, trainer: L.Trainer, pl_module: L.LightningModule, status: str, mixers: Mapping[str, float]
    ) -> None:
        """Put the row together, in the first process."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        model, metrics = pl_module.model, trainer.callback_metrics
        length = pl_module.context_length or pl_module.context_loss.context_length
        speed = metrics.get("tokens_per_second")
        batches, optim = batches_of(trainer), pl_module.optim
        planned = trainer.max_steps if trainer.max_steps > 0 else trainer.global_step
        forward = model.flops(length) / length if length else None
        row = {
            "run": Path(trainer.default_root_dir).resolve().name,
            "status": status,
            "steps": trainer.global_step,
            "tokens_seen": pl_module.tokens_seen,
            "mixers": mixer_names(model),
            "parameters": self._parameters,
            "parameters_without_embeddings": self._without_embeddings,
            "context_length": length,
            "state_size": model.state_size(length) if length else None,
            "forward_flops_per_token": forward,
            "training_flops_per_token": forward and 3 * forward,
            "val_loss": metrics.get("val_loss"),
            "val_batches": batches[0],
            "val_batches_in_split": batches[1],
            "val_bits_per_byte": metrics.get("val_bits_per_byte"),
            "val_perplexity": metrics.get("val_perplexity"),
            "val_loss_by_position": [finite(loss) for loss in pl_module.loss_by_position],
            "val_loss_by_task": {
                name: finite(metrics.get(f"val_loss_{name}")) for name in (*pl_module.tasks, *pl_module.extra_sets)
            },
            "val_accuracy": metrics.get("val_accuracy"),
            "val_accuracy_by_task": {name: finite(metrics.get(f"val_accuracy_{name}")) for name in pl_module.tasks},
            "val_loss_same_batches": mixers.get("val_loss_same_batches"),
            "val_loss_mixers_zeroed": mixers.get("val_loss_mixers_zeroed"),
            "bigram_loss": bigram_loss(trainer.datamodule),
            "learning_rate": optim.learning_rate,
            "schedule": optim.schedule_name,
            "warmup_steps": optim.warmup(planned),
            "decay_starts": optim.decay_start(planned),
            "tokens_per_step": round(pl_module.tokens_seen / trainer.global_step) if trainer.global_step else None,
            "data_hash": _data_hash(trainer),
            "tokenizer_hash": getattr(pl_module.tokenizer, "hash", None),
            "tokens_per_second": speed,
            "tokens_per_second_by_clock": self._speed_by_clock(pl_module.tokens_seen),
            "wall_seconds": round(self._wall_seconds(), 1),
            "seed": int(os.environ["PL_GLOBAL_SEED"]) if "PL_GLOBAL_SEED" in os.environ else None,
            "torch": torch.__version__,
            "device": _device_name(pl_module.device),
            "devices": trainer.world_size,
            "precision": str(trainer.precision),
            "commit": _commit(),
        }
        self._row = {name: value if isinstance(value, list) else finite(value) for name, value in row.items()}

    def _write(self, trainer: L.Trainer) -> None:
        if self._row is not None:
            write_sealed(Path(trainer.default_root_dir) / "results.json", self._row)


def _where(trainer: L.Trainer, pl_module: L.LightningModule) -> str:
    """Return the path of the results, and a command that uses them."""
    folder = trainer.default_root_dir
    checkpoints = ", checkpoints" if trainer.checkpoint_callbacks else ""
    made = f"results, curve{checkpoints} and config are in {folder}"
    if not trainer.checkpoint_callbacks:
        return made
    verb, prompt = ("validate", "") if pl_module.tokenizer is None else ("generate", ' --prompt "def "')
    return f"{made}\nnext: python cli.py {verb} --checkpoint {shlex.quote(folder)}{prompt}"


def _data_hash(trainer: L.Trainer) -> str | None:
    """A hash of what the samples are, whatever their order; None if the data module is not one of this project's."""
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, ResumableData):
        return None
    identity = {name: value for name, value in data.identity().items() if name not in ("seed", "batch_size")}
    return xxhash.xxh3_64_hexdigest(json.dumps(identity, sort_keys=True, default=str).encode())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


def _commit() -> str | None:
    """The git commit of this code; None unless it runs from a checkout."""
    file = Path(__file__).resolve()
    commands = (["git", "ls-files", "--error-unmatch", file.name], ["git", "rev-parse", "HEAD"])
    try:
        outputs = [subprocess.run(c, cwd=file.parent, capture_output=True, check=True, timeout=10) for c in commands]
    except (OSError, subprocess.SubprocessError):
        return None
    return outputs[-1].stdout.decode().strip()


@functools.lru_cache(maxsize=1)  # computing it counts all training tokens
def bigram_loss(datamodule: L.LightningDataModule | None) -> float | None:
    """The data module's bigram baseline in nats per token; None without one."""
    measure = getattr(datamodule, "bigram_loss", None)
    loss = None if measure is None else measure()
    return None if loss is None else float(loss)
