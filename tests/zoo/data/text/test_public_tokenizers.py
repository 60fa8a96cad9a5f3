"""Tokenizers of the kinds that are published: ids are kept, no text is lost, and those that lose some are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from kernels.errors import UserError
from zoo.data import TextData, Tokenizer

TEXTS = ["hello  hello world\n\tübergröße 字 😀\n", " leads with a space", "</s> <|endoftext|> \0 are text\n"]


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2's and Mistral's: a "▁" for each space and before the text, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2's: pieces of bytes, each with the space before it."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(["<|endoftext|>"])
    return made


def converted(folder: Path) -> tokenizers.Tokenizer:
    """A tiktoken encoding as docs/data.md converts it."""
    tiktoken = pytest.importorskip("tiktoken")
    pytest.importorskip("blobfile")  # with which it writes files
    from transformers.integrations.tiktoken import convert_tiktoken_to_fast

    pieces = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"hello", b" hello"]
    encoding = tiktoken.Encoding(
        "small",
        pat_str=r" ?\p{L}+|\s+|[^\s\p{L}]+",
        mergeable_ranks={piece: rank for rank, piece in enumerate(pieces)},
        special_tokens={"<|endoftext|>": len(pieces)},
    )
    convert_tiktoken_to_fast(encoding, folder / "tiktoken")
    made = tokenizers.Tokenizer.from_file(str(folder / "tiktoken" / "tokenizer.json"))
    for text in TEXTS:
        assert Tokenizer(made).encode(text) == encoding.encode_ordinary(text)
    return made


KINDS: dict[str, Callable[[Path], tokenizers.Tokenizer]] = {
    "sentencepiece": lambda folder: sentencepiece(),
    "byte level": lambda folder: byte_level(),
    "tiktoken": converted,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_kept_and_text_comes_back(kind: str, tmp_path: Path):
    library = KINDS[kind](tmp_path)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text.replace("\0", ""))
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    assert tokenizer.encode("hello") == library.encode("hello", add_special_tokens=False).ids
    end = "</s>" if kind == "sentencepiece" else "<|endoftext|>"
    assert tokenizer.eos_id == library.token_to_id(end) not in [id for text in TEXTS for id in tokenizer.encode(text)]
    data = TextData(
        str(tmp_path / "texts"), tokenizer=str(tmp_path / "tokenizer.json"), sequence_length=4, batch_size=2
    )
    shards = data.train.shards
    assert end in tokenizer.decode(shards.read(0, len(shards)).tolist())
    assert tokenizer.vocab_size == library.get_vocab_size()


def test_what_loses_text_is_refused(tmp_path: Path):
    library = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "</s>": 1, "a": 2, " ": 3}, [], unk_token="<unk>"))
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"^.*tokenizer\.json does not keep text unchanged: .* comes back as .*<unk>"):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("tokenizer.model", "SentencePiece; a tokenizer.json is needed, which is mostly published with it."),
        ("cl100k_base.tiktoken", "tiktoken; a tokenizer.json is needed, and docs/data.md says how to make one."),
    ],
)
def test_files_of_other_libraries_are_named(file: str, said: str, tmp_path: Path):
    (tmp_path / file).write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(UserError) as error:
        Tokenizer.from_file(tmp_path / file)
    assert str(error.value) == f"data.tokenizer: {tmp_path / file} is a file of {said}"
