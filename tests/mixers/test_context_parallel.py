"""Several processes, each with a part of every sequence, compute what one computes with all of it."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernels
import mixers
from mixers import ContextParallel
from mixers.context_parallel import run_recurrence, run_selective_scan
from mixers.two_layers import TwoLayers
from tests.zoo.lm.test_rwkv7 import AsTokenMixer

from .variants import CAUSAL, PRECONDITIONED

SITE = mixers.Site(hidden_size=64, num_heads=2, layer=1, num_layers=3)
LENGTH = 24
LONG_CONV = mixers.Features(8, activation="silu", norm="l2")  # reaches over a whole part of 6 tokens
GDN = mixers.GatedDeltaNet
RWKV7 = partial(mixers.RWKV7, head_dim=32)
ABOVE_ANOTHER = partial(TwoLayers, lower=RWKV7, upper=RWKV7)
CASES: dict[str, Callable[[mixers.Site], mixers.TokenMixer]] = {
    **CAUSAL,
    "TPE": mixers.TPE,
    "window over several parts": partial(mixers.SlidingWindowAttention, window_size=10, num_kv_heads=1),
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
    "matrices of a diagonal recurrence": mixers.GLA,
    "computed again": mixers.Expanded(mixer=GDN, factor=2),
    **{f"{name}, subheads": mixers.Expanded(mixer=each, factor=2) for name, each in PRECONDITIONED.items()},
}


def mixed(case: str, mixer: mixers.TokenMixer, x: Tensor, part: ContextParallel) -> Tensor:
    """What a mixer makes of a part of each sequence."""
    if case == "computed again":  # in the backward pass, by PyTorch's own means
        return checkpoint(mixer, x, use_reentrant=False, context_parallel=part)[0]
    return mixer(x, context_parallel=part)[0]


def compared(case: str, part: ContextParallel, patch: pytest.MonkeyPatch) -> dict[str, float]:
    """Largest difference to one process, by what differs: the own outputs, and gradients."""
    torch.manual_seed(0)
    mixer = CASES[case](SITE).double()
    for parameter in mixer.parameters():  # an output projection that starts at zero would hide everything
        parameter.data.add_(0.1 * torch.randn_like(parameter) if not parameter.any() else 0)
    x, dy = torch.randn(2, 2, LENGTH, SITE.hidden_size, dtype=torch.float64)
    named = {"x": x.requires_grad_(), **dict(mixer.named_parameters())}
    y, _ = mixer(x)
    gradients = torch.autograd.grad(y, list(named.values()), dy)
    if case == "matrices of a diagonal recurrence":
        patch.setattr(type(mixer), "recurrence", staticmethod(lambda *a, **b: kernels.linear_recurrence(*a, **b)))
    own = mixed(case, mixer, part.take(x), part)
    summed = torch.autograd.grad(own, list(named.values()), part.take(dy))
    for gradient in summed:
        dist.all_reduce(gradient)
    together = zip(named, summed, gradients, strict=True)
    return {"y": float((own.detach() - part.take(y).detach()).abs().max())} | {
        name: float((gradient - whole).abs().max()) for name, gradient, whole in together
    }


def trained(rank: int, count: int) -> dict[str, float]:
    """The same of the loss of pairs of processes, each with a batch of its own and other numbers of labels."""
    group, _ = dist.new_subgroups(2)
    part = ContextParallel(group)
    torch.manual_seed(0)
    mixer = mixers.GLA(SITE).double()
    batches = torch.randn(count // 2, 2, LENGTH, SITE.hidden_size, dtype=torch.float64)
    labelled = torch.rand(count // 2, 2, LENGTH) > 0.4
    pairs = zip(batches, labelled, strict=True)
    means = [(mixer(x)[0].square().mean(-1) * here).sum() / here.sum() for x, here in pairs]
    expected = torch.autograd.grad(sum(means) / len(means), list(mixer.parameters()))
    x, here = part.take(batches[rank // 2]), part.take(labelled[rank // 2])
    loss = part.mean((mixer(x, context_parallel=part)[0].square().mean(-1) * here).sum(), here.sum())
    gradients = torch.autograd.grad(loss, list(mixer.parameters()))
    errors = {"loss": abs(loss.item() - means[rank // 2].item())}
    for number, (own, whole) in enumerate(zip(gradients, expected, strict=True)):
        dist.all_reduce(own)
        errors[f"gradient {number}"] = float((own / count - whole).abs().max())
    return errors


def work(rank: int, count: int, folder: str) -> None:
    """One process: writes what it found."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    found = {}
    for case in CASES:
        with pytest.MonkeyPatch.context() as patch:
            found[case] = compared(case, ContextParallel(), patch)
    found["training"] = trained(rank, count)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.nightly), 4], ids=lambda count: f"{count} processes"
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each process found."""
    folder, count = tmp_path_factory.mktemp("group"), request.param
    mp.get_context("forkserver").set_forkserver_preload(["mixers"])  # imported once for all of them
    mp.start_processes(work, (count, str(folder)), nprocs=count, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "training"])
def test_parts_are_the_whole(found: list[dict], case: str) -> None:
    for rank, errors in enumerate(found):
        for name, error in errors[case].items():
            assert error < 1e-9, f"{name} in process {rank}"


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


def work_on_gpu(rank: int, folder: str) -> None:
    """One process of two: writes the relative differences to one GPU, in bf16 as a run computes."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    found = {}
    for case, build in ON_GPUS.items():
        torch.manual_seed(0)
        mixer = build(LARGE).to(device)
        for parameter in mixer.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter) if not parameter.any() else 0)
        x, dy = (0.5 * torch.randn(2, 2, 4096, LARGE.hidden_size)).to(device)
        named, part = dict(mixer.named_parameters()), ContextParallel()
        with torch.autocast("cuda", torch.bfloat16):
            y, _ = mixer(x)
            own, _ = mixer(part.take(x), context_parallel=part)
        gradients = torch.autograd.grad(y, list(named.values()), dy.to(y.dtype))
        summed = torch.autograd.grad(own, list(named.values()), part.take(dy).to(y.dtype))
        for gradient in summed:
            dist.all_reduce(gradient)
        pairs = {"y": (own, part.take(y)), **dict(zip(named, zip(summed, gradients, strict=True), strict=True))}
        found[case] = {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_two_gpus_are_one(tmp_path: Path) -> None:
    mp.start_processes(work_on_gpu, (str(tmp_path),), nprocs=2, start_method="spawn")
    for rank in range(2):
        for case, errors in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            for name, error in errors.items():
                assert error < 3e-2, f"{name} of {case} in process {rank}"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[ContextParallel]:
    """The part of a group of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield ContextParallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["GLA", "Mamba1", "SoftmaxAttention"])
def test_what_cannot_be_shared(name: str, alone: ContextParallel) -> None:
    x, mixer = torch.randn(1, 4, SITE.hidden_size), mixers.get(name)(SITE)
    with pytest.raises(mixers.UserError, match="packed documents cannot be shared"):
        mixer(x, cu_seqlens=torch.tensor([0, 2, 4]), context_parallel=alone)
    with pytest.raises(mixers.UserError, match="a state can be continued by one process only"):
        mixer(x, mixer.init_state(1), context_parallel=alone)
    mixer(x, mixer.init_state(1))


def test_parts_have_the_same_length(alone: ContextParallel) -> None:
    alone.count = 3
    with pytest.raises(mixers.UserError, match="3 processes cannot share 4 tokens equally"):
        alone.take(torch.randn(1, 4))


def test_the_signature_says_who_works_on_parts() -> None:
    class Whole(mixers.GLA):
        def forward(self, x, state=None, *, cu_seqlens=None):
            return super().forward(x, state, cu_seqlens=cu_seqlens)

    assert all(mixers.takes_context_parallel(mixers.get(name)) for name in mixers.names() if mixers.get(name).causal)
    assert not mixers.takes_context_parallel(Whole)


class Alone(ContextParallel):
    """A part whose state before it is known, instead of gathered."""

    def __init__(self, before: Tensor):
        self.before_it, self.summary = before, ()

    def first_state(self, transition: Tensor, local: Tensor) -> Tensor:
        self.summary = transition, local
        return self.before_it


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("shape", [(4,), (2, 12, 4), (2, 12, 4, 8)])
@pytest.mark.parametrize("op", [kernels.linear_recurrence, kernels.delta_rule])
def test_a_part_with_a_reset_forgets_what_was_before(op: Callable, shape: tuple[int, ...], at: int):
    q, k, v = torch.randn(3, 2, 12, 4, 8, dtype=torch.float64).unbind()
    decay, beta = -torch.rand(shape, dtype=torch.float64), torch.rand(2, 12, 4, dtype=torch.float64)
    decay[(slice(None), at) if len(shape) > 1 else ...] = -torch.inf
    k = torch.nn.functional.normalize(k, dim=-1)
    leaves = [x.requires_grad_() for x in (q, k, v, decay, beta)]
    before = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    part, gates = Alone(before), {"log_decay": decay, "beta": beta}
    all_gates = {**gates, "subheads": 1, "scale": None}
    options = {"initial_state": None, "cu_seqlens": None, "return_state": True}
    o, state = run_recurrence(op, q, k, v, gates=all_gates, **options, context_parallel=part)
    expected, last = op(q, k, v, **gates, initial_state=before, return_state=True)
    torch.testing.assert_close((o, state), (expected, last))
    transition, local = part.summary
    assert not transition.any()
    torch.testing.assert_close(local, last)
    gradients = torch.autograd.grad(o.sum() + transition.sum() + local.sum(), leaves)
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[3][decay == -torch.inf].any()


@pytest.mark.parametrize("rate", [False, True])
def test_a_part_of_a_scan_with_a_reset_forgets_what_was_before(rate: bool):
    x, decay = torch.randn(2, 12, 4, dtype=torch.float64), -torch.rand(2, 12, 4, dtype=torch.float64)
    decay[:, 5] = -torch.inf
    rates = torch.rand(4, 3, dtype=torch.float64) if rate else None
    before = torch.randn(2, 4, 3 if rate else 1, dtype=torch.float64)
    part, leaves = Alone(before[..., None]), [each.requires_grad_() for each in (x, decay, rates) if each is not None]
    found = run_selective_scan(x, decay, rates, return_state=True, context_parallel=part)
    expected = kernels.selective_scan(x, decay, rates, initial_state=before, return_state=True)
    torch.testing.assert_close(found, expected)
    transition, _ = part.summary
    assert not transition.any()
    gradients = torch.autograd.grad(found[0].sum() + transition.sum(), leaves)
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[1][:, 5].any()
