"""The contract of recurrences: inputs, tables of calls, and a comparison of all results of a call with the loop.

A table has a row for each call that the Triton kernels must compute like the loop, in outputs, final states and
gradients. A row is a mapping of the arguments of `inputs`, which the file of an op extends by its own.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

FORMS = ("beta", "both", "per channel", "erase", "two keys")  # of the general delta rule, of `erasing`
LENGTHS = (1, 15, 63, 64, 65, 200)
# relative to the norm of the result
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
# Gradients as small as e^-50 are sums of terms of order one that cancel, in fp64: below this they are rounding.
ZERO = 1e-14
DECAYS: Mapping[str, Callable[[Tensor], Tensor]] = {  # of uniform numbers
    "mild": lambda u: -0.1 * u,
    "zero": lambda u: 0 * u,
    "mixed": lambda u: -50 * u**4,  # most steps keep something, some erase everything
    "strong": lambda u: -50 + 0 * u,
}
PACKED = [0, 0, 3, 67, 67, 67, 131, 132, 200, 200]  # empty at the start, inside and at the end; 64 = one full chunk


def shorter(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.narrow(dim, 0, x.shape[dim] - 1)


# argument, and what makes it wrong, for `inputs(10, R=2)`: two rows, two key heads, four value heads
MISFITS: list[tuple[str, Callable[[Tensor], object]]] = [
    ("q", lambda x: x[0]),
    ("q", lambda x: x.long()),
    ("q", lambda x: x[:, :, :0]),
    ("q", lambda x: x[..., :0]),
    ("k", shorter(1)),
    ("k", shorter(3)),
    ("k", lambda x: x.float()),
    ("v", shorter(0)),
    ("v", shorter(1)),
    ("v", lambda x: x[..., 0]),
    ("v", lambda x: x[:, :, :3]),  # three value heads on two key heads
    ("v", lambda x: x.float()),
    ("v", lambda x: x.mT.contiguous().mT),
    ("log_decay", shorter(2)),
    ("log_decay", lambda x: torch.zeros(3, dtype=x.dtype)),
    ("log_decay", lambda x: torch.zeros(4, dtype=torch.int64)),
    ("log_decay", lambda x: torch.tensor([-1, 0, 0.1, -2])),
    ("log_decay", lambda x: torch.tensor([-1, 0, math.nan, -2])),
    ("beta", shorter(1)),
    ("beta", lambda x: x[..., None]),
    ("beta", lambda x: x.to("meta")),
    ("initial_state", shorter(0)),
    ("initial_state", lambda x: x.mT),
    ("initial_state", lambda x: x.long()),
    ("cu_seqlens", lambda x: torch.tensor([0, 10])),  # for two rows
    ("scale", lambda x: math.nan),
    ("subheads", lambda x: 0),
    ("subheads", lambda x: 3),
]
# boundaries that are none of 10 tokens
BAD_BOUNDARIES: list[list] = [[0, 9], [0, 11], [1, 10], [0, 7, 6, 10], [10], [[0, 10]], [0.0, 10.0]]


def inputs(
    T: int,
    *,
    gate: str = "head",
    decay: str = "mild",
    beta: str | float | None = "random",
    B: int = 2,
    G: int = 2,
    R: int = 1,
    E: int = 1,
    K: int = 8,
    V: int = 6,
    state: bool = True,
    documents: list[int] | None = None,
    correlated: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Arguments of a recurrence of H = G·R value heads. Keys have length one, so that the delta rule is stable.

    Args:
        T: Tokens.
        gate: none, constant, head or channel.
        decay: A key of DECAYS.
        beta: None, "random" in [0, 1], or one number for all.
        B: Rows.
        G: Key heads.
        R: Value heads per key head.
        E: Subheads.
        K: Key size.
        V: Value size.
        state: Whether to start from a random state.
        documents: Boundaries of packed documents; with these B is 1.
        correlated: All entries of the keys positive, as after an activation (cosines of about 0.6).
        dtype: Of everything.
    """
    B, H = (B, G * R) if documents is None else (1, G * R)
    q, k, v = torch.randn(B, T, G * E, K), torch.randn(B, T, G * E, K), torch.randn(B, T, H, V)
    k = F.normalize(k.abs() if correlated else k, dim=-1)
    actual = {"q": q, "k": k, "v": v}
    shape = {"none": None, "constant": (H * E,), "head": (B, T, H * E), "channel": (B, T, H * E, K)}[gate]
    if shape is not None:
        actual["log_decay"] = DECAYS[decay](torch.rand(shape))
    if beta is not None:
        actual["beta"] = torch.rand(B, T, H * E) if beta == "random" else torch.full((B, T, H * E), float(beta))
    rows = B if documents is None else len(documents) - 1
    if state:
        actual["initial_state"] = torch.randn(rows, H * E, K, V)
    actual = {name: x.to(dtype) for name, x in actual.items()}
    if documents is not None:
        actual["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
    return actual


def erasing(T: int, *, form: str = "erase", steps: int = 1, **options: Any) -> dict[str, Tensor]:
    """Arguments of the general delta rule: `inputs` with `steps` rows per token, and erase keys beside the keys."""
    a = inputs(T, **options)
    rows = inputs(T * steps, **{**options, "documents": None, "gate": "none"})
    if options.get("documents") is not None:
        rows = {name: x[:1] for name, x in rows.items()}
    a.update({name: rows[name] for name in ("k", "v", "beta")})
    dtype, shape = a["q"].dtype, (*a["beta"].shape, a["q"].shape[3])
    if form not in ("beta", "both", "per channel"):
        del a["beta"]
    if form == "per channel":
        a["beta"] = torch.rand(shape, dtype=dtype)
    elif form != "beta":
        a["erase"] = 0.5 * F.normalize(torch.randn(shape, dtype=dtype), dim=-1)
    if form == "two keys":
        a["erase_write"] = 0.5 * F.normalize(torch.randn(shape, dtype=dtype), dim=-1)
    return a


def rounded(a: Mapping[str, Tensor], dtype: torch.dtype, streams: Iterable[str] = "qkv") -> dict[str, Tensor]:
    """The arguments with streams in a dtype; gates and states stay in fp32, as mixers make them."""
    return {name: x.to(dtype) if name in streams else x for name, x in a.items()}


def rows(name: str, *options: Mapping[str, Any], marks: Any = (), **common: Any) -> list[Any]:
    """Rows of a table, with the name and the options of each as its id; a tuple in `common` is an axis of a grid."""
    axes = {key: value if isinstance(value, tuple) else (value,) for key, value in common.items()}
    made = []
    for each, values in itertools.product(options or ({},), itertools.product(*axes.values())):
        grid = dict(zip(axes, values, strict=True))
        varied = each | {key: value for key, value in grid.items() if len(axes[key]) > 1}
        label = ", ".join(f"{key} {value}" for key, value in varied.items())
        made.append(pytest.param({**grid, **each}, marks=marks, id=f"{name}: {label}"))
    return made


def results(
    op: Callable[..., tuple[Tensor, Tensor | None]],
    arguments: Mapping[str, Tensor],
    *,
    backend: str = "torch",
    through: tuple[str, ...] = ("o", "state"),
    **options: object,
) -> dict[str, Tensor]:
    """The output, the final state, and the gradient of each floating argument, on one backend.

    Args:
        op: The op.
        arguments: Its tensors.
        backend: Where it runs.
        through: The results that a gradient arrives at.
        **options: Further arguments of the op.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items() if x.is_floating_point()}
    with kernels.backend(backend):
        o, state = op(**{**arguments, **leaves}, return_state=True, **options)
    actual = {"o": o, "state": state}
    generator = torch.Generator().manual_seed(1)
    # the same numbers whatever the dtype of the results: rounding them would be an error of its own
    arriving = {n: torch.randn(x.shape, generator=generator).bfloat16().to(x) for n, x in actual.items()}
    loss = sum((actual[name] * arriving[name]).sum() for name in through)
    # an argument that has no influence, such as q on the state, has a gradient of zero
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    actual.update({f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)})
    return {name: x.detach() for name, x in actual.items()}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float | None = None) -> None:
    """Each result, relative to its norm; the tolerance defaults to that of the state's dtype."""
    assert actual.keys() == expected.keys()
    tolerance = tolerance or TOLERANCE[expected["state"].dtype]
    for name, x in expected.items():
        y = actual[name]
        assert (y.shape, y.dtype) == (x.shape, x.dtype), name
        assert y.isfinite().all(), f"{name} is not finite"
        error, norm = float((y.double() - x.double()).norm()), float(x.double().norm())
        assert error <= tolerance * norm + ZERO, (
            f"{name}: error {error:.2g} at norm {norm:.2g}, allowed {tolerance:g} of it"
        )


def agree(
    op: Callable[..., tuple[Tensor, Tensor | None]],
    a: Mapping[str, Tensor],
    tolerance: float | None = None,
    *,
    exact: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Tensor]:
    """Return the results on Triton, after a comparison with the loop, or on a device with PyTorch, in another dtype."""
    actual = results(op, a, backend="triton", **options)
    options.pop("keep_states", None)
    precise = {name: x.to(exact) if x.is_floating_point() else x for name, x in a.items()}
    where = "torch" if next(iter(a.values())).is_cuda else "reference"
    expected = results(op, precise, backend=where, **options)
    assert_same(actual, {name: x.to(actual[name].dtype) for name, x in expected.items()}, tolerance)
    assert_left_alone(a, actual)
    return actual


def assert_left_alone(a: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> None:
    """Empty documents change no state, and no gradient passes a reset."""
    if "cu_seqlens" in a and "initial_state" in a:
        empty = a["cu_seqlens"].diff() == 0
        assert torch.equal(actual["state"][empty], a["initial_state"][empty].to(actual["state"].dtype))
    if "log_decay" in a:
        assert not actual["gradient of log_decay"][a["log_decay"] == -torch.inf].any()
