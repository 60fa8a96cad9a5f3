"""Mamba-3."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import kernels
from kernels.core.elementwise import tanh
from kernels.rotation import rotation
from kernels.skip_readout import own_shares, skip_readout
from kernels.trapezoid_token import Carried as CarriedToken
from kernels.trapezoid_token import Columns, Weights, trapezoid_token

from .angles import cumulative_angles
from .arguments import check_numbers, check_sizes
from .base import Carried, LinearMixer, LinearState, Site, Streams, checked_site
from .context_parallel import ContextParallel
from .decay import Trapezoid
from .norm import GateOnly, Output, RMSNorm
from .projection import OutputProjection, Projection, split_heads
from .registry import register
from .shift import check_sequences, recomputed_shift, shifted_beside


@register(
    recurrence="S_t = α_t S_{t−1} + (1 − λ_t) dt_t α_t B_{t−1} x_{t−1}ᵀ + λ_t dt_t B_t x_tᵀ,  y_t = S_tᵀ C_t + D·x_t",
    paper="Mamba-3, arXiv 2603.15569",
    tiny={"head_dim": 16, "state_dim": 32},
)
class Mamba3(LinearMixer):
    """S_t = α_t S_{t−1} + (1 − λ_t) dt_t α_t B_{t−1} x_{t−1}ᵀ + λ_t dt_t B_t x_tᵀ, y_t = S_tᵀ C_t + D·x_t.

    Mamba-3 in its SISO form (arXiv 2603.15569). α_t = exp(−A_t dt_t). B and C are normalised, get a bias for each head,
    and a rotary embedding that depends on the data, which equals a complex decay: pair j of their first channels is
    rotated by the angle π Σ_{s≤t} tanh(a_{s,j}) dt_s.

    The recurrence runs on the matrix P_t = S_t − λ_t dt_t B_t x_tᵀ, to which a token is added one step later, with the
    gate α_{t+1} (λ_t dt_t + (1 − λ_{t+1}) dt_{t+1}).
    torch.compile (PyTorch 2.11, on a GPU) can give wrong gradients unless Inductor's `comprehensive_padding` is False.

    Args:
        site: Where the layer sits in the model.
        expand: Inner width over hidden_size.
        head_dim: Value size V of a head.
        state_dim: Key size K, "the state size" of the paper.
        num_groups: Groups of heads that share B and C, apart from their biases.
        rotary_fraction: Share of the channels of B and C that are rotated, above 0 and at most 1.
        decay: The module that computes the decays, dt and λ.
        output: Gate and norm of the output of each head: GateOnly, GatedRMSNorm, or another Output.
        norm_eps: Added inside the root of the norms of B and C.
    """

    no_weight_decay = keep_fp32 = ("D", "q_bias", "k_bias")
    scale, write_delay = 1.0, 1
    fused_token = True
    head_weights = ("in_proj.C.weight", "in_proj.B.weight", "in_proj.x.weight", "out_proj.weight")

    def __init__(
        self,
        site: Site,
        *,
        expand: int = 2,
        head_dim: int = 64,
        state_dim: int = 128,
        num_groups: int = 1,
        rotary_fraction: float = 0.5,
        decay: Callable[[int], Trapezoid] = Trapezoid,
        output: Callable[[int], Output] = GateOnly,
        norm_eps: float = 1e-5,
    ):
        check_sizes({"expand": expand, "head_dim": head_dim, "state_dim": state_dim, "num_groups": num_groups})
        check_numbers({"rotary_fraction": rotary_fraction})
        check_numbers({"norm_eps": norm_eps}, positive=False)
        width = expand * checked_site(site, type(self)).hidden_size
        if width % head_dim:
            raise kernels.UserError(
                f"head_dim: {head_dim} does not divide the inner width {width} (expand {expand} · "
                f"hidden_size {site.hidden_size})"
            )
        heads = width // head_dim
        super().__init__(site, num_heads=heads, num_key_heads=num_groups, key_size=state_dim, value_size=head_dim)
        self.pairs = int(self.subhead_size * rotary_fraction) // 2
        if rotary_fraction > 1 or not self.pairs:
            raise kernels.UserError(
                f"rotary_fraction: {rotary_fraction} of {self.subhead_size} channels must be 2 to {self.subhead_size}"
            )
        keys, gates = num_groups * state_dim, self.gate_heads
        self.output = output(head_dim)
        widths = {"z": width} if self.output.gated else {}
        widths |= {"x": width, "B": keys, "C": keys, "dt": gates, "A": gates, "trap": gates, "angles": self.pairs}
        self.in_proj = Projection(site.hidden_size, widths)
        self.q_norm, self.k_norm = (RMSNorm(self.subhead_size, norm_eps) for _ in range(2))
        self.q_bias, self.k_bias = (nn.Parameter(torch.empty(gates, self.subhead_size)) for _ in range(2))
        self.decay, self.D = decay(gates), nn.Parameter(torch.empty(heads))
        self.out_proj = OutputProjection(width, site.hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.q_bias, self.k_bias, self.D):
            nn.init.ones_(parameter)

    def project(self, x: Tensor) -> Streams:
        parts = dict(zip(self.in_proj.widths, self.in_proj(x), strict=True))
        G, H = self.num_key_heads, self.num_heads
        z = split_heads(parts["z"], H) if "z" in parts else None
        q, k, v = split_heads(parts["C"], G), split_heads(parts["B"], G), split_heads(parts["x"], H)
        return Streams(q, k, v, parts["A"], parts["dt"], (z, parts["trap"], parts["angles"]))

    def gates(self, s: Streams) -> Streams:
        assert s.beta is not None
        assert s.log_decay is not None
        z, trap, angles = s.gate
        log_decay, dt, share = self.decay(s.beta, s.log_decay, trap)
        rates = tanh(kernels.at_least_fp32(angles))  # in half turns
        s = s.replace(q=self.q_norm(s.q), k=self.k_norm(s.k))
        return s.replace(log_decay=log_decay, beta=share * dt, gate=(z, (1 - share) * dt, rates, dt))

    def gained(self, s: Streams) -> Streams:
        return s  # `carry` applies the gain, after the bias: with it, q = 0 does not give 0

    def carry(
        self, s: Streams, carried: Carried | None, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
    ) -> tuple[Streams, Carried]:
        assert s.beta is not None
        assert s.log_decay is not None
        z, rest, rates, dt = s.gate
        past = carried or (None,) * 4
        check_sequences(past[0], s.v, cu_seqlens)
        where = (cu_seqlens, context_parallel)
        angles, earlier, last_angles = cumulative_angles(rates, dt, past[0], *where)
        k, last_k = recomputed_shift(s.k, past[1], *where)
        v, value, last_v = shifted_beside(s.v, past[2], *where)
        written, last_written = recomputed_shift(s.beta, past[3], *where)
        own = s.beta if self.q_gain is None else self.q_gain(s.beta[..., None])[..., 0]
        biases = dict(q_bias=self.q_bias, k_bias=self.k_bias, D=self.D)
        shares = own_shares(s.q, s.k, own, **biases)
        q = rotation(s.q, self.q_bias, angles, subheads=self.subheads)
        q = q if self.q_gain is None else self.q_gain(q)
        k = rotation(k, self.k_bias, earlier, subheads=self.subheads)  # the first k is only a bias, but its v is 0
        s = s.replace(q=q, k=k, v=v, beta=s.log_decay.exp() * (written + rest), gate=(z, value, shares))
        return s, tuple(x for x in (last_angles, last_k, last_v, last_written) if x is not None)

    def init_carried(self, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> Carried:
        gates = self.gate_heads
        angles = torch.zeros(batch_size, gates, self.pairs, device=device, dtype=torch.float64)
        shapes = ((self.num_key_heads * self.subheads, self.subhead_size), (self.num_heads, self.value_size), (gates,))
        return angles, *(torch.zeros(batch_size, *shape, device=device, dtype=dtype) for shape in shapes)

    @property
    def recurrent_key_heads(self) -> int:
        return self.num_heads

    def one_token(self, s: Streams, state: LinearState) -> tuple[Tensor, LinearState] | None:
        if self.q_expand is not None or self.scale != 1:
            return None
        if not (isinstance(self.decay, Trapezoid) and self.decay.fused):
            return None
        if any(type(norm) is not RMSNorm for norm in (self.q_norm, self.k_norm)) or self.q_norm.eps != self.k_norm.eps:
            return None
        assert s.beta is not None
        assert s.log_decay is not None
        z, trap, angles = s.gate
        columns = Columns(*s[:3], s.beta, s.log_decay, trap, angles, z if self._gate_only else None)
        of_norms = self.q_norm.weight, self.k_norm.weight
        weights = Weights(*of_norms, self.q_bias, self.k_bias, self.decay.dt_bias, self.D)
        carried = CarriedToken(*state.carried)
        y, carried, matrix = trapezoid_token(
            columns, weights, carried, state.matrix, eps=self.q_norm.eps, consume_state=True
        )
        return self._projected_output(y, z), state._replace(matrix=matrix, carried=tuple(carried))

    @property
    def _gate_only(self) -> bool:
        """Return whether the op of the readout also applies the gate."""
        return isinstance(self.output, GateOnly) and self.output.fused

    def _projected_output(self, y: Tensor, z: Tensor | None) -> Tensor:
        return self.out_proj((y if self._gate_only else self.output(y, z)).flatten(2))

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        z, value, shares = s.gate
        return self._projected_output(skip_readout(o, value, shares, z if self._gate_only else None), z)
