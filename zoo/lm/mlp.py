"""Channel mixers: layers between two token mixers, which process each token separately or with the one before it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import kernels
from kernels.activation_gate import activation_gate
from kernels.core.recompute import remake
from mixers import ContextParallel, OutputProjection, Projection, Site, TokenMixer, remembered
from mixers.arguments import check_sizes, size_or
from mixers.projection import Linear


class ChannelMixer(nn.Module):
    """A layer that mixes the channels of each token: x [...,hidden] → [...,hidden]. Subclass it to add one.

    One that also reads earlier tokens declares `stateful = True` and is called as a token mixer is,
    `forward(x, state=None, *, cu_seqlens=None, context_parallel=None) → (y, state)` for x [B,T,hidden]. Its state comes
    from `init_state`. If it cannot work on a part of a sequence, it leaves `context_parallel` out.
    """

    stateful: ClassVar[bool] = False
    site: Site  # of the layer; set by the model, which calls `reset_parameters` afterwards

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """The state before the first token; device and dtype default to those of the parameters."""
        raise kernels.UserError(f"init_state: {type(self).__name__} is not stateful, or lacks it")

    def state_size(self, length: int | None = None) -> int | float:
        """Elements of one sequence's state, as `TokenMixer.state_size` counts them."""
        return sum(x.numel() for _, x in remembered(self.init_state(1, "meta"))) if self.stateful else 0

    def flops(self, length: int) -> int:
        """Forward FLOPs of `length` tokens; by default every weight matrix is applied to every token once."""
        return 2 * length * sum(p.numel() for p in self.parameters() if p.dim() > 1)


class GLU(ChannelMixer):
    """W_down (W_gate x ⊙ W_up x), a gate without activation, without biases (arXiv 2406.16690; 2002.05202's bilinear).

    Args:
        hidden_size: Size of x.
        intermediate_size: Inner size; null for 8/3 · hidden_size, rounded up to a multiple of 256.
    """

    activation: ClassVar[Literal["identity", "silu"]] = "identity"  # of the gate

    def __init__(self, hidden_size: int, intermediate_size: int | None = None):
        super().__init__()
        check_sizes({"hidden_size": hidden_size})
        size = size_or("intermediate_size", intermediate_size, 256 * math.ceil(hidden_size * 8 / 3 / 256))
        self.in_proj = Projection(hidden_size, {"gate": size, "up": size})
        self.down_proj = OutputProjection(size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.gated_mlp(x, self.in_proj.weight, self.down_proj.weight, activation=self.activation)


class SwiGLU(GLU):
    """W_down (SiLU(W_gate x) ⊙ W_up x) without biases (arXiv 2002.05202).

    Args:
        hidden_size: Size of x.
        intermediate_size: Inner size; null for 8/3 · hidden_size, rounded up to a multiple of 256.
    """

    activation = "silu"


class SquaredReLU(ChannelMixer):
    """W_down relu(W_up x)² without biases (arXiv 2109.08668).

    Args:
        hidden_size: Size of x.
        intermediate_size: Inner size; null for 4 · hidden_size.
    """

    def __init__(self, hidden_size: int, intermediate_size: int | None = None):
        super().__init__()
        check_sizes({"hidden_size": hidden_size})
        size = size_or("intermediate_size", intermediate_size, 4 * hidden_size)
        self.up_proj, self.down_proj = Linear(hidden_size, size, bias=False), OutputProjection(size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(squared_relu(self.up_proj(x)))


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)², which a GPU computes again in the backward pass."""
    return remake(_squared_relu(x), _squared_relu, x)


_squared_relu = partial(activation_gate, activation="relu2")


class MLPLayer(TokenMixer):
    """A channel mixer as the only part of a layer: a mixer for `Pattern`, of a model without `mlp` (Nemotron-H).

    Args:
        site: Where the layer sits in the model.
        mlp: The channel mixer, which must not be stateful.
        intermediate_size: Its inner size; null for the default of the channel mixer.
    """

    mixes_tokens = False

    def __init__(
        self,
        site: Site,
        *,
        mlp: Callable[[int, int | None], ChannelMixer] = SwiGLU,
        intermediate_size: int | None = None,
    ):
        super().__init__()
        self.mlp = mlp(site.hidden_size, intermediate_size)
        if self.mlp.stateful:
            raise kernels.UserError(f"mlp: {type(self.mlp).__name__} is stateful, but MLPLayer needs one that is not")
        self.mlp.site = site

    def forward(
        self,
        x: Tensor,
        state: tuple[()] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, tuple[()] | None]:
        return self.mlp(x), state

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> tuple[()]:
        return ()

    def flops(self, length: int) -> int:
        return self.mlp.flops(length)
