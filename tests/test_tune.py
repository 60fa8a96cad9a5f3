"""`dev/tune.py`: its candidates, and the calls that it makes to time a kernel. Nothing is timed on a GPU here."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from dev import tune
from dev.tune import Target, candidates, cases, fits
from kernels.delta_rule.gpu import plan as gpu_plan
from kernels.delta_rule.gpu.general import plan as general_plan
from kernels.gpu import device, launch_table
from kernels.gpu.device import HOPPER, OTHER
from kernels.gpu.launch import LaunchSpec
from kernels.gpu.launch_table import TABLE, LaunchConfig, optional
from kernels.gpu.miscompilations import miscompiled
from zoo.performance.bench_calls import BenchCall, Shape

GPU = torch.device("cuda", 6)
BF16, SHARED = torch.bfloat16, 227 << 10
GENERAL = [kernel for kernel in TABLE if kernel.startswith("general_delta_rule.")]


def forget() -> None:
    for cached in (device._capability, launch_table._entry, launch_table._largest):
        cached.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    for kernel, entries in TABLE.items():
        monkeypatch.setitem(TABLE, kernel, dict(entries))
    forget()
    yield
    forget()


def test_candidates_differ_in_one_number():
    entry = LaunchConfig(4, 2, values=64)
    near = candidates(Target("delta_rule.forward", 64, 2), entry, SHARED, OTHER)
    assert near[0] == entry
    assert {e.values for e in near} == {32, 64, 128}
    assert {e.warps for e in near} == {2, 4, 8}
    assert {e.stages for e in near} == {1, 2, 3, 4}
    assert all(sum(x != y for x, y in zip(each, entry, strict=True)) == 1 for each in near[1:])


def test_what_cannot_fit_is_not_tried():
    forward = Target("delta_rule.forward", 256, 4)
    entry = LaunchConfig(4, 2, values=64)
    assert not fits(forward, entry, 99 << 10)
    assert fits(forward, entry._replace(stages=1), 99 << 10)  # nothing is in flight
    assert fits(forward, entry, SHARED)
    assert fits(Target("linear_recurrence.step", 256, 4), LaunchConfig(4, 4, block=64), 1)


@pytest.mark.parametrize("kernel", TABLE)
def test_no_candidate_is_known_to_be_compiled_wrongly(kernel: str):
    for (gpu, _, itemsize), entry in TABLE[kernel].items():
        for size in (64, 128, 256):
            offered = candidates(Target(kernel, size, itemsize), entry, SHARED, HOPPER)
            assert all(miscompiled(kernel, each._asdict(), HOPPER) is None for each in offered)
            if gpu == HOPPER:
                assert len(offered) <= len(candidates(Target(kernel, size, itemsize), entry, SHARED, OTHER))


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("kernel", TABLE)
def test_present_entries_fit_and_have_calls(kernel: str, size: int, hopper: None):
    for itemsize in (2, 4):
        entry = tune.present(target := Target(kernel, size, itemsize), GPU)
        if entry is not None:
            assert fits(target, entry, SHARED)
        assert list(cases(target, timed=True))
        assert list(cases(target, timed=False))


def test_calls_reach_the_kernel_that_is_meant(hopper: None, monkeypatch: pytest.MonkeyPatch):
    for processors in (108, 128, 132, 160):
        monkeypatch.setattr(gpu_plan, "multiprocessors", lambda device: processors)  # noqa: B023
        for size in (64, 128):
            forward, narrow = (optional(f"delta_rule.{name}", size, BF16, GPU) for name in ("forward", "narrow"))
            for name in ("forward", "backward", "narrow"):
                used, segments = set(), set()
                for timed in (True, False):
                    for _, (B, H, T, D) in cases(Target(f"delta_rule.{name}", size, 2), timed=timed):
                        room = gpu_plan.fitting(forward, B * H, D, GPU)
                        cut = gpu_plan.segments(room, -(-T // 64)) > 1
                        used.add("narrow" if narrow and room > 1 and not cut else "wide")
                        segments.add(cut)
                assert used == {"narrow"} if name == "narrow" else "wide" in used
                assert segments == ({False} if name == "narrow" else {False, True})


def general_launches(heads: int) -> dict[str, LaunchSpec]:
    """The launches of a general delta rule over keys and values of 64 channels in bf16; `pass` is the forward one."""
    sizes = torch.Size((1, 256, heads, 64))
    plan, per_head = (
        general_plan.GeneralDeltaRule(sizes, sizes, 1, 1.0, gate, False, False, BF16, GPU, None)
        for gate in ("channel", "head")
    )
    plan.layout = per_head.layout = SimpleNamespace(chunks=range(4))
    launches = {"prepare": plan.prepare(), "pass": plan.forward(), "backward": plan.backward()}
    launches |= {"scalar_prepare": per_head.scalar_prepare(), "scalar_gradients": per_head.scalar_gradients()}
    return launches | {"pairs": plan.pairs(), "gradients": plan.gradients()}


@pytest.mark.parametrize("kernel", GENERAL)
def test_an_entry_that_is_tried_changes_one_launch(kernel: str, hopper: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(general_plan, "multiprocessors", lambda device: 132)
    target = Target(kernel, 64, 2)
    entry = tune.present(target, GPU)
    assert entry is not None
    heads = 4 if kernel.endswith(".narrow") else 100
    before = general_launches(heads)
    tune.use(target, entry._replace(warps=2), GPU)
    assert tune.present(target, GPU) == entry._replace(warps=2)
    after = general_launches(heads)
    name = "pass" if kernel.endswith((".forward", ".narrow")) else kernel.partition(".")[2]
    assert {each for each in before if before[each].warps != after[each].warps} == {name}
    assert after[name].warps == 2


def test_what_is_wrong_or_does_not_repeat_is_found(monkeypatch: pytest.MonkeyPatch):
    """On the CPU, where the chunkwise form stands in for Triton."""
    case = BenchCall("delta_rule", Shape(1, 2, 70, 16), "fp32", torch.device("cpu"), "torch", window=1)
    assert tune.fault(case, 4) is None
    package = sys.modules["kernels.delta_rule"]
    right, factors = package.chunk.forward, dict[int, float]()
    calls: list[object] = []

    def wrong(arguments):
        calls.append(arguments)
        o, state = right(arguments)
        return o * factors.get(len(calls), 1.0), state

    monkeypatch.setitem(package.OP.implementations, "torch", wrong)
    factors[1] = 1.01  # the first call is the candidate's, the second the one it is compared with
    assert "o is off by 1.0e-02" in str(tune.fault(case, 4))
    calls.clear()
    factors.clear()
    factors[12] = 1.00001
    assert tune.fault(case, 4) == "delta_rule: results do not repeat"


def test_a_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert tune.in_process(Target("delta_rule.dq", 64, 2), LaunchConfig(4, 2, keys=64, values=32)) == {
        "wrong": "exit code 1"
    }


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel", ["linear_recurrence.carry", "linear_recurrence.step", "delta_rule.forward", "delta_rule.narrow"]
)
def test_present_entries_pass_on_a_device(kernel: str):
    target = Target(kernel, 64, 2)
    entry = tune.present(target, torch.device("cuda"))
    assert entry is not None
    assert 0 < tune.in_process(target, entry)["ms"] < 1000
