"""Small calls of each op, for proofs and tests; `zoo/performance/bench_calls.py` has the large ones."""

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
from zoo.performance.bench_calls import Tensors, differentiated, learned_inputs

ROWS, LENGTH, HEADS = 2, 130, 2  # two chunks of 64 tokens, and two tokens


@dataclass(frozen=True)
class OpCall:
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

    def on(self, device: torch.device, dtype: torch.dtype) -> "OpCall":
        """Return the call on a device, with its inputs rounded to a dtype."""

        def moved(name: str, x: Tensor) -> Tensor:
            return x.to(device, dtype if x.is_floating_point() and name not in self.kept else None)

        return replace(self, inputs={name: moved(name, x) for name, x in self.inputs.items()})

    def exact(self) -> "OpCall":
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

    def arriving(self, outputs: Tensors) -> list[Tensor]:
        """Draw gradients of the outputs: equal numbers whatever the dtype, since rounding them would add an error."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in outputs.values()]

    def results(self, backend: str | None = None) -> Tensors:
        """The outputs, and the gradients of the floating inputs."""

        def call(leaves: Tensors) -> Tensors:
            return replace(self, inputs=leaves).outputs(backend)

        outputs, gradients = differentiated(call, self.inputs, learned_inputs(self.inputs), self.arriving)
        return outputs | {f"the gradient of {name}": gradient for name, gradient in gradients.items()}


def ops() -> list[str]:
    """The ops of `kernels`: its functions whose module lists implementations to choose from."""
    functions = [name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))]
    return [name for name in functions if hasattr(sys.modules[getattr(kernels, name).__module__], "OP")]


def cases(size: int) -> list[OpCall]:
    """Calls of all ops that this file knows to call, with heads of a size."""
    generator = torch.Generator().manual_seed(0)
    return [case for make in MAKERS for case in make(lambda *shape: torch.randn(shape, generator=generator), size)]


Draw = Callable[..., Tensor]  # of normal numbers
HEADED = (ROWS, LENGTH, HEADS)


def _recurrences(draw: Draw, size: int) -> Iterator[OpCall]:
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
    in_fp32 = ("log_decay", "beta", "initial_state")
    for variant, gate in gates.items():
        yield OpCall("linear_recurrence", variant, size, streams() | gate, kept=in_fp32)
    state = {"initial_state": draw(ROWS, HEADS, size, size)}
    for variant in ("no decay", "decay per head", "decay per channel"):
        beta = {"beta": draw(*HEADED).sigmoid()}
        yield OpCall("delta_rule", variant, size, streams() | beta | gates[variant] | state, kept=in_fp32)
    erase = {"erase": 0.5 * F.normalize(draw(*HEADED, size), dim=-1)}
    tensors = streams() | erase | gates["decay per channel"] | state
    yield OpCall("delta_rule", "erase keys", size, tensors, {"read_before": True}, in_fp32)


def _value_decay(draw: Draw, size: int) -> Iterator[OpCall]:
    inputs = {name: draw(*HEADED, size) for name in ("q", "k", "v")}
    inputs |= {"log_decay": F.logsigmoid(draw(*HEADED, size)) / 4}
    yield OpCall("value_decay_recurrence", "", size, inputs, kept=("log_decay",))


def _scan(draw: Draw, size: int) -> Iterator[OpCall]:
    x, log_decay = draw(ROWS, LENGTH, size), F.logsigmoid(draw(ROWS, LENGTH, size)) / 4
    states = {"rate": draw(size, 8).exp(), "b": draw(ROWS, LENGTH, 8), "c": draw(ROWS, LENGTH, 8)}
    in_fp32 = ("log_decay", "rate")
    yield OpCall("selective_scan", "", size, {"x": x, "log_decay": log_decay, **states}, kept=in_fp32)


def _attention(draw: Draw, size: int) -> Iterator[OpCall]:
    for variant, window in {"all tokens": None, "a window": 48}.items():
        inputs = {name: draw(*HEADED, size) for name in ("q", "k", "v")}
        yield OpCall("window_attention", variant, size, inputs, {"window_size": window})
    decayed = inputs | {"log_decay": F.logsigmoid(draw(*HEADED))}
    yield OpCall("window_attention", "decays", size, decayed, kept=("log_decay",))


def _streams(draw: Draw, size: int) -> Iterator[OpCall]:
    channels = HEADS * size
    inputs = {"x": draw(*HEADED, size), "weight": draw(channels, 1, 4) / 2, "bias": draw(channels)}
    yield OpCall("features", "", size, inputs, {"activation": "silu", "norm": "l2"})
    expanded = {"product": draw(HEADS, size, 2 * size) / size**0.5, "weight": draw(2 * channels, 1, 4) / 2}
    yield OpCall("features_together", "of an expansion", size, {"x": inputs["x"], **expanded}, call=_expanded)
    one = {"q": draw(ROWS, 1, HEADS, size), "v": draw(ROWS, 1, HEADS, 2 * size)}
    weights = {"q_weight": draw(channels, 1, 4) / 2, "v_weight": draw(2 * channels, 1, 4) / 2}
    yield OpCall("features_together", "one token", size, one | weights, call=_decoded)
    inputs = {"a": draw(ROWS, LENGTH, HEADS), "A_log": draw(HEADS), "dt_bias": draw(HEADS)}
    yield OpCall("discretise", "", size, inputs, kept=("A_log", "dt_bias"))
    both = inputs | {"b": draw(ROWS, LENGTH, HEADS), "bias": draw(HEADS)}
    yield OpCall("delta_gates", "", size, both, {"largest": 2.0}, kept=("A_log", "dt_bias", "bias"))
    both = {name: x[:, :1] if x.dim() > 1 else x for name, x in both.items()}
    in_fp32 = ("A_log", "dt_bias", "bias")
    yield OpCall("features_and_gates", "one token", size, one | weights | both, kept=in_fp32, call=_decoded_with_gates)
    columns = {"projection": draw(ROWS, LENGTH, 3 * channels + 2 * HEADS), "q_weight": weights["q_weight"]}
    columns |= {"v_weight": draw(channels, 1, 4) / 2, "A_log": draw(HEADS), "dt_bias": draw(HEADS)}
    yield OpCall("features_of_columns", "", size, columns, kept=("A_log", "dt_bias"), call=_columns)
    inputs = {"x": draw(ROWS, LENGTH, channels), "bias": draw(channels), "odds": draw(channels)}
    yield OpCall("forget_gate", "", size, inputs, kept=("bias", "odds"))
    yield OpCall("tied_gates", "", size, inputs, {"dtype": torch.float32}, kept=("bias", "odds"))
    yield OpCall("rotary", "", size, {"x": draw(*HEADED, size)}, call=_turned)
    columns = {name: draw(ROWS, 1, HEADS, size) for name in ("q", "k", "v", "gate")}
    columns |= {name: x[:, :1] for name, x in both.items() if name in ("a", "b")}
    columns |= {"weight": draw(channels, 1, 4) / 2, "A_log": draw(HEADS), "dt_bias": draw(HEADS)}
    state = {"initial_state": draw(ROWS, HEADS, size, size) / size}
    in_fp32 = ("A_log", "dt_bias", "initial_state")
    yield OpCall("recurrence_token", "", size, columns | state, kept=in_fp32, call=torch.no_grad()(_one_token))
    inputs = {"x": draw(ROWS, LENGTH, 16), "weight": draw(channels, 16) / 4, "bias": draw(channels)}
    yield OpCall("low_rank_forget_gate", "", size, inputs, kept=("bias",))
    inputs = {"k": draw(*HEADED, size), "curvature": draw(*HEADED, size).square()}
    inputs |= {"beta": draw(*HEADED).sigmoid(), "centre": draw(HEADS)}
    yield OpCall("precondition", "", size, inputs, {"limit": 1.5}, kept=("centre",))


def _rwkv7(draw: Draw, size: int) -> Iterator[OpCall]:
    channels = HEADS * size
    x, gate = draw(ROWS, LENGTH, channels), draw(ROWS, LENGTH, channels)
    yield OpCall("token_shift", "", size, {"x": x, "shares": draw(6, channels)}, kept=("shares",))
    mixed = {"x": x, "other": draw(ROWS, LENGTH, channels), "gate": gate, "bias": draw(channels)}
    yield OpCall("sigmoid_mix", "", size, mixed, kept=("bias",))
    names = ("decay_bias", "rate_bias", "k_k", "k_a")
    gates = {"k": draw(*HEADED, size), "decay": x, "rate": gate, **{name: draw(channels) for name in names}}
    yield OpCall("erase_gates", "", size, gates, {"largest": 0.6}, kept=names)
    streams = {name: draw(*HEADED, size) for name in ("o", "q", "k", "v")}
    learned = {"r_k": draw(channels), "weight": draw(HEADS, size), "bias": draw(HEADS, size)}
    yield OpCall("bonus_readout", "", size, streams | {"gate": gate.sigmoid()} | learned, kept=(*learned,))


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


def _columns(
    projection: Tensor, q_weight: Tensor, v_weight: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, ...]:
    channels = len(q_weight)
    q, v, gate, a, b = kernels.split_columns(projection, [channels, channels, channels, HEADS, HEADS])
    streams = [
        kernels.FeatureStream(x.unflatten(-1, (HEADS, -1)), weight, activation="silu", norm=norm)
        for x, weight, norm in ((q, q_weight, "l2"), (v, v_weight, "none"))
    ]
    made, both, others = kernels.features_of_columns(streams, kernels.GateInputs(a, A_log, dt_bias, b), [gate])
    assert both is not None
    return *(y for y, _ in made), *both, *(x.sigmoid() for x in others)


def _norms(draw: Draw, size: int) -> Iterator[OpCall]:
    def rows() -> Tensor:
        return draw(ROWS, LENGTH, 2 * size)

    weight = 1 + draw(2 * size) / 4
    for op, inputs in {
        "rms_norm": {"x": rows()},
        "add_rms_norm": {"x": rows(), "y": rows()},
        "gated_rms_norm": {"x": rows(), "gate": rows()},
    }.items():
        yield OpCall(op, "", size, {**inputs, "weight": weight}, kept=("weight",))


def _products(draw: Draw, size: int) -> Iterator[OpCall]:
    inputs = {"gate_up": draw(ROWS, LENGTH, 4 * size), "weight": draw(size, 2 * size) / 8}
    yield OpCall("gated_linear", "", size, inputs)
    # 64, which only GPUs are examined with, reaches the fused kernels: 17 × 39 tiles, five for each multiprocessor
    rows, channels, outputs = (16 * ROWS, 39 * 128, 1024) if size == 64 else (ROWS, 256, size)
    weights = {"gate_up": draw(2 * channels, size) / 8, "down": draw(outputs, channels) / 8}
    x = draw(rows, LENGTH, size)
    yield OpCall("gated_linear", "whole MLP", size, {"x": x, **weights}, call=kernels.gated_mlp)
    inputs = {"x": draw(ROWS, 1, 4 * size), "weight": draw(3 * size, 4 * size) / 8, "bias": draw(3 * size)}
    yield OpCall("linear", "few rows", size, inputs, call=torch.no_grad()(kernels.linear))
    for op in ("linear_cross_entropy", "linear_token_losses"):
        labels = torch.arange(LENGTH) % 100
        labels[::7] = -100  # no loss
        inputs = {"x": draw(LENGTH, size), "weight": draw(100, size) / 4, "labels": labels}
        yield OpCall(op, "", size, inputs)
    yield OpCall("linear_kl", "", size, inputs, call=_from_another_order)


def _from_another_order(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`linear_kl` from a teacher with the student's numbers in another order."""
    return kernels.linear_kl(x, weight, x.flip(0), weight.flip(0), labels)


def _turned(x: Tensor) -> Tensor:
    """`rotary` at the positions of a sequence."""
    rates = 10000 ** -torch.linspace(0, 1, x.shape[3] // 2, device=x.device, dtype=kernels.at_least_fp32(x).dtype)
    return kernels.rotary(x, torch.arange(x.shape[1], device=x.device)[None], rates)


def _one_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """The output and the state of a token of Gated DeltaNet."""
    streams = [kernels.FeatureStream(x, weight, activation="silu", norm="l2", return_history=True) for x in (q, k, v)]
    decay, norm = kernels.GateInputs(a, A_log, dt_bias, b), kernels.GatedNorm(gate, None, 1e-5)
    token = kernels.recurrence_token(streams, kernels.TokenOps(delta=True, decay=decay, norm=norm), initial_state)
    return token.y, token.state


MAKERS = (_recurrences, _scan, _attention, _streams, _norms, _products, _value_decay, _rwkv7)
