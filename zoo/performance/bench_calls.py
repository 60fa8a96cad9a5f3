"""Calls of the ops for benchmarks: as mixers make them, with random inputs of any size."""

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.core.backend import Op as KernelOp
from zoo.performance.accuracy import Gate
from zoo.performance.device import DTYPES

Tensors = dict[str, Tensor]
SLICE = 331  # number of tokens to compare with the loop; not a whole number of chunks
CHUNKWISE = 1e-4  # largest difference between the chunkwise form and the loop, both in fp32


def op_of(name: str) -> KernelOp:
    """The op of a public function of `kernels`, with its implementations."""
    op: KernelOp = sys.modules[getattr(kernels, name).__module__].OP
    return op


def learned_inputs(inputs: Tensors) -> list[str]:
    """Return the names of the inputs that get gradients: all floating tensors but a constant decay [heads]."""
    return [n for n, x in inputs.items() if x.is_floating_point() and (n != "log_decay" or x.dim() > 1)]


def differentiated(
    call: Callable[[Tensors], Tensors],
    inputs: Tensors,
    learned: Sequence[str],
    arriving: Callable[[Tensors], Sequence[Tensor]],
) -> tuple[Tensors, Tensors]:
    """Return the outputs of a call, and the gradients of its learned inputs for those that arrive at the outputs.

    There are no gradients if an output has none.
    """
    leaves = {name: x.detach().requires_grad_(name in learned) for name, x in inputs.items()}
    outputs = call(leaves)
    detached = {name: y.detach() for name, y in outputs.items()}
    if not all(y.requires_grad for y in outputs.values()):
        return detached, {}
    of_inputs = torch.autograd.grad([*outputs.values()], [leaves[name] for name in learned], arriving(outputs))
    return detached, dict(zip(learned, of_inputs, strict=True))


class Shape(NamedTuple):
    """The sizes of a call; D is the size of both keys and values."""

    B: int
    H: int
    T: int
    D: int


def kda_with_gates(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """KDA from pre-activations: q and k without norm [B,T,H,K], f of the decays [B,T,H,K], and b of β [B,T,H]."""
    q, k = (kernels.features(x, norm="l2")[0] for x in (q, k))
    log_decay, beta = kernels.delta_gates(f, A_log, dt_bias, b)
    return kernels.delta_rule(q, k, v, beta, log_decay)[0]


def gated_deltanet2(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """Gated DeltaNet-2, with the gates b of erasing [B,T,H,K] and w of writing [B,T,H,V]."""
    return kernels.delta_rule(q, k, w * v, b, log_decay)[0]


def comba(q: Tensor, k: Tensor, v: Tensor, p: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Comba, with the feedback p [B,T,H,K]."""
    return kernels.delta_rule(q, k, v, beta, log_decay, erase=p, read_before=True)[0]


def gated_deltaproduct(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Gated DeltaProduct, with two steps per token."""
    return kernels.delta_rule(q, k, v, beta, log_decay, steps=2)[0]


class Op(NamedTuple):
    """A call of an op.

    Attributes:
        function: Name of the op in `kernels`.
        decay: none (null), head, channel or constant.
        call: The function of the inputs that calls the op; null for the op itself.
        erase: Whether the delta rule has erase keys other than β k.
        steps: Steps per token of the delta rule.
    """

    function: str
    decay: str | None = None
    call: Callable[..., Tensor] | None = None
    erase: bool = False
    steps: int = 1

    @property
    def attention(self) -> bool:
        """Return whether it is attention, whose cost grows with the square of the length."""
        return self.function == "window_attention"

    @property
    def general(self) -> bool:
        """Return whether it is a delta rule other than that of Gated DeltaNet."""
        return self.function == "delta_rule" and (self.decay == "channel" or self.erase or self.steps > 1)

    @property
    def kernel_op(self) -> KernelOp:
        """The implementations that serve the call."""
        if not self.general:
            return op_of(self.function)
        rule = sys.modules["kernels.delta_rule"]
        op: KernelOp = rule.GENERAL if self.erase or self.decay == "channel" else rule.OP
        return op


OPS = {
    "delta_rule": Op("delta_rule", "head"),
    "kda": Op("delta_rule", "channel"),
    "kda_with_gates": Op("delta_rule", "channel", kda_with_gates),
    "gated_deltanet2": Op("delta_rule", "channel", gated_deltanet2, erase=True),
    "comba": Op("delta_rule", "head", comba, erase=True),
    "gated_deltaproduct": Op("delta_rule", "head", gated_deltaproduct, steps=2),
    "linear_head": Op("linear_recurrence", "head"),
    "linear_channel": Op("linear_recurrence", "channel"),
    "linear_constant": Op("linear_recurrence", "constant"),
    "window_attention": Op("window_attention"),
    "forgetting_attention": Op("window_attention", "head"),
}


class BenchCall:
    """One op of `OPS` at one shape with random inputs: queries, keys and values in a dtype of `DTYPES`, decays in fp32.

    The delta rule may have fewer heads of queries and keys than of values, `key_heads`.

    Raises:
        UserError: The op does not have the backend on this device.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        dtype: str,
        device: torch.device,
        backend: str,
        window: int,
        key_heads: int | None = None,
    ):
        self.name, self.shape, self.dtype, self.backend, self.op = name, shape, dtype, backend, OPS[name]
        self.window = window if name == "window_attention" else None
        self.key_heads = shape.H if key_heads is None else key_heads
        generator = torch.Generator(device).manual_seed(0)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, device=device, generator=generator)

        self.inputs = _inputs(name, shape, DTYPES[dtype], draw, self.key_heads)
        self.do = draw(shape.B, shape.T, shape.H, shape.D).to(DTYPES[dtype])
        self.learned = learned_inputs(self.inputs)
        with kernels.backend(backend):
            self.implementation = self.op.kernel_op.backend(self.inputs["v"])

    def replace_inputs(self, **inputs: Tensor) -> None:
        """Replace some of the inputs by others of the same shapes."""
        self.inputs = self.inputs | inputs
        self.__dict__.pop("_expected", None)

    def call(self, inputs: Tensors, backend: str | None = None) -> Tensor:
        """The outputs [B,T,H,D]."""
        with kernels.backend(self.backend if backend is None else backend):
            function: Callable[..., Any] = self.op.call or getattr(kernels, self.op.function)
            result = function(**inputs) if self.window is None else function(**inputs, window_size=self.window)
            return result[0] if isinstance(result, tuple) else result

    def differentiated(self, call: Callable[[Tensors], Tensor], inputs: Tensors, do: Tensor) -> Tensors:
        """The output `o` of a call, and the gradients `dNAME` of its learned inputs."""
        output, gradients = differentiated(lambda x: {"o": call(x)}, inputs, self.learned, lambda outputs: [do])
        return output | {f"d{name}": gradient for name, gradient in gradients.items()}

    def check(self) -> Gate:
        """Compare outputs and gradients with an fp32 reference.

        Kernels run exactly the timed call, and its last head is compared with the chunkwise form in fp32. That form
        itself is compared with the loop on the first tokens.
        """
        gate = self.compared(self.call)
        if not self._chunkwise:
            inputs, do = self._last_head(self._first_tokens(self.inputs)), self._first_tokens({"do": self.do})
            forms = [self._exact(inputs, self._last_head(do)["do"], backend) for backend in ("torch", "reference")]
            for name, y in forms[1].items():
                gate.check(f"{name} of the chunkwise form", forms[0][name], y, CHUNKWISE)
        return gate

    def compared(self, call: Callable[[Tensors], Tensor]) -> Gate:
        """Compare the output and the gradients of a function of the inputs with the fp32 reference."""
        inputs, do, expected = self._expected
        actual = self._last_head(self.differentiated(call, inputs, do))
        gate = Gate()
        for name, y in expected.items():
            gate.check(name, actual[name], y, self._limit(name))
        return gate

    def _limit(self, name: str) -> float:
        """The largest error of a result."""
        return 1e-4 if self.dtype == "fp32" else 5e-3 if name == "o" else 1e-2

    @property
    def _chunkwise(self) -> bool:
        """Return whether the call is the chunkwise form, which attention in half precision is not."""
        attention = self.implementation == "torch" and self.op.attention and self.dtype != "fp32"
        return self.implementation in ("torch", "reference") and not attention

    @cached_property
    def _expected(self) -> tuple[Tensors, Tensor, Tensors]:
        """The inputs of the comparison, the gradient of the output, and what the last head's results should be."""
        inputs, do = self.inputs, {"do": self.do}
        if self._chunkwise:
            inputs, do = self._first_tokens(inputs), self._first_tokens(do)
        backend = "reference" if self._chunkwise and self.implementation == "torch" else "torch"
        return inputs, do["do"], self._exact(self._last_head(inputs), self._last_head(do)["do"], backend)

    def _exact(self, inputs: Tensors, do: Tensor, backend: str) -> Tensors:
        inputs = {name: x.float() for name, x in inputs.items()}
        return self.differentiated(lambda x: self.call(x, backend), inputs, do.float())

    def _first_tokens(self, tensors: Tensors) -> Tensors:
        """The first `SLICE` tokens of what has an axis of tokens, or of their steps."""
        return {n: x[:, : SLICE * (x.shape[1] // self.shape.T)] if x.dim() > 2 else x for n, x in tensors.items()}

    def _last_head(self, tensors: Tensors) -> Tensors:
        """The last head of keys and those that share it, of one row where that has all that reaches the gradients."""
        rows = slice(None) if any(self.inputs[name].dim() < 3 for name in self.learned) else slice(-1, None)
        return {
            name: x[rows, :, -(x.shape[2] // self.key_heads) :] if x.dim() > 2 else x[-1:]
            for name, x in tensors.items()
        }

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass."""
        B, H, T, D = self.shape
        if self.op.attention:
            return B * kernels.attention_flops(T, heads=H, head_dim=D, window_size=self.window)
        return B * kernels.recurrence_flops(
            getattr(kernels, self.op.function),
            T,
            heads=H,
            key_heads=self.key_heads,
            subheads=1,
            key_size=D,
            value_size=D,
            per_channel=self.op.decay == "channel",
            erase=self.op.erase,
            steps=self.op.steps,
        )

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that a forward pass, and a forward and backward pass, must at least read and write."""
        read = sum(x.nbytes for x in self.inputs.values())
        gradients = sum(self.inputs[n].nbytes for n in self.learned)
        return read + self.do.nbytes, 2 * (read + self.do.nbytes) + gradients


def _inputs(name: str, shape: Shape, dtype: torch.dtype, draw: Callable[..., Tensor], key_heads: int) -> Tensors:
    """Random inputs of an op; the state stays bounded."""
    (B, H, T, D), op = shape, OPS[name]
    rows = op.steps * T
    q, k, v = draw(B, T, key_heads, D), draw(B, rows, key_heads, D), draw(B, rows, H, D)
    if op.decay is None:
        return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if op.call is kda_with_gates:
        streams = {"q": q, "k": k, "v": v, "f": draw(B, T, H, D), "b": draw(B, T, H)}
        rates = {"A_log": draw(H) / 4, "dt_bias": draw(H, D) / 4 - 3}  # decays of about 5 % a step
        return {key: x.to(dtype) for key, x in streams.items()} | rates
    k = F.normalize(k, dim=-1)
    tensors = {"q": F.normalize(q, dim=-1).to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if op.decay == "constant":
        tensors["log_decay"] = -0.1 * torch.arange(1, H + 1, device=v.device) / H
    else:  # about 5 % a step
        tensors["log_decay"] = F.logsigmoid(draw(B, T, H, *([D] if op.decay == "channel" else []))) / 16
    if op.call is gated_deltanet2:
        return tensors | {gate: draw(B, T, H, D).sigmoid().to(dtype) for gate in ("b", "w")}
    if op.function == "delta_rule":
        largest = 2 if op.steps > 1 else 1
        tensors["beta"] = largest * draw(B, rows, H).sigmoid()
    if op.call is comba:  # feedback that is not parallel to the key
        tensors["p"] = (F.normalize(k + draw(B, T, H, D) / (2 * D**0.5), dim=-1) / 2).to(dtype)
    return tensors
