"""Ops of other libraries with the arguments that the ops have here: flash-linear-attention (FLA) and transformers."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

Result = tuple[Tensor, Tensor | None]  # outputs, and the final states if they are requested


class PeerOp(NamedTuple):
    """A function of another library that computes what an op here does.

    Attributes:
        package: The library.
        module: The module of the function.
        function: Its name.
        adapt: Turns it into a function with the arguments that the op has here.
        case: The op here, and the variant of its call, whose properties the proofs examine; null for none.
        row: The row of the ops below which it is timed; null for none.
        options: Words for the options that it is called with: bounded for `safe_gate`, kept for `disable_recompute`.
    """

    package: str
    module: str
    function: str
    adapt: Callable[[Callable[..., Any]], Callable[..., Result]]
    case: tuple[str, str] | None = None
    row: str | None = None
    options: str = ""

    @property
    def label(self) -> str:
        """The library, the function and its options."""
        return f"{self.package} {self.function}" + (f", {self.options}" if self.options else "")

    @property
    def size(self) -> int:
        """The size of heads; a power of 4 in PyTorch, where some functions have no `scale`."""
        return 128 if self.package == "fla" else 64

    def runs_on(self, device: torch.device) -> bool:
        """Return whether the library is installed and has kernels for a device."""
        return find_spec(self.package) is not None and (self.package != "fla" or device.type == "cuda")

    def load(self) -> Callable[..., Result]:
        """The function with the arguments that the op has here; of transformers, what runs without other libraries."""
        with warnings.catch_warnings(action="ignore"):  # transformers imports FLA, which may say that it misses a GPU
            function = getattr(import_module(self.module), self.function)
        return self.adapt(function if self.package == "fla" else inspect.unwrap(function))


def fla(gate: str | None, function: Callable[..., Any], **settings: Any) -> Callable[..., Result]:
    """A function of FLA with these settings; `gate` is its name of log_decay."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> Result:
        options = {**settings} if gate is None else settings | {gate: log_decay}
        options |= {} if beta is None else {"beta": beta}
        options |= {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens.long()}
        return function(q, k, v, **options, initial_state=initial_state, output_final_state=return_state)

    return call


def renamed(names: Mapping[str, str], function: Callable[..., Any], **settings: Any) -> Callable[..., Result]:
    """A function of FLA with these settings and other names of its tensors, without states."""
    return lambda **inputs: function(**{names.get(name, name): x for name, x in inputs.items()}, **settings)


def forgetting_attention(function: Callable[..., Tensor]) -> Callable[..., Result]:
    """FLA's attention with log decays, which has no states."""
    return lambda q, k, v, log_decay: (function(q, k, v, log_decay), None)


def kda_with_gates(function: Callable[..., Any], **settings: Any) -> Callable[..., Result]:
    """FLA's KDA that computes norms, decays and β in its kernels."""
    fused = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")

    def call(dt_bias: Tensor, **inputs: Tensor) -> Result:
        settled = renamed({"f": "g", "b": "beta"}, function, **dict.fromkeys(fused, True), **settings)
        return settled(dt_bias=dt_bias.flatten(), **inputs)

    return call


def delta(function: Callable[..., Any]) -> Callable[..., Result]:
    """A delta rule of transformers, which refuses packed documents."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        return_state: bool = False,
    ) -> Result:
        o, state = function(q, k, v, log_decay, beta, initial_state=initial_state, output_final_state=True)
        return o, state if return_state else None

    return call


def mamba2(function: Callable[..., Any]) -> Callable[..., Result]:
    """Mamba2's recurrence, with steps of 1 and the log decays as its matrix A."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        initial_state: Tensor | None = None,
        return_state: bool = False,
    ) -> Result:
        start = None if initial_state is None else initial_state.mT
        o, state = function(
            v,
            torch.ones_like(log_decay),
            log_decay,
            k,
            q * q.shape[-1] ** -0.5,
            chunk_size=64,
            initial_states=start,
            return_final_states=True,
        )
        return o.to(v), state.mT if return_state else None

    return call


def mamba(function: Callable[..., Any]) -> Callable[..., Result]:
    """Mamba's scan; its inputs are weighted by the step, too."""

    def call(x: Tensor, log_decay: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> Result:
        o = function(x.mT, -log_decay.mT, -rate, b.mT, c.mT)
        return o.mT, None

    return call


HEAD, CHANNEL = "decay per head", "decay per channel"
LINEAR, DELTA = "linear_recurrence", "delta_rule"
QWEN, KIMI = (
    "transformers.models.qwen3_next.modeling_qwen3_next",
    "transformers.models.kimi_linear.modeling_kimi_linear",
)
MAMBA, MAMBA2 = "transformers.models.mamba.modeling_mamba", "transformers.models.mamba2.modeling_mamba2"
BOUNDED: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}  # the rows' decays are above this bound
KEEPING: dict[str, Any] = {"disable_recompute": True}
GATE = {"log_decay": "g"}
SIMPLE, CHUNK_KDA = ("fla", "fla.ops.simple_gla", "chunk_simple_gla"), ("fla", "fla.ops.kda", "chunk_kda")
CHUNK_GDN2 = ("fla", "fla.ops.gdn2", "chunk_gdn2")
PRODUCT = ("fla", "fla.ops.gated_delta_product", "chunk_gated_delta_product")
PEERS = (
    PeerOp(
        *("fla", "fla.ops.forgetting_attn", "parallel_forgetting_attn"),
        forgetting_attention,
        row="forgetting_attention",
    ),
    PeerOp(*SIMPLE, partial(fla, "g"), (LINEAR, HEAD), "linear_head"),
    PeerOp(*SIMPLE, partial(fla, "g_gamma"), row="linear_constant"),
    PeerOp("fla", "fla.ops.gla", "chunk_gla", partial(fla, "g"), (LINEAR, CHANNEL), "linear_channel"),
    PeerOp("fla", "fla.ops.delta_rule", "chunk_delta_rule", partial(fla, None), (DELTA, "no decay")),
    PeerOp(
        *("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"), partial(fla, "g"), (DELTA, HEAD), "delta_rule"
    ),
    PeerOp(*CHUNK_KDA, partial(fla, "g"), (DELTA, CHANNEL), "kda"),
    PeerOp(*CHUNK_KDA, partial(fla, "g", **BOUNDED), row="kda", options="bounded"),
    PeerOp(*CHUNK_KDA, partial(fla, "g", **BOUNDED, **KEEPING), row="kda", options="bounded, kept"),
    PeerOp(*CHUNK_KDA, kda_with_gates, row="kda_with_gates"),
    PeerOp(*CHUNK_KDA, partial(kda_with_gates, **KEEPING), row="kda_with_gates", options="kept"),
    PeerOp(*CHUNK_GDN2, partial(renamed, GATE), row="gated_deltanet2"),
    PeerOp(*CHUNK_GDN2, partial(renamed, GATE, **BOUNDED), row="gated_deltanet2", options="bounded"),
    PeerOp(*CHUNK_GDN2, partial(renamed, GATE, **BOUNDED, **KEEPING), row="gated_deltanet2", options="bounded, kept"),
    PeerOp("fla", "fla.ops.comba", "chunk_comba", partial(renamed, GATE), row="comba"),
    PeerOp(*PRODUCT, partial(renamed, GATE, num_householder=2), row="gated_deltaproduct"),
    PeerOp("transformers", MAMBA2, "mamba2_chunk_scan", mamba2, (LINEAR, HEAD)),
    PeerOp("transformers", QWEN, "torch_chunk_gated_delta_rule", delta, (DELTA, HEAD)),
    PeerOp("transformers", QWEN, "torch_recurrent_gated_delta_rule", delta, (DELTA, HEAD)),
    PeerOp("transformers", KIMI, "chunk_kimi_delta_attention", delta, (DELTA, CHANNEL)),
    PeerOp("transformers", MAMBA, "mamba_selective_scan", mamba, ("selective_scan", "")),
)
