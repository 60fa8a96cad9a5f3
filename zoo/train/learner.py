"""Training steps on a loss without Lightning, for benchmarks and estimates."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from zoo.train.adamw import AdamW
from zoo.train.captured_step import CapturedStep
from zoo.train.muon import Muon
from zoo.train.optim import Optimisation, build_optimizer, clip, total_norm


class Learner:
    """A model with its optimiser, trained on a loss.

    Args:
        model: The model to train.
        optim: The optimiser and its settings; the learning rate stays constant.
        loss: Computes the mean loss of a micro-batch.
        cuda_graph: Whether to capture the step as CUDA graphs.
        micro_batches: Number of forward and backward passes in a step.

    Attributes:
        captured: The captured step; None if it runs eagerly.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: Optimisation,
        loss: Callable[[], Tensor],
        *,
        cuda_graph: bool = False,
        micro_batches: int = 1,
    ) -> None:
        self.model, self.loss, self.micro_batches = model, loss, micro_batches
        self.gradient_clip, self.optimizer = optim.gradient_clip, build_optimizer(model, optim)
        self.captured = CapturedStep(lambda: (loss(),), model.parameters()) if cuda_graph else None
        if self.captured is not None and isinstance(self.optimizer, AdamW | Muon):
            self.optimizer.replay = partial(self.captured.update, self.optimizer)

    def step(self, mark: Callable[[], None] = lambda: None) -> None:
        """Run a training step without synchronising, so that the device stays busy while the host prepares the next.

        Args:
            mark: Called at the start, after each forward pass, after each backward pass, and at the end.
        """
        mark()
        for micro_batch in range(self.micro_batches):
            first = micro_batch == 0
            if self.captured is not None:
                self.captured.prepare(first=first)
            loss = self.loss() if self.captured is None else self.captured(first=first)[0]
            mark()
            (loss if self.micro_batches == 1 else loss / self.micro_batches).backward()
            mark()
        self._update()
        mark()

    def _update(self) -> None:
        """Clip the gradients, apply them and drop them."""
        if self.gradient_clip is not None and self.captured is not None:
            self.captured.clip(self.gradient_clip, self.captured.gradient_norm())
        elif self.gradient_clip is not None:
            trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            clip(trained, self.gradient_clip, total_norm(x.grad for x in trained if x.grad is not None))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
