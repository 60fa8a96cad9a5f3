"""Lightning's private names (tried with Lightning 2.6), which no other file may use.

Functions read or set private fields. Classes give the private methods that a subclass overrides public names.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

Handler = Callable[[int, Any], None]


def is_attached(module: L.LightningModule) -> bool:
    """Return whether a module belongs to a trainer; its property `trainer` raises if it does not."""
    return module._trainer is not None


def device_mesh(module: L.LightningModule) -> DeviceMesh | None:
    """The device mesh of `ModelParallelStrategy`; None with another strategy."""
    return module._device_mesh


def number_rows_from(trainer: L.Trainer, step: int) -> None:
    """Log the next metrics in the row of this step."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def parser_of(cli: "LightningCLI", verb: str) -> "LightningArgumentParser":
    """The parser of one verb of a command line."""
    return cli._parser(verb)


@contextmanager
def logged_with_last_step(trainer: L.Trainer) -> Iterator[None]:
    """Log what the block measures in the row of the last finished step."""
    loop = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped -= 1
    yield
    loop._batches_that_stepped += 1


def validates_this_epoch(trainer: L.Trainer) -> bool:
    """Return whether `check_val_every_n_epoch` asks for a validation in the current epoch."""
    return trainer.fit_loop.epoch_loop._should_check_val_epoch()


def validation_follows(trainer: L.Trainer) -> bool:
    """Return whether a validation follows the training batch that ends."""
    batches, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    if fetcher is None or batches._skip_next_val or batches.val_loop.skip:  # it skips a loader without batches
        return False
    return batches._should_check_val_fx(fetcher)


def is_logged_step(trainer: L.Trainer) -> bool:
    """Return whether loggers get the metrics of the step in progress."""
    return bool(trainer.log_every_n_steps) and trainer._logger_connector.should_update_logs


def logs_steps(module: L.LightningModule) -> bool:
    """Return whether a hook is running in which, by default, Lightning logs a number of one step."""
    hook = module._current_fx_name
    return hook is not None and _FxValidator.check_logging_and_get_default_levels(hook, None, None) == (True, False)


def row_to_log(trainer: L.Trainer) -> dict[str, float]:
    """The metrics that the trainer is about to log for the current step; empty if it logs none."""
    if not trainer._logger_connector.should_update_logs or trainer._results is None:
        return {}
    return {name: float(value) for name, value in trainer._results.metrics(on_step=True)["log"].items()}


def is_plain_ddp(strategy: Strategy) -> bool:
    """Return whether a strategy is DDP without communication hooks, averaged models or unused parameters."""
    if type(strategy) is not DDPStrategy or strategy._ddp_comm_hook is not None:
        return False
    return strategy._model_averaging_period is None and not strategy._ddp_kwargs.get("find_unused_parameters")


def checkpoint_io(strategy: Strategy) -> Any:
    """The checkpoint IO that the user chose; None if it is the strategy's default."""
    return strategy._checkpoint_io


def share_data_only(strategy: ModelParallelStrategy, processes: int) -> None:
    """Make all processes share the data, and none a tensor."""
    strategy._data_parallel_size, strategy._tensor_parallel_size = processes, 1


def signal_connector(trainer: L.Trainer) -> Any:
    """The trainer's signal handlers."""
    return trainer._signal_connector


def replace_signal_connector(trainer: L.Trainer, new: Callable[[L.Trainer], "SignalConnector"]) -> None:
    """Replace the trainer's signal handlers, unless others than Lightning's were chosen.

    Lightning's need a broadcast before each batch, for which every process waits for its GPU; others do not.
    """
    if type(trainer._signal_connector) is _SignalConnector:
        trainer._signal_connector = new(trainer)
        loop = trainer.fit_loop.epoch_loop
        trainer.fit_loop.epoch_loop = EpochLoop(trainer, loop.min_steps, loop.max_steps)
        vars(trainer.fit_loop.epoch_loop).update(vars(loop))  # its data may be attached already


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over batches, without the broadcast of a signal before each."""

    def _broadcast_sigterm_tensor(self) -> None:
        pass


class SignalConnector(_SignalConnector):
    """The signal handlers of a trainer."""

    def handle(self, number: int, handler: Handler) -> None:
        """Install the handler of a signal."""
        self._register_signal(signal.Signals(number), handler)

    def was_ignored(self, number: int) -> bool:
        """Return whether the process ignored a signal before the trainer installed its handlers."""
        return self._original_handlers.get(signal.Signals(number)) is signal.SIG_IGN


class ProgressBars(TQDMProgressBar):
    """Lightning's progress bars, also before they exist."""

    @property
    def training_bar(self) -> Tqdm | None:
        """The bar of the training."""
        return self._train_progress_bar

    def close_all(self) -> None:
        """Close the bars that exist."""
        bars = (self._val_progress_bar, self._train_progress_bar, self._test_progress_bar, self._predict_progress_bar)
        for bar in bars:
            if bar is not None:
                bar.close()


class DeepSpeedSteps(DeepSpeedStrategy):
    """Lightning's strategy for DeepSpeed, in steps that a subclass overrides."""

    def connect_by(self, backend: str) -> None:
        """Connect the processes by a backend of torch.distributed."""
        self._process_group_backend = backend
        self._init_deepspeed_distributed()

    def complete_config(self) -> None:
        """Complete DeepSpeed's configuration."""
        super()._format_config()

    def build_engine(self, model: nn.Module, optimizer: Any, lr_scheduler: Any) -> tuple[Any, Any]:
        """The engine, and its optimiser."""
        raise NotImplementedError

    def set_up_evaluation(self, model: nn.Module) -> None:
        """Prepare the model for evaluation, without an optimiser."""
        raise NotImplementedError

    def _format_config(self) -> None:
        self.complete_config()

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        return self.build_engine(model, optimizer, lr_scheduler)

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        self.set_up_evaluation(model)


class UnclippedPrecision(DeepSpeedPrecision):
    """DeepSpeed's precision, which leaves clipping to the engine: a parameter holds one process's gradient alone."""

    def _clip_gradients(self, model: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        pass
