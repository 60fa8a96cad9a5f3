"""Blocks that are computed again: the same gradients from less memory, and only while a step is taken."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import kernels
import mixers
from kernels import UserError, recomputing
from tests.zoo.tiny import VOCAB, At, ResumableLoader, trainer, validation_loader
from zoo.data.batch import Batch
from zoo.lm.block import Block
from zoo.lm.model import LanguageModel
from zoo.lm.stack import H1
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.callbacks.compiled_blocks import CompiledBlocks
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation

LAYERS = 4


class Gradients(L.Callback):
    """The gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps.append({name: p.grad.clone() for name, p in pl_module.named_parameters()})


class Forwards(L.Callback):
    """How often each block is called in a step of training, and which blocks are replaced in a validation."""

    def __init__(self) -> None:
        self.calls, self.validating = [], []

    def on_fit_start(self, trainer, pl_module):
        for number, block in enumerate(pl_module.model.layers):
            block.mixer.register_forward_hook(lambda *_, number=number: self._count(number))

    def _count(self, number: int) -> None:
        if torch.is_grad_enabled():  # not in a validation
            self.calls.append(number)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.calls.clear()

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.validating += ["forward" in vars(block) for block in pl_module.model.layers]


class Packed:
    """Batches of one row with documents in it."""

    def __iter__(self):
        for step in range(3):
            tokens = torch.randint(VOCAB, (1, 30), generator=torch.Generator().manual_seed(step))
            yield Batch(tokens, tokens.roll(-1, 1), torch.tensor([0, 7, 8, 30], dtype=torch.int32))


def module() -> Pretraining:
    torch.manual_seed(0)
    stack = H1(mixers.get("GatedDeltaNet"), mixers.get("SlidingWindowAttention"))
    model = LanguageModel(stack, vocab_size=VOCAB, hidden_size=16, num_heads=2, num_layers=LAYERS)
    return Pretraining(model, Optimisation(warmup_steps=2, learning_rate=1e-2), config={"model": {}})


@pytest.fixture(params=[False, True], ids=["", "norms"])
def norms_again(request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with norms that are computed again by themselves, as blocks have it on GPUs."""
    forward = Block.forward

    def on_gpu(self: Block, *inputs):
        with recomputing():
            return forward(self, *inputs)

    if request.param:
        monkeypatch.setattr(Block, "forward", on_gpu)


def gradients(folder: Path, data, *callbacks: L.Callback) -> list[dict[str, torch.Tensor]]:
    found = Gradients()
    trainer(folder, [found, *callbacks], max_steps=3, val_check_interval=3).fit(module(), data, validation_loader())
    return found.steps


@pytest.mark.slow
@pytest.mark.parametrize("data", [ResumableLoader, Packed], ids=["windows", "documents"])
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_are_the_same_to_the_last_bit(every, data, norms_again, tmp_path):
    make = (lambda: data(8)) if data is ResumableLoader else data
    expected = gradients(tmp_path / "plain", make())
    found = gradients(tmp_path / "again", make(), CheckpointedBlocks(every))
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
        assert any(gradient.abs().max() > 0 for gradient in one.values())


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 3])
def test_so_many_blocks_are_computed_twice_and_only_in_training(every, norms_again, tmp_path):
    watch = Forwards()
    trainer(tmp_path, [CheckpointedBlocks(every), watch], max_steps=1, val_check_interval=1).fit(
        found := module(), ResumableLoader(8), validation_loader()
    )
    again = range(0, LAYERS, every)
    assert sorted(watch.calls) == sorted([*range(LAYERS), *again])
    assert watch.validating
    assert not any(watch.validating)
    assert not any("forward" in vars(block) for block in found.model.layers)


def saved_bytes(every: int | None) -> int:
    """Bytes that the forward pass of a step keeps for its backward pass, each storage once."""
    found = module()
    callback = None if every is None else CheckpointedBlocks(every)
    parameters = {p.untyped_storage().data_ptr() for p in found.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(VOCAB, (2, 64))
    if callback is not None:
        callback.on_train_batch_start(None, found, None, 0)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = found(tokens).logsumexp(-1).sum()
    bytes_kept = sum(kept.values())
    loss.backward()
    return bytes_kept


def test_less_is_kept_for_the_backward_pass():
    everything, half, nothing = saved_bytes(None), saved_bytes(2), saved_bytes(1)
    assert nothing < half < everything
    assert nothing < everything / 4


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_blocks_are_computed_again_on_the_same_backend(name: str):
    """In a thread that knows nothing of it, as autograd has one for each GPU."""
    found, tokens = module(), torch.arange(20)[None] % VOCAB
    with kernels.backend(name):
        expected = torch.autograd.grad(found(tokens).logsumexp(-1).sum(), list(found.parameters()))
        CheckpointedBlocks().on_train_batch_start(None, found, None, 0)
        loss = found(tokens).logsumexp(-1).sum()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(found.parameters(), expected, strict=True))


@pytest.mark.slow
def test_compiled_blocks_are_computed_again_too(tmp_path):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    expected = gradients(tmp_path / "plain", ResumableLoader(8))
    found = gradients(tmp_path / "both", ResumableLoader(8), CompiledBlocks(count), CheckpointedBlocks())
    assert graphs
    for name, gradient in expected[0].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-4, atol=1e-6)


def test_what_stops_a_run_leaves_the_blocks_as_they_were(tmp_path):
    found = module()
    with pytest.raises(RuntimeError, match="stop"):
        trainer(tmp_path, [At(1, RuntimeError("stop")), CheckpointedBlocks()]).fit(
            found, ResumableLoader(8), validation_loader()
        )
    assert not any("forward" in vars(block) for block in found.model.layers)


def test_none_is_null_and_not_zero():
    with pytest.raises(UserError, match="at least 1"):
        CheckpointedBlocks(0)
