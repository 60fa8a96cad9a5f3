"""The matrix LSTM (mLSTM) of xLSTM."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.core.elementwise import sigmoid, soft_cap
from kernels.recurrence_token import without_stabiliser

from .arguments import check_finite, check_numbers
from .base import Carried, LinearMixer, Site, Streams, checked_site
from .context_parallel import ContextParallel
from .features import Features
from .fusion import Fusable
from .norm import HeadLayerNorm
from .precision import KeepsFp32
from .projection import OutputProjection, Projection, split_heads
from .registry import register
from .stabiliser import stabiliser

InputGate = Literal["exponential", "sigmoid"]
EPS = 1e-6  # added to the divisor max(|n·q|, 1)


class CappedGates(KeepsFp32, Fusable):
    """cap · tanh((x + bias) / cap) of raw input and forget gates, in at least fp32.

    The biases of the forget gates start evenly spaced from 3 to 6, so that heads remember over different lengths.

    Args:
        size: Number of recurrences.
        cap: Bound of the gates before their exponential or sigmoid; null for none.
        input_bias: Initial bias of the input gates.
    """

    no_weight_decay = keep_fp32 = ("input_bias", "forget_bias")

    def __init__(self, size: int, cap: float | None, input_bias: float):
        super().__init__()
        self.cap, self.first_input_bias = cap, input_bias
        self.input_bias, self.forget_bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.input_bias.fill_(self.first_input_bias)
        # on the meta device, linspace imports SymPy
        biases = torch.linspace(3, 6, len(self.forget_bias), device="cpu", dtype=self.forget_bias.dtype)
        self.forget_bias.copy_(biases)

    def forward(self, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Raw gates [B,T,size] → bounded ones, the same shape."""
        i, f = kernels.at_least_fp32(i) + self.input_bias, kernels.at_least_fp32(f) + self.forget_bias
        return soft_cap(i, self.cap), soft_cap(f, self.cap)


@register(
    recurrence="S_t = σ(f_t) S_{t−1} + exp(i_t) k_t v_tᵀ,  y_t = S_tᵀ q_t / max(|n_t·q_t|, 1)",
    paper="xLSTM, arXiv 2405.04517",
    tiny={"input_bias": -1.0},
)
class MLSTM(LinearMixer):
    """S_t = σ(f_t) S_{t−1} + exp(i_t) k_t v_tᵀ, y_t = S_tᵀ q_t / max(|n_t·q_t|, 1) (arXiv 2405.04517).

    The layer of xLSTM 7B (arXiv 2503.13427). The normaliser n_t = σ(f_t) n_{t−1} + exp(i_t) k_t is the last column of
    the matrix. Both are scaled by exp(−m_t) with the stabiliser m_t = max(log σ(f_t) + m_{t−1}, i_t), so that no gate
    of the recurrence exceeds 1. Subheads have separate gates and stabilisers, and one normaliser. The weights of both
    gates start at zero, as in the authors' code.

    Args:
        site: Where the layer sits in the model.
        num_heads: Heads; the model's by default.
        expand_k: Width of all keys over hidden_size.
        expand_v: Width of all values over hidden_size.
        qk: Features of queries and keys.
        v: Features of values.
        input_gate: exponential, or sigmoid (arXiv 2503.14376), which needs no stabiliser.
        normaliser: Whether the output is divided by max(|n·q|, 1).
        gate_cap: Gates lie between −gate_cap and gate_cap before their exponential or sigmoid; null for no bound.
        input_bias: Initial bias of the input gates.
        norm_eps: Added inside the root of the output norm.
    """

    fused_token = True

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        qk: Features = Features(),
        v: Features = Features(),
        input_gate: InputGate = "exponential",
        normaliser: bool = True,
        gate_cap: float | None = 15.0,
        input_bias: float = -10.0,
        norm_eps: float = 1e-6,
    ):
        num_heads, _ = checked_site(site, type(self)).heads(num_heads)
        check_numbers({"expand_k": expand_k, "expand_v": expand_v, "gate_cap": gate_cap})
        check_numbers({"norm_eps": norm_eps}, positive=False)
        check_finite({"input_bias": input_bias})
        if input_gate not in get_args(InputGate):
            raise kernels.UserError(f"input_gate: {input_gate!r} must be exponential or sigmoid")
        if input_gate == "exponential" and not normaliser:
            raise kernels.UserError("normaliser: false needs input_gate=sigmoid, as exponential gates are not bounded")
        keys, values = round(site.hidden_size * expand_k), round(site.hidden_size * expand_v)
        for name, width in (("expand_k", keys), ("expand_v", values)):
            if not width or width % num_heads:
                raise kernels.UserError(f"{name}: a width of {width} cannot be divided into {num_heads} heads")
        key_size, value_size = keys // num_heads, values // num_heads
        super().__init__(site, num_heads=num_heads, key_size=key_size, value_size=value_size, q=qk, k=qk, v=v)
        self.stabilised, self.normaliser = input_gate == "exponential", normaliser
        widths = {"q": keys, "k": keys, "v": values, "i": self.gate_heads, "f": self.gate_heads, "g": values}
        self.in_proj = Projection(site.hidden_size, widths, zeros=("i", "f"))
        self.gate = CappedGates(self.gate_heads, gate_cap, input_bias)
        self.o_norm = HeadLayerNorm(num_heads, value_size, norm_eps)
        self.o_proj = OutputProjection(values, site.hidden_size)

    @classmethod
    def sized_like(cls, num_heads: int, head_dim: int, hidden_size: int) -> dict[str, object]:
        return {"num_heads": num_heads, **dict.fromkeys(("expand_k", "expand_v"), num_heads * head_dim / hidden_size)}

    def project(self, x: Tensor) -> Streams:
        q, k, v, i, f, g = self.in_proj(x)
        q, k, v, g = (split_heads(y, self.num_heads) for y in (q, k, v, g))
        return Streams(q, k, v, log_decay=f, beta=i, gate=g)

    def gates(self, s: Streams) -> Streams:
        assert s.beta is not None
        assert s.log_decay is not None
        i, f = self.gate(s.beta, s.log_decay)
        return s.replace(log_decay=F.logsigmoid(f), beta=i if self.stabilised else sigmoid(i))

    def carry(
        self, s: Streams, carried: Carried | None, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
    ) -> tuple[Streams, Carried]:
        assert s.beta is not None
        assert s.log_decay is not None
        log_forget, log_input = s.log_decay, s.beta
        v = torch.cat([s.v, s.v.new_ones(1).expand(*s.v.shape[:3], 1)], -1) if self.normaliser else s.v
        if not self.stabilised:
            return s.replace(v=v, gate=(s.gate, log_input.new_ones(1))), ()
        past = carried[0] if carried else None
        m, before, last = stabiliser(log_forget, log_input, past, cu_seqlens, context_parallel)
        log_decay, beta = without_stabiliser(log_forget, log_input, m, before)
        of_heads = m.unflatten(-1, (self.num_heads, self.subheads))
        top = of_heads.amax(-1)
        q = s.q if self.subheads == 1 else s.q * (of_heads - top[..., None]).exp().flatten(2)[..., None].to(s.q.dtype)
        floor = (-top).exp().to(log_input.dtype)[..., None]
        return s.replace(q=q, v=v, log_decay=log_decay, beta=beta, gate=(s.gate, floor)), (last,)

    def init_carried(self, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> Carried:
        shape = (batch_size, self.gate_heads)
        return (torch.zeros(shape, device=device, dtype=torch.float64),) if self.stabilised else ()

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        heads, key_size, value_size = super().matrix_shape
        return heads, key_size, value_size + self.normaliser

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        assert s.beta is not None
        assert s.log_decay is not None
        parts = ((self.gate, CappedGates), (self.o_norm, HeadLayerNorm))
        if not all(isinstance(part, kind) and part.fused for part, kind in parts):
            return None
        biases = self.gate.forget_bias, self.gate.input_bias
        decay = kernels.CappedGates(s.log_decay, s.beta, *biases, self.gate.cap, self.stabilised)
        weight = self.o_norm.weight.view(self.num_heads, -1)
        norm = kernels.GatedNorm(s.gate, weight, self.o_norm.eps, activation="sigmoid")
        divisor_eps = EPS if self.normaliser else None
        return kernels.TokenOps(decay=decay, norm=norm, centred=True, divisor_eps=divisor_eps)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        gate, floor = s.gate
        if self.normaliser:
            o = kernels.at_least_fp32(o)
            o, n = o[..., :-1], o[..., -1:]
            o = o / (torch.maximum(n.abs(), floor) + EPS)
        return self.o_proj(self.o_norm(o, gate).flatten(2))
