"""Context parallelism: every process holds one part of each sequence, and only what crosses a boundary is sent.

A convolution takes the last inputs of the parts before, attention their keys and values, positions are counted from
the start of the sequence, and a recurrence, which is linear in its state, takes the state that they leave:
S_out = A·S_in + L. Every process computes its A and L at the same time, gets those of all the others in one exchange,
and puts the state before its own part together (LASP, arXiv 2404.02882; LASP-2, arXiv 2502.07563).

A mixer is given a `ContextParallel` as an argument of its `forward`, and hands it on to whatever looks along time:
convolutions (`FeaturePath`), positions, and recurrences (`run_recurrence`, `run_selective_scan`). All of it is
differentiable, and each process must run the same layers in the same order, forward and backward.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import kernels

Recurrence = Callable[..., tuple[Tensor, Tensor | None]]
# the delta rule's kernels hold no more columns of a state
MOST_COLUMNS = 256


class ContextParallel:
    """The part of each sequence that this process holds: number `rank` of `count` equally long ones.

    Args:
        group: The processes that share a sequence, in the order of their parts; all processes if None.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None):
        self.group, self.rank, self.count = group, dist.get_rank(group), dist.get_world_size(group)

    def check(self, state: Any, cu_seqlens: Tensor | None) -> None:
        """Refuse what cannot be shared.

        Args:
            state: A state that a mixer is to continue.
            cu_seqlens: Boundaries of packed documents.

        Raises:
            UserError: There is one of these.
        """
        if state is not None:
            raise kernels.UserError("context_parallel: a state can be continued by one process only")
        if cu_seqlens is not None:
            raise kernels.UserError(
                "context_parallel: packed documents cannot be shared by several processes; "
                "train with data.packing=windows, or with context_parallel=1"
            )

    def take(self, x: Tensor) -> Tensor:
        """The own part [B,T/count,…] of x [B,T,…].

        Raises:
            UserError: The parts would not be equally long.
        """
        if x.shape[1] % self.count:
            raise kernels.UserError(
                f"context_parallel: {self.count} processes cannot share {x.shape[1]} tokens equally; "
                "choose a sequence length that is a multiple"
            )
        return x.chunk(self.count, 1)[self.rank]

    def gather(self, x: Tensor) -> Tensor:
        """The x of all processes [count,…], which must have the same shape."""
        return _Gather.apply(x, self)

    def before(self, x: Tensor, size: int) -> Tensor:
        """The last `size` tokens before the own part, of a stream x [B,T,…] of it; fewer where it is the start."""
        length = x.shape[1]
        kept = min(size, length)
        tails = self.gather(x[:, length - kept :])
        # also the first process goes through this, with no tail at all: backward, the others wait for it
        earlier = tails[: self.rank].transpose(0, 1).flatten(1, 2)
        return earlier[:, max(0, earlier.shape[1] - size) :]

    def history(self, x: Tensor, size: int) -> Tensor:
        """The same, filled with zeros: [B,size,…] of a stream x [B,T,C]."""
        earlier = self.before(x, size)
        return F.pad(earlier, (0, 0, size - earlier.shape[1], 0))

    def first_state(self, transition: Tensor, local: Tensor) -> Tensor:
        """The state before the own part.

        Args:
            transition: A of the own part, which takes a state before it to one after it: a factor of each row
                [B,H,K,1], or a matrix [B,H,K,K].
            local: L, the state after the own part if there was none before [B,H,K,V].

        Returns:
            [B,H,K,V].
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
        """The mean of what all processes of the group have summed, for training.

        Args:
            total: Sum of the own losses, a scalar.
            count: How many these are, a scalar.

        Returns:
            The same number in all processes. Its gradient is that of the own losses times the number of processes, as
            gradients are then averaged over all processes.
        """
        sums = torch.stack([total.detach(), count.to(total.dtype)])
        dist.all_reduce(sums, group=self.group)
        together, number = sums.unbind()
        own = total * (self.count / number.clamp(min=1))
        return own - own.detach() + together / number.clamp(min=1)


class _Gather(torch.autograd.Function):
    """The tensors of all processes; what their uses say of its own comes back to each as a sum."""

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
            own = torch.empty_like(total[0])
            dist.reduce_scatter_tensor(own, total.flatten(0, 1), group=parallel.group)
        else:  # not all can scatter
            total = total.clone()
            dist.all_reduce(total, group=parallel.group)
            own = total[parallel.rank]
        return own.to(gradient.dtype), None


def takes_context_parallel(module: type[nn.Module]) -> bool:
    """Whether modules of a class can work on a part of each sequence: their `forward` has the argument for it."""
    return "context_parallel" in signature(module.forward).parameters


def run_recurrence(
    run: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    beta: Tensor | None,
    subheads: int,
    scale: float | None,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
    consume_state: bool,
    context_parallel: ContextParallel | None,
) -> tuple[Tensor, Tensor | None]:
    """`run`, a recurrence of `kernels` (or one that is as linear in its state), over whole sequences or a part of each.

    A part costs the recurrence twice, once from no state and once from the one that was put together.

    Args:
        run: kernels.linear_recurrence, kernels.delta_rule, or another with their arguments, which follow.
        q: [B,T,G·E,K].
        k: [B,T,G·E,K].
        v: [B,T,H,V].
        log_decay: None, [H·E], [B,T,H·E] or [B,T,H·E,K].
        beta: None or [B,T,H·E].
        subheads: E.
        scale: Factor of the output.
        initial_state: [B,H·E,K,V] or None.
        return_state: Whether to return the final states.
        cu_seqlens: Boundaries of packed documents.
        consume_state: Whether a single step may write to `initial_state`.
        context_parallel: The part of each sequence that this is; None for whole sequences.

    Returns:
        o [B,T,H,V], and the final states or None.
    """
    gates: dict[str, Any] = dict(log_decay=log_decay, beta=beta, subheads=subheads, scale=scale)
    if context_parallel is not None:
        context_parallel.check(initial_state, cu_seqlens)
        transition, local = (_diagonal if run is kernels.linear_recurrence else _matrix)(run, q.detach(), k, v, gates)
        initial_state, consume_state = context_parallel.first_state(transition, local), False
    return run(
        q,
        k,
        v,
        **gates,
        initial_state=initial_state,
        return_state=return_state,
        cu_seqlens=cu_seqlens,
        consume_state=consume_state,
    )


def _diagonal(run: Recurrence, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A [B,H,K,1] and L [B,H,K,V] of a recurrence that only decays."""
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
    """A [B,H,K,K] and L [B,H,K,V] of any recurrence: columns of a state that get no values are multiplied by A."""
    (B, _, H, V), K = v.shape, k.shape[3]
    kind = torch.promote_types(v.dtype, torch.float32)
    identity = torch.eye(K, device=v.device, dtype=kind).expand(B, H * gates["subheads"], K, K)
    nothing = v.new_zeros(1).expand(*v.shape[:3], K)
    if K + V > MOST_COLUMNS:
        _, transition = run(q, k, nothing.contiguous(), **gates, initial_state=identity.contiguous(), return_state=True)
        _, local = run(q, k, v, **gates, return_state=True)
        assert transition is not None
        assert local is not None
        return transition, local
    start = F.pad(identity, (V, 0))
    _, both = run(q, k, torch.cat([v, nothing], -1), **gates, initial_state=start, return_state=True)
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
    """`kernels.selective_scan` over whole sequences, or over a part of each, which costs it twice; its arguments."""
    if context_parallel is not None:
        context_parallel.check(initial_state, cu_seqlens)
        _, local = kernels.selective_scan(x, log_decay, rate, b, c, return_state=True)
        assert local is not None
        total = log_decay.to(local.dtype).sum(1)[..., None]
        transition = (total if rate is None else total * rate).exp()
        initial_state = context_parallel.first_state(transition[..., None], local[..., None])[..., 0]
    return kernels.selective_scan(
        x, log_decay, rate, b, c, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens
    )
