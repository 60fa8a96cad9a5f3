"""A block: a token mixer and an MLP on the residual stream, with the norms before them or after them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels import UserError, recomputing
from kernels.core.backend import on_gpu
from kernels.core.torch_internals import tree_map
from mixers import Chunk, ContextParallel, Norm, TokenMixer, takes_context_parallel
from mixers.arguments import check_numbers
from mixers.interface import checked_result, checked_streams, streams_of
from zoo.arguments import described
from zoo.lm.mlp import ChannelMixer

OF_LAYER = "model.stack: layer "  # how notes about a layer begin


@dataclass(frozen=True)
class Multipliers:
    """Factors between the parts of a model (Granite; arXiv 2408.13359).

    Args:
        embedding: Factor of the embeddings.
        residual: Factor of the output of each mixer and MLP, before it is added to the residual stream.
        logits_scaling: Divisor of the logits. The input of the head is divided by it.

    Raises:
        UserError: A number is not finite or not above 0.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits_scaling: float = 1.0

    def __post_init__(self) -> None:
        check_numbers({f"multipliers.{name}": value for name, value in vars(self).items()})


class LayerState(NamedTuple):
    """The state of a layer both of whose mixers have one."""

    mixer: Any
    mlp: Any


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)) if there is an MLP.

    The output of a block is added to the residual stream by the norm that follows, in the next block or the last one.

    Args:
        mixer: The token mixer.
        mlp: The channel mixer, if any.
        norm: Makes a norm of the residual stream's size.
        recompute: Whether a GPU computes what is cheap (norms, gates, gated products, expanded queries and keys) again
            in the backward pass, rather than keeping it.
        residual_multiplier: Factor of the outputs of mixer and MLP.
    """

    def __init__(
        self,
        mixer: TokenMixer,
        mlp: ChannelMixer | None,
        norm: Callable[[], Norm],
        *,
        recompute: bool = True,
        residual_multiplier: float = 1.0,
    ):
        super().__init__()
        self.recompute, self.residual_multiplier = recompute, residual_multiplier
        self.mixer_norm, self.mixer = norm(), mixer
        self.mlp_norm = None if mlp is None else norm()
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        state: Any,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None = None,
        passed: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Any, Mapping[str, Tensor]]:
        """One layer of a model.

        Args:
            x, y: [B,T,hidden]; their sum is the residual stream. None as y for 0.
            state: Of `init_state`; None to train.
            cu_seqlens, context_parallel: As for the mixer.
            passed: The streams of lower layers by name.

        Returns:
            x, y and the state after the block, and the streams for the layers above.
        """
        inputs = (x, y, state, cu_seqlens, context_parallel, passed or {})
        # a compiler decides for itself
        if self.recompute and on_gpu(x) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            with recomputing():
                return self._forward(*inputs)
        return self._forward(*inputs)

    def _forward(
        self,
        x: Tensor,
        y: Tensor | None,
        state: Any,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None,
        passed: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, Any, Mapping[str, Tensor]]:
        of_mixer, of_mlp = self._parts(state)
        x, h = self._before(self.mixer_norm, x, y)
        y, of_mixer, passed = mix(self.mixer, h, of_mixer, cu_seqlens, context_parallel, passed)
        y = self._after(self.mixer_norm, y)
        if self.mlp is not None and self.mlp_norm is not None:
            x, h = self._before(self.mlp_norm, x, y)
            y, of_mlp = mix_channels(self.mlp, h, of_mlp, cu_seqlens, context_parallel)
            y = self._after(self.mlp_norm, y)
        return x, y, LayerState(of_mixer, of_mlp) if isinstance(state, LayerState) else of_mixer, passed

    def _before(self, norm: Norm, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream x + y, and the input of a mixer."""
        return (x, norm(x)) if y is None else norm(x, y)

    def _after(self, norm: Norm, y: Tensor) -> Tensor:
        """The summand of the residual stream, from the output of a mixer."""
        return y if self.residual_multiplier == 1 else y * self.residual_multiplier

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """The state of the mixer, or a `LayerState` if the channel mixer has one as well."""
        state = self.mixer.init_state(batch_size, device, dtype)
        if self.mlp is None or not self.mlp.stateful:
            return state
        return LayerState(state, self.mlp.init_state(batch_size, device, dtype))

    def _parts(self, state: Any) -> tuple[Any, Any]:
        """The states of the mixer and of the channel mixer, from a state of `init_state` or None."""
        if state is None or self.mlp is None or not self.mlp.stateful:
            return state, None
        if not isinstance(state, LayerState):
            raise UserError(f"state: {type(self.mlp).__name__} has one, so that the layer needs a state of init_state")
        return state

    def state_size(self, length: int | None = None) -> int | float:
        """Elements of one sequence's state, as `TokenMixer.state_size` counts them."""
        return self.mixer.state_size(length) + (0 if self.mlp is None else self.mlp.state_size(length))


class PostNormBlock(Block):
    """x + norm(mixer(x)), then x + norm(mlp(x)) if there is an MLP (OLMo 2, arXiv 2501.00656). Otherwise a `Block`."""

    def _before(self, norm: Norm, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if y is None else x + y
        return total, total

    def _after(self, norm: Norm, y: Tensor) -> Tensor:
        return super()._after(norm, norm(y))


def note_layer(error: Exception, layer: int, *parts: object) -> None:
    """Add a note to an exception of a layer: which of its parts is not this project's, and what fails in its file."""
    for cls in map(type, parts):
        if cls.__module__.partition(".")[0] not in ("mixers", "zoo", "builtins") and not isinstance(error, UserError):
            error.add_note(f"{OF_LAYER}{layer}, {cls.__name__}, fails: {described(error, cls.__module__)}")
            return


def mix(
    mixer: TokenMixer,
    x: Tensor,
    state: Any,
    cu_seqlens: Tensor | None,
    context_parallel: ContextParallel | None,
    passed: Mapping[str, Tensor],
) -> tuple[Tensor, Any, Mapping[str, Tensor]]:
    """Call a mixer, and return y, its state and the streams for the layers above.

    It needs the argument `context_parallel` only if there is one, and `passed` only if it declares streams. With a
    `Chunk` as its state, x is that of the newest tokens, and streams are those of all tokens of the chunk.
    """
    if isinstance(state, Chunk) and not mixer.takes_chunks:
        return _replayed(lambda x, state: mix(mixer, x, state, None, None, passed), x, state)
    options = _options(mixer, cu_seqlens, context_parallel)
    if not streams_of(mixer):
        return *checked_result(mixer(x, state, **options), mixer, x), passed
    y, state, streams = checked_streams(mixer(x, state, passed=passed, **options), mixer, x)
    return y, state, {**passed, **streams}


def mix_channels(
    mlp: ChannelMixer, x: Tensor, state: Any, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
) -> tuple[Tensor, Any]:
    """Call a channel mixer, with the arguments of a token mixer if it is stateful."""
    if not mlp.stateful:
        return mlp(x), None
    if isinstance(state, Chunk):
        return _replayed(lambda x, state: mix_channels(mlp, x, state, None, None), x, state)
    return checked_result(mlp(x, state, **_options(mlp, cu_seqlens, context_parallel)), mlp, x)


def _replayed(layer: Callable[[Tensor, Any], tuple[Any, ...]], x: Tensor, chunk: Chunk) -> Any:
    """Call a layer with all tokens of a chunk; return y of those of x, the chunk after it, and what else it returns."""
    whole, inputs = chunk.kept(x, chunk.inputs)
    y, after, *rest = layer(whole, tree_map(torch.clone, chunk.state))
    return y if chunk.inputs is None else chunk.newest(y), chunk._replace(state=after, inputs=inputs), *rest


def _options(
    layer: nn.Module, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
) -> dict[str, Tensor | ContextParallel | None]:
    if context_parallel is None:
        return {"cu_seqlens": cu_seqlens}
    if not takes_context_parallel(type(layer)):
        raise UserError(f"context_parallel: {type(layer).__name__} works on whole sequences only")
    return {"cu_seqlens": cu_seqlens, "context_parallel": context_parallel}
