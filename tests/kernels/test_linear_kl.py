import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.linear_kl import logits as in_pytorch

IGNORED = -100
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    a = inputs(N)
    learned = [x.requires_grad_() for x in a[:2]]
    options = {"temperature": temperature, "cap": cap, "teacher_cap": teacher_cap}
    expected = by_definition(a, temperature, cap, teacher_cap)
    with kernels.backend(backend):
        actual = kernels.linear_kl(*a, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    both = zip(*(torch.autograd.grad(0.1 * y, learned) for y in (actual, expected)), strict=True)
    for gradient, exact in both:
        torch.testing.assert_close(gradient, exact, rtol=1e-11, atol=1e-12)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(in_pytorch, "LOGITS", 11 * 3)
    x, weight, *teacher, labels = inputs(7, D=3, E=4, V=11)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.linear_kl(x, weight, *teacher, labels, temperature=1.5, cap=2.0)

    torch.autograd.gradcheck(function, (x.requires_grad_(), weight.requires_grad_()))


def test_a_student_that_equals_its_teacher_has_no_divergence_and_no_gradient():
    x, weight, *_, labels = inputs(20)
    total = kernels.linear_kl(x.requires_grad_(), weight, x.clone(), weight, labels)
    (dx,) = torch.autograd.grad(total, x)
    assert total.abs() < 1e-12
    assert dx.abs().max() < 1e-14


def test_no_gradient_reaches_the_teacher():
    a = [x.requires_grad_() if x.is_floating_point() else x for x in inputs(5)]
    kernels.linear_kl(*a).backward()
    assert [x.grad is not None for x in a[:4]] == [True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype):
    a = inputs(300, dtype=dtype)
    exact = by_definition([x.double() if x.is_floating_point() else x for x in a], 1.0, None, None)
    total = kernels.linear_kl(*a)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), exact, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0)


def test_autocast_takes_the_products_in_half_precision():
    a = inputs(40, dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        mixed = kernels.linear_kl(*a)
    half = kernels.linear_kl(*(x.bfloat16() if x.is_floating_point() else x for x in a))
    assert torch.equal(mixed, half)


@pytest.mark.slow
def test_memory_is_that_of_a_few_tokens(monkeypatch: pytest.MonkeyPatch):
    """No tensor that is made within the op is larger than the logits of a step."""
    monkeypatch.setattr(in_pytorch, "LOGITS", 1000 * 32)
    a = [x.requires_grad_() if i < 2 else x for i, x in enumerate(inputs(640, V=1000))]

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    with Largest() as largest:
        kernels.linear_kl(*a).backward()
    assert largest.elements == 1000 * 32


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
