"""The Triton kernels of the delta rule: small cases in the interpreter, real sizes on a device."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from . import gluon_interpreter
from .comparisons import DEVICE, assert_repeats, interpreted
from .hopper import MOST, shared_memory
from .recurrences import assert_same, inputs, results
from .test_delta_rule_general import arguments

pytest.importorskip("triton")
from kernels.delta_rule.gpu import op as gpu_op
from kernels.delta_rule.gpu import plan as gpu_plan
from kernels.delta_rule.gpu import select as gpu_select
from kernels.delta_rule.gpu.select import Case
from kernels.gpu import plan
from kernels.gpu.device import multiprocessors
from kernels.gpu.launch_table import TABLE

pytestmark = pytest.mark.usefixtures("poison")

GATES = ("none", "constant", "head")
PACKED = [0, 0, 3, 67, 67, 130]  # empty at the start and inside; one full chunk
ENTRIES = [
    (size, itemsize)
    for kernel in ("forward", "long")
    for gpu, size, itemsize in TABLE[f"delta_rule.{kernel}"]
    if gpu == 9
]


def agree(a: dict[str, Tensor], tolerance: float | None = None, **options: Any) -> dict[str, Tensor]:
    """The results on Triton, after they have been compared with the loop in fp32."""
    actual = results(kernels.delta_rule, a, backend="triton", **options)
    exact = {name: x.float() if x.is_floating_point() else x for name, x in a.items()}
    expected = results(kernels.delta_rule, exact, backend="reference", **options)
    assert_same(actual, {name: x.to(actual[name].dtype) for name, x in expected.items()}, tolerance)
    return actual


def small(T: int, **options: Any) -> dict[str, Tensor]:
    return inputs(T, **{"B": 1, "G": 1, "K": 16, "V": 16, "dtype": torch.float32, **options})


@interpreted
@pytest.mark.parametrize(("length", "gate"), [(1, "head"), (63, "none"), (65, "constant"), (130, "head")])
def test_lengths(length: int, gate: str):
    agree(small(length, gate=gate))


@pytest.mark.slow
@interpreted
def test_what_is_kept_for_the_gradients_changes_only_memory(monkeypatch: pytest.MonkeyPatch):
    a, actual, saved = small(130, gate="head", E=2), [], []
    for keep, few in ((True, 0), (False, 32), (False, 31)):  # its keys have 32 channels in all subheads
        monkeypatch.setattr(gpu_op, "FEW_ENOUGH", few)
        numbers: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, n=numbers: n.append(x.numel()) or x, lambda x: x):
            actual.append(agree(a, subheads=2, keep_states=keep))
        saved.append(sum(numbers))
    for each in actual[1:]:
        assert all(torch.equal(x, actual[0][name]) for name, x in each.items())
    assert saved[0] > saved[1] > saved[2]


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("gate", ["constant", "head"])
def test_subheads_and_shared_keys(gate: str):
    # with V ≠ K and a first state: what is mixed up in one of them shows
    agree(small(66, gate=gate, decay="mixed", G=2, R=2, E=2, V=20), subheads=2)


@interpreted
def test_rows():
    agree(small(65, B=3))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("gate", "state"), [("none", True), ("constant", False), ("head", True)])
def test_packed_documents(gate: str, state: bool):
    a = small(130, gate=gate, decay="mixed", R=2, documents=PACKED, state=state)
    actual = agree(a)
    if state:
        assert torch.equal(actual["state"][3], a["initial_state"][3])  # an empty document changes nothing


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("gate", "decay"), [("constant", "strong"), ("head", "strong"), ("head", "mixed"), ("head", "zero")]
)
def test_any_decay(gate: str, decay: str):
    agree(small(130, gate=gate, decay=decay))


@interpreted
@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("beta", [1, 2])
def test_large_beta(beta: float, correlated: bool):
    agree(small(100, beta=beta, correlated=correlated, gate="none", K=32))


@interpreted
def test_beta_of_zero_has_a_gradient():
    a = small(70, beta=0)
    actual = results(kernels.delta_rule, a, backend="triton")
    expected = results(kernels.delta_rule, a, backend="reference")
    for name in ("k", "v"):  # nothing is written: only β can change that
        assert not expected.pop(f"gradient of {name}").any()
        assert actual.pop(f"gradient of {name}").abs().max() < 1e-12
    assert expected["gradient of beta"].any()
    assert_same(actual, expected)


@interpreted
def test_one_key_repeated():
    # the hardest triangular system of all
    a = small(130, beta=1)
    a["k"] = a["k"][:, :1].expand_as(a["k"]).contiguous()
    agree(a)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("K", "V"), [(8, 6), (24, 40), (144, 16), (16, 130), (200, 72), (16, 300)])
def test_sizes(K: int, V: int):
    agree(small(66, K=K, V=V))


def rounded(a: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gates and states stay in fp32, as mixers make them."""
    return {name: x.to(dtype) if name in "qkv" else x for name, x in a.items()}


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("length", "K", "V", "documents", "gate", "state"),
    [
        (66, 272, 70, None, "none", False),
        (130, 300, 16, PACKED, "head", True),
        pytest.param(66, 272, 70, None, "head", True, marks=pytest.mark.nightly),
        pytest.param(130, 300, 16, PACKED, "none", False, marks=pytest.mark.nightly),
    ],
)
def test_a_state_that_stays_in_memory(length: int, K: int, V: int, documents: list[int] | None, gate: str, state: bool):
    options = {"documents": documents, "gate": gate, "decay": "mixed" if state else "mild", "state": state}
    a = rounded(small(length, K=K, V=V, E=2, **options), torch.bfloat16)
    actual = agree(a, tolerance=3e-2, subheads=2)
    with torch.no_grad(), kernels.backend("triton"):
        o, end = kernels.delta_rule(**a, subheads=2, return_state=True)
    assert torch.equal(o, actual["o"])
    assert torch.equal(end, actual["state"])


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("K", "V"), [(200, 48), (16, 272)])
def test_long_values_need_no_other_implementation(K: int, V: int):
    # of packed documents, with subheads: blocks of keys and of values must not be mixed up with either
    agree(small(20, K=K, V=V, E=2, documents=[0, 7, 20]), subheads=2)


def test_longer_values_take_the_same_launch():
    def blocks(K: int, V: int) -> tuple[int, int]:
        shapes = torch.Size([1, 64, 4, K]), torch.Size([1, 64, 4, V])
        to = gpu_plan.DeltaRule.of(None, 64, *shapes, 1, 1.0, torch.bfloat16, torch.device("cpu"), None)
        sizes = to.forward(1, V).constants
        return sizes["BK"], sizes["BV"]

    assert blocks(128, 128) == (128, 64)
    assert blocks(192, 384) == blocks(200, 400) == blocks(256, 512) == blocks(256, 256) == (256, 32)
    assert blocks(64, 1024) == blocks(64, 512) == blocks(64, 256) == (64, 32)
    assert blocks(512, 512) == blocks(2048, 128) == (64, 64)  # the state in memory


@interpreted
@pytest.mark.parametrize("through", ["o", "state"])
def test_gradient_through_one_result(through: str):
    actual = agree(small(66), through=(through,))
    assert bool(actual["gradient of q"].any()) == (through == "o")


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 1e-3)])
def test_half_precision(dtype: torch.dtype, tolerance: float):
    # the interpreter cuts bf16 off, where a device rounds
    a = rounded(small(66, E=2), dtype)
    assert agree(a, tolerance, subheads=2)["o"].dtype == dtype


@interpreted
def test_everything_in_bf16():
    agree(small(66, dtype=torch.bfloat16), tolerance=3e-2)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("gate", "state", "K", "V"),
    [("head", True, 24, 20), ("none", False, 24, 20), ("head", True, 40, 36)],  # the last: two blocks of columns
)
def test_segments(gate: str, state: bool, K: int, V: int, monkeypatch: pytest.MonkeyPatch):
    # as where few and long sequences would leave a device idle; the last segment is shorter
    monkeypatch.setattr(gpu_plan, "segments", lambda *passed: 3)
    a = small(300, K=K, V=V, gate=gate, decay="mixed" if K == 24 else "mild", correlated=True, state=state)
    agree(a)


@interpreted
@pytest.mark.parametrize("cut", [False, True])
def test_final_states_are_left_out(cut: bool, monkeypatch: pytest.MonkeyPatch):
    if cut:
        monkeypatch.setattr(gpu_plan, "segments", lambda *passed: 3)
    a = small(300 if cut else 66)
    args = gpu_op.Arguments(
        *(a[n] for n in ("q", "k", "v", "beta", "log_decay", "initial_state")), None, 1, 1.0, gpu_op.NOTHING
    )
    outputs = gpu_op.compute(args._replace(final=False))
    assert outputs.final_state is None
    assert torch.equal(outputs.o, gpu_op.compute(args).o)
    with kernels.backend("triton"):
        assert torch.equal(kernels.delta_rule(**a)[0], kernels.delta_rule(**a, return_state=True)[0])


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("length", [1.0, 1.5])
def test_segments_of_which_little_is_remembered(length: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_plan, "segments", lambda *passed: 2)
    a = small(520, G=2, K=24, V=20, correlated=True, dtype=torch.float32)
    a["log_decay"] -= torch.tensor([0.0, 0.6])
    a["k"] *= length  # beyond 1.4, a strong β enlarges what it replaces
    tensors = (a[n] for n in ("q", "k", "v", "beta", "log_decay", "initial_state"))
    computed = gpu_op.compute(gpu_op.Arguments(*tensors, None, 1, 1.0, gpu_op.ALL))
    slow, fast = computed.transition[0]
    assert computed.has_transition[0].tolist() == [1, 0]
    assert slow.norm() > 1e-9
    assert not fast.any()  # its chunks are not visited, nor all of those that the state is made of
    agree(a)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("documents", "gate", "state"),
    [
        ([0, 0, 1, 300, 301, 420, 420], "head", True),  # empty, of one token, cut in three, not cut
        ([0, 140, 141, 400], "constant", False),
        ([0, 257], "none", True),
    ],
)
def test_segments_of_documents(documents: list[int], gate: str, state: bool, monkeypatch: pytest.MonkeyPatch):
    # as where a few long documents would leave a device idle
    monkeypatch.setattr(gpu_plan, "segments", lambda *passed: 6)
    monkeypatch.setattr(gpu_plan, "FEWEST_OF_LONGEST", 2)
    cuts, combine = [], gpu_plan.DeltaRule.combine
    monkeypatch.setattr(gpu_plan.DeltaRule, "combine", lambda to, *passed: cuts.append(to.cut) or combine(to, *passed))
    a = small(documents[-1], K=24, V=20, gate=gate, decay="mixed", documents=documents, state=state, R=2)
    actual = agree(a)
    assert len(cuts) == 2  # forward and backward
    assert all(cuts)
    if state and 0 in torch.tensor(documents).diff():
        assert torch.equal(actual["state"][0], a["initial_state"][0])


def test_documents_are_cut_where_it_pays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_plan, "multiprocessors", lambda device: 132)

    def plan_of(*lengths: int, heads: int = 2) -> gpu_plan.DeltaRule:
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        T = int(bounds[-1])
        shape, device = torch.Size([1, T, heads, 128]), torch.device("cpu")
        sizes = (shape, shape, 1, 1.0, torch.bfloat16, device, len(lengths))
        return gpu_plan.DeltaRule.of(bounds, T, *sizes)

    shape, one = torch.Size([1, 65536, 2, 128]), plan_of(65536)
    rows = gpu_plan.DeltaRule.of(None, 65536, shape, shape, 1, 1.0, one.dtype, one.device, None)
    assert one.cut == pytest.approx(rows.cut, abs=1)  # a document is as a row
    assert rows.cut > 16
    assert plan_of(*[512] * 128).cut == 0  # these fill a device by themselves
    assert plan_of(65536, heads=64).cut == 0
    assert plan_of(4096).cut == 0
    mixed = plan_of(40000, 1, 0, 700, 20000, 100)
    assert mixed.cut == mixed.layout.sequences[0, 1] + mixed.layout.sequences[4, 1]
    assert mixed.layout.sequences[:, 1].tolist()[1:4] == [1, 1, 1]
    for seed in range(50):  # what is kept of segments is known without the boundaries
        generator = torch.Generator().manual_seed(seed)
        lengths = (torch.rand(1 + seed % 7, generator=generator) ** 4 * 60000).int().tolist()
        some = plan_of(1, *lengths)
        assert some.cut <= some.most
        assert len(some.layout.chunks) <= some.slots


@interpreted
@pytest.mark.parametrize("gate", GATES)
def test_one_token_without_gradient(gate: str):
    a = small(1, B=2, G=2, R=2, E=3, K=24, V=40, gate=gate, state=gate != "constant")
    actual = []
    for backend in ("triton", "reference"):
        with torch.no_grad(), kernels.backend(backend):
            actual.append(kernels.delta_rule(**a, subheads=3, return_state=True))
    for x, y in zip(*actual, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("length", [1, 66])
def test_views_of_one_projection(length: int):
    fused = torch.rand(2, length, 50) / 4
    q, v, k = (x.unflatten(-1, (-1, 16)) for x in fused[..., :48].split(16, -1))
    beta, decay = fused[..., 48:].split(1, -1)
    views = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": -decay}
    copies = {name: x.contiguous() for name, x in views.items()}
    actual, expected = (results(kernels.delta_rule, x, backend="triton") for x in (views, copies))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    with torch.no_grad(), kernels.backend("triton"):  # at one token, another kernel
        assert torch.equal(kernels.delta_rule(**views)[0], kernels.delta_rule(**copies)[0])


LIMITS = "which takes keys of at most 256 channels, or in bfloat16 of 2048"
BF16 = {"K": 257, "dtype": torch.bfloat16}
REFUSED = [
    ({"dtype": torch.float64}, "fp64"),
    ({"K": 257}, LIMITS),
    ({**BF16, "K": 2049}, LIMITS),
    ({**BF16, "T": 1}, LIMITS),
    ({**BF16, "gate": "constant", "learned": True}, LIMITS),
]


@interpreted
@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_what_the_kernels_cannot_take(change: dict[str, Any], reason: str):
    learned, options = change.get("learned", False), {name: change[name] for name in change if name != "learned"}
    a = small(**{"T": 3, **options})
    a["log_decay"].requires_grad_(learned)
    kernels.delta_rule(**a)
    with kernels.backend("triton"), pytest.raises(kernels.UserError, match=reason):
        kernels.delta_rule(**a)


@pytest.mark.slow
def test_the_ops_are_registered_properly():
    a = small(3)
    passed = [a[name].to(DEVICE).requires_grad_() for name in ("q", "k", "v", "beta", "log_decay", "initial_state")]
    for tensors, final in ((passed, True), ([x.detach() for x in passed], False)):
        torch.library.opcheck(torch.ops.token_mixer_zoo.delta_rule, (*tensors, None, 1, 0.25, True, final, False))
    one = [x.detach() if x is passed[-1] else x.detach()[:, :1] for x in passed]
    torch.library.opcheck(torch.ops.token_mixer_zoo.delta_rule_step, (*one, 1, 0.25))


def on_device(T: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Tensor]:
    """As mixers make them: gates and states in fp32."""
    return rounded({name: x.cuda() for name, x in small(T, **options).items()}, dtype)


def agree_on_device(a: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> None:
    actual = results(kernels.delta_rule, a, backend="triton", **options)
    exact = {name: x.float() if x.is_floating_point() else x for name, x in a.items()}
    expected = results(kernels.delta_rule, exact, backend="torch", **options)
    for name, x in expected.items():
        if not x.any():  # of what a reset erases
            assert not actual[name].any(), name
            continue
        error = float((actual[name].double() - x.double()).norm() / x.double().norm())
        bf16 = 5e-3 if name in ("o", "state") else 1e-2
        assert error <= (1e-5 if dtype == torch.float32 else bf16), f"{name}: {error:.2g}"


@pytest.mark.gpu
@pytest.mark.parametrize("passes", ["wide", "narrow", "cut"])
@pytest.mark.parametrize(("size", "itemsize"), ENTRIES)
def test_every_launch(size: int, itemsize: int, passes: str, monkeypatch: pytest.MonkeyPatch):
    narrow = TABLE["delta_rule.narrow"].get((9, size, itemsize))
    if passes == "narrow" and narrow is None:
        pytest.skip("there is no narrow launch")
    monkeypatch.setattr(gpu_plan, "segments", lambda *passed: 3 if passes == "cut" else 1)
    monkeypatch.setattr(gpu_plan, "fitting", lambda *passed: 2 if passes == "narrow" else 1)
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    a = on_device(1000, dtype, G=4, K=size, V=size, correlated=True)
    agree_on_device(a, dtype)
    assert_repeats(partial(results, kernels.delta_rule, a, backend="triton"), 50)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "options",
    [
        {"T": 1000, "B": 2, "G": 2, "R": 3, "K": 128, "V": 128},
        {"T": 1000, "G": 2, "R": 2, "E": 4, "K": 128, "V": 128},
        {"T": 700, "G": 2, "K": 96, "V": 192},
        {"T": 8192, "G": 2, "K": 128, "V": 128},  # in segments
        {"T": 1500, "G": 2, "K": 128, "V": 128, "documents": [0, 0, 5, 700, 700, 1500]},
        {"T": 20000, "G": 2, "K": 128, "V": 128, "documents": [0, 0, 16000, 16001, 20000]},  # the first in segments
        {"T": 500, "G": 2, "K": 128, "V": 128, "decay": "mixed", "correlated": True},
        # key blocks of 16 and 32 beside values of 64 gave wrong gradients, and NaN after some steps of training
        *({"T": 300, "B": 2, "G": 4, "K": K, "V": V} for K in (16, 32, 48) for V in (16, 32, 64, 128)),
        {"T": 300, "B": 8, "G": 4, "E": 4, "K": 16, "V": 64},
    ],
)
def test_real_sizes(options: dict[str, Any], gate: str):
    a = on_device(**options, gate=gate)
    agree_on_device(a, torch.bfloat16, subheads=options.get("E", 1))


@pytest.mark.parametrize("name", ["beta", "log_decay", "initial_state"])
def test_a_plan_has_one_dtype_of_each_tensor(name: str):
    # launches compiled for another one would read wrong numbers
    a = inputs(70, B=1, G=1, K=16, V=16, gate="head", dtype=torch.float32)
    streams = {"cu_seqlens": None, "initial_state": torch.zeros(1, 1, 16, 16), **a}
    first, again, other = (
        gpu_op.Arguments(**{**streams, name: streams[name].to(dtype)}, subheads=1, scale=1.0, keep=gpu_op.ALL).plan
        for dtype in (torch.float32, torch.float32, torch.bfloat16)
    )
    assert first is again
    assert first is not other


@pytest.mark.gpu
@pytest.mark.parametrize("T", [300, 8192])  # whole, and in segments
def test_gates_of_other_dtypes(T: int):
    a = on_device(T, G=2, K=128, V=128, gate="head")
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        agree_on_device({**a, **{name: a[name].to(dtype) for name in ("beta", "log_decay")}}, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("options", [{"T": 4096, "B": 2, "G": 16}, {"T": 8192, "G": 8}])  # whole, and in segments
def test_programs_that_share_multiprocessors(options: dict[str, Any], gate: str):
    a = on_device(**options, K=128, V=128, gate=gate)
    agree_on_device(a, torch.bfloat16)
    # what one program does while another waits differs from run to run
    assert_repeats(partial(results, kernels.delta_rule, a, backend="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["none", "head"])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        *({"T": T, "G": 2} for T in (1, 63, 64, 65, 1000)),
        {"T": 700, "B": 2, "G": 2, "R": 3},
        {"T": 700, "G": 2, "R": 2, "E": 4},
        {"T": 1500, "G": 2, "documents": [0, 0, 5, 6, 700, 700, 1500]},
        *({"T": 1000, "G": 4, "decay": decay, "correlated": True} for decay in ("zero", "mixed", "strong")),
        {"T": 1000, "G": 4, "beta": 2},
        {"T": 1000, "G": 2, "state": False},
    ],
)
def test_all_gradients_in_one_pass(options: dict[str, Any], cut: bool, gate: str, monkeypatch: pytest.MonkeyPatch):
    # as exact as three passes, which have limits of their own, and equal bits in each run
    if cut:
        monkeypatch.setattr(gpu_plan, "segments", lambda *passed: 3)
    a, E = on_device(**options, K=128, V=128, gate=gate), options.get("E", 1)
    actual = []
    for full in (2, *[0] * 20):
        plan.of_rows.cache_clear()
        monkeypatch.setattr(gpu_select, "FULL", full)
        repeated = {name: x.clone() for name, x in a.items()}  # plans of documents are cached with their boundaries
        actual.append(results(kernels.delta_rule, repeated, backend="triton", subheads=E))
    three, one, *others = actual
    assert all(torch.equal(each[name], one[name]) for each in others for name in one)
    exact = {name: x.float() if x.is_floating_point() else x for name, x in a.items()}
    for name, x in results(kernels.delta_rule, exact, backend="torch", subheads=E).items():
        error, of_three = (float((y[name].double() - x.double()).norm()) for y in (one, three))
        assert error <= max(1e-2 * float(x.double().norm()), 1.2 * of_three), name


GLUON = "kernels.delta_rule.gpu.hopper_backward"


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("gate", ["none", "constant", "head"])
@pytest.mark.parametrize(
    "options",
    [{"T": 1}, {"T": 130, "decay": "mixed"}, {"T": 70, "R": 2, "E": 2}, {"T": 150, "documents": [0, 0, 5, 100, 150]}],
)
def test_all_gradients_in_one_pass_step_by_step(options: dict[str, Any], gate: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, GLUON, gluon_interpreter.interpreted(GLUON, "gradients"))
    monkeypatch.setattr(gpu_plan.DeltaRule, "backward_path", "one_pass")
    a = inputs(**{"B": 1, "G": 1, "K": 128, "V": 128, **options}, gate=gate, dtype=torch.float32)
    agree(a, subheads=options.get("E", 1))


PREPARE = "kernels.delta_rule.gpu.hopper_prepare"


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("gate", ["none", "constant", "head"])
@pytest.mark.parametrize(
    "options",
    [
        {"T": 1},
        {"T": 130, "decay": "strong", "correlated": True},
        {"T": 70, "R": 2, "E": 2, "beta": 2},
        {"T": 150, "documents": [0, 0, 5, 100, 150], "decay": "mixed"},
    ],
)
def test_chunks_step_by_step(options: dict[str, Any], gate: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, PREPARE, gluon_interpreter.interpreted(PREPARE, "prepare"))
    monkeypatch.setattr(gpu_plan.DeltaRule, "prepare_path", "hopper_prepare")
    monkeypatch.setattr(Case, "gluon_backward", False)
    a = inputs(**{"B": 1, "G": 1, "K": 128, "V": 16, **options}, gate=gate, dtype=torch.float32)
    a["beta"][:, 5::7] = 0
    agree(a, subheads=options.get("E", 1))


PASS = "kernels.delta_rule.gpu.hopper_sequential_pass"


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("keep", ["all", "chunks", "nothing"])
@pytest.mark.parametrize(
    "options",
    [
        {"T": 1, "gate": "head"},
        {"T": 300, "V": 128, "gate": "constant"},  # two chains in a program
        {"T": 70, "R": 2, "E": 2, "V": 192, "gate": "none", "beta": 2},
        {"T": 70, "R": 2, "E": 2, "V": 256, "gate": "head"},
        {"T": 400, "documents": [0, 0, 3, 67, 67, 400], "gate": "head", "decay": "mixed"},
        {"T": 50, "steps": 3, "gate": "head", "decay": "mixed", "documents": [0, 0, 1, 50]},
        {"T": 450, "gate": "head", "beta": 2, "segments": 3},  # whose transitions are not zero
        {"T": 450, "R": 2, "gate": "constant", "decay": "mixed", "segments": 3},
        {"T": 450, "gate": "none", "documents": [0, 3, 3, 450], "segments": 6},
    ],
)
def test_the_forward_pass_in_gluon_step_by_step(options: dict[str, Any], keep: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, PREPARE, gluon_interpreter.interpreted(PREPARE, "prepare"))
    monkeypatch.setitem(sys.modules, PASS, gluon_interpreter.interpreted(PASS, "scan_forward"))
    monkeypatch.setattr(gpu_plan, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(Case, "gluon", True)
    monkeypatch.setattr(Case, "gluon_backward", False)
    options = dict(options)
    if count := options.pop("segments", 0):
        monkeypatch.setattr(gpu_plan, "segments", lambda *passed: count)
    steps, sizes = options.get("steps", 1), {"B": 1, "G": 1, "K": 128, "V": 64, "dtype": torch.float32, **options}
    a = arguments(form="beta", **sizes)
    numbers = {"subheads": options.get("E", 1), "steps": steps}
    if keep == "nothing":
        plan.of_rows.cache_clear()
        with torch.no_grad(), kernels.backend("triton"):
            actual = kernels.delta_rule(**a, **numbers, return_state=True)
        with kernels.backend("reference"):
            expected = kernels.delta_rule(**a, **numbers, return_state=True)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)
    else:
        agree(a, **numbers, keep_states=keep == "all")


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["mild", "mixed", "zero"])
@pytest.mark.parametrize(("T", "documents"), [(8192, None), (20000, [0, 0, 16000, 16001, 20000])])
def test_outputs_of_segments_without_gradients_on_a_device(T: int, documents: list[int] | None, decay: str):
    test_outputs_without_gradients_on_a_device(T, documents, {"beta": 2}, decay, "head", V=128, H=2)


@pytest.mark.gpu
@pytest.mark.pairwise
@pytest.mark.parametrize("H", [40, 96])  # with 128 values, one chain in a program and two
@pytest.mark.parametrize("V", [64, 128])
@pytest.mark.parametrize("gate", ["none", "constant", "head"])
@pytest.mark.parametrize("decay", ["mild", "mixed", "strong"])
@pytest.mark.parametrize("options", [{"beta": 2, "correlated": True}, {"E": 2, "beta": 1}, {"R": 4}])
@pytest.mark.parametrize(("T", "documents"), [(1, None), (65, None), (1000, [0, 0, 1, 65, 700, 1000]), (2048, None)])
def test_outputs_without_gradients_on_a_device(
    T: int, documents: list[int] | None, options: dict[str, Any], decay: str, gate: str, V: int, H: int
):
    subheads, groups = options.get("E", 1), options.get("R", 1)
    sizes = {"B": 1, "G": H // (subheads * groups), "K": 128, "V": V, "gate": gate, "decay": decay}
    a = on_device(T, **sizes, documents=documents, **options)
    exact = {name: x.float() if x.is_floating_point() else x for name, x in a.items()}
    options = {"subheads": subheads, "return_state": True}
    expected = kernels.delta_rule(**exact, **options)
    trained = kernels.delta_rule(**{**a, "q": a["q"].clone().requires_grad_()}, **options)
    with torch.no_grad():
        actual, again = (kernels.delta_rule(**a, **options) for _ in range(2))
    for x, repeated, of_training, y in zip(actual, again, trained, expected, strict=True):
        errors = (float((each.detach().double() - y.double()).norm() / y.double().norm()) for each in (x, of_training))
        error, allowed = errors
        assert error <= max(5e-3, 1.2 * allowed)
        assert torch.equal(x, repeated)


@pytest.mark.slow
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("missing", [(), ("o",), ("scores", "u", "states")])
def test_shared_memory_of_the_forward_pass_in_gluon(missing: tuple[str, ...], chains: int):
    types = dict.fromkeys(("gates", "initial", "final"), "*fp32") | {"segments": "*i32", "scale": "fp32"}
    types |= {"inverse": "*fp16"} if "scores" in missing else {}
    fixed = {"M": 16, "E": 1, "R": 1, "STEPS": 1, "V": 128, "CHAINS": chains} | dict.fromkeys(missing)
    assert shared_memory(PASS, "scan_forward", fixed, types, warps=4) <= MOST


@pytest.mark.slow
@interpreted
def test_resets_step_by_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, PREPARE, gluon_interpreter.interpreted(PREPARE, "prepare"))
    monkeypatch.setitem(sys.modules, GLUON, gluon_interpreter.interpreted(GLUON, "gradients"))
    monkeypatch.setattr(gpu_plan.DeltaRule, "prepare_path", "hopper_prepare")
    monkeypatch.setattr(gpu_plan.DeltaRule, "backward_path", "one_pass")
    a = inputs(130, B=1, G=2, K=128, V=128, gate="head", dtype=torch.float32)
    a["log_decay"][:, [0, 31, 63, 64, 65, 100, 101]] = -torch.inf
    actual = agree(a)
    assert not actual["gradient of log_decay"][a["log_decay"] == -torch.inf].any()


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128, 512])
def test_resets_on_a_device(K: int):
    a = on_device(1100, B=4, G=16, K=K, V=128, gate="head")
    a["log_decay"][:, [0, 31, 63, 64, 65, 100, 101]] = -torch.inf
    agree_on_device(a, torch.bfloat16)
    actual = results(kernels.delta_rule, a, backend="triton")["gradient of log_decay"]
    assert not actual[a["log_decay"] == -torch.inf].any()


@interpreted
@pytest.mark.parametrize("length", [1.0, 1.5])
def test_bounds_step_by_step(length: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, PREPARE, gluon_interpreter.interpreted(PREPARE, "prepare"))
    monkeypatch.setattr(gpu_plan, "segments", lambda *passed: 2)
    a = inputs(400, B=1, G=1, K=128, V=16, dtype=torch.float32, gate="head", decay="strong")
    a["k"] *= length
    q, k, v, beta, decay = (a[name] for name in ("q", "k", "v", "beta", "log_decay"))
    actual = []
    for path in ("prepare", "hopper_prepare"):
        plan.of_rows.cache_clear()
        monkeypatch.setattr(gpu_plan.DeltaRule, "prepare_path", path)
        monkeypatch.setattr(Case, "gluon_backward", False)
        to = gpu_op.Arguments(q, k, v, beta, None, None, None, 1, 1.0, gpu_op.ALL).plan
        actual.append(gpu_op.prepared(to, q, k, beta, decay)[3])
    torch.testing.assert_close(*actual)


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "missing"), [("per step", ()), ("constant", ("bounds",)), ("none", ("log_decay",))])
def test_chunks_compile_for_hopper(gate: str, missing: tuple[str, ...]):
    types = dict.fromkeys(("log_decay", "gates", "bounds"), "*fp32") | {"scale": "fp32", "chunks": "*i32"}
    fixed = {"M": 8, "E": 2, "R": 1, "STEPS": 1, "GATE": gate} | dict.fromkeys(missing)
    assert 4 * shared_memory(PREPARE, "prepare", fixed, types, warps=4) <= MOST


@pytest.mark.parametrize(
    ("B", "H", "T", "documents", "halved", "whole"),
    [
        (8, 8, 4096, None, True, True),
        (4, 64, 4096, None, False, True),
        (4, 8, 4096, None, False, False),  # a quarter of the device, and two halves would fill no more than half
        (8, 8, 1024, None, False, False),  # too short
        (1, 64, 4096, 1, False, False),  # documents are cut otherwise
    ],
)
def test_when_sequences_are_halved(
    B: int, H: int, T: int, documents: int | None, halved: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
):
    for module in (gpu_plan, gpu_select):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Case, "gluon_backward", True)
    shape = torch.Size([B, T, H, 128])
    bounds = None if documents is None else torch.arange(documents + 1) * (T // documents)
    sizes = (shape, shape, 1, 1.0, torch.bfloat16, torch.device("cpu"), documents)
    actual = gpu_plan.DeltaRule.of(bounds, T, *sizes)
    assert actual.halved == halved
    assert (actual.backward_path != "three_passes") == whole


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("through", [("o", "state"), ("o",)])
def test_all_gradients_in_one_pass_over_two_halves(through: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, GLUON, gluon_interpreter.interpreted(GLUON, "gradients"))
    monkeypatch.setattr(gpu_plan.DeltaRule, "backward_path", "one_pass_in_halves")
    a = inputs(270, B=2, G=1, E=2, K=128, V=128, decay="mixed", dtype=torch.float32)  # five chunks
    agree(a, subheads=2, through=through)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("steps", "path", "options"),
    [
        (2, "one_pass_in_halves", {"T": 135}),
        (3, "one_pass", {"T": 30, "R": 2, "documents": [0, 0, 1, 30]}),
        (3, "three_passes", {"T": 30, "E": 2, "gate": "constant"}),
    ],
)
def test_steps_step_by_step(steps: int, path: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, PREPARE, gluon_interpreter.interpreted(PREPARE, "prepare"))
    monkeypatch.setitem(sys.modules, GLUON, gluon_interpreter.interpreted(GLUON, "gradients"))
    monkeypatch.setattr(gpu_plan.DeltaRule, "prepare_path", "hopper_prepare")
    monkeypatch.setattr(gpu_plan.DeltaRule, "backward_path", path)
    sizes = {"B": 1, "G": 1, "K": 128, "V": 128, "dtype": torch.float32}
    agree(arguments(form="beta", steps=steps, **{**sizes, **options}), subheads=options.get("E", 1), steps=steps)


@pytest.mark.slow
@interpreted
def test_steps_of_tokens_in_segments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_plan, "segments", lambda *passed: 3)
    agree(arguments(100, form="beta", steps=3, B=1, G=1, K=24, V=20, decay="mixed", dtype=torch.float32), steps=3)


@pytest.mark.slow
@interpreted
def test_steps_with_a_state_that_stays_in_memory():
    a = arguments(25, form="beta", steps=3, B=1, G=1, K=272, V=20, dtype=torch.float32)
    agree(rounded(a, torch.bfloat16), tolerance=3e-2, steps=3)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"T": 1500, "B": 4, "G": 16},  # in halves
        {"T": 301, "B": 4, "G": 32},  # in one pass
        {"T": 301, "G": 2, "R": 2, "E": 2},
        {"T": 5000, "G": 2},  # in segments
        {"T": 1500, "G": 2, "documents": [0, 0, 5, 6, 700, 700, 1500]},
        {"T": 301, "G": 2, "K": 512},
    ],
)
def test_steps_on_a_device(options: dict[str, Any], steps: int):
    a = arguments(form="beta", steps=steps, **{"B": 1, "K": 128, "V": 128, "dtype": torch.float32, **options})
    a = rounded({name: x.cuda() for name, x in a.items()}, torch.bfloat16)
    agree_on_device(a, torch.bfloat16, subheads=options.get("E", 1), steps=steps)
    assert_repeats(
        partial(results, kernels.delta_rule, a, backend="triton", subheads=options.get("E", 1), steps=steps), 1
    )


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["none", "head"])
@pytest.mark.parametrize("through", [("o", "state"), ("o",)])
def test_sequences_that_fill_half_of_a_gpu(gate: str, through: tuple[str, ...]):
    rows = multiprocessors(torch.device("cuda")) // 2 // 8
    a = on_device(2500, B=rows, G=8, K=128, V=128, gate=gate)
    to = gpu_op.Arguments(*(a[name] for name in ("q", "k", "v", "beta")), None, None, None, 1, 1.0, gpu_op.ALL).plan
    if to.device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        assert to.halved
    assert_repeats(partial(results, kernels.delta_rule, a, backend="triton", through=through), 1)
    agree_on_device(a, torch.bfloat16, through=through)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [(), ("from_columns", "from_t", "before_t", "across")])
def test_the_one_pass_compiles_for_hopper(missing: tuple[str, ...]):
    fp32 = ("gates", "dbeta", "from_columns", "from_t", "before_t", "across", "dinitial")
    types = dict.fromkeys(fp32, "*fp32") | {"scale": "fp32", "segments": "*i32"}
    fixed = {"M": 8, "E": 2, "R": 1, "STEPS": 1, "dfinal": None} | dict.fromkeys(missing)
    assert shared_memory(GLUON, "gradients", fixed, types) <= MOST


# neither powers of two nor short: Gated DeltaNet 1.3B and H1 1.3B, long values, and long heads
LONG = [(200, 400), (192, 384), (256, 512), (128, 512), (64, 1024), (144, 80)]
IN_MEMORY = [(512, 128), (600, 48), (1024, 64), (2048, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("K", "V", "dtype"),
    [(*sizes, dtype) for sizes in LONG for dtype in (torch.bfloat16, torch.float32)]
    + [(*sizes, torch.bfloat16) for sizes in IN_MEMORY],
)
def test_long_keys_and_values(K: int, V: int, dtype: torch.dtype):
    for options in ({"B": 2, "G": 3, "R": 2}, {"G": 2, "documents": [0, 0, 5, 650, 650, 1000], "decay": "mixed"}):
        a = on_device(1000, dtype, K=K, V=V, correlated=True, **options)
        agree_on_device(a, dtype)
        assert_repeats(partial(results, kernels.delta_rule, a, backend="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "V"), LONG + IN_MEMORY)
def test_long_keys_and_values_in_subheads_and_segments(K: int, V: int, monkeypatch: pytest.MonkeyPatch):
    agree_on_device(on_device(500, G=2, E=4, K=K, V=V), torch.bfloat16, subheads=4)  # states are recomputed
    monkeypatch.setattr(gpu_plan, "segments", lambda *passed: 3)
    agree_on_device(on_device(1000, G=2, K=K, V=V, decay="mixed"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("subheads", "K", "V"), [(1, 128, 128), (4, 128, 128), (1, 200, 400), (1, 64, 1024)])
def test_decoding_on_device(subheads: int, K: int, V: int):
    a = on_device(1, B=8, G=4, E=subheads, K=K, V=V)
    with torch.no_grad():
        o, state = kernels.delta_rule(**a, subheads=subheads, return_state=True)
        with kernels.backend("reference"):
            expected_o, expected = kernels.delta_rule(**a, subheads=subheads, return_state=True)
    torch.testing.assert_close(state, expected)
    torch.testing.assert_close(o, expected_o, atol=2e-2, rtol=2e-2)
