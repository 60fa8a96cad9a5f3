"""Compile every launch of the Triton kernels for a GPU that this machine does not have.

    python -m tests.kernels.ahead 86

calls each op as on that GPU, and compiles what it would launch instead of running it. It prints a JSON list of the
launches: kernel, warps, stages, and the bytes of shared memory or the compiler's error. Launches that overlap with the
one before also have the number of their waits, and the instructions before these that access memory. A launch that
compiles and fits into shared memory starts on such a GPU; whether its results are right, only a run there can tell.
"""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kernels
import mixers
from kernels.gpu import device as gpu
from kernels.gpu import launch, launch_table
from kernels.window_attention import CANDIDATES
from kernels.window_attention.arguments import check

from .recurrences import inputs

# compute capability, major and minor number in one → bytes of shared memory that one program can have
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
GATES = {name: ("none", "constant", "head", "channel") for name in ("linear_recurrence", "delta_rule")}
MEMORY = re.compile(r"\b(?:ld|st|atom|red)\.global|\bcp\.async\.\w+\.shared")
LARGEST = {2: 512, 4: 256}  # by bytes per element; larger heads take the same launches, or none


class AbsentGPU:
    """Triton's driver of a GPU that is not there.

    Args:
        architecture: A key of `SHARED_MEMORY`.
    """

    def __init__(self, architecture: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", architecture, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


class Compiler:
    """Compiles launches instead of starting them."""

    def __init__(self) -> None:
        self.launches: dict[tuple[str, str], dict[str, Any]] = {}

    def compile(self, kernel: JITFunction[Any], *args: Any, **constants: Any) -> None:
        row: dict[str, Any] = {"kernel": f"{kernel.__module__}.{kernel.__name__}"}
        try:
            compiled = kernel.warmup(*args, grid=(1,), **constants)
        except Exception as error:  # the compiler's errors are of many kinds
            row["error"] = f"{type(error).__name__}: {error}"[:500]
            self.launches[row["kernel"], row["error"]] = row
        else:
            about = compiled.metadata
            row |= {"warps": about.num_warps, "stages": about.num_stages, "shared": about.shared}
            if getattr(about, "launch_pdl", False):
                before, *after = compiled.asm["ptx"].split("griddepcontrol.wait")
                row["overlaps"], row["touched"] = len(after), MEMORY.findall(before)
                row["early"] = constants.get("EARLY", 0) > 0
            self.launches[row["kernel"], compiled.hash] = row


def train(call: Callable[[], tuple[Tensor | None, ...]], leaves: list[Tensor]) -> None:
    outputs = [x for x in call() if x is not None]
    torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs], allow_unused=True)


def recurrence(
    name: str, dtype: torch.dtype, size: int, gate: str, documents: list[int] | None = None, T: int = 200, E: int = 1
) -> None:
    """One call of a recurrence with matrix states: training, or without gradients if there is one token."""
    made = inputs(T, gate=gate, G=2, R=2, E=E, K=size // E, V=size, documents=documents, dtype=torch.float32)
    arguments = {n: x.to(dtype) if n in "qkv" else x for n, x in made.items()}
    op = partial(getattr(kernels, name), subheads=E, return_state=True)
    if T == 1:
        with torch.no_grad():
            op(**arguments)
    else:
        leaves = [x.requires_grad_() for x in arguments.values() if x.is_floating_point()]
        train(lambda: op(**arguments), leaves)


def decayed_attention(size: int, documents: list[int] | None) -> None:
    """Training of attention with log decays, whose query heads share keys."""
    shapes = {"q": (4, size), "k": (2, size), "v": (2, size), "log_decay": (4,)}
    a = {name: torch.zeros(1, 200, *shape, dtype=torch.bfloat16, requires_grad=True) for name, shape in shapes.items()}
    bounds = None if documents is None else torch.tensor(documents)
    arguments = check(**a, window_size=None, first_key=None, scale=None, cu_seqlens=bounds)
    train(lambda: (CANDIDATES["triton"].forward(arguments),), [*a.values()])


@torch.no_grad()
def token_attention(
    dtype: torch.dtype, H: int, heads: int, D: int, V: int, decay: bool = False, fused: bool = False
) -> None:
    """Attention of one token to a cache with room; one head of keys has the values as its first channels.

    With `fused`, in the launches that also compute norms, positions, raw gates and an output gate.
    """
    shapes = {"q": (H, D), "k": (heads, D), "v": (heads, V), **({"log_decay": (H,)} if decay else {})}
    new = {name: torch.zeros(2, 1, *shape, dtype=dtype) for name, shape in shapes.items()}
    k, v, *decays = (torch.zeros(2, 4096, *shape, dtype=dtype) for name, shape in shapes.items() if name != "q")
    entries, seen, ops = (k, v if heads > 1 else k[..., :V], *decays), torch.zeros(2, dtype=torch.int64), None
    if fused:
        norm = kernels.QKNorm(D if heads > 1 else V, torch.ones(D if heads > 1 else V), 1e-6)
        turn = kernels.Turn(seen, torch.ones(D // 2 if heads > 1 else (D - V) // 2), last=heads == 1)
        bias, gate = torch.zeros(H) if decay else None, torch.zeros(2, 1, H if decay else H * V, dtype=dtype)
        others = (norm, norm, None, turn) if heads > 1 else (None, norm, norm, turn)
        ops = kernels.AttentionOps(*others, bias, gate, new["q"][..., V:] if heads == 1 else None)
    kernels.window_attention(**new, cache=kernels.KeyCache(entries, seen, ops=ops))


def layer(name: str) -> None:
    """Training and decoding of a mixer, which uses the other ops."""
    mixer = mixers.entry(name).mixer(mixers.Site(hidden_size=256, num_heads=4)).bfloat16()
    x = torch.randn(2, 200, 256, dtype=torch.bfloat16, requires_grad=True)
    train(lambda: (mixer(x)[0],), [x, *mixer.parameters()])
    with torch.no_grad():
        mixer(x[:, :1], mixer.init_state(2))


@torch.no_grad()
def few_rows(rows: int) -> None:
    """Products of few rows without gradients, with narrow and wide tiles, and that of a gated MLP."""
    x = torch.randn(rows, 1, 1024, dtype=torch.bfloat16)
    narrow, wide, inner = (
        torch.randn(shape, dtype=torch.bfloat16) for shape in ((1024, 1024), (5632, 1024), (1024, 2816))
    )
    for constant in ([], [narrow, wide, inner]):
        with kernels.read_only(constant):
            kernels.linear(x, narrow)
            kernels.linear(x, wide)
            kernels.gated_mlp(x, wide, inner)


def losses(dtype: torch.dtype) -> None:
    """The losses of a linear head, with and without gradients, and caps of logits."""
    x, weight, labels = torch.randn(200, 64, dtype=dtype), torch.randn(10_000, 64, dtype=dtype), torch.zeros(200).long()

    def totals() -> tuple[Tensor, ...]:
        divergences = (kernels.linear_kl(x, weight, x, weight, labels, cap=cap, teacher_cap=cap) for cap in (None, 2.0))
        return kernels.linear_cross_entropy(x, weight, labels), *divergences

    totals()
    train(totals, [x.requires_grad_(), weight.requires_grad_()])


def calls(architecture: int) -> Iterator[Callable[[], None]]:
    """Calls that together need every entry of the launch table for an architecture, and all other kernels."""
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    for name, gates in GATES.items():
        of_op = [sizes for kernel, sizes in launch_table.TABLE.items() if kernel.startswith(f"{name}.")]
        entries = {key[1:] for sizes in of_op for key in sizes if key[0] == architecture}
        for size, itemsize in sorted({(min(size, LARGEST[itemsize]), itemsize) for size, itemsize in entries}):
            call = partial(recurrence, name, dtypes[itemsize], size)
            for gate in gates:
                yield partial(call, gate)
                yield partial(call, gate, T=1)
            yield partial(call, gates[-1], documents=[0, 70, 200])
            yield partial(call, gates[-1], E=2)
    for size in (64, 128, 256):
        yield from (partial(decayed_attention, size, documents) for documents in (None, [0, 70, 200]))
    for rows in (1, 2, 64):
        yield partial(few_rows, rows)
    for dtype in dtypes.values():
        yield partial(losses, dtype)
        for fused in (False, True):
            for H, heads, D in ((4, 4, 20), (4, 4, 64), (8, 2, 128), (8, 2, 256), (2, 2, 256)):
                yield partial(token_attention, dtype, H, heads, D, D, decay=D != 64, fused=fused)
            for H in (2, 16, 32, 64):
                yield partial(token_attention, dtype, H, 1, 576, 512, fused=fused)
    for name in mixers.names():
        if name != "Bidirectional":  # which has two other mixers
            yield partial(layer, name)


def main(architecture: int) -> None:
    """Compile for an architecture, and print the launches."""
    driver.set_active(AbsentGPU(architecture))
    compiler = Compiler()
    JITFunction.__getitem__ = lambda kernel, grid: partial(compiler.compile, kernel)  # type: ignore[method-assign]
    capability = gpu.HOPPER if architecture // 10 == gpu.HOPPER else gpu.OTHER
    gpu._capability = lambda device: capability  # type: ignore[assignment]
    launch.overlaps = lambda device: capability == gpu.HOPPER
    backend: Any = sys.modules["kernels.core.backend"]
    backend._no_triton = lambda device, fp64, limits: limits  # although tensors are on the CPU
    # nothing is computed, so the values of decays, rates and curvatures are those that the memory had
    sys.modules["kernels.core.recurrence"]._readable = lambda x: False  # type: ignore[attr-defined]
    with kernels.backend("triton"), contextlib.redirect_stdout(sys.stderr):
        for call in calls(capability):
            with contextlib.suppress(kernels.UserError):  # of what the kernels do not take, and PyTorch computes
                call()
    sys.stdout.write(json.dumps([*compiler.launches.values()], indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]))
