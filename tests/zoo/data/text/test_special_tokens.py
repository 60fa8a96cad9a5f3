"""The tokens that end and start documents: chosen in a config, and known again wherever the tokenizer is loaded."""

import json
from pathlib import Path

import pytest
import tokenizers

import zoo
from kernels.errors import UserError
from tests.commands import FIT, Command
from tests.zoo.data.contract import documents
from zoo.data import Corpus, MixedText, Source, TextData, Tokenizer, train_tokenizer


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A tokenizer with several special tokens, of which the known one is not the one that is wanted."""
    trained = train_tokenizer(Corpus(max_characters=50_000), 300)
    library = tokenizers.Tokenizer.from_str(trained.to_json())
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    library.save(str(tmp_path / "chat.json"))
    return str(tmp_path / "chat.json")


def test_what_is_chosen_is_known_again(file: str, tmp_path: Path):
    plain, chosen = Tokenizer.from_file(file), Tokenizer.from_file(file, "<|im_end|>", "<|im_start|>")
    assert (plain.eos_id, plain.bos_id, chosen.eos_id, chosen.bos_id) == (0, None, 301, 300)
    assert plain.to_json() == tokenizers.Tokenizer.from_file(file).to_str()  # nothing but the usual is not marked
    chosen.save(tmp_path)
    again = Tokenizer.from_file(tmp_path)
    for same in (again, Tokenizer.from_json(chosen.to_json()), Tokenizer.from_file(file, "<|im_end|>", "<|im_start|>")):
        assert (same.eos_id, same.bos_id, same.hash) == (301, 300, chosen.hash)
    others = [Tokenizer.from_file(file, *pair) for pair in (("<|im_end|>", None), (None, "<eos>"), ("<eos>", None))]
    assert [(other.eos_id, other.bos_id) for other in others] == [(301, None), (0, 0), (0, None)]
    assert len({other.hash for other in (plain, chosen, *others)}) == 4  # the last one is the plain one
    assert others[-1].hash == plain.hash
    assert Tokenizer.from_file(tmp_path, "<eos>").eos_id == 0  # what is said now counts


def test_other_programs_read_the_file(file: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    chosen = Tokenizer.from_file(file, "<|im_end|>", "<|im_start|>")
    chosen.save(tmp_path / "tokenizer.json")
    text = "def f(x): return <|im_end|> é"
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == 302
    other = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert other("def f(x)").input_ids == chosen.encode("def f(x)")
    assert chosen.decode(chosen.encode(text)) == text
    assert chosen.eos_id not in chosen.encode(text)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (
            ("<|im_ends|>", None),
            r"chat\.json has no token '<\|im_ends\|>' \(data\.eos_token\); did you mean '<\|im_end\|>'",
        ),
        ((None, "<bos>"), r"has no token '<bos>' \(data\.bos_token\); did you mean '<eos>'\?"),
        ((None, "[CLS]"), r"\(data\.bos_token\); its special tokens are <eos>, <\|im_start\|>, <\|im_end\|>\.$"),
    ],
)
def test_unknown_tokens_are_named(file: str, tokens: tuple[str | None, str | None], said: str):
    with pytest.raises(UserError, match=said):
        TextData(tokenizer=file, eos_token=tokens[0], bos_token=tokens[1]).get_tokenizer()


def test_a_trained_tokenizer_has_one_token_for_both(text_folder: str):
    sizes = {"vocab_size": 300, "validation_fraction": 0.2, "preprocessing_workers": 1, "sequence_length": 16}
    plain, both = TextData(text_folder, **sizes), TextData(text_folder, bos_token="<eos>", **sizes)
    assert all(ids[0] == ids[-1] == 0 and 0 not in ids[1:-1] for ids in documents(both.train.shards))
    assert plain.identity()["data_hash"] != both.identity()["data_hash"]
    with pytest.raises(UserError, match=r"the trained tokenizer \(null\) has no token '</s>' \(data\.eos_token\)"):
        TextData(text_folder, eos_token="</s>", **sizes).get_tokenizer()


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_every_document_has_them(file: str, text_folder: str, mixed: bool):
    options = {"tokenizer": file, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "sequence_length": 16}
    options |= {"validation_fraction": 0.2, "preprocessing_workers": 2}
    data = MixedText({"a": Source(text_folder)}, **options) if mixed else TextData(text_folder, **options)
    shards = (data.train.sources[0] if mixed else data.train).shards
    tokenizer, found = data.get_tokenizer(), list(documents(shards))
    assert len(found) == shards.num_documents > 20
    assert all(ids[0] == 300 and ids[-1] == 301 and not {0, 300, 301} & {*ids[1:-1]} for ids in found)
    assert {tokenizer.decode(ids[1:-1]) for ids in found} < {*Corpus(text_folder)}


@pytest.mark.slow
def test_run_checkpoint_and_export_know_them(command: Command, file: str):
    chosen = [f"--data.tokenizer={file}", "--data.eos_token=<|im_end|>", "--data.bos_token=<|im_start|>"]
    command(*FIT, *chosen, "--run", "chat").ok()
    assert command("export", "--checkpoint", "runs/chat", "--output", "exported").code == 0
    for place in ("runs/chat", "runs/chat/checkpoints/last.ckpt", "exported"):
        tokenizer = zoo.load_tokenizer(place)
        assert (tokenizer.eos_id, tokenizer.bos_id) == (301, 300)
    assert "<|im_end|>" in json.dumps(json.loads(Path("exported/tokenizer.json").read_text())["added_tokens"])
    assert command("generate", "--checkpoint", "exported", "--prompt", "def", "--max_new_tokens=4").code == 0
    refused = command("fit", "--resume", "chat", "--data.bos_token=null", "--trainer.max_steps=6").refused()
    assert "has the data hash" in refused.err


@pytest.mark.parametrize("roles", [5, "eos", ["eos", 3], ["master"], {"eos": 1}, [["eos"]], None])
def test_roles_of_a_stranger_may_be_anything(roles: object, file: str, tmp_path: Path):
    content = json.loads(Path(file).read_text())
    content["added_tokens"][0]["document_roles"] = roles
    (tmp_path / "hostile.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"has document_roles .*; a list of eos, bos, stop is expected\.$"):
        Tokenizer.from_file(tmp_path / "hostile.json")
    with pytest.raises(UserError, match=r"^tokenizer has document_roles "):
        Tokenizer.from_json(json.dumps(content))
