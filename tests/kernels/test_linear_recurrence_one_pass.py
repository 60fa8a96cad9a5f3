"""Decays per channel in one pass: its twin in Triton under the interpreter, and on a GPU the kernels in Gluon."""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import kernels

from .gluon_interpreter import interpreted
from .hopper import MOST, shared_memory
from .recurrences import PACKED, inputs, results

pytest.importorskip("triton")
from kernels.linear_recurrence import triton_op, triton_plan
from kernels.triton import plan

from .test_linear_recurrence_triton import compare, poison, short_segments

__all__ = ["poison", "short_segments"]  # fixtures
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
run = partial(results, kernels.linear_recurrence)
small = partial(inputs, gate="channel", dtype=torch.float32)


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the device and the sizes."""
    monkeypatch.setattr(triton_plan, "at_once", lambda gate, *sizes: gate == "channel")
    plan.of_rows.cache_clear()
    yield
    plan.of_rows.cache_clear()


@pytest.mark.parametrize(("length", "E"), [(1, 2), (63, 2), (65, 1), (130, 1)])
def test_subheads_and_shared_keys(length: int, E: int, one_pass: None):
    compare(small(length, decay="mixed", B=1, G=1, R=2, E=E, K=24, V=17), subheads=E)


@pytest.mark.parametrize("decay", ["mild", "zero", "strong"])
def test_any_decay(decay: str, one_pass: None):
    compare(small(70, decay=decay, B=1, G=1, K=48, V=16))


@pytest.mark.parametrize("steep", [-2.0, -2.6, -6.0, -50.0])
def test_steep_channels_beside_others(steep: float, one_pass: None):
    """On both sides of what factors around one reference point can hold, in some channels and some chunks."""
    a = small(200, decay="mild", B=1, G=2, K=16, V=16)
    a["log_decay"][:, 70:140, :, ::5] = steep
    a["log_decay"][:, 150:, 1, 3] = steep
    compare(a)


@pytest.mark.parametrize("documents", [None, [0, 0, 5, 300, 320, 320]])
def test_segments(documents: list[int] | None, one_pass: None, short_segments: None):
    compare(small(320, B=1, G=1, K=16, V=16, documents=documents))


def test_packed_documents(one_pass: None):
    compare(small(200, decay="mixed", G=1, K=16, V=16, documents=PACKED))


@pytest.mark.parametrize("through", ["o", "state"])
@pytest.mark.parametrize("beta", [None, 0])
def test_a_gradient_of_one_result_alone(beta: float | None, through: str, one_pass: None):
    compare(small(20, beta=beta, state=False, B=1, G=1, K=16, V=16), through=(through,))


def test_decays_without_gradients(one_pass: None):
    a = small(70, beta=None, B=1, G=1, K=16, V=16)
    compare({name: x for name, x in a.items() if name != "log_decay"}, log_decay=a["log_decay"])


@pytest.mark.parametrize("length", [64, 320])
def test_registered_as_it_should_be(length: int, one_pass: None, short_segments: None):
    a = small(length, B=1, G=1, K=16, V=16)
    tensors = [a[name].requires_grad_() for name in ("q", "k", "v", "log_decay", "beta", "initial_state")]
    torch.library.opcheck(torch.ops.token_mixer_zoo.linear_recurrence.default, (*tensors, None, 0.25, 1))


GLUON = "kernels.linear_recurrence.gluon_channel"


@pytest.fixture
def gluon(one_pass: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for Hopper, step by step on the CPU."""
    monkeypatch.setitem(sys.modules, GLUON, interpreted(GLUON, "outputs", "states", "gradients"))
    monkeypatch.setattr(triton_plan.LinearRecurrence, "in_gluon", property(lambda self: self.one_pass))
    monkeypatch.setattr(triton_op, "largest", lambda op, dtype, device: 128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they run as they are")
@pytest.mark.parametrize(
    "options",
    [
        {"T": 1},
        {"T": 130, "decay": "mixed"},
        {"T": 70, "decay": "strong", "state": False},
        {"T": 130, "B": 2, "R": 2, "E": 2},
        {"T": 200, "documents": [0, 0, 5, 150, 200]},
    ],
)
def test_gluon_step_by_step(options: dict[str, Any], gluon: None):
    a = small(**{"B": 1, "G": 1, "K": 128, "V": 128, "beta": None, **options})
    compare(a, tolerance=1e-4, subheads=options.get("E", 1))  # decays are summed in fp32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they run as they are")
def test_gluon_in_segments_step_by_step(gluon: None, short_segments: None):
    compare(small(320, B=1, G=1, K=128, V=128, beta=None))
    a = small(200, B=1, G=1, K=128, V=128, beta=None)
    compare({name: x for name, x in a.items() if name != "log_decay"}, log_decay=a["log_decay"])


STRIDES = ("q_token", "k_token", "v_token", "grad_token", "x_token", "y_token")
FP32 = ("log_decay", "ends", "first", "last", "shrunk", "log_decay_grad")
NUMBERS = dict.fromkeys(("q_head", "k_head", "v_head", "grad_head", "x_head", "y_head", "chunks", "groups"), "i32")


@pytest.mark.parametrize(
    ("kernel", "tokens", "fixed"),
    [
        ("outputs", STRIDES[:3], {"first": None}),
        ("states", STRIDES[4:], {"first": None, "last": None, "shrunk": None, "REVERSE": False}),
        ("states", STRIDES[4:], {"into": None, "ends": None, "REVERSE": True}),
        ("gradients", STRIDES[:4], {"last": None, "first": None}),
        ("gradients", STRIDES[:4], {"log_decay_grad": None}),
    ],
)
def test_compiles_for_hopper(kernel: str, tokens: tuple[str, ...], fixed: dict[str, Any]):
    types = dict.fromkeys(FP32, "*fp32") | NUMBERS | {"scale": "fp32", "segments": "*i32"}
    given = {**dict.fromkeys(tokens, 1024), "heads": 8, "SUBHEADS": 2, **fixed}
    assert shared_memory(GLUON, kernel, given, types) <= MOST


ON_DEVICE: list[dict[str, Any]] = [
    *({"T": T, "G": 2} for T in (1, 63, 64, 65, 2500)),
    {"T": 2500, "B": 2, "G": 2, "state": False},
    {"T": 700, "B": 2, "G": 2, "R": 2, "E": 2},
    {"T": 1000, "G": 2, "documents": [0, 0, 5, 650, 650, 1000], "decay": "mixed"},
    *({"T": 1100, "G": 2, "decay": decay} for decay in ("zero", "mixed")),
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", ON_DEVICE)
def test_device(options: dict[str, Any]):
    a = small(**{"B": 1, "K": 128, "V": 128, "beta": None, **options})
    a = {name: x.bfloat16() if name in "qkv" else x for name, x in a.items()}
    E = options.get("E", 1)
    compare(a, tolerance=1e-2, reference="torch", subheads=E)
    a = {name: x.cuda() for name, x in a.items()}
    first = run(a, backend="triton", subheads=E)
    for _ in range(20):  # no atomics: a difference would be a race
        again = run(a, backend="triton", subheads=E)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_device_strong_decays():
    a = small(1100, decay="strong", B=1, G=2, K=128, V=128, beta=None)
    compare({n: x.bfloat16() if n in "qkv" else x for n, x in a.items()}, tolerance=2e-2, reference="torch")
