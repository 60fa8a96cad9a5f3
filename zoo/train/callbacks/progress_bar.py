"""The progress bar of a run, counted in steps."""

import sys
from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from tqdm import tqdm

from zoo.train.lightning_internals import ProgressBars

SHOWN = {  # metric → how it is shown
    "train_loss": "loss {:.3f}",
    "val_loss": "validation {:.3f}",
    "val_accuracy": "accuracy {:.1%}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.0%}",
}


class Progress(ProgressBars):
    """Lightning's bars, but with one over all steps of a run, and only on a terminal those of evaluations.

    (Lightning's first bar restarts with each epoch; runs here are counted in steps.)
    """

    # no percentage and no rate, which leaves room for the bar next to the metrics
    BAR_FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Write a line above the bars; it takes the arguments of the built-in `print`."""
        tqdm.write(sep.join(map(str, args)), **{"file": sys.stdout, **kwargs})

    def init_train_tqdm(self) -> Tqdm:
        """The bar over all steps, from the current one on, which stays on the screen."""
        steps, total = self.trainer.global_step, self.trainer.max_steps
        return self._bar("training", 0, leave=True, total=total if total > 0 else None, initial=steps)

    def init_sanity_tqdm(self) -> Tqdm:
        """A bar that disappears."""
        return self._bar("sanity check", 1)

    def init_validation_tqdm(self) -> Tqdm:
        """A bar that disappears; below that of the training, unless that is done and text follows it."""
        training = self.training_bar
        return self._bar("validation", 0 if training is None or training.disable else 1)

    def init_test_tqdm(self) -> Tqdm:
        """A bar that disappears."""
        return self._bar("test", 0)

    def init_predict_tqdm(self) -> Tqdm:
        """A bar that disappears."""
        return self._bar("predict", 0)

    def _bar(self, name: str, position: int, leave: bool = False, total: int | None = None, initial: int = 0) -> Tqdm:
        on_terminal = sys.stderr.isatty()
        return Tqdm(
            desc=name,
            position=2 * self.process_position + position,
            disable=self.is_disabled or (not leave and not on_terminal),
            leave=leave,
            total=total,
            initial=initial,
            dynamic_ncols=True,
            mininterval=0.1 if on_terminal else 10,  # fewer lines in a log file
            bar_format=self.BAR_FORMAT,
        )

    def on_train_epoch_start(self, *_: Any) -> None:
        """Go on: an epoch is not what is counted."""

    def on_train_epoch_end(self, *_: Any) -> None:
        """Go on."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Move the bar, and show the latest metrics; on a GPU only at logged steps, since reading them waits for it."""
        bar, interval, step = self.train_progress_bar, trainer.log_every_n_steps, trainer.global_step
        if bar.disable or step == bar.n:
            return
        if pl_module.device.type == "cpu" or (interval and step % interval == 0):
            bar.set_postfix_str(", ".join(self._numbers(trainer)), refresh=False)
        bar.update(step - bar.n)

    def _numbers(self, trainer: L.Trainer) -> Iterator[str]:
        for metric, form in SHOWN.items():
            if (value := trainer.progress_bar_metrics.get(metric)) is not None:
                yield form.format(float(value))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the bar; after the verb `validate`, print how many batches were evaluated."""
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        if trainer.state.fn == "validate":
            self._print_count(trainer, testing=False)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the bar, and print how many batches were evaluated."""
        super().on_test_end(trainer, pl_module)
        self._print_count(trainer, testing=True)

    def _print_count(self, trainer: L.Trainer, testing: bool) -> None:
        if self.is_disabled:
            return
        done, in_split = batches_of(trainer, testing)
        count = f"all {in_split:,}" if done == in_split else f"{done:,} of {in_split:,}"
        limit = "" if done == in_split else f" (trainer.limit_{'test' if testing else 'val'}_batches)"
        self.print(f"{'tested' if testing else 'validated'} on {count} batches{limit}")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close all bars, to leave the terminal usable."""
        self.close_all()


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
