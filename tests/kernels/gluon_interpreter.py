"""Run kernels in Gluon on a CPU: what they compute, one program after the other, without layouts or time.

Triton interprets its own language, but not Gluon. Here the source of a module runs once more, on stand-ins for what it
imports of Gluon: tensors are PyTorch's, all numbers have fp64, copies are made at once, and barriers do nothing. Races,
layouts and rounding are left to the device. Groups of warps that share the work take turns.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


class Value(Tensor):
    """A tensor that has a type, which has a layout."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


def value(x: Any) -> Tensor:
    """As a tensor of this kind."""
    return torch.as_tensor(x).as_subclass(Value)


def memory_of(x: Tensor) -> Tensor:
    """All of the memory from the first to the last element of a tensor, with the gaps between them."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1 if x.numel() else 0,), (1,))


class Pointer:
    """Addresses of elements in memory."""

    def __init__(self, memory: Tensor, at: Tensor):
        self.memory, self.at = memory, at

    @property
    def dtype(self) -> SimpleNamespace:
        """The type of a pointer: to bf16, or to anything else."""
        return SimpleNamespace(element_ty=Language.bfloat16 if self.memory.dtype == torch.bfloat16 else None)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.at + offset)

    def load(self, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
        """What is there, `other` where the mask is False."""
        wanted = torch.ones_like(self.at, dtype=torch.bool) if mask is None else torch.broadcast_to(mask, self.at.shape)
        assert bool(((self.at >= 0) & (self.at < self.memory.numel()))[wanted].all()), "outside of the tensor"
        actual = self.memory[torch.where(wanted, self.at, 0)]
        return value(torch.where(wanted, actual, torch.full_like(actual, other)))

    def store(self, x: Any, mask: Tensor | None = None) -> None:
        """Put it there where the mask is True."""
        wanted = torch.ones_like(self.at, dtype=torch.bool) if mask is None else torch.broadcast_to(mask, self.at.shape)
        assert bool(((self.at >= 0) & (self.at < self.memory.numel()))[wanted].all()), "outside of the tensor"
        self.memory[self.at[wanted]] = torch.broadcast_to(x, self.at.shape)[wanted].to(self.memory.dtype)


class Shared:
    """A piece of shared memory, which holds NaN at first."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.other, self.parts = tensor, dict[tuple[Any, ...], Shared](), dict[int, Shared]()

    def load(self, layout: Any) -> Tensor:
        """What it holds."""
        return value(self.tensor.clone())

    def store(self, x: Tensor) -> None:
        """Put it there, of the same shape."""
        assert (x.shape, x.dtype) == (self.tensor.shape, self.tensor.dtype)
        self.tensor.copy_(x)

    def index(self, i: Any) -> "Shared":
        """One of its parts along the first axis."""
        return self.parts.setdefault(int(i), Shared(self.tensor[int(i)]))

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        """Some of its elements."""
        return Shared(self.tensor.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> "Shared":
        """Return a view of the same memory in another shape."""
        return Shared(self.tensor.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        """The same with its axes in another order."""
        return Shared(self.tensor.permute(order))

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        """The same memory with other contents; here other memory, as all numbers have the same size."""
        return self.other.setdefault((dtype, *shape), allocate(dtype, shape, layout))


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    """New shared memory."""
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype))


class TensorDescriptor(NamedTuple):
    """A matrix that is copied to shared memory in blocks."""

    base: Tensor
    block_shape: list[int]

    @classmethod
    def from_tensor(cls, tensor: Tensor, block_shape: list[int], layout: Any) -> "TensorDescriptor":
        """One of all of a tensor."""
        return cls(tensor, block_shape)

    def block(self, place: list[Any]) -> Tensor:
        """The block that begins at a row and a column, with zeros outside of the matrix."""
        (row, column), (rows, columns) = map(int, place), self.block_shape
        assert row >= 0
        assert column >= 0
        part = self.base[row : row + rows, column : column + columns]
        return F.pad(part, (0, columns - part.shape[1], 0, rows - part.shape[0]))


class Stopped(Exception):
    """Another group of warps has failed."""


class Barriers:
    """`mbarrier`: a barrier is the place in shared memory where it was made, and counts arrivals.

    Groups of warps are threads of which one runs at a time, the one that holds `turn`, until it waits for a barrier.
    So nothing depends on time, and a barrier that nobody can reach is an error at once.
    """

    MBarrierLayout = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.turn, self.state = Condition(), dict[Shared, list[int]]()
        self.groups, self.failed, self.awaited = 0, False, list[tuple[Shared, int]]()
        self.expected = dict[Shared, int]()  # bytes that are still to be copied

    def init(self, bar: Shared, count: int) -> None:
        """Wait for this many arrivals in each phase, of which the first is phase 0."""
        self.state[bar] = [count, count, 0]

    def arrive(self, bar: Shared, count: int | None = None) -> None:
        """Arrive this often, or as often as the phase still needs."""
        state = self.state[bar]
        state[1] -= state[1] if count is None else count
        assert state[1] >= 0, "more arrivals than the barrier waits for"
        if not state[1]:
            state[1:] = [state[0], state[2] + 1]

    def expect(self, bar: Shared, size: int) -> None:
        """Arrive once as many bytes have been copied."""
        assert not self.expected.get(bar)
        self.expected[bar] = size

    def copy_block(self, source: TensorDescriptor, place: list[Any], bar: Shared, to: Shared) -> None:
        """Copy a block, whose numbers have two bytes on a device."""
        to.tensor.copy_(source.block(place))
        self.expected[bar] -= 2 * to.tensor.numel()
        assert self.expected[bar] >= 0, "more bytes than the barrier waits for"
        if not self.expected[bar]:
            self.arrive(bar, 1)

    def passed(self, bar: Shared, parity: int) -> bool:
        """The last phase of this parity is over."""
        return self.state[bar][2] % 2 != parity

    def wait(self, bar: Shared, phase: Any) -> None:
        """Return once the last phase of this parity is over."""
        if self.passed(bar, parity := int(phase)):
            return
        self.awaited.append((bar, parity))
        assert self.some_can_go_on(), "all groups of warps wait, nobody arrives"
        self.turn.notify_all()
        self.turn.wait_for(lambda: self.failed or self.passed(bar, parity))
        self.awaited.remove((bar, parity))
        if self.failed:
            raise Stopped

    def some_can_go_on(self) -> bool:
        """A group does not wait, or no longer has to."""
        return len(self.awaited) < self.groups or any(self.passed(*each) for each in self.awaited)

    def in_turn(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run one group of warps, and give way to the others wherever it waits."""
        with self.turn, torch.no_grad():  # threads do not inherit the mode
            try:
                function(*arguments)
                self.groups -= 1
                assert not self.groups or self.some_can_go_on(), "the last group ends while the others wait"
            except BaseException:
                self.failed = True
                raise
            finally:
                self.turn.notify_all()

    def specialised(
        self, groups: Sequence[tuple[Callable[..., None], Sequence[Any]]], warps: Any, registers: Any
    ) -> None:
        """`warp_specialize`: all groups of warps share the work."""
        self.groups = len(groups)
        with ThreadPoolExecutor(len(groups)) as pool:
            done = [pool.submit(self.in_turn, function, *arguments) for function, arguments in groups]
        errors = [error for each in done if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda x: isinstance(x, Stopped)):
            raise error  # the one that stopped the others


def multiply(a: Shared | Tensor, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    """A matrix product; the first factor may be in registers."""
    left = a.tensor if isinstance(a, Shared) else a
    dtype = torch.promote_types(left.dtype, acc.dtype)
    product = value(left.to(dtype) @ b.tensor.to(dtype))
    return acc + product if use_acc else product


def wait(pending: int, deps: list[Tensor]) -> Any:
    """What was waited for."""
    return deps[0] if len(deps) == 1 else tuple(deps)


def copy(to: Shared, source: Pointer, mask: Tensor | None = None) -> None:
    """A copy to shared memory, zeros where the mask is False."""
    to.tensor.copy_(source.load(mask))


def in_lanes(instructions: str, *arguments: Tensor) -> Tensor:
    """What PTX makes of tiles of columns by 16, whose blocks of 16 rows have a warp each and 8 numbers in each lane.

    It may move numbers between lanes, and add products. The layout is that of a matrix product's results.
    """
    lane, i = torch.arange(32)[:, None], torch.arange(8)
    at = (lane // 4 + i // 2 % 2 * 8, lane % 4 * 2 + i % 2 + i // 4 * 8)
    results = torch.zeros_like(arguments[0])
    for block in range(0, len(results), 16):
        for column in range(0, results.shape[1], 16):
            places = slice(block, block + 16), slice(column, column + 16)
            names = [f"${8 + i}" for i in range(8 * len(arguments))]
            numbers = torch.cat([x[places][at] for x in arguments], 1)
            registers = dict(zip(names, numbers.unbind(1), strict=True))
            for line in instructions.strip("{} ").split(";"):
                operation, *operands = line.replace(",", " ").split() or [".reg"]
                if operation == ".reg":
                    continue
                to, (first, *others) = operands[0], operands[1:]
                if operation == "shfl.sync.idx.b32":
                    source, form = int(others[0]), int(others[1], 16)
                    kept = form >> 8  # bits of the lane's own number that stay
                    registers[to] = registers[first][(torch.arange(32) & kept) | (source & ~kept)]
                elif operation == "fma.rn.f32":
                    registers[to] = registers[first] * registers[others[0]] + registers[others[1]]
                else:
                    assert operation == "mov.f32", operation
                    registers[to] = registers[first]
            results[places][at] = torch.stack([registers[f"${i}"] for i in range(8)], 1)
    return value(results)


def of_exponents(asm: str, dtype: torch.dtype, x: Tensor, *others: Tensor) -> Tensor:
    """Exponents of 2 with the bias of fp32, what they are made of, or powers of two."""
    if "0x00800080" in asm:
        return (x ^ ~others[0]) + 128
    if "lop3" in asm:
        return torch.where(others[1] == 0, x, others[0])
    if "max.s16x2" in asm:
        n = x ^ others[1] if "xor" in asm else ~x if "not" in asm else x
        return value(torch.clamp(n + others[0], min=0))
    e = others[0] if others else x
    power = torch.where(e > 0, (e - 127).to(dtype).exp2(), 0.0)
    return x * power if others else power


def in_line(asm: str, names: str, arguments: list[Tensor], **options: Any) -> Any:
    """What a line of PTX computes."""
    x, *others = arguments
    if "0f4B400000" in asm:
        return x.round().to(torch.int16), x - x.round()
    if "s16x2" in asm or "shl" in asm or "lop3" in asm:
        return of_exponents(asm, options["dtype"], *arguments)
    if "shfl" in asm and x.dtype == torch.int16:
        lane, form = (int(each.flatten()[0]) for each in others)
        row, kept = torch.arange(len(x)), form >> 10  # bits of the number of the row itself that stay
        return x[(row & ~7) | (row & kept) | (lane >> 2 & ~kept)]
    if "shfl" in asm:
        return in_lanes(asm, *arguments)
    if asm.startswith("ex2"):
        return x.exp2()
    if asm.startswith("and.b32") and x.dtype == torch.float32:
        return value((x.view(torch.int32) & -(1 << 16)).view(torch.float32))
    if asm.startswith("rcp"):
        return 1 / x
    return x.tanh() if "tanh" in asm else x


def of_values(f: Callable[..., Tensor]) -> Any:
    """The same function of numbers as well."""
    return staticmethod(lambda *arguments: f(*map(value, arguments)))


def nothing(*arguments: Any, **options: Any) -> Any:
    """A layout, a barrier, or part of the order of copies."""
    return None


class Language(ModuleType):
    """`triton.experimental.gluon.language`; layouts are None."""

    float16 = bfloat16 = float32 = float64 = torch.float64
    int16, int32, int64 = torch.int16, torch.int32, torch.int64
    program, programs = 0, 1

    def program_id(self, axis: int) -> Tensor:
        """Which program this is."""
        return value(self.program)

    def num_programs(self, axis: int) -> int:
        """The number of programs."""
        return self.programs

    constexpr = staticmethod(lambda x: x)
    arange = staticmethod(lambda start, stop, layout: value(torch.arange(start, stop)))
    zeros = staticmethod(lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)))
    expand_dims = staticmethod(lambda x, axis: x.unsqueeze(axis))
    load = staticmethod(lambda x, mask=None, other=0.0: x.load(mask, other))
    store = staticmethod(lambda x, y, mask=None: x.store(y, mask))
    sum = staticmethod(lambda x, axis: x.sum(axis))
    min, max = staticmethod(lambda x, axis: x.amin(axis)), staticmethod(lambda x, axis: x.amax(axis))
    reshape = staticmethod(lambda x, shape: x.reshape(shape))
    permute = staticmethod(lambda x, order: x.permute(order))
    convert_layout = staticmethod(lambda x, layout: x)
    cdiv = staticmethod(lambda n, size: -(-n // size))
    inline_asm_elementwise = staticmethod(in_line)
    reduce = staticmethod(lambda x, axis, combine: x.prod(axis))  # all of them are products
    associative_scan = staticmethod(lambda x, axis, combine: x.cumsum(axis))  # all of them are sums
    split = staticmethod(lambda x: x.unbind(-1))
    join = staticmethod(lambda x, y: torch.stack([x, y], -1))
    gather = staticmethod(lambda x, at, axis: x.gather(axis, at))
    static_range = staticmethod(range)
    allocate_shared_memory, shared_memory_descriptor = staticmethod(allocate), Shared
    where, exp2, abs = of_values(torch.where), of_values(torch.exp2), of_values(torch.abs)
    floor, rsqrt, log2 = of_values(torch.floor), of_values(torch.rsqrt), of_values(torch.log2)
    maximum, minimum = of_values(torch.maximum), of_values(torch.minimum)
    thread_barrier = BlockedLayout = SliceLayout = NVMMADistributedLayout = DotOperandLayout = staticmethod(nothing)
    NVMMASharedLayout = SwizzledSharedLayout = DistributedLinearLayout = staticmethod(nothing)


def jit(function: Any = None, **options: Any) -> Any:
    """A function as it is."""
    return function or (lambda f: f)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Imports of Gluon lead here."""
    names = [
        "",
        ".language",
        ".language.nvidia",
        ".language.nvidia.ampere",
        ".language.nvidia.hopper",
        ".nvidia.hopper",
    ]
    modules = {f"triton.experimental.gluon{name}": ModuleType(name) for name in names}
    modules["triton.experimental.gluon.language"] = language = Language("language")
    gluon, _, _, ampere, hopper, host = modules.values()
    gluon.jit, gluon.language = jit, language  # type: ignore[attr-defined]
    asynchronous = ModuleType("async_copy")
    asynchronous.async_load = copy  # type: ignore[attr-defined]
    asynchronous.commit_group = asynchronous.wait_group = nothing  # type: ignore[attr-defined]
    barriers = Barriers()
    language.warp_specialize = barriers.specialised  # type: ignore[attr-defined]
    asynchronous.mbarrier_arrive = lambda bar, increment_count: barriers.arrive(bar)  # type: ignore[attr-defined]
    ampere.async_copy = asynchronous  # type: ignore[attr-defined]
    hopper.fence_async_shared, hopper.warpgroup_mma = nothing, multiply  # type: ignore[attr-defined]
    hopper.warpgroup_mma_wait, hopper.mbarrier = wait, barriers  # type: ignore[attr-defined]
    hopper.tma = SimpleNamespace(async_copy_global_to_shared=barriers.copy_block)  # type: ignore[attr-defined]
    host.TensorDescriptor = TensorDescriptor  # type: ignore[attr-defined]
    experimental = importlib.import_module("triton.experimental")
    with patch.dict(sys.modules, modules), patch.object(experimental, "gluon", gluon, create=True):
        yield


class Kernel:
    """A function that is launched as a kernel: `kernel[grid](…)`."""

    def __init__(self, function: Callable[..., None], language: Language):
        self.function, self.language = function, language

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, num_warps: int, maxnreg: int | None = None, **constants: Any) -> None:
            pointers = [Pointer(memory_of(x), value(0)) if isinstance(x, Tensor) else x for x in arguments]
            self.language.programs = grid[0]
            with patch("triton.language.range", lambda stop, disable_licm: range(stop)):
                for self.language.program in range(grid[0]):
                    self.function(*pointers, **constants)

        return run


def interpreted(name: str, *kernels: str) -> ModuleType:
    """A module in Gluon with kernels that run here.

    Args:
        name: The module.
        kernels: Its kernels.
    """
    with stand_ins(), patch.dict(sys.modules):
        ours = [each for each in sys.modules if each.startswith("kernels.")]
        for each in [each for each in ours if hasattr(sys.modules[each], "gluon")]:
            del sys.modules[each]  # imported for a GPU; the module may import it again
        for each in (*(f"kernels.gpu.gluon_{part}" for part in ("tiles", "halves", "products")), name):
            spec = importlib.util.find_spec(each)
            assert spec
            assert spec.loader
            sys.modules[each] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    for kernel in kernels:
        setattr(module, kernel, Kernel(getattr(module, kernel), module.gl))
    return module
