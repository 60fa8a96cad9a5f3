from itertools import pairwise

import pytest
import torch
from torch import Tensor

import kernels

PACKED = [0, 0, 5, 70, 70, 135, 150, 150]


def attend(arguments: dict[str, Tensor], backend: str = "torch", **options: object) -> dict[str, Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in "qkv"}
    with kernels.backend(backend):
        o = kernels.window_attention(**leaves, **options)
    arriving = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(o)
    gradients = torch.autograd.grad((o * arriving).sum(), list(leaves.values()))
    return {"o": o.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def inputs(T: int, S: int | None = None, *, B: int = 2, H: int = 4, Hkv: int = 2, D: int = 6, dtype=torch.float64):
    shape = {"q": (B, T, H, D), "k": (B, S or T, Hkv, D), "v": (B, S or T, Hkv, D)}
    return {name: torch.randn(s, dtype=torch.float64).to(dtype) for name, s in shape.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]):
    for name, x in expected.items():
        assert found[name].isfinite().all(), name
        torch.testing.assert_close(found[name], x, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_against_softmax_of_all_scores(window: int | None, backend: str):
    # an independent computation: all scores at once, and the band cut out of them
    a = inputs(9, H=2, Hkv=2)
    with kernels.backend(backend):
        o = kernels.window_attention(**a, window_size=window, scale=0.3)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    band = (distance >= 0) & (distance < (window or 9))
    scores = (0.3 * torch.einsum("bthd,bshd->bhts", a["q"], a["k"])).masked_fill(~band, -torch.inf)
    torch.testing.assert_close(o, torch.einsum("bhts,bshd->bthd", scores.softmax(-1), a["v"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 1, 2, 64, 65, 100, 1000])
@pytest.mark.parametrize("length", [1, 15, 64, 65, 150])
def test_backends_agree(length: int, window: int | None, dtype: torch.dtype):
    a = inputs(length, dtype=dtype)
    assert_same(attend(a, window_size=window), attend(a, "reference", window_size=window))


@pytest.mark.parametrize("heads", [(3, 3), (4, 1), (6, 3)])
def test_key_heads_are_shared_in_order(heads: tuple[int, int]):
    H, Hkv = heads
    a = inputs(80, H=H, Hkv=Hkv)
    repeated = {**a, **{name: a[name].repeat_interleave(H // Hkv, 2) for name in "kv"}}
    o = kernels.window_attention(**repeated, window_size=20)
    torch.testing.assert_close(kernels.window_attention(**a, window_size=20), o)


@pytest.mark.parametrize("window", [None, 1, 7, 64])
def test_packed_documents(window: int | None):
    a = inputs(150, B=1)
    options = {"window_size": window, "cu_seqlens": torch.tensor(PACKED)}
    found = attend(a, **options)
    assert_same(found, attend(a, "reference", **options))
    for i, j in pairwise(PACKED):
        if j > i:
            alone = kernels.window_attention(**{name: x[:, i:j] for name, x in a.items()}, window_size=window)
            torch.testing.assert_close(found["o"][:, i:j], alone)


@pytest.mark.parametrize("window", [None, 1, 7, 64, 200])
@pytest.mark.parametrize("new", [1, 5, 70])
def test_more_keys_than_queries_continue(new: int, window: int | None):
    # the last queries of the whole, against all of its keys
    a = inputs(90)
    whole = kernels.window_attention(**a, window_size=window)
    late = {**a, "q": a["q"][:, -new:]}
    found = attend(late, window_size=window)
    torch.testing.assert_close(found["o"], whole[:, -new:])
    assert_same(found, attend(late, "reference", window_size=window))


@pytest.mark.parametrize("window", [None, 4, 64])
@pytest.mark.parametrize("length", [1, 6, 12])
def test_first_key(length: int, window: int | None):
    # rows with all keys, some keys, the last key only, and none at all
    a = inputs(length, 12, B=4)
    options = {"window_size": window, "first_key": torch.tensor([0, 5, 11, 12])}
    found = attend(a, **options)
    assert_same(found, attend(a, "reference", **options))
    assert not found["o"][3].any()
    shorter = {name: x[1:2, 5:] if name in "kv" else x[1:2, max(0, length - 7) :] for name, x in a.items()}
    torch.testing.assert_close(found["o"][1:2, -7:], kernels.window_attention(**shorter, window_size=window))


def test_a_query_before_the_first_key_is_zero_with_finite_gradients():
    found = attend(inputs(6, B=1), first_key=torch.tensor([4]))
    assert not found["o"][0, :4].any()
    assert found["o"][0, 4:].any()
    assert not found["dq"][0, :4].any()
    assert not found["dk"][0, :4].any()


def test_bf16():
    a = inputs(100, dtype=torch.bfloat16)
    o = kernels.window_attention(**a, window_size=30)
    assert o.dtype == torch.bfloat16
    exact = kernels.window_attention(**{name: x.double() for name, x in a.items()}, window_size=30)
    assert (o.double() - exact).norm() < 0.01 * exact.norm()


def test_scale_defaults_to_the_head_size():
    a = inputs(10, D=16)
    o = kernels.window_attention(**a, scale=0.25)
    torch.testing.assert_close(kernels.window_attention(**a), o)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_views_of_one_projection(backend: str):
    fused = torch.randn(2, 70, 4 * 6 + 2 * 2 * 6, dtype=torch.float64)
    q, k, v = (x.unflatten(-1, (-1, 6)) for x in fused.split([24, 12, 12], -1))
    views = {"q": q, "k": k, "v": v}
    copies = {name: x.contiguous() for name, x in views.items()}
    assert_same(attend(views, backend, window_size=20), attend(copies, backend, window_size=20))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x[0]),
        ("k", lambda x: x[:1]),
        ("k", lambda x: x[..., :5]),
        ("k", lambda x: x[:, :9]),  # fewer keys than queries
        ("k", lambda x: x[:, :, :1].expand(-1, -1, 3, -1)),  # three key heads for four
        ("k", lambda x: x.float()),
        ("v", lambda x: x[:, :9]),
        ("v", lambda x: x.float()),
        ("v", lambda x: x.to("meta")),
        ("window_size", lambda x: 0),
        ("first_key", lambda x: torch.zeros(3, dtype=torch.int64)),
        ("first_key", lambda x: torch.zeros(2)),
        ("cu_seqlens", lambda x: torch.tensor([0, 10])),  # two rows
    ],
)
def test_errors_name_the_argument(name: str, change):
    a = inputs(10)
    kernels.window_attention(**a)  # right as they are
    a[name] = change(a.get(name))
    with pytest.raises(ValueError, match=rf"^{name}: "):
        kernels.window_attention(**a)


@pytest.mark.parametrize("bounds", [[0, 9], [0, 6, 5, 10], [1, 10]])
def test_boundaries_that_do_not_fit(bounds: list[int]):
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        kernels.window_attention(**inputs(10, B=1), cu_seqlens=torch.tensor(bounds))


def test_documents_cannot_be_continued():
    bounds = torch.tensor([0, 10])
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        kernels.window_attention(**inputs(10, 12, B=1), cu_seqlens=bounds)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        kernels.window_attention(**inputs(10, B=1), cu_seqlens=bounds, first_key=torch.tensor([0]))
