"""Ops of other libraries that are examined likewise: flash-linear-attention (FLA), and transformers' PyTorch paths."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.performance.doctor.checks import Finding
from zoo.performance.doctor.proofs import ops
from zoo.performance.doctor.proofs.fla import without_autotuning
from zoo.performance.doctor.proofs.ops import DTYPES, Subject
from zoo.performance.op_calls import OpCall, cases

Result = tuple[Tensor, Tensor | None]  # outputs, and the final states if they are requested


class PeerOp(NamedTuple):
    """A function of another library that computes what an op here does."""

    package: str
    module: str
    function: str
    op: str  # the name here, and the variant of the call
    variant: str
    adapt: Callable[[Callable[..., Any]], Callable[..., Result]]  # to the arguments that the op has here

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
            if self.package == "fla":
                without_autotuning(self.module)
            function = getattr(import_module(self.module), self.function)
        return self.adapt(function if self.package == "fla" else inspect.unwrap(function))


def fla(gate: str | None, function: Callable[..., Any]) -> Callable[..., Result]:
    """A function of FLA; `gate` is its name of log_decay."""

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
        options: dict[str, Any] = {} if gate is None else {gate: log_decay}
        options |= {} if beta is None else {"beta": beta}
        options |= {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens.long()}
        o, state = function(q, k, v, **options, initial_state=initial_state, output_final_state=True)
        return o, state if return_state else None

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
PEERS = (
    PeerOp("fla", "fla.ops.simple_gla", "chunk_simple_gla", LINEAR, HEAD, partial(fla, "g")),
    PeerOp("fla", "fla.ops.gla", "chunk_gla", LINEAR, CHANNEL, partial(fla, "g")),
    PeerOp("fla", "fla.ops.delta_rule", "chunk_delta_rule", DELTA, "no decay", partial(fla, None)),
    PeerOp("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", DELTA, HEAD, partial(fla, "g")),
    PeerOp("fla", "fla.ops.kda", "chunk_kda", DELTA, CHANNEL, partial(fla, "g")),
    PeerOp("transformers", MAMBA2, "mamba2_chunk_scan", LINEAR, HEAD, mamba2),
    PeerOp("transformers", QWEN, "torch_chunk_gated_delta_rule", DELTA, HEAD, delta),
    PeerOp("transformers", QWEN, "torch_recurrent_gated_delta_rule", DELTA, HEAD, delta),
    PeerOp("transformers", KIMI, "chunk_kimi_delta_attention", DELTA, CHANNEL, delta),
    PeerOp("transformers", MAMBA, "mamba_selective_scan", "selective_scan", "", mamba),
)


def _case(peer: PeerOp) -> OpCall:
    """The call of the op here, with decays per channel also of the delta rule."""
    variant = HEAD if (peer.op, peer.variant) == (DELTA, CHANNEL) else peer.variant
    case = next(each for each in cases(peer.size) if (each.op, each.variant) == (peer.op, variant))
    if variant != peer.variant:
        drawn = torch.randn(case.inputs["q"].shape, generator=torch.Generator().manual_seed(3))
        case = replace(case, variant=peer.variant, inputs=case.inputs | {"log_decay": F.logsigmoid(drawn) / 4})
    return case


def _here(device: torch.device) -> Iterator[tuple[PeerOp, str]]:
    """The peers that are installed and run on a device, each with each dtype."""
    for peer in PEERS:
        if peer.runs_on(device):
            for dtype in DTYPES:
                yield peer, dtype


def names(device: torch.device) -> list[str]:
    """The names of all calls of peers on a device; imports none of them."""
    return [f"{_case(peer).name}, {peer.package} {peer.function}, {dtype}" for peer, dtype in _here(device)]


def subject(device: torch.device, number: int) -> Subject:
    """One of the calls of peers on a device, by its number."""
    peer, dtype = [*_here(device)][number]
    case = replace(_case(peer), options={}, call=peer.load())
    return Subject(case.on(device, DTYPES[dtype]), f"{peer.package} {peer.function}", dtype)


def prove(device: torch.device, number: int) -> Iterator[Finding]:
    """The findings about a peer. They are noted, not failed: nobody here promises them."""
    try:
        here = subject(device, number)
    except Exception as error:  # of other versions of a library, of any type
        yield Finding(
            names(device)[number], "finished", "noted", f"{type(error).__name__}: {' '.join(str(error).split())}", {}
        )
        return
    for finding in ops.prove(here):
        if finding.status == "failed":
            change = finding.numbers.get("change")
            says = f"{change:.0e}" if finding.check in ("rows", "packed") and change is not None else finding.says
            yield finding._replace(status="noted", says=says)
        else:
            yield finding
