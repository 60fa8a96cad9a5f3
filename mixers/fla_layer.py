"""Layers of flash-linear-attention as token mixers."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import kernels
from kernels.core.documents import documents

from .base import Site, checked_site, dense_flops
from .registry import did_you_mean
from .wrapped import Wrapped, WrappedState

FROM_SITE = ("hidden_size", "d_model", "layer_idx")
STREAMS = ("v_first", "shared_k", "shared_v")  # arguments of `forward` that another layer of the model computes


class FLALayer(Wrapped):
    """A class of `fla.layers` as a token mixer. It requires a GPU and the extra `fla`.

    hidden_size and layer_idx come from the model, all other arguments from `arguments`. Like any wrapped module, the
    layer keeps its past inputs as the state and recomputes them at each decoding step. Packed documents take one call
    if the layer supports `cu_seqlens`, and otherwise one call per document. Expansion and context parallelism are not
    supported. `flops` counts the weights only. Linear maps are initialised like those of the rest of the model, all
    other parameters by the layer.

    Args:
        site: Where the layer sits in the model.
        layer: Name of the class, such as GatedDeltaNet.
        arguments: Keyword arguments of its constructor.
    """

    def __init__(self, site: Site, *, layer: str, arguments: Mapping[str, Any] | None = None):
        build = _constructor(layer, checked_site(site, type(self)), dict(arguments or {}))
        super().__init__(site, module=lambda _: build())
        self._build = build
        code = inspect.unwrap(type(self.module).forward).__code__
        self.packs = "cu_seqlens" in (*code.co_varnames, *code.co_consts)
        for part in self.module.modules():
            marked = [n for n, p in part.named_parameters(recurse=False) if getattr(p, "_no_weight_decay", False)]
            part.no_weight_decay = tuple(marked)  # type: ignore[assignment]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Copy parameters and buffers from a newly built layer, since some of its modules cannot be reset."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        if any(x.is_meta for x in tensors):
            return
        with torch.device("cpu"):
            fresh = self._build()
        for x, y in zip(tensors, [*fresh.parameters(), *fresh.buffers()], strict=True):
            x.copy_(y)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: WrappedState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, WrappedState | None]:
        self.check_device(x.device)
        if cu_seqlens is None or state is not None or not self.packs:
            return super().forward(x, state, cu_seqlens=cu_seqlens)
        bounds = documents(cu_seqlens, x.shape[1], len(x)).bounds
        if len({*bounds}) < len(bounds):  # fla's kernels do not support empty documents
            cu_seqlens = cu_seqlens.unique_consecutive()
        return self.run(x, cu_seqlens=cu_seqlens), None

    def check_device(self, device: torch.device) -> None:
        if device.type == "cpu" and type(self.module).__module__.startswith("fla."):
            name = type(self.module).__name__
            raise kernels.UserError(
                f"layer: the kernels of flash-linear-attention require a GPU, but {name} is on the CPU"
            )

    def run(self, x: Tensor, **documents: Tensor) -> Any:
        """Return the layer's output y for x [B,T,hidden]; some layers return a tuple that begins with y."""
        result = self.module(x, **documents)
        return result[0] if isinstance(result, tuple) else result

    def flops(self, length: int) -> int:
        return dense_flops(self, length)


def _constructor(name: str, site: Site, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """Check the arguments, and return a function that builds one layer.

    Raises:
        UserError: The package is missing or lacks this layer, the layer cannot be a mixer, or an argument is unknown.
    """
    try:
        layers = import_module("fla.layers")
    except ImportError as error:
        raise kernels.UserError(
            f"layer: needs flash-linear-attention ({error}); pip install 'token-mixer-zoo[fla]'"
        ) from None
    if name not in layers.__all__:
        hint, names = did_you_mean(name, layers.__all__), ", ".join(layers.__all__)
        raise kernels.UserError(f"layer: fla.layers has no {name!r}{hint} (known: {names})")
    layer = getattr(layers, name)
    taken = inspect.signature(layer.forward).parameters
    if shared := [stream for stream in STREAMS if stream in taken]:
        raise kernels.UserError(f"layer: {name} reads {shared[0]} of another layer, which FLALayer does not support")
    parameters = inspect.signature(layer).parameters
    allowed = [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD and n not in FROM_SITE]
    for key in arguments:
        if key in FROM_SITE:
            raise kernels.UserError(f"arguments: {key} of {name} comes from the model; leave it out")
        if key not in allowed:
            hint = did_you_mean(key, allowed)
            raise kernels.UserError(f"arguments: {name} takes no {key!r}{hint} (known: {', '.join(allowed)})")
    of_site = {"hidden_size": site.hidden_size, "layer_idx": site.layer}
    arguments |= {key: value for key, value in of_site.items() if key in parameters}
    return partial(_built, name, layer, arguments)


def _built(name: str, layer: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    try:
        return layer(**arguments)
    except Exception as error:  # fla raises many types, mostly for sizes that do not fit
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise kernels.UserError(f"layer: {name} cannot be built with these arguments ({reason})") from error
