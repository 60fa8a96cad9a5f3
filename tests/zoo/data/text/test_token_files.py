"""Token files of Megatron and datatrove, written here from their formats, without those packages."""

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from kernels.errors import UserError
from tests.zoo.data.contract import documents, error_of
from zoo.data import Corpus, MixedText, Shards, Source, TextData, Tokenizer, prepare
from zoo.data.text.documents import Tokens

EOS = 299
Documents = Sequence[Sequence[int]]
Writer = Callable[[Path, Documents], Path]


def some_documents(count: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, EOS, int(rng.integers(1, 60))).tolist() for _ in range(count)]


def megatron(path: Path, documents: Documents, dtype: str = "<u2", code: int = 8, cut: int = 7) -> Path:
    """A document is one or several sequences, here of at most `cut` tokens."""
    tokens = path / "corpus_text_document.bin"
    sequences = [document[start : start + cut] for document in documents for start in range(0, len(document), cut)]
    tokens.write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    width = np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    index += b"".join(struct.pack("<q", start) for start in accumulate((width * len(s) for s in sequences), initial=0))[
        : 8 * len(sequences)
    ]
    index += b"".join(struct.pack("<q", n) for n in accumulate((-(-len(d) // cut) for d in documents), initial=0))
    tokens.with_suffix(".idx").write_bytes(index)
    return tokens


def megatron_int32(path: Path, documents: Documents) -> Path:
    return megatron(path, documents, "<i4", 4)


def datatrove(path: Path, documents: Documents, letter: str = "H", metadata: str | None = "gpt2|2\n7\n7 T") -> Path:
    tokens = path / "00000_shuffled.ds"
    tokens.write_bytes(b"".join(struct.pack(f"<{len(document)}{letter}", *document) for document in documents))
    ends = list(accumulate(map(len, documents)))
    (path / f"{tokens.name}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if metadata is not None:
        (path / f"{tokens.name}.metadata").write_text(metadata)
    return tokens


def datatrove_uint32(path: Path, documents: Documents) -> Path:
    return datatrove(path, documents, "I", "llama|4\n7\n7 T")


def datatrove_without_metadata(path: Path, documents: Documents) -> Path:
    return datatrove(path, documents, "I", None)


WRITERS: list[Writer] = [megatron, megatron_int32, datatrove, datatrove_uint32, datatrove_without_metadata]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokens").mkdir()
    return tmp_path / "tokens"


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A tokenizer of bytes and further tokens, 300 in all, the last of which is <eos>."""
    vocabulary = {each: i for i, each in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {f"word{i}": i for i in range(len(vocabulary), EOS)} | {"<eos>": EOS}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<eos>"])
    library.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def read(path: Path) -> list[list[int]]:
    documents = list(Corpus(str(path)))
    assert all(isinstance(document, Tokens) for document in documents)
    return [document.ids.tolist() for document in documents if isinstance(document, Tokens)]


@pytest.mark.parametrize("write", WRITERS)
def test_documents_are_read_as_they_were_written(folder: Path, write: Writer):
    documents = some_documents()
    written = write(folder, documents)
    assert read(written) == documents
    assert read(folder) == documents  # nothing else in the folder is read as text
    Corpus(str(folder)).warn_of_skipped()


@pytest.mark.parametrize("write", [megatron, datatrove])
def test_shards_have_the_documents_each_with_its_end(folder: Path, tokenizer: str, write: Writer):
    written = some_documents()
    written[3] = [5, 6, EOS]  # as some programs end documents; it is not ended twice
    written[5] = [EOS, 4, EOS, 4]
    write(folder, written)
    prepared = prepare(Corpus(str(folder)), Tokenizer.from_file(tokenizer), 0.2, workers=1)
    sides = [[*documents(Shards(prepared, split))] for split in ("train", "validation")]
    assert min(map(len, sides)) > 0
    assert sorted(sides[0] + sides[1]) == sorted([*d, EOS] if d[-1] != EOS else d for d in written)


def test_a_start_token_is_added_once(folder: Path, tokenizer: str):
    megatron(folder, [[7, 1, 2], [1, 7]])
    prepared = prepare(Corpus(str(folder)), Tokenizer.from_file(tokenizer, bos_token=chr(0x28)), None, workers=1)
    shards = Shards(prepared, "validation")
    assert shards.read(0, len(shards)).tolist() == [7, 1, 2, EOS, 7, 1, 7, EOS]


def test_tokens_train_alone_and_mixed_with_text(folder: Path, tokenizer: str, text_folder: str):
    megatron(folder, some_documents(400))
    settings = {"tokenizer": tokenizer, "sequence_length": 32, "preprocessing_workers": 1}
    data = TextData(str(folder), packing="documents", **settings)
    data.prepare_data()
    data.setup("fit")
    assert next(iter(data.train_dataloader())).tokens.shape == (1, 8 * 32)
    mixed = MixedText({"tokens": Source(str(folder)), "text": Source(text_folder)}, **settings)
    mixed.prepare_data()
    mixed.setup("fit")
    assert next(iter(mixed.train_dataloader())).tokens.shape == (8, 32)


def test_one_document_of_tokens_is_cut(folder: Path, tokenizer: str):
    datatrove(folder, [list(range(100))])
    prepared = prepare(Corpus(str(folder)), Tokenizer.from_file(tokenizer), 0.1, workers=2)
    train, validation = Shards(prepared, "train"), Shards(prepared, "validation")
    assert train.read(0, len(train)).tolist() == [*range(90), EOS]
    assert validation.read(0, len(validation)).tolist() == [*range(90, 100), EOS]


@pytest.mark.parametrize("write", [megatron, datatrove])
def test_a_changed_index_is_other_data(folder: Path, write: Writer):
    documents = some_documents()
    write(folder, documents)
    before = Corpus(str(folder)).signature()
    write(folder, [documents[0] + documents[1], *documents[2:]])  # the same tokens
    assert Corpus(str(folder)).signature() != before


def test_the_tokenizer_must_fit(folder: Path, tokenizer: str):
    megatron(folder, [[1, 2], [300, 5]])
    message = rf"^data.path={folder} has the token 300, but data.tokenizer has 300 tokens; name the tokenizer"
    with pytest.raises(UserError, match=message):
        prepare(Corpus(str(folder)), Tokenizer.from_file(tokenizer), 0.5, workers=1)
    with pytest.raises(UserError, match=r"^data\.tokenizer is null, but the data are tokens; name the tokenizer\.json"):
        TextData(str(folder)).prepare_data()
    with pytest.raises(UserError, match=r"has tokens; text is needed here\.$"):
        list(Corpus(str(folder)).texts())


def test_a_loss_mask_is_refused(folder: Path):
    """Rather than training on what it excludes."""
    tokens = datatrove(folder, some_documents())
    tokens.with_name(f"{tokens.name}.loss").write_bytes(bytes(tokens.stat().st_size // 2))
    assert "ds.loss excludes tokens from the loss, which is not supported; move it" in error_of(tokens)


def test_megatron_files_that_are_damaged(folder: Path):
    tokens = megatron(folder, some_documents())
    index = tokens.with_suffix(".idx")
    good, size = index.read_bytes(), tokens.stat().st_size
    tokens.write_bytes(tokens.read_bytes()[:-2])
    assert f"has {size - 2} bytes, {index.name} says {size // 2} tokens of uint16." in error_of(tokens)
    megatron(folder, some_documents())
    for start, new, reason in [
        (0, b"x", "is not an index of Megatron"),
        (9, b"\2", "has the version 2; 1 can be read."),
        (17, b"\6", "has the dtype 6, which is not one of integers"),
        (17, b"\4", "is damaged: its sequences do not follow each other."),
        (18, b"\xff", "is truncated or damaged: it has"),
        (34, b"\x01", "is damaged: its sequences do not follow each other."),
        (len(good) - 8, b"\0", "is damaged: its documents do not cover its"),
        (len(good) - 16, b"\xff", "is damaged: its documents do not cover its"),
    ]:
        index.write_bytes(good[:start] + new + good[start + len(new) :])
        assert reason in error_of(tokens)
    for length in (5, 33, 34, 100, len(good) - 1):
        index.write_bytes(good[:length])
        assert "is not an index of Megatron" in error_of(tokens) or "is truncated or damaged" in error_of(tokens)
    index.write_bytes(b"")
    assert "is not an index of Megatron" in error_of(tokens)
    index.unlink()
    assert f"{tokens} has no index: corpus_text_document.idx (Megatron) is needed" in error_of(tokens)
    assert error_of(folder).endswith("; it has 1 .bin without an index.")
    index.write_bytes(good)
    tokens.unlink()
    assert f"{index} has no tokens: {tokens.name} is missing." in error_of(folder) == error_of(index)


def test_numbers_that_are_not_tokens(folder: Path):
    assert "document 2, has the number -1, which is not a token." in error_of(
        megatron(folder, [[1], [2, -1]], "<i4", 4)
    )
    assert "document 1, has the number 4294967296," in error_of(megatron(folder, [[1 << 32], [2]], "<i8", 5))


def test_datatrove_files_that_are_damaged(folder: Path):
    tokens = datatrove(folder, some_documents(), "I", "llama|4")
    index = folder / f"{tokens.name}.index"
    content, good = tokens.read_bytes(), index.read_bytes()
    for length in (len(content) - 1, len(content) // 2):  # half of it would do for two bytes per token
        tokens.write_bytes(content[:length])
        expected = f"it has {length} bytes, {index.name} says {len(content) // 4} tokens."
        assert f"is truncated or damaged: {expected}" in error_of(tokens)
    tokens.write_bytes(content)
    index.write_bytes(good[:-3])
    assert "is truncated: it has" in error_of(tokens)
    index.write_bytes(good[8:16] + good[:8] + good[16:])
    assert "is damaged: its documents do not follow each other." in error_of(tokens)
    index.unlink()
    assert f"{tokens} has no index: {index.name} is needed." in error_of(tokens)
