"""Memory and time of a training step on a GPU, estimated without one.

The step passes over the meta device, where tensors have no data: the bytes that exist at a time are the memory of
activations, and all bytes together stand for the memory traffic.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kernels.core.torch_internals import TorchDispatchMode, tree_leaves
from mixers import TokenMixer
from zoo.lm.model import LanguageModel
from zoo.train.callbacks.throughput import TRAINING_FLOPS
from zoo.train.devices import PEAKS
from zoo.train.distillation import Distillation
from zoo.train.metrics import total_loss

# Fitted to 90 steps of 20M to 1.3B parameters in reproductions/measured (mixers_400m.csv, cost_over_size_h100.csv):
# matrix products run at this share of the peak, and a byte that is allocated takes the time of so many transfers.
PRODUCTS, TRAFFIC = 0.75, 3.4
OPTIMISER_TRAFFIC = 28  # bytes a parameter: AdamW reads four numbers in fp32, and writes three


def num_trained(model: LanguageModel) -> int:
    """Return the number of parameters that are not frozen."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def moments(optimizer: Optimizer) -> int:
    """Return how many numbers an optimiser keeps, after a step on the meta device; two a parameter if that fails."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except RuntimeError:  # it reads a number, such as Adafactor
        return 2 * sum(parameter.numel() for parameter in parameters)
    finally:
        optimizer.zero_grad()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() for tensor in kept if tensor.ndim)  # the others count steps


class Allocations(TorchDispatchMode):
    """Counts the bytes that a training step allocates on the meta device, in addition to the weights of its models.

    Attributes:
        rows, length: Of the batch.
        saved, live, peak: Bytes that are kept for the backward pass, now, and at most.
        allocated: Bytes of all tensors together.
    """

    def __init__(self, models: Iterable[LanguageModel], rows: int, length: int) -> None:
        super().__init__()
        self.rows, self.length = rows, length
        self.saved = self.peak = self.allocated = self.live = 0
        self._seen = weakref.WeakSet(x.untyped_storage() for model in models for x in model.parameters())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self.live, self.allocated = self.live + storage.nbytes(), self.allocated + storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def training_pass(
    model: LanguageModel, rows: int, length: int, card: str, distillation: Distillation | None = None
) -> Allocations:
    """Run a training step of a model on the meta device, with the kernels of a GPU. It needs Triton.

    With `distillation` it learns from a teacher, which is on the meta device, too.
    """
    from kernels.gpu.device import GPUS
    from kernels.gpu.listing import listed

    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    gpu = next((gpu for name, gpu in GPUS.items() if name.removeprefix("RTX ") in card), GPUS["A100"])
    teachers = [] if distillation is None else [distillation.teacher]
    with Allocations([model, *teachers], rows, length) as passed:

        def loss() -> Tensor:
            step = partial(total_loss, model) if distillation is None else partial(distillation.total_loss, model)
            result = step(tokens, tokens)
            passed.saved = passed.live
            return result

        listed(loss, gpu)
    return passed


def training_flops(
    model: LanguageModel,
    length: int,
    distillation: Distillation | None = None,
    *,
    recomputed: float = 0,
    masked: bool = True,
) -> float:
    """Return the FLOPs of a training step for each sequence of `length` tokens, with the teacher's forward pass.

    `recomputed` is the share of blocks that the backward pass recomputes, and `masked` whether products count that a
    causal mask leaves out.
    """

    def forward(flops: int, mixers: Iterable[TokenMixer]) -> int:
        return flops - (0 if masked else sum(mixer.masked_flops(length) for mixer in mixers))

    whole = (TRAINING_FLOPS + recomputed) * forward(model.flops(length), model.mixers)
    if distillation is None:
        return whole
    teacher, trained = distillation.teacher, [model.mixers[layer] for layer in distillation.layers]
    alone = TRAINING_FLOPS * forward(sum(mixer.flops(length) for mixer in trained), trained)
    return forward(teacher.flops(length), teacher.mixers) + (alone if trained else whole)


def step_seconds(
    model: LanguageModel,
    passed: Allocations,
    card: str,
    *,
    distillation: Distillation | None = None,
    micro_batches: int = 1,
    recomputed: float = 0,
    shards: int = 1,
) -> float:
    """Return the estimated seconds of an optimiser step on a GPU of `PEAKS`, without exchange between GPUs.

    `passed` is the `training_pass` of one of its micro-batches, `recomputed` the share of blocks that the backward pass
    recomputes, and `shards` the number of GPUs that divide the optimiser's work.
    """
    peak, bandwidth, _ = PEAKS[card]
    flops = passed.rows * training_flops(model, passed.length, distillation, recomputed=recomputed, masked=False)
    optimiser = OPTIMISER_TRAFFIC * num_trained(model) / shards / bandwidth
    return micro_batches * (flops / (PRODUCTS * peak) + TRAFFIC * passed.allocated / bandwidth) + optimiser
