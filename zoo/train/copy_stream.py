"""Copies of batches to a GPU, concurrent with its computation."""

from collections.abc import Callable

import torch

from zoo.data.batch import Batch


class CopyStream:
    """Copies batches to a GPU while it still computes the previous step.

    The host launches steps before the GPU can run them. A copy in the stream of the computation would start after all
    of these steps, and the next one would wait for it; and the host would wait for them if the batch were not in
    page-locked memory. In a separate stream a copy starts immediately.

    Args:
        device: Device of the copies. On a CPU, batches are copied without a stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copied(self, batch: Batch, move: Callable[[], Batch]) -> Batch:
        """Return the result of `move`, which copies the batch; what is computed next waits for the copy."""
        if self._stream is None or batch.tokens.device.type != "cpu":
            return move()
        with torch.cuda.stream(self._stream):
            copy = move()
        computation = torch.cuda.current_stream(self._stream.device)
        computation.wait_stream(self._stream)
        for x in copy:
            if x is not None:
                x.record_stream(computation)  # otherwise the next copy could get this memory before it is read
        return copy
