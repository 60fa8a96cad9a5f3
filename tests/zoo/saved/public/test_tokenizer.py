"""The tokenizer of a public folder is one of ours afterwards, and transformers loads ours."""

import json
from pathlib import Path

import pytest
from tokenizers import processors

import zoo
from kernels import UserError
from zoo.saved.public.tokenizer import DESCRIPTION

from .public_folder import byte_level, write
from .zoo_of_others import Oracle

TEXT = "hello, wörld<done>\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "theirs")


def test_ids_and_added_tokens_are_kept(folder: Path, tmp_path: Path):
    ours = zoo.convert(folder, tmp_path / "ours")
    for place in (folder, ours):
        tokenizer = zoo.load_tokenizer(place)
        assert tokenizer.eos_id == 256
        assert tokenizer.bos_id is None
        ids = tokenizer.encode(TEXT)
        assert ids[0] == 257  # an added token
        assert 256 not in ids  # a text that spells the end does not end
        assert tokenizer.decode(ids) == TEXT


def test_the_end_that_config_json_names(folder: Path):
    (folder / "tokenizer_config.json").unlink()
    assert zoo.load_tokenizer(folder).eos_id == 256
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("256", "999"))
    with pytest.raises(UserError, match="does not say which token ends a document; name it as eos_token"):
        zoo.load_tokenizer(folder)


def test_a_token_that_starts_texts_starts_documents(folder: Path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<begin>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 258)])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert zoo.load_tokenizer(folder).bos_id == 258
    assert zoo.load_tokenizer(folder).encode("a") == byte_level().encode("a").ids


@pytest.mark.parametrize("way", ["config", "nested", "generation"])
def test_all_tokens_that_end_a_text_are_known_and_kept(folder: Path, tmp_path: Path, way: str):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<turn>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config, ends = json.loads((folder / "config.json").read_text()), {"eos_token_id": [256, 258, 65]}
    if way == "generation":
        (folder / "generation_config.json").write_text(json.dumps(ends))
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 258}))
    elif way == "config":
        (folder / "config.json").write_text(json.dumps(config | ends))
    if way != "nested":
        ours = zoo.convert(folder, tmp_path / "ours")
        back = zoo.convert(ours, tmp_path / "back", to="fla")
        assert set(json.loads((back / "config.json").read_text())["eos_token_id"]) == {256, 258, 65}
        assert set(json.loads((back / "generation_config.json").read_text())["eos_token_id"]) == {256, 258, 65}
        places = [folder, ours, back]
    else:  # as published models that also see pictures have it
        (folder / "config.json").write_text(json.dumps(config | {"text_config": ends}))
        places = [folder]
    for place in places:
        found = zoo.load_tokenizer(place)
        assert (found.eos_id, set(found.stop_ids)) == (256, {256, 258, 65})
        assert found.encode("A hello") == byte_level().encode("A hello").ids


def test_a_token_that_also_ends_texts_starts_documents(folder: Path):
    for single, bos in (("<done> $A", 256), ("$A <done>", None), ("<done> $A <done>", 256)):
        tokenizer = byte_level()
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<done>", 256)])
        tokenizer.save(str(folder / "tokenizer.json"))
        found = zoo.load_tokenizer(folder)
        assert (found.bos_id, found.eos_id) == (bos, 256)


def test_without_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    ours = zoo.convert(write(tmp_path / "theirs", tokenizer=False), tmp_path / "ours")
    assert "has no tokenizer.json, so the converted model has no tokenizer" in caplog.text
    with pytest.raises(UserError, match="without a tokenizer"):
        zoo.load_tokenizer(ours)


@pytest.mark.parity
def test_transformers_loads_ours(folder: Path, tmp_path: Path, oracle: Oracle):
    back = zoo.convert(zoo.convert(folder, tmp_path / "ours"), tmp_path / "back", to="fla")
    loaded = oracle("transformers").AutoTokenizer.from_pretrained(back)
    assert loaded.encode("hello, wörld\n", add_special_tokens=False) == zoo.load_tokenizer(back).encode(
        "hello, wörld\n"
    )
    assert (loaded.eos_token, loaded.eos_token_id) == ("<done>", 256)
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == 256


def test_a_chat_template_is_neither_kept_nor_run(folder: Path, tmp_path: Path):
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}{% if %}")
    description = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps({**description, "chat_template": [{"name": 3}]}))
    ours = zoo.convert(folder, tmp_path / "ours")
    back = zoo.convert(ours, tmp_path / "back", to="fla")
    assert zoo.load_tokenizer(back).encode(TEXT) == zoo.load_tokenizer(folder).encode(TEXT)
    assert not list(back.glob("chat_template*"))
    assert "__class__" not in zoo.load_tokenizer(ours).to_json()
