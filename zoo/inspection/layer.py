"""Exact matrices of a layer's computation along time for one text, and the contents of its state."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernels
from kernels import UserError
from kernels.core.documents import documents
from kernels.core.recurrence import check
from kernels.delta_rule import two_steps

from .calls import Call
from .recurrence import Recurrence

RESET = -1e4  # log decays of attention from here on hide all earlier keys
STEEP, HALF_CHUNK = 69.0, 32  # a channel that decays by more than e^-69 within so many tokens is steep


class Retention(NamedTuple):
    """Shares of each write that are left, read with its key, and that decays and later writes took; their sum is 1.

    A later write can also add, if its erase key is not a multiple of its key.
    """

    left: Tensor  # share of write s that its key still reads at token t [T,W]; NaN before the write
    decayed: Tensor  # share that decays took until then [T,W]
    erased: Tensor  # share that later writes took until then [T,W]
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
        self.arguments: dict[str, Any] = {
            key: x.double().cpu() if isinstance(x, Tensor) and x.is_floating_point() else x
            for key, x in call.arguments.items()
        }
        q, v = self.arguments["q"], self.arguments["v"]
        self.tokens, self.heads, self.subheads = q.shape[1], v.shape[2], self.arguments.get("subheads", 1)
        self.steps = self.arguments.get("steps", 1)
        self.has_state = call.op is not kernels.window_attention
        if not self.has_state:
            self.heads = q.shape[2]
        self._spectra: dict[int, Spectra] = {}
        # with separate keys, erasing is a write without a value before each write
        self.erases_apart = self.arguments.get("erase_write") is not None

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
        if not self.has_state:
            return self._softmax(head)
        matrix = torch.zeros(self.tokens, self.tokens * self.steps, dtype=torch.float64)
        own = slice(1, None, 2) if self.erases_apart else slice(None)
        for start, stop in self.spans():
            for each in range(self.subheads) if subhead is None else [subhead]:
                part = self.recurrence(head, each, start, stop, channel).attention()
                matrix[start:stop, start * self.steps : stop * self.steps] += part[:, own]
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
        T, n, stride = self.tokens, self.steps, 2 if self.erases_apart else 1
        shares = torch.full((3, T, T * n), math.nan, dtype=torch.float64)
        eraser, most = torch.full((T * n,), -1), torch.zeros(T * n, dtype=torch.float64)
        for start, stop in self.spans():
            *parts, by, took = self.recurrence(head, subhead, start, stop).retention()
            writes, own = slice(start * n, stop * n), slice(stride - 1, None, stride)
            shares[:, start:stop, writes] = torch.stack(parts)[:, :, own]
            eraser[writes], most[writes] = torch.where(by < 0, by, by // stride + start * n)[own], took[own]
        left, decayed, erased = shares
        return Retention(left, decayed, erased, eraser, most)

    def spectra(self, every: int = 64) -> Spectra:
        """Singular values of the states at the ends of chunks of `every` tokens, from the op itself.

        Raises:
            UserError: The layer has no matrix state.
        """
        self._check(state=True)
        if every in self._spectra:
            return self._spectra[every]
        left_out = {"cu_seqlens", "initial_state", "return_state", "consume_state"}
        streams, ends, values = {key: x for key, x in self.arguments.items() if key not in left_out}, [], []
        for start, stop in self.spans():
            state = None
            for first in range(start, stop, every):
                ends.append(min(first + every, stop))
                part = {key: self._tokens(x, first, ends[-1]) for key, x in streams.items()}
                _, state = self.call.op(**part, initial_state=state, return_state=True)
                values.append(torch.linalg.svdvals(state[0].unflatten(0, (-1, self.subheads)).flatten(1, 2)))
        return self._spectra.setdefault(every, Spectra(torch.tensor(ends), torch.stack(values)))

    def half_lives(self) -> Tensor:
        """Tokens after which half of a channel is left at its mean log decay [H·E,K or 1]; inf without a decay.

        A reset counts as a log decay of −1,000.
        """
        return -math.log(2) / self._log_decay().clamp(min=-1e3).mean(0)

    def steep_share(self) -> float:
        """Share of heads, channels and halves of chunks that decay by more than e^-69."""
        parts = [part.sum(0) for part in self._log_decay().split(HALF_CHUNK)]
        return float(torch.stack(parts).lt(-STEEP).double().mean())

    def recurrence(self, head: int, subhead: int, start: int, stop: int, channel: int = 0) -> Recurrence:
        """One recurrence over the tokens of a document, in fp64."""
        a = dict(self.arguments)
        by_channel = self.call.op is kernels.value_decay_recurrence
        if self.erases_apart:
            streams = two_steps(a["q"], a["k"], a["v"], a["erase"], a.pop("erase_write"), self.steps, self.subheads)
            a |= dict(zip(("q", "k", "v", "erase", "steps"), streams, strict=True))
            a["beta"] = None if a.get("beta") is None else a["beta"].repeat_interleave(2, 1)
        further = {key: a[key] for key in ("erase", "read_before", "steps") if key in a}
        gates = (None if by_channel else a.get("log_decay"), a.get("beta"), self.subheads, a.get("scale"))
        r = check(a["q"], a["k"], a["v"], *gates, None, None, beta_per_channel=True, **further)
        of_keys, own = head // r.repeats * r.subheads + subhead, head * r.subheads + subhead
        writes = slice(start * r.steps, stop * r.steps)
        k = r.k[0, writes, of_keys]
        g = self._log_decay()[start:stop, own]
        g = g[:, channel : channel + 1] if by_channel else g
        decay = k.new_zeros(len(k), g.shape[1])
        decay[:: r.steps] = g
        beta = None if r.beta is None else r.beta[0, writes, own]
        erase = None
        if self.call.op is kernels.delta_rule:
            erase = k if r.erase is None else r.erase[0, writes, own]
            erase = erase if beta is None else erase * (beta if beta.dim() == 2 else beta[:, None])
        on_values = k.new_ones(len(k)) if beta is None or beta.dim() == 2 else beta
        q = r.q[0, start:stop, of_keys] * r.scale
        return Recurrence(q, k, decay, on_values, erase, r.read_before, r.steps)

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

    def _tokens(self, x: Any, first: int, last: int) -> Any:
        """The tokens first … last, or their steps, of an argument that has an axis of tokens."""
        if not isinstance(x, Tensor) or x.dim() < 3:
            return x
        steps = x.shape[1] // self.tokens
        return x[:, first * steps : last * steps]

    def _softmax(self, head: int) -> Tensor:
        a, t = self.arguments, torch.arange(self.tokens)
        q, k = a["q"][0, :, head], a["k"][0, :, head * a["k"].shape[2] // self.heads]
        scores = q @ k.mT * (q.shape[1] ** -0.5 if a.get("scale") is None else a["scale"])
        distance = t[:, None] - t
        hidden = (distance < 0) | (distance >= (a.get("window_size") or self.tokens))
        owner = torch.zeros_like(t)
        for number, (start, stop) in enumerate(self.spans()):
            owner[start:stop] = number
        if a.get("log_decay") is not None:
            g = a["log_decay"][0, :, head]
            owner = owner + self.tokens * (g <= RESET).cumsum(0)
            b = g.masked_fill(g <= RESET, 0).cumsum(0)
            scores = scores + b[:, None] - b
        return scores.masked_fill(hidden | (owner[:, None] != owner), -torch.inf).softmax(-1)

    def _check(self, head: int = 0, subhead: int = 0, *, state: bool = False) -> None:
        if state and not self.has_state:
            raise UserError(f"layer {self.number}: {self.name} has no matrix state")
        for what, value, count in (("head", head, self.heads), ("subhead", subhead, self.subheads)):
            if not 0 <= value < count:
                raise UserError(f"{what}: {value} is not one of the {count} of layer {self.number}, which count from 0")
