"""The progress bar of a run, counted in steps."""

import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from tqdm import tqdm

from zoo.display import bar_settings
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

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Write a line above the bars; it takes the arguments of the built-in `print`."""
        tqdm.write(sep.join(map(str, args)), **{"file": sys.stdout, **kwargs})

    def init_train_tqdm(self) -> Tqdm:
        """The bar over all steps, from the current one on, which stays on the screen."""
        steps, total = self.trainer.global_step, self.trainer.max_steps
        return self._bar("training", 0, leave=True, total=total if total > 0 else None, initial=steps)

    # these disappear
    def init_sanity_tqdm(self) -> Tqdm:
        return self._bar("sanity check", 1)

    def init_validation_tqdm(self) -> Tqdm:
        training = self.training_bar  # the bar is below it, unless it is done and text follows it
        return self._bar("validation", 0 if training is None or training.disable else 1)

    def init_test_tqdm(self) -> Tqdm:
        return self._bar("test", 0)

    def init_predict_tqdm(self) -> Tqdm:
        return self._bar("predict", 0)

    def _bar(self, name: str, position: int, leave: bool = False, total: int | None = None, initial: int = 0) -> Tqdm:
        return Tqdm(
            desc=name,
            unit=" steps",
            position=2 * self.process_position + position,
            disable=self.is_disabled or (not leave and not sys.stderr.isatty()),
            leave=leave,
            total=total,
            initial=initial,
            **bar_settings(),
        )

    def on_train_epoch_start(self, *_: Any) -> None:
        """Do nothing: an epoch is not what is counted."""

    on_train_epoch_end = on_train_epoch_start

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Move the bar, and show the latest metrics; on a GPU only at logged steps, since reading them waits for it."""
        bar, interval, step = self.train_progress_bar, trainer.log_every_n_steps, trainer.global_step
        if bar.disable or step == bar.n:
            return
        if pl_module.device.type == "cpu" or (interval and step % interval == 0):
            metrics = dict(trainer.progress_bar_metrics)
            if (loss := trainer.callback_metrics.get("train_loss")) is not None:
                metrics["train_loss"] = loss.item()
            numbers = [form.format(float(metrics[name])) for name, form in SHOWN.items() if name in metrics]
            bar.set_postfix_str(", ".join(numbers), refresh=False)
        bar.update(step - bar.n)

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
        count = f"all {in_split:,} batches" if done == in_split else f"{done:,} of {in_split:,} batches"
        count = "the only batch" if in_split == 1 else count
        limit = "" if done == in_split else f" (trainer.limit_{'test' if testing else 'val'}_batches)"
        self.print(f"{'tested' if testing else 'validated'} on {count}{limit}")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
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
