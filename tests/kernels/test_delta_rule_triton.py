"""The Triton kernels of the delta rule: rows of calls in the interpreter and on a device, and what is special."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE, assert_repeats, interpreted
from .gluon_interpreter import interpreted as in_interpreter
from .hopper import MOST, shared_memory
from .recurrences import FORMS, agree, assert_left_alone, assert_same, erasing, inputs, results, rounded, rows

pytest.importorskip("triton")
from kernels.delta_rule.gpu import op as gpu_op
from kernels.delta_rule.gpu import plan as gpu_plan
from kernels.delta_rule.gpu import select as gpu_select
from kernels.delta_rule.gpu.general import plan as general_plan
from kernels.delta_rule.gpu.select import Case
from kernels.gpu import plan
from kernels.gpu.device import multiprocessors
from kernels.gpu.launch_table import TABLE

pytestmark = pytest.mark.usefixtures("poison")

run = partial(results, kernels.delta_rule, backend="triton")
GATES = ("none", "constant", "head")
PACKED = [0, 0, 3, 67, 67, 130]  # empty at the start and inside; one full chunk
GPU_PACKED = [0, 0, 1, 65, 65, 1000, 2100]
OF_GENERAL = {torch.float32: 2e-5, torch.bfloat16: 1e-2}  # tolerances
ENTRIES = [
    (size, itemsize)
    for kernel in ("forward", "long")
    for gpu, size, itemsize in TABLE[f"delta_rule.{kernel}"]
    if gpu == 9
]
PREPARE, PASS, BACKWARD = (
    f"kernels.delta_rule.gpu.hopper_{name}" for name in ("prepare", "sequential_pass", "backward")
)
GENERAL_PASS, SOLVE, CHUNKS = (
    f"kernels.delta_rule.gpu.general.hopper_{name}" for name in ("sequential_pass", "solve", "chunks")
)
GLUON = {
    PREPARE: ("prepare",),
    PASS: ("scan_forward",),
    BACKWARD: ("gradients",),
    GENERAL_PASS: ("scan_forward",),
    SOLVE: ("solve_pairs",),
    CHUNKS: ("pair_products", "gradients"),
}
PLAN, GENERAL = gpu_plan.DeltaRule, general_plan.GeneralDeltaRule
IN_CHUNKS = PLAN, "prepare_path", "hopper_prepare"
NOT_BACKWARD = Case, "gluon_backward", False
# kernels that a row takes: modules in Gluon, and the attributes that choose them
KERNELS: dict[str, tuple[tuple[str, ...], list[tuple[Any, str, Any]]]] = {
    "one pass": ((BACKWARD,), [(PLAN, "backward_path", "one_pass")]),
    "two halves": ((BACKWARD,), [(PLAN, "backward_path", "one_pass_in_halves")]),
    "chunks": ((PREPARE,), [IN_CHUNKS, NOT_BACKWARD]),
    "forward pass": (
        (PREPARE, PASS),
        [(gpu_plan, "multiprocessors", lambda device: 1), (Case, "gluon", True), NOT_BACKWARD],
    ),
    **{
        f"chunks and {path}": ((PREPARE, BACKWARD), [IN_CHUNKS, (PLAN, "backward_path", path)])
        for path in ("one_pass", "one_pass_in_halves", "three_passes")
    },
    "general forward pass": ((GENERAL_PASS,), [(GENERAL, "forward_path", "hopper_pass")]),
    "general chunks": ((CHUNKS, SOLVE), [(GENERAL, "in_gluon", True)]),
}
# log decays of uniform numbers; those of trained models reach −48, and some channels are always strong
STRENGTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "bounded": lambda u: -5 * u,
    **{f"near {g}": lambda u, g=g: g * (0.9 + 0.2 * u) for g in (-2.5, -5, -20, -50, -100)},
    "resets": lambda u: torch.where(u < 0.05, -torch.inf, -0.05 * u),
    "one channel": lambda u: torch.where(torch.arange(u.shape[-1]) == 7, -5.0, -0.05 * u),
}
# steep tokens, and resets: the others are moderate, and no reference point serves both
STEEP: dict[str, tuple[slice, list[int]]] = {
    "steep": (slice(20, 40), [50]),
    "steep early": (slice(5, 15), []),
    "steep and a channel": (slice(10, 20), [23]),
    "some reset": (slice(0), [0, 31, 63, 64, 65, 100, 101]),
}


def change(a: dict[str, Tensor], name: str | None) -> None:
    """Make arguments special: in their decays, or as named."""
    if name in STRENGTHS:
        a["log_decay"] = STRENGTHS[name](torch.rand(a["log_decay"].shape)).to(a["log_decay"].dtype)
    elif name in STEEP:
        steep, resets = STEEP[name]
        a["log_decay"][:, steep] *= 400
        a["log_decay"][:, resets] = -torch.inf
        if name == "steep and a channel":
            a["log_decay"][..., 5] = -20
    elif name == "one key":  # the hardest triangular system of all
        a["k"] = a["k"][:, :1].expand_as(a["k"]).contiguous()
    elif name == "some β of 0":
        a["beta"][:, 5::7] = 0
    else:
        assert name is None, name


def small(T: int, *, change_to: str | None = None, streams: torch.dtype = torch.float32, **options: Any) -> Any:
    """Arguments of one head; with a `form`, those of the general rule."""
    sizes = {"B": 1, "G": 1, "K": 16, "V": 16, "dtype": torch.float32, **options}
    a = erasing(T, **sizes) if "form" in options else inputs(T, **sizes)
    change(a, change_to)
    return a if streams == torch.float32 else rounded(a, streams, ("q", "k", "v", "erase", "erase_write"))


def call(row: dict[str, Any], patch: pytest.MonkeyPatch) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the options of a call, after the kernels and the number of segments of its row were set."""
    sizes = dict(row)
    chosen = sizes.pop("kernels", None)
    modules, settings = KERNELS[chosen] if chosen else ((), [])
    for module in modules:
        patch.setitem(sys.modules, module, in_interpreter(module, *GLUON[module]))
    for setting in settings:
        patch.setattr(*setting)
    if count := sizes.pop("segments", 0):
        patch.setattr(gpu_plan, "segments", lambda *passed: count)
    names = ("through", "keep_states", "read_before")
    options = {name: sizes.pop(name) for name in names if name in sizes} | {"subheads": row.get("E", 1)}
    if "steps" in row:
        options["steps"] = row["steps"]
    return small(**{name: x for name, x in sizes.items() if name not in ("tolerance", "repeats")}), options


SLOW = pytest.mark.slow
SMALL = [
    *rows("lengths", *({"T": T, "gate": g} for T, g in ((1, "head"), (63, "none"), (65, "constant"), (130, "head")))),
    *rows("batch", T=65, B=3),
    *rows("large_beta", T=100, beta=(1, 2), correlated=(False, True), gate="none", K=32),
    *rows("one_key_repeated", T=130, beta=1, change_to="one key"),
    *rows("one_result", T=66, through=(("o",), ("state",))),
    *rows("everything_in_bf16", T=66, dtype=torch.bfloat16, tolerance=3e-2),
    # with V ≠ K and a first state: what is mixed up in one of them shows
    *rows("shared_keys", T=66, gate=("constant", "head"), decay="mixed", G=2, R=2, E=2, V=20, marks=SLOW),
    *rows(
        "packed_documents",
        *({"gate": gate, "state": gate != "constant"} for gate in GATES),
        **{"T": 130, "decay": "mixed", "R": 2, "documents": PACKED, "marks": SLOW},
    ),
    *rows("any_decay", T=130, gate="constant", decay="strong", marks=SLOW),
    *rows("any_decay", T=130, gate="head", decay=("strong", "mixed", "zero"), marks=SLOW),
    *rows(
        "sizes",
        *({"K": K, "V": V} for K, V in ((8, 6), (24, 40), (144, 16), (16, 130), (200, 72), (16, 300))),
        T=66,
        marks=SLOW,
    ),
    # blocks of keys and of values must not be mixed up with either
    *rows("long_values", {"K": 200, "V": 48}, {"K": 16, "V": 272}, T=20, E=2, documents=[0, 7, 20], marks=SLOW),
    # the interpreter cuts bf16 off, where a device rounds
    *rows("half_precision", {"streams": torch.bfloat16, "tolerance": 3e-2}, T=66, E=2, marks=SLOW),
    *rows("half_precision", {"streams": torch.float16, "tolerance": 1e-3}, T=66, E=2, marks=SLOW),
    # as where few and long sequences would leave a device idle; the last segment is shorter
    *rows(
        "segments",
        {"gate": "head", "K": 24, "V": 20, "decay": "mixed"},
        {"gate": "none", "K": 24, "V": 20, "decay": "mixed", "state": False},
        {"gate": "head", "K": 40, "V": 36},  # two blocks of columns
        **{"T": 300, "correlated": True, "segments": 3, "marks": SLOW},
    ),
    *rows("steps_in_segments", T=100, form="beta", steps=3, K=24, V=20, decay="mixed", segments=3, marks=SLOW),
    *rows(
        "steps_in_memory",
        **{"T": 25, "form": "beta", "steps": 3, "K": 272, "V": 20, "streams": torch.bfloat16, "tolerance": 3e-2},
        marks=SLOW,
    ),
    *rows(
        "lengths_of_the_general_rule",
        {"T": 1, "gate": "channel", "form": "erase"},
        {"T": 63, "gate": "none", "form": "erase"},
        {"T": 65, "gate": "constant", "form": "beta"},
        {"T": 65, "gate": "head", "form": "erase"},
        tolerance=2e-5,
    ),
    *rows("decays_per_channel", T=66, gate="channel", form=FORMS, read_before=(False, True), marks=SLOW),
    *rows(
        "steep_decays",
        **{"T": 70, "gate": ("head", "channel"), "read_before": (False, True), "form": "erase"},
        **{"change_to": "steep", "tolerance": 3e-5, "marks": SLOW},
    ),
    *rows(
        "shared_keys_of_the_general_rule",
        **{"T": 130, "gate": ("head", "channel"), "form": "both", "G": 2, "R": 2, "E": 2, "V": 20},
        **{"documents": PACKED, "marks": SLOW},
    ),
    *rows(
        "steps_with_subheads_and_steep_decays",
        **{"T": 23, "B": 2, "gate": ("head", "channel"), "form": "both", "steps": 3, "E": 2},
        **{"change_to": "steep early", "tolerance": 3e-5, "marks": SLOW},
    ),
    *rows("blocks_of_keys", T=20, gate="channel", form="erase", K=80, V=24, marks=SLOW),
    *rows(
        "strengths_of_decays",
        **{"T": 70, "gate": "channel", "form": "beta", "change_to": (*STRENGTHS,), "tolerance": 3e-5},
        marks=SLOW,
    ),
]
DOCUMENTS_IN_GLUON = [0, 0, 5, 100, 150]
IN_GLUON = [
    *rows(
        "all_gradients_in_one_pass",
        *({"T": 1}, {"T": 130, "decay": "mixed"}, {"T": 70, "R": 2, "E": 2}),
        {"T": 150, "documents": DOCUMENTS_IN_GLUON},
        **{"V": 128, "gate": GATES, "kernels": "one pass"},
    ),
    *rows(
        "chunks",
        *({"T": 1}, {"T": 130, "decay": "strong", "correlated": True}, {"T": 70, "R": 2, "E": 2, "beta": 2}),
        {"T": 150, "documents": DOCUMENTS_IN_GLUON, "decay": "mixed"},
        **{"gate": GATES, "kernels": "chunks", "change_to": "some β of 0"},
    ),
    *rows(
        "forward_pass_in_gluon",
        {"T": 1, "gate": "head"},
        {"T": 300, "V": 128, "gate": "constant"},  # two chains in a program
        {"T": 70, "R": 2, "E": 2, "V": 192, "gate": "none", "beta": 2},
        {"T": 70, "R": 2, "E": 2, "V": 256, "gate": "head"},
        {"T": 400, "documents": [0, 0, 3, 67, 67, 400], "gate": "head", "decay": "mixed"},
        {"T": 50, "steps": 3, "gate": "head", "decay": "mixed", "documents": [0, 0, 1, 50]},
        {"T": 450, "gate": "head", "beta": 2, "segments": 3},  # whose transitions are not zero
        {"T": 450, "R": 2, "gate": "constant", "decay": "mixed", "segments": 3},
        {"T": 450, "gate": "none", "documents": [0, 3, 3, 450], "segments": 6},
        **{"V": 64, "form": "beta", "kernels": "forward pass", "keep_states": (True, False, "nothing")},
    ),
    *rows("resets", T=130, G=2, V=128, gate="head", change_to="some reset", kernels="chunks and one_pass"),
    # five chunks
    *rows("halves", T=270, B=2, E=2, V=128, decay="mixed", through=(("o", "state"), ("o",)), kernels="two halves"),
    *rows(
        "steps",
        {"T": 135, "steps": 2, "kernels": "chunks and one_pass_in_halves"},
        {"T": 30, "steps": 3, "R": 2, "documents": [0, 0, 1, 30], "kernels": "chunks and one_pass"},
        {"T": 30, "steps": 3, "E": 2, "gate": "constant", "kernels": "chunks and three_passes"},
        **{"V": 128, "form": "beta"},
    ),
    *rows(
        "general_forward_pass_in_gluon",
        {"T": 1, "form": "beta"},
        {"T": 300, "V": 128, "form": "beta"},
        {"T": 70, "R": 2, "E": 2, "form": "erase"},
        {"T": 400, "documents": [0, 0, 3, 67, 67, 400], "form": "beta"},
        {"T": 70, "steps": 3, "documents": [0, 0, 1, 70], "form": "beta"},
        **{"V": 64, "gate": "channel", "kernels": "general forward pass", "keep_states": (True, False)},
        tolerance=2e-5,
    ),
    *rows(
        "chunks_in_gluon",
        {"T": 70, "K": 128, "form": "beta"},
        {"T": 70, "V": 128, "read_before": True, "form": "beta"},
        {"T": 130, "documents": PACKED, "form": "per channel"},
        {"T": 70, "R": 2, "E": 2, "V": 256, "form": "both"},
        {"T": 30, "steps": 3, "read_before": True, "documents": [0, 0, 1, 30], "form": "erase"},
        **{"K": 64, "V": 64, "gate": "channel", "change_to": (None, "steep and a channel")},
        **{"kernels": "general chunks", "tolerance": 3e-5},
    ),
    *rows(
        "chunks_in_gluon",
        *({"T": 70, "V": 128, "form": "beta"}, {"T": 30, "steps": 3, "documents": [0, 0, 1, 30], "form": "erase"}),
        **{"K": 64, "V": 64, "gate": "channel", "change_to": "steep and a channel", "kernels": "general chunks"},
        tolerance=3e-5,
    ),
]


def agree_with_the_loop(row: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Compare all results of a row, or those without gradients if nothing is kept for any."""
    a, options = call(row, patch)
    if options.get("keep_states") == "nothing":
        del options["keep_states"]
        without_gradients_agree(a, 2e-5, **options)
        return
    exact = torch.float64 if "form" in row else torch.float32
    actual = agree(kernels.delta_rule, a, row.get("tolerance"), exact=exact, **options)
    assert actual["o"].dtype == a["q"].dtype
    if "through" in row:
        assert bool(actual["gradient of q"].any()) == ("o" in row["through"])


def without_gradients_agree(a: dict[str, Tensor], tolerance: float, **options: Any) -> None:
    """Compare the output and the state of a call without gradients with those of the loop."""
    both = []
    for backend in ("triton", "reference"):
        with torch.no_grad(), kernels.backend(backend):
            both.append(kernels.delta_rule(**a, **options, return_state=True))
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@interpreted
@pytest.mark.parametrize("row", SMALL)
def test_small(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    agree_with_the_loop(row, monkeypatch)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("row", IN_GLUON)
def test_step_by_step(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    agree_with_the_loop({"K": 128, **row}, monkeypatch)


@interpreted
@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", OF_GENERAL)
@pytest.mark.parametrize("documents", [None, [0, 0, 1, 1, 34, 35]])
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", ["none", "constant", "head", "channel"])
def test_steps(
    gate: str,
    form: str,
    steps: int,
    read_before: bool,
    documents: list[int] | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
):
    # more than one chunk of 64 rows; with three steps, a token begins in one and ends in the next
    row = {"T": 35, "V": 12, "gate": gate, "form": form, "steps": steps, "documents": documents}
    agree_with_the_loop(
        row | {"streams": dtype, "tolerance": OF_GENERAL[dtype], "read_before": read_before}, monkeypatch
    )


@pytest.mark.slow
@interpreted
def test_what_is_kept_for_the_gradients_changes_only_memory(monkeypatch: pytest.MonkeyPatch):
    a, actual, saved = small(130, gate="head", E=2), [], []
    for keep, few in ((True, 0), (False, 32), (False, 31)):  # its keys have 32 channels in all subheads
        monkeypatch.setattr(gpu_op, "FEW_ENOUGH", few)
        numbers: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, n=numbers: n.append(x.numel()) or x, lambda x: x):
            actual.append(agree(kernels.delta_rule, a, subheads=2, keep_states=keep))
        saved.append(sum(numbers))
    for each in actual[1:]:
        assert all(torch.equal(x, actual[0][name]) for name, x in each.items())
    assert saved[0] > saved[1] > saved[2]


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("form", ["beta", "both", "per channel", "erase"])
def test_what_the_general_rule_keeps_changes_only_memory(form: str):
    a = small(70, gate="channel", form=form)
    kept, again = (agree(kernels.delta_rule, a, exact=torch.float64, keep_states=keep) for keep in (True, False))
    assert all(torch.equal(x, again[name]) for name, x in kept.items())


@interpreted
def test_beta_of_zero_has_a_gradient():
    a = small(70, beta=0)
    actual = run(a)
    expected = run(a, backend="reference")
    for name in ("k", "v"):  # nothing is written: only β can change that
        assert not expected.pop(f"gradient of {name}").any()
        assert actual.pop(f"gradient of {name}").abs().max() < 1e-12
    assert expected["gradient of beta"].any()
    assert_same(actual, expected)


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
    a = small(length, K=K, V=V, E=2, streams=torch.bfloat16, **options)
    actual = agree(kernels.delta_rule, a, 3e-2, subheads=2)
    with torch.no_grad(), kernels.backend("triton"):
        o, end = kernels.delta_rule(**a, subheads=2, return_state=True)
    assert torch.equal(o, actual["o"])
    assert torch.equal(end, actual["state"])


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
    agree(kernels.delta_rule, a)


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
    agree(kernels.delta_rule, a)
    assert len(cuts) == 2  # forward and backward
    assert all(cuts)


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
    without_gradients_agree(a, 1e-5, subheads=3)


@interpreted
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_single_token_of_the_general_rule(form: str, steps: int, read_before: bool):
    a = small(1, B=2, gate="channel", form=form, steps=steps, R=2, E=2, V=20)
    without_gradients_agree(a, 1e-5, steps=steps, read_before=read_before, subheads=2)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("length", [1, 66])
def test_views_of_one_projection(length: int):
    fused = torch.rand(2, length, 50) / 4
    q, v, k = (x.unflatten(-1, (-1, 16)) for x in fused[..., :48].split(16, -1))
    beta, decay = fused[..., 48:].split(1, -1)
    views = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": -decay}
    copies = {name: x.contiguous() for name, x in views.items()}
    actual, expected = run(views), run(copies)
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


def test_too_many_channels_of_keys():
    a = {name: x.to(DEVICE) for name, x in small(5, K=300, form="erase").items()}
    with kernels.backend("triton"), pytest.raises(kernels.UserError, match="which takes keys of at most 256 channels"):
        kernels.delta_rule(**a)


@pytest.mark.slow
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("missing", [(), ("o",), ("scores", "u", "states")])
def test_shared_memory_of_the_forward_pass_in_gluon(missing: tuple[str, ...], chains: int):
    types = dict.fromkeys(("gates", "initial", "final"), "*fp32") | {"segments": "*i32", "scale": "fp32"}
    types |= {"inverse": "*fp16"} if "scores" in missing else {}
    fixed = {"M": 16, "E": 1, "R": 1, "STEPS": 1, "V": 128, "CHAINS": chains} | dict.fromkeys(missing)
    assert shared_memory(PASS, "scan_forward", fixed, types, warps=4) <= MOST


def test_shared_memory_of_the_general_forward_pass_in_gluon():
    types = {"total": "*fp32", "initial": "*fp32", "final": "*fp32", "beta": "*fp32", "segments": "*i32"}
    assert shared_memory(GENERAL_PASS, "scan_forward", {"M": 16, "E": 1, "STEPS": 1, "V": 128}, types, warps=4) <= MOST


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


@interpreted
@pytest.mark.parametrize("length", [1.0, 1.5])
def test_bounds_step_by_step(length: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, PREPARE, in_interpreter(PREPARE, "prepare"))
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
@pytest.mark.parametrize("missing", [(), ("from_columns", "from_t", "before_t", "across")])
def test_the_one_pass_compiles_for_hopper(missing: tuple[str, ...]):
    fp32 = ("gates", "dbeta", "from_columns", "from_t", "before_t", "across", "dinitial")
    types = dict.fromkeys(fp32, "*fp32") | {"scale": "fp32", "segments": "*i32"}
    fixed = {"M": 8, "E": 2, "R": 1, "STEPS": 1, "dfinal": None} | dict.fromkeys(missing)
    assert shared_memory(BACKWARD, "gradients", fixed, types) <= MOST


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


# On a device: against PyTorch in fp32, and the general rule in fp64.

REAL_SIZES: list[dict[str, Any]] = [
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
]
# neither powers of two nor short: Gated DeltaNet 1.3B and H1 1.3B, long values, and long heads
LONG = [(200, 400), (192, 384), (256, 512), (128, 512), (64, 1024), (144, 80)]
IN_MEMORY = [(512, 128), (600, 48), (1024, 64), (2048, 128)]
EVERY_LONG = [{"K": K, "V": V} for K, V in LONG + IN_MEMORY]
BF16, FP32 = torch.bfloat16, torch.float32
ON_DEVICE = [
    *rows("real_sizes", *REAL_SIZES, gate=GATES),
    # whole, and in segments; what one program does while another waits differs from run to run
    *rows("shared_multiprocessors", {"T": 4096, "B": 2, "G": 16}, {"T": 8192, "G": 8}, gate=GATES, repeats=20),
    *rows("resets", T=1100, B=4, G=16, K=(64, 128, 512), gate="head", change_to="some reset"),
    *rows(
        "steps",
        {"T": 1500, "B": 4, "G": 16},  # in halves
        {"T": 301, "B": 4, "G": 32},  # in one pass
        {"T": 301, "G": 2, "R": 2, "E": 2},
        {"T": 5000, "G": 2},  # in segments
        {"T": 1500, "G": 2, "documents": [0, 0, 5, 6, 700, 700, 1500]},
        {"T": 301, "G": 2, "K": 512},
        **{"form": "beta", "steps": (2, 3), "repeats": 1},
    ),
    *(
        row
        for options in ({"B": 2, "G": 3, "R": 2}, {"G": 2, "documents": [0, 0, 5, 650, 650, 1000], "decay": "mixed"})
        for row in rows(
            "long_keys_and_values",
            *({**sizes, **options} for sizes in EVERY_LONG),
            *({"K": K, "V": V, "streams": FP32, **options} for K, V in LONG),
            **{"T": 1000, "correlated": True, "repeats": 20},
        )
    ),
    # states are recomputed
    *rows("long_subheads", *EVERY_LONG, T=500, G=2, E=4),
    *rows("long_segments", *EVERY_LONG, T=1000, G=2, decay="mixed", segments=3),
]


def on_device(T: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Tensor]:
    """As mixers make them: gates and states in fp32."""
    return {name: x.cuda() for name, x in small(T, streams=dtype, **options).items()}


def agree_on_device(a: dict[str, Tensor], **options: Any) -> None:
    """Compare outputs, and less strictly gradients, relative to their norms; what a reset erases is exactly zero."""
    actual = run(a, **options)
    exact = {name: x.float() if x.is_floating_point() else x for name, x in a.items()}
    expected = results(kernels.delta_rule, exact, backend="torch", **options)
    for name, x in expected.items():
        if not x.any():
            assert not actual[name].any(), name
            continue
        error = float((actual[name].double() - x.double()).norm() / x.double().norm())
        bf16 = 5e-3 if name in ("o", "state") else 1e-2
        assert error <= (1e-5 if a["q"].dtype == torch.float32 else bf16), f"{name}: {error:.2g}"
    assert_left_alone(a, actual)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ON_DEVICE)
def test_on_device(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    on_host, options = call({"K": 128, "V": 128, "streams": torch.bfloat16, **row}, monkeypatch)
    a = {name: x.cuda() for name, x in on_host.items()}
    agree_on_device(a, **options)
    assert_repeats(partial(run, a, **options), row.get("repeats", 0))


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
    agree_on_device(a)
    assert_repeats(partial(run, a), 50)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [300, 8192])  # whole, and in segments
def test_gates_of_other_dtypes(T: int):
    a = on_device(T, G=2, K=128, V=128, gate="head")
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        agree_on_device({**a, **{name: a[name].to(dtype) for name in ("beta", "log_decay")}})


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
        actual.append(run(repeated, subheads=E))
    three, one, *others = actual
    assert all(torch.equal(each[name], one[name]) for each in others for name in one)
    exact = {name: x.float() if x.is_floating_point() else x for name, x in a.items()}
    for name, x in results(kernels.delta_rule, exact, backend="torch", subheads=E).items():
        error, of_three = (float((y[name].double() - x.double()).norm()) for y in (one, three))
        assert error <= max(1e-2 * float(x.double().norm()), 1.2 * of_three), name


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


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["none", "head"])
@pytest.mark.parametrize("through", [("o", "state"), ("o",)])
def test_sequences_that_fill_half_of_a_gpu(gate: str, through: tuple[str, ...]):
    rows = multiprocessors(torch.device("cuda")) // 2 // 8
    a = on_device(2500, B=rows, G=8, K=128, V=128, gate=gate)
    to = gpu_op.Arguments(*(a[name] for name in ("q", "k", "v", "beta")), None, None, None, 1, 1.0, gpu_op.ALL).plan
    if to.device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        assert to.halved
    assert_repeats(partial(run, a, through=through), 1)
    agree_on_device(a, through=through)


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


GENERAL_ON_DEVICE = [
    *rows(
        "strengths_of_decays",
        *({"K": K, "V": V} for K, V in ((64, 128), (128, 128), (192, 64))),
        **{"T": 300, "B": 2, "R": 2, "form": "beta", "change_to": (*STRENGTHS,)},
    ),
    *rows("lengths_and_strengths", T=(1, 2, 63, 64, 65, 1025, 8193), beta=(0, 1, 2), form="beta"),
    *(
        row
        for documents in (None, GPU_PACKED)
        for row in rows(
            "steps",
            {"K": 128, "V": 128, "gate": "head", "form": "beta", "steps": 2},
            {"K": 128, "V": 128, "gate": "channel", "form": "erase", "steps": 3},
            {"K": 64, "V": 64, "gate": "none", "form": "both", "steps": 3},
            {"K": 64, "V": 64, "gate": "constant", "form": "per channel", "steps": 2},
            {"K": 64, "V": 64, "gate": "channel", "form": "two keys", "steps": 1},
            {"K": 64, "V": 64, "gate": "head", "form": "beta", "steps": 3, "streams": FP32},
            {"K": 64, "V": 64, "gate": "channel", "form": "both", "steps": 2, "streams": FP32},
            **{"T": 301 if documents is None else documents[-1], "B": 2, "R": 2, "documents": documents, "repeats": 1},
        )
    ),
    # blocks of values that leave most of the device idle, and those that do not
    *rows("few_sequences_and_many", T=130, B=(1, 40), G=2, form="beta"),
]


def agree_in_fp64(row: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Compare all results of the general rule with PyTorch in fp64, and repeat them."""
    on_host, options = call({"gate": "channel", "K": 128, "V": 128, "streams": torch.bfloat16, **row}, patch)
    a = {name: x.cuda() for name, x in on_host.items()}
    agree(kernels.delta_rule, a, OF_GENERAL[a["q"].dtype], exact=torch.float64, **options)
    assert_repeats(partial(run, a, **options), row.get("repeats", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("row", GENERAL_ON_DEVICE)
def test_general_rule_on_device(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    agree_in_fp64(row, monkeypatch)


@pytest.mark.gpu
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", OF_GENERAL)
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("form", ["beta", "both", "per channel", "erase"])
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (64, 64), (64, 128), (128, 128), (256, 256), (100, 80)])
def test_sizes_of_the_general_rule_on_device(
    K: int, V: int, gate: str, form: str, read_before: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    row = {"T": 300, "B": 2, "G": 2, "R": 2, "K": K, "V": V, "gate": gate, "form": form, "read_before": read_before}
    agree_in_fp64(row | {"decay": "mixed" if gate == "channel" else "mild", "streams": dtype}, monkeypatch)


@pytest.mark.gpu
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", OF_GENERAL)
@pytest.mark.parametrize("decay", ["mild", "zero", "mixed", "strong"])
@pytest.mark.parametrize("documents", [None, GPU_PACKED])
def test_decays_and_documents_of_the_general_rule_on_device(
    documents: list[int] | None, decay: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    row = {"T": 2100, "G": 2, "R": 2, "E": 2, "form": "beta", "decay": decay, "documents": documents}
    agree_in_fp64(row | {"streams": dtype, "repeats": 1}, monkeypatch)
