"""Training steps of models that are measured one after the other, each alone on the device."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from zoo import config as configs
from zoo.benchmarks import model as models
from zoo.benchmarks.gate import Gate
from zoo.benchmarks.training import DOES_NOT_FIT, Learner, timed, warmed
from zoo.train.callbacks.throughput import TRAINING_FLOPS

MOST_LEFT = 1  # GiB


class Settings(NamedTuple):
    """Settings that all models have in common."""

    precision: str
    backend: str
    device: torch.device
    steps: int


def checked(config: Sequence[str], parsed: Any, to: Settings, layers: int) -> dict[str, Any]:
    """The gate of a row: whether loss and gradients are right in the first few layers. A note if they are not.

    Args:
        config: Its configs and overrides.
        parsed: The same, parsed.
        to: Precision, backend and device.
        layers: As many as have one of each kind.
    """
    if note := occupied(to.device):
        return {"note": note}
    try:
        gate = _gate(config, parsed, to, layers)
    except torch.OutOfMemoryError:
        return {"note": DOES_NOT_FIT}
    return {"gate": gate.record()} | ({} if gate.passed else {"note": gate.says})


def _gate(config: Sequence[str], parsed: Any, to: Settings, layers: int) -> Gate:
    """The comparison of `checked`."""
    few = models.read([*config, "model.nominal_size=null", f"model.num_layers={min(parsed.model.num_layers, layers)}"])
    model = models.conditioned(models.build(few, to.precision, to.device))
    return models.compared(model, to.precision, to.backend, models.learning)


def allocated(device: torch.device) -> float:
    """GiB in use, of a GPU."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def occupied(device: torch.device) -> str | None:
    """Why a model cannot be measured alone: what one that did not fit has left in memory, or None.

    Not all that PyTorch had allocated when it ran out of memory is always free again.
    """
    left = allocated(device)
    if left < MOST_LEFT:
        return None
    return f"not measured: {left:.0f} GiB are still allocated since a model did not fit; name this one alone"


def trained(parsed: Any, to: Settings, length: int, batch_size: int, bar: Any) -> dict[str, Any]:
    """Sizes, times and memory of a model in training; a note in place of times if it does not fit.

    Args:
        parsed: The config.
        to: Precision, backend, device and number of steps.
        length: Tokens in a sequence.
        batch_size: Sequences in a step.
        bar: A progress bar of steps.
    """
    if note := occupied(to.device):
        return {"note": note}
    try:
        return _steps(parsed, to, length, batch_size, bar)
    except torch.OutOfMemoryError:
        return {"note": DOES_NOT_FIT}
    finally:  # the next model starts with free memory
        gc.collect()
        if to.device.type == "cuda":
            torch.cuda.empty_cache()


def _steps(parsed: Any, to: Settings, length: int, batch_size: int, bar: Any) -> dict[str, Any]:
    """Measure the steps of one model. As a separate function, it frees the model before the next is built."""
    model = models.build(parsed, to.precision, to.device)
    tokens = torch.randint(parsed.model.vocab_size, (batch_size, length + 1), device=to.device)
    optim = configs.instantiate("optim", parsed)
    learner = Learner(model, optim, to.precision, to.backend, lambda: models.mean_loss(model, tokens))
    row: dict[str, Any] = {"parameters": model.num_parameters(), "state_size": model.state_size(length)}
    if warmed(row, learner, bar):
        timed([(row, learner)], to.steps, bar)
        row |= learner.measured(batch_size * length)
        row["tflops"] = TRAINING_FLOPS * model.flops(length) / length * row["tokens_per_second"] / 1e12
    return row
