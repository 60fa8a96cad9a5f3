"""Kernels are queued here: on the device of their tensors, and past most of what Triton's launcher does on the host.

Each launch, Triton writes down what its compiler would know of all arguments, and looks that text up among what it has
compiled. On the host that takes as long as some kernels take on the device. Here a launch that the compiler could not
tell from an earlier one calls what was compiled then.
"""

from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

PLAIN = torch.version.hip is not None  # its compiler also looks at the size of a tensor's memory
# launches that look alike → what was compiled for them, and the constants in the order of its arguments
_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}


def enqueue(kernel: Any, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
    """Launch a kernel on the current stream of the device of its first tensor.

    Args:
        kernel: A function under `triton.jit`, whose constants follow all other arguments.
        grid: Its programs, along one to three axes.
        given: The arguments up to the constants, or some of these as well; the first one is a tensor.
        constants: The others by name, and `num_warps`, `num_stages`, `maxnreg`.
    """
    device = given[0].get_device()
    if device < 0 or PLAIN:  # on the CPU it is interpreted
        kernel[grid](*given, **constants)
    elif device == torch.cuda.current_device():
        _enqueue(kernel, grid, device, given, constants)
    else:
        with torch.cuda.device(device):
            _enqueue(kernel, grid, device, given, constants)


def cdiv(n: int, size: int) -> int:
    """How many blocks of `size` hold n. (Triton's own function is one for kernels, and slow outside of them.)"""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The smallest that is not less than n."""
    return 1 << (n - 1).bit_length()


def _enqueue(
    kernel: Any, grid: tuple[int, ...], device: int, given: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    first = kernel.constexprs[0] if kernel.constexprs else len(kernel.params)
    known: list[Any] = [id(kernel), device]  # and what the compiler knows of each argument
    for x in given[:first]:
        if isinstance(x, Tensor):
            known.append((x.dtype,) if x.data_ptr() & 15 else x.dtype)
        elif type(x) is int and x != 1:
            bits = 32 if -(2**31) <= x < 2**31 else 64 if x < 2**63 else 65
            known.append(-bits if x & 15 else bits)
        else:  # a one is a constant; nothing is known of other numbers but their kind
            known.append(x if x is None or type(x) is int else type(x))
    alike = (*known, *given[first:], *constants.items())
    if (found := _compiled.get(alike)) is not None:
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*given, *rest)
        return
    compiled = kernel[grid](*given, **constants)
    last = kernel.params[len(given) :]
    if isinstance(compiled, CompiledKernel) and all(p.is_constexpr for p in (*kernel.params[first:], *last)):
        _compiled[alike] = compiled, tuple(constants.get(p.name, p.default) for p in last)
