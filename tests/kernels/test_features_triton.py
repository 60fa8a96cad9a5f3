"""The Triton kernels of `features`: small cases in the interpreter, real sizes on a device."""

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

import kernels

from .comparisons import DEVICE, assert_repeats, interpreted
from .hopper import shared_memory
from .recurrences import rounded, rows
from .test_features import PACKED, STAGES, Arguments, agree, assert_same, inputs, results

pytest.importorskip("triton")
from kernels.features import FeatureStream
from kernels.features.gpu import op as gpu_op
from kernels.gpu.paths import dry_run

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several runs in few tokens, and several blocks in few channels."""
    for name, value in (("SHORTEST", 4), ("LOAD", 32)):
        monkeypatch.setattr(gpu_op, name, value)


def single(T: int, **options: Any) -> Arguments:
    return inputs(T, **{"B": 2, "heads": 2, "size": 3, "dtype": torch.float32, **options})


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("expanded", [True, False])
def test_features_of_an_expansion_are_computed_again(expanded: bool):
    torch.manual_seed(0)
    x, expansion, taps = (torch.randn(size).requires_grad_() for size in ((2, 9, 2, 4), (2, 4, 8), (16, 1, 4)))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        stream = kernels.head_linear(x, expansion) if expanded else torch.einsum("bthk,hkn->bthn", x, expansion)
        y, _ = kernels.features(stream.contiguous(), taps, activation="silu", norm="l2")
        return y, y.sin()

    with kernels.backend("triton"):
        expected = torch.autograd.grad(run()[1].sum(), (x, expansion, taps))
        with kernels.recomputing():
            y, z = run()
    assert (z.grad_fn._saved_self.data_ptr() != y.data_ptr()) is expanded
    for _ in range(2):
        actual = torch.autograd.grad(z.sum(), (x, expansion, taps), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@interpreted
@pytest.mark.parametrize("kept", [None, True, False])
def test_features_are_kept_if_the_stream_does_not_say_otherwise(kept: bool | None):
    x = torch.randn(2, 9, 2, 4, requires_grad=True)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        ((y, _),) = kernels.features_together([kernels.FeatureStream(x, activation="silu", kept=kept)])
        return y, y.sin()

    with kernels.backend("triton"):
        (expected,) = torch.autograd.grad(run()[1].sum(), x)
        with kernels.recomputing():
            y, z = run()
    assert (z.grad_fn._saved_self.data_ptr() == y.data_ptr()) is (kept is not False)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(z.sum(), x, retain_graph=True)[0], expected)


SLOW = pytest.mark.slow
SHORT = {"fixtures": ["short_runs"], "marks": SLOW}
SILU = {"activation": "silu"}
SILU_L2 = {"activation": "silu", "norm": "l2"}
SMALL = [
    *rows("stages", *({"activation": activation, "norm": norm} for activation, norm in STAGES), T=5, B=1, **SHORT),
    # the loop leaves the slopes there to PyTorch
    *rows("exactly_zero", T=4, B=1, W=0, activation=(*kernels.ACTIVATIONS,), zeros=True),
    *rows(
        "lengths_and_taps",
        *({"T": T, "W": W} for T, W in ((1, 4), (2, 4), (11, 1), (11, 2), (9, 8), (6, 0))),
        **SILU_L2,
        **SHORT,
    ),
    *rows(
        "without_bias_or_history",
        *({"bias": bias, "history": history} for bias, history in ((True, False), (False, True), (False, False))),
        **{"T": 10, **SILU_L2, **SHORT},
    ),
    *rows("packed_documents", T=20, W=(1, 2, 4), history=(True, False), documents=PACKED, **SILU_L2, **SHORT),
    # they end with a run, or cross it, or several of them meet in the tokens behind it
    *rows(
        "documents_against_runs",
        *({"documents": bounds} for bounds in ([0, 4, 8], [0, 3, 5, 8], [*range(9)])),
        **{"T": 8, "fixtures": ["short_runs"], **SILU},
    ),
    *rows(
        "sizes",
        *({"heads": heads, "size": size, "norm": norm} for heads, size, norm in ((3, 5, "l1"), (5, 4, "l2"))),
        *({"heads": heads, "size": size, "norm": norm} for heads, size, norm in ((1, 256, "l2"), (1, 700, "l2"))),
        {"heads": 7, "size": 1, "norm": "none"},
        **{"T": 3, "B": 1, "activation": "elu1", "marks": SLOW},
    ),
    *rows("many_channels_without_a_norm", T=3, B=1, heads=1, size=300, **SILU),
    # and weights in fp32, as under autocast
    *rows("half_precision", T=9, heads=2, size=16, low=(torch.bfloat16, torch.float16), **SILU_L2),
]


@interpreted
@pytest.mark.parametrize("row", SMALL)
def test_small(row: dict[str, Any], request: pytest.FixtureRequest):
    sizes = dict(row)
    for fixture in sizes.pop("fixtures", ()):
        request.getfixturevalue(fixture)
    stages = {name: sizes.pop(name) for name in ("activation", "norm") if name in sizes}
    low, zeros = sizes.pop("low", torch.float32), sizes.pop("zeros", False)
    a = rounded(single(**sizes), low, ("x", "history"))
    if zeros:
        a["x"][..., 1:] = 0
    limits = (1e-5, 1e-5) if low == torch.float32 else (5e-3, 1e-2)
    actual = agree(a, "triton", *limits, **stages)
    assert actual["gradient of x"].dtype == low
    if "weight" in a:
        assert actual["gradient of weight"].dtype == torch.float32
    if "history" in a:
        assert actual["history"].dtype == low
        if "cu_seqlens" in a:
            empty = a["cu_seqlens"].diff() == 0
            assert torch.equal(actual["history"][empty], a["history"][empty])


@interpreted
@pytest.mark.parametrize("wanted", [True, False])
def test_a_history_keeps_its_dtype(wanted: bool):
    a = single(5)
    a["x"], a["history"] = a["x"].bfloat16(), a["history"].bfloat16().float()
    actual = []
    for history in (a["history"], a["history"].bfloat16()):
        with torch.set_grad_enabled(wanted), kernels.backend("triton"):
            arguments = {**a, "history": history.requires_grad_(wanted)}
            actual.append(kernels.features(**arguments, activation="silu", return_history=True))
            assert actual[-1][1].dtype == history.dtype
    assert torch.equal(actual[0][0], actual[1][0])
    assert torch.equal(actual[0][1], actual[1][1].float())


@pytest.mark.slow
@interpreted
@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("norm", ["none", "l2"])
def test_views_of_one_projection(norm: str):
    fused, a = torch.randn(2, 9, 20), single(9)
    every_fourth, apart = fused.unflatten(-1, (2, 10))[..., ::4], fused.unflatten(-1, (4, 5))[:, :, 1:3, 1:4]
    for x in (fused[..., 5:11].unflatten(-1, (2, 3)), every_fourth, apart):
        arguments = {**a, "x": x}
        actual = results(arguments, "triton", activation="silu", norm=norm)
        expected = results({**arguments, "x": x.contiguous()}, "triton", activation="silu", norm=norm)
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    # a gradient may be a view as well
    x = a.pop("x").requires_grad_()
    arguments = []
    for strided in (True, False):
        with kernels.backend("triton"):
            y, _ = kernels.features(x, **a, norm=norm)
        arriving = fused[..., 5:11].unflatten(-1, (2, 3))
        arguments.append(torch.autograd.grad(y, x, arriving if strided else arriving.contiguous())[0])
    assert torch.equal(*arguments)


@interpreted
@pytest.mark.parametrize("T", [1, 2, 9])
@pytest.mark.parametrize("history", [True, False])
def test_continuing_without_gradient_is_one_launch(T: int, history: bool, monkeypatch: pytest.MonkeyPatch):
    a = single(T, history=history)
    with torch.no_grad():
        with kernels.backend("reference"):
            expected = kernels.features(**a, activation="silu", norm="l2", return_history=True)
        monkeypatch.setattr(gpu_op, "continued", None)
        with kernels.backend("triton"):
            actual = kernels.features(**a, activation="silu", norm="l2", return_history=True)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(actual[1], expected[1])


THREE = [
    {"heads": 2, "size": 3, "activation": "silu", "norm": "l2"},
    {"heads": 5, "size": 4, "activation": "elu1", "norm": "l1", "bias": False, "W": 3},
    {"heads": 1, "size": 40, "activation": "relu", "norm": "none", "history": False},
]


def streams(wanted: list[dict[str, Any]], T: int, **options: Any) -> list[dict[str, Any]]:
    """Arguments of `features` for each; x is a part of a larger tensor."""
    arguments = []
    for about in wanted:
        stages = {name: about[name] for name in ("activation", "norm")}
        a = single(T, **{name: x for name, x in about.items() if name not in stages}, **options)
        x = torch.cat([a["x"].flatten(2), a["x"].new_zeros(*a["x"].shape[:2], 2)], -1)
        a["x"] = x[..., :-2].unflatten(2, a["x"].shape[2:])
        arguments.append({**a, **stages, "return_history": True})
    return arguments


def every(arguments: list[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    return kernels.features_together([kernels.FeatureStream(**a) for a in arguments])


def together(arguments: list[dict[str, Any]], backend: str) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    with kernels.backend(backend):
        return every(arguments)


def same(*actual: list[tuple[torch.Tensor, torch.Tensor | None]]) -> bool:
    """Whether all have the same bits."""
    first, *rest = ([x for pair in each for x in pair] for each in actual)
    return all(torch.equal(x, y) for each in rest for x, y in zip(first, each, strict=True))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("chosen", [(0, 1), (0, 0, 2), (2, 1, 0)], ids=str)
def test_one_token_of_several_streams_is_one_launch(chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    arguments = streams([THREE[i] for i in chosen], 1, B=3)
    with torch.no_grad():
        alone = [together([a], "triton")[0] for a in arguments]
        expected = together(arguments, "reference")
        monkeypatch.setattr(gpu_op, "run", None)
        actual = together(arguments, "triton")
        with kernels.backend("triton"):  # outside: what chooses cannot be traced
            compiled = torch.compile(every, backend="aot_eager", fullgraph=True)(arguments)
    torch.testing.assert_close(actual, expected)
    assert same(actual, alone, compiled)


def gates(B: int, M: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Inputs of gates as columns of a projection."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(B, 1, 2 * M + 3, generator=generator).to(dtype)
    numbers = torch.randn(3, M, generator=generator)
    return {
        "a": wide[..., 1 : M + 1],
        "b": wide[..., M + 2 : -1],
        **dict(zip(("A_log", "dt_bias", "bias"), numbers, strict=True)),
    }


def channel_gates(B: int, M: int, K: int, R: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Inputs of gates with decays per channel; with a rank R the decays' are R columns of a projection."""
    inputs, generator = gates(B, M, dtype), torch.Generator().manual_seed(2)
    inputs["dt_bias"] = torch.randn(M, K, generator=generator)
    wide = torch.randn(B, 1, (R or M * K) + 3, generator=generator).to(dtype)[..., 1:-2]
    inputs["a"] = wide if R else wide.unflatten(-1, (M, K))
    return inputs | ({"up": torch.randn(M * K, R, generator=generator).to(dtype)} if R else {})


def with_gates(arguments: list[dict[str, Any]], inputs: dict[str, Any]) -> list[Any]:
    streams, both = kernels.features_and_gates(
        [kernels.FeatureStream(**a) for a in arguments], kernels.GateInputs(**inputs, largest=2.0)
    )
    return [*streams, both]


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("chosen", [(0, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize(
    ("sizes", "lower_bound"),
    [((1,), None), ((5,), None), ((48,), None), ((3, 5, 0), -5.0), ((5, 16, 7), None), ((4, 1, 20), -3.0)],
    ids=str,
)
def test_the_gates_of_a_token_in_the_same_launch(
    sizes: tuple[int, ...], lower_bound: float | None, chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    torch.compiler.reset()  # so many sizes reach its limit
    arguments = streams([THREE[i] for i in chosen], 1, B=3)
    inputs: dict[str, Any] = gates(3, *sizes) if len(sizes) == 1 else channel_gates(3, *sizes)
    inputs["lower_bound"] = lower_bound
    with torch.no_grad():
        with kernels.backend("reference"):
            expected = with_gates(arguments, inputs)
        monkeypatch.setattr(gpu_op, "run", None)
        monkeypatch.setattr(import_module("kernels.delta_gates.gpu.op"), "gates", None)
        with kernels.backend("triton"):
            actual = with_gates(arguments, inputs)
            compiled = torch.compile(with_gates, backend="aot_eager", fullgraph=True)(arguments, inputs)
    torch.testing.assert_close(actual, expected)
    assert same(actual, compiled)


@interpreted
def test_a_weight_of_another_dtype_is_multiplied_before_the_launch():
    arguments, inputs = streams(THREE, 1, B=2), channel_gates(2, 3, 4, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with kernels.backend("torch"):
            expected = with_gates(arguments, inputs)
        with kernels.backend("triton"):
            actual = with_gates(arguments, inputs)
    torch.testing.assert_close(actual[-1], expected[-1])


@interpreted
@pytest.mark.parametrize("rank", [0, 6])
def test_gates_beside_streams_that_are_launched_alone(rank: int):
    arguments, inputs = streams(THREE, 2), channel_gates(1, 4, 3, 6) if rank else gates(1, 4)
    with kernels.backend("triton"):
        actual = with_gates(arguments, inputs)
    with kernels.backend("reference"):
        torch.testing.assert_close(actual, with_gates(arguments, inputs))


@interpreted
@pytest.mark.parametrize("deterministic", [False, True])
def test_histories_that_may_be_written_are(deterministic: bool):
    arguments = streams([THREE[0], THREE[1], THREE[0]], 1, B=2)
    arguments[1]["history"] = (
        arguments[1]["history"].transpose(0, 1).contiguous().transpose(0, 1)
    )  # cannot be used as it lies
    with torch.no_grad(), kernels.deterministic(deterministic):
        expected = together(arguments, "reference")
        own = [{**a, "history": a["history"].clone() if i == 0 else a["history"]} for i, a in enumerate(arguments)]
        kept = [a["history"].clone() for a in own]
        actual = together([{**a, "consume_history": i < 2} for i, a in enumerate(own)], "triton")
    torch.testing.assert_close(actual, expected)
    assert actual[0][1] is own[0]["history"]
    assert all(torch.equal(a["history"], before) for a, before in zip(own[1:], kept[1:], strict=True))


@interpreted
@pytest.mark.parametrize("case", ["two tokens", "a gradient", "four streams", "no convolution", "no history"])
def test_other_streams_are_launched_one_by_one(case: str):
    arguments = streams([*THREE, THREE[0]] if case == "four streams" else THREE, 2 if case == "two tokens" else 1)
    if case == "no convolution":
        arguments[0] = {"x": arguments[0]["x"], "activation": "silu", "norm": "l2", "return_history": True}
    elif case == "no history":
        arguments[1]["return_history"] = False
    arguments[0]["x"].requires_grad_(case == "a gradient")
    torch.testing.assert_close(together(arguments, "triton"), together(arguments, "reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 64])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_one_token_on_a_device(B: int, size: int):
    heads = 1024 // size
    qk = {"heads": heads, "size": size, "activation": "silu", "norm": "l2", "bias": False}
    torch.compiler.reset()  # so many sizes reach its limit
    arguments = streams([qk, qk, {**qk, "size": 2 * size, "norm": "none"}], 1, B=B, dtype=torch.bfloat16)
    arguments = [{name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in a.items()} for a in arguments]
    with torch.no_grad():
        actual = together(arguments, "triton")
        repeated = together(arguments, "triton")
        alone = [together([a], "triton")[0] for a in arguments]
        with kernels.backend("triton"):
            compiled = torch.compile(every, fullgraph=True)(arguments)
    assert same(actual, repeated, alone, compiled)
    for on_host in (gates(B, heads, torch.bfloat16), channel_gates(B, heads, size, 0, torch.bfloat16)):
        inputs = {name: x.cuda() for name, x in on_host.items()}
        with torch.no_grad(), kernels.backend("triton"):
            beside, compiled = (
                with_gates(arguments, inputs),
                torch.compile(with_gates, fullgraph=True)(arguments, inputs),
            )
            alone = kernels.delta_gates(**inputs, largest=2.0)
        assert same(beside, [*actual, alone], compiled)
    inputs = {name: x.cuda() for name, x in channel_gates(B, heads, size, 128, torch.bfloat16).items()}
    with torch.no_grad(), kernels.backend("triton"):
        beside, compiled = with_gates(arguments, inputs), torch.compile(with_gates, fullgraph=True)(arguments, inputs)
        alone = kernels.delta_gates(**inputs, largest=2.0)
    assert same(beside[:-1], actual)
    assert same(beside, compiled)
    # sums in another order round the inputs of the decays to another bf16 now and then
    torch.testing.assert_close(beside[-1], alone, rtol=2e-2, atol=2e-2)


@interpreted
def test_whole_is_pieces():
    a = single(9)
    x, history, pieces = a.pop("x"), a.pop("history"), []
    with torch.no_grad(), kernels.backend("triton"):
        whole, last = kernels.features(x, history=history, return_history=True, norm="l2", **a)
        for piece in x.split([1, 2, 5, 1], 1):
            y, history = kernels.features(piece, history=history, return_history=True, norm="l2", **a)
            pieces.append(y)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(history, last)


@interpreted
@torch.no_grad()
def test_tokens_without_a_convolution_take_one_launch():
    x, y = torch.randn(2, 1, 3, 20), torch.randn(2, 1, 6, 10)
    history, none = torch.randn(2, 3, 60), torch.randn(2, 0, 60)
    options = {"return_history": True, "activation": "silu"}
    streams = [
        FeatureStream(x, history=none, **options),
        FeatureStream(y, history=none, norm="l2", **options),
        FeatureStream(x, torch.randn(60, 1, 4), history=history, **options),
    ]
    expected = [kernels.features_together([stream])[0] for stream in streams]
    with kernels.backend("triton"):
        with dry_run() as record:
            kernels.features_together(streams)
        actual = kernels.features_together(streams)
    assert [launch.name for launch in record.launches] == ["features.token.tokens"]
    torch.testing.assert_close(actual, expected)


@interpreted
@pytest.mark.parametrize(
    ("change", "norm", "reason"),
    [({"dtype": torch.float64}, "none", "fp64"), ({"W": 9}, "none", "8 taps"), ({"size": 1025}, "l2", "at most 1024")],
)
def test_what_the_kernels_cannot_take(change: dict[str, Any], norm: Any, reason: str):
    a = single(3, **change)
    kernels.features(**a, norm=norm)
    with kernels.backend("triton"), pytest.raises(kernels.UserError, match=reason):
        kernels.features(**a, norm=norm)


@pytest.mark.slow
def test_the_ops_are_registered_properly():
    a = {name: x.to(DEVICE) for name, x in single(2).items()}
    arguments = [a["x"], a["weight"], a["bias"], a["history"]]
    leaves = [x.detach().requires_grad_() for x in arguments]
    how = ("silu", "l2")
    torch.library.opcheck(torch.ops.token_mixer_zoo.features, (*leaves, None, *how, False))
    torch.library.opcheck(torch.ops.token_mixer_zoo.features, (leaves[0], None, None, None, None, *how, False))
    torch.library.opcheck(torch.ops.token_mixer_zoo.features_step, (*arguments, None, *how, False))
    one, how = [a["x"][:, :1], *arguments[1:3]], ("silu relu", "l2 none")
    histories = [a["history"].clone(), a["history"].clone()]
    M, K, R = 3, 2, 5
    per_head = [*(a["x"].new_ones(size) for size in ((2, 1, M), (M,), (M,), (2, 1, M), (M,))), None]
    low_rank = [a["x"].new_ones(size) for size in ((2, 1, R), (M,), (M, K), (2, 1, M), (M,), (M * K, R))]
    for gates in ([], per_head, low_rank):
        torch.library.opcheck(
            torch.ops.token_mixer_zoo.features_token, ([*one, *one], histories, gates, *how, 2.0, 0.0)
        )


def on_device(T: int, dtype: torch.dtype = torch.bfloat16, *, view: bool = True, **options: Any) -> Arguments:
    """As mixers make them: weights in fp32, x a view of a projection."""
    a = {name: x.cuda() for name, x in single(T, **options).items()}
    if view:
        B, T, heads, size = a["x"].shape
        a["x"] = torch.cat([a["x"].flatten(2)] * 3, -1)[..., heads * size : 2 * heads * size]
        a["x"] = a["x"].to(dtype).unflatten(-1, (heads, size))
    return rounded(a, dtype, ("x", "history"))


def test_programs_fill_whole_waves():
    """A last wave of a few programs would take as long as any other."""
    room = 132 * 16
    for B, T, heads in ((8, 4096, 64), (8, 4096, 8), (1, 65536, 8), (32, 2048, 64), (4, 4096, 12)):
        programs = gpu_op.cut(B, T, heads, 128, "l2", 128, room, gpu_op.TOKENS, 3).programs
        assert 0.9 < programs / room / -(-programs // room) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_a_stride_may_be_one_unit(kernel: str):
    """Triton compiles arguments that are 1 as constants, which have no methods; the interpreter does not."""
    missing = dict.fromkeys(("bias", "history", "cu_seqlens", "tail", "dhistory"))
    sizes = {"UNIT": 16, "C": 16, "W": 4, "HEADS": 1, "SIZE": 16, "BLOCK": 16, "TOKENS": gpu_op.TOKENS}
    stages = {"ACTIVATION": "silu", "NORM": "l2", "EPS": 1e-6}
    strides = dict.fromkeys(("x_row", "dy_row", "dx_row"), 1)
    numbers = dict.fromkeys(("T", "length", "documents", "x_batch", "dy_batch", "dx_batch"), "i32")
    names = import_module("kernels.features.gpu.kernels").__dict__[kernel].arg_names
    fixed = {name: x for name, x in {**missing, **sizes, **stages, **strides}.items() if name in names}
    shared_memory("kernels.features.gpu.kernels", kernel, fixed, {**numbers, "dtaps": "*fp32"}, warps=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({"T": 4096, "B": 8, "heads": 8, "size": 128, "history": False, "bias": False}, ("silu", "l2")),
        ({"T": 1001, "B": 3, "heads": 8, "size": 128}, ("silu", "l2")),
        ({"T": 1001, "heads": 6, "size": 96}, ("elu1", "l1")),
        ({"T": 1001, "heads": 4, "size": 256}, ("relu", "l2")),
        ({"T": 1001, "heads": 2, "size": 512}, ("silu", "l2")),
        ({"T": 1001, "heads": 1, "size": 1024}, ("silu", "l2")),
        ({"T": 1001, "heads": 5, "size": 64, "W": 8}, ("silu", "l2")),
        ({"T": 1001, "heads": 5, "size": 24, "W": 3}, ("silu", "l1")),
        ({"T": 1001, "heads": 2048, "size": 1}, ("silu", "none")),
        ({"T": 1001, "heads": 1, "size": 16}, ("silu", "l2")),
        ({"T": 1001, "heads": 8, "size": 128, "W": 0}, ("silu", "l2")),
        ({"T": 4000, "heads": 8, "size": 128, "documents": [0, 0, 1, 3, 700, 700, 2048, 4000, 4000]}, ("silu", "l2")),
        ({"T": 3, "B": 64, "heads": 8, "size": 128}, ("silu", "l2")),
    ],
)
def test_real_sizes(options: dict[str, Any], stages: tuple[str, str], dtype: torch.dtype):
    a, (activation, norm) = on_device(**options, dtype=dtype), stages
    actual = results(a, "triton", activation=activation, norm=norm)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in a.items()}
    expected = results(exact, "torch", activation=activation, norm=norm)
    assert_same(actual, expected, *((1e-5, 1e-5) if dtype == torch.float32 else (5e-3, 1e-2)))
    assert_repeats(partial(results, a, "triton", activation=activation, norm=norm), 10)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "B"), [(1, 1), (1, 64), (1001, 2)])
def test_continuing_on_device(T: int, B: int):
    a = on_device(T, B=B, heads=8, size=128)
    actual = []
    for backend in ("triton", "torch"):
        with torch.no_grad(), kernels.backend(backend):
            actual.append(kernels.features(**a, activation="silu", norm="l2", return_history=True))
    torch.testing.assert_close(actual[0][0], actual[1][0], atol=3e-2, rtol=3e-2)
    assert torch.equal(actual[0][1], actual[1][1])
