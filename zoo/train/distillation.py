"""Losses of a model against a teacher: the outputs of its layers, or the distribution of the next token."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from kernels.core.recurrence import at_least_fp32
from kernels.errors import UserError
from zoo.arguments import check_not_empty
from zoo.data.batch import NO_LOSS
from zoo.lm.block import mix
from zoo.lm.model import LanguageModel

Match = Literal["logits", "layers"]


@dataclass(frozen=True)
class Teacher:
    """A trained model whose outputs are the target of the training, in place of the next token.

    Args:
        checkpoint: The teacher: a run's folder, a .ckpt file, an exported or a public folder; null for none.
        match: `logits` for KL(teacher ‖ student) of the next token; `layers` for the output of each mixer that is of
            another class than the teacher's, on the teacher's input of that layer. Unless `optim.train_only` is set,
            `layers` trains these mixers only.
        temperature: What logits are divided by. The loss is multiplied by its square, so that gradients keep their
            size.
    """

    checkpoint: str | None = None
    match: Match = "logits"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Raise a UserError for the first value that is out of its range."""
        check_not_empty("teacher.checkpoint", self.checkpoint)
        if self.match not in get_args(Match):
            raise UserError(f"teacher.match: {self.match!r} is not one of {', '.join(get_args(Match))}")
        if not 0 < self.temperature < math.inf:
            raise UserError(f"teacher.temperature is {self.temperature}, but must be above 0 and finite.")


class Distillation:
    """The loss of a student against a teacher. No checkpoint of the student contains the teacher.

    Args:
        settings: The key `teacher` of a config.
        teacher: The model that it names, which is frozen.
        student: The model that is trained.

    Attributes:
        layers: The layers whose outputs are compared; empty for logits.

    Raises:
        UserError: The two models cannot be compared.
    """

    def __init__(self, settings: Teacher, teacher: LanguageModel, student: LanguageModel) -> None:
        self.settings, self.teacher = settings, teacher.eval().requires_grad_(False)
        pairs = list(zip(teacher.mixers, student.mixers, strict=False))
        other = [layer for layer, (theirs, ours) in enumerate(pairs) if type(theirs) is not type(ours)]
        self.layers = other if settings.match == "layers" else []
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # layer → input and output of the teacher's mixer
        sizes = ("vocab_size",) if settings.match == "logits" else ("num_layers", "hidden_size")
        if teacher.head is not None or student.head is not None:
            raise UserError("teacher.checkpoint: models with a head for whole sequences cannot be compared")
        for size in sizes:
            theirs, ours = getattr(teacher, size), getattr(student, size)
            if theirs != ours:
                raise UserError(f"teacher.checkpoint: its {size} is {theirs}, but that of the model is {ours}")
        if settings.match == "layers" and not other:
            raise UserError(
                "teacher.match: layers compares mixers of different classes, and all mixers of the model are of the "
                "teacher's classes; use logits"
            )
        for layer in self.layers:
            teacher.mixers[layer].register_forward_hook(partial(self._record, layer))

    @property
    def train_only(self) -> list[str] | None:
        """Patterns of the parameters to train; None for all."""
        return [f"layers.{layer}.mixer.*" for layer in self.layers] or None

    def total_loss(
        self, student: LanguageModel, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Sum over the tokens that have a label [B,T].

        That is the divergence in nats of each, or the error of the layers' outputs relative to the teacher's: a mean
        over layers, of squared norms, times the number of tokens.
        """
        self.teacher.to(tokens.device, next(student.parameters()).dtype)  # of bf16-true, for instance
        if self.settings.match == "logits":
            temperature = self.settings.temperature
            divergence = student.divergence(tokens, labels, self.teacher, cu_seqlens, temperature=temperature)
            return temperature**2 * divergence
        with torch.no_grad():
            self.teacher.last_hidden(tokens, cu_seqlens=cu_seqlens)
        counted, errors = (labels != NO_LOSS)[..., None], []
        for layer in self.layers:
            x, y = self._seen.pop(layer)
            computed, *_ = mix(student.mixers[layer], x, None, cu_seqlens, None, {})
            error, scale = ((at_least_fp32(each) * counted).square().sum() for each in (computed - y, y))
            errors.append(error / scale.clamp(min=torch.finfo(scale.dtype).tiny))
        return torch.stack(errors).mean() * counted.sum()

    def _record(self, layer: int, _: nn.Module, inputs: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        self._seen[layer] = inputs[0], result[0]


def check_match(now: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> None:
    """Raise a UserError if a checkpoint's optimiser has the parameters of another `match`.

    Args:
        now: The config of this run.
        before: The config of the checkpoint.
    """
    current, saved = (
        teacher["match"] if (teacher := (config or {}).get("teacher") or {}).get("checkpoint") else "nothing"
        for config in (now, before)
    )
    if current != saved and "layers" in (current, saved):
        raise UserError(
            f"teacher.match: this run matches {current}, but the checkpoint was trained to match {saved}; start a new "
            "run from its weights, by optim.initial_weights."
        )
