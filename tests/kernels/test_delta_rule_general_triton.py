"""The Triton kernels of the general delta rule: small cases in the interpreter, real sizes on a device."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from . import gluon_interpreter
from .comparisons import interpreted
from .hopper import MOST, shared_memory
from .recurrences import assert_same, results
from .test_delta_rule_general import FORMS, arguments

pytest.importorskip("triton")
from kernels.delta_rule.gpu.general import plan as general_plan
from kernels.gpu import plan

pytestmark = pytest.mark.usefixtures("poison")

PASS = "kernels.delta_rule.gpu.general.hopper_sequential_pass"
SOLVE = "kernels.delta_rule.gpu.general.hopper_solve"
CHUNKS = "kernels.delta_rule.gpu.general.hopper_chunks"
PACKED = [0, 0, 3, 67, 67, 130]  # empty at the start and inside; one full chunk
GPU_PACKED = [0, 0, 1, 65, 65, 1000, 2100]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


def agree(a: dict[str, Tensor], tolerance: float | None = None, **options: Any) -> dict[str, Tensor]:
    """The results on Triton, after they have been compared with the loop in fp32."""
    actual = results(kernels.delta_rule, a, backend="triton", **options)
    options.pop("keep_states", None)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in a.items()}
    expected = results(kernels.delta_rule, exact, backend="torch" if a["q"].is_cuda else "reference", **options)
    assert_same(actual, {name: x.to(actual[name].dtype) for name, x in expected.items()}, tolerance)
    return actual


def small(T: int, **options: Any) -> dict[str, Tensor]:
    return arguments(T, **{"B": 1, "G": 1, "K": 16, "V": 16, "dtype": torch.float32, **options})


@interpreted
@pytest.mark.parametrize(
    ("length", "gate", "form"),
    [(1, "channel", "erase"), (63, "none", "erase"), (65, "constant", "beta"), (65, "head", "erase")],
)
def test_lengths(length: int, gate: str, form: str):
    agree(small(length, gate=gate, form=form), 2e-5)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("read_before", [False, True])
def test_decays_per_channel(read_before: bool, form: str):
    agree(small(66, gate="channel", form=form), read_before=read_before)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_steep_decays(gate: str, read_before: bool):
    # rows up to 20 are moderate, then come decays that no reference point serves, and a reset
    a = small(70, gate=gate)
    a["log_decay"][:, 20:40] *= 400
    a["log_decay"][:, 50] = -torch.inf
    agree(a, 3e-5, read_before=read_before)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_subheads_shared_keys_and_documents(gate: str):
    # with V ≠ K and a first state: what is mixed up in one of them shows
    agree(small(130, gate=gate, form="both", G=2, R=2, E=2, V=20, documents=PACKED), subheads=2)


@interpreted
@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("documents", [None, [0, 0, 1, 1, 34, 35]])
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", ["none", "constant", "head", "channel"])
def test_steps(gate: str, form: str, steps: int, read_before: bool, documents: list[int] | None, dtype: torch.dtype):
    # more than one chunk of 64 rows; with three steps, a token begins in one and ends in the next
    a = small(35, gate=gate, form=form, steps=steps, documents=documents, V=12)
    agree(in_dtype(a, dtype), TOLERANCE[dtype], steps=steps, read_before=read_before)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_steps_with_subheads_shared_keys_and_steep_decays(gate: str):
    a = small(23, B=2, gate=gate, form="both", steps=3, E=2)
    a["log_decay"][:, 5:15] *= 400
    agree(a, 3e-5, subheads=2, steps=3)


@interpreted
@pytest.mark.slow
def test_blocks_of_keys():
    agree(small(20, gate="channel", K=80, V=24))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("form", ["beta", "both", "per channel", "erase"])
def test_what_is_kept_for_the_gradients_changes_only_memory(form: str):
    a = small(70, gate="channel", form=form)
    kept, again = (agree(a, keep_states=keep) for keep in (True, False))
    assert all(torch.equal(x, again[name]) for name, x in kept.items())


@interpreted
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_single_token(form: str, steps: int, read_before: bool):
    a = small(1, B=2, gate="channel", form=form, steps=steps, R=2, E=2, V=20)
    options: dict[str, Any] = {"steps": steps, "read_before": read_before, "subheads": 2, "return_state": True}
    with torch.no_grad():
        expected = kernels.delta_rule(**a, **options)
        with kernels.backend("triton"):
            actual = kernels.delta_rule(**a, **options)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("form", "gate"), [("beta", "head"), ("erase", "head"), ("erase", "channel")])
def test_no_bit_of_a_token_of_steps_depends_on_later_tokens(form: str, gate: str):
    T, first = 30, 10
    a, b = (small(T, form=form, gate=gate, decay="mixed", steps=3) for _ in range(2))
    b["initial_state"] = a["initial_state"]
    for name, x in a.items():
        if name != "initial_state":
            rows = first * x.shape[1] // T
            b[name][:, :rows] = x[:, :rows]
    with kernels.backend("triton"):
        o, changed = (kernels.delta_rule(**x, steps=3)[0] for x in (a, b))
    assert torch.equal(o[:, :first], changed[:, :first])
    assert not torch.equal(o[:, first:], changed[:, first:])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("K", [16, 96])  # 96: the kernels of moderate and of steep rows have other blocks of keys
@pytest.mark.parametrize("decay", ["mild", "mixed", "steep later"])
def test_no_bit_depends_on_later_tokens(decay: str, K: int):
    of_all = "mild" if decay == "steep later" else decay
    a = small(70, gate="channel", decay=of_all, K=K)
    b = {name: x.clone() for name, x in a.items()}
    for name, x in small(70, gate="channel", decay=of_all, K=K).items():
        if name != "initial_state":
            b[name][:, 20:] = x[:, 20:]
    if decay == "steep later":
        b["log_decay"][:, 20:] *= 400
    with kernels.backend("triton"):
        o, changed = (kernels.delta_rule(**x)[0] for x in (a, b))
    assert torch.equal(o[:, :20], changed[:, :20])
    assert not torch.equal(o[:, 20:], changed[:, 20:])


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("beta", {"T": 1}),
        ("beta", {"T": 300, "V": 128}),
        ("erase", {"T": 70, "R": 2, "E": 2}),
        ("beta", {"T": 400, "documents": [0, 0, 3, 67, 67, 400]}),
        ("beta", {"T": 70, "steps": 3, "documents": [0, 0, 1, 70]}),
    ],
)
def test_the_forward_pass_in_gluon_step_by_step(form: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, PASS, gluon_interpreter.interpreted(PASS, "scan_forward"))
    monkeypatch.setattr(general_plan.GeneralDeltaRule, "forward_path", "hopper_pass")
    a = small(**{"K": 128, "V": 64, **options}, gate="channel", form=form)
    numbers = {"subheads": options.get("E", 1), "steps": options.get("steps", 1)}
    agree(a, 2e-5, **numbers)
    plan.of_rows.cache_clear()
    agree(a, 2e-5, **numbers, keep_states=False)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("steep", [False, True])
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("beta", {"T": 70, "K": 128}),
        ("beta", {"T": 70, "V": 128, "read_before": True}),
        ("per channel", {"T": 130, "documents": [0, 0, 3, 67, 67, 130]}),
        ("both", {"T": 70, "R": 2, "E": 2, "V": 256}),
        ("erase", {"T": 30, "steps": 3, "read_before": True, "documents": [0, 0, 1, 30]}),
    ],
)
def test_the_chunks_in_gluon_step_by_step(
    form: str, options: dict[str, Any], steep: bool, monkeypatch: pytest.MonkeyPatch
):
    for name, functions in ((CHUNKS, ("pair_products", "gradients")), (SOLVE, ("solve_pairs",))):
        monkeypatch.setitem(sys.modules, name, gluon_interpreter.interpreted(name, *functions))
    monkeypatch.setattr(general_plan.GeneralDeltaRule, "in_gluon", True)
    read_before = options.pop("read_before", False)
    a = small(**{"K": 64, "V": 64, **options}, gate="channel", form=form)
    if steep:
        a["log_decay"][:, 10:20] *= 400
        a["log_decay"][:, 23] = -torch.inf
        a["log_decay"][..., 5] = -20
    agree(a, 3e-5, subheads=options.get("E", 1), steps=options.get("steps", 1), read_before=read_before)


def test_shared_memory_of_the_forward_pass_in_gluon():
    types = {"total": "*fp32", "initial": "*fp32", "final": "*fp32", "beta": "*fp32", "segments": "*i32"}
    assert shared_memory(PASS, "scan_forward", {"M": 16, "E": 1, "STEPS": 1, "V": 128}, types, warps=4) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("product", [False, True])
@pytest.mark.parametrize("kernel", ["pair_products", "gradients"])
@pytest.mark.parametrize("read_before", [False, True])
def test_shared_memory_of_the_chunks_in_gluon(kernel: str, product: bool, read_before: bool):
    names = ("log_decay", "beta", "products", "total", "diagonal", "dbeta", "dg")
    numbers = dict.fromkeys(("tiles", "pairs", "places", "total_rows"), "i32")
    types = {**dict.fromkeys(names, "*fp32"), **numbers, "chunks": "*i32", "scale": "fp32"}
    absent = ("beta", "dbeta") if product else ("erase", "derase")
    sizes = {"M": 16, "E": 1, "R": 1, "STEPS": 1, "K": 128, "BEFORE": read_before, "PRODUCT": product}
    fixed = {**sizes, absent[0]: None} | ({"V": 128, absent[1]: None} if kernel == "gradients" else {})
    assert shared_memory(CHUNKS, kernel, fixed, types) <= MOST


def test_too_many_channels_of_keys():
    a = {name: x.to("cuda" if torch.cuda.is_available() else "cpu") for name, x in small(5, K=300).items()}
    with kernels.backend("triton"), pytest.raises(kernels.UserError, match="which takes keys of at most 256 channels"):
        kernels.delta_rule(**a)


@pytest.mark.gpu
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("form", ["beta", "both", "per channel", "erase"])
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (64, 64), (64, 128), (128, 128), (256, 256), (100, 80)])
def test_sizes_on_a_device(K: int, V: int, gate: str, form: str, read_before: bool, dtype: torch.dtype):
    decay = "mixed" if gate == "channel" else "mild"
    a = arguments(300, form=form, gate=gate, decay=decay, G=2, R=2, K=K, V=V, dtype=torch.float32)
    agree(on_device(a, dtype), TOLERANCE[dtype], read_before=read_before)


@pytest.mark.gpu
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", ["mild", "zero", "mixed", "strong"])
@pytest.mark.parametrize("documents", [None, GPU_PACKED])
def test_decays_and_documents_on_a_device(documents: list[int] | None, decay: str, dtype: torch.dtype):
    a = arguments(2100, form="beta", gate="channel", decay=decay, R=2, E=2, K=128, V=128, documents=documents, B=1)
    actual = agree(on_device(a, dtype), TOLERANCE[dtype], subheads=2)
    repeated = results(kernels.delta_rule, on_device(a, dtype), backend="triton", subheads=2)
    assert all(torch.equal(x, repeated[name]) for name, x in actual.items())


# log decays of uniform numbers; those of trained models reach −48, and some channels are always strong
STRENGTHS = {
    "bounded": lambda u: -5 * u,
    **{f"near {g}": lambda u, g=g: g * (0.9 + 0.2 * u) for g in (-2.5, -5, -20, -50, -100)},
    "resets": lambda u: torch.where(u < 0.05, -torch.inf, -0.05 * u),
    "one channel": lambda u: torch.where(torch.arange(u.shape[-1]) == 7, -5.0, -0.05 * u),
}


def strong(a: dict[str, Tensor], strength: str) -> dict[str, Tensor]:
    """The arguments with other decays."""
    return {**a, "log_decay": STRENGTHS[strength](torch.rand(a["log_decay"].shape)).to(a["log_decay"].dtype)}


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("strength", STRENGTHS)
def test_strengths_of_decays(strength: str):
    agree(strong(small(70, gate="channel", form="beta"), strength), 3e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize(("K", "V"), [(64, 128), (128, 128), (192, 64)])
def test_strengths_of_decays_on_a_device(K: int, V: int, strength: str):
    a = arguments(300, form="beta", gate="channel", G=1, R=2, K=K, V=V, dtype=torch.float32)
    agree(on_device(strong(a, strength), torch.bfloat16), TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1025, 8193])
def test_lengths_and_strengths_on_a_device(length: int, beta: float):
    a = arguments(length, form="beta", gate="channel", beta=beta, K=128, V=128, B=1, G=1)
    agree(on_device(a, torch.bfloat16), TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [None, GPU_PACKED])
@pytest.mark.parametrize(
    ("size", "gate", "form", "steps", "dtype"),
    [
        (128, "head", "beta", 2, torch.bfloat16),
        (128, "channel", "erase", 3, torch.bfloat16),
        (64, "none", "both", 3, torch.bfloat16),
        (64, "constant", "per channel", 2, torch.bfloat16),
        (64, "channel", "two keys", 1, torch.bfloat16),
        (64, "head", "beta", 3, torch.float32),
        (64, "channel", "both", 2, torch.float32),
    ],
)
def test_steps_on_a_device(
    size: int, gate: str, form: str, steps: int, dtype: torch.dtype, documents: list[int] | None
):
    T = 301 if documents is None else documents[-1]
    a = arguments(T, form=form, gate=gate, steps=steps, documents=documents, K=size, V=size, G=1, R=2)
    a = on_device(a, dtype)
    actual = agree(a, TOLERANCE[dtype], steps=steps)
    repeated = results(kernels.delta_rule, a, backend="triton", steps=steps)
    assert all(torch.equal(x, repeated[name]) for name, x in actual.items())


@pytest.mark.gpu
def test_few_sequences_and_many_on_a_device():
    # blocks of values that leave most of the device idle, and those that do not
    for batch in (1, 40):
        a = arguments(130, form="beta", gate="channel", K=128, V=128, B=batch)
        agree(on_device(a, torch.bfloat16), TOLERANCE[torch.bfloat16])


def in_dtype(a: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Streams in `dtype`; states and gates in fp32."""
    streams = ("q", "k", "v", "erase", "erase_write")
    return {
        name: x.to(dtype if name in streams else torch.float32) if x.is_floating_point() else x for name, x in a.items()
    }


def on_device(a: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copy the arguments, in these dtypes, to the GPU."""
    return {name: x.to("cuda") for name, x in in_dtype(a, dtype).items()}
