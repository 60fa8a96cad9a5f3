"""Context parallelism: every process holds one part of each sequence, and continues what the part before it left.

A recurrence needs the state before its part, a convolution the last inputs, attention the keys and values that its
window reaches, and a position the number of tokens before it. Each process hands this on to the next one as soon as it
has it, and the gradient comes back the same way. So every recurrence runs once, process r is r recurrences behind the
first one, in all layers together, and a message is on its way while its sender computes the next layer. (To combine
summaries of all parts, as LASP-2 does, arXiv 2502.07563, runs each recurrence twice and waits for all in each layer.)
Messages of packed documents have the same sizes wherever documents begin, so that steps can be captured as CUDA graphs.
What belongs to another document is replaced by zeros on the device. Only full attention, whose messages would hold all
earlier tokens, sends those of the document.

A mixer receives a `ContextParallel` as an argument of `forward` and passes it to everything that looks along time:
convolutions (`FeaturePath`), `positions`, and recurrences (`run_recurrence`, `run_selective_scan`). All of it is
differentiable. All processes must run the same layers in the same order; the backward pass runs them in reverse. A
process may hold several parts, which hand on to each other, so a row has the same parts in any number of processes.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from copy import copy
from functools import partial
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.core.documents import Documents, documents, moved

Recurrence = Callable[..., tuple[Tensor, Tensor | None]]
Outputs = TypeVar("Outputs")
Gathered = TypeVar("Gathered")
IN_FLIGHT = 16  # messages that a process may be ahead of the next one, which bounds the memory that they hold


class ContextParallel:
    """The processes that share each sequence, and, after `of`, the part that this process holds.

    Args:
        group: The processes, in the order of their parts; None for all. Gradients that are averaged during the backward
            pass need another group: NCCL runs the operations of a group one after another, in an order that would
            differ between parts.
        held: Number of neighbouring parts that each process holds.

    Attributes:
        rank: Number of the part, of the first one that the process holds before `all_of`.
        count: Number of parts of all processes.
        cu_seqlens: int32 boundaries of the documents in this part, its ends included, in captured steps padded with
            empty documents; None for rows that are not packed.
    """

    cu_seqlens: Tensor | None
    _starts: list[int]  # of all parts, and the length of the row
    _documents: Documents | None  # of the row
    _ends: "_Ends | None"  # of packed documents
    _shared: dict[Hashable, Tensor]  # tensors of `_once`

    def __init__(self, group: "dist.ProcessGroup | None" = None, held: int = 1):
        rank, processes = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        self.group, self.held, self.rank, self.count = group, held, rank * held, processes * held
        self._sent: list[deque[tuple[dist.Work, Tensor]]] = [deque()]  # the last is that of the innermost `joined`
        self._kept = defaultdict[tuple[int, int], deque[Tensor]](deque)  # messages between parts of this process

    def all_of(self, length: int, cu_seqlens: Tensor | None = None) -> list[Self]:
        """Return what `of` does for each part that this process holds.

        Forward passes have to run in this order, and backward passes in the reverse order, as each reads messages of
        the one before.
        """
        parts = [copy(self) for _ in range(self.held)]
        for number, part in enumerate(parts):
            part.rank += number
        return [part.of(length, cu_seqlens) for part in parts]

    def of(self, length: int, cu_seqlens: Tensor | None = None) -> Self:
        """Return the parts of rows of `length` tokens, whose lengths differ by at most one token.

        Args:
            length: Tokens of all parts together.
            cu_seqlens: Boundaries [N+1] of documents packed into one row, anywhere in it; documents may be empty.

        Raises:
            UserError: There are fewer tokens than parts.
            ValueError: `cu_seqlens` are not the boundaries of a row of `length` tokens.
        """
        if length < self.count:
            raise kernels.UserError(
                f"context_parallel: {length} tokens cannot be divided into {self.count} parts; each needs at least one"
            )
        part, (each, more) = copy(self), divmod(length, self.count)
        part._starts = list(accumulate((each + (i < more) for i in range(self.count)), initial=0))
        start, stop = part._starts[self.rank : self.rank + 2]
        part._documents = None if cu_seqlens is None else documents(cu_seqlens, length)
        part._ends = None if part._documents is None else part._documents.tables(_ends, start, stop)
        part._shared = {}
        part.cu_seqlens = part.longer_documents(0)
        return part

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence or document, over all parts."""
        return self._starts[-1] if self._documents is None else self._documents.longest

    def take(self, x: Tensor) -> Tensor:
        """This process's part of x [B,T,…]."""
        start, stop = self._starts[self.rank : self.rank + 2]
        return x[:, start:stop]

    def longer_documents(self, size: int | None) -> Tensor | None:
        """Return `cu_seqlens` of this part and the tokens that `before` returns; None for rows that are not packed."""
        if self._documents is None:
            return None
        parts = enumerate(pairwise(self._starts))
        return self._documents.part(
            self.rank, tuple((start - self._earlier(number, size), stop) for number, (start, stop) in parts)
        )

    def positions(self, device: torch.device) -> Tensor:
        """Return the position of each token of this part in its sequence or document [1,T]."""
        start, stop = self._starts[self.rank : self.rank + 2]
        if self._documents is None:
            return self._once("positions", lambda: torch.arange(start, stop, device=device)[None])
        return self._documents.tables(_tokens, start, stop).positions

    def continued_tokens(self) -> Tensor:
        """Return whether each token of this part belongs to the first document in it [T], for packed documents."""
        assert self._documents is not None
        return self._documents.tables(_tokens, *self._starts[self.rank : self.rank + 2]).continued

    def zeros(self, x: Tensor, *shape: int) -> Tensor:
        """Return states of zeros, a single number in memory, in the dtype of x, or in fp32 if that is wider."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return self._once(dtype, lambda: x.new_zeros(1, dtype=dtype)).expand(shape)

    def _once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that is made for the first layer, and shared by all."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def check(self, state: Any, cu_seqlens: Tensor | None) -> None:
        """Raise a UserError if there is a state, no length, or if only one of part and call has packed documents."""
        if not hasattr(self, "_starts"):
            raise kernels.UserError("context_parallel: pass what ContextParallel.of(length, cu_seqlens) returns")
        if state is not None:
            raise kernels.UserError("context_parallel: a state can be continued by one process only")
        if (cu_seqlens is None) != (self.cu_seqlens is None):
            raise kernels.UserError(
                "cu_seqlens: must be those of the part; ContextParallel.of(length, cu_seqlens).cu_seqlens has them"
            )

    def continued(
        self, run: Callable[[Tensor], tuple[Outputs, Tensor]], zeros: Tensor, inputs: Sequence[Tensor | None]
    ) -> Outputs:
        """Run something from the state that the part before this one left, and hand its last state on to the next.

        Args:
            run: The states before the first token of each sequence or document → outputs, and the states after the
                last one. If a gradient is needed, the outputs are one tensor.
            zeros: The states at the start of each sequence or document [N,…], or [1,…] for that of the row.
            inputs: All that the outputs depend on: a gradient is handed back if one of them needs one.

        Returns:
            The outputs of `run`.
        """
        used = [x for x in inputs if x is not None]
        state = zeros
        if self.rank:
            (state,) = _Receive.apply(self, [zeros if self._ends is None else zeros[:1]], *used)
            if self._ends is not None:
                state = torch.cat([state.masked_fill(self._ends.begins, 0), zeros[1:]])
        outputs, last = run(state)
        if self.rank + 1 < self.count:
            if self._ends is not None and len(last) > 1:
                last = last.index_select(0, self._ends.last)
            if torch.is_grad_enabled() and any(x.requires_grad for x in used):
                return _HandOn.apply(self, outputs, last)
            self.put([last], self.rank + 1)
        return outputs

    def before(
        self, streams: Sequence[Tensor], size: int | None, *, own_gradients: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Exchange the last tokens of streams [B,T,…]; those of one dtype in one message.

        Args:
            streams: The streams.
            size: Number of tokens; None for all earlier tokens of the sequence or document that the part continues.
            own_gradients: Whether nothing else reads the gradients of the returned streams, as after a convolution,
                which allocates them. The gradients from the next part are then added in place, which saves a copy.

        Returns:
            The streams, to be used in place of the arguments, and for each its last `size` tokens before this part
            [B,n,…]; n is smaller where the row has fewer. Some of them may belong to other documents.
        """
        here, earlier = list(streams), list(streams)
        for dtype in dict.fromkeys(x.dtype for x in streams):
            places = [i for i, x in enumerate(streams) if x.dtype == dtype]
            exchanged = self._before([streams[i] for i in places], size, own_gradients)
            for i, new, old in zip(places, *exchanged, strict=True):
                here[i], earlier[i] = new, old
        return here, earlier

    def _before(
        self, streams: list[Tensor], size: int | None, own_gradients: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """`before` for streams of one dtype."""
        count, sent = self._earlier(self.rank, size), self._earlier(self.rank + 1, size)
        length = streams[0].shape[1]
        earlier = [x[:, :0] for x in streams]
        if sent and sent <= length:  # first, as the next part does not need those of the part before
            streams = list(_HandOnTails.apply(self, sent, own_gradients, *streams))
        if count:
            like = [x.new_empty(1).expand(x.shape[0], count, *x.shape[2:]) for x in streams]
            earlier = list(_Receive.apply(self, like, *streams))
        if sent > length:
            both = [torch.cat(pair, 1) for pair in zip(earlier, streams, strict=True)]
            both = list(_HandOnTails.apply(self, sent, own_gradients, *both))
            earlier, streams = [x[:, :count] for x in both], [x[:, count:] for x in both]
        return streams, earlier

    def _earlier(self, part: int, size: int | None) -> int:
        """Return how many tokens before a part are sent to it; 0 behind the last part."""
        start = self._starts[part] if part < self.count else 0
        if size is not None:
            return min(size, start)
        if self._documents is None:
            return start
        self._documents.forbid_graphs("full attention with context_parallel sends as many tokens as documents have")
        return _offset(self._documents, start)

    def histories(
        self, streams: Sequence[Tensor], sizes: Sequence[int], *, own_gradients: bool = False
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Exchange the inputs [B,T,C] of convolutions that read so many earlier tokens each, as `before` does.

        Returns:
            The streams, and the tokens before each sequence or document [N,size,C], with zeros where there are none;
            None for the first part.
        """
        here, earlier = self.before(streams, max(sizes), own_gradients=own_gradients)
        if not self.rank:
            return here, [None for _ in here]
        others = 0
        if self._documents is not None and self.cu_seqlens is not None:
            others = len(self.cu_seqlens) - 2
            table = self._documents.tables(_elsewhere, self._starts[self.rank], earlier[0].shape[1])
            earlier = [x.masked_fill(table.elsewhere, 0) for x in earlier]
        last = [x[:, max(x.shape[1] - size, 0) :] for x, size in zip(earlier, sizes, strict=True)]
        return here, [F.pad(x, (0, 0, size - x.shape[1], 0, 0, others)) for x, size in zip(last, sizes, strict=True)]

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

    def put(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Send tensors of one dtype to a neighbouring part, without waiting until they arrive."""
        exchange = _EXCHANGE.get()
        if exchange is not None and exchange.repeats:
            return
        if rank // self.held == self.rank // self.held:  # copied, as a message is: products depend on the alignment
            self._kept[self.rank, rank].append(torch.cat([x.detach().flatten() for x in tensors]))
            return
        message = torch.cat([x.detach().flatten() for x in tensors]) if len(tensors) > 1 else tensors[0].detach()
        message = message.contiguous()
        work = dist.isend(message, group=self.group, group_dst=rank // self.held)
        assert work is not None
        sent, polls = self._sent[-1], len(self._sent) == 1
        sent.append((work, message))
        while sent and (len(sent) > IN_FLIGHT or (polls and sent[0][0].is_completed())):
            sent.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until all messages have arrived; a process that ends before takes them with it."""
        sent = self._sent[-1]
        while sent:
            sent.popleft()[0].wait()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Finish the messages of the block at its end, without polling and apart from earlier ones.

        A block that is captured as a CUDA graph requires this: a capture may not query events, nor wait for events
        outside of it, and its own stream must wait for all others before it ends.
        """
        self._sent.append(deque())
        try:
            yield
            self.finish()
        finally:
            self._sent.pop()

    def first_reason(self, reason: str | None) -> str | None:
        """Return the `reason` of the first process that has one, in all processes; None if there is none.

        All processes of the group must call it, and wait for each other.
        """
        return next((each for each in self.gathered(reason) if each is not None), None)

    def gathered(self, each: Gathered) -> list[Gathered]:
        """Return what all processes of the group pass, in all of them; they wait for each other."""
        everything = [each] * (self.count // self.held)
        dist.all_gather_object(everything, each, group=self.group)
        return everything

    def get(self, like: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Receive tensors of the shapes and the dtype of `like` from a neighbouring part."""
        exchange = _EXCHANGE.get()
        if exchange is not None and exchange.repeats:
            return exchange.next()
        if rank // self.held == self.rank // self.held:
            message = self._kept[rank, self.rank].popleft()
        else:
            message = like[0].new_empty(sum(x.numel() for x in like))
            work = dist.irecv(message, group=self.group, group_src=rank // self.held)
            assert work is not None
            work.wait()
        tensors = [x.view(y.shape) for x, y in zip(message.split([x.numel() for x in like]), like, strict=True)]
        if exchange is not None:
            exchange.received.append(tensors)
        return tensors


# Tables of a part of packed documents on their device. They are made once for each batch, so that no layer launches
# kernels for them. They are never inference tensors, not even if an evaluation makes them, since training may read them
# later.


class _Ends(NamedTuple):
    """Ends of the part: whether it begins with a document [], and the index of its last one that is not empty [1]."""

    begins: Tensor
    last: Tensor

    def tensors(self) -> Sequence[Tensor]:
        return self


class _Tokens(NamedTuple):
    """Positions of the tokens of the part [1,T], and whether they belong to its first document [T]."""

    positions: Tensor
    continued: Tensor

    def tensors(self) -> Sequence[Tensor]:
        return self


class _Elsewhere(NamedTuple):
    """Mask of the tokens before the part that belong to other documents than its first one [n,1]."""

    elsewhere: Tensor

    def tensors(self) -> Sequence[Tensor]:
        return self


def _offset(packed: Documents, start: int) -> int:
    """Return the number of tokens before a part in the document that its first token belongs to."""
    return start - packed.bounds[bisect_right(packed.bounds, start) - 1]


def _ends(packed: Documents, start: int, stop: int) -> _Ends:
    last = len(packed.within(start, stop)) - 2
    return _Ends(*_on_device(packed, torch.tensor(_offset(packed, start) == 0), torch.tensor([last])))


def _tokens(packed: Documents, start: int, stop: int) -> _Tokens:
    bounds, token = torch.tensor(packed.bounds), torch.arange(start, stop)
    first = bounds[torch.searchsorted(bounds, token, right=True) - 1]
    return _Tokens(*_on_device(packed, (token - first)[None], first <= start))


def _elsewhere(packed: Documents, start: int, size: int) -> _Elsewhere:
    return _Elsewhere(*_on_device(packed, torch.arange(size, 0, -1)[:, None] > _offset(packed, start)))


def _on_device(packed: Documents, *tables: Tensor) -> list[Tensor]:
    with torch.inference_mode(False):
        return [moved(x.clone(), packed.device) for x in tables]


class _Receive(torch.autograd.Function):
    """Tensors of the part before; gradients go back there. Those of `inputs` only tell whether one is needed."""

    @staticmethod
    def forward(ctx: Any, parallel: ContextParallel, like: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.parallel, ctx.inputs = parallel, len(inputs)
        return tuple(parallel.get(like, parallel.rank - 1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.parallel.put(gradients, ctx.parallel.rank - 1)
        return (None,) * (2 + ctx.inputs)


class _HandOn(torch.autograd.Function):
    """Outputs unchanged; a state is sent to the next part, whose gradient comes back from there."""

    @staticmethod
    def forward(ctx: Any, parallel: ContextParallel, outputs: Tensor, state: Tensor) -> Tensor:
        ctx.parallel, ctx.like = parallel, state.new_empty(1).expand(state.shape)
        parallel.put([state], parallel.rank + 1)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        (of_state,) = ctx.parallel.get([ctx.like], ctx.parallel.rank + 1)
        return None, gradient, of_state


class _HandOnTails(torch.autograd.Function):
    """Streams [B,T,…] unchanged; their last tokens are sent to the next part, whose gradients come back from there."""

    @staticmethod
    def forward(
        ctx: Any, parallel: ContextParallel, size: int, own_gradients: bool, *streams: Tensor
    ) -> tuple[Tensor, ...]:
        tails = [x[:, x.shape[1] - size :] for x in streams]
        ctx.parallel, ctx.like = parallel, [x.new_empty(1).expand(x.shape) for x in tails]
        ctx.own_gradients = own_gradients
        parallel.put(tails, parallel.rank + 1)
        return tuple(x.view_as(x) for x in streams)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tails = ctx.parallel.get(ctx.like, ctx.parallel.rank + 1)
        if not ctx.own_gradients:
            gradients = tuple(x.clone() for x in gradients)
        for x, tail in zip(gradients, tails, strict=True):
            x[:, x.shape[1] - tail.shape[1] :] += tail
        return None, None, None, *gradients


class _Exchange(AbstractContextManager[None]):
    """The first pass through a block, or its repetition, which reads what the first one received."""

    def __init__(self, received: list[list[Tensor]], repeats: bool):
        self.received, self.repeats, self.position = received, repeats, 0
        self._tokens: list[Token[_Exchange | None]] = []

    def __enter__(self) -> None:
        self.position = 0
        self._tokens.append(_EXCHANGE.set(self))

    def __exit__(self, *error: Any) -> None:
        _EXCHANGE.reset(self._tokens.pop())

    def next(self) -> list[Tensor]:
        """The tensors of the next message."""
        self.position += 1
        return self.received[self.position - 1]


_EXCHANGE: ContextVar[_Exchange | None] = ContextVar("exchange", default=None)


def exchanged_once() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for a forward pass and its repetition in the backward pass, which reads what the first one received.

    They are for `torch.utils.checkpoint`. Without them, each part would wait for the repetition in the part before.
    """
    received: list[list[Tensor]] = []
    return _Exchange(received, False), _Exchange(received, True)


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
    return_state: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply `run`, a recurrence of a matrix, to whole sequences or to a part of each.

    Args:
        run: kernels.linear_recurrence, kernels.delta_rule, or another with their arguments.
        q, k, v, initial_state, cu_seqlens, consume_state, return_state, options: Arguments of `run`.
        gates: Its arguments log_decay, beta, subheads and scale; of the delta rule erase, read_before and steps, too.
        context_parallel: Which part of each sequence this is; None for whole sequences.

    Returns:
        o [B,T,H,V], and the final states or None.
    """
    settings = dict(gates, cu_seqlens=cu_seqlens, **options)
    if context_parallel is None:
        settings |= dict(initial_state=initial_state, return_state=return_state, consume_state=consume_state)
        return run(q, k, v, **settings)
    context_parallel.check(initial_state, cu_seqlens)
    size = (v.shape[3], k.shape[3]) if run is kernels.value_decay_recurrence else (k.shape[3], v.shape[3])
    rows = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    zeros = context_parallel.zeros(v, rows, v.shape[2] * gates.get("subheads", 1), *size)
    inputs = [x for x in gates.values() if isinstance(x, Tensor)]

    def continued(state: Tensor) -> tuple[Tensor, Tensor]:
        o, last = run(q, k, v, **settings, initial_state=None if state is zeros else state, return_state=True)
        assert last is not None
        return o, last

    return context_parallel.continued(continued, zeros, [q, k, v, *inputs]), None


def run_selective_scan(
    x: Tensor,
    log_decay: Tensor,
    rate: Tensor | None = None,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    skip: Tensor | None = None,
    scale_inputs: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`kernels.selective_scan`, with its arguments, over whole sequences or a part of each."""
    settings: dict[str, Any] = {"skip": skip, "scale_inputs": scale_inputs, "cu_seqlens": cu_seqlens}
    scan = partial(kernels.selective_scan, x, log_decay, rate, b, c, **settings)
    if context_parallel is None:
        return scan(initial_state=initial_state, return_state=return_state)
    context_parallel.check(initial_state, cu_seqlens)
    rows = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    size = 1 if rate is None else rate.shape[1]
    zeros = context_parallel.zeros(x, rows, x.shape[2], size)

    def continued(state: Tensor) -> tuple[Tensor, Tensor]:
        y, last = scan(initial_state=None if state is zeros else state, return_state=True)
        assert last is not None
        return y, last

    return context_parallel.continued(continued, zeros, [x, log_decay, rate, b, c, skip]), None
