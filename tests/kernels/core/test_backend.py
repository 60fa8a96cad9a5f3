import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import kernels
from kernels.precondition import precondition

# keys of length one: a delta rule with longer ones magnifies what rounding leaves
x = F.normalize(torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
OPS: dict[str, Callable[[], object]] = {
    "linear_recurrence": lambda: kernels.linear_recurrence(x, x, x)[0],
    "delta_rule": lambda: kernels.delta_rule(x, x, x, torch.ones(1, 4, 2))[0],
    "window_attention": lambda: kernels.window_attention(x, x, x),
}


def ran(name: str) -> str:
    """The backend that an op ran on: only the chunkwise one makes matrix products of all tokens at once."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, kernels.backend(name) if name else torch.no_grad():
        kernels.linear_recurrence(x, x, x)
    return "torch" if counter.get_total_flops() else "reference"


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_the_named_backend_runs(name: str):
    assert ran(name) == name


def test_auto_is_torch_on_the_cpu():
    assert ran("auto") == ran("") == "torch"


@pytest.mark.parametrize("op", OPS)
def test_an_unavailable_backend_is_an_error_and_no_fallback(op: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with (
        kernels.backend("triton"),
        pytest.raises(kernels.UserError, match=rf"^backend: {op} .*'triton'.*torch.*reference"),
    ):
        OPS[op]()


def test_an_unknown_backend_names_the_known_ones():
    with (
        pytest.raises(kernels.UserError, match=r"^backend: 'cuda' .*auto.*triton.*torch.*reference"),
        kernels.backend("cuda"),
    ):
        pass


def test_nesting_restores():
    with kernels.backend("reference"):
        with kernels.backend("torch"):
            assert ran("") == "torch"
        assert ran("") == "reference"
        with pytest.raises(RuntimeError, match="inside"), kernels.backend("torch"):
            raise RuntimeError("inside")
        assert ran("") == "reference"
        with pytest.raises(kernels.UserError, match="nonsense"), kernels.backend("nonsense"):
            pass
        assert ran("") == "reference"
    assert ran("") == "torch"


def test_other_threads_are_not_affected():
    with kernels.backend("reference"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(ran, "").result() == "torch"


def in_another_thread(run: Callable[[], object], name: str = "auto") -> None:
    """As autograd runs a backward pass on a GPU: nothing is known there of the thread that computed forward."""

    def elsewhere() -> None:
        with kernels.backend(name):
            run()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere).result()


def inputs(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """q = k = v of a recurrence with a gradient, and its log decay."""
    generator = torch.Generator().manual_seed(1)
    x, decay = torch.randn(1, 70, 2, 8, generator=generator), -torch.rand(1, 70, 2, generator=generator)
    return F.normalize(x, dim=-1).to(device).requires_grad_(), decay.to(device)


DIFFERENTIABLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear_recurrence": lambda x, decay: kernels.linear_recurrence(x, x, x, decay)[0],
    "delta_rule": lambda x, decay: kernels.delta_rule(x, x, x, decay.exp(), decay)[0],
    "window_attention": lambda x, decay: kernels.window_attention(x, x, x, window_size=3),
    "selective_scan": lambda x, decay: kernels.selective_scan(x[:, :, 0], x[:, :, 1] - 2)[0],
    "features": lambda x, decay: kernels.features(x, activation="silu", norm="l2")[0],
    "rms_norm": lambda x, decay: kernels.rms_norm(x),
    "gated_rms_norm": lambda x, decay: kernels.gated_rms_norm(x, x),
    "gated_linear": lambda x, decay: kernels.gated_linear(x, x[0, :3, 0, :4]),
    "discretise": lambda x, decay: kernels.discretise(x, x[0, 0, 0], x[0, 0, 1])[0],
    "forget_gate": lambda x, decay: kernels.forget_gate(x, x[0, 0, 0], x[0, 0, 1]),
    "precondition": lambda x, decay: precondition(x, x.square() + 1, decay, x[0, 0, :, 0], limit=1.5),
    "low_rank_forget_gate": lambda x, decay: kernels.low_rank_forget_gate(x[0], x[0, :3, 0], x[0, 0, 0, :3]),
    "linear_cross_entropy": lambda x, decay: kernels.linear_cross_entropy(x[0, :, 0], x[0, :, 1], torch.arange(70)),
    "linear_kl": lambda x, decay: kernels.linear_kl(*(x[0, :, i] for i in (0, 1, 1, 0)), torch.arange(70)),
}


@pytest.mark.parametrize("op", DIFFERENTIABLE)
@pytest.mark.parametrize("name", ["torch", "reference"])
def test_a_backward_pass_does_not_ask_again(name: str, op: str):
    """Where it is called another backend is chosen, which cannot even run here."""
    x, decay = inputs()
    with kernels.backend(name):
        y = DIFFERENTIABLE[op](x, decay).square().sum()
    (expected,) = torch.autograd.grad(y, x, retain_graph=True)
    in_another_thread(y.backward, "triton")
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def computed_again(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint runs twice on the backend of its forward pass, as often as there are backward passes."""
    run: list[str] = []
    recurrence = sys.modules["kernels.linear_recurrence"].OP
    for other in list(recurrence.implementations):
        if other != "triton" or name == "triton":  # which is imported where it can run
            counted = partial(lambda other, one, a: (run.append(other), one(a))[1], other, recurrence.load(other))
            monkeypatch.setitem(recurrence.implementations, other, counted)
    x, decay = inputs(device)
    op = DIFFERENTIABLE["linear_recurrence"]
    with kernels.backend(name):
        (expected,) = torch.autograd.grad(op(x, decay).square().sum(), x)
        y = checkpoint(op, x, decay, use_reentrant=False, context_fn=kernels.same_backend).square().sum()
    in_another_thread(lambda: y.backward(retain_graph=True))
    in_another_thread(y.backward, "reference" if name == "torch" else "torch")
    assert run == 4 * [name]
    torch.testing.assert_close(x.grad, 2 * expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_a_checkpoint_is_computed_again_on_the_same_backend(name: str, monkeypatch: pytest.MonkeyPatch):
    computed_again("cpu", name, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "reference", "triton"])
def test_a_checkpoint_on_a_gpu_is_computed_again_on_the_same_backend(name: str, monkeypatch: pytest.MonkeyPatch):
    """There the second computation runs in a thread of autograd."""
    computed_again("cuda", name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "said"), [("reference", "the loop ran"), ("tritn", "ZOO_BACKEND: 'tritn' is not one of auto")]
)
def test_the_environment_chooses_for_a_process(value: str, said: str):
    script = """
import sys, torch, kernels
op = sys.modules["kernels.linear_recurrence"]
loop = op.OP.implementations["reference"]
op.OP.implementations["reference"] = lambda a: sys.stdout.write("the loop ran") and loop(a)
x = torch.ones(1, 2, 1, 4)
try:
    kernels.linear_recurrence(x, x, x)
except kernels.UserError as error:
    sys.stdout.write(str(error))
"""
    environment = {**os.environ, "ZOO_BACKEND": value, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert said in done.stdout, done.stderr


FALLING_BACK: dict[str, Callable[[int], object]] = {  # of a length; one channel more than the kernels hold
    "delta_rule of 257 channels": lambda T: kernels.delta_rule(
        *2 * [torch.empty(1, T, 2, 257)], torch.empty(1, T, 2, 8), torch.empty(1, T, 2)
    ),
    "features of 1025 channels": lambda T: kernels.features(torch.empty(1, T, 2, 1025), norm="l2"),
    "rms_norm of 8193 channels": lambda T: kernels.rms_norm(torch.empty(T, 8193)),
    "linear_recurrence of 8 channels": lambda T: kernels.linear_recurrence(
        *3 * [torch.empty(1, T, 2, 8, dtype=torch.float64)]
    ),
}


def fall_back(said: str, caplog: pytest.LogCaptureFixture) -> None:
    for length in (4, 5, 5):
        FALLING_BACK[said](length)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kernels.core.backend"]
    assert line.startswith(f"{said} runs in PyTorch, not on 'triton', which ")


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    """What was said in earlier tests is said again."""
    sys.modules["kernels.core.backend"]._say.cache_clear()


@pytest.mark.parametrize("said", FALLING_BACK)
def test_a_fallback_on_a_gpu_is_said_once(said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """On a GPU that is made up: the ops find tensors there, and compute nothing."""
    for op in ("delta_rule", "linear_recurrence"):  # which would ask for memory there
        monkeypatch.setitem(sys.modules[f"kernels.{op}"].OP.implementations, "torch", lambda a: (a.v, a.v))
    with FakeTensorMode(), torch.device("cuda"):
        fall_back(said, caplog)


@pytest.mark.gpu
@pytest.mark.parametrize("said", FALLING_BACK)
def test_a_fallback_on_a_real_gpu_is_said_too(said: str, caplog: pytest.LogCaptureFixture):
    with torch.device("cuda"):
        fall_back(said, caplog)


def test_long_values_do_not_fall_back(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Each on a GPU that is made up: the sizes of Gated DeltaNet 1.3B and H1 1.3B, and long values."""
    served = []
    for op in ("delta_rule", "linear_recurrence"):
        implementations = sys.modules[f"kernels.{op}"].OP.implementations
        monkeypatch.setitem(implementations, "triton", lambda a: served.append(a.v.shape) or (a.v, a.v))
    monkeypatch.setattr(sys.modules["kernels.core.backend"], "has_triton", lambda: True)
    sizes = [(200, 400), (192, 384), (256, 512), (128, 512), (64, 1024)]
    with FakeTensorMode(), torch.device("cuda"):
        for K, V in sizes:
            q, v = torch.empty(1, 4, 2, K), torch.empty(1, 4, 2, V)
            kernels.delta_rule(q, q, v, torch.empty(1, 4, 2))
            kernels.linear_recurrence(q, q, v)
    assert [shape[3] for shape in served] == [V for _, V in sizes for _ in range(2)]
    assert not [record for record in caplog.records if record.name == "kernels.core.backend"]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_what_ran_is_told(compiled: bool):
    q, v = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
    run = torch.compile(kernels.linear_recurrence, backend="eager") if compiled else kernels.linear_recurrence
    with kernels.implementations() as actual:
        run(q, q, v)
        with kernels.backend("reference"), kernels.implementations() as inner:
            kernels.rms_norm(q)
            kernels.linear_recurrence(q, q, v)
    assert actual == {"linear_recurrence": {"torch"}}
    assert inner == {"linear_recurrence": {"reference"}, "rms_norm": {"reference"}}
    kernels.rms_norm(q)
    assert "rms_norm" not in actual  # afterwards, nothing is noted


def test_nothing_is_said_where_nothing_falls_back(caplog: pytest.LogCaptureFixture):
    keys = torch.randn(1, 4, 2, 257)
    kernels.delta_rule(keys, keys, keys, torch.ones(1, 4, 2))
    with FakeTensorMode(), torch.device("cuda"), kernels.backend("torch"):
        kernels.rms_norm(torch.empty(5, 8193))
    assert not [record for record in caplog.records if record.name == "kernels.core.backend"]
