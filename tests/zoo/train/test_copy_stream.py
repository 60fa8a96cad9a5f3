"""Batches are copied to a GPU while it computes."""

import pytest
import torch

from zoo.data.batch import Batch
from zoo.train.devices import CopyStream


def tokens(number: int, device: str = "cpu") -> torch.Tensor:
    return torch.arange(8, device=device)[None] + number


def test_on_a_cpu_batches_are_what_move_returns():
    batch = Batch(tokens(0), tokens(1))
    assert CopyStream(torch.device("cpu")).copied(batch, lambda: batch) is batch


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_does_not_wait_for_the_computation(pinned: bool):
    """It is done before a kernel that was launched earlier; what is computed next waits for it."""
    copies, results, before = CopyStream(torch.device("cuda")), [], []
    first = Batch(tokens(0), tokens(1))
    copies.copied(first, lambda: Batch(*(x.to("cuda") for x in first[:2])))  # a process's first copies take longer
    for number in range(20):
        batch = Batch(*(x.pin_memory() if pinned else x for x in (tokens(number), tokens(number + 1))))
        busy, copied = torch.cuda.Event(), torch.cuda.Event()
        torch.cuda._sleep(100_000_000)  # some 50 ms
        busy.record()

        def move(batch: Batch = batch, copied: torch.cuda.Event = copied) -> Batch:
            moved = Batch(*(x.to("cuda", non_blocking=True) for x in batch[:2]))
            copied.record()
            return moved

        moved = copies.copied(batch, move)
        copied.synchronize()
        before.append(not busy.query())
        results.append((moved.tokens + moved.labels).sum())
        del moved  # its memory is not overwritten by the next copy before the sum has read it
    assert all(before)
    assert [int(x) for x in results] == [int((tokens(n) + tokens(n + 1)).sum()) for n in range(20)]
