"""A small call of each op, and its results: outputs and gradients."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

Tensors = dict[str, Tensor]
ROWS, LENGTH, HEADS = 2, 130, 2  # two chunks of 64 tokens, and two tokens


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Args:
        op: Name of the op in `kernels`.
        variant: What sets it apart from other calls of the op; empty if there are none.
        size: Of its heads.
        inputs: Its tensors, in fp32 on the CPU.
        options: Its other arguments.
        kept: Inputs that stay in fp32 when the others are rounded, as they do in models.
        call: What calls the op with them; null for the op itself.
    """

    op: str
    variant: str
    size: int
    inputs: Tensors
    options: dict[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    call: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """The op, the variant, and the size of its heads."""
        return f"{self.op} ({', '.join(filter(None, (self.variant, str(self.size))))})"

    @property
    def takes_documents(self) -> bool:
        """Return whether the op can be given packed documents."""
        return "cu_seqlens" in inspect.signature(getattr(kernels, self.op)).parameters

    def on(self, device: torch.device, dtype: torch.dtype) -> "Case":
        """Return the call on a device, with its inputs rounded to a dtype."""

        def moved(name: str, x: Tensor) -> Tensor:
            return x.to(device, dtype if x.is_floating_point() and name not in self.kept else None)

        return replace(self, inputs={name: moved(name, x) for name, x in self.inputs.items()})

    def exact(self) -> "Case":
        """Return the call in fp32, with the same rounded numbers."""
        widened = {name: x.float() if x.is_floating_point() else x for name, x in self.inputs.items()}
        return replace(self, inputs=widened)

    def outputs(self, backend: str | None = None) -> Tensors:
        """The outputs that are floating tensors; null for the backend that is chosen anyway."""
        with nullcontext() if backend is None else kernels.backend(backend):
            result = (self.call or getattr(kernels, self.op))(**self.inputs, **self.options)
        several = result if isinstance(result, tuple) else (result,)
        named = {"output" if len(several) == 1 else f"output {i + 1}": y for i, y in enumerate(several)}
        return {name: y for name, y in named.items() if isinstance(y, Tensor) and y.is_floating_point()}

    def results(self, backend: str | None = None) -> Tensors:
        """The outputs, and the gradients of the floating inputs."""
        # a constant decay [heads] is not learned
        learned = [n for n, x in self.inputs.items() if x.is_floating_point() and (n != "log_decay" or x.dim() > 1)]
        leaves = {name: x.detach().requires_grad_(name in learned) for name, x in self.inputs.items()}
        outputs = replace(self, inputs=leaves).outputs(backend)
        tensors = {name: y.detach() for name, y in outputs.items()}
        if all(y.requires_grad for y in outputs.values()):
            generator = torch.Generator().manual_seed(1)
            # the same numbers whatever the dtype: rounding them would add an error
            arriving = [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in outputs.values()]
            gradients = torch.autograd.grad([*outputs.values()], [leaves[name] for name in learned], arriving)
            tensors |= {f"the gradient of {name}": g for name, g in zip(learned, gradients, strict=True)}
        return tensors


def ops() -> list[str]:
    """The ops of `kernels`: its functions whose module lists implementations to choose from."""
    functions = {name: getattr(kernels, name) for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))}
    return [name for name, function in functions.items() if hasattr(sys.modules[function.__module__], "OP")]


def cases(size: int) -> list[Case]:
    """Calls of all ops that this file knows to call, with heads of a size."""
    generator = torch.Generator().manual_seed(0)
    return [case for make in MAKERS for case in make(lambda *shape: torch.randn(shape, generator=generator), size)]


Draw = Callable[..., Tensor]  # of normal numbers
HEADED = (ROWS, LENGTH, HEADS)


def _recurrences(draw: Draw, size: int) -> Iterator[Case]:
    def streams() -> Tensors:
        q, k = (F.normalize(draw(*HEADED, size), dim=-1) for _ in range(2))
        return {"q": q, "k": k, "v": draw(*HEADED, size)}

    def decay(*shape: int) -> Tensor:
        return F.logsigmoid(draw(*shape)) / 4

    gates = {
        "no decay": {},
        "constant decay": {"log_decay": decay(HEADS)},
        "decay per head": {"log_decay": decay(*HEADED)},
        "decay per channel": {"log_decay": decay(*HEADED, size)},
    }
    kept = ("log_decay", "beta", "initial_state")
    for variant, gate in gates.items():
        yield Case("linear_recurrence", variant, size, streams() | gate, kept=kept)
    state = {"initial_state": draw(ROWS, HEADS, size, size)}
    for variant in ("no decay", "decay per head"):
        beta = {"beta": draw(*HEADED).sigmoid()}
        yield Case("delta_rule", variant, size, streams() | beta | gates[variant] | state, kept=kept)


def _scan(draw: Draw, size: int) -> Iterator[Case]:
    x, log_decay = draw(ROWS, LENGTH, size), F.logsigmoid(draw(ROWS, LENGTH, size)) / 4
    states = {"rate": draw(size, 8).exp(), "b": draw(ROWS, LENGTH, 8), "c": draw(ROWS, LENGTH, 8)}
    kept = ("log_decay", "rate")
    yield Case("selective_scan", "", size, {"x": x, "log_decay": log_decay, **states}, kept=kept)


def _attention(draw: Draw, size: int) -> Iterator[Case]:
    for variant, window in {"all tokens": None, "a window": 48}.items():
        inputs = {name: draw(*HEADED, size) for name in ("q", "k", "v")}
        yield Case("window_attention", variant, size, inputs, {"window_size": window})


def _streams(draw: Draw, size: int) -> Iterator[Case]:
    channels = HEADS * size
    inputs = {"x": draw(*HEADED, size), "weight": draw(channels, 1, 4) / 2, "bias": draw(channels)}
    yield Case("features", "", size, inputs, {"activation": "silu", "norm": "l2"})
    expanded = {"product": draw(HEADS, size, 2 * size) / size**0.5, "weight": draw(2 * channels, 1, 4) / 2}
    yield Case("features_together", "of an expansion", size, {"x": inputs["x"], **expanded}, call=_expanded)
    one = {"q": draw(ROWS, 1, HEADS, size), "v": draw(ROWS, 1, HEADS, 2 * size)}
    weights = {"q_weight": draw(channels, 1, 4) / 2, "v_weight": draw(2 * channels, 1, 4) / 2}
    yield Case("features_together", "one token", size, one | weights, call=_decoded)
    inputs = {"a": draw(ROWS, LENGTH, HEADS), "A_log": draw(HEADS), "dt_bias": draw(HEADS)}
    yield Case("discretise", "", size, inputs, kept=("A_log", "dt_bias"))
    both = inputs | {"b": draw(ROWS, LENGTH, HEADS), "bias": draw(HEADS)}
    yield Case("delta_gates", "", size, both, {"largest": 2.0}, kept=("A_log", "dt_bias", "bias"))
    both = {name: x[:, :1] if x.dim() > 1 else x for name, x in both.items()}
    kept = ("A_log", "dt_bias", "bias")
    yield Case("features_and_gates", "one token", size, one | weights | both, kept=kept, call=_decoded_with_gates)
    inputs = {"x": draw(ROWS, LENGTH, channels), "bias": draw(channels), "odds": draw(channels)}
    yield Case("forget_gate", "", size, inputs, kept=("bias", "odds"))
    inputs = {"x": draw(ROWS, LENGTH, 16), "weight": draw(channels, 16) / 4, "bias": draw(channels)}
    yield Case("low_rank_forget_gate", "", size, inputs, kept=("bias",))


def _expanded(x: Tensor, product: Tensor, weight: Tensor) -> Tensor:
    stream = kernels.FeatureStream(x, weight, activation="silu", product=product, subheads=2)
    return kernels.features_together([stream])[0][0]


def _token(q: Tensor, v: Tensor, q_weight: Tensor, v_weight: Tensor) -> list[kernels.FeatureStream]:
    return [
        kernels.FeatureStream(x, weight, activation="silu", norm=norm, return_history=True)
        for x, weight, norm in ((q, q_weight, "l2"), (v, v_weight, "none"))
    ]


@torch.no_grad()  # as in decoding, where one launch serves all streams
def _decoded(**inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(y for y, _ in kernels.features_together(_token(**inputs)))


@torch.no_grad()
def _decoded_with_gates(q: Tensor, v: Tensor, q_weight: Tensor, v_weight: Tensor, **gates: Any) -> tuple[Tensor, ...]:
    streams, both = kernels.features_and_gates(_token(q, v, q_weight, v_weight), kernels.GateInputs(**gates))
    return *(y for y, _ in streams), *both


def _norms(draw: Draw, size: int) -> Iterator[Case]:
    def rows() -> Tensor:
        return draw(ROWS, LENGTH, 2 * size)

    weight = 1 + draw(2 * size) / 4
    for op, inputs in {
        "rms_norm": {"x": rows()},
        "add_rms_norm": {"x": rows(), "y": rows()},
        "gated_rms_norm": {"x": rows(), "gate": rows()},
    }.items():
        yield Case(op, "", size, {**inputs, "weight": weight}, kept=("weight",))


def _products(draw: Draw, size: int) -> Iterator[Case]:
    inputs = {"gate_up": draw(ROWS, LENGTH, 4 * size), "weight": draw(size, 2 * size) / 8}
    yield Case("gated_linear", "", size, inputs)
    inputs = {"x": draw(ROWS, 1, 4 * size), "weight": draw(3 * size, 4 * size) / 8, "bias": draw(3 * size)}
    yield Case("linear", "few rows", size, inputs, call=torch.no_grad()(kernels.linear))
    for op in ("linear_cross_entropy", "linear_token_losses"):
        labels = torch.arange(LENGTH) % 100
        labels[::7] = -100  # no loss
        yield Case(op, "", size, {"x": draw(LENGTH, size), "weight": draw(100, size) / 4, "labels": labels})


MAKERS = (_recurrences, _scan, _attention, _streams, _norms, _products)
