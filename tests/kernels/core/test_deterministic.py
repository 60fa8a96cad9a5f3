"""The mode of `deterministic`: its scope, and the plans of kernels that it decides."""

import subprocess
import sys
import threading
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import kernels
from kernels.core import deterministic as modes
from kernels.core.autograd import Gradients, register
from kernels.core.deterministic import in_mode
from kernels.core.recompute import recomputing, remake
from kernels.gpu import device as gpu


def test_the_block_has_the_mode_and_nothing_else():
    assert not kernels.is_deterministic()
    with kernels.deterministic():
        assert kernels.is_deterministic()
        with kernels.deterministic(False):
            assert not kernels.is_deterministic()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(kernels.is_deterministic()))
        thread.start()
        thread.join()
        assert seen == [False]
        with pytest.raises(ZeroDivisionError):
            in_mode(False, lambda: 1 // 0)
        assert kernels.is_deterministic()
    assert not kernels.is_deterministic()


@pytest.mark.slow
@pytest.mark.parametrize("value", ["0", "1"])
def test_the_environment_sets_it_for_all_threads(value: str):
    code = (
        "import threading, kernels\n"
        "print(kernels.is_deterministic())\n"
        "threading.Thread(target=lambda: print(kernels.is_deterministic())).start()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"ZOO_DETERMINISTIC": value}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(value == "1")] * 2


def test_another_value_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(modes, "_environment", "true")
    with pytest.raises(kernels.UserError, match=r"^ZOO_DETERMINISTIC: 'true' is not one of 0, 1$"):
        kernels.rms_norm(torch.ones(2, 4, requires_grad=True), torch.ones(4))


class Arguments(NamedTuple):
    x: Tensor


def _forward(args: Arguments) -> tuple[Tensor]:
    return (args.x + float(kernels.is_deterministic()),)


def _backward(args: Arguments, needed: object, dy: Tensor) -> Gradients:
    return {"x": dy + float(kernels.is_deterministic())}


moded = register("moded", _forward, _backward, lambda args: (torch.empty_like(args.x),))


@pytest.mark.parametrize("mode", [False, True])
def test_gradients_follow_the_mode_of_the_call(mode: bool):
    x = torch.zeros(3, requires_grad=True)
    with kernels.deterministic(mode):
        y = moded(x)
    with kernels.deterministic(not mode):
        y.sum().backward()
    assert y.tolist() == [mode] * 3
    assert x.grad is not None
    assert x.grad.tolist() == [1 + mode] * 3


@pytest.mark.parametrize("mode", [False, True])
def test_compiled_code_keeps_the_mode_of_its_trace(mode: bool):
    torch.compiler.reset()
    x = torch.zeros(3, requires_grad=True)
    with kernels.deterministic(mode):
        y = torch.compile(lambda x: moded(x), backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    assert y.tolist() == [mode] * 3
    assert x.grad is not None
    assert x.grad.tolist() == [1 + mode] * 3


def test_what_is_recomputed_has_the_mode_of_the_call():
    x = torch.ones(3, requires_grad=True)
    with kernels.deterministic(), recomputing():
        y = x * 1.0
        y = remake(y, lambda x: x * (1 + float(kernels.is_deterministic())), x)
        z = y * y
    z.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0] * 3  # 2y with y = 2, as `remake` was told


def test_checkpoints_have_the_mode_of_the_call():
    x, seen = torch.ones(3, requires_grad=True), []

    def block(x: Tensor) -> Tensor:
        seen.append(kernels.is_deterministic())
        return x * x

    with kernels.deterministic():
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=kernels.same_backend)
    y.sum().backward()
    assert seen == [True, True]


SIZES = ((1, 8192), (1, 20_000), (2, 8192), (300, 8192))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("gate", ["none", "constant", "head", "channel"])
@pytest.mark.parametrize("name", ["H100", "A100"])
def test_a_plan_of_the_linear_recurrence_does_not_depend_on_the_batch(name: str, gate: str, backward: bool):
    from kernels.linear_recurrence.gpu.plan import LinearRecurrence

    size = 128 if name == "H100" else 64

    def plan(B: int, T: int) -> tuple[object, ...]:
        shape = torch.Size((B, T, 4, size))
        stride = (T * 4 * size, 4 * size, size, 1)
        sizes = (shape, stride, stride, shape, stride, torch.bfloat16, torch.device("cpu"), gate, False, 1.0, 1)
        with gpu.assumed(gpu.GPUS[name]):
            made = LinearRecurrence(*sizes, backward, False, torch.float32)
            made.place(None)
        return made.path, made.segmented

    with kernels.deterministic():
        (one,) = {plan(*shape) for shape in SIZES}
        assert not one[1]
    if name == "H100":
        assert len({plan(*shape) for shape in SIZES}) > 1  # by default it does


@pytest.mark.parametrize("name", ["H100", "A100"])
def test_a_plan_of_the_delta_rule_does_not_depend_on_the_batch(name: str):
    from kernels.delta_rule.gpu.plan import DeltaRule

    def plan(B: int, T: int) -> tuple[object, ...]:
        shape = torch.Size((B, T, 4, 128))
        with gpu.assumed(gpu.GPUS[name]):
            made = DeltaRule(shape, shape, 1, 1.0, torch.bfloat16, torch.device("cpu"), None)
            made.place(None)
            return made.most, made.cut, made.halved, made.backward_path, made.pass_entry("forward")

    with kernels.deterministic():
        assert len({plan(*size) for size in SIZES}) == 1
    if name == "H100":
        assert len({plan(*size) for size in SIZES}) > 1


def test_plans_of_both_modes_are_cached_separately():
    from kernels.selective_scan.gpu.op import SelectiveScan

    sizes = (torch.Size((1, 64, 8)), 4, None, torch.float32, torch.device("cpu"))
    with kernels.deterministic():
        assert not SelectiveScan.of(None, 64, *sizes).whole
    assert SelectiveScan.of(None, 64, *sizes).whole
