"""What looks alike to the compiler, and only that, shares a compiled kernel."""

from contextlib import nullcontext
from threading import Barrier, Thread
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.gpu import launch as enqueue_module
from kernels.gpu.launch import LaunchSpec, cdiv, enqueue, launch_in_order, next_power_of_2

from ..places import PLACES


@triton.jit
def scale(x, bias, out, size, factor, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * factor
    if ADD:
        y += tl.load(bias + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=at < size)


def scaled(x: torch.Tensor, bias: torch.Tensor | None, factor: float, block: int = 64, **options: int) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    enqueue(
        scale, cdiv(x.numel(), block), x, bias, out, x.numel(), factor, ADD=bias is not None, BLOCK=block, **options
    )
    return out


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_every_launch_is_right_whatever_came_before(where: str):
    """Sizes (one, multiples of 16 or not), alignment, dtypes, constants, a missing tensor, options: twice, in turns."""
    memory = torch.randn(1 << 12, device=where)
    for _ in range(2):
        for size in (1, 15, 16, 17, 64, 100, 1024):
            for shift in (0, 1, 4):
                for dtype in (torch.float32, torch.float16):
                    x = memory.to(dtype)[shift : shift + size]
                    for bias in (None, x.flip(0), memory[1 : size + 1]):
                        want = x.float() * 0.5 + (0 if bias is None else bias.float())
                        for block, warps in ((64, 4), (16, 1)):
                            y = scaled(x, bias, 0.5, block, num_warps=warps)
                            torch.testing.assert_close(y, want.to(dtype), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [[torch.float32, torch.float16], [torch.float16]])
@pytest.mark.parametrize("where", PLACES)
def test_a_prepared_launch_looks_at_its_tensors(where: str, dtypes: list[torch.dtype]):
    memory, checked = torch.randn(1 << 12, device=where), len(dtypes) == 1
    for size, add in ((1, True), (64, False), (100, True)):
        launch = LaunchSpec(scale, cdiv(size, 64), size, 0.5, checked=checked, ADD=add, BLOCK=64, warps=1)
        for _ in range(2):
            for shift in (0, 1, 4):  # aligned or not is asked even where dtypes are known
                for dtype in dtypes:
                    x = memory.to(dtype)[shift : shift + size]
                    bias, out = memory[shift : shift + size] if add else None, torch.full_like(x, float("nan"))
                    launch(x, bias, out)
                    want = x.float() * 0.5 + (0 if bias is None else bias)
                    torch.testing.assert_close(out, want.to(dtype), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("checked", [False, True])
def test_a_prepared_launch_knows_what_the_compiler_does(checked: bool, monkeypatch: pytest.MonkeyPatch):
    """Which tensors are missing, which are not aligned, and unless somebody has checked them, their dtypes."""
    compiled: list[object] = []
    started: list[object] = []

    def compile_(*arguments, **constants):
        compiled.append(object())
        return compiled[-1], ()

    monkeypatch.setattr(enqueue_module, "enqueue", compile_)
    monkeypatch.setattr(enqueue_module, "_start", lambda kernel, *arguments: started.append(kernel))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: -1)
    memory = torch.zeros(64)
    others = [(y, z) for y in (None, memory[:2], memory[3:]) for z in (None, memory)]
    different = [(x, *rest) for x in (memory, memory[1:]) for rest in others]
    if not checked:
        different += [(memory.half(), None, None), (memory, memory.half(), None), (memory, None, memory.half())]
    launch = LaunchSpec(scale, 1, checked=checked)
    for tensors in different:
        launch(*tensors)
    assert len(compiled) == len(different)
    for _ in range(2):
        for tensors in different:
            launch(*tensors)
    assert started == compiled * 2


def test_descriptors_that_the_compiler_can_tell_apart():
    """Dtype, block and layout; not the tensor, nor its sizes. The launcher gets the descriptor."""
    kernel = SimpleNamespace(constexprs=(), params=("x", "block"))
    half, single = torch.zeros(64, 128).half(), torch.zeros(64, 128)

    def described(x: torch.Tensor, block: list[int], swizzle: int = 128) -> tuple[object, ...]:
        block_of_x = TensorDescriptor.from_tensor(x, block, NVMMASharedLayout(swizzle, 8 * x.itemsize, 2))
        signature, values = enqueue_module._signature(kernel, 0, (single, block_of_x), {})
        assert values[1] is block_of_x
        return signature

    every = [(half, [16, 64]), (half, [32, 64]), (half, [16, 128]), (half, [16, 64], 64), (single, [16, 64])]
    assert len({described(*each) for each in every}) == len(every)
    for each in every:
        assert described(*each) == described(torch.zeros(32, 256).to(each[0]), *each[1:])


class Compiled:
    """A kernel that notes what is done with it."""

    constexprs, params = (), ("x", "size")

    def __init__(self):
        self.done: list[str] = []

    def warmup(self, *arguments, grid, **constants):
        self.done.append("compiled")
        return self

    @property
    def run(self):
        self.done.append("loaded")

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.done.append("launched")


def test_kernels_are_compiled_ahead_once_and_not_launched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(enqueue_module, "PLAIN", False)
    kernel, x = Compiled(), SimpleNamespace(get_device=lambda: 0)

    def launch() -> None:
        enqueue(kernel, 1, x, 16)
        enqueue(kernel, 1, x, 32)

    with enqueue_module.compiling_ahead():
        launch()
        in_another_thread = Thread(target=launch)
        in_another_thread.start()
        in_another_thread.join()
        enqueue(kernel, 1, x, 17)  # which is another kernel, as it is no multiple of 16
    assert sorted(kernel.done) == ["compiled"] * 2 + ["loaded"] * 2
    launch()
    assert kernel.done[4:] == ["launched"] * 2


def test_new_kernels_are_compiled_side_by_side_and_then_launched_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(enqueue_module, "PLAIN", False)
    done: list[str] = []
    meeting = Barrier(2, timeout=60)  # passed only by two compilations at the same time

    class Slow(Compiled):
        def warmup(self, *arguments, grid, **constants):
            meeting.wait()
            return super().warmup(*arguments, grid=grid, **constants)

        def __getitem__(self, grid):
            return lambda *arguments, **constants: done.append(f"launched after {len(self.done)}")

    first, second = Slow(), Slow()
    x = SimpleNamespace(get_device=lambda: 0, data_ptr=lambda: 0, dtype=torch.float32, is_cuda=True)
    launches = [(LaunchSpec(kernel, 1, 16), (x,)) for kernel in (first, second)]
    for _ in range(2):  # the second time, no launch is new
        launch_in_order(launches)
    assert first.done == second.done == ["compiled", "loaded"]
    assert done == ["launched after 2"] * 4


def test_after_an_error_kernels_are_launched_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(enqueue_module, "PLAIN", False)
    kernel = Compiled()
    with pytest.raises(KeyboardInterrupt), enqueue_module.compiling_ahead():
        raise KeyboardInterrupt
    enqueue(kernel, 1, SimpleNamespace(get_device=lambda: 0))
    assert kernel.done == ["launched"]


@pytest.mark.gpu
def test_on_a_gpu_what_is_compiled_ahead_does_not_run():
    x = torch.randn(100, device="cuda")
    launch, out = LaunchSpec(scale, 2, 100, 2.0, ADD=True, BLOCK=64), torch.zeros_like(x)
    scaled(x, x, 2.0)  # known before
    with enqueue_module.compiling_ahead():
        assert scaled(x, x, 2.0).isnan().all()
        assert scaled(x, None, 5.0, 32).isnan().all()
        launch(x, x, out)
        assert not out.any()
    torch.testing.assert_close(scaled(x, x, 2.0), 3 * x)
    torch.testing.assert_close(scaled(x, None, 5.0, 32), 5 * x)
    launch(x, x, out)
    torch.testing.assert_close(out, 3 * x)


@pytest.mark.gpu
def test_constants_by_place_and_by_name():
    x = torch.randn(100, device="cuda")
    for add, block in ((True, 64), (False, 64), (True, 32), (True, 64)):
        out = torch.empty_like(x)
        enqueue(scale, cdiv(100, block), x, x, out, 100, 2.0, add, block)
        torch.testing.assert_close(out, x * (3 if add else 2))
        enqueue(scale, cdiv(100, block), x, x, out, 100, 2.0, BLOCK=block, ADD=add)
        torch.testing.assert_close(out, x * (3 if add else 2))


@pytest.mark.gpu
def test_a_captured_launch_can_be_replayed():
    x = torch.randn(256, device="cuda")
    out = torch.zeros_like(x)
    enqueue(scale, 4, x, None, out, 256, 3.0, ADD=False, BLOCK=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue(scale, 4, x, None, out, 256, 3.0, ADD=False, BLOCK=64)
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(out, 3 * x)


@pytest.mark.gpu
@pytest.mark.parametrize("direct", [False, True])
def test_profilers_hear_of_every_launch(direct: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(enqueue_module, "DIRECT", direct)
    heard, x, hooks = [], torch.randn(100, device="cuda"), triton.knobs.runtime
    launch, out = LaunchSpec(scale, 2, 100, 2.0, ADD=True, BLOCK=64), torch.empty_like(x)
    for _ in range(2):
        torch.testing.assert_close(scaled(x, x, 2.0), 3 * x)
        launch(x, x, out)

    def hear(launch) -> None:
        heard.append(launch.get()["name"])

    hooks.launch_enter_hook.add(hear)
    try:
        torch.testing.assert_close(scaled(x, x, 2.0), 3 * x)
        launch(x, x, out)
    finally:
        hooks.launch_enter_hook.remove(hear)
    monkeypatch.setattr(hooks, "launch_exit_hook", hear)
    torch.testing.assert_close(scaled(x, x, 2.0), 3 * x)
    monkeypatch.setattr(hooks, "launch_exit_hook", None)
    torch.testing.assert_close(scaled(x, x, 2.0), 3 * x)
    launch(x, x, out.zero_())
    torch.testing.assert_close(out, 3 * x)
    assert heard == ["scale"] * 3


@pytest.mark.gpu
def test_a_tensor_elsewhere_is_refused():
    x = torch.randn(100, device="cuda")
    launch = LaunchSpec(scale, 2, 100, 2.0, ADD=True, BLOCK=64)
    for _ in range(2):
        for run in (lambda bias: scaled(x, bias, 2.0), lambda bias: launch(x, bias, torch.empty_like(x))):
            run(x)
            with pytest.raises(ValueError, match="cpu tensor"):
                run(x.cpu())


@pytest.mark.multi_gpu
def test_the_device_is_that_of_the_tensors():
    launch = LaunchSpec(scale, 2, 100, 2.0, ADD=True, BLOCK=64)
    for index in (1, 0, 1, 1):
        x = torch.randn(100, device=f"cuda:{index}")
        torch.testing.assert_close(scaled(x, None, 2.0), 2 * x)
        out = torch.empty_like(x)
        launch(x, x, out)
        torch.testing.assert_close(out, 3 * x)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 1000, 1 << 20])
def test_integers(n: int):
    assert next_power_of_2(n) == triton.next_power_of_2(n)
    assert cdiv(n, 16) == triton.cdiv(n, 16)


def test_what_we_know_of_the_launcher(monkeypatch: pytest.MonkeyPatch):
    """Triton's own launcher calls a compiled kernel as ours does. If not, `enqueue.py` has to learn of a new Triton."""
    heard: dict[str, tuple] = {}

    class Compiled(CompiledKernel):
        function, packed_metadata, module = 7, (4, 0), None

        def __init__(self, name: str):
            self.name = name

        def launch_metadata(self, grid, stream, *arguments):
            return None

        @property
        def run(self):
            return lambda *arguments: heard.update({self.name: arguments})

    device = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 5)
    monkeypatch.setattr(driver, "_active", device, raising=False)
    kernel = JITFunction(scale.fn)
    x = torch.zeros(16)
    bound = {"x": x, "bias": None, "out": x, "size": 16, "factor": 0.5, "ADD": False, "BLOCK": 16}
    caches = ({"key": Compiled("theirs")}, {}, None, None, lambda *arguments, **options: (bound, [], None))
    kernel.device_caches = {0: caches}
    monkeypatch.setattr("triton.runtime.jit.compute_cache_key", lambda *arguments: "key")
    kernel.run(grid=(3,), warmup=False)
    monkeypatch.setattr(enqueue_module, "DIRECT", True)  # with newer versions, too, for which it is not used yet
    at = x.data_ptr()
    enqueue_module._start(Compiled("ours"), 3, 0, (x, None, x), [at, None, at], (16, 0.5, False, 16))
    theirs, ours = heard["theirs"], heard["ours"]
    assert theirs[:6] == ours[:6] == (3, 1, 1, 5, 7, (4, 0))  # grid, stream, function, metadata
    assert [x, None, x, *theirs[12:]] == [x, None, x, *ours[12:]]  # numbers and constants; ours has tensors by address
    assert ours[9:12] == (at, None, at)
    assert len(theirs) == len(ours)  # beside them the metadata of the launch and two hooks
