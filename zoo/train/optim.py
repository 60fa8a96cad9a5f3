"""The optimiser, its learning-rate schedule as a pure function of the step, and the clipping of gradients."""

import copy
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from kernels.errors import UserError
from mixers import Projection
from zoo.arguments import check_not_empty
from zoo.train.adamw import AdamW
from zoo.train.muon import Muon

log = logging.getLogger(__name__)

Schedule = Literal["cosine", "constant", "wsd", "inverse_sqrt"]
DEFAULT_WARMUP = 100  # steps
REHEARSED, FIRST = 10_000, 2  # steps of a schedule that is a class, before the run: at most, and of an unknown length
NEED_WHOLE_TENSORS = (Muon, torch.optim.Muon, torch.optim.Adafactor)  # their updates are not elementwise


@dataclass(frozen=True)
class Optimisation:
    """The optimiser, AdamW unless another is named, with a warm-up and a schedule counted in optimiser steps.

    Args:
        optimizer: A class such as torch.optim.SGD in place of AdamW, with its arguments except `lr` and
            `weight_decay`, which are those here. zoo.train.muon.Muon is Muon for matrices and AdamW for the rest.
        learning_rate: The highest learning rate, reached after the warm-up.
        weight_decay: Decoupled weight decay of matrices; not of vectors, nor of parameters that a module exempts.
        betas: Decay rates of AdamW's first and second moments.
        eps: Added to AdamW's denominator.
        schedule: After the warm-up: `cosine` falls to the end, `constant` stays, `wsd` (warm-up, stable, decay)
            stays and then falls linearly over the last `decay_fraction` of the steps, `inverse_sqrt` falls as
            √(warm-up / step), as in fairseq. Or a class such as torch.optim.lr_scheduler.OneCycleLR with its
            arguments, stepped with the optimiser; the warm-up settings here are then ignored.
        warmup_steps: Steps over which the learning rate rises linearly from 0; 100 unless `warmup_fraction` is given.
        warmup_fraction: The same as a fraction of all steps, below 1, in place of `warmup_steps`.
        decay_fraction: The fraction of all steps over which `wsd` decays, between 0 and 1.
        min_learning_rate_ratio: Where `cosine` and `wsd` end, as a fraction of `learning_rate`. The papers'
            recipes with a cosine name no last rate; their configs have the default here, but StateX's end at 0.
        gradient_clip: The largest allowed total norm of the gradients; null does not clip.
        initial_weights: Start from these weights with a fresh optimiser: a checkpoint, an exported or converted
            folder, a .safetensors file or a saved state dict. To continue a run, use `resume` instead.
        train_only: Patterns of the names of the parameters to train, such as `layers.0.*`, all others staying as they
            are; null trains all.
        fused: Use AdamW's fused kernel; null uses it if all parameters are on a GPU, or all on the CPU.
    """

    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    optimizer: Callable[[Iterable[Any], float], Optimizer] | None = None
    schedule: Schedule | Callable[[Optimizer], LRScheduler] = "cosine"
    warmup_steps: int | None = None
    warmup_fraction: float | None = None
    decay_fraction: float = 0.2
    min_learning_rate_ratio: float = 0.1
    gradient_clip: float | None = 1.0
    initial_weights: str | None = None
    train_only: list[str] | None = None
    fused: bool | None = None

    def __post_init__(self) -> None:
        """Raise a UserError for the first value that is out of its range."""
        check_not_empty("optim.initial_weights", self.initial_weights)
        rules = {
            "learning_rate": (0 < self.learning_rate < math.inf, "above 0 and finite"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more and finite"),
            "betas": (len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two numbers from 0 to below 1"),
            "eps": (0 < self.eps < math.inf, "above 0 and finite"),
            "schedule": (
                callable(self.schedule) or self.schedule in get_args(Schedule),
                f"one of {', '.join(get_args(Schedule))}, or a class",
            ),
            "warmup_steps": (self.warmup_steps is None or self.warmup_steps >= 0, "0 or more"),
            "warmup_fraction": (self.warmup_fraction is None or 0 <= self.warmup_fraction < 1, "from 0 to below 1"),
            "decay_fraction": (0 < self.decay_fraction <= 1, "above 0 and at most 1"),
            "min_learning_rate_ratio": (0 <= self.min_learning_rate_ratio <= 1, "between 0 and 1"),
            "train_only": (self.train_only != [], "a list of patterns, or null"),
            "gradient_clip": (self.gradient_clip is None or self.gradient_clip > 0, "above 0, or null"),
        }
        for field, (holds, allowed) in rules.items():
            if not holds:
                raise UserError(f"optim.{field} is {getattr(self, field)}, but must be {allowed}.")
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise UserError(
                f"optim.warmup_fraction is {self.warmup_fraction} and optim.warmup_steps {self.warmup_steps}, "
                "but only one of them can be given; the other is null."
            )
        for field in ("betas", "eps", "fused"):
            if self.optimizer is not None and getattr(self, field) != getattr(Optimisation, field):
                raise UserError(
                    f"optim.{field} is {getattr(self, field)}, but is for AdamW; those of another optimiser are "
                    "under optim.optimizer.init_args."
                )

    @property
    def schedule_name(self) -> str:
        """The name of the schedule, for results."""
        return self.schedule if isinstance(self.schedule, str) else "custom"

    def warmup(self, total_steps: int) -> int:
        """Steps of the warm-up in a run of `total_steps`; 0 if the schedule is a class."""
        if not isinstance(self.schedule, str):
            return 0
        if self.warmup_fraction is not None:
            return round(self.warmup_fraction * total_steps)
        return DEFAULT_WARMUP if self.warmup_steps is None else self.warmup_steps

    def decay_start(self, total_steps: int) -> int:
        """The step from which the learning rate falls, in a run of `total_steps`; `total_steps` if it never does."""
        if self.schedule not in ("cosine", "wsd", "inverse_sqrt"):
            return total_steps
        stable = round(total_steps * (1 - self.decay_fraction)) if self.schedule == "wsd" else 0
        return max(self.warmup(total_steps), stable)

    def factor(self, step: int, total_steps: int) -> float:
        """The factor, between 0 and 1, of the learning rate after `step` of `total_steps` optimiser steps.

        With `warmup_steps` neither `constant` nor `inverse_sqrt` uses the total.
        """
        warmup = self.warmup(total_steps)
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "inverse_sqrt":
            return math.sqrt(max(warmup, 1) / max(step, 1))
        start = self.decay_start(total_steps)
        progress = min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress
        return self.min_learning_rate_ratio + (1 - self.min_learning_rate_ratio) * shape


def freeze_others(model: nn.Module, train_only: Sequence[str]) -> None:
    """Let only those parameters be trained that one of the patterns matches; a shared one by any of its names.

    Raises:
        UserError: A pattern matches no parameter.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    trained: set[int] = set()
    for pattern in train_only:
        matched = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not matched:
            raise UserError(
                f"optim.train_only: {pattern!r} matches no parameter; names are such as {named[-1][0]}, and * matches "
                "any part of them."
            )
        trained.update(map(id, matched))
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in trained)


def parameter_groups(model: nn.Module, weight_decay: float, split: bool = False) -> list[dict[str, Any]]:
    """Split the trainable parameters into those with weight decay and those without.

    Vectors, scalars, and the parameters that a module lists in its attribute `no_weight_decay` have none. A parameter
    shared by several modules counts once, and is exempt if any of them lists it.

    Args:
        model: The model.
        weight_decay: The decay of parameters that are not exempt.
        split: Whether the matrices of `model.layers` that are not exempt are a group of their own, whose key `hidden`
            is true; it is false in the other groups. Their key `matrices` has the number of rows of each matrix that a
            parameter holds, as a fused projection holds several.

    Returns:
        Parameter groups for an optimiser, in the order of `model.named_parameters()`, without empty groups.
    """
    exempt = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.ndim < 2 or name in getattr(module, "no_weight_decay", ())
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if id(parameter) not in exempt]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": [p for p in trainable if id(p) in exempt], "weight_decay": 0.0},
    ]
    if split:
        blocks = getattr(model, "layers", nn.ModuleList())
        matrices = {id(parameter) for parameter in blocks.parameters() if parameter.ndim == 2}
        groups[0]["params"] = [p for p in decayed if id(p) not in matrices]
        groups = [{**group, "hidden": False} for group in groups]
        hidden = [p for p in decayed if id(p) in matrices]
        groups.insert(0, {"params": hidden, "weight_decay": weight_decay, "hidden": True})
        fused = {id(part.weight): [*part.widths.values()] for part in model.modules() if isinstance(part, Projection)}
        for group in groups:
            group["matrices"] = [fused.get(id(p), [p.shape[0]] if p.ndim else []) for p in group["params"]]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, optim: Optimisation, sharded: bool = False) -> Optimizer:
    """The optimiser of `optim`, for a strategy that may shard each tensor.

    Raises:
        UserError: The optimiser refuses the model or an argument, or cannot be used here.
    """
    if optim.optimizer is not None:
        return _named_optimizer(model, optim, sharded)
    groups = parameter_groups(model, optim.weight_decay)
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = devices in ({"cuda"}, {"cpu"}) if optim.fused is None else optim.fused
    if fused and devices == {"cuda"} and not sharded:
        return AdamW(groups, optim.learning_rate, optim.betas, optim.eps)
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, fused=fused)


def _named_optimizer(model: nn.Module, optim: Optimisation, sharded: bool) -> Optimizer:
    assert optim.optimizer is not None
    try:
        optimizer = optim.optimizer(parameter_groups(model, optim.weight_decay, split=True), optim.learning_rate)
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        advice = "; use zoo.train.muon.Muon, as train/muon.yaml does" if "Muon only supports 2D" in str(error) else ""
        raise UserError(f"optim.optimizer: {_one_line(error)}{advice}") from None
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UserError(f"optim.optimizer is {name}, but the gradients here are dense; use torch.optim.Adam.")
    if sharded and isinstance(optimizer, NEED_WHOLE_TENSORS):
        raise UserError(
            f"optim.optimizer is {name}, which needs whole matrices, and trainer.strategy shards them; use ddp, or an "
            "optimiser whose updates are elementwise."
        )
    decay = inspect.signature(type(optimizer)).parameters.get("weight_decay")
    if decay is not None and optimizer.defaults.get("weight_decay", decay.default) != decay.default:
        raise UserError(
            f"optim.optimizer.init_args.weight_decay is {optimizer.defaults['weight_decay']}: set optim.weight_decay "
            "instead, which exempts vectors."
        )
    return optimizer


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def build_schedule(optimizer: Optimizer, optim: Optimisation, max_steps: int) -> LRScheduler:
    """The learning-rate schedule of a run of `max_steps` steps, -1 if unknown, up to the optimiser's rates.

    Raises:
        UserError: The schedule needs the length and it is unknown, refuses an argument, or fails at a step of the run.
    """
    if not isinstance(optim.schedule, str):
        return _named_schedule(optimizer, optim, max_steps)
    if max_steps < 0 and optim.schedule in ("cosine", "wsd"):
        raise UserError(
            f"optim.schedule is {optim.schedule}, which needs the length of the run: "
            "set trainer.max_steps or trainer.max_epochs, or optim.schedule to constant."
        )
    if max_steps < 0 and optim.warmup_fraction is not None:
        raise UserError(
            f"optim.warmup_fraction is {optim.warmup_fraction} of a run whose length is not known: "
            "set trainer.max_steps or trainer.max_epochs, or optim.warmup_steps instead."
        )
    if 0 <= max_steps < optim.warmup(max_steps):
        log.warning("the run ends within its warm-up (%d of %d steps)", max_steps, optim.warmup(max_steps))
    return LambdaLR(optimizer, lambda step: optim.factor(step, max_steps))


def update_rates(schedule: LambdaLR, groups: Sequence[tuple[Any, float | None]]) -> None:
    """Set learning rates and weight decays of the optimiser to those of the config, at the schedule's step.

    A checkpoint has those that it was written with, and the rates of a schedule that may have had another length.

    Args:
        schedule: The schedule, after a checkpoint was loaded.
        groups: The highest learning rate and the weight decay of each parameter group, as the optimiser was built.
    """
    schedule.base_lrs = [float(rate) for rate, _ in groups]
    rows = zip(schedule.optimizer.param_groups, groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
    for group, (_, weight_decay), base, factor in rows:
        group["initial_lr"] = base
        if weight_decay is not None:
            group["weight_decay"] = weight_decay
        rate = base * factor(schedule.last_epoch)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _named_schedule(optimizer: Optimizer, optim: Optimisation, max_steps: int) -> LRScheduler:
    assert not isinstance(optim.schedule, str)
    rehearsal = copy.copy(optimizer)  # of the same parameters, with separate settings
    rehearsal.param_groups = [dict(group) for group in optimizer.param_groups]
    try:
        schedule = optim.schedule(rehearsal)
    except (ValueError, TypeError) as error:
        raise UserError(f"optim.schedule: {_one_line(error)}") from None
    name = type(schedule).__name__
    if isinstance(schedule, ReduceLROnPlateau):
        raise UserError("optim.schedule is ReduceLROnPlateau, which follows a loss; it must be a function of the step.")
    with warnings.catch_warnings(action="ignore"):  # no optimiser is stepped
        for step in range(1, 1 + (FIRST if max_steps < 0 else min(max_steps, REHEARSED))):
            try:
                schedule.step()
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise UserError(f"optim.schedule: {name} fails after step {step}: {_one_line(error)}") from None
    if optim.warmup_steps or optim.warmup_fraction:
        log.warning("optim.schedule is %s, so the warm-up settings of optim are ignored", name)
    return optim.schedule(optimizer)


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Norm of all gradients as one vector, a scalar. That of gradients in bf16 has the digits of bf16."""
    # several dtypes in one call would fall back from batched kernels to three launches for each tensor
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    norms = [nn.utils.get_total_norm(alike) for alike in by_dtype.values()]
    # a DTensor, whose module takes as long to import as half of PyTorch
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    if len(norms) < 2:
        return norms[0] if norms else torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))


def clip(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients, whose total norm is `norm`, so that it is at most `max_norm`."""
    dtypes = dict.fromkeys(parameter.grad.dtype for parameter in parameters if parameter.grad is not None)
    for dtype in dtypes:
        alike = [p for p in parameters if p.grad is not None and p.grad.dtype == dtype]
        nn.utils.clip_grads_with_norm_(alike, max_norm, norm.to(dtype))
