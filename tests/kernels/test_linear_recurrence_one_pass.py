"""Passes of the linear recurrence in Gluon: step by step without a GPU, and as they are on one."""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import kernels

from .comparisons import assert_repeats
from .comparisons import interpreted as without_a_gpu
from .gluon_interpreter import Language, interpreted
from .hopper import MOST, shared_memory
from .recurrences import inputs, results, rounded, rows

pytest.importorskip("triton")
from kernels.core.recurrence import Recurrences
from kernels.gpu import plan
from kernels.gpu.device import GPUS, assumed
from kernels.gpu.paths import select
from kernels.linear_recurrence.gpu import one_pass
from kernels.linear_recurrence.gpu import op as gpu_op
from kernels.linear_recurrence.gpu import plan as gpu_plan
from kernels.linear_recurrence.gpu import select as gpu_select
from kernels.linear_recurrence.gpu.call import Arguments
from kernels.linear_recurrence.gpu.select import Case
from kernels.value_decay_recurrence.gpu import op as exchanged

from .test_linear_recurrence_triton import compare, compare_row, short_segments
from .test_value_decay_recurrence import inputs as inputs_of_exchanged

__all__ = ["short_segments"]  # a fixture
pytestmark = pytest.mark.usefixtures("poison")
run = partial(results, kernels.linear_recurrence)
GLUON, HEAD = "kernels.linear_recurrence.gpu.hopper_vector_decay", "kernels.linear_recurrence.gpu.hopper_scalar_decay"


def small(T: int, gate: str = "channel", **options: Any) -> dict[str, torch.Tensor]:
    arguments = {"B": 1, "G": 1, "K": 128, "V": 128, "beta": None, "dtype": torch.float32, **options}
    return inputs(T, gate=gate, **arguments)


@pytest.fixture(autouse=True)
def half_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keys of 64 channels take the one pass as well, which they do not outside of these tests."""
    monkeypatch.setattr(gpu_select, "GLUON_KEYS", (64, 128))
    plan.of_rows.cache_clear()
    yield
    plan.of_rows.cache_clear()


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that few sequences fill."""
    monkeypatch.setattr(gpu_select, "multiprocessors", lambda device: 2)
    plan.of_rows.cache_clear()


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels for Hopper, step by step on the CPU."""
    monkeypatch.setitem(sys.modules, GLUON, interpreted(GLUON, "outputs", "states", "gradients"))
    monkeypatch.setattr(Case, "gluon", property(lambda case: case.gate == "channel" and not case.beta))
    monkeypatch.setattr(gpu_op, "largest", lambda op, dtype, device: 256)
    plan.of_rows.cache_clear()
    yield
    plan.of_rows.cache_clear()


@pytest.mark.slow
@without_a_gpu
@pytest.mark.parametrize("K", [128, 256])  # values, in one or two parts
@pytest.mark.parametrize("options", [{"T": 70}, {"T": 130, "documents": [0, 0, 5, 130]}, {"T": 70, "state": False}])
def test_gradients_of_decays_per_value(options: dict[str, Any], K: int, gluon: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchanged, "largest", lambda op, dtype, device: 256)
    passes: list[torch.Size] = []
    fill = one_pass.OnePass.output

    def output(call: one_pass.OnePass, o: torch.Tensor, *rest: Any, **options: Any) -> Any:
        passes.append(o.shape)
        return fill(call, o, *rest, **options)

    monkeypatch.setattr(one_pass.OnePass, "output", output)
    a = inputs_of_exchanged(**options, decay="mixed", B=2, H=2, K=K, V=64, dtype=torch.float32)
    compare(a, op=kernels.value_decay_recurrence)
    assert passes == [(len(a["q"]), options["T"], 2 * K // 128, 128)]


def same_with_states_kept_or_not(a: dict[str, torch.Tensor], E: int = 1) -> None:
    repeated, kept = (run(a, backend="triton", subheads=E, keep_states=keep) for keep in (False, True))
    assert all(torch.equal(kept[name], repeated[name]) for name in repeated)


@pytest.mark.slow
@without_a_gpu
@pytest.mark.parametrize(
    "options",
    [
        {"T": 130, "state": False},
        {"T": 70, "R": 2, "E": 2, "decay": "mixed"},
        {"T": 320, "documents": [0, 0, 5, 300, 320, 320]},  # there can be more chunks than there are
    ],
)
def test_states_that_are_kept_change_no_bit(options: dict[str, Any], gluon: None):
    same_with_states_kept_or_not(small(**options), options.get("E", 1))


@without_a_gpu
@pytest.mark.parametrize("documents", [None, [0, 0, 5, 300, 320, 320]])
def test_states_that_are_kept_of_segments(documents: list[int] | None, gluon: None, short_segments: None):
    same_with_states_kept_or_not(small(320, documents=documents))


@without_a_gpu
@pytest.mark.parametrize("keep", [False, True])
def test_what_is_kept(keep: bool, gluon: None, monkeypatch: pytest.MonkeyPatch):
    """The states before all chunks are computed by the outputs, and by the gradients unless they are kept."""
    passes = []
    states = one_pass._states
    monkeypatch.setattr(one_pass, "_states", lambda *arguments: passes.append(arguments) or states(*arguments))
    run(small(130), backend="triton", keep_states=keep)
    assert len(passes) == (not keep)


@without_a_gpu
@pytest.mark.parametrize(
    ("options", "room", "divided"), [({"E": 2}, 1, [1, 1, 1]), ({"R": 2, "state": False}, 2, [2, 2])]
)
def test_few_rows_at_a_time(
    options: dict[str, Any], room: int, divided: list[int], gluon: None, monkeypatch: pytest.MonkeyPatch
):
    """The backward pass recomputes large states for a few rows of the batch at a time, with equal bits."""
    launches, gradients = [], one_pass._gradients
    monkeypatch.setattr(one_pass, "_gradients", lambda of: launches.append(of.B) or gradients(of))
    monkeypatch.setattr(gpu_plan, "multiprocessors", lambda device: 2 * room)  # both have two recurrences in a row
    differentiate = partial(run, small(70, B=3, **options), backend="triton", subheads=options.get("E", 1))
    whole = differentiate(keep_states=False)
    monkeypatch.setattr(gpu_plan, "LARGE_STATES", 0)
    plan.of_rows.cache_clear()
    rows, kept = (differentiate(keep_states=keep) for keep in (False, True))
    assert launches == [3, *divided, 3]
    assert all(torch.equal(whole[name], rows[name]) and torch.equal(whole[name], kept[name]) for name in whole)


@pytest.mark.parametrize(
    ("B", "H", "E", "rows"),
    [(8, 8, 8, 2), (8, 8, 4, 4), (8, 8, 2, 8), (3, 8, 8, 2), (97, 8, 8, 2), (4, 5, 8, 3), (1, 64, 8, 1), (2, 1, 1, 2)],
)
def test_rows_at_a_time(B: int, H: int, E: int, rows: int):
    """On 132 multiprocessors; small states are recomputed at the same time. No group of rows is cut into segments."""
    with assumed(GPUS["H200"]):
        for batch in (B, rows):
            q, v = torch.empty(batch, 4096, H * E, 128, device="meta"), torch.empty(batch, 4096, H, 128, device="meta")
            layout = q.shape, q.stride(), q.stride(), v.shape, v.stride(), torch.bfloat16, q.device
            made = gpu_plan.LinearRecurrence.of(
                None, 4096, *layout, "channel", False, 1.0, E, True, True, torch.bfloat16
            )
            assert made.path == "hopper_vector_decay"
            assert made.rows_at_a_time == rows
            assert not made.segmented or rows == B


@without_a_gpu
def test_inputs_with_gaps_that_are_not_aligned(gluon: None):
    a = small(70, G=2)
    for name in "qkv":
        B, T, H, D = a[name].shape
        a[name] = a[name].new_zeros(B, T, H * D + 8)[..., 1 : H * D + 1].unflatten(2, (H, D)).copy_(a[name])
        assert a[name].data_ptr() % 16
    compare(a)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("offset", "gap"), [(1, 8), (0, 8), (0, 16)])
def test_what_kernels_copy_is_aligned(offset: int, gap: int, rounded: bool, gluon: None):
    """Other addresses and head strides are copied first, since the kernels do not compile for them."""

    def wide(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        memory = torch.zeros(*shape[:-1], shape[-1] + gap, dtype=dtype)
        return memory[..., offset : offset + shape[-1]]

    q, k, v = (wide(2, 70, 2, 128) for _ in "qkv")
    decays = torch.zeros(2 * 70 * 2 * 128 + 8, dtype=torch.bfloat16 if rounded else torch.float32)
    log_decay = decays[offset : offset - 8].view(2, 70, 2, 128)
    call = gpu_op.call_of(Arguments(q, k, v, log_decay, None, None, None, 1.0, 1, False), torch.zeros_like(v))
    assert all(x is not None and x.data_ptr() % 16 == 0 for x in (call.q, call.k, call.v, call.grad, call.log_decay))
    assert all(x.stride(2) % 16 == 0 for x in (call.q, call.k, call.v))


@pytest.mark.slow
@without_a_gpu
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("steep", [-2.0, -2.6, -6.0, -9.0, -50.0])
def test_steep_channels_beside_others(steep: float, K: int, gluon: None):
    """On both sides of what factors around one reference point per chunk, or per 16 tokens, can hold."""
    a = small(200, G=2, K=K)
    a["log_decay"][:, 70:140, :, ::5] = steep
    a["log_decay"][:, 150:, 1, 3] = steep
    compare(a)


@pytest.mark.slow
@without_a_gpu
@pytest.mark.parametrize(
    ("tokens", "decay"), [(slice(None), -1.8), (slice(40, 90, 40), -60.0), (slice(40, 90, 45), [[-60.0], [-torch.inf]])]
)
def test_factors_of_a_state_in_fp32(
    tokens: slice, decay: float | list[list[float]], gluon: None, monkeypatch: pytest.MonkeyPatch
):
    """Factors at both sides of the start of a chunk are small enough for their product to be 0 in fp32."""
    for name in ("float16", "bfloat16", "float32", "float64"):
        monkeypatch.setattr(Language, name, torch.float32)
    a = small(200)
    a["log_decay"][0, tokens, 0, ::4] = torch.tensor(decay)
    compare(a, tolerance=3e-5)


@pytest.mark.slow
@without_a_gpu
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("decay", [-0.05, -1.0, -2.3, -5.0, -9.0])
def test_later_tokens_change_no_bit(decay: float, K: int, gluon: None, monkeypatch: pytest.MonkeyPatch):
    """With the roundings of a device, although decays of later tokens decide how the scores of a chunk are computed."""
    for name in ("float16", "bfloat16", "float32"):
        monkeypatch.setattr(Language, name, getattr(torch, name))
    a = rounded(small(130, K=K), torch.bfloat16)
    a["log_decay"] = decay * (1 + 0.3 * torch.randn_like(a["log_decay"]).tanh())
    compare(a, tolerance=2e-2)
    with kernels.backend("triton"), torch.no_grad():
        o, _ = kernels.linear_recurrence(**a)
        for token in (3, 17, 31, 33, 63, 100):
            for later in (-0.01, -4.0, -30.0, -torch.inf):
                b = {name: x.clone() for name, x in a.items()}
                b["log_decay"][:, token:] = later
                for name in "qkv":
                    b[name][:, token:] *= 3
                assert torch.equal(kernels.linear_recurrence(**b)[0][:, :token], o[:, :token])


@pytest.mark.slow
@without_a_gpu
@pytest.mark.parametrize("length", [64, 320])
@pytest.mark.parametrize("keep", [False, True])
def test_registered_as_it_should_be(length: int, keep: bool, gluon: None, short_segments: None):
    a = small(length)
    tensors = [a[name].requires_grad_() for name in ("q", "k", "v", "log_decay")]
    arguments = (*tensors, None, a["initial_state"].requires_grad_(), None, 0.25, 1, keep, False)
    torch.library.opcheck(torch.ops.token_mixer_zoo.linear_recurrence.default, arguments)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels for all other decays, likewise."""
    monkeypatch.setitem(sys.modules, HEAD, interpreted(HEAD, "states", "gradients"))
    launch = gpu_plan.launch  # the others of these passes have none for so many channels in fp32
    monkeypatch.setattr(gpu_plan, "launch", lambda kernel, size, *where: launch(kernel, min(size, 64), *where))
    monkeypatch.setattr(Case, "gluon", property(lambda case: case.gate != "channel"))
    monkeypatch.setattr(gpu_op, "largest", lambda op, dtype, device: 128)
    plan.of_rows.cache_clear()
    yield
    plan.of_rows.cache_clear()


OTHERS = ("none", "constant", "head")
MIXED = {"T": 130, "decay": "mixed"}
SHARED = {"T": 70, "B": 2, "R": 2, "E": 2}
DOCUMENTS = {"T": 130, "documents": [0, 0, 5, 130]}
LONG_DOCUMENTS = {"T": 600, "documents": [0, 0, 5, 560, 600]}  # one of more than one block
SEGMENTS = {"T": 320, "documents": [0, 0, 5, 300, 320, 320]}
CHANNEL = [
    *(
        row
        for low, tolerance in (([], 1e-5), (["log_decay"], 3e-3))
        for row in rows(
            "step_by_step",
            *({"T": 1}, {"T": 64, "state": False}, MIXED, {"T": 70, "decay": "strong"}, {"T": 70, "decay": "zero"}),
            *(SHARED, LONG_DOCUMENTS, {**MIXED, "K": 64}, {"T": 70, "K": 64, "decay": "strong"}, {**SHARED, "K": 64}),
            {"T": 200, "K": 64, "documents": [0, 0, 5, 160, 200]},
            {**SHARED, "V": 256},  # in two parts
            {**DOCUMENTS, "K": 64, "V": 256},
            {**SHARED, "K": 256, "V": 64},  # keys in two parts, values with as many zeros
            {**DOCUMENTS, "K": 256, "V": 192, "decay": "mixed"},
            **{"low": low, "tolerance": tolerance, "marks": pytest.mark.slow},
        )
    ),
    *rows("segments", {"T": 320}, SEGMENTS, K=(64, 128), fixtures=["gluon", "short_segments"]),
    *rows("one_result", T=70, state=False, through=(("o",), ("state",))),
    *rows("decays_without_gradients", T=130, hold=True),
    # sums of decays are in fp32, as only calls in bf16 come here on a GPU
    *(
        row
        for low, tolerance in (([], 2e-5), (["log_decay"], 5e-3))
        for row in rows(
            "resets",
            *({"T": 130}, {"T": 130, "documents": [0, 0, 5, 90, 130]}),
            **{"resets": True, "low": low, "tolerance": tolerance, "marks": pytest.mark.slow},
        )
    ),
]
ALL = [{"T": 1}, {"T": 64, "state": False}, MIXED, {"T": 70, "decay": "strong"}, SHARED]
ALL += [{"T": 140, "documents": [0, 0, 5, 138, 140]}]
NARROW: list[dict[str, Any]] = [
    {**MIXED, "V": 64},
    {"T": 70, "V": 64, "beta": "random", "decay": "strong"},  # Mamba-2's sizes
    {"T": 140, "V": 64, "beta": "random", "B": 2, "R": 2, "E": 2},
    {"T": 140, "V": 64, "beta": "random", "documents": [0, 0, 5, 138, 140]},
    {"T": 130, "beta": "random"},
]
SLOW, NIGHTLY = pytest.mark.slow, (pytest.mark.slow, pytest.mark.nightly)
HEADS = [
    # decays are summed in fp32, since only calls in bf16 come here on a GPU
    *rows("step_by_step", *ALL, gate=OTHERS, tolerance=2e-5, marks=SLOW),
    *rows("step_by_step", *NARROW, gate="head", tolerance=2e-5, marks=SLOW),
    *rows("step_by_step", NARROW[1], gate="none", tolerance=2e-5, marks=SLOW),
    *rows("step_by_step", NARROW[2], gate="constant", tolerance=2e-5, marks=SLOW),
    *rows("step_by_step", LONG_DOCUMENTS, gate="head", tolerance=2e-5, marks=SLOW),
    *rows("step_by_step", LONG_DOCUMENTS, gate=("none", "constant"), tolerance=2e-5, marks=NIGHTLY),
    *rows("resets", T=130, gate="head", G=2, resets=True, tolerance=2e-5, marks=SLOW),
    *rows("segments", SEGMENTS, gate=OTHERS, fixtures=["head", "short_segments"], marks=SLOW),
    *rows("segments", T=320, gate="head", fixtures=["head", "short_segments"], marks=SLOW),
    *rows("segments", T=320, gate=("none", "constant"), fixtures=["head", "short_segments"], marks=NIGHTLY),
    *rows("one_result", T=70, gate="head", state=False, through=(("o",), ("state",))),
    *rows("decays_without_gradients", T=130, gate="head", hold=True),
]
OF_ONE_PASS = {"K": 128, "V": 128, "beta": None}


@without_a_gpu
@pytest.mark.parametrize("row", CHANNEL)
def test_decays_per_channel(row: dict[str, Any], request: pytest.FixtureRequest):
    compare_row({**OF_ONE_PASS, "gate": "channel", "fixtures": ["gluon"], **row}, request)


@without_a_gpu
@pytest.mark.parametrize("row", HEADS)
def test_other_decays(row: dict[str, Any], request: pytest.FixtureRequest):
    compare_row({**OF_ONE_PASS, "fixtures": ["head"], **row}, request)


@pytest.mark.parametrize(
    ("B", "H", "T", "whole"), [(4, 8, 4096, True), (4, 64, 4096, True), (1, 8, 65536, True), (1, 8, 2048, False)]
)
def test_one_pass_is_for_what_fills_half_of_a_gpu(B: int, H: int, T: int, whole: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_select, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Case, "gluon", True)
    x = torch.empty(B, T, H, 128, dtype=torch.bfloat16, device="meta")
    sizes = (x.shape, x.stride(), x.stride(), x.shape, x.stride(), x.dtype, torch.device("cpu"))
    for backward in (False, True):
        actual = gpu_plan.LinearRecurrence(*sizes, "head", False, 1.0, 1, backward, backward)
        assert (actual.path == "hopper_scalar_decay") == (whole and backward)


STRIDES = ("q_token", "k_token", "v_token", "grad_token", "x_token", "y_token")
FP32 = ("log_decay", "gates", "ends", "first", "last", "shrunk", "log_decay_grad", "beta_grad")
NUMBERS = dict.fromkeys(("q_head", "k_head", "v_head", "grad_head", "x_head", "y_head", "chunks", "groups"), "i32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "tokens", "fixed"),
    [
        ("outputs", STRIDES[:3], {"first": None}),
        ("outputs", STRIDES[:3], {"first": None, "into": None}),
        ("states", STRIDES[4:], {"first": None, "last": None, "shrunk": None, "REVERSE": False}),
        ("states", STRIDES[4:], {"into": None, "ends": None, "REVERSE": True}),
        ("gradients", STRIDES[:4], {"last": None, "first": None}),
        ("gradients", STRIDES[:4], {"log_decay_grad": None}),
    ],
)
@pytest.mark.parametrize("decays", ["*fp32", "*bf16"])
@pytest.mark.parametrize("K", [64, 128])
def test_compiles_for_hopper(kernel: str, tokens: tuple[str, ...], fixed: dict[str, Any], K: int, decays: str):
    compiles(GLUON, kernel, tokens, {**fixed, "K": K}, decays)


@pytest.mark.parametrize(
    ("K", "V", "heads", "path"),
    [
        (64, 128, 1, "hopper_vector_decay"),  # GLA's default sizes of 400M parameters
        (128, 128, 1, "hopper_vector_decay"),
        (128, 256, 2, "hopper_vector_decay"),  # those of 1.5B
        (64, 384, 3, "hopper_vector_decay"),
        (64, 64, 1, "hopper_vector_decay"),  # values with as many zeros
        (128, 192, 2, "hopper_vector_decay"),
        (64, 320, 3, "hopper_vector_decay"),  # of at least 107 channels, not four of 80
        (256, 128, 1, "hopper_vector_decay"),  # keys in two parts
        (64, 48, 1, "vector_decay"),
        (96, 192, 1, "vector_decay"),
        (32, 128, 1, "vector_decay"),
        (384, 32, 1, "vector_decay"),
    ],
)
def test_sizes_of_the_one_pass(K: int, V: int, heads: int, path: str, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[Any, ...]] = []

    def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
        case = Case("channel", False, q.shape[3], v.shape[3], v.dtype, v.device)
        calls.append((v.shape[2] // 2, v.shape[3], others[0].dtype, select(gpu_select.PATHS, case).name))
        return v.new_empty(v.shape), v.new_empty(1, v.shape[2], K, v.shape[3])

    monkeypatch.setattr(gpu_op, "recurrence", recurrence)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    q, v, g = torch.empty(1, 70, 2, K, **bf16), torch.empty(1, 70, 2, V, **bf16), torch.empty(1, 70, 2, K, **bf16)
    with assumed(GPUS["H200"]):
        gpu_op.forward(Recurrences(q, q, v, g, None, 1, 1.0, None, None))
    expected = (128, torch.bfloat16) if path.startswith("hopper") else (V, torch.float32)
    assert calls == [(heads, *expected, path)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "tokens", "fixed"),
    [
        ("states", STRIDES[1:3], {"first": None}),
        ("gradients", STRIDES[:4], {"last": None, "first": None, "beta_grad": None, "BETA": False}),
        ("gradients", STRIDES[:4], {"log_decay_grad": None, "BETA": True}),
        ("gradients", STRIDES[:4], {"first": None, "BETA": True}),
    ],
)
@pytest.mark.parametrize("V", [64, 128])
def test_other_decays_compile_for_hopper(kernel: str, tokens: tuple[str, ...], fixed: dict[str, Any], V: int):
    compiles(HEAD, kernel, tokens, {**fixed, "V": V})


def compiles(module: str, kernel: str, tokens: tuple[str, ...], fixed: dict[str, Any], decays: str = "*fp32") -> None:
    types = dict.fromkeys(FP32, "*fp32") | NUMBERS | {"scale": "fp32", "segments": "*i32"}
    types |= {"log_decay": decays, "log_decay_grad": decays}
    arguments = {**dict.fromkeys(tokens, 1024), "heads": 8, "SUBHEADS": 2, **fixed}
    assert shared_memory(module, kernel, arguments, types) <= MOST


BF16 = ["q", "k", "v"]
ON_DEVICE: list[dict[str, Any]] = [
    *({"T": T, "G": 2} for T in (1, 63, 64, 65, 2500)),
    {"T": 2500, "B": 2, "G": 2, "state": False},
    {"T": 700, "B": 2, "G": 2, "R": 2, "E": 2},
    {"T": 1000, "G": 2, "documents": [0, 0, 5, 650, 650, 1000], "decay": "mixed"},
    *({"T": 1100, "G": 2, "decay": decay} for decay in ("zero", "mixed")),
]
HALF_KEYS: list[dict[str, Any]] = [
    *({"T": T, "G": 2, "K": 64} for T in (1, 65, 2500)),
    {"T": 700, "B": 2, "G": 2, "R": 2, "E": 2, "K": 64},
    {"T": 1000, "G": 2, "K": 64, "documents": [0, 0, 5, 650, 650, 1000], "decay": "mixed"},
    {"T": 1100, "G": 2, "K": 64, "decay": "zero"},
    {"T": 700, "B": 2, "G": 2, "R": 2, "E": 2, "V": 256},
    {"T": 700, "B": 2, "G": 2, "R": 2, "E": 2, "K": 256, "V": 192},
    {"T": 1000, "G": 2, "K": 64, "V": 64, "documents": [0, 0, 5, 650, 650, 1000], "decay": "mixed"},
    {"T": 1000, "G": 2, "V": 256, "documents": [0, 0, 5, 650, 650, 1000], "decay": "mixed"},
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gate", "low", "options"),
    [
        *((gate, BF16, options) for gate in OTHERS for options in ON_DEVICE),
        *(("head", BF16, {**options, "V": 64, "beta": "random"}) for options in ON_DEVICE),
        ("none", BF16, {"T": 1100, "V": 64}),
        ("constant", BF16, {"T": 1100, "beta": "random", "G": 2}),
        *(("channel", low, options) for low in (BF16, [*BF16, "log_decay"]) for options in [*ON_DEVICE, *HALF_KEYS]),
    ],
)
def test_device(options: dict[str, Any], gate: str, low: list[str], few_programs: None):
    a = rounded(small(**options, gate=gate), torch.bfloat16, low)
    E = options.get("E", 1)
    compare(a, tolerance=1e-2, reference="torch", subheads=E)
    a = {name: x.cuda() for name, x in a.items()}
    same_with_states_kept_or_not(a, E)
    assert_repeats(partial(run, a, backend="triton", subheads=E))


# decays, inputs in bf16, and the size of keys
ROUNDED = [
    {"gate": "head", "low": BF16},
    *({"gate": "channel", "low": low, "K": K} for low in (BF16, [*BF16, "log_decay"]) for K in (64, 128)),
]
STEEP_ON_DEVICE = [
    *rows("input_gates", decay="strong", V=(64, 128), beta="random", gate="head", low=BF16, tolerance=2e-2),
    *rows("input_gates", decay="mixed", V=(64, 128), beta="random", gate="head", low=BF16, tolerance=2e-2, resets=True),
    *rows("resets", *ROUNDED, resets=True, tolerance=1e-2),
    *rows("strong_decays", *ROUNDED, decay="strong", tolerance=2e-2),
]


@pytest.mark.gpu
@pytest.mark.parametrize("row", STEEP_ON_DEVICE)
def test_device_steep_decays(row: dict[str, Any], request: pytest.FixtureRequest, few_programs: None):
    compare_row({**OF_ONE_PASS, "T": 1100, "G": 2, **row}, request, reference="torch")


@pytest.mark.gpu
def test_device_few_strong_steps(few_programs: None):
    """Factors of a state are small on both sides of the start of a chunk; their product would be 0 in fp32."""
    a = small(200, G=2)
    a["log_decay"][:, [40, 80], :, ::4] = -60.0
    compare(rounded(a, torch.bfloat16), tolerance=1e-2, reference="torch")
