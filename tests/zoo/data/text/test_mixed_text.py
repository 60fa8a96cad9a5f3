import json
import re
from collections import Counter
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest

from kernels.errors import UserError
from tests.commands import Command
from tests.zoo.data.contract import on_rank, some
from zoo import config as configs
from zoo.data import Batch, Corpus, MixedText, Source, TextData
from zoo.data.order import interleaved
from zoo.data.text.mixed_text import Blend, BlendedText


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Source]:
    """Three folders of unlike size and words; the smallest is the likeliest."""
    for name, number in (("ants", 12), ("bees", 30), ("cats", 60)):
        (tmp_path / name).mkdir()
        for i in range(number):
            (tmp_path / name / f"{i:02d}.txt").write_text(
                f"{name} {i}: " + "".join(f"{name}{i} eat {k}, {i * k}\n" for k in range(4 + i % 7))
            )
    shares = {"ants": 5, "bees": 0.5, "cats": 2.5}
    return {name: Source(str(tmp_path / name), weight) for name, weight in shares.items()}


@pytest.fixture
def arguments(sources: dict[str, Source]) -> dict:
    sizes = {"vocab_size": 300, "sequence_length": 32, "batch_size": 16, "validation_fraction": 0.2}
    return {"sources": sources, **sizes, "preprocessing_workers": 1}


def rows(batches: list[Batch]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch.tokens.tolist()]


def windows_of(data: MixedText) -> dict[tuple[int, ...], tuple[int, int]]:
    """Tokens → (source, number) of all training windows."""
    return {
        tuple(windows[i].tokens.tolist()): (source, i)
        for source, windows in enumerate(data.train.sources)
        for i in range(len(windows))
    }


@pytest.mark.slow
def test_sources_come_by_weight_and_each_is_shown_whole_before_it_repeats(arguments: dict):
    data = MixedText(**arguments)
    known = windows_of(data)
    assert len(known) == len(data.train) == sum(map(len, data.train.sources))  # all are told apart
    steps = 640
    seen = [known[row] for row in rows(some(data, steps))]
    counts = Counter(source for source, _ in seen)
    assert [abs(counts[s] - share * 16 * steps) < 2 for s, share in enumerate([0.625, 0.0625, 0.3125])] == [True] * 3
    for source, windows in enumerate(data.train.sources):
        own = Counter(number for s, number in seen if s == source)
        assert len(own) == len(windows)
        assert max(own.values()) - min(own.values()) <= 1 + -(-128 // len(windows))  # the open pass, and 128 shuffled
        first_passes = [number for s, number in seen if s == source]
        assert first_passes[: len(windows)] != first_passes[len(windows) : 2 * len(windows)]
    expected = [
        16 * steps * share / len(w) for share, w in zip([0.625, 0.0625, 0.3125], data.train.sources, strict=True)
    ]
    assert data.train.passes(16 * steps) == pytest.approx(expected)


def test_each_source_has_an_order_of_its_own(arguments: dict):
    """Else sources of one length would always show samples from the same part of their texts together."""
    windows = MixedText(**arguments).train.sources[0]
    blend, number = Blend([windows, windows], [1, 1]), len(windows)
    samples = blend.order(np.arange(256), seed=3)
    sources, numbers = interleaved(np.arange(256), [1, 1], seed=3)
    first, second = (
        {n: s % number for s, n, o in zip(samples, numbers, sources, strict=True) if o == i} for i in (0, 1)
    )
    assert first.keys() == second.keys() == set(range(128))
    assert sum(first[n] == second[n] for n in first) < 30  # chance alone makes a few equal


def test_packed_documents_stay_apart(arguments: dict):
    data = MixedText(**arguments, packing="documents")
    batch = some(data, 1)[0]
    assert batch.tokens.shape == (1, 16 * 32)
    assert set(range(0, 513, 32)) <= set(batch.cu_seqlens.tolist())
    windows = rows([Batch(batch.tokens.view(16, 32), batch.labels)])
    assert len({windows_of(data)[row][0] for row in windows}) > 1
    ends = batch.tokens == data.get_tokenizer().eos_id
    assert ends.any()
    assert (batch.labels[ends] == -100).all()


def test_one_source_is_the_text_by_itself(arguments: dict, sources: dict[str, Source]):
    mixed = MixedText(**{**arguments, "sources": {"cats": sources["cats"]}})
    text = TextData(sources["cats"].path, **{name: value for name, value in arguments.items() if name != "sources"})
    assert mixed.train.sources[0].shards.data_hash == text.train.shards.data_hash
    assert Counter(rows(some(mixed, 8))) == Counter(rows(some(text, 8)))


def test_each_source_is_validated_by_itself(arguments: dict):
    data = MixedText(**arguments)
    assert data.validation_names == ["ants", "bees", "cats"]
    for loaders in (data.val_dataloader(), data.predict_dataloader()):
        for loader, windows in zip(loaders, data.validation, strict=True):
            assert rows(list(loader)) == [tuple(windows[i].tokens.tolist()) for i in range(len(windows))]
    words = [data.get_tokenizer().decode(windows.shards.read(0, len(windows.shards))) for windows in data.validation]
    assert all(name in text for name, text in zip(data.validation_names, words, strict=True))
    assert "ants" not in words[1] + words[2]


def test_the_tokenizer_is_trained_on_the_mixture(sources: dict[str, Source]):
    corpora = [Corpus(source.path) for source in sources.values()]
    blend = BlendedText(corpora, [5, 0.5, 2.5])
    pieces = list(blend)
    assert pieces == list(blend)
    given = [sum(len(piece) for piece in pieces if piece.startswith(name)) for name in sources]
    assert np.array(given) / sum(given) == pytest.approx([0.625, 0.0625, 0.3125], abs=0.01)
    for corpus in corpora:
        assert set(corpus) <= set(pieces)
    assert sum(piece.startswith("ants 0:") for piece in pieces) > 5  # the small source came round
    others = [BlendedText(corpora, [5, 0.5, 3]), BlendedText(corpora[::-1], [5, 0.5, 2.5])]
    assert len({each.signature() for each in [blend, *others]}) == 3
    assert BlendedText(corpora, [10, 1, 5]).signature() == blend.signature()


def test_a_long_document_does_not_take_the_turn_of_the_others(tmp_path: Path):
    texts = {"long": "a line of some length\n" * 50_000, "short": "b\n" * 2000}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    pieces = islice(BlendedText([Corpus(str(tmp_path / f"{name}.txt")) for name in texts], [1, 1]), 40)
    given = Counter()
    for piece in pieces:
        given[piece[0]] += len(piece)
    assert given["a"] == pytest.approx(given["b"], abs=25_000)


def test_a_checkpoint_of_another_mixture_names_the_difference(arguments: dict, sources: dict[str, Source]):
    state = MixedText(**arguments).state_dict()
    tokenizer = MixedText(**arguments).get_tokenizer()
    ants, bees, cats = sources.items()
    Path(str(sources["cats"].path), "new.txt").write_text("one more cat")
    Path(str(sources["cats"].path), "tokenizer.json").write_text(tokenizer.to_json())
    given = {**arguments, "tokenizer": sources["cats"].path}  # the same one as before, whatever the mixture
    changed = [
        (
            {"sources": dict([bees, ants, cats])},
            r"sources is \['bees', 'ants', 'cats'\], .* with \['ants', 'bees', 'cats'\]",
        ),
        (
            {"sources": dict([ants, bees])},
            r"data\.sources is \['ants', 'bees'\], but .* with \['ants', 'bees', 'cats'\]",
        ),
        (
            {"sources": {**sources, "bees": Source(sources["bees"].path, 2)}},
            r"data\.sources\.bees\.weight is 2\.0, but the checkpoint was trained with 0\.5;",
        ),
        ({}, r"data\.sources\.cats has the data hash \w+, but the checkpoint was trained with \w+;"),
    ]
    for change, message in changed:
        with pytest.raises(UserError, match=message):
            MixedText(**{**given, **change}).load_state_dict(state)


def test_passes_are_logged(arguments: dict, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    data = on_rank(MixedText(**arguments), 0, 2)
    data.trainer.max_steps, data.trainer.accumulate_grad_batches = 50, 2
    data.setup("fit")
    lines = {
        record.getMessage(): record.levelname for record in caplog.records if record.name == "zoo.data.text.mixed_text"
    }
    for (name, share), windows in zip(
        {"ants": 62.5, "bees": 6.25, "cats": 31.25}.items(), data.train.sources, strict=True
    ):
        passes = share / 100 * 1600 / len(windows)
        line = f"data.sources.{name} is {share:.2f} % of the samples; the run goes through it {passes:.2f} times."
        assert lines[line] == ("WARNING" if passes > 4 else "INFO")
    assert set(lines.values()) == {"WARNING", "INFO"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": {}}, r"data\.sources is empty; give at least one, such as \{books: "),
        ({"sources": {"a": Source(weight=-1)}}, r"data\.sources\.a\.weight is -1; it must be above 0"),
        ({"sources": {"a": Source(weight=float("inf"))}}, r"data\.sources\.a\.weight is inf; it must be .* finite"),
        ({"sources": {"a": Source(weight=float("nan"))}}, r"data\.sources\.a\.weight is nan; it must be .* finite"),
        ({"sources": {"a/b": Source()}}, r"data\.sources: the name 'a/b' may have letters, digits"),
        ({"sources": {"a": Source(max_characters=0)}}, r"data\.sources\.a\.max_characters is 0; it must be at least 1"),
        ({"sources": {"a": Source("nowhere")}}, r"data\.sources\.a\.path: .*nowhere does not exist"),
        ({"sources": {"a": Source("embedded:libary")}}, r"data\.sources\.a\.path: .* did you mean 'embedded:library'"),
        ({"sequence_length": 10**6}, r"data\.sources\.ants: data\.sequence_length is 1000000, but the train split"),
    ],
)
def test_argument_errors(arguments: dict, change: dict, message: str):
    with pytest.raises(UserError, match=message):
        MixedText(**{**arguments, **change}).setup()


def test_a_damaged_shard_is_named_with_its_source(arguments: dict):
    data = MixedText(**arguments)
    data.setup()
    file = data.train.sources[1].shards.folder / "train-00000.bin"
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"data\.sources\.bees: the shard {re.escape(str(file))} was altered"):
        MixedText(**arguments).setup("fit")


@pytest.mark.slow
def test_parts_of_the_embedded_corpus():
    library, documentation = (Corpus(f"embedded:{part}", max_characters=None) for part in ("library", "documentation"))
    assert set(documentation).isdisjoint(library)
    assert Counter(Corpus(max_characters=None)) == Counter(chain(library, documentation))
    assert any("def " in text for text in islice(library, 20))
    assert sum(map(len, Corpus("embedded:documentation", max_characters=1000))) == 1000
    packages = Corpus("embedded:packages", max_characters=100_000)
    assert sum(map(len, packages)) == 100_000
    assert not set(packages) & set(library)
    parts = [Corpus(), Corpus("embedded:library"), documentation, Corpus("embedded:packages")]
    assert len({corpus.signature() for corpus in parts}) == 4


FIT = ("fit", "--config", "gdn_h2.yaml", "--config", "data/mixture.yaml", "--trainer.accelerator=cpu")


@pytest.mark.slow
def test_the_command_line(command: Command, desk: Path, sources: dict[str, Source]):
    (desk / "mixture.yaml").write_text(
        "data: {class_path: MixedText, init_args: {sources: "
        + json.dumps({name: {"path": source.path, "weight": source.weight} for name, source in sources.items()})
        + "}}\n"
    )
    small = ("--model.hidden_size=32", "--model.num_heads=1", "--model.num_layers=3", "--data.sequence_length=32")
    small += ("--data.vocab_size=300", "--data.validation_fraction=0.2", "--optim.warmup_steps=1")
    run = ("fit", "--config", "gdn_h2.yaml", "--config", "mixture.yaml", "--trainer.accelerator=cpu", *small)
    command(*run, "--data.sources.bees.weight=2", "--trainer.max_steps=2", "--run", "run").ok()
    row = json.loads((desk / "runs" / "run" / "results.json").read_text())
    assert row["status"] == "complete"
    assert list(row["val_accuracy_by_task"]) == ["ants", "bees", "cats"]
    weights = configs.read(desk / "runs" / "run" / "config.yaml").data.init_args.sources
    assert {name: source.weight for name, source in weights.items()} == {"ants": 5, "bees": 2, "cats": 2.5}
    refused = command("fit", "--resume", "run", "--trainer.max_steps=3", "--data.sources.bees.weight=3").refused()
    assert "data.sources.bees.weight is 3.0, but the checkpoint was trained with 2.0" in refused.err
    refused = command("fit", "--resume", "run", "--trainer.max_steps=3", "--data=TextData").refused()
    assert "data is TextData, but the checkpoint was trained with MixedText" in refused.err
    for wrong, said in {
        "--data.sources.library.weigth=3": "did you mean 'weight'?",
        "--data.sources={a: {wieght: 2}}": "data.sources.a.wieght: unknown key; did you mean 'weight'?",
        "--data.sources={a: {weight: x}}": "is not a number",
        "--data.sources={a: {weight: 0}}": "data.sources.a.weight is 0.0; it must be above 0",
        "--data.sources=3": "data.sources",
    }.items():
        assert said in command(*FIT, wrong).sentence()


@pytest.mark.slow
def test_the_example_is_a_mixture_of_both_parts():
    data = configs.instantiate("data", configs.read("gdn_h2.yaml", "data/mixture.yaml"))
    assert [source.weight for source in data.sources.values()] == [4, 1]
    assert all(next(iter(corpus)) for corpus in data.corpora)
