"""Kernels are enqueued on the device of their tensors, without most of the host work of Triton's launcher.

On every launch, Triton spells out what its compiler would know of all arguments, and looks that text up among the
kernels it has compiled. On the host that takes as long as some kernels take on the device. Here a launch that the
compiler could not tell from an earlier one calls the kernel that was compiled then.

Triton compiles a kernel where it is launched first, and the host waits. `launch_in_order` compiles the kernels of
several launches side by side before the first of them. Inside `compiling_ahead()` a launch only hands its kernel to a
pool of threads, so that the kernels of a whole step are compiled side by side.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from ..errors import UserError
from . import paths
from .device import DIRECT, overlaps

MOST_PROGRAMS = 2**31 - 1  # along the first axis of a grid, the only one of our launches: the others end at 65,535
PLAIN = torch.version.hip is not None  # the ROCm compiler also looks at the size of a tensor's memory
FUSED = True  # `enable_fp_fusion`, which is Triton's default until 3.9
CompiledLaunch = tuple[CompiledKernel, tuple[Any, ...]]  # a compiled kernel, and its constants in order
_compiled: dict[tuple[Any, ...], CompiledLaunch] = {}  # by what the compiler knows of a launch
# Not a context variable: the backward pass runs in a separate thread, which does not inherit the context.
_ahead: "_Ahead | None" = None


class _Ahead:
    """Kernels that are being compiled, by what the compiler knows of a launch."""

    def __init__(self, pool: Executor):
        self.pool, self.known = pool, set[tuple[Any, ...]]()

    def compile(
        self, alike: tuple[Any, ...], kernel: Any, device: int, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Compile and load a kernel, unless one for such launches is already on its way."""
        if alike not in self.known:
            self.known.add(alike)
            self.pool.submit(self._compile, kernel, device, args, constants)

    @staticmethod
    def _compile(kernel: Any, device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        with torch.cuda.device(device):
            compiled = kernel.warmup(*args, grid=(1,), **constants)
            compiled.run  # noqa: B018 - loads the code, and compiles the launcher of the host


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside the ``with`` block, launches compile their kernels and run none; leaving it waits until all are compiled.

    It holds for launches of all threads. What the kernels would have written is undefined. A kernel that cannot be
    compiled raises no error here, but when it is launched.
    """
    global _ahead
    pool = ThreadPoolExecutor(os.cpu_count())
    _ahead = _Ahead(pool)
    try:
        yield
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    finally:
        _ahead = None
        pool.shutdown()


def check_programs(kernel: Any, programs: int) -> None:
    """Raise if a kernel needs more programs than a device can start.

    Raises:
        UserError: There are too many; the message starts with the name of the op.
    """
    if programs > MOST_PROGRAMS:
        function = getattr(kernel, "fn", kernel)
        op = function.__module__.split(".")[1]
        raise UserError(
            f"{op}: its kernel {function.__name__!r} would need {programs:,} programs, but a device starts at most "
            f"{MOST_PROGRAMS:,} per launch; use a smaller batch or shorter sequences"
        )


def enqueue(
    kernel: Any,
    programs: int,
    *args: Any,
    warps: int = 4,
    stages: int | None = None,
    registers: int | None = None,
    overlap: int | None = None,  # int, so that callers can unpack dictionaries of numbers
    **constants: Any,
) -> CompiledLaunch | None:
    """Launch a kernel on the current stream of the device of its first tensor.

    Args:
        kernel: A `triton.jit` function whose constants follow all other arguments.
        programs: Number of programs, along one axis.
        args: The arguments before the constants, optionally followed by constants; the first one is a tensor. Tensor
            descriptors are tensors that the kernel copies in blocks.
        warps: Warps of a program.
        stages: Stages of software pipelining; None for Triton's default.
        registers: Most registers of a thread; None for what the compiler takes.
        overlap: Whether the kernel may start before the one in front of it has finished, as `overlap.py` explains.
            Its constant OVERLAP is set here: True if the device supports that, too. None for a kernel without this
            constant.
        constants: The remaining constants by name.

    Returns:
        What later launches of the same form reuse; None if nothing can be reused.

    Raises:
        UserError: There are more programs than a device can start.
    """
    check_programs(kernel, programs)
    if paths.record is not None:
        options: dict[str, Any] = {"warps": warps, "stages": stages, "registers": registers, "overlap": overlap}
        paths.record.launches.append(LaunchSpec(kernel, programs, **options, **constants))
        return None
    constants = _named_for_triton(args[0], constants, warps, stages, registers, overlap)
    device = args[0].get_device()
    if device < 0 or PLAIN:  # on the CPU, Triton interprets the kernel
        kernel[(programs,)](*args, **constants)
        return None
    constants["enable_fp_fusion"] = FUSED
    if device == torch.accelerator.current_device_index():
        return _enqueue(kernel, programs, device, args, constants)
    with torch.cuda.device(device):
        return _enqueue(kernel, programs, device, args, constants)


def _named_for_triton(
    x: Tensor, constants: dict[str, Any], warps: int, stages: int | None, registers: int | None, overlap: int | None
) -> dict[str, Any]:
    """The constants of a kernel and Triton's options, for the device of x."""
    if overlap is not None:
        possible = bool(overlap) and overlaps(x.device)
        constants = {**constants, "OVERLAP": possible, **({"launch_pdl": True} if possible else {})}
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    return {**constants, **{name: value for name, value in options.items() if value is not None}}


class LaunchSpec:
    """A launch with everything fixed but its tensors. Kept for sizes that recur, it takes half the time of `enqueue`.

    Args:
        kernel: As for `enqueue`; its tensors precede all other arguments.
        programs: As for `enqueue`.
        numbers: The arguments between the tensors and the constants.
        warps: Warps of a program.
        stages: Stages of software pipelining; None for Triton's default.
        registers: Most registers of a thread; None for what the compiler takes.
        overlap: As for `enqueue`.
        checked: Whether the caller guarantees that each tensor, if present, always has the same dtype and is on the
            device of the first one. They are not checked again then.
        constants: Constants of the kernel, by name.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        *numbers: Any,
        warps: int = 4,
        stages: int | None = None,
        registers: int | None = None,
        overlap: int | None = None,
        checked: bool = False,
        **constants: Any,
    ):
        check_programs(kernel, programs)
        self.kernel, self.programs, self.numbers, self.constants = kernel, programs, numbers, constants
        self.warps, self.stages, self.registers, self.checked = warps, stages, registers, checked
        self.overlap = overlap
        self.options = {**constants, "warps": warps, "stages": stages, "registers": registers, "overlap": overlap}
        # by device, and what the compiler knows of the tensors
        self.compiled: dict[tuple[Any, ...], CompiledLaunch | None] = {}

    @property
    def name(self) -> str:
        """Op, file and function of the kernel."""
        function = getattr(self.kernel, "fn", self.kernel)
        module = function.__module__.removeprefix("kernels.").replace(".gpu.", ".")
        return f"{module}.{function.__name__}"

    def __call__(self, first: Tensor, *others: Tensor | None) -> None:
        """Launch it on the current stream of the device of the first tensor."""
        if paths.record is not None:
            paths.record.launches.append(self)
            return
        device, tensors = first.get_device(), (first, *others)
        values: list[Any] = []  # as in `_enqueue`
        if self.checked:
            bits = missing = 0  # which tensors are None: a bit each
            for x in tensors:
                missing += missing
                if x is None:
                    values.append(None)
                    missing += 1
                else:
                    at = x.data_ptr()
                    values.append(at)
                    bits |= at
            alike: tuple[Any, ...] = (device, missing)
        if not self.checked or bits & 15:
            signature: list[Any] = [device]
            values = []
            for x in tensors:
                if x is None:
                    signature.append(None)
                    values.append(None)
                else:
                    at, dtype = x.data_ptr(), x.dtype
                    signature.append((dtype,) if at & 15 else dtype)
                    values.append(at if x.is_cuda else x)
            alike = tuple(signature)
        cached = self.compiled.get(alike)
        if cached is None or device != torch.accelerator.current_device_index():
            self.compiled[alike] = enqueue(self.kernel, self.programs, *tensors, *self.numbers, **self.options)
        else:
            compiled, rest = cached
            _start(compiled, self.programs, device, tensors, values, (*self.numbers, *rest))

    def call(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """Return what the compiler knows of a launch, the kernel, the device, the arguments and the constants."""
        assert tensors[0] is not None
        device, args = tensors[0].get_device(), (*tensors, *self.numbers)
        options = (self.warps, self.stages, self.registers, self.overlap)
        constants = _named_for_triton(tensors[0], self.constants, *options)
        constants["enable_fp_fusion"] = FUSED
        return _signature(self.kernel, device, args, constants)[0], self.kernel, device, args, constants


Launch = tuple[LaunchSpec, tuple[Any, ...]]  # with its tensors


def launch_in_order(launches: Sequence[Launch]) -> None:
    """Launch kernels one after another; those that are new are compiled side by side before the first of them."""
    new = [(launch, tensors) for launch, tensors in launches if not launch.compiled]
    if len(new) > 1 and launches[0][1][0].is_cuda and not PLAIN and _ahead is None and paths.record is None:
        calls = [launch.call(tensors) for launch, tensors in new]
        if len(unknown := [call for call in calls if call[0] not in _compiled]) > 1:
            with ThreadPoolExecutor(len(unknown)) as pool:
                ahead = _Ahead(pool)
                for call in unknown:
                    ahead.compile(*call)
    for launch, tensors in launches:
        launch(*tensors)


def cdiv(n: int, size: int) -> int:
    """Return the number of blocks of `size` that hold n. (Triton's function is slow outside of kernels.)"""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << (n - 1).bit_length()


def _enqueue(
    kernel: Any, programs: int, device: int, args: tuple[Any, ...], constants: dict[str, Any]
) -> CompiledLaunch | None:
    alike, values = _signature(kernel, device, args, constants)
    first = len(values)
    if (cached := _compiled.get(alike)) is not None:
        compiled, rest = cached
        _start(compiled, programs, device, args[:first], values, (*args[first:], *rest))
        return cached
    if _ahead is not None:
        _ahead.compile(alike, kernel, device, args, constants)
        return None
    compiled = kernel[(programs,)](*args, **constants)
    last = kernel.params[len(args) :]
    if isinstance(compiled, CompiledKernel) and all(p.is_constexpr for p in (*kernel.params[first:], *last)):
        cached = _compiled[alike] = compiled, tuple(constants.get(p.name, p.default) for p in last)
    return cached


def _signature(
    kernel: Any, device: int, args: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Any]]:
    """Return what the compiler knows of a launch, and its arguments before the constants, tensors by address.

    The launcher would query the address of each tensor, and then the driver.
    """
    first = kernel.constexprs[0] if kernel.constexprs else len(kernel.params)
    signature: list[Any] = [id(kernel), device, len(args)]  # and what the compiler knows of each argument
    values: list[Any] = []
    for x in args[:first]:
        if type(x) is int:
            bits = 32 if -(2**31) <= x < 2**31 else 64 if x < 2**63 else 65
            signature.append(1 if x == 1 else -bits if x & 15 else bits)  # Triton treats 1 as a constant
        elif isinstance(x, Tensor):
            at, dtype = x.data_ptr(), x.dtype
            signature.append((dtype,) if at & 15 else dtype)
            if x.is_cuda:  # the launcher rejects tensors elsewhere
                x = at
        elif isinstance(x, TensorDescriptor):  # the launcher makes a tensor map of it
            signature.append((x.base.dtype, *x.block_shape, x.layout))
        else:  # of other values, the compiler knows only the type
            signature.append(x if x is None else type(x))
        values.append(x)
    return (*signature, *args[first:], *constants, *constants.values()), values


def _start(
    compiled: CompiledKernel,
    programs: int,
    device: int,
    args: tuple[Any, ...],
    values: list[Any],
    rest: tuple[Any, ...],
) -> None:
    """Launch a compiled kernel on `args` (or on their values, bypassing the launcher) and the rest."""
    if _ahead is not None:
        return
    grid = (programs, 1, 1)
    if _observed() or not DIRECT:
        compiled[grid](*args, *rest)
    else:
        stream = driver.active.get_current_stream(device)
        start = (*grid, stream, compiled.function, compiled.packed_metadata, None, None, None)
        compiled.run(*start, *values, *rest)


def _observed() -> bool:
    """Return whether a hook observes launches, as those of profilers do."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
