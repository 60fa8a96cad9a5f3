"""Documents that train recall, as a source of text."""

import random
import re
from itertools import islice

import pytest

from kernels import UserError
from zoo import config as configs
from zoo.data import Corpus, MixedText, Source
from zoo.data.text.needle_documents import LONGEST_SENTENCE, sentences
from zoo.data.text.needles import KEYS, draw_needles


def some(number: int, path: str = "synthetic:needles") -> list[str]:
    return list(islice(Corpus(path), number))


def test_documents_are_the_same_each_time_and_as_many_as_fit():
    documents = some(50)
    assert documents == some(50)
    assert len(set(documents)) == 50
    cut = list(Corpus("synthetic:needles", max_characters=20_000))
    assert sum(map(len, cut)) == 20_000
    assert documents[: len(cut) - 1] == cut[:-1]


def test_the_last_answer_is_in_its_needle_and_nowhere_else():
    styles = set()
    for document in some(300):
        context, _, question = document.rpartition("\n")
        (value,) = re.findall(r" is (\d{7}|\d{5}|[0-9a-f-]{36})\.$", question)
        marks = ("value of", "pass key is", "uuid", "The grass", "One of", "is: ", "number for")
        styles.add(next(mark for mark in marks if mark in document))
        if "pass key" in question:
            assert context.count(value) == context.count(f"The pass key is {value}. ") + 1 == 2
        else:
            (key,) = set(re.findall(r"(?:for|of) ([a-z]+-[a-z]+)", question))
            assert context.count(value) == len(re.findall(rf"{key}(?: is)?:? {value}", context)) == 1
    assert styles == {"value of", "pass key is", "uuid", "The grass", "One of", "number for"}


def test_haystacks_have_the_length_that_the_path_says():
    for path, longest in (("synthetic:needles", 2000), ("synthetic:needles:16000", 16_000)):
        lengths = [len(document) for document in some(200, path)]
        assert longest * 0.8 < max(lengths) < 1.1 * longest + 1500
        assert min(lengths) > 200
    # equally likely on a logarithmic scale, and longer by its questions; on a linear one the median would be 8,100
    assert sorted(lengths)[100] == pytest.approx((200 * 16_000) ** 0.5 + 300, rel=0.25)


@pytest.mark.slow
def test_values_of_training_and_evaluation_are_never_the_same():
    train, evaluation = (
        {needle.value for seed in range(4) for needle in islice(draw_needles(random.Random(seed), kind, stream), 2000)}
        for kind, stream in (("passkey", "training"), ("passkey", "evaluation"))
    )
    assert len(train) > 5_000
    assert len(evaluation) > 4_000
    assert not train & evaluation
    needles = list(draw_needles(random.Random(0), "number", "training"))
    assert len(needles) == len({needle.key for needle in needles}) == len({needle.value for needle in needles}) == KEYS


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        (Corpus("synthetic:needels"), r"data\.path: 'synthetic:needels' is neither .*did you mean 'synthetic:needles'"),
        (Corpus("synthetic:needles:few"), r"data\.path is 'synthetic:needles:few'; .* haystack, 200 or more\."),
        (Corpus("synthetic:needles:10"), r"data\.path is 'synthetic:needles:10'; .* haystack, 200 or more\."),
        (Corpus("synthetic:needles", max_characters=None), r"data\.max_characters is null, and synthetic:needles has"),
    ],
)
def test_what_is_refused(corpus: Corpus, message: str):
    with pytest.raises(UserError, match=message):
        next(iter(corpus))


def test_a_change_of_the_path_changes_the_signature():
    corpora = [Corpus(path) for path in ("embedded:documentation", "synthetic:needles", "synthetic:needles:300")]
    assert len({corpus.signature() for corpus in [*corpora, Corpus("synthetic:needles", max_characters=9)]}) == 4


@pytest.mark.slow
def test_they_mix_with_the_users_text(text_folder: str):
    sources = {"text": Source(text_folder, 3), "needles": Source("synthetic:needles", max_characters=30_000)}
    data = MixedText(sources, vocab_size=400, sequence_length=64, batch_size=8, preprocessing_workers=1)
    data.setup()
    tokenizer = data.get_tokenizer()
    batches = islice(data.train_dataloader(), 8)
    rows = [tokenizer.decode(row) for batch in batches for row in batch.tokens.tolist()]
    needles = [row for row in rows if re.search("magic|pass key|value of|grass|[a-z]+-[a-z]+: ", row)]
    assert 12 <= len(needles) <= 17


@pytest.mark.slow
def test_the_config_has_text_and_needles():
    data = configs.instantiate("data", configs.read("gdn_h2.yaml", "data/needles.yaml"))
    assert {name: source.weight for name, source in data.sources.items()} == {
        "library": 3,
        "documentation": 1,
        "needles": 1,
    }
    assert all(next(iter(corpus)) for corpus in data.corpora)


def test_sentences_are_prose_on_one_line():
    text = "Title\n*****\n\nOne is\nhere. Two (or so)! Was it 3.5 or e.g. four?\n\n   code()\n\n" + "word " * 100
    found = list(sentences([text]))
    assert found[:3] == ["One is here.", "Two (or so)!", "Was it 3.5 or e.g. four?"]
    assert max(map(len, found)) <= LONGEST_SENTENCE
    assert " ".join(found[3:]) == ("word " * 100).strip()
