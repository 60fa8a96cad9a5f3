"""Captured decoding steps that later calls replay, and their owners."""

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels
from tests.mixers.variants import CAUSAL
from tests.zoo.tiny import ByteTokenizer
from zoo.display import screen_text
from zoo.evaluation.loaded import LoadedModel
from zoo.generation import graphs as owners
from zoo.generation.generate import WORTH_CAPTURING, generate_tokens, write
from zoo.generation.graphs import KEPT_GRAPHS, DecodingGraphs
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Uniform
from zoo.train.callbacks.samples import Samples

pytest_plugins = "tests.zoo.generation.pretended"
NEW = 12  # tokens: enough to be worth a capture


def build(name: str = "GatedDeltaNet", vocab_size: int = 31, device: str = "cpu") -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(Uniform(CAUSAL[name]), vocab_size=vocab_size, hidden_size=32, num_heads=2, num_layers=1)
    return model.to(device).eval()


def greedy(model: LanguageModel, graphs: DecodingGraphs, batch_size: int = 1, length: int = 3) -> torch.Tensor:
    device = next(model.parameters()).device
    prompts = torch.arange(batch_size * length, device=device).view(batch_size, length) % 31
    return torch.stack([*generate_tokens(model, prompts, max_new_tokens=NEW, temperature=0, graphs=graphs)])


def test_equal_shapes_share_a_capture(captures: list[torch.device]):
    model, graphs = build(), DecodingGraphs()
    first = greedy(model, graphs)
    assert torch.equal(greedy(model, graphs), first)
    other_length = greedy(model, graphs, length=5)  # the state does not depend on it
    assert len(captures) == 1
    assert torch.equal(other_length, greedy(model, DecodingGraphs(False), length=5))
    greedy(model, graphs, batch_size=2)
    greedy(model, graphs)
    assert len(captures) == 2


def test_key_caches_of_similar_lengths_share_a_capture(captures: list[torch.device]):
    model, graphs = build("SoftmaxAttention"), DecodingGraphs()
    for length in (3, 100, 300):
        expected = greedy(model, DecodingGraphs(False), length=length)
        assert torch.equal(greedy(model, graphs, length=length), expected)
    assert len(captures) == 2


def change(model: LanguageModel) -> None:
    with torch.no_grad():
        weight = next(model.parameters())
        weight.copy_(weight.roll(7, 0))


def move(model: LanguageModel) -> None:
    change(model)
    weight = next(model.parameters())
    weight.data = weight.data.clone()


def set_attribute(model: LanguageModel) -> None:
    model.norm.eps = 100.0
    change(model)


def patch(model: LanguageModel) -> None:
    mixer: Any = model.layers[0].mixer
    mixer.forward = lambda x, state=None, **options: (x.roll(1, -1), state)


@pytest.mark.parametrize(("update", "expected_captures"), [(change, 1), (move, 2), (set_attribute, 2), (patch, 2)])
def test_a_model_may_change_between_calls(
    update: Callable[[LanguageModel], None], expected_captures: int, captures: list[torch.device]
):
    model, graphs = build(), DecodingGraphs()
    before = greedy(model, graphs)
    update(model)
    after = greedy(model, graphs)
    assert not torch.equal(after, before)
    assert torch.equal(after, greedy(model, DecodingGraphs(False)))
    assert len(captures) == expected_captures


def test_constant_decays_that_change_are_captured_again(captures: list[torch.device]):
    """A kept graph would read the tensor of the old decays, whose memory is free."""
    model, graphs = build("RetNet"), DecodingGraphs()
    greedy(model, graphs)
    decay: Any = model.layers[0].mixer.decay
    decay.log_decay = tuple(8 * x for x in decay.log_decay)
    assert torch.equal(greedy(model, graphs), greedy(model, DecodingGraphs(False)))
    assert len(captures) == 2


def test_a_failed_capture_is_not_repeated_unless_memory_lacked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owners, "no_graphs", lambda device: None)
    for error, expected_attempts in ((RuntimeError("it waits"), 1), (torch.OutOfMemoryError("full"), 2)):
        attempts = []

        def capture(rehearse, step, device, error=error, attempts=attempts):
            attempts.append(error)
            rehearse()
            raise error

        monkeypatch.setattr(owners, "capture", capture)
        model, graphs = build(), DecodingGraphs()
        for _ in range(2):
            assert torch.equal(greedy(model, graphs), greedy(model, DecodingGraphs(False)))
            assert graphs.refused == str(error)
        assert len(attempts) == expected_attempts


def test_another_precision_backend_or_model_is_captured_separately(captures: list[torch.device]):
    model, graphs = build(), DecodingGraphs()
    contexts = [
        (partial(torch.autocast, "cpu", torch.bfloat16), 1),
        (partial(kernels.backend, "reference"), 1),
        (kernels.deterministic, 2),  # where a chunk ends, and elsewhere
    ]
    greedy(model, graphs)
    for context, count in contexts:
        captures.clear()
        with context():
            greedy(model, graphs)
        assert len(captures) == count
    captures.clear()
    greedy(build(), graphs)
    assert len(captures) == 1


def test_calls_that_overlap_do_not_share_memory(captures: list[torch.device]):
    model, graphs = build(), DecodingGraphs()
    prompts = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0}
    expected = [torch.stack([*generate_tokens(model, prompt, **options)]) for prompt in prompts]
    captures.clear()
    both = zip(*(generate_tokens(model, prompt, graphs=graphs, **options) for prompt in prompts), strict=True)
    assert all(map(torch.equal, map(torch.stack, zip(*both, strict=True)), expected))
    assert len(captures) == 2


def test_a_call_that_is_abandoned_returns_its_graph(captures: list[torch.device]):
    model, graphs = build(), DecodingGraphs()
    expected = greedy(model, graphs)
    tokens = generate_tokens(model, torch.tensor([[1, 2, 3]]), max_new_tokens=NEW, graphs=graphs)
    assert [len(next(tokens)) for _ in range(3)] == [1, 1, 1]
    del tokens
    assert torch.equal(greedy(model, graphs), expected)
    assert len(captures) == 1


def test_the_least_recently_used_graphs_are_dropped(captures: list[torch.device], monkeypatch: pytest.MonkeyPatch):
    model, graphs = build(), DecodingGraphs()
    for batch_size in (*range(1, KEPT_GRAPHS + 1), 1, KEPT_GRAPHS + 1):
        greedy(model, graphs, batch_size)
    captures.clear()
    greedy(model, graphs, 1)
    assert not captures
    greedy(model, graphs, 2)
    assert len(captures) == 1
    graphs.clear()
    greedy(model, graphs, 2)
    assert len(captures) == 2
    monkeypatch.setattr(owners, "KEPT_BYTES", 100)
    greedy(model, graphs, 2)
    greedy(model, graphs, 2)
    assert len(captures) == 3


@pytest.mark.parametrize(("tokens", "expected_captures"), [(WORTH_CAPTURING, 0), (WORTH_CAPTURING + 1, 1)])
def test_a_graph_is_for_longer_texts(tokens: int, expected_captures: int, captures: list[torch.device]):
    assert len([*generate_tokens(build(), torch.tensor([[1]]), max_new_tokens=tokens)]) == tokens
    assert len(captures) == expected_captures


def test_a_module_with_a_hook_is_not_captured(captures: list[torch.device], caplog: pytest.LogCaptureFixture):
    model, graphs = build(), DecodingGraphs()
    expected, calls = greedy(model, graphs), list[int]()
    hook = model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    owners._say.cache_clear()
    caplog.set_level(logging.INFO)
    for _ in range(2):
        greedy(model, graphs)
    assert len(calls) == 2 * NEW
    assert [record.getMessage() for record in caplog.records] == [
        "decoding runs without a CUDA graph: layers.0 has a hook, which a replay would not call"
    ]
    hook.remove()
    assert torch.equal(greedy(model, graphs), expected)
    assert len(captures) == 1


def test_without_a_gpu_the_log_gives_the_reason_once(caplog: pytest.LogCaptureFixture):
    owners._say.cache_clear()
    caplog.set_level(logging.INFO)
    for _ in range(2):
        greedy(build(), DecodingGraphs())
    (record,) = caplog.records
    assert "the device is a cpu, and CUDA graphs need an NVIDIA GPU" in record.getMessage()
    assert record.levelno == logging.INFO


def test_switched_off_nothing_is_captured(captures: list[torch.device], caplog: pytest.LogCaptureFixture):
    greedy(build(), DecodingGraphs(False))
    assert not captures
    assert not caplog.records


def test_a_copy_captures_its_own(captures: list[torch.device]):
    model, graphs = build(), DecodingGraphs()
    greedy(model, graphs)
    for owner in (copy.deepcopy(graphs), pickle.loads(pickle.dumps(graphs))):
        greedy(model, owner)
    assert len(captures) == 3


def test_graphs_do_not_keep_a_model_alive(captures: list[torch.device], monkeypatch: pytest.MonkeyPatch):
    def capture(rehearse, step, device):
        result = step()
        return lambda: result

    monkeypatch.setattr(owners, "capture", capture)
    graphs, model = DecodingGraphs(), build()
    greedy(model, graphs)
    reference = weakref.ref(model)
    gc.disable()  # weights in a cycle would keep the memory of a GPU until they are collected
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


# owners


def test_the_prompts_of_a_model_share_a_capture(captures: list[torch.device]):
    model = build(vocab_size=257)
    model.writer = partial(write, tokenizer=ByteTokenizer(), graphs=DecodingGraphs())
    for _ in range(2):
        texts = model.generate(["ab", "cd", "e"], max_new_tokens=NEW, seed=1)
    assert len(captures) == 1
    assert model.generate(["ab", "cd", "e"], max_new_tokens=NEW, seed=1, cuda_graph=False) == texts
    assert len(captures) == 1


def test_the_batches_of_an_evaluation_share_a_capture(captures: list[torch.device]):
    subject = LoadedModel("tiny", build(), batch_tokens=64)
    prompts = [[1] * length for length in (9, 10, 11, 12)]
    expected = subject.continuations(prompts, NEW)  # in two batches of two
    assert subject.continuations(prompts, NEW) == expected
    assert len(captures) == 1
    subject.to("meta")
    subject.model = build()
    assert subject.continuations(prompts, NEW) == expected
    assert len(captures) == 2


def test_samples_of_a_run_see_the_weights_of_their_step(captures: list[torch.device], tmp_path: Path):
    trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"), sanity_checking=False, is_global_zero=True)
    trainer.precision_plugin = SimpleNamespace(forward_context=torch.no_grad)
    trainer.global_step, trainer.default_root_dir = 1, tmp_path
    texts: list[str] = []
    module = SimpleNamespace(model=build(vocab_size=257), tokenizer=ByteTokenizer(), print=texts.append)
    samples: Any = Samples(prompts=["a", "b"], max_new_tokens=NEW, temperature=0)
    expected = []
    for _ in range(2):
        samples.on_validation_end(trainer, module)
        settings: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0, "cuda_graph": False}
        expected += write(module.model, module.tokenizer, ["a", "b"], **settings)
        change(module.model)
    assert [text.split("\n", 1)[1].removesuffix("\n") for text in texts] == [screen_text(text) for text in expected]
    assert expected[2:] != expected[:2]
    assert len(captures) == 1
    samples.teardown(trainer, module, "fit")
    samples.on_validation_end(trainer, module)
    assert len(captures) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GatedDeltaNet", "SoftmaxAttention"])
def test_replays_on_a_gpu(name: str):
    """Reuse, weights that change in place, and memory that is returned."""
    torch.cuda.empty_cache()
    model, graphs = build(name, device="cuda"), DecodingGraphs()
    greedy(model, DecodingGraphs(False))
    before = torch.cuda.memory_allocated()
    first = greedy(model, graphs)
    replays = next(iter(graphs._kept.values())).replay
    for _ in range(2):
        change(model)
        after = greedy(model, graphs)
        assert torch.equal(after, greedy(model, DecodingGraphs(False)))
        assert not torch.equal(after, first)
    assert next(iter(graphs._kept.values())).replay is replays
    del replays, first, after
    graphs.clear()
    assert torch.cuda.memory_allocated() <= before
