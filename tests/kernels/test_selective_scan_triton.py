"""The Triton kernels of the selective scan: small cases in the interpreter, real sizes on a device."""

from functools import partial

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE, assert_near, assert_repeats, interpreted
from .recurrences import assert_same, results
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


def agree(a: dict[str, Tensor], tolerance: float | None = None, **options: object) -> dict[str, Tensor]:
    """The results on Triton, after they have been compared with the loop in fp32."""
    actual = run(a, backend="triton", **options)
    exact = {name: x.float() if x.is_floating_point() else x for name, x in a.items()}
    expected = run(exact, backend="reference", **options)
    assert_same(actual, {name: x.to(actual[name].dtype) for name, x in expected.items()}, tolerance)
    return actual


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("length", "c", "N"), [(15, "each step", 16), (17, "constant", 1), (40, "each step", 3)])
def test_lengths(length: int, c: str, N: int, short_chunks: None):
    agree(small(length, c=c, N=N, B=2))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("length", [1, 20])
def test_one_chunk(length: int):
    agree(small(length, B=2))
    agree(small(length, state=False, rate=False))


@interpreted
@pytest.mark.parametrize("c", ["each step", "constant"])
def test_a_batch_without_rows(c: str):
    a = small(5, B=0, c=c)
    actual, expected = (run(a, backend=backend) for backend in ("triton", "torch"))
    assert {name: x.shape for name, x in actual.items()} == {name: x.shape for name, x in expected.items()}
    assert not any(actual[f"gradient of {name}"].any() for name in a)


@pytest.mark.slow
@interpreted
def test_chunks_and_blocks_as_they_are():
    agree(small(67))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("N", "D", "c"), [(1, 70, "ones"), (2, 40, "each step"), (16, 40, "constant"), (16, 34, "each step")]
)
def test_several_chunks_in_one_block(N: int, D: int, c: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_op, "CHUNK", 8)
    monkeypatch.setattr(gpu_op, "STATES", 1)
    agree(small(19, B=2, N=N, D=D, c=c))


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


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("N", [2, 4, 64, 200])
def test_every_shape_of_a_tile(N: int, short_chunks: None):
    agree(small(18, N=N, D=9))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("c", ["each step", "constant"])
def test_several_blocks_of_channels(c: str, short_chunks: None):
    agree(small(18, c=c, D=70, N=17))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("b", "c"), [(False, "ones"), (True, "ones"), (False, "each step"), (False, "constant")])
def test_what_is_left_out_is_one(b: bool, c: str, short_chunks: None):
    agree(small(18, rate=False, b=b, c=c, state=False))
    agree(small(18, N=3, b=b, c=c))  # the block of states is larger


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("scaled", "skip", "c"), [(True, True, "each step"), (True, False, "ones"), (False, True, "ones")]
)
def test_scaled_inputs_and_a_skip_connection(scaled: bool, skip: bool, c: str, short_chunks: None):
    agree(small(18, skip=skip, c=c, D=9), scale_inputs=scaled)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("state", "c"), [(True, "each step"), (False, "constant")])
def test_packed_documents(state: bool, c: str, short_chunks: None):
    a = small(53, documents=PACKED, state=state, c=c, decay="mixed")
    actual = agree(a)
    if state:
        assert torch.equal(actual["state"][3], a["initial_state"][3])  # an empty document changes nothing


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("decay", ["zero", "mixed", "strong"])
def test_any_decay(decay: str, short_chunks: None):
    a = small(40, decay=decay)
    a["rate"] *= 16  # down to e^-880 a step
    agree(a)


@interpreted
@pytest.mark.parametrize("through", ["o", "state"])
def test_gradient_through_one_result(through: str, short_chunks: None):
    actual = agree(small(18), through=(through,))
    assert bool(actual["gradient of c"].any()) == (through == "o")


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_half_precision(dtype: torch.dtype, tolerance: float, short_chunks: None):
    # decays and states stay in fp32, as mixers make them; the interpreter cuts bf16 off, where a device rounds
    a = small(40)
    a.update({name: a[name].to(dtype) for name in "xbc"})
    assert agree(a, tolerance)["o"].dtype == dtype


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
    return {name: x.to(dtype) if name in "xbc" else x for name, x in a.items()}


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
