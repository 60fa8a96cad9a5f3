"""Checks of the section `trainer` of a config, which need no Trainer."""

from jsonargparse import Namespace

from kernels import Option, UserError
from mixers import did_you_mean

LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
# smallest allowed values of arguments that Lightning does not check
MINIMUM = {
    "accumulate_grad_batches": 1,
    "num_nodes": 1,
    "max_steps": -1,
    "min_steps": 0,
    "min_epochs": 0,
    "log_every_n_steps": 0,
    **dict.fromkeys(LIMITS, 0),
}
# limits of a run, which would train nothing if they were 0, and their allowed values
LENGTHS = {
    **dict.fromkeys(("max_steps", "max_epochs"), "at least 1, or -1 for no limit"),
    "limit_train_batches": "above 0",
}
# arguments that would have no effect on these runs, or a wrong one, and what takes their place
REFUSED = {
    "gradient_clip_val": "set optim.gradient_clip instead",
    "gradient_clip_algorithm": "optim.gradient_clip is a limit of the total norm, and the only way to clip",
    "barebones": "set enable_checkpointing, enable_progress_bar, enable_model_summary and logger to false instead",
    "reload_dataloaders_every_n_epochs": "runs are counted in steps, over one stream of batches; leave it out",
}

STRATEGIES = ("auto", "ddp")  # those without a look at Lightning's list


def check_trainer(trainer: Namespace) -> None:
    """Refuse values and arguments that are invalid for every verb.

    Raises:
        UserError: A value is out of range, or its argument is not possible here.
    """
    for name, minimum in MINIMUM.items():
        if (value := trainer.get(name)) is not None and value < minimum:
            raise UserError(f"trainer.{name}: {value} must be at least {minimum}")
    for name, advice in REFUSED.items():
        if value := trainer.get(name):
            raise UserError(f"trainer.{name}: {value} is not possible here; {advice}")
    if isinstance(strategy := trainer.strategy, str) and "." in strategy:
        raise UserError(
            f"trainer.strategy: {strategy} is a class; write ", Option("trainer.strategy.class_path", strategy)
        )
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        from lightning.pytorch.strategies import StrategyRegistry  # slow, and seldom needed

        if strategy not in (names := StrategyRegistry.available_strategies()):
            hint = did_you_mean(strategy, [*STRATEGIES, *names])
            raise UserError(
                f"trainer.strategy: {strategy} is unknown{hint or '; such as ddp, or an overlay of train/'}"
            )
        if "spawn" in strategy:  # a run, with its queues and open files, cannot be sent to another process
            raise UserError(f"trainer.strategy: {strategy} is not possible here; use {strategy.replace('_spawn', '')}")


def check_training(trainer: Namespace) -> None:
    """Refuse what `check_trainer` refuses, runs without steps, and lower bounds that a run cannot reach.

    Raises:
        UserError: A value is wrong.
    """
    check_trainer(trainer)
    for name, allowed in LENGTHS.items():
        if trainer.get(name) == 0:
            raise UserError(f"trainer.{name}: 0 leaves nothing to train; it must be {allowed}")
    if (interval := trainer.val_check_interval) == 0:
        raise UserError(
            f"trainer.val_check_interval: {interval} must be above 0; to skip validation, set limit_val_batches: 0"
        )
    for unit in ("steps", "epochs"):
        minimum, maximum = trainer.get(f"min_{unit}"), trainer.get(f"max_{unit}")
        if minimum is not None and maximum not in (None, -1) and maximum < minimum:
            raise UserError(f"trainer.min_{unit}: {minimum} is above trainer.max_{unit}, {maximum}, where the run ends")
