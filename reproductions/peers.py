"""Other libraries to compare with: flash-linear-attention (FLA), FlashQLA, PyTorch's SDPA and FlexAttention.

The first two are imported only on request.
"""

import importlib
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import UserError
from reproductions.peer_ops import PEERS, PeerOp
from reproductions.similar import SIMILAR
from zoo.lm.model import LanguageModel
from zoo.performance.bench_calls import OPS, BenchCall, Tensors
from zoo.performance.device import version
from zoo.saved.public.families import FAMILIES

Peer = Callable[[Tensors], Tensor]
LIBRARIES = ("fla", "flash_qla", "sdpa", "cudnn", "flex_attention")  # with which the names of peers begin


def require(device: torch.device) -> None:
    """Raise a UserError if FLA cannot run."""
    if device.type != "cuda":
        raise UserError("device: flash-linear-attention needs a CUDA device")
    if version("flash-linear-attention") is None:
        raise UserError("libraries: flash-linear-attention is not installed; pip install flash-linear-attention")
    try:
        chunks: Any = importlib.import_module("fla.ops.common.chunk_o")
    except ImportError as error:
        raise UserError(f"libraries: flash-linear-attention cannot be imported ({error})") from None
    # FLA refuses its gated backward on Hopper under Triton >= 3.4.0 and < 3.7.1, where its gradients are wrong. Only
    # its time is measured here, so the refusal is switched off.
    chunks.IS_NVIDIA_HOPPER = False
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA's own kernels are timed; it calls FlashQLA where that is installed


def require_for(ops: Iterable[str], device: torch.device, libraries: Collection[str] | None = None) -> None:
    """Raise a UserError if FLA is needed for one of the ops and cannot run, or FlashQLA is named and not installed."""
    if any(OPS[name].decay is not None for name in ops) and "fla" in (libraries or LIBRARIES):
        require(device)
    if "flash_qla" in (libraries or ()) and version("flash-qla") is None:
        raise UserError("libraries: flash_qla is not installed; pip install flash-qla, or leave it out")


def kernel_peers(case: BenchCall) -> dict[str, Peer]:
    """Name → function from the inputs of `case` to outputs [B,T,H,D]."""
    if case.window is not None:
        return _attention(case)
    peers: dict[str, Peer] = {
        peer.label: _outputs(peer) for peer in PEERS if peer.package == "fla" and peer.row == case.name
    }
    if case.name == "delta_rule" and version("flash-qla") is not None:
        peers["flash_qla chunk_gated_delta_rule"] = flash_qla
    return peers


def _outputs(peer: PeerOp) -> Peer:
    """Return a function of the inputs that calls a peer and imports it on the first call."""
    function = cache(peer.load)
    return lambda inputs: function()(**inputs)[0]


def flash_qla(x: Tensors) -> Tensor:
    """FlashQLA's delta rule: o [B,T,H,D], for heads of 128 channels in half precision on Hopper and newer GPUs."""
    rule = importlib.import_module("flash_qla").chunk_gated_delta_rule  # here, so that what it raises is a remark
    return rule(x["q"], x["k"], x["v"], x["log_decay"], x["beta"], scale=x["k"].shape[-1] ** -0.5)[0]


def _attention(case: BenchCall) -> dict[str, Peer]:
    """Causal SDPA, without a window; on a GPU FlexAttention with the window, and cuDNN if it hides nothing."""

    def heads_first(x: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        return x["q"].transpose(1, 2), x["k"].transpose(1, 2), x["v"].transpose(1, 2)

    def sdpa(x: Tensors) -> Tensor:
        q, k, v = heads_first(x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def cudnn(x: Tensors) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(x)

    window, T = case.window or case.shape.T, case.shape.T
    peers: dict[str, Peer] = {"sdpa causal": sdpa}
    if case.do.is_cuda:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if window >= T:
            peers["cudnn causal"] = cudnn
        compiled: Any = torch.compile(flex_attention)

        @cache  # made on the first call, if there is one
        def mask() -> Any:
            return create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < window), None, None, T, T, device="cuda")

        peers["flex_attention window"] = lambda x: compiled(*heads_first(x), block_mask=mask()).transpose(1, 2)
    return peers


class PeerModel(NamedTuple):
    """A language model of FLA: its name in a report, and what builds it."""

    name: str
    build: Callable[[], nn.Module]


def language_model(model: LanguageModel, sizes: dict[str, Any], device: torch.device) -> PeerModel:
    """FLA's model of the same mixers and sizes, in fp32; where it has none, its Gated DeltaNet of the same sizes.

    Args:
        model: Our model.
        sizes: The key `model` of its config.
        device: Device of its parameters.
    """
    same = same_model(model, sizes, device)
    return same or _model("GatedDeltaNetForCausalLM", _gated_deltanet(model, sizes), device)


def same_model(model: LanguageModel, sizes: dict[str, Any], device: torch.device) -> PeerModel | None:
    """FLA's model of the same, or similar, mixers and sizes; None if it has none. The arguments are those above."""
    found = _same_mixers(model) or _similar(model, sizes)
    return None if found is None else _model(*found, device)


def model_of_transformers(architecture: str, model: LanguageModel, device: torch.device) -> PeerModel:
    """A model of transformers with the mixers and sizes of ours, in fp32, with SDPA and FLA's delta rule."""
    family = next(family for family in FAMILIES if family.architecture == architecture)
    return _model(architecture, family.write(model) | {"attn_implementation": "sdpa"}, device, "transformers")


def _model(architecture: str, config: dict[str, Any], device: torch.device, package: str = "fla") -> PeerModel:
    kind = getattr(importlib.import_module("fla.models" if package == "fla" else package), architecture)

    def build() -> nn.Module:
        with torch.device(device):
            built: nn.Module = kind(kind.config_class(**config))
            return built

    return PeerModel(f"{package} {kind.config_class.model_type}", build)


def _same_mixers(model: LanguageModel) -> tuple[str, dict[str, Any]] | None:
    """The class of FLA's model of the same mixers, and its config; None if it has none."""
    kinds = {type(mixer).__name__ for mixer in model.mixers}
    without_subheads = all(getattr(mixer, "subheads", 1) == 1 for mixer in model.mixers)
    for family in FAMILIES:
        if family.target == "fla" and without_subheads and kinds <= family.mixers:
            with suppress(UserError):  # as for models of attention alone
                return family.architecture, family.write(model)
    return None


def _similar(model: LanguageModel, sizes: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The class of FLA's model of a similar mixer of the same sizes, and its config; None if it has none."""
    kinds = {type(mixer).__name__ for mixer in model.mixers}
    similar = SIMILAR.get(kinds.pop()) if len(kinds) == 1 else None
    if similar is None or similar.has_mlps != (sizes["mlp"] is not None):
        return None
    return similar.architecture, _around(sizes) | similar.keys(model.mixers[0])


def _gated_deltanet(model: LanguageModel, sizes: dict[str, Any]) -> dict[str, Any]:
    """The config of FLA's Gated DeltaNet with the keys and values of the model's first mixer, if it has any."""
    heads, mixer = sizes["num_heads"], model.mixers[0]
    keys = getattr(mixer, "subhead_size", sizes["hidden_size"] // heads)
    of_mixer = {"num_heads": heads, "head_dim": keys, "expand_v": getattr(mixer, "value_size", keys) / keys}
    return _around(sizes) | of_mixer


def _around(sizes: dict[str, Any]) -> dict[str, Any]:
    """The keys of FLA's configs that describe what is around the mixers."""
    return {
        "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": sizes["num_layers"],
        "vocab_size": sizes["vocab_size"],
        "intermediate_size": sizes["intermediate_size"],
        "tie_word_embeddings": sizes["tie_embeddings"],
    }
