"""Sums over the parts of a step by one binary tree, whatever the number of processes that compute the parts.

A step of deterministic training consists of parts: micro-batches, or parts of their sequences. Part p of m·n parts, in
the order of the data, is computed by process p mod n of n processes as its micro-batch p div n. Neighbours are added
first, then pairs of neighbours, and so on. With a power of two of processes, each process adds the same pairs.
"""

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Terms = list[Tensor | None]
BUCKET = 1 << 24  # numbers that processes exchange at a time, which bounds the memory of an exchange


class PartialSums:
    """The sum of lists of tensors, added in place by the tree ((0 + 1) + (2 + 3)) + (4 + 5).

    A tensor that is missing in a list counts as 0.
    """

    def __init__(self) -> None:
        self._sums: list[Terms | None] = []  # of 2^i lists at place i

    def add(self, terms: Terms) -> None:
        """Add a list, which is the sum's from now on."""
        for place, earlier in enumerate(self._sums):
            if earlier is None:
                self._sums[place] = terms
                return
            self._sums[place], terms = None, _added(earlier, terms)
        self._sums.append(terms)

    def take(self) -> Terms:
        """Return the sum, and begin another one."""
        waiting, self._sums = [each for each in self._sums if each is not None], []
        return reduce(lambda later, earlier: _added(earlier, later), waiting)


def _added(earlier: Terms, later: Terms) -> Terms:
    pairs = zip(earlier, later, strict=True)
    return [y if x is None else x if y is None else x.add_(y) for x, y in pairs]


def add_processes(terms: Terms, like: Sequence[Tensor]) -> Terms:
    """Add the lists of all processes in place, neighbours first; every process calls it and gets the same bits.

    Args:
        terms: Tensors on one device.
        like: Tensors of their shapes, dtypes and device, for those that only other processes have.

    Returns:
        The sums; None for a tensor that is missing in all processes.
    """
    count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if count == 1:
        return terms
    present = torch.tensor([x is not None for x in terms], dtype=torch.int32, device=like[0].device)
    dist.all_reduce(present, dist.ReduceOp.MAX)
    pairs = zip(terms, like, present.tolist(), strict=True)
    sums = [torch.zeros_like(y) if x is None and anywhere else x for x, y, anywhere in pairs]
    for bucket in _buckets([x for x in sums if x is not None]):
        own = torch.cat([x.flatten() for x in bucket])
        padded = F.pad(own, (0, -len(own) % count))
        gathered = torch.empty_like(padded)  # this process's share of the numbers, of all processes
        dist.all_to_all_single(gathered, padded)
        rows = gathered.view(count, -1)
        while len(rows) > 1:
            rows = rows[::2] + rows[1::2]
        dist.all_gather_into_tensor(padded, rows[0])
        for x, total in zip(bucket, padded[: len(own)].split([x.numel() for x in bucket]), strict=True):
            x.copy_(total.view(x.shape))
    return sums


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype with at most BUCKET numbers, or a larger one alone."""
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        bucket: list[Tensor] = []
        for x in (x for x in tensors if x.dtype == dtype):
            if bucket and sum(y.numel() for y in (*bucket, x)) > BUCKET:
                yield bucket
                bucket = []
            bucket.append(x)
        yield bucket
