"""Kernels that start before the one in front of them has finished read what it wrote."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from kernels.gpu import device as device_module
from kernels.gpu import launch as launch_module
from kernels.gpu.device import GPUS, assumed, overlaps
from kernels.gpu.launch import LaunchSpec, enqueue
from kernels.gpu.overlap import prefetch, wait

from ..places import PLACES

SIZE, BLOCK = 1 << 16, 128


@triton.jit
def add_neighbour(x, y, size, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, OVERLAP: tl.constexpr):
    """y = x + the next number of x, which another program wrote; early programs would wait long for the last one."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    prefetch(x, tl.program_id(0) * BLOCK, BLOCK, BLOCK, OVERLAP)
    wait(OVERLAP)
    total = tl.load(x + at)
    for _ in range(ROUNDS):
        total += tl.load(x + (at + 1) % size) / ROUNDS
    tl.store(y + at, total)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_chain_of_launches(overlap: bool, prepared: bool, place: str):
    """Each reads what programs of the one before wrote, and overwrites what the one before that read."""
    size = SIZE if place == "cuda" else 2 * BLOCK
    x = [torch.arange(size, device=place).remainder(64).float(), torch.full((size,), torch.nan, device=place)]
    expected = x[0].clone()
    constants = {"BLOCK": BLOCK, "ROUNDS": 4}
    spec = LaunchSpec(add_neighbour, size // BLOCK, size, overlap=overlap, **constants)
    for i in range(12):
        tensors = (x[i % 2], x[1 - i % 2])
        if prepared:
            spec(*tensors)
        else:
            enqueue(add_neighbour, size // BLOCK, *tensors, size, **constants, overlap=overlap)
        expected = expected + expected.roll(-1)
    assert torch.equal(x[0], expected)


@pytest.mark.gpu
def test_a_chain_in_a_graph():
    x = [torch.ones(SIZE, device="cuda"), torch.empty(SIZE, device="cuda")]
    spec = LaunchSpec(add_neighbour, SIZE // BLOCK, SIZE, overlap=True, BLOCK=BLOCK, ROUNDS=4)

    def chain() -> None:
        for i in range(40):
            spec(x[i % 2], x[1 - i % 2])
            if i % 10 == 9:
                x[0].mul_(2.0**-10)  # a kernel that neither waits nor lets others start early

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        x[0].copy_(torch.arange(SIZE, device="cuda") % 2)
        graph.replay()
        assert torch.equal(x[0], torch.full_like(x[0], 0.5))


def test_only_hopper_overlaps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_module, "DIRECT", True)
    for name, gpu in GPUS.items():
        with assumed(gpu):
            assert overlaps(torch.device("cuda")) is (name in ("H100", "H200"))
            assert not overlaps(torch.device("cpu"))
    monkeypatch.setattr(device_module, "DIRECT", False)
    with assumed(GPUS["H100"]):
        assert not overlaps(torch.device("cuda"))


@pytest.mark.parametrize("possible", [False, True])
def test_the_option_of_the_compiler(possible: bool, monkeypatch: pytest.MonkeyPatch):
    """The constant and the option go together, and launches that may not overlap have neither."""
    monkeypatch.setattr(launch_module, "overlaps", lambda device: possible)
    launched = []
    kernel = SimpleNamespace(fn=add_neighbour.fn)
    recorder = type("Recorder", (), {"fn": kernel.fn, "__getitem__": lambda self, grid: self.note})()
    recorder.note = lambda *args, **constants: launched.append(constants)
    x = torch.zeros(BLOCK)
    enqueue(recorder, 1, x, x, BLOCK, overlap=True, BLOCK=BLOCK)
    enqueue(recorder, 1, x, x, BLOCK, BLOCK=BLOCK)
    assert [constants.get("OVERLAP") for constants in launched] == [possible, None]
    assert [constants.get("launch_pdl", False) for constants in launched] == [possible, False]
