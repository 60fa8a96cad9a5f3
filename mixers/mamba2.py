"""Mamba2."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import kernels
from kernels.skip_readout import skip_readout

from .arguments import check_numbers, check_sizes
from .base import LinearMixer, Site, Streams, checked_site
from .decay import Discretisation, Mamba2Discretisation
from .features import Features
from .growth import Growth, Init
from .norm import GatedRMSNorm
from .projection import OutputProjection, Projection, split_heads
from .registry import register


@register(
    recurrence="S_t = exp(−A·dt_t) S_{t−1} + dt_t B_t x_tᵀ,  y_t = S_tᵀ C_t + D·x_t",
    paper="Transformers are SSMs, arXiv 2405.21060",
    tiny={"head_dim": 16, "state_dim": 32},
)
class Mamba2(LinearMixer):
    """S_t = exp(−A·dt_t) S_{t−1} + dt_t B_t x_tᵀ, y_t = S_tᵀ C_t + D·x_t (arXiv 2405.21060).

    In terms of the recurrence: q = C and k = B, shared by all heads of a group and never repeated in memory; v = x;
    beta = dt.

    Args:
        site: Where the layer sits in the model.
        expand: Inner width over hidden_size, unless `num_heads` is set.
        num_heads: Number of heads; null for expand · hidden_size / head_dim.
        head_dim: Value size V of a head.
        state_dim: Key size K, "the state size" of the paper.
        num_groups: Groups of heads that share B and C.
        xbc: Features of x, B and C.
        decay: The module that computes dt and the decays; A starts uniform in [1, 16] by default.
        norm_eps: Added inside the root of the output norm.
    """

    keep_fp32 = ("D",)
    scale = 1.0
    fused_token = True
    head_weights = ("in_proj.C.weight", "in_proj.B.weight", "in_proj.x.weight", "out_proj.weight")

    def __init__(
        self,
        site: Site,
        *,
        expand: int = 2,
        num_heads: int | None = None,
        head_dim: int = 64,
        state_dim: int = 128,
        num_groups: int = 1,
        xbc: Features = Features(4, bias=True, activation="silu"),
        decay: Callable[[int], Discretisation] = Mamba2Discretisation,
        norm_eps: float = 1e-5,
    ):
        site = checked_site(site, type(self))
        sizes = {"expand": expand, "num_heads": num_heads, "head_dim": head_dim, "state_dim": state_dim}
        check_sizes({**sizes, "num_groups": num_groups})
        check_numbers({"norm_eps": norm_eps}, positive=False)
        width = expand * site.hidden_size if num_heads is None else num_heads * head_dim
        if width % head_dim:
            raise kernels.UserError(
                f"head_dim: {head_dim} does not divide the inner width {width} (expand {expand} · "
                f"hidden_size {site.hidden_size})"
            )
        super().__init__(
            site,
            num_heads=width // head_dim,
            num_key_heads=num_groups,
            key_size=state_dim,
            value_size=head_dim,
            q=xbc,
            k=xbc,
            v=xbc,
        )
        keys = num_groups * state_dim
        self.in_proj = Projection(
            site.hidden_size, {"z": width, "x": width, "B": keys, "C": keys, "dt": self.gate_heads}
        )
        self.decay, self.D = decay(self.gate_heads), nn.Parameter(torch.empty(self.num_heads))
        self.norm = GatedRMSNorm(width, eps=norm_eps, gate_first=True, groups=num_groups)
        self.out_proj = OutputProjection(width, site.hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.D)

    def project(self, x: Tensor) -> Streams:
        z, v, k, q, dt = self.in_proj(x)
        G = self.num_key_heads
        return Streams(split_heads(q, G), split_heads(k, G), split_heads(v, self.num_heads), dt, gate=z)

    def gates(self, s: Streams) -> Streams:
        log_decay, dt = self.decay(s.log_decay)
        return s.replace(log_decay=log_decay, beta=dt)

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        assert s.log_decay is not None
        if not self.decay.fused:
            return None
        decay = kernels.GateInputs(s.log_decay, self.decay.A_log, self.decay.dt_bias, None)
        return kernels.TokenOps(decay=decay, skip=self.D)

    def token_readout(self, y: Tensor, s: Streams) -> Tensor:
        return self.out_proj(self.norm(y.flatten(2), s.gate))

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        skipped = skip_readout(o, s.v, self.D.expand(o.shape[:3]))
        return self.out_proj(self.norm(skipped.flatten(2), s.gate))


class WiderMamba2(Growth):
    """Mamba2: a larger state_dim, so more rows of B and C (StateX, section 4.2); 128 → 512 in the paper.

    Its layers are MLPs as well, so that `reinit` draws only B, C, A and dt's bias anew. New rows are drawn at random;
    with `preserve` those of C are 0, weights and biases, so that what the new rows of B write is not read yet. (In both
    they would get no gradient.)
    """

    grows, way = Mamba2, "widen"
    renewed = ("in_proj.B.", "in_proj.C.", "k_features.", "q_features.", "decay.")
    renews_norm = False

    def arguments(self, factor: int, init: Init) -> dict[str, object]:
        return {"state_dim": self.mixer.key_size * factor}

    def resized(self, name: str, old: Tensor, fresh: Tensor, init: Init) -> Tensor:
        grouped = fresh.clone().unflatten(0, (self.mixer.num_key_heads, -1))
        grouped[:, : self.mixer.key_size] = old.unflatten(0, (self.mixer.num_key_heads, -1))
        if init == "preserve" and name.startswith(("in_proj.C.", "q_features.bias")):
            grouped[:, self.mixer.key_size :] = 0
        return grouped.flatten(0, 1)
