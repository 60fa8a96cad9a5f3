"""Several processes, each with a part of every sequence, compute what one computes with all of it."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mixers
from kernels.core import static_documents as static
from kernels.core.documents import documents
from mixers import ContextParallel
from mixers.base import positions
from mixers.context_parallel import IN_FLIGHT, exchanged_once
from mixers.two_layers import TwoLayers
from tests.zoo.lm.test_rwkv7 import AsTokenMixer

from .variants import CAUSAL, PRECONDITIONED

SITE = mixers.Site(hidden_size=64, num_heads=2, layer=1, num_layers=3)
LENGTH = 25  # three processes hold 9, 8 and 8 tokens, and two 13 and 12
LAYOUTS: dict[str, list[int] | None] = {  # boundaries of packed documents
    "whole sequences": None,
    "a document over all parts": [0, 0, 4, LENGTH],
    "documents that begin with a part, and before one": [0, 9, 9, 10, 16, 20, LENGTH, LENGTH],
}
LONG_CONV = mixers.Features(12, activation="silu", norm="l2")  # reaches over a whole part
GDN = mixers.GatedDeltaNet
RWKV7 = partial(mixers.RWKV7, head_dim=32)
ABOVE_ANOTHER = partial(TwoLayers, lower=RWKV7, upper=RWKV7)
CASES: dict[str, Callable[[mixers.Site], mixers.TokenMixer]] = {
    **CAUSAL,
    "TPE": mixers.TPE,
    "window over several parts": partial(mixers.SlidingWindowAttention, window_size=12, num_kv_heads=1),
    "a norm over all heads, partly rotary, and a gate": partial(
        mixers.SoftmaxAttention,
        num_kv_heads=1,
        qk=mixers.Features(map=partial(mixers.Rotary, fraction=0.5)),
        qk_norm=mixers.RMSNorm,
        qk_norm_over="width",
        gate="channel",
        bias=True,
    ),
    "forgetting attention, Pro": partial(
        mixers.ForgettingAttention, num_kv_heads=1, shift=True, output=mixers.SigmoidGatedRMSNorm
    ),
    "latent attention without positions": partial(mixers.MultiheadLatentAttention, rotary=None, value_dim=20),
    "RWKV7 above another": ABOVE_ANOTHER,
    "RWKV7's channel mix": AsTokenMixer,
    "convolution over several parts": partial(GDN, qk=LONG_CONV),
    "subheads": mixers.Expanded(mixer=GDN, factor=2),
    "wide keys": mixers.Expanded(mixer=mixers.GLA, factor=2, subheads=False),
    "computed again": mixers.Expanded(mixer=GDN, factor=2),
    "computed again, exchanged once": partial(mixers.MLSTM, qk=LONG_CONV),
    **{f"{name}, subheads": mixers.Expanded(mixer=each, factor=2) for name, each in PRECONDITIONED.items()},
}


def mixed(case: str, mixer: mixers.TokenMixer, x: Tensor, part: ContextParallel) -> Tensor:
    """What a mixer makes of a part of each sequence."""
    options = {"cu_seqlens": part.cu_seqlens, "context_parallel": part}
    if case.startswith("computed again"):  # in the backward pass
        contexts = {"context_fn": exchanged_once} if "once" in case else {}
        return checkpoint(mixer, x, use_reentrant=False, **contexts, **options)[0]
    return mixer(x, **options)[0]


def built(case: str) -> mixers.TokenMixer:
    """A mixer in fp64 without zeros, behind which an output projection would hide everything."""
    torch.manual_seed(0)
    mixer = CASES[case](SITE).double()
    for parameter in mixer.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter) if not parameter.any() else 0)
    return mixer


def in_pieces(copies: list[mixers.TokenMixer], x: Tensor, bounds: list[int]) -> list[tuple[int, slice, Tensor]]:
    """Each part by another copy of a mixer, which continues the states of the copy before: copy, place and output."""
    parts = [each.tolist() for each in torch.arange(LENGTH).tensor_split(len(copies))]
    pieces = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        state = copies[0].init_state(len(x))
        for number, (mixer, part) in enumerate(zip(copies, parts, strict=True)):
            place = slice(max(start, part[0]), min(stop, part[-1] + 1))
            if place.start < place.stop:
                y, state = mixer(x[:, place], state)
                pieces.append((number, place, y))
    return pieces


def compared(case: str, layout: str, sharing: ContextParallel) -> dict[str, float]:
    """Largest differences to one process: of the outputs of this part, and of the gradients that this process has."""
    mixer, bounds = built(case), LAYOUTS[layout]
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    x, dy = torch.randn(2, 2 if bounds is None else 1, LENGTH, SITE.hidden_size, dtype=torch.float64)
    y, _ = mixer(x.requires_grad_(), cu_seqlens=cu_seqlens)
    (dx,) = torch.autograd.grad(y, x, dy)
    copies = [deepcopy(mixer) for _ in range(sharing.count)]
    pieces = in_pieces(copies, x, bounds or [0, LENGTH])
    outputs, gradients = [y for *_, y in pieces], [dy[:, place] for _, place, _ in pieces]
    expected = torch.autograd.grad(outputs, list(copies[sharing.rank].parameters()), gradients, allow_unused=True)

    part = sharing.of(LENGTH, cu_seqlens)
    own = mixed(case, mixer, part.take(x), part)
    named = {"x": x, **dict(mixer.named_parameters())}
    gradients = torch.autograd.grad(own, list(named.values()), part.take(dy))
    pairs = zip(gradients, (torch.where(part_of(part, x), dx, 0), *expected), strict=True)
    errors = [float((gradient - (0 if other is None else other)).abs().max()) for gradient, other in pairs]
    return {"y": float((own - part.take(y)).detach().abs().max()), **dict(zip(named, errors, strict=True))}


def part_of(part: ContextParallel, x: Tensor) -> Tensor:
    """Return whether each token of x is in this part [1,T,1]."""
    here = torch.zeros(1, x.shape[1], 1, dtype=torch.bool)
    part.take(here).fill_(True)
    return here


def trained(rank: int, count: int) -> dict[str, float]:
    """Compare the loss of groups of processes, each with its own batch and number of labels, with one process."""
    size = 2 if count % 2 == 0 else count
    group, _ = dist.new_subgroups(size)
    part = ContextParallel(group).of(LENGTH)
    torch.manual_seed(0)
    mixer = mixers.GLA(SITE).double()
    batches = torch.randn(count // size, 2, LENGTH, SITE.hidden_size, dtype=torch.float64)
    labelled = torch.rand(count // size, 2, LENGTH) > 0.4
    pairs = zip(batches, labelled, strict=True)
    means = [(mixer(x)[0].square().mean(-1) * here).sum() / here.sum() for x, here in pairs]
    expected = torch.autograd.grad(sum(means) / len(means), list(mixer.parameters()))
    x, here = part.take(batches[rank // size]), part.take(labelled[rank // size])
    loss = part.mean((mixer(x, context_parallel=part)[0].square().mean(-1) * here).sum(), here.sum())
    gradients = torch.autograd.grad(loss, list(mixer.parameters()))
    errors = {"loss": abs(loss.item() - means[rank // size].item())}
    for number, (own, whole) in enumerate(zip(gradients, expected, strict=True)):
        dist.all_reduce(own)
        errors[f"gradient {number}"] = float((own / count - whole).abs().max())
    return errors


def work(rank: int, count: int, folder: str) -> None:
    """Write the differences that one process computes."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(minutes=5))
    sharing = ContextParallel()
    differences = {case: {layout: compared(case, layout, sharing) for layout in LAYOUTS} for case in CASES}
    differences["training"] = {"groups": trained(rank, count)}
    sharing.finish()
    Path(folder, f"{rank}.json").write_text(json.dumps(differences))
    dist.destroy_process_group()


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, marks=pytest.mark.nightly), 3, pytest.param(4, marks=pytest.mark.nightly)],
    ids=lambda count: f"{count} processes",
)
def differences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The differences that each process computed."""
    folder, count = tmp_path_factory.mktemp("group"), request.param
    mp.get_context("forkserver").set_forkserver_preload(["mixers"])  # imported once for all of them
    mp.start_processes(work, (count, str(folder)), nprocs=count, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "training"])
def test_parts_are_the_whole(differences: list[dict], case: str) -> None:
    for rank, layouts in enumerate(differences):
        for layout, errors in layouts[case].items():
            for name, error in errors.items():
                assert error < 1e-9, f"{name} in process {rank}, {layout}"


LARGE = mixers.Site(hidden_size=512, num_heads=4, layer=1, num_layers=3)
# keys of 128 with values of 128, whose matrices take as many columns as the kernels hold, and with values of 256
ON_GPUS: dict[str, Callable[[mixers.Site], mixers.TokenMixer]] = {
    "Gated DeltaNet, 256 columns": partial(GDN, head_dim=128),
    "Gated DeltaNet, long values": partial(GDN, head_dim=128, value_dim=256),
    "subheads": mixers.Expanded(mixer=GDN, factor=4),
    **{name: mixers.get(name) for name in ("Mamba2", "GLA", "Mamba1", "CosFormer2", "SoftmaxAttention")},
    **{name: mixers.get(name) for name in ("KDA", "GatedDeltaNet2", "Comba", "GatedDeltaProduct", "MLSTM", "Mamba3")},
    "GatedSlotAttention": mixers.GatedSlotAttention,
    **PRECONDITIONED,
    "window": partial(mixers.SlidingWindowAttention, window_size=256),
    "RWKV7 above another": ABOVE_ANOTHER,
}


PAIRS = min(len(ON_GPUS), max(1, (os.cpu_count() or 1) // 4))  # of processes at a time, each of which compiles kernels


def work_on_gpu(number: int, folder: str) -> None:
    """One process of a pair: writes the relative differences to one GPU, in bf16 as a run computes."""
    pair, rank = divmod(number, 2)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store-{pair}", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    differences, sharing = {}, ContextParallel()
    packed = torch.tensor([0, 100, 1900, 1900, 2300, 4095], dtype=torch.int32, device=device)
    for case in [*ON_GPUS][pair::PAIRS]:
        torch.manual_seed(0)
        mixer = ON_GPUS[case](LARGE).to(device)
        for parameter in mixer.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter) if not parameter.any() else 0)
        for layout, cu_seqlens in (("whole", None), ("packed", packed)):
            rows, length = (2, 4096) if cu_seqlens is None else (1, 4095)
            x, dy = (0.5 * torch.randn(2, rows, length, LARGE.hidden_size)).to(device)
            named, part = dict(mixer.named_parameters()), sharing.of(length, cu_seqlens)
            with torch.autocast("cuda", torch.bfloat16):
                y, _ = mixer(x, cu_seqlens=cu_seqlens)
                own, _ = mixer(part.take(x), cu_seqlens=part.cu_seqlens, context_parallel=part)
            gradients = torch.autograd.grad(y, list(named.values()), dy.to(y.dtype))
            summed = torch.autograd.grad(own, list(named.values()), part.take(dy).to(y.dtype))
            for gradient in summed:
                dist.all_reduce(gradient)
            pairs = {"y": (own, part.take(y)), **dict(zip(named, zip(summed, gradients, strict=True), strict=True))}
            differences[f"{case}, {layout}"] = {
                name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()
            }
    Path(folder, f"{number}.json").write_text(json.dumps(differences))
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_two_gpus_are_one(tmp_path: Path) -> None:
    mp.start_processes(work_on_gpu, (str(tmp_path),), nprocs=2 * PAIRS, start_method="spawn")
    compared = set()
    for number in range(2 * PAIRS):
        for case, errors in json.loads((tmp_path / f"{number}.json").read_text()).items():
            compared.add(case)
            for name, error in errors.items():
                assert error < 3e-2, f"{name} of {case} in process {number % 2}"
    assert len(compared) == 2 * len(ON_GPUS)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[ContextParallel]:
    """The part of a group of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield ContextParallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["GLA", "Mamba1", "SoftmaxAttention", "Mamba3", "MLSTM", "RWKV7"])
def test_a_state_cannot_be_shared(name: str, alone: ContextParallel) -> None:
    x, mixer = torch.randn(1, 4, SITE.hidden_size), CAUSAL[name](SITE)
    with pytest.raises(mixers.UserError, match="a state can be continued by one process only"):
        mixer(x, mixer.init_state(1), context_parallel=alone.of(4))
    mixer(x, mixer.init_state(1))


def test_boundaries_are_those_of_the_part(alone: ContextParallel) -> None:
    x, mixer, cu_seqlens = torch.randn(1, 4, SITE.hidden_size), mixers.GLA(SITE), torch.tensor([0, 2, 4])
    part = alone.of(4, cu_seqlens)
    for wrong in ({"context_parallel": part}, {"context_parallel": alone.of(4), "cu_seqlens": cu_seqlens}):
        with pytest.raises(mixers.UserError, match="cu_seqlens: must be those of the part"):
            mixer(x, **wrong)
    with pytest.raises(mixers.UserError, match=r"pass what ContextParallel\.of"):
        mixer(x, context_parallel=alone)


@pytest.mark.parametrize("length", [3, 4, 5, 100])
def test_parts_are_as_long_as_each_other(length: int, alone: ContextParallel) -> None:
    x, parts = torch.arange(length)[None], []
    alone.count = 3
    for alone.rank in range(3):
        parts.append(alone.of(length).take(x)[0])
    assert [each.tolist() for each in parts] == [each.tolist() for each in x[0].tensor_split(3)]


def test_documents_of_each_part(alone: ContextParallel) -> None:
    alone.count, cu_seqlens, parts = 3, torch.tensor([0, 0, 3, 6, 10, 10, 12], dtype=torch.int32), []
    for alone.rank in range(3):
        part = alone.of(12, cu_seqlens)
        assert part.cu_seqlens.dtype == torch.int32
        where = part.positions(part.cu_seqlens.device)[0].tolist()
        parts.append((part.cu_seqlens.tolist(), where, part.continued_tokens().tolist(), part.longest))
    assert parts == [
        ([0, 3, 4], [0, 1, 2, 0], [True, True, True, False], 4),
        ([0, 2, 4], [1, 2, 0, 1], [True, True, False, False], 4),
        ([0, 2, 4], [2, 3, 0, 1], [True, True, False, False], 4),
    ]


def test_each_process_needs_a_token(alone: ContextParallel) -> None:
    alone.count = 3
    with pytest.raises(mixers.UserError, match="2 tokens cannot be divided into 3 parts; each needs at least one"):
        alone.of(2)


def test_a_graph_exchanges_packed_documents_without_the_host(
    alone: ContextParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of the second of three parts, tokens 4 to 7, after documents have changed."""
    messages: list[list[float]] = []
    monkeypatch.setattr(ContextParallel, "put", lambda self, x, rank: messages.append(x[0].flatten().tolist()))
    monkeypatch.setattr(ContextParallel, "get", lambda self, like, rank: [torch.ones_like(x) for x in like])
    alone.rank, alone.count = 1, 3

    def results(cu_seqlens: Tensor) -> list[Any]:
        part, x = alone.of(12, cu_seqlens), torch.arange(4.0, 8.0).view(1, 4, 1)
        rows = len(part.cu_seqlens) - 1
        messages.clear()
        state = part.continued(lambda state: (state, state + torch.arange(rows)), torch.zeros(rows), [])
        _, (history,) = part.histories([x], [3])
        places, _ = positions(x, None, part.cu_seqlens, part)
        return [y.tolist() for y in (state, history[0, :, 0], places[0], part.longer_documents(2))] + messages

    def padded(state: list[float], history: list[float], places: list[int], bounds: list[int], *sent: Any) -> list[Any]:
        """As the results of a graph, with empty documents at the end."""
        return [state + [0] * (2 - len(state)), history, places, bounds + bounds[-1:] * (3 - len(bounds)), *sent]

    rows = [torch.tensor(bounds) for bounds in ([0, 2, 6, 12], [0, 4, 9, 12], [0, 3, 9, 12], [0, 6, 9, 12])]
    expected = [padded(*results(cu_seqlens)) for cu_seqlens in rows]
    # the states and history before the first documents, positions, boundaries with two more tokens, and both messages
    assert expected[0] == [[1, 0], [0, 1, 1], [2, 3, 0, 1], [0, 4, 6], [1], [5, 6, 7]]
    assert expected[1] == [[0, 0], [0, 0, 0], [0, 1, 2, 3], [0, 2, 6], [0], [5, 6, 7]]
    assert expected[2] == [[1, 0], [0, 0, 1], [1, 2, 3, 4], [0, 1, 6], [1], [5, 6, 7]]
    there = static.static_copy(rows[0], 12)
    results(there)
    for cu_seqlens, each in zip(rows, expected, strict=True):
        assert static.static_documents(there, 12).fits(documents(cu_seqlens, 12))
        static.static_documents(there, 12).fill(documents(cu_seqlens, 12))
        with monkeypatch.context() as patch:
            patch.setattr(static, "capturing", lambda device: True)
            assert results(there) == each
    packed = static.static_documents(there, 12)
    assert packed.forbidden is None
    alone.of(12, there).before([torch.zeros(1, 4, 1)], 12)  # a window, also of the whole row
    assert packed.forbidden is None
    alone.of(12, there).before([torch.zeros(1, 4, 1)], None)
    assert (packed.forbidden or "").startswith("full attention")


class Ops(TorchDispatchMode):
    """Counts the ops of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["whole sequences", "a document over all parts"])
@pytest.mark.parametrize("case", ["GatedDeltaNet", "GLA", "Mamba2"])
def test_a_layer_makes_no_masks(
    case: str, layout: str, alone: ContextParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the last of two parts, the first layer of a batch makes what the streams do not determine, for all layers."""
    monkeypatch.setattr(ContextParallel, "get", lambda self, like, rank: [x.new_empty(x.shape) for x in like])
    alone.rank, alone.count, mixer, bounds = 1, 2, CASES[case](SITE), LAYOUTS[layout]
    part = alone.of(LENGTH, None if bounds is None else torch.tensor(bounds))
    x, counts = part.take(torch.randn(1, LENGTH, SITE.hidden_size)), []
    with torch.no_grad():
        for parts in ({"context_parallel": part}, {}):
            mixer(x, cu_seqlens=part.cu_seqlens, **parts)
            with Ops() as ops:
                mixer(x, cu_seqlens=part.cu_seqlens, **parts)
            counts.append(ops.counts)
    of_part, of_row = counts
    assert of_part != of_row
    assert part.positions(x.device).data_ptr() == part.positions(x.device).data_ptr()
    for name in ("arange", "gt", "eq", "zeros_like", "full", "new_full", "new_zeros", "lift_fresh", "_to_copy"):
        assert of_part[name] <= of_row[name], name


class Message:
    """A message that arrives when it is waited for."""

    def __init__(self) -> None:
        self.polls, self.waits = 0, 0

    def is_completed(self) -> bool:
        self.polls += 1
        return False

    def wait(self) -> None:
        self.waits += 1


def test_joined_messages_stay_within_their_block(alone: ContextParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a capture: nothing polls them, and the block neither waits for earlier messages nor leaves any."""
    messages: list[Message] = []
    monkeypatch.setattr(dist, "isend", lambda *_, **__: messages.append(Message()) or messages[-1])
    part, x = alone.of(4), torch.zeros(1)
    part.put([x], 1)
    with alone.joined():
        for _ in range(IN_FLIGHT + 2):
            part.put([x], 1)
        assert [each.waits for each in messages] == [0, 1, 1, *[0] * IN_FLIGHT]
    assert [each.waits for each in messages] == [0, *[1] * (IN_FLIGHT + 2)]
    assert [each.polls for each in messages] == [1, *[0] * (IN_FLIGHT + 2)]
    alone.finish()
    assert messages[0].waits == 1


def test_messages_of_a_failed_capture_are_dropped(alone: ContextParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    message, block = Message(), alone.joined()
    monkeypatch.setattr(dist, "isend", lambda *_, **__: message)
    block.__enter__()
    alone.put([torch.zeros(1)], 1)
    block.__exit__(RuntimeError, RuntimeError("not permitted"), None)
    alone.finish()
    assert message.waits == 0


def test_a_gradient_that_something_else_reads_stays(alone: ContextParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum passes one tensor on as the gradient of both terms."""
    monkeypatch.setattr(ContextParallel, "put", lambda *_: None)
    monkeypatch.setattr(ContextParallel, "get", lambda _, like, __: [torch.ones(x.shape) for x in like])
    alone.count = 2
    x, other, dy = (
        torch.randn(1, 4, 3, requires_grad=True),
        torch.randn(1, 4, 3, requires_grad=True),
        torch.randn(1, 4, 3),
    )
    (here,), _ = alone.of(8).before([x], 1)
    of_x, of_other = torch.autograd.grad(other + here, [x, other], dy)
    assert torch.equal(of_other, dy)
    assert torch.equal(of_x, dy + torch.tensor([0.0, 0, 0, 1]).view(1, 4, 1))


def test_the_signature_says_who_works_on_parts() -> None:
    class Whole(mixers.GLA):
        def forward(self, x, state=None, *, cu_seqlens=None):
            return super().forward(x, state, cu_seqlens=cu_seqlens)

    assert all(mixers.takes_context_parallel(mixers.get(name)) for name in mixers.names() if mixers.get(name).causal)
    assert not mixers.takes_context_parallel(Whole)
