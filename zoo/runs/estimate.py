"""Memory and time of a training step on a GPU, estimated without one.

The step passes over the meta device, where tensors have no data: the bytes that exist at a time are the memory of
activations, and all bytes together stand for the memory traffic.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zoo.lm.model import LanguageModel
from zoo.train.callbacks.throughput import TRAINING_FLOPS
from zoo.train.devices import PEAKS
from zoo.train.metrics import total_loss

# Fitted to 90 steps of 20M to 1.3B parameters in reproductions/measured (mixers_400m.csv, cost_over_size_h100.csv):
# matrix products run at this share of the peak, and a byte that is allocated takes the time of so many transfers.
PRODUCTS, TRAFFIC = 0.75, 3.4
OPTIMISER_TRAFFIC = 28  # bytes a parameter: AdamW reads four numbers in fp32, and writes three


class Allocations(TorchDispatchMode):
    """Counts the bytes that a training step of a model allocates on the meta device.

    Attributes:
        rows, length: Of the batch.
        saved, live, peak: Bytes that are kept for the backward pass, now, and at most.
        allocated: Bytes of all tensors together.
    """

    def __init__(self, model: LanguageModel, rows: int, length: int) -> None:
        super().__init__()
        self.rows, self.length = rows, length
        self.saved = self.peak = self.allocated = self.live = 0
        self._seen = weakref.WeakSet(x.untyped_storage() for x in model.parameters())

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


def training_pass(model: LanguageModel, rows: int, length: int, card: str) -> Allocations:
    """Run a training step of a model on the meta device, with the kernels of a GPU. It needs Triton."""
    from kernels.gpu.device import GPUS
    from kernels.gpu.listing import listed

    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    gpu = next((gpu for name, gpu in GPUS.items() if name.removeprefix("RTX ") in card), GPUS["A100"])
    with Allocations(model, rows, length) as passed:

        def loss() -> Tensor:
            result = total_loss(model, tokens, tokens)
            passed.saved = passed.live
            return result

        listed(loss, gpu)
    return passed


def step_seconds(
    model: LanguageModel,
    passed: Allocations,
    card: str,
    *,
    micro_batches: int = 1,
    recomputed: float = 0,
    shards: int = 1,
) -> float:
    """Return the estimated seconds of an optimiser step on a GPU of `PEAKS`, without exchange between GPUs.

    `passed` is the `training_pass` of one of its micro-batches, `recomputed` the share of blocks that the backward pass
    recomputes, and `shards` the number of GPUs that divide the optimiser's work.
    """
    peak, bandwidth, _ = PEAKS[card]
    masked = sum(mixer.masked_flops(passed.length) for mixer in model.mixers)
    flops = (TRAINING_FLOPS + recomputed) * passed.rows * (model.flops(passed.length) - masked)
    optimiser = OPTIMISER_TRAFFIC * model.num_parameters() / shards / bandwidth
    return micro_batches * (flops / (PRODUCTS * peak) + TRAFFIC * passed.allocated / bandwidth) + optimiser
