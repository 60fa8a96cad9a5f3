"""Exact matrices of a layer's computation along time for one text, and the contents of its state."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernels
from kernels import UserError
from kernels.core.documents import documents

from .calls import Call

OF_HEADS = ("q", "k", "log_decay", "beta", "erase", "erase_write")  # arguments with an axis of heads, without v
STEEP, HALF_CHUNK = 69.0, 32  # a channel that decays by more than e^-69 within so many tokens is steep


class Retention(NamedTuple):
    """Shares of each write that are left, read with its key, and that decays and later writes took; their sum is 1."""

    left: Tensor  # share of write s that its key still reads at token t [T,W]; NaN before the write
    decayed: Tensor  # share that decays took until then [T,W]
    erased: Tensor  # share that later writes took until then, or added if it is negative [T,W]
    eraser: Tensor  # the later write that took most of each write [W]; −1 for none
    eraser_share: Tensor  # the share that it took [W]


class Spectra(NamedTuple):
    """Singular values of the states of heads at the ends of chunks, all subheads as one matrix [E·K,V]."""

    ends: Tensor  # tokens before each state [N]
    values: Tensor  # [N,H,min(E·K,V)], from the largest

    @property
    def norms(self) -> Tensor:
        """Frobenius norms [N,H]."""
        return self.values.square().sum(-1).sqrt()

    @property
    def effective_ranks(self) -> Tensor:
        """Exponential of the entropy of the singular values over their sum [N,H] (Roy and Vetterli 2007)."""
        shares = self.values / self.values.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        return torch.special.entr(shares).sum(-1).exp()


class Recurrence(NamedTuple):
    """The writes of one recurrence over one document in fp64: W = nT of them, n `steps` for each of T tokens."""

    k: Tensor  # [W,K]
    log_decay: Tensor  # before each write [W,K] or [W,1]
    erase: Tensor | None  # erase keys times β [W,K]; None without a delta rule
    erase_write: Tensor  # keys that erased values are written with [W,K]
    read_before: bool  # whether erase keys read the state before it decays
    steps: int

    def retention(self) -> tuple[Tensor, Tensor, Tensor]:
        """The shares left, decayed and erased [3,T,W], and the eraser of each write with its share."""
        k, g, W, n = self.k, self.log_decay.exp(), len(self.k), self.steps
        direction = k / k.square().sum(-1, keepdim=True).clamp(min=torch.finfo(k.dtype).tiny)
        shares = k.new_full((3, W // n, W), math.nan)
        whole, took = torch.zeros_like(k), k.new_zeros(2, W)  # whole: what is left of each key
        most, eraser = k.new_zeros(W), torch.full((W,), -1)
        for i in range(W):
            held = whole[:i]
            before = held.clone()
            held *= g[i]
            took[0, :i] += ((before - held) * direction[:i]).sum(-1)
            if self.erase is not None:
                read = before if self.read_before and i % n == 0 else held
                change = (read @ self.erase[i])[:, None] * self.erase_write[i]
                held -= change
                lost = (change * direction[:i]).sum(-1)
                took[1, :i] += lost
                eraser[:i], most[:i] = torch.where(lost > most[:i], i, eraser[:i]), torch.maximum(lost, most[:i])
            whole[i] = k[i]
            if (i + 1) % n == 0:
                shares[:, i // n, : i + 1] = torch.stack([(whole * direction)[: i + 1].sum(-1), *took[:, : i + 1]])
        return shares, eraser, most


class Layer:
    """A layer's call of an op along time, with one row of tokens.

    Args:
        call: The call.
        number: Number of the layer, from 0.
        name: Class of its mixer.
        write_delay: Tokens by which a write follows the token whose value it has.

    Attributes:
        heads, subheads: Number of heads, and of subheads of a head.
        steps: Number of writes of a token.
        has_state: Whether it has a matrix state, rather than keys and values.
    """

    def __init__(self, call: Call, number: int = 0, name: str = "", write_delay: int = 0):
        self.call, self.number, self.name, self.write_delay = call, number, name, write_delay
        a: dict[str, Any] = {key: x.cpu() if isinstance(x, Tensor) else x for key, x in call.arguments.items()}
        self.arguments = a | {key: a[key].double() for key in (*OF_HEADS, "v") if a.get(key) is not None}
        self.has_state = call.op is not kernels.window_attention
        self.tokens, self.heads = a["q"].shape[1], a["v" if self.has_state else "q"].shape[2]
        self.subheads, self.steps = a.get("subheads", 1), a.get("steps", 1)

    def attention(self, head: int, subhead: int | None = None, channel: int = 0) -> Tensor:
        """A [T,W] of a head in fp64: its output before norm, gate, skip and projection is o_t = Σ_s A_ts v_s.

        s counts writes, of which Gated DeltaProduct makes several for a token; write s of Mamba-3 has the value of the
        token before (`write_delay`). Rows of mLSTM are divided by their sum later, if it is above 1. Entries of other
        documents are 0.

        Args:
            head: The head.
            subhead: A subhead, for its part of the head's matrix.
            channel: A value channel, for decays per value channel (the first call of gated slot attention).

        Raises:
            UserError: The head or subhead does not exist.
        """
        self._check(head, subhead or 0)
        a, writes = self._of_head(head, subhead), self.tokens * self.steps
        if self.call.op is kernels.value_decay_recurrence:
            a["log_decay"] = a["log_decay"][..., [channel]].expand(-1, -1, -1, writes)
        # the output is linear in the values, so that for the identity it is the matrix
        output = self.call.op(**a, v=torch.eye(writes, dtype=torch.float64)[None, :, None])
        matrix: Tensor = (output[0] if isinstance(output, tuple) else output)[0, :, 0]
        return matrix

    def values(self, head: int) -> Tensor:
        """v [W,V] of a head."""
        v: Tensor = self.arguments["v"][0]
        return v[:, head * v.shape[1] // self.heads]

    def retention(self, head: int, subhead: int = 0) -> Retention:
        """Follow each write through the later ones, in W steps of products [W,K].

        Raises:
            UserError: The layer has no matrix state, or no such head or subhead.
        """
        self._check(head, subhead, state=True)
        T, n = self.tokens, self.steps
        shares = torch.full((3, T, T * n), math.nan, dtype=torch.float64)
        eraser, most = torch.full((T * n,), -1), torch.zeros(T * n, dtype=torch.float64)
        for start, stop in self.spans():
            writes = slice(start * n, stop * n)
            shares[:, start:stop, writes], by, most[writes] = self.recurrence(head, subhead, start, stop).retention()
            eraser[writes] = torch.where(by < 0, by, by + start * n)
        return Retention(shares[0], shares[1], shares[2], eraser, most)

    def spectra(self, every: int = 64) -> Spectra:
        """Singular values of the states at the ends of chunks of `every` tokens, from the op itself.

        Raises:
            UserError: The layer has no matrix state.
        """
        self._check(state=True)
        left_out = {"cu_seqlens", "initial_state", "return_state", "consume_state"}
        constant = {key: x for key, x in self.arguments.items() if key not in left_out}
        keys = [key for key, x in constant.items() if isinstance(x, Tensor) and x.dim() > 1]
        streams = {key: constant.pop(key).unflatten(1, (self.tokens, -1)) for key in keys}  # tokens and steps
        ends, values = [], []
        for start, stop in self.spans():
            state = None
            for first in range(start, stop, every):
                ends.append(min(first + every, stop))
                part = {key: x[:, first : ends[-1]].flatten(1, 2) for key, x in streams.items()}
                _, state = self.call.op(**constant, **part, initial_state=state, return_state=True)
                values.append(torch.linalg.svdvals(state[0].unflatten(0, (-1, self.subheads)).flatten(1, 2)))
        return Spectra(torch.tensor(ends), torch.stack(values))

    def half_lives(self) -> Tensor:
        """Tokens after which half of a channel is left at its mean log decay [H·E,K or 1]; inf without a decay.

        A reset counts as a log decay of −1,000.
        """
        return math.log(2) / self._log_decay().clamp(min=-1e3).mean(0).abs()

    def steep_share(self) -> float:
        """Share of heads, channels and halves of chunks that decay by more than e^-69."""
        parts = [part.sum(0) for part in self._log_decay().split(HALF_CHUNK)]
        return float(torch.stack(parts).lt(-STEEP).double().mean())

    def recurrence(self, head: int, subhead: int, start: int, stop: int) -> Recurrence:
        """The writes of one recurrence over the tokens of a document."""
        a, n = self._of_head(head, subhead), self.steps
        keys = [key for key in ("k", "beta", "erase", "erase_write") if a.get(key) is not None]
        writes = {key: a[key][0, start * n : stop * n, 0] for key in keys}
        k, beta, erase = writes["k"], writes.get("beta"), None
        if self.call.op is kernels.delta_rule:
            erase = writes.get("erase", k)
            erase = erase if beta is None else erase * (beta if beta.dim() == 2 else beta[:, None])
        g = self._log_decay()[start:stop, head * self.subheads + subhead]
        g = g[:, :1] if self.call.op is kernels.value_decay_recurrence else g
        decay = k.new_zeros(len(k), g.shape[1])
        decay[::n] = g
        return Recurrence(k, decay, erase, writes.get("erase_write", k), a.get("read_before", False), n)

    def spans(self) -> Sequence[tuple[int, int]]:
        """First token and end of each document that has tokens."""
        packed: Tensor | None = self.arguments.get("cu_seqlens")
        spans = [(0, self.tokens)] if packed is None else documents(packed, self.tokens).spans
        return [(start, stop) for start, stop in spans if stop > start]

    def _log_decay(self) -> Tensor:
        """Log decays [T,H·E,K or 1]; zeros without decays."""
        g: Tensor | None = self.arguments.get("log_decay")
        g = torch.zeros(self.heads * self.subheads, dtype=torch.float64) if g is None else g
        g = g.expand(self.tokens, -1) if g.dim() == 1 else g[0]
        return g.reshape(self.tokens, g.shape[1], -1)

    def _of_head(self, head: int, subhead: int | None) -> dict[str, Any]:
        """The arguments of a head, or of one of its subheads, without v."""
        E, a = self.subheads, {key: x for key, x in self.arguments.items() if key != "v"}
        chosen = torch.arange(E) if subhead is None else torch.tensor([subhead])
        for key in OF_HEADS:
            if a.get(key) is not None:
                axis = 0 if a[key].dim() == 1 else 2
                groups = a[key].shape[axis] // E  # heads that share keys are a group
                a[key] = a[key].index_select(axis, head * groups // self.heads * E + chosen)
        return a | ({"subheads": len(chosen)} if "subheads" in a else {})

    def _check(self, head: int = 0, subhead: int = 0, *, state: bool = False) -> None:
        if state and not self.has_state:
            raise UserError(f"layer {self.number}: {self.name} has no matrix state")
        for what, value, count in (("head", head, self.heads), ("subhead", subhead, self.subheads)):
            if not 0 <= value < count:
                raise UserError(f"{what}: {value} is not one of the {count} of layer {self.number}, which count from 0")
