"""Context parallelism: every process holds one part of each sequence, and only what crosses a boundary is sent.

A convolution needs the last inputs of the earlier parts, attention needs their keys and values, positions count from
the start of the sequence, and a recurrence, which is linear in its state, needs the state they leave behind:
S_out = A·S_in + L. All processes compute their A and L at the same time, gather those of the others in one exchange,
and combine them into the state before their own part (LASP, arXiv 2404.02882; LASP-2, arXiv 2502.07563).

A mixer receives a `ContextParallel` as an argument of `forward` and passes it to everything that looks along time:
convolutions (`FeaturePath`), `positions`, and recurrences (`run_recurrence`, `run_selective_scan`). All of it is
differentiable. All processes must run the same layers in the same order, forward and backward.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.core.resets import LEAST_ALONE

Recurrence = Callable[..., tuple[Tensor, Tensor | None]]
DIAGONAL = (kernels.linear_recurrence, kernels.value_decay_recurrence)  # whose decays scale the rows of a state


class ContextParallel:
    """The part of each sequence that this process holds: part `rank` of `count` parts of equal length.

    Args:
        group: The processes that share each sequence, in the order of their parts; None for all processes.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None):
        self.group, self.rank, self.count = group, dist.get_rank(group), dist.get_world_size(group)

    def check(self, state: Any, cu_seqlens: Tensor | None) -> None:
        """Raise a UserError if there is a state or packed documents, which only one process can have."""
        if state is not None:
            raise kernels.UserError("context_parallel: a state can be continued by one process only")
        if cu_seqlens is not None:
            raise kernels.UserError(
                "context_parallel: packed documents cannot be shared by several processes; "
                "train with data.packing=windows, or with context_parallel=1"
            )

    def take(self, x: Tensor) -> Tensor:
        """This process's part [B,T/count,…] of x [B,T,…].

        Raises:
            UserError: T cannot be divided into parts of equal length.
        """
        if x.shape[1] % self.count:
            raise kernels.UserError(
                f"context_parallel: {self.count} processes cannot share {x.shape[1]} tokens equally; "
                "choose a sequence length that is a multiple"
            )
        return x.chunk(self.count, 1)[self.rank]

    def gather(self, x: Tensor) -> Tensor:
        """x of all processes, stacked [count,…]; the shapes must be the same."""
        return _Gather.apply(x, self)

    def before(self, x: Tensor, size: int) -> Tensor:
        """The last `size` tokens of a stream before this part, whose tokens are x [B,T,…]; fewer near the start."""
        length = x.shape[1]
        count = min(size, length)
        tails = self.gather(x[:, length - count :])
        # the first process keeps none, but takes part, since the others wait for it in the backward pass
        earlier = tails[: self.rank].transpose(0, 1).flatten(1, 2)
        return earlier[:, max(0, earlier.shape[1] - size) :]

    def history(self, x: Tensor, size: int) -> Tensor:
        """`before` for a stream x [B,T,C], padded in front with zeros to [B,size,C]."""
        earlier = self.before(x, size)
        return F.pad(earlier, (0, 0, size - earlier.shape[1], 0))

    def first_state(self, transition: Tensor, local: Tensor) -> Tensor:
        """The state before this part, [B,H,K,V].

        Args:
            transition: A of this part, which maps the state before it to the state after it: a factor for each row
                [B,H,K,1], or a matrix [B,H,K,K].
            local: L, the state after this part when it starts from zero [B,H,K,V].
        """
        columns = transition.shape[-1]
        with torch.autocast(local.device.type, enabled=False):  # states are fp32
            parts = self.gather(torch.cat([transition, local], -1))
            state = parts[:0, ..., columns:].sum(0)
            for part in parts[: self.rank].unbind():
                over, added = part[..., :columns], part[..., columns:]
                state = (over * state if columns == 1 else over @ state) + added
        return state

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The mean loss over all processes of the group, of which this one has `count` with the sum `total`.

        It is the same in all processes. Its gradient is that of this process's losses, times the number of processes,
        because gradients are averaged over all processes afterwards.
        """
        sums = torch.stack([total.detach(), count.to(total.dtype)])
        dist.all_reduce(sums, group=self.group)
        together, number = sums.unbind()
        local = total * (self.count / number.clamp(min=1))
        return local - local.detach() + together / number.clamp(min=1)


class _Gather(torch.autograd.Function):
    """All-gather; in the backward pass each process receives the sum of the gradients of its tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: ContextParallel) -> Tensor:
        ctx.parallel = parallel
        parts = x.new_empty(parallel.count * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(parts, x.contiguous(), group=parallel.group)
        return parts.unflatten(0, (parallel.count, len(x)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parallel: ContextParallel = ctx.parallel
        total = kernels.at_least_fp32(gradient).contiguous()
        if dist.get_backend(parallel.group) == "nccl":
            local = torch.empty_like(total[0])
            dist.reduce_scatter_tensor(local, total.flatten(0, 1), group=parallel.group)
        else:  # not every communication library can reduce and scatter
            total = total.clone()
            dist.all_reduce(total, group=parallel.group)
            local = total[parallel.rank]
        return local.to(gradient.dtype), None


def takes_context_parallel(module: type[nn.Module]) -> bool:
    """Return whether modules of this class can work on a part of each sequence: whether `forward` has the argument."""
    return "context_parallel" in signature(module.forward).parameters


def run_recurrence(
    run: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: dict[str, Any],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    context_parallel: ContextParallel | None,
    consume_state: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply `run`, a recurrence that is linear in its state, to whole sequences or to a part of each.

    A part needs the recurrence twice: once from a state of zero, and once from the state before this part.

    Args:
        run: kernels.linear_recurrence, kernels.delta_rule, or another with their arguments.
        q, k, v, initial_state, cu_seqlens, consume_state, options: Arguments of `run`.
        gates: Its arguments log_decay, beta, subheads and scale; of the delta rule erase, read_before and steps, too.
        context_parallel: Which part of each sequence this is; None for whole sequences.

    Returns:
        o [B,T,H,V], and the final states or None.
    """
    if context_parallel is not None:
        context_parallel.check(initial_state, cu_seqlens)
        transition, local = (_diagonal if run in DIAGONAL else _matrix)(run, q.detach(), k, v, gates)
        initial_state, consume_state = context_parallel.first_state(transition, local), False
    settings = dict(initial_state=initial_state, cu_seqlens=cu_seqlens, consume_state=consume_state, **options)
    return run(q, k, v, **gates, **settings)


def _diagonal(run: Recurrence, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A [B,H,K,1] and L [B,H,K,V] of a recurrence whose transition is diagonal."""
    _, local = run(q, k, v, **gates, return_state=True)
    assert local is not None
    decay = gates["log_decay"]
    if decay is None:
        total = local.new_zeros(1)
    elif decay.dim() == 1:
        total = decay.to(local.dtype) * v.shape[1]
    else:
        total = decay.to(local.dtype).sum(1)
    if decay is None or decay.dim() < 4:
        total = total[..., None]
    return total.exp()[..., None].expand(*local.shape[:3], 1), local


def _matrix(run: Recurrence, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A [B,H,K,K] and L [B,H,K,V] of any linear recurrence: columns of the state without values are multiplied by A."""
    (B, _, H, V), K = v.shape, k.shape[3]
    state_dtype = torch.promote_types(v.dtype, torch.float32)
    identity = torch.eye(K, device=v.device, dtype=state_dtype).expand(B, H * gates["subheads"], K, K)
    zeros = v.new_zeros(1).expand(*v.shape[:3], K)
    start = F.pad(identity, (V, 0))
    _, both = run(q, k, torch.cat([v, zeros], -1), **gates, initial_state=start, return_state=True)
    assert both is not None
    return both[..., V:], both[..., :V]


def run_selective_scan(
    x: Tensor,
    log_decay: Tensor,
    rate: Tensor | None = None,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`kernels.selective_scan`, with its arguments, over whole sequences, or twice over a part of each."""
    if context_parallel is not None:
        context_parallel.check(initial_state, cu_seqlens)
        _, local = kernels.selective_scan(x, log_decay, rate, b, c, return_state=True)
        assert local is not None
        total = log_decay.to(local.dtype).clamp(min=LEAST_ALONE).sum(1)[..., None]
        transition = (total if rate is None else total * rate).exp()
        initial_state = context_parallel.first_state(transition[..., None], local[..., None])[..., 0]
    return kernels.selective_scan(
        x, log_decay, rate, b, c, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens
    )
