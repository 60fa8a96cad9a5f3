"""Timed training steps on a loss, without Lightning."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from zoo.performance.model import running
from zoo.performance.timing import Clock
from zoo.train.adamw import AdamW
from zoo.train.captured_step import CapturedStep
from zoo.train.muon import Muon
from zoo.train.optim import Optimisation, build_optimizer, clip, total_norm


class TimedLearner:
    """A model with its optimiser and a clock, trained on a loss.

    Args:
        model: The model to train.
        optim: The optimiser and its settings; the learning rate stays constant.
        precision: 32-true, bf16-true, 16-true or bf16-mixed.
        backend: Backend of the kernels.
        loss: Computes the mean loss of a micro-batch.
        cuda_graph: Whether to capture the step as CUDA graphs.
        micro_batches: Number of forward and backward passes in a step.

    Attributes:
        captured: The captured step; None if it runs eagerly.
        clock: Has marks at the start of each step, after each forward and each backward pass, and at the end.
        peak_gib: Largest memory in use on a GPU; None until it is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: Optimisation,
        precision: str,
        backend: str,
        loss: Callable[[], Tensor],
        *,
        cuda_graph: bool = False,
        micro_batches: int = 1,
    ) -> None:
        self.model, self.micro_batches = model, micro_batches
        self.device = next(model.parameters()).device
        self.clock = Clock(self.device)
        self.peak_gib: float | None = None

        def computed() -> Tensor:
            with running(precision, self.device, backend):
                return loss()

        self.loss = computed
        self.gradient_clip, self.optimizer = optim.gradient_clip, build_optimizer(model, optim)
        self.captured = CapturedStep(lambda: (computed(),), model.parameters()) if cuda_graph else None
        if self.captured is not None and isinstance(self.optimizer, AdamW | Muon):
            self.optimizer.replay = partial(self.captured.update, self.optimizer)

    def step(self) -> None:
        """Run a training step without synchronising, so that the device stays busy while the host prepares the next."""
        self.clock.mark()
        for micro_batch in range(self.micro_batches):
            first = micro_batch == 0
            if self.captured is not None:
                self.captured.prepare(first=first)
            loss = self.loss() if self.captured is None else self.captured(first=first)[0]
            self.clock.mark()
            (loss if self.micro_batches == 1 else loss / self.micro_batches).backward()
            self.clock.mark()
        self._update()
        self.clock.mark()

    def _update(self) -> None:
        """Clip the gradients, apply them and drop them."""
        if self.gradient_clip is not None and self.captured is not None:
            self.captured.clip(self.gradient_clip, self.captured.gradient_norm())
        elif self.gradient_clip is not None:
            trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            clip(trained, self.gradient_clip, total_norm(x.grad for x in trained if x.grad is not None))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def measured(self, tokens: int) -> dict[str, Any]:
        """Medians over the steps since the clock was last read, of `tokens` tokens each, and the most memory."""
        intervals, parts = self.clock.between(), 2 * self.micro_batches
        steps = [intervals[at : at + parts + 1] for at in range(0, len(intervals), parts + 2)]  # one more between steps
        return {
            "step_ms": (step_ms := statistics.median(map(sum, steps))),
            "forward_ms": statistics.median(sum(step[:parts:2]) for step in steps),
            "backward_ms": statistics.median(sum(step[1:parts:2]) for step in steps),
            "optimiser_ms": statistics.median(step[parts] for step in steps),
            "tokens_per_second": tokens / step_ms * 1e3,
            "peak_gib": self.peak_gib,
        }
