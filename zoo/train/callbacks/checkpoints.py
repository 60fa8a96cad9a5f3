"""When a run saves checkpoints, and how it stops: always between two optimiser steps."""

import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from tqdm import tqdm

from kernels.errors import UserError
from zoo.checkpoints.background import Background
from zoo.checkpoints.io import AtomicCheckpointIO
from zoo.checkpoints.zero_shards import SHARDS
from zoo.files.atomic import atomic_link
from zoo.files.output import make_folder
from zoo.train.callbacks.loss_guard import Diverged
from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.devices import free_memory
from zoo.train.fsdp2 import FSDP2
from zoo.train.lightning_internals import row_to_log, signal_connector, validation_follows
from zoo.train.metrics_file import MetricsFile
from zoo.train.results import rank
from zoo.train.signals import Agreement
from zoo.train.trainer import Signals, install

PERMANENT = re.compile(r"step-(0\d{7}|[1-9]\d{7,})\.ckpt")  # names of `keep_every_n_steps`, and no others


class Checkpoints(RunCallback, Checkpoint):
    """Writes `last.ckpt` and `best.ckpt`, and saves when the run is stopped by a signal.

    On Ctrl-C, SIGTERM or SIGHUP the step in progress is finished and saved, and the run ends; saving in the middle of
    an optimiser step would save half of it. A second Ctrl-C stops immediately, without saving. Several processes all
    stop one step later, whichever of them received the signal.

    Args:
        every_n_steps: Save `last.ckpt` every N optimiser steps; it is also saved after each validation and at the end.
            If a validation follows the step, one process saves once, after it: a SIGKILL during the validation loses
            the steps since the checkpoint before. Several processes save before and after it.
        every_n_minutes: Also save `last.ckpt` when the last one is N minutes old; null ignores the clock.
        keep_every_n_steps: Keep a permanent checkpoint, `step-00001000.ckpt`, every N optimiser steps; null keeps none.
        keep_last: Keep only the newest N permanent checkpoints; null keeps all.
        in_background: Copy the state to host memory, which must have room for it, and write while training continues.
            The next checkpoint and the end of the run wait for the write, and raise if it failed. Null does so on a
            GPU if the copy fits into half of the free host memory. FSDP2 needs its `sharded_checkpoints` for it.
        folder: Folder of the checkpoints, inside the run's folder.

    Raises:
        UserError: An argument is out of range.
    """

    key = "checkpoints"
    order = 120

    def __init__(
        self,
        every_n_steps: int = 500,
        keep_every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        keep_last: int | None = None,
        in_background: bool | None = None,
        folder: str = "checkpoints",
    ) -> None:
        super().__init__()
        counts = {"every_n_steps": every_n_steps, "keep_every_n_steps": keep_every_n_steps, "keep_last": keep_last}
        for name, number in counts.items():
            if number is not None and number < 1:
                raise UserError(f"checkpoints.{name} is {number}, but must be 1 or more.")
        if every_n_minutes is not None and not every_n_minutes > 0:
            raise UserError(f"checkpoints.every_n_minutes is {every_n_minutes}, but must be above 0.")
        if keep_last is not None and keep_every_n_steps is None:
            raise UserError(
                f"checkpoints.keep_last is {keep_last}, but keep_every_n_steps is null, so no checkpoint is "
                "permanent; set checkpoints.keep_every_n_steps, or keep_last to null."
            )
        if folder and (PurePath(folder).is_absolute() or ".." in PurePath(folder).parts):
            raise UserError(f"checkpoints.folder: {folder!r} is not inside the run's folder; name a relative folder.")
        self.every_n_steps, self.every_n_minutes = every_n_steps, every_n_minutes
        self.keep_every_n_steps, self.keep_last = keep_every_n_steps, keep_last
        self.in_background, self.folder = in_background, folder
        self.best_model_path = ""  # Lightning reads this attribute for `ckpt_path="best"`
        self.best_model_score: float | None = None
        self._best_step = -1
        self._row: dict[str, float] = {}  # metrics of a saved step, written to the log after the checkpoint
        self._row_step: int | None = None  # that step; a later checkpoint may be due to a signal during a validation
        self._continued = Path()  # the checkpoint from which the run continues
        self._saved_step = 0
        self._saved_at = 0.0  # seconds of the monotonic clock
        self._started_step = 0  # the step count when the batch in progress began
        self._postponed = False  # a checkpoint of this step is due after its validation
        self._between_steps = False  # no step is in progress, and there is something to save
        self._signals: Signals | None = None
        self._agreement: Agreement | None = None  # of several processes
        self._stop_signal = 0  # the signal that is to end the run, already saved, at the next opportunity
        self._background: Background | None = None  # writes the checkpoints; None: this thread does

    def state_dict(self) -> dict[str, Any]:
        """The best loss so far, so that a resumed run does not mistake a worse model for the best."""
        best = {"best_model_path": self.best_model_path, "best_model_score": self.best_model_score}
        return {**best, "best_step": self._best_step, "row": self._row, "row_step": self._row_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_model_path = state_dict["best_model_path"]
        self.best_model_score = state_dict["best_model_score"]
        self._best_step = state_dict.get("best_step", -1)
        self._row, self._row_step = state_dict.get("row", {}), state_dict.get("row_step")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Install the atomic writer, and check before the first step that the folder is writable.

        Raises:
            UserError: The folder is not writable, or the strategy cannot write in the background.
        """
        install(trainer)
        if stage != "fit" or trainer.fast_dev_run:
            return
        self._continued = Path()
        make_folder(self._folder(trainer), "checkpoints.folder")
        strategy = trainer.strategy
        if isinstance(strategy, FSDP2):
            possible, advice = strategy.sharded_checkpoints, ", or set the strategy's sharded_checkpoints to true"
        else:
            possible, advice = type(strategy).save_checkpoint is Strategy.save_checkpoint, ""
            possible = possible and isinstance(strategy.checkpoint_io, AtomicCheckpointIO)
        if self.in_background and not possible:
            raise UserError(
                f"checkpoints.in_background is true, but {type(strategy).__name__} writes its checkpoints itself, "
                f"and not in the background: set it to false{advice}."
            )
        self._background = Background() if self._writes_in_background(strategy, pl_module, possible) else None

    def _writes_in_background(self, strategy: Strategy, module: nn.Module, possible: bool) -> bool:
        if self.in_background is not None or not possible or strategy.root_device.type != "cuda":
            return bool(self.in_background)
        return strategy.reduce_boolean_decision(_copy_fits(module))  # processes may see different free memory

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note the checkpoint; refuse it if its optimiser state is in ZeRO shards that this strategy does not read."""
        self._continued = Path(trainer.ckpt_path or "")  # some strategies read it only after `on_fit_start`
        unreadable = SHARDS in checkpoint and trainer.strategy.lightning_restore_optimizer
        if trainer.state.fn == "fit" and unreadable:
            raise UserError(
                "the checkpoint was saved by ZeRO, and only ZeRO with as many processes can continue it; a new run "
                "can start from its weights: optim.initial_weights"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_signal, self._between_steps = 0, False
        self._agreement = Agreement(trainer.strategy.root_device) if trainer.world_size > 1 else None
        sharded = isinstance(trainer.strategy, FSDP2)  # it shards the parameters later
        if self._background is not None and trainer.strategy.root_device.type == "cuda" and not sharded:
            self._background.reserve(_copied_bytes(pl_module))

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let signals wait for the end of a step from here on."""
        if isinstance(connector := signal_connector(trainer), Signals):
            self._signals = connector
            self._signals.noted = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the step the run starts from, which does not need to be saved again."""
        self.on_sanity_check_start(trainer, pl_module)  # there may have been no sanity check
        self._between_steps = True
        if self._best_step == trainer.global_step:  # the run may have been killed before best.ckpt was linked
            self._name_best(trainer)
        self._make_up_row(trainer)
        if self._background is not None:
            if isinstance(trainer.strategy, FSDP2):
                trainer.strategy.prepare_background(self._background)
            else:
                self._background.wait()  # CUDA graphs may be captured from here on
        self._saved_step = self._started_step = trainer.global_step
        self._saved_at = time.monotonic()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """End the run here if it is to stop: the metrics of the last step are written by now."""
        self._end_if_stopping(trainer)
        self._between_steps = False
        self._started_step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Save if a checkpoint is due, if the run is complete, or if it is to stop; a validation saves at its end."""
        self._between_steps = True
        step = trainer.global_step
        if step == self._started_step:  # gradients are still being accumulated
            return
        complete = step == trainer.max_steps
        outdated = self.every_n_minutes is not None and time.monotonic() - self._saved_at > 60 * self.every_n_minutes
        stop_signal, due = self._largest_over_processes(int(outdated))
        self._stop_signal = 0 if complete else stop_signal
        keep = self.keep_every_n_steps is not None and step % self.keep_every_n_steps == 0
        if self._stop_signal or complete or keep or due or step % self.every_n_steps == 0:
            self._row, self._row_step = row_to_log(trainer), step
            alone = trainer.world_size == 1  # after an exception in a validation, others could not save with this one
            self._postponed = alone and not self._stop_signal and validation_follows(trainer)
            if not self._postponed:
                self._save(trainer)
                self._keep(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop before the validation if the run is to stop; the resumed run starts with it."""
        self._end_if_stopping(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Stop during a validation too, unless it is the final one."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._stop_signal = self._largest_over_processes(0)[0]
        if trainer.global_step == trainer.max_steps:
            self._stop_signal = 0
        if self._stop_signal:
            self._save(trainer)
            self._end_if_stopping(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, and keep the model with the lowest validation loss."""
        loss = trainer.callback_metrics.get("val_loss")
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
            return
        if loss is None:
            if self._postponed:
                self._save(trainer)
            return
        if trainer.global_step == 0:  # nothing is trained yet
            return
        better = rank(loss.item()) < rank(self.best_model_score)
        if better:
            self.best_model_score, self._best_step = loss.item(), trainer.global_step
            self.best_model_path = str(self._folder(trainer) / "best.ckpt")
        self._save(trainer, force=True)  # now with the validation done, and the best loss
        if better:
            self._copy(trainer, "best.ckpt")

    def complete(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After the final validation: the last step may be the best, and its checkpoint exists."""
        self._make_up_row(trainer)
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None and loss.isfinite() and rank(loss.item()) <= rank(self.best_model_score):
            self._name_best(trainer)

    def _make_up_row(self, trainer: L.Trainer) -> None:
        if self._row_step not in (None, trainer.global_step):  # None: saved by an earlier version
            return
        for logger in trainer.loggers:
            if self._row and isinstance(logger, MetricsFile):
                logger.make_up(self._row, trainer.global_step - 1)

    def _name_best(self, trainer: L.Trainer) -> None:
        """Link `best.ckpt` to the checkpoint that the run was resumed from."""
        target, here = self._folder(trainer) / "best.ckpt", self._continued.resolve().parent
        if trainer.is_global_zero and self._continued.is_file() and here == target.resolve().parent:
            atomic_link(self._continued, target)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save a run that a limit on time or epochs ended."""
        self._save(trainer)
        self._wait()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save the last step of an interrupted run unless a step is in progress, and print how to continue."""
        stopped = isinstance(exception, KeyboardInterrupt | SIGTERMException | Diverged)
        # after a signal, any exception may be due to it
        signalled = self._signals is not None and self._signals.wish is not None
        if trainer.state.fn != "fit" or not (stopped or signalled):
            for finish in (partial(self._save_postponed, trainer), self._wait):
                try:
                    finish()
                except Exception as error:  # report it in addition to the exception that ends the run
                    _print(str(error))
            return
        # saving needs all processes, and these exceptions are raised in all of them
        in_all = trainer.world_size == 1 or isinstance(exception, SIGTERMException | Diverged)
        if (self._between_steps or isinstance(exception, Diverged)) and in_all:  # Diverged is raised after a step
            self._save(trainer)
        self._wait()
        if trainer.is_global_zero and self._saved_step:
            command = f"python cli.py fit --resume {trainer.default_root_dir}"
            _print(f"Stopped; step {self._saved_step} is saved in {self._folder(trainer)}. Continue with: {command}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore signals that end the process."""
        self._between_steps = False
        if self._signals is not None:
            self._signals.noted = False

    def _largest_over_processes(self, number: int) -> list[int]:
        """The signal that is to stop the run (0: none) and a number, each the largest over all processes."""
        local = [(self._signals and self._signals.wish) or 0, number]
        return local if self._agreement is None else self._agreement.share(*local)

    def _end_if_stopping(self, trainer: L.Trainer) -> None:
        if self._stop_signal and self._signals is not None:
            number, self._stop_signal = self._stop_signal, 0
            raise self._signals.end(number)

    def _folder(self, trainer: L.Trainer) -> Path:
        return Path(trainer.default_root_dir) / self.folder

    def _save(self, trainer: L.Trainer, force: bool = False) -> None:
        """Write `last.ckpt`, in all processes, unless it has this step already and `force` is false."""
        postponed, self._postponed = self._postponed, False
        if trainer.fast_dev_run or trainer.global_step == 0 or (trainer.global_step == self._saved_step and not force):
            return
        last = self._folder(trainer) / "last.ckpt"
        trainer.save_checkpoint(last, weights_only=False, storage_options=self._background)
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        if postponed:
            self._keep(trainer)

    def _save_postponed(self, trainer: L.Trainer) -> None:
        if self._postponed and self._between_steps:
            self._save(trainer)

    def _keep(self, trainer: L.Trainer) -> None:
        """Keep the checkpoint just saved, if its step is one of `keep_every_n_steps`, and remove older ones."""
        step, every = trainer.global_step, self.keep_every_n_steps
        if every is not None and step % every == 0 and not trainer.fast_dev_run:
            self._copy(trainer, f"step-{step:08d}.ckpt")
            self._remove_oldest(trainer, f"step-{step:08d}.ckpt")

    def _wait(self) -> None:
        """Wait until the last checkpoint is written, or raise the error of the write."""
        if self._background is not None:
            self._background.wait()

    def _when_written(self, job: Callable[[], None]) -> None:
        """Call `job` when the checkpoint is written: now, or after the background write."""
        if self._background is None:
            job()
        else:
            self._background.add(job)

    def _copy(self, trainer: L.Trainer, name: str) -> None:
        """Keep the checkpoint just saved under another name."""
        last = self._folder(trainer) / "last.ckpt"
        if last.is_dir():  # a sharding strategy writes a folder
            trainer.save_checkpoint(self._folder(trainer) / name, weights_only=False)
        elif trainer.is_global_zero:
            self._when_written(partial(atomic_link, last, self._folder(trainer) / name))

    def _remove_oldest(self, trainer: L.Trainer, written: str) -> None:
        """Remove permanent checkpoints beyond `keep_last`, of which one was just written."""
        if self.keep_last is not None and trainer.is_global_zero:
            self._when_written(partial(_remove_all_but, self.keep_last, self._folder(trainer), written))


def _copy_fits(module: nn.Module) -> bool:
    """Return whether a copy of the state fits into half of the free host memory: weights and two moments in fp32."""
    memory = free_memory()
    return memory is not None and 12 * sum(parameter.numel() for parameter in module.parameters()) < memory / 2


def _copied_bytes(module: nn.Module) -> list[int]:
    """The sizes of what a checkpoint copies: the weights, and two moments of those that are trained."""
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return [parameter.nbytes for parameter in (*parameters, *trained, *trained)]


def _remove_all_but(number: int, folder: Path, written: str) -> None:
    steps = {path: PERMANENT.fullmatch(path.name) for path in folder.glob("step-*.ckpt") if not path.is_symlink()}
    # what was just written counts as the newest, even next to later steps of an earlier attempt
    ages = {path: (path.name == written, int(step[1])) for path, step in steps.items() if step is not None}
    for path in sorted(ages, key=lambda path: ages[path])[:-number]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _print(text: str) -> None:
    tqdm.write(text, file=sys.stderr)  # above a progress bar, if any
