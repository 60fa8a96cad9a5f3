from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.linear import head_loss
from kernels.linear_cross_entropy import logits as in_pytorch
from kernels.linear_cross_entropy import losses_of_logits

from .comparisons import DEVICE, assert_near, assert_repeats, interpreted

IGNORED = -100


def inputs(N: int, D: int = 24, V: int = 61, dtype: torch.dtype = torch.float32, scale: float = 1) -> list[Tensor]:
    """x, weight and labels, of which a third is ignored."""
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(N, D, generator=generator)
    weight, labels = torch.randn(V, D, generator=generator), torch.randint(V, (N,), generator=generator)
    labels[torch.rand(N, generator=generator) < 0.3] = IGNORED
    return [x.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE)]


def results(x: Tensor, weight: Tensor, labels: Tensor, backend: str = "torch", **options: float) -> dict[str, Tensor]:
    """The loss, and the gradients of 0.1 · loss."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with kernels.backend(backend):
        loss = kernels.linear_cross_entropy(x, weight, labels, **options)
    dx, dweight = torch.autograd.grad(0.1 * loss, (x, weight))
    return {"loss": loss.detach(), "dx": dx, "dweight": dweight}


def exact(a: list[Tensor]) -> dict[str, Tensor]:
    return results(*(y.double() if y.is_floating_point() else y for y in a), backend="reference")


def test_by_hand():
    # softmax (1/4, 3/4) and (1/2, 1/2)
    x = torch.tensor([[0.0, 1.0], [0.0, 0.0], [5.0, 7.0]])
    weight, labels = torch.tensor([[0.0, 0.0], [0.0, 3.0]]).log1p(), torch.tensor([1, 0, IGNORED])
    weight[1, 1] = torch.tensor(3.0).log()
    for backend in ("torch", "reference"):
        with kernels.backend(backend):
            loss = kernels.linear_cross_entropy(x, weight, labels)
        torch.testing.assert_close(loss, torch.tensor([4 / 3, 2]).log().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("N", [0, 1, 50])
def test_backends_agree(N: int, dtype: torch.dtype):
    a = inputs(N, dtype=dtype)
    actual = results(*a)
    assert actual["loss"].dtype == dtype
    assert_near(actual, exact(a))


def test_gradients():
    x, weight, labels = inputs(7, D=3, V=5, dtype=torch.float64)
    x.requires_grad_()
    weight.requires_grad_()
    torch.autograd.gradcheck(lambda *passed: kernels.linear_cross_entropy(*passed, labels), (x, weight))


def test_the_torch_backend_is_the_loss_of_the_logits_bitwise():
    x, weight, labels = inputs(90)
    usual = F.cross_entropy(F.linear(x, weight), labels, reduction="none").sum()
    with kernels.backend("torch"):
        assert torch.equal(kernels.linear_cross_entropy(x, weight, labels), usual)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_cap_bounds_the_logits(backend: str):
    x, weight, labels = inputs(50, dtype=torch.float64)
    usual = results(x, weight, labels, backend)
    logits = 2 * torch.tanh(x @ weight.T / 2)
    expected = F.cross_entropy(logits, labels, reduction="none")
    actual = results(x, weight, labels, backend, cap=2.0)
    torch.testing.assert_close(actual["loss"], expected.sum())
    assert actual["loss"] < 0.7 * usual["loss"]  # the cap mattered


def test_gradients_through_a_cap():
    x, weight, labels = inputs(7, D=3, V=5, dtype=torch.float64)
    x.requires_grad_()
    weight.requires_grad_()
    torch.autograd.gradcheck(lambda *passed: kernels.linear_cross_entropy(*passed, labels, cap=1.5), (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_half_precision_are_summed_in_fp32(dtype: torch.dtype):
    x, weight, labels = inputs(300, dtype=dtype)
    expected = F.cross_entropy(F.linear(x, weight).double(), labels, reduction="none")
    with kernels.backend("torch"):
        loss = kernels.linear_cross_entropy(x, weight, labels)
        losses, _ = kernels.linear_token_losses(x, weight, labels)
    assert loss.dtype == losses.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected.sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "reference", "triton"])
@pytest.mark.parametrize(("N", "cap"), [(0, None), (1, None), (50, None), (50, 3.0)])
def test_losses_of_each_token(N: int, cap: float | None, backend: str, monkeypatch: pytest.MonkeyPatch):
    if backend == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(in_pytorch, "LOGITS", 61 * 16)  # so that 50 tokens take four steps, the last of them short
    x, weight, labels = inputs(N)
    labels[2:20] = F.linear(x, weight).argmax(-1)[2:20]
    with kernels.backend(backend):
        losses, correct = kernels.linear_token_losses(x, weight, labels, cap=cap)
    logits = F.linear(x.double(), weight.double())
    logits = logits if cap is None else cap * (logits / cap).tanh()
    expected = F.cross_entropy(logits, labels, reduction="none") if N else logits.sum(-1)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(correct, logits.argmax(-1) == labels)
    assert N < 20 or correct.any()


@pytest.mark.parametrize("backend", ["torch", "reference", "triton"])
@pytest.mark.parametrize(
    ("N", "dtype"), [(0, torch.float32), (1, torch.float32), (50, torch.float32), (50, torch.bfloat16)]
)
def test_losses_of_logits_have_gradients(N: int, dtype: torch.dtype, backend: str):
    if backend == "triton":
        pytest.importorskip("triton")
    x, weight, labels = inputs(N, dtype=dtype)
    logits, weights = F.linear(x, weight).requires_grad_(), torch.linspace(-1, 2, N).to(DEVICE)
    with kernels.backend(backend):
        losses = losses_of_logits(logits, labels)
    wide = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    before = logits.detach().clone()
    (actual,) = torch.autograd.grad(losses @ weights, logits)
    (wanted,) = torch.autograd.grad(expected @ weights.double(), wide)
    assert actual.dtype == dtype
    rounded = 0 if dtype == torch.float32 else 2**-6  # twice; the interpreter cuts digits off
    torch.testing.assert_close(actual.double(), wanted, atol=1e-6, rtol=1e-5 + rounded)
    assert torch.equal(logits, before)


def test_losses_of_each_token_when_another_label_is_ignored():
    x, weight, _ = inputs(8)
    likeliest = F.linear(x, weight).argmax(-1)
    losses, correct = kernels.linear_token_losses(x, weight, likeliest, ignore_index=int(likeliest[0]))
    assert not correct[0]
    assert losses[0] == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", ["torch", "reference", "triton"])
def test_inputs_of_ignored_tokens_are_not_read(backend: str, value: float):
    if backend == "triton":
        pytest.importorskip("triton")
    x, weight, labels = inputs(40)
    expected = results(x, weight, labels, backend)
    actual = results(x.masked_fill((labels == IGNORED)[:, None], value), weight, labels, backend)
    assert all(torch.equal(actual[name], y) for name, y in expected.items())


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_another_ignored_label(backend: str):
    x, weight, labels = inputs(40)
    expected = results(x, weight, labels, backend)
    moved = labels.masked_fill(labels == IGNORED, 70)
    assert_near(results(x, weight, moved, backend, ignore_index=70), expected, 0)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_under_autocast_the_dtypes_may_differ(backend: str):
    x, weight, labels = inputs(40)
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = results(x.bfloat16(), weight, labels, backend)
    assert actual["loss"].dtype == actual["dweight"].dtype == torch.float32
    assert actual["dx"].dtype == torch.bfloat16
    assert_near(actual, exact([x, weight, labels]), 2e-2)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda y: y[None]),
        ("x", lambda y: y.long()),
        ("weight", lambda y: y[:, :-1]),
        ("weight", lambda y: y.bfloat16()),
        ("weight", lambda y: y.to("meta")),
        ("labels", lambda y: y[1:]),
        ("labels", lambda y: y.int()),
    ],
)
def test_errors_name_the_argument(name: str, change: Callable[[Tensor], Tensor]):
    a = dict(zip(("x", "weight", "labels"), inputs(10), strict=True))
    kernels.linear_cross_entropy(**a)  # right as they are
    a[name] = change(a[name])
    with pytest.raises(ValueError, match=rf"^{name}: "):
        kernels.linear_cross_entropy(**a)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan"), float("inf")])
def test_caps_that_are_no_bounds(cap: float):
    with pytest.raises(ValueError, match=r"^cap: expected a finite number above 0, or None, got "):
        kernels.linear_cross_entropy(*inputs(10), cap=cap)


@pytest.mark.parametrize("label", [-1, 61])
@pytest.mark.parametrize("op", [kernels.linear_cross_entropy, kernels.linear_token_losses])
def test_a_label_outside_of_the_vocabulary_of_the_reference(op: Callable[..., object], label: int):
    x, weight, labels = (y.cpu() for y in inputs(10))
    labels[3] = label
    with kernels.backend("reference"), pytest.raises(IndexError, match="outside the vocabulary of 61 entries"):
        op(x, weight, labels)


@pytest.mark.parametrize("label", [-1, 61])
def test_a_label_outside_of_the_vocabulary(label: int):
    x, weight, labels = (y.cpu() for y in inputs(10))
    labels[3] = label
    with kernels.backend("torch"), pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        kernels.linear_cross_entropy(x, weight, labels)


# The kernels: small cases in the interpreter, real sizes on a device.


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch):
    """The Triton op, where what nobody wrote is not a number."""
    pytest.importorskip("triton")
    from kernels.linear_cross_entropy.gpu import op as gpu_op

    for module in (gpu_op, head_loss):
        monkeypatch.setattr(module, "new", lambda *a, f=module.new, **options: f(*a, **options).fill_(torch.nan))
    return gpu_op


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "V"), [(0, 61), (1, 61), (7, 61), (23, 61), (16, 64), (6, 4096 + 70)])
def test_kernels(N: int, V: int, dtype: torch.dtype, op, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(op, "LOGITS", 8 * V)  # 23 rows: three unequal parts
    a = inputs(N, V=V, dtype=dtype)
    actual = results(*a, backend="triton")
    assert actual["loss"].dtype == torch.float32
    assert_near(actual, exact(a), 1e-5 if dtype == torch.float32 else 1e-2)


@interpreted
def test_kernels_refuse_a_cap(op):
    with pytest.raises(
        kernels.UserError, match=r"linear_cross_entropy cannot run on 'triton', which does not take a cap"
    ):
        results(*inputs(7), backend="triton", cap=2.0)


@interpreted
def test_large_logits_in_kernels(op):
    a = inputs(12, scale=1000)
    assert_near(results(*a, backend="triton"), exact(a))


@interpreted
def test_nothing_is_ignored_and_everything_is(op):
    x, weight, labels = inputs(12)
    some = labels.clamp(min=0)
    assert_near(results(x, weight, some, backend="triton"), exact([x, weight, some]))
    none = results(x, weight, torch.full_like(labels, IGNORED), backend="triton")
    assert not any(y.any() for y in none.values())


@interpreted
@pytest.mark.parametrize("label", [-1, 61, 2**40])
def test_kernels_make_a_wrong_label_visible(label: int, op):
    x, weight, labels = inputs(12)
    labels[3] = label
    actual = results(x, weight, labels, backend="triton")
    assert actual["loss"].isnan()
    assert actual["dx"][3].isnan().all()
    assert actual["dweight"].isnan().all()


@interpreted
def test_what_is_not_wanted_is_not_computed(op, monkeypatch: pytest.MonkeyPatch):
    x, weight, labels = inputs(12)
    whole = results(x, weight, labels, backend="triton")
    called = []
    monkeypatch.setattr(head_loss, "add_product", lambda *a, f=head_loss.add_product: called.append(1) or f(*a))
    with kernels.backend("triton"):
        loss = kernels.linear_cross_entropy(x.requires_grad_(), weight, labels)
        (dx,) = torch.autograd.grad(0.1 * loss, x)
        assert not called
        assert torch.equal(dx, whole["dx"])
        with torch.no_grad():
            assert torch.equal(kernels.linear_cross_entropy(x, weight.requires_grad_(), labels), whole["loss"])
        assert not called
        loss = kernels.linear_cross_entropy(x.detach(), weight, labels)
        (dweight,) = torch.autograd.grad(0.1 * loss, weight)
    assert called
    assert torch.equal(dweight, whole["dweight"])


@interpreted
def test_the_gradient_of_fp32_weights_is_summed_in_fp32(op, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(op, "LOGITS", 8 * 61)
    x, weight, labels = inputs(64, dtype=torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = results(x, weight.float(), labels, backend="triton")["dweight"]
    assert actual.dtype == torch.float32
    assert not torch.equal(actual, actual.bfloat16().float())  # the product of bf16 tensors was not rounded to bf16
    assert_near({"dweight": actual}, {"dweight": exact([x, weight, labels])["dweight"]}, 1e-2)


@interpreted
def test_half_precision_has_another_implementation(op):
    x, weight, labels = inputs(12, dtype=torch.float16)
    with pytest.raises(kernels.UserError, match=r"linear_cross_entropy .*does not take fp16"):
        results(x, weight, labels, backend="triton")


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("learns", [(True, True), (True, False), (False, True), (False, False)])
def test_opcheck(learns: tuple[bool, bool], op):
    x, weight, labels = inputs(5, D=4, V=9)
    arguments = (x.requires_grad_(learns[0]), weight.requires_grad_(learns[1]), labels, IGNORED, *learns, False)
    torch.library.opcheck(torch.ops.token_mixer_zoo.linear_cross_entropy.default, arguments)


@interpreted
def test_one_graph_under_autocast(op):
    x, weight, labels = inputs(9)
    compiled = torch.compile(kernels.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with kernels.backend("triton"), torch.autocast(DEVICE, torch.bfloat16):
        actual = [
            f(x.requires_grad_(), weight.requires_grad_(), labels) for f in (compiled, kernels.linear_cross_entropy)
        ]
    assert torch.equal(*actual)
    (dx,), (dx_usual,) = (torch.autograd.grad(loss, x) for loss in actual)
    assert torch.equal(dx, dx_usual)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("N", "D", "V"), [(20000, 1024, 32000), (1000, 256, 50257), (333, 128, 61)])
def test_on_device(N: int, D: int, V: int, dtype: torch.dtype):
    a = inputs(N, D, V, dtype, scale=D**-0.5)
    actual = results(*a, backend="triton")
    expected = results(*(y.float() if y.is_floating_point() else y for y in a), backend="reference")
    assert_near(actual, expected, 1e-2 if dtype == torch.bfloat16 else 1e-4)
    assert_repeats(partial(results, *a, backend="triton"))


@pytest.mark.gpu
def test_on_device_under_autocast_the_memory_is_one_part_of_the_logits():
    x, weight, labels = inputs(32768, 1024, 32000)
    x.requires_grad_()
    weight.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        kernels.linear_cross_entropy(x, weight, labels).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.6e9  # all logits in bf16 are 2.1 GB, in fp32 4.2
    assert weight.grad.dtype == x.grad.dtype == torch.float32


@pytest.mark.gpu
def test_on_device_a_wrong_label_is_visible():
    x, weight, labels = inputs(50, dtype=torch.bfloat16)
    labels[7] = 61
    actual = results(x, weight, labels, "auto")
    assert actual["loss"].isnan()
    assert actual["dx"][7].isnan().all()
