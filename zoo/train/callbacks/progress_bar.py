"""The progress bar of a run, counted in steps."""

import sys
from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

SHOWN = {  # metric → (name, format)
    "train_loss": ("loss", "{:.3f}"),
    "val_loss": ("validation", "{:.3f}"),
    "val_accuracy": ("accuracy", "{:.1%}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
}


class Progress(ProgressBar):
    """One bar over all steps of a run, and a short-lived one over each evaluation.

    (Lightning's bars restart with each epoch; runs here are counted in steps.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bars: list[tqdm] = []

    def disable(self) -> None:
        """Show nothing (on all processes but the first)."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bars again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Write a line above the bars."""
        tqdm.write(" ".join(map(str, args)), file=sys.stdout)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar at the current step."""
        self._open("training", trainer.max_steps, trainer.global_step, leave=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar, and show the latest metrics; on a GPU only at logged steps, since reading them waits for it."""
        bar, interval = self._bars[0], trainer.log_every_n_steps
        if trainer.global_step > bar.n:
            if pl_module.device.type == "cpu" or (interval and trainer.global_step % interval == 0):
                shown = {name: form.format(float(value)) for name, form, value in self._numbers(trainer)}
                bar.set_postfix(shown, refresh=False)
            bar.update(trainer.global_step - bar.n)

    def _numbers(self, trainer: L.Trainer) -> Iterable[tuple[str, str, Any]]:
        for metric, (name, form) in SHOWN.items():
            if (value := trainer.progress_bar_metrics.get(metric)) is not None:
                yield name, form, value

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the finished bar on the screen."""
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close all bars, to leave the terminal usable."""
        while self._bars:
            self._close()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open a bar for the validation."""
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._open("validation", int(sum(batches)) if isinstance(batches, list) else int(batches))

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Move the bar of the evaluation."""
        self._bars[-1].update()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the bar; after the verbs `validate` and `test`, print how many batches were evaluated."""
        self._close()
        if self._enabled and trainer.state.fn in ("validate", "test"):
            testing = trainer.state.fn == "test"
            done, in_split = batches_of(trainer, testing)
            count = f"all {in_split:,}" if done == in_split else f"{done:,} of {in_split:,}"
            limit = "" if done == in_split else f" (trainer.limit_{'test' if testing else 'val'}_batches)"
            self.print(f"{'tested' if testing else 'validated'} on {count} batches{limit}")

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open a bar for the test."""
        self._open("test", int(sum(trainer.num_test_batches)))

    on_test_batch_end, on_test_end = on_validation_batch_end, on_validation_end

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open a bar for the predictions."""
        self._open("predict", int(sum(trainer.num_predict_batches)))

    on_predict_batch_end, on_predict_end = on_validation_batch_end, on_validation_end

    def _open(self, name: str, total: int, done: int = 0, leave: bool = False) -> None:
        on_terminal = sys.stderr.isatty()
        self._bars.append(
            tqdm(
                desc=name,
                total=total if total > 0 else None,
                initial=done,
                leave=leave,
                disable=not self._enabled or (not leave and not on_terminal),
                dynamic_ncols=True,
                mininterval=0.1 if on_terminal else 10,  # fewer lines in a log file
                unit=" steps" if leave else " batches",
            )
        )

    def _close(self) -> None:
        self._bars.pop().close()


def batches_of(trainer: L.Trainer, testing: bool = False) -> tuple[int, int]:
    """Number of batches of a validation or test, with and without the limit of the trainer.

    Args:
        trainer: A trainer whose data loaders are set up.
        testing: Whether to count the test's batches instead of the validation's.
    """
    limited = trainer.num_test_batches if testing else trainer.num_val_batches
    loaders = trainer.test_dataloaders if testing else trainer.val_dataloaders
    all_loaders = loaders if isinstance(loaders, list | tuple) else [] if loaders is None else [loaders]
    return int(sum(limited)), sum(map(len, all_loaders))
