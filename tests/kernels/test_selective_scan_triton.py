"""The Triton kernels of the selective scan: small cases in the interpreter, real sizes on a device."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE, assert_near, assert_repeats, interpreted
from .recurrences import agree, results, rounded, rows
from .test_selective_scan import inputs

pytest.importorskip("triton")
from kernels.selective_scan.gpu import op as gpu_op

pytestmark = pytest.mark.usefixtures("poison")

PACKED = [0, 0, 3, 20, 20, 20, 37, 53, 53]  # empty at the start, inside and at the end; one full chunk
ARGUMENTS = ("x", "log_decay", "rate", "b", "c", "initial_state", "skip")
run = partial(results, kernels.selective_scan)
small = partial(inputs, B=1, dtype=torch.float32)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 tokens, two or more in a block, and two blocks or more."""
    monkeypatch.setattr(gpu_op, "CHUNK", 8)
    monkeypatch.setattr(gpu_op, "STATES", 1 << 20)
    monkeypatch.setattr(gpu_op, "BLOCKS", 2)


@pytest.fixture
def chunks_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of 8 tokens in one block."""
    monkeypatch.setattr(gpu_op, "CHUNK", 8)
    monkeypatch.setattr(gpu_op, "STATES", 1)


SLOW = pytest.mark.slow
READ = ("each step", "constant")
SHORT = {"fixtures": ["short_chunks"], "marks": SLOW}
SMALL = [
    *rows("lengths", {"T": 15, "N": 16}, {"T": 17, "N": 1, "c": "constant"}, {"T": 40, "N": 3}, B=2, **SHORT),
    *rows("one_chunk", {"B": 2}, {"state": False, "rate": False}, T=(1, 20), marks=SLOW),
    *rows("chunks_and_blocks_as_they_are", T=67, marks=SLOW),
    *rows(
        "several_chunks",
        *({"N": 1, "D": 70, "c": "ones"}, {"N": 2, "D": 40}, {"N": 16, "D": 40, "c": "constant"}, {"N": 16, "D": 34}),
        **{"T": 19, "B": 2, "fixtures": ["chunks_in_a_block"], "marks": SLOW},
    ),
    *rows("every_shape_of_a_tile", T=18, N=(2, 4, 64, 200), D=9, **SHORT),
    *rows("blocks_of_channels", T=18, c=READ, D=70, N=17, **SHORT),
    *(
        row  # with one state, and with a block of states
        for options in ({"rate": False, "state": False}, {"N": 3})
        for row in rows(
            "left_out",
            *(
                {"b": b, "c": c}
                for b, c in ((False, "ones"), (True, "ones"), (False, "each step"), (False, "constant"))
            ),
            **{"T": 18, **options, **SHORT},
        )
    ),
    *rows(
        "scaled_inputs_and_a_skip",
        {"scale_inputs": True, "skip": True},
        {"scale_inputs": True, "c": "ones"},
        {"scale_inputs": False, "skip": True, "c": "ones"},
        **{"T": 18, "D": 9, **SHORT},
    ),
    *rows("packed_documents", {"state": True}, T=53, documents=PACKED, decay="mixed", **SHORT),
    *rows("packed_documents", {"state": False, "c": "constant"}, T=53, documents=PACKED, decay="mixed", **SHORT),
    # down to e^-880 a step
    *rows("any_decay", T=40, decay=("zero", "mixed", "strong"), faster=16, **SHORT),
    *rows("one_result", T=18, through=(("o",), ("state",)), fixtures=["short_chunks"]),
    # decays and states stay in fp32, as mixers make them; the interpreter cuts bf16 off, where a device rounds
    *rows("half_precision", {"low": torch.bfloat16, "tolerance": 1e-2}, T=40, **SHORT),
    *rows("half_precision", {"low": torch.float16, "tolerance": 1e-3}, T=40, **SHORT),
]


@interpreted
@pytest.mark.parametrize("row", SMALL)
def test_small(row: dict[str, Any], request: pytest.FixtureRequest):
    sizes = dict(row)
    for fixture in sizes.pop("fixtures", ()):
        request.getfixturevalue(fixture)
    options = {name: sizes.pop(name) for name in ("through", "scale_inputs") if name in sizes}
    tolerance, faster, low = sizes.pop("tolerance", None), sizes.pop("faster", 1), sizes.pop("low", torch.float32)
    a = rounded(small(**sizes), low, "xbc")
    if faster > 1:
        a["rate"] *= faster
    actual = agree(kernels.selective_scan, a, tolerance, **options)
    assert actual["o"].dtype == low
    if "through" in row:
        assert bool(actual["gradient of c"].any()) == ("o" in row["through"])


@interpreted
@pytest.mark.parametrize("c", ["each step", "constant"])
def test_a_batch_without_rows(c: str):
    a = small(5, B=0, c=c)
    actual, expected = (run(a, backend=backend) for backend in ("triton", "torch"))
    assert {name: x.shape for name, x in actual.items()} == {name: x.shape for name, x in expected.items()}
    assert not any(actual[f"gradient of {name}"].any() for name in a)


@pytest.mark.parametrize(
    ("shape", "N", "blocks", "tokens"),
    [
        ((8, 4096, 2048), 16, 1, 8),  # enough programs without cuts
        ((16, 4096, 2048), 16, 1, 4),  # so many that registers limit them
        ((1, 32768, 2048), 16, 32, 4),
        ((8, 4096, 1024), 1, 64, 8),
        ((1, 65536, 256), 1, 128, 8),
        ((1, 1, 2048), 16, 1, 1),
    ],
)
def test_plan_of_long_and_short_sequences(shape: tuple[int, ...], N: int, blocks: int, tokens: int):
    plan = gpu_op.SelectiveScan(torch.Size(shape), N, False, None, torch.float32, torch.device("cpu"))
    assert (plan.per_row, plan.tokens, plan.whole) == (blocks, tokens, blocks == 1)


@interpreted
@pytest.mark.parametrize("name", ARGUMENTS[1:])
def test_one_argument_in_fp64(name: str):
    a = small(3, skip=True)
    a[name] = a[name].double()
    actual, expected = run(a, backend="triton"), run(a)
    assert actual[f"gradient of {name}"].dtype == torch.float64
    for key, x in expected.items():  # states are fp32 on Triton, whatever they are made of
        torch.testing.assert_close(actual[key], x, atol=1e-5, rtol=1e-5, check_dtype=key != "state")


@interpreted
def test_fp64_names_another_backend():
    with kernels.backend("triton"), pytest.raises(kernels.UserError, match=r"^backend: .*'triton'.*fp64.*torch"):
        kernels.selective_scan(**inputs(3))


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 18])
def test_the_op_is_registered_properly(length: int, short_chunks: None):
    a = small(length, skip=True)
    arguments = [a[name].to(DEVICE).requires_grad_() for name in ARGUMENTS]
    torch.library.opcheck(torch.ops.token_mixer_zoo.selective_scan, (*arguments, None, True, False))


def on_device(T: int, dtype: torch.dtype = torch.bfloat16, **options: object) -> dict[str, Tensor]:
    """As mixers make them: decays, rates and states in fp32."""
    a = {name: x.cuda() for name, x in small(T, **{"decay": "mild", **options}).items()}
    return rounded(a, dtype, "xbc")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {"T": 2048, "B": 2, "D": 2048, "N": 16, "skip": True},
        {"T": 2048, "B": 2, "D": 1000, "N": 64, "decay": "mixed"},
        {"T": 1000, "B": 2, "D": 1024, "rate": False, "b": False, "c": "ones"},  # HGRN
        {"T": 1000, "B": 2, "D": 1024, "N": 16, "b": False, "c": "constant"},
        {"T": 2048, "D": 512, "N": 16, "documents": [0, 0, 5, 700, 700, 764, 2048, 2048]},
        {"T": 9000, "D": 256, "N": 16},  # in long chunks
        {"T": 50, "B": 4, "D": 512, "N": 16},  # one chunk
        {"T": 1, "B": 4, "D": 512, "N": 16},
    ],
)
def test_real_sizes(options: dict, dtype: torch.dtype):
    a = on_device(**options, dtype=dtype)
    expected = run({n: x.float() if x.is_floating_point() else x for n, x in a.items()})
    # all is computed in fp32: what differs in bf16 is how results are rounded
    assert_near(run(a, backend="triton"), expected, 2e-5 if dtype == torch.float32 else 5e-3)
    assert_repeats(partial(run, a, backend="triton"))
