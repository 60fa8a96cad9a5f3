"""The benchmarked ops: their inputs, costs and references."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from zoo.benchmarks.device import DTYPES
from zoo.benchmarks.gate import Gate

Tensors = dict[str, Tensor]
SLICE = 331  # number of tokens to compare with the loop; not a whole number of chunks


class Shape(NamedTuple):
    """The sizes of a call; D is the size of both keys and values."""

    B: int
    H: int
    T: int
    D: int


class Op(NamedTuple):
    """An op with a type of decay."""

    function: str  # its name in `kernels`
    decay: str | None = None  # head | channel | constant


OPS = {
    "delta_rule": Op("delta_rule", "head"),
    "linear_head": Op("linear_recurrence", "head"),
    "linear_channel": Op("linear_recurrence", "channel"),
    "linear_constant": Op("linear_recurrence", "constant"),
    "window_attention": Op("window_attention"),
}


class Case:
    """One op at one shape with random inputs.

    Args:
        name: Name of the op in `OPS`.
        shape: B, H, T, D.
        dtype: dtype of queries, keys and values: bf16, fp16 or fp32; decays are fp32.
        device: Device of the inputs.
        backend: Backend of the kernels.
        window: Number of keys that a query of the attention sees.

    Raises:
        UserError: The op does not have the backend on this device.
    """

    def __init__(self, name: str, shape: Shape, dtype: str, device: torch.device, backend: str, window: int):
        self.name, self.shape, self.dtype, self.backend, self.op = name, shape, dtype, backend, OPS[name]
        self.window = window if name == "window_attention" else None
        generator = torch.Generator(device).manual_seed(0)
        self.inputs = _inputs(self.op, shape, DTYPES[dtype], device, generator)
        self.do = torch.randn(self.inputs["v"].shape, device=device, generator=generator).to(DTYPES[dtype])
        self.implementation = self._implementation()
        # a constant decay is not a parameter
        self.learned = [n for n in self.inputs if not (n == "log_decay" and self.op.decay == "constant")]

    def _implementation(self) -> str:
        """The name of the implementation that runs."""
        package = importlib.import_module(f"kernels.{self.op.function}")
        with kernels.backend(self.backend):
            name: str = package.OP.backend(self.inputs["v"])
        return name

    def call(self, inputs: Tensors, backend: str | None = None) -> Tensor:
        """The outputs [B,T,H,D]."""
        with kernels.backend(self.backend if backend is None else backend):
            function: Callable[..., Any] = getattr(kernels, self.op.function)
            if self.window is not None:
                return function(**inputs, window_size=self.window)
            return function(**inputs)[0]

    def differentiated(self, call: Callable[[Tensors], Tensor], inputs: Tensors, do: Tensor) -> Tensors:
        """The output `o` of a call, and the gradients `dNAME` of its learned inputs."""
        leaves = {n: x.detach().requires_grad_(n in self.learned) for n, x in inputs.items()}
        o = call(leaves)
        gradients = torch.autograd.grad(o, [leaves[n] for n in self.learned], do)
        return {"o": o.detach(), **{f"d{n}": x for n, x in zip(self.learned, gradients, strict=True)}}

    def check(self) -> Gate:
        """Compare outputs and gradients with an fp32 reference.

        Kernels run exactly the timed call, and its last head is compared with the chunkwise form in fp32. That form
        itself is compared with the loop on the first tokens.
        """
        chunkwise = self.implementation in ("torch", "reference")
        inputs, do = self.inputs, self.do
        if chunkwise:
            inputs = {n: x[:, :SLICE] if x.dim() > 1 else x for n, x in inputs.items()}
            do = do[:, :SLICE]
        actual = self.differentiated(self.call, inputs, do)
        slow = {n: x[-1:, :, -1:].float() if x.dim() > 1 else x[-1:] for n, x in inputs.items()}
        reference = "reference" if self.implementation == "torch" else "torch"
        expected = self.differentiated(lambda x: self.call(x, reference), slow, do[-1:, :, -1:].float())
        gate = Gate()
        for name, y in expected.items():
            limit = 1e-4 if self.dtype == "fp32" else 5e-3 if name == "o" else 1e-2
            gate.check(name, actual[name][-1:, :, -1:], y, limit)
        return gate

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass."""
        B, H, T, D = self.shape
        if self.window is not None:
            return B * kernels.attention_flops(T, heads=H, head_dim=D, window_size=self.window)
        return B * kernels.recurrence_flops(
            getattr(kernels, self.op.function),
            T,
            heads=H,
            key_heads=H,
            subheads=1,
            key_size=D,
            value_size=D,
            per_channel=self.op.decay == "channel",
        )

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that a forward pass, and a forward and backward pass, must at least read and write."""
        read = sum(x.nbytes for x in self.inputs.values())
        gradients = sum(self.inputs[n].nbytes for n in self.learned)
        return read + self.do.nbytes, 2 * (read + self.do.nbytes) + gradients


def _inputs(op: Op, shape: Shape, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensors:
    B, H, T, D = shape

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    q, k, v = draw(B, T, H, D), draw(B, T, H, D), draw(B, T, H, D)
    if op.decay is None:
        return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    tensors = {"q": F.normalize(q, dim=-1).to(dtype), "k": F.normalize(k, dim=-1).to(dtype), "v": v.to(dtype)}
    if op.decay == "constant":
        tensors["log_decay"] = -0.1 * torch.arange(1, H + 1, device=device) / H
    else:
        size = (B, T, H) if op.decay == "head" else (B, T, H, D)
        tensors["log_decay"] = F.logsigmoid(draw(*size)) / 16
    if op.function == "delta_rule":
        tensors["beta"] = draw(B, T, H).sigmoid()
    return tensors
