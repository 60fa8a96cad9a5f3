"""The delta rule on FlashQLA's kernels: how calls are put in its terms with a stand-in, real calls on a device."""

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.delta_rule.gpu import flashqla

from .recurrences import DECAYS, assert_same, inputs, results

PACKED = [0, 0, 3, 67, 67, 131, 131, 132, 200, 200]
GATES = ("none", "constant", "head")


def stand_in(q, k, v, g, beta, *, scale, initial_state, cu_seqlens, output_final_state):
    """FlashQLA's function, as its documentation has it, from our loop; it refuses what FlashQLA cannot compute."""
    assert g.shape == beta.shape == v.shape[:3]
    assert g.dtype == beta.dtype == torch.float32
    assert v.shape[2] % k.shape[2] == 0
    assert initial_state is None or initial_state.dtype == torch.float32
    assert cu_seqlens is None or (cu_seqlens.diff() > 0).all()
    options = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    with kernels.backend("reference"):
        return kernels.delta_rule(q, k, v, beta, g, return_state=output_final_state, **options)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashQLA, for tensors of any size on any device."""
    monkeypatch.setattr(flashqla, "refusal", lambda a: None)
    monkeypatch.setitem(sys.modules, "flash_qla", types.SimpleNamespace(chunk_gated_delta_rule=stand_in))


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("options", [{"R": 1, "E": 1}, {"R": 2, "E": 1}, {"R": 1, "E": 3}, {"R": 2, "E": 3}], ids=str)
@pytest.mark.parametrize("documents", [None, PACKED])
@pytest.mark.parametrize("state", [True, False])
def test_calls_in_its_terms(options: dict[str, int], gate: str, documents: list[int] | None, state: bool):
    a = inputs(200 if documents else 5, gate=gate, documents=documents, state=state, dtype=torch.float32, **options)
    with kernels.implementations() as ran:
        actual = results(kernels.delta_rule, a, backend="flashqla", subheads=options["E"])
    assert "flashqla" in ran["delta_rule"]
    assert_same(actual, results(kernels.delta_rule, a, backend="reference", subheads=options["E"]))


class Keeping(torch.autograd.Function):
    """The identity, which keeps its argument for the gradient, as FlashQLA keeps q, k and v."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        assert ctx.saved_tensors[0].shape == dy.shape
        return dy


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("R", "longer"), [(1, 1), (2, 3)])
def test_repeated_heads_are_repeated_again_for_the_gradients(R: int, longer: int, monkeypatch: pytest.MonkeyPatch):
    def keeping(*streams: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return stand_in(*map(Keeping.apply, streams[:3]), *streams[3:], **options)

    made, repeat = [], flashqla.repeated
    monkeypatch.setattr(flashqla, "repeated", lambda *arguments: made.append(arguments[0].shape) or repeat(*arguments))
    monkeypatch.setitem(sys.modules, "flash_qla", types.SimpleNamespace(chunk_gated_delta_rule=keeping))
    a = inputs(70, R=R, E=3, state=False, dtype=torch.float32)
    leaves = [a[name].requires_grad_() for name in "qkv"]

    def gradients() -> tuple[Tensor, ...]:
        with kernels.backend("flashqla"):
            o, _ = kernels.delta_rule(**a, subheads=3)
        return torch.autograd.grad(o.square().sum(), leaves)

    expected, once = gradients(), len(made)
    with kernels.recomputing():
        actual = gradients()
    assert (once, len(made)) == (longer, 3 * longer)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("state", [True, False])
def test_single_tokens_and_other_ops_run_as_ever(state: bool):
    a = inputs(1, state=state, dtype=torch.float32)
    with kernels.backend("flashqla"), kernels.implementations() as ran:
        kernels.delta_rule(**a)
        kernels.linear_recurrence(a["q"], a["k"], a["v"])
        kernels.rms_norm(a["q"])
    assert ran == {"delta_rule": {"torch"}, "linear_recurrence": {"torch"}, "rms_norm": {"torch"}}


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_compiled_code_calls_it_beside_its_graphs():
    a = inputs(70, dtype=torch.float32)

    def run() -> Tensor:
        return kernels.delta_rule(**a)[0].sin()

    with kernels.backend("flashqla"):
        assert torch.equal(torch.compile(run, backend="eager")(), run())


@pytest.mark.parametrize(
    ("options", "dtype", "said"),
    [
        ({"K": 64, "V": 128}, torch.bfloat16, "takes keys and values of 128 channels, with 64 and 128"),
        ({"K": 128, "V": 128}, torch.float32, "computes in bfloat16 or float16, with tensors in float32"),
        ({"K": 128, "V": 128}, torch.bfloat16, "needs a GPU, with tensors on cpu"),
    ],
)
def test_what_it_cannot_serve_is_a_sentence(options: dict[str, int], dtype: torch.dtype, said: str):
    a = inputs(3, dtype=dtype, **options)
    sentence = (
        f"^backend: delta_rule cannot run on 'flashqla', which {said}; choose one of triton, torch, reference or "
    )
    with kernels.backend("flashqla"), pytest.raises(kernels.UserError, match=sentence):
        kernels.delta_rule(**a)


@pytest.mark.parametrize(
    ("capability", "said"), [((8, 0), r"needs a Hopper GPU .*, on NVIDIA A100"), ((9, 0), "is not installed")]
)
def test_gpus_and_packages_that_are_missing(capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch):
    """On a GPU that is made up."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(flashqla, "find_spec", lambda name: None)
    with FakeTensorMode(), torch.device("cuda"), kernels.backend("flashqla"):
        x = torch.empty(1, 4, 2, 128, dtype=torch.bfloat16)
        with pytest.raises(kernels.UserError, match=f"'flashqla', which {said}"):
            kernels.delta_rule(x, x, x, torch.empty(1, 4, 2))


def on_device(T: int, **options: Any) -> dict[str, Tensor]:
    """As mixers make them: gates and states in fp32."""
    a = inputs(T, **{"B": 1, "K": 128, "V": 128, "dtype": torch.float32, **options})
    return {name: x.cuda().bfloat16() if name in "qkv" else x.cuda() for name, x in a.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "options",
    [
        {"T": 1},
        {"T": 63},
        {"T": 1000, "B": 2, "R": 3},
        {"T": 1000, "R": 2, "E": 4},
        {"T": 8192},
        {"T": 1500, "documents": [0, 0, 5, 700, 700, 1500]},
        {"T": 20000, "documents": [0, 0, 16000, 16001, 20000]},
        *({"T": 500, "decay": decay, "correlated": True} for decay in DECAYS),
    ],
    ids=str,
)
def test_real_calls(options: dict[str, Any], gate: str):
    pytest.importorskip("flash_qla")
    a, subheads = on_device(**options, gate=gate), options.get("E", 1)
    actual = results(kernels.delta_rule, a, backend="flashqla", subheads=subheads)
    exact = {name: x.float() if x.is_floating_point() else x for name, x in a.items()}
    for name, x in results(kernels.delta_rule, exact, backend="torch", subheads=subheads).items():
        error = float((actual[name].double() - x.double()).norm() / x.double().norm().clamp(min=1e-30))
        assert error <= (5e-3 if name in ("o", "state") else 1e-2), f"{name}: {error:.2g}"
    for _ in range(5):
        repeated = results(kernels.delta_rule, a, backend="flashqla", subheads=subheads)
        assert all(torch.equal(repeated[name], x) for name, x in actual.items())
