import importlib.util
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.linear import head_loss
from kernels.linear_kl import logits as in_pytorch
from zoo.runs.estimate import Allocations

from .comparisons import DEVICE, assert_near, assert_repeats

IGNORED = -100
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
each_backend = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])


def inputs(N: int, D: int = 7, E: int = 5, V: int = 61, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, weight, those of a wider or narrower teacher, and labels, of which a third is ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = (N, D), (V, D), (N, E), (V, E)
    labels = torch.where(torch.rand(N, generator=generator) < 0.3, IGNORED, 3)
    drawn = [torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    return [*drawn, labels.to(DEVICE)]


def by_definition(a: list[Tensor], temperature: float, cap: float | None, teacher_cap: float | None) -> Tensor:
    """PyTorch's divergence of all logits."""
    x, weight, teacher_x, teacher_weight, labels = a
    s, t = x @ weight.T, teacher_x @ teacher_weight.T
    s = s if cap is None else cap * torch.tanh(s / cap)
    t = t if teacher_cap is None else teacher_cap * torch.tanh(t / teacher_cap)
    s, t = (logits[labels != IGNORED].div(temperature).log_softmax(-1) for logits in (s, t))
    return F.kl_div(s, t, log_target=True, reduction="sum")


def results(a: list[Tensor], backend: str | None = None, **options: float | None) -> dict[str, Tensor]:
    """The divergence, by definition if no backend is named, and the gradients of 0.1 · divergence."""
    x, weight, *others = a
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    if backend is None:
        settings = {"temperature": 1.0, "cap": None, "teacher_cap": None} | options
        total = by_definition([x, weight, *others], **settings)  # type: ignore[arg-type]
    else:
        with kernels.backend(backend):
            total = kernels.linear_kl(x, weight, *others, **options)  # type: ignore[arg-type]
    dx, dweight = torch.autograd.grad(0.1 * total, (x, weight))
    return {"total": total.detach(), "dx": dx, "dweight": dweight}


def exact(a: list[Tensor], **options: float | None) -> dict[str, Tensor]:
    return results([x.double() if x.is_floating_point() else x for x in a], **options)


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The Triton op, where unwritten memory is not a number."""
    pytest.importorskip("triton")
    from kernels.linear_kl.gpu import op as gpu_op

    monkeypatch.setattr(head_loss, "new", lambda *a, f=head_loss.new, **options: f(*a, **options).fill_(torch.nan))
    return gpu_op


def of_logits(student: list[list[float]], teacher: list[list[float]]) -> list[Tensor]:
    """Arguments whose logits are these numbers."""
    s, t = (torch.tensor(rows, device=DEVICE) for rows in (student, teacher))
    eye = torch.eye(s.shape[1], device=DEVICE)
    return [s, eye, t, eye, torch.zeros(len(s), dtype=torch.int64, device=DEVICE)]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("cap", "teacher_cap"), [(None, None), (2.0, 3.0)])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("N", [0, 1, 16, 53])
def test_sum_and_gradients(
    N: int,
    temperature: float,
    cap: float | None,
    teacher_cap: float | None,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(in_pytorch, "LOGITS", 61 * 16)  # so that 53 tokens take four steps, the last of them short
    a, options = inputs(N), {"temperature": temperature, "cap": cap, "teacher_cap": teacher_cap}
    assert_near(results(a, backend, **options), exact(a, **options), 1e-12)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(in_pytorch, "LOGITS", 11 * 3)
    x, weight, *teacher, labels = inputs(7, D=3, E=4, V=11)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.linear_kl(x, weight, *teacher, labels, temperature=1.5, cap=2.0)

    torch.autograd.gradcheck(function, (x.requires_grad_(), weight.requires_grad_()))


@each_backend
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_that_equals_its_teacher_has_no_divergence_and_no_gradient(
    dtype: torch.dtype, cap: float | None, backend: str
):
    x, weight, *_, labels = inputs(20, dtype=dtype)
    y = results([x, weight, x, weight, labels], backend, temperature=0.5, cap=cap, teacher_cap=cap)
    assert not any(each.any() for each in y.values())


@each_backend
def test_gradients_are_not_differentiated_again(backend: str):
    x, weight, *others = (y.requires_grad_() if y.is_floating_point() else y for y in inputs(5, dtype=torch.float32))
    with kernels.backend(backend):
        total = kernels.linear_kl(x, weight, *others)
    for gradient in torch.autograd.grad(total, (x, weight), create_graph=True):
        with pytest.raises(kernels.UserError, match="cannot be differentiated again"):
            torch.autograd.grad(gradient.square().sum(), (x, weight))


def test_the_reference_is_differentiated_twice():
    x, weight, *others = inputs(5)
    with kernels.backend("reference"):
        run = partial(kernels.linear_kl, temperature=2.0)
        assert torch.autograd.gradgradcheck(
            lambda x, w: run(x, w, *others), (x.requires_grad_(), weight.requires_grad_())
        )


def test_no_gradient_reaches_the_teacher():
    a = [x.requires_grad_() if x.is_floating_point() else x for x in inputs(5)]
    kernels.linear_kl(*a).backward()
    assert [x.grad is not None for x in a[:4]] == [True, True, False, False]


LOW = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", LOW)
def test_lower_precision(dtype: torch.dtype):
    a = inputs(300, dtype=dtype)
    actual = results(a, "torch")
    assert actual["total"].dtype == torch.float32
    assert_near(actual, exact(a), LOW[dtype])


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_takes_the_products_in_half_precision(dtype: torch.dtype, backend: str):
    a = inputs(40, dtype=torch.float32)
    half = [x.to(dtype) if x.is_floating_point() else x for x in a]
    if dtype == torch.float16 and backend == "triton":
        for each in (a, half):
            with torch.autocast(DEVICE, dtype), pytest.raises(kernels.UserError, match="which does not take fp16"):
                results(each, backend)
        return
    with torch.autocast(DEVICE, dtype):
        mixed = results(a, backend)
    assert torch.equal(mixed["total"], results(half, backend)["total"])
    assert mixed["dx"].dtype == mixed["dweight"].dtype == torch.float32
    assert not torch.equal(mixed["dweight"], mixed["dweight"].to(dtype).float())  # it is summed in fp32
    assert_near(mixed, exact(a), 2 * LOW[dtype])


@each_backend
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_extreme_logits(temperature: float, backend: str):
    """One-hot and flat distributions, and logits that differ by a constant only."""
    high, one, flat = [80.0, -80.0, 80.0, -80.0, 0.0], [-80.0, 80.0, -80.0, -80.0, -80.0], [0.0] * 5
    students = [high, one, flat, high, [-logit for logit in high], one, [logit + 50 for logit in one]]
    teachers = [one, flat, one, high, high, [-logit for logit in one], one]
    for student, teacher in zip(students, teachers, strict=True):
        a = of_logits([student], [teacher])
        expected, actual = exact(a, temperature=temperature), results(a, backend, temperature=temperature)
        assert actual["total"] >= -5e-5  # rounding of sums of logits up to 160
        for name, y in expected.items():
            torch.testing.assert_close(actual[name].double(), y, rtol=1e-5, atol=5e-5)


@each_backend
@pytest.mark.parametrize("sign", [1, -1, torch.nan])
@pytest.mark.parametrize("place", [0, 9000])
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_logit_that_is_not_finite_is_visible(who: str, place: int, sign: float, backend: str):
    a = [torch.ones(3, 1, device=DEVICE), torch.rand(9003, 1, device=DEVICE)] * 2
    a[0 if who == "student" else 2] = a[0] * torch.tensor([[1.0], [1e38], [1.0]], device=DEVICE)
    a[1][place] = a[3][place] = 10.0 * sign
    assert not results([*a, torch.zeros(3, dtype=torch.int64, device=DEVICE)], backend)["total"].isfinite()


@each_backend
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_ignored_tokens(cap: float | None, value: float, backend: str):
    a = inputs(20, dtype=torch.float32)
    expected, ignored = results(a, backend, cap=cap), a[-1] == IGNORED
    for i in (0, 2):
        a[i] = a[i].masked_fill(ignored[:, None], value)
    actual = results(a, backend, cap=cap)
    assert all(torch.equal(actual[name], y) for name, y in expected.items())
    assert not actual["dx"][ignored].any()
    a = inputs(20, dtype=torch.float32)
    moved = results([*a[:4], a[-1].masked_fill(ignored, 3000).masked_fill(~ignored, IGNORED)], backend, cap=cap)
    other = results([*a[:4], a[-1].masked_fill(ignored, 5)], backend, cap=cap, ignore_index=3)
    assert all(torch.equal(moved[name], y) for name, y in other.items())
    none = results([*a[:4], torch.full_like(a[-1], IGNORED)], backend, cap=cap)
    assert not any(y.any() for y in none.values())


@each_backend
@pytest.mark.parametrize("learns", [(True, False), (False, True), (False, False)])
def test_frozen_arguments(learns: tuple[bool, bool], backend: str, monkeypatch: pytest.MonkeyPatch):
    a, calls = inputs(20, dtype=torch.float32), list[int]()
    everything = results(a, backend)
    for name in ("add_product", "product"):
        function = getattr(head_loss, name)
        monkeypatch.setattr(head_loss, name, lambda *args, f=function: calls.append(1) or f(*args))
    leaves = [x.detach().requires_grad_(learn) for x, learn in zip(a[:2], learns, strict=True)]
    with kernels.backend(backend):
        total = kernels.linear_kl(*leaves, *a[2:])
    assert torch.equal(total, everything["total"])
    assert len(calls) == 2 + sum(learns)  # the logits of both models, and a product for each gradient
    for name, x in zip(("dx", "dweight"), leaves, strict=True):
        if x.requires_grad:
            assert torch.equal(torch.autograd.grad(0.1 * total, x, retain_graph=True)[0], everything[name])


@each_backend
def test_in_deterministic_mode_a_token_has_the_gradient_that_it_has_alone(backend: str):
    x, weight, teacher_x, teacher_weight, labels = inputs(70, D=16, E=24, dtype=torch.float32)
    with kernels.deterministic():
        everything = results([x, weight, teacher_x, teacher_weight, labels], backend)["dx"]
        for some in (slice(1, 2), slice(40, 67)):
            part = [x[some], weight, teacher_x[some], teacher_weight, labels[some]]
            assert torch.equal(results(part, backend)["dx"], everything[some])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_kl", pytest.param("linear_kl_triton", marks=needs_triton)])
def test_opcheck(name: str, op: ModuleType):
    a = [x.requires_grad_() if i < 2 else x for i, x in enumerate(inputs(5, V=9, dtype=torch.float32))]
    settings = IGNORED, 2.0, 3.0, None, True, True, "torch", False
    torch.library.opcheck(getattr(torch.ops.token_mixer_zoo, name).default, (*a, *settings))


@pytest.mark.slow
def test_memory_is_that_of_a_few_tokens(monkeypatch: pytest.MonkeyPatch):
    """No tensor that is made within the op is larger than the logits of a step."""
    monkeypatch.setattr(in_pytorch, "LOGITS", 1024 * 32)
    a = [x.requires_grad_() if i < 2 else x for i, x in enumerate(inputs(640, V=1024))]

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    with Largest() as largest:
        kernels.linear_kl(*a).backward()
    assert largest.elements == 1024 * 32


@each_backend
def test_memory_of_a_large_vocabulary(backend: str):
    """The number in the docstring, counted on the meta device."""
    N, D, V = 8 * 4096, 576, 49_152
    with Allocations([], 8, 4096) as memory:
        shapes = (N, D), (V, D), (N, D), (V, D)
        a = [torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
        labels = torch.empty(N, dtype=torch.int64, device="meta")
        call = partial(kernels.linear_kl, a[0].requires_grad_(), a[1].requires_grad_(), *a[2:], labels)
        before = memory.live
        if backend == "triton":
            from kernels.gpu.device import GPUS
            from kernels.gpu.listing import listed

            forward, _ = listed(call, GPUS["H100"])
            assert len(forward.launches) == 12  # parts of 2,731 tokens
        else:
            call().backward()
    needed = f"{(memory.peak - before) / 2**30:.2f} GiB in {'Triton' if backend == 'triton' else 'PyTorch'}"
    assert needed in " ".join((kernels.linear_kl.__doc__ or "").split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected a finite number above 0, got 0.0"),
        ({"cap": -1.0}, "cap: expected a finite number above 0, got -1.0"),
        ({"weight": torch.ones(61, 3)}, r"weight: expected \[V,7\], got shape \(61, 3\)"),
        ({"teacher_x": torch.ones(4, 5)}, r"teacher_x: expected a floating \[9,D\]"),
        ({"teacher_weight": torch.ones(60, 5)}, "teacher_weight: has 60 rows, but weight has 61"),
        ({"labels": torch.ones(9)}, r"labels: expected an int64 \[9\], got torch.float32 \(9,\)"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Tensor], message: str):
    names = ("x", "weight", "teacher_x", "teacher_weight", "labels")
    arguments = dict(zip(names, inputs(9, dtype=torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=f"^{message}"):
        kernels.linear_kl(**arguments)  # type: ignore[arg-type]


# The kernel: small cases in the interpreter, real sizes on a device.

SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "cap": 2.0},
    {"temperature": 0.5, "teacher_cap": 3.0},
    {"temperature": 2.0, "cap": 30.0, "teacher_cap": 1.5},
]
SIZES = [
    (0, 7, 5, 61),
    (1, 7, 9, 61),
    (23, 7, 9, 61),
    (16, 24, 24, 64),
    (5, 3, 5, 8192 + 70),
    (2, 16, 4, 49_152),
    *((2, 3, 2, 2**i - (i > 1)) for i in range(14)),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize(("N", "D", "E", "V"), SIZES)
def test_kernel(
    N: int, D: int, E: int, V: int, options: dict[str, float], op: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(op, "LOGITS", 8 * V)  # 23 tokens: three unequal parts
    for dtype in (torch.float32, torch.bfloat16):
        a = inputs(N, D, E, V, dtype)
        actual = results(a, "triton", **options)
        assert actual["total"].dtype == torch.float32
        if dtype == torch.float32 and V > 1:
            assert_near(actual, exact(a, **options), 1e-5)
        # from logits in bf16, too, the divergence is that of PyTorch, and gradients differ by their rounding
        in_torch = {name: y.double() for name, y in results(a, "torch", **options).items()}
        torch.testing.assert_close(actual["total"].double(), in_torch["total"], rtol=1e-5, atol=1e-6)
        if V > 1:
            assert_near(actual, in_torch, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("N", "D", "E", "V"), [(8192, 576, 960, 49_152), (1000, 256, 128, 50_257), (333, 128, 64, 61)])
def test_on_device(N: int, D: int, E: int, V: int, dtype: torch.dtype, options: dict[str, float]):
    a = inputs(N, D, E, V, dtype)
    a[1], a[3] = a[1] * D**-0.5, a[3] * E**-0.5
    actual = results(a, "triton", **options)
    in_torch = results(a, "torch", **options)
    assert_near(actual, in_torch, 1e-2 if dtype == torch.bfloat16 else 1e-4)
    assert_repeats(partial(results, a, "triton", **options), 5)


def test_autocast_leaves_fp64():
    x, weight, other, head = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 8), (11, 8), (3, 8), (11, 8)))
    labels = torch.zeros(3, dtype=torch.int64)
    expected = kernels.linear_kl(x, weight, other, head, labels)
    with torch.autocast("cpu", torch.bfloat16):
        actual = kernels.linear_kl(x, weight, other, head, labels)
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
