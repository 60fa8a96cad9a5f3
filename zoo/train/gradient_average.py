"""The mean of gradients over processes, in one exchange."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import UserError


class GradientAverage:
    """Averages the gradients of all processes in memory that stays the same, as a CUDA graph needs.

    The gradients of captured passes are already there, so that only those of eager passes are copied.

    Attributes:
        results: The means; None for a parameter without a gradient.
    """

    def __init__(self) -> None:
        self.results: list[Tensor | None] = []
        self._flat: list[Tensor] = []
        self._compared = False

    def forget(self) -> None:
        """Drop the results, for other parameters; all processes must call it."""
        self.results, self._flat, self._compared = [], [], False

    def allocate(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the results, allocated for such gradients unless that is done."""
        if self.results:
            return self.results
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        places: list[int] = []
        for gradient in gradients:
            if gradient is None:
                places.append(0)
                continue
            kind = gradient.dtype, gradient.device
            places.append(sizes.get(kind, 0))
            sizes[kind] = places[-1] + gradient.numel()
        flat = {kind: torch.empty(size, dtype=kind[0], device=kind[1]) for kind, size in sizes.items()}
        self._flat = list(flat.values())
        self.results = [
            None if x is None else flat[x.dtype, x.device][place : place + x.numel()].view(x.shape)
            for x, place in zip(gradients, places, strict=True)
        ]
        return self.results

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        """Compute the results; all processes must call it. A gradient that only this process lacks counts as 0.

        Raises:
            UserError: A gradient was missing when the results were allocated, or in the first step only some processes
                have a gradient of a parameter.
        """
        self.allocate(gradients)
        if not self._agrees(gradients):
            raise UserError(
                "cuda_graph: captured steps of several processes require gradients of the same parameters in every "
                "step; use trainer.strategy=ddp_find_unused_parameters_true, whose steps are not captured"
            )
        for result, gradient in zip(self.results, gradients, strict=True):
            if result is not None and gradient is None:
                result.zero_()
        pairs = [
            (result, gradient)
            for result, gradient in zip(self.results, gradients, strict=True)
            if result is not None and gradient is not None and result is not gradient
        ]
        if pairs:
            torch._foreach_copy_([result for result, _ in pairs], [gradient for _, gradient in pairs])
        for flat in self._flat:
            if dist.get_backend() == "nccl" and flat.dtype == torch.float32:  # NCCL rounds 1/n to the dtype
                dist.all_reduce(flat, dist.ReduceOp.AVG)
            else:  # Gloo has only sums
                flat.mul_(1 / dist.get_world_size())
                dist.all_reduce(flat)

    def _agrees(self, gradients: Sequence[Tensor | None]) -> bool:
        """Return whether no gradient lacks a result and, in the first step, all processes have the same results."""
        extra = [x is None and gradient is not None for x, gradient in zip(self.results, gradients, strict=True)]
        if self._compared:
            return not any(extra)
        self._compared = True
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        # with one half for an extra gradient, the sum is neither 0 nor the number of processes
        present = [0.5 if more else float(x is not None) for more, x in zip(extra, self.results, strict=True)]
        total = torch.tensor(present, device=device)
        dist.all_reduce(total)
        return bool(((total == 0) | (total == dist.get_world_size())).all())
