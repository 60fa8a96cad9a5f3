"""When a run is saved, and how it ends: never half a step."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tqdm import tqdm

from kernels.errors import UserError
from zoo.checkpoints.background import Background
from zoo.checkpoints.io import AtomicCheckpointIO
from zoo.checkpoints.zero_shards import SHARDS
from zoo.files.atomic import atomic_link
from zoo.train.callbacks.loss_guard import Diverged
from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.metrics_file import MetricsFile
from zoo.train.signals import Agreement, Signals
from zoo.train.trainer import install


class Checkpoints(RunCallback, Checkpoint):
    """Keeps `last.ckpt` and `best.ckpt`, and saves when the run is to stop.

    Ctrl-C, SIGTERM or SIGHUP let the step in progress finish, save it, and end the run; an interrupt in the middle of
    an optimiser step would save half of it. A second Ctrl-C ends at once, without saving. Several processes stop at
    the same step, the one after, whichever of them received the signal.

    Args:
        every_n_steps: Save `last.ckpt` each time that so many optimiser steps are done; also after each validation and
            at the end.
        every_n_minutes: Save `last.ckpt` also when it is so old; null does not look at the clock.
        keep_every_n_steps: Keep a checkpoint for good, `step-00001000.ckpt`, each time that so many optimiser steps
            are done; null keeps none.
        keep_last: Keep only so many of these, the newest; null keeps all.
        in_background: Copy to the host's memory, which must have room for that, and write while training goes on. The
            next checkpoint, and the end of the run, wait until it is written; if it cannot be, they say so.
        folder: Where, inside the run's folder.
        resume_command: What to type to continue; `{run}` is the run's folder.
    """

    key = "checkpoints"
    order = 120

    def __init__(
        self,
        every_n_steps: int = 500,
        keep_every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        keep_last: int | None = None,
        in_background: bool = False,
        folder: str = "checkpoints",
        resume_command: str = "python cli.py fit --resume {run}",
    ) -> None:
        super().__init__()
        if every_n_steps < 1 or (keep_every_n_steps is not None and keep_every_n_steps < 1):
            raise UserError(
                f"every_n_steps is {every_n_steps} and keep_every_n_steps {keep_every_n_steps}, but they count steps: "
                "1 or more."
            )
        if (every_n_minutes is not None and every_n_minutes <= 0) or (keep_last is not None and keep_last < 1):
            raise UserError(f"every_n_minutes is {every_n_minutes} and keep_last {keep_last}, but must be above 0.")
        self.every_n_steps = every_n_steps
        self.every_n_minutes, self.keep_last = every_n_minutes, keep_last
        self.keep_every_n_steps = keep_every_n_steps
        self.in_background = in_background
        self.folder = folder
        self.resume_command = resume_command
        self.best_model_path = ""  # under this name Lightning looks for `ckpt_path="best"`
        self.best_model_score: float | None = None
        self._best_step = -1
        self._row: dict[str, float] = {}  # of metrics, of the step that was saved last; it is written after that
        self._continued = Path()  # the checkpoint that the run goes on from
        self._saved_step = 0
        self._saved_at = 0.0  # seconds of the monotonic clock
        self._started_step = 0  # the step count when the batch in progress began
        self._between_steps = False  # and there is something to save
        self._signals: Signals | None = None
        self._agreement: Agreement | None = None  # of several processes
        self._stop_signal = 0  # the run is saved, and to be ended by this at the next opportunity
        self._background: Background | None = None  # where checkpoints are written; None: here

    def state_dict(self) -> dict[str, Any]:
        """The best loss so far, so that a continued run does not take a worse model for the best."""
        best = {"best_model_path": self.best_model_path, "best_model_score": self.best_model_score}
        return {**best, "best_step": self._best_step, "row": self._row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue to compare with the best loss of the run."""
        self.best_model_path = state_dict["best_model_path"]
        self.best_model_score = state_dict["best_model_score"]
        self._best_step = state_dict.get("best_step", -1)
        self._row = state_dict.get("row", {})

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Install the atomic writer, and see before the first step whether the folder can be written to."""
        install(trainer)
        if stage != "fit" or trainer.fast_dev_run:
            return
        folder = self._folder(trainer)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the folder {folder} cannot be created: {error.strerror}.") from error
        if not os.access(folder, os.W_OK):
            raise UserError(f"the folder {folder} cannot be written to.")
        if self.in_background:
            strategy = trainer.strategy
            whole = type(strategy).save_checkpoint is Strategy.save_checkpoint
            if not whole or not isinstance(strategy.checkpoint_io, AtomicCheckpointIO):
                raise UserError(
                    f"checkpoints.in_background is true, but {type(strategy).__name__} writes its checkpoints itself, "
                    "and not in the background: set it to false."
                )
            self._background = Background()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse to continue what has the state of its optimiser in shards that this strategy does not read."""
        divided = SHARDS in checkpoint and trainer.strategy.lightning_restore_optimizer
        if trainer.state.fn == "fit" and divided:
            raise UserError(
                "the checkpoint was saved by ZeRO, and only ZeRO with as many processes can continue it; a new run "
                "can start from its weights: optim.initial_weights"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Have the processes know each other's signals."""
        self._stop_signal, self._between_steps = 0, False
        self._continued = Path(trainer.ckpt_path or "")
        self._agreement = Agreement(trainer.strategy.root_device) if trainer.world_size > 1 else None

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on signals wait for a whole step."""
        self._note_signals(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What the run starts from need not be saved again."""
        self._note_signals(trainer)
        self._between_steps = True
        if self._best_step == trainer.global_step:  # it may have been killed before the file had its other name, too
            self._name_best(trainer)
        self._make_up_row(trainer)
        self._saved_step = self._started_step = trainer.global_step
        self._saved_at = time.monotonic()

    def _note_signals(self, trainer: L.Trainer) -> None:
        if isinstance(trainer._signal_connector, Signals):
            self._signals = trainer._signal_connector
            self._signals.noted = True

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End here if the run is to stop: the metrics of the last step are written by now."""
        self._end_if_stopping(trainer)
        self._between_steps = False
        self._started_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time, if the run is complete, or if it is to stop."""
        self._between_steps = True
        step = trainer.global_step
        if step == self._started_step:  # gradients are still being accumulated
            return
        complete = step == trainer.max_steps
        old = self.every_n_minutes is not None and time.monotonic() - self._saved_at > 60 * self.every_n_minutes
        stop_signal, due = self._known_to_all(int(old))
        self._stop_signal = 0 if complete else stop_signal
        keep = self.keep_every_n_steps is not None and step % self.keep_every_n_steps == 0
        if self._stop_signal or complete or keep or due or step % self.every_n_steps == 0:
            logs = trainer._logger_connector.should_update_logs
            row = trainer._results.metrics(on_step=True)["log"] if logs and trainer._results is not None else {}
            self._row = {name: float(value) for name, value in row.items()}
            self._save(trainer)
        if keep:
            self._copy(trainer, f"step-{step:08d}.ckpt")
            self._forget_the_oldest(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A validation is not begun when the run is to stop; the continued run begins with it."""
        self._end_if_stopping(trainer)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """A validation does not hold up a stop, unless it is the last thing that the run does."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._stop_signal, _ = self._known_to_all(0)
        if trainer.global_step == trainer.max_steps:
            self._stop_signal = 0
        if self._stop_signal:
            self._save(trainer)
            self._end_if_stopping(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, and keep the model with the lowest validation loss."""
        loss = trainer.callback_metrics.get("val_loss")
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run or loss is None:
            return
        better = self.best_model_score is None or loss.item() < self.best_model_score
        if better:
            self.best_model_score, self._best_step = loss.item(), trainer.global_step
            self.best_model_path = str(self._folder(trainer) / "best.ckpt")
        self._save(trainer, again=True)  # with the validation behind it, and with the best loss
        if better:
            self._copy(trainer, "best.ckpt")

    def complete(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last step may be the best; its checkpoint is there."""
        self._make_up_row(trainer)
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None and (self.best_model_score is None or loss.item() <= self.best_model_score):
            self._name_best(trainer)

    def _make_up_row(self, trainer: L.Trainer) -> None:
        for logger in trainer.loggers:
            if self._row and isinstance(logger, MetricsFile):
                logger.make_up(self._row, trainer.global_step - 1)

    def _name_best(self, trainer: L.Trainer) -> None:
        """Let `best.ckpt` be what the run was continued from."""
        target = self._folder(trainer) / "best.ckpt"
        if (
            trainer.is_global_zero
            and self._continued.is_file()
            and self._continued.resolve().parent == target.resolve().parent
        ):
            atomic_link(self._continued, target)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what a limit of time or of epochs ended."""
        self._save(trainer)
        self._wait()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save the last step of an interrupted run if none is in progress, and say how to continue."""
        stopped = isinstance(exception, KeyboardInterrupt | SIGTERMException | Diverged)
        signalled = self._signals is not None and self._signals.wish is not None  # what fails then may be the signal's
        if trainer.state.fn != "fit" or not (stopped or signalled):
            try:
                self._wait()
            except (UserError, OSError) as error:  # in addition to what ends the run
                _say(str(error))
            return
        # saving needs all processes
        together = trainer.world_size == 1 or isinstance(exception, SIGTERMException | Diverged)
        if (self._between_steps or isinstance(exception, Diverged)) and together:  # which is raised when a step is done
            self._save(trainer)
        self._wait()
        if trainer.is_global_zero and self._saved_step:
            command = self.resume_command.format(run=trainer.default_root_dir)
            _say(f"Stopped; step {self._saved_step} is saved in {self._folder(trainer)}. Continue with: {command}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Signals end the process again."""
        self._between_steps = False
        if self._signals is not None:
            self._signals.noted = False

    def _known_to_all(self, number: int) -> list[int]:
        """The signal that is to stop the run (0: none) and a number, the largest of all processes."""
        own = [(self._signals and self._signals.wish) or 0, number]
        return own if self._agreement is None else self._agreement.share(*own)

    def _end_if_stopping(self, trainer: L.Trainer) -> None:
        if self._stop_signal and self._signals is not None:
            number, self._stop_signal = self._stop_signal, 0
            raise self._signals.end(number)

    def _folder(self, trainer: L.Trainer) -> Path:
        return Path(trainer.default_root_dir) / self.folder

    def _save(self, trainer: L.Trainer, again: bool = False) -> None:
        """Write `last.ckpt`, in all processes, unless this step is in it (`again`: even then)."""
        if trainer.fast_dev_run or trainer.global_step == 0 or (trainer.global_step == self._saved_step and not again):
            return
        self._wait()
        trainer.save_checkpoint(
            self._folder(trainer) / "last.ckpt", weights_only=False, storage_options=self._background
        )
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def _wait(self) -> None:
        """Until what was saved is written, or raise why it cannot be."""
        if self._background is not None:
            self._background.wait()

    def _when_written(self, job: Callable[[], None]) -> None:
        """Do something with the files; with those that are still being written, later."""
        if self._background is None:
            job()
        else:
            self._background.add(job)

    def _copy(self, trainer: L.Trainer, name: str) -> None:
        """Keep what was just saved under another name."""
        if trainer.fast_dev_run:
            return
        last = self._folder(trainer) / "last.ckpt"
        if last.is_dir():  # a sharding strategy writes a folder
            trainer.save_checkpoint(self._folder(trainer) / name, weights_only=False)
        elif trainer.is_global_zero:
            self._when_written(partial(atomic_link, last, self._folder(trainer) / name))

    def _forget_the_oldest(self, trainer: L.Trainer) -> None:
        """Keep no more checkpoints for good than were asked for."""
        if self.keep_last is not None and trainer.is_global_zero:
            self._when_written(partial(_remove_all_but, self.keep_last, self._folder(trainer)))


def _remove_all_but(number: int, folder: Path) -> None:
    for path in sorted(folder.glob("step-*.ckpt"))[:-number]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)  # above a progress bar, if there is one
