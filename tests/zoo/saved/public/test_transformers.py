"""`convert --to=transformers`: the folder loads, decodes and fills padded batches in transformers and lm-eval."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import zoo
from tests.commands import Command
from tests.zoo.evaluation.lm_eval.conftest import TEXTS
from tests.zoo.evaluation.lm_eval.test_model import instances
from zoo.checkpoints.signature import sign
from zoo.checkpoints.tensor_files import TensorsInMemory
from zoo.data.text.tokenizer import Tokenizer
from zoo.evaluation.loaded import load_subject
from zoo.files.safe_yaml import dump_yaml
from zoo.saved.exported_folder import CONFIG, TOKENIZER, write_folder

from .models import CASES, SIZES, excited
from .public_folder import VOCABULARY, byte_level

pytestmark = [pytest.mark.parity, pytest.mark.slow]
PROMPTS = ["def", "a longer prompt, which is not padded"]


def export(case: str, folder: Path) -> Path:
    """A model of the zoo with a tokenizer of bytes, as `export` writes it."""
    stack, others = CASES[case]
    model = excited(zoo.build({"model": {**SIZES, **others, "vocab_size": VOCABULARY, "stack": stack}}))
    tokenizer = Tokenizer(byte_level(), "tokenizer", "<done>")
    texts = {CONFIG: dump_yaml(model.config), TOKENIZER: tokenizer.to_json()}
    write_folder(folder, texts, TensorsInMemory(model.state_dict()), hashed=True, signature=sign(model.config))
    return folder


def loaded(folder: Path, oracle: Callable[[str], ModuleType], **options: Any) -> Any:
    model, problems = oracle("transformers").AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(problems.values()), problems
    return model.eval()


@pytest.fixture
def code(desk: Path, oracle: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of code for transformers."""
    monkeypatch.setattr(oracle("transformers.dynamic_module_utils"), "HF_MODULES_CACHE", str(desk / "cache"))
    monkeypatch.syspath_prepend(str(desk / "cache"))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_are_ours(case: str, code: None, desk: Path, oracle: Callable[[str], ModuleType]):
    """Bit for bit without a cache; else as each prompt alone, in parts of any length, with padding."""
    ours = zoo.load(export(case, desk / "ours"))
    model = loaded(zoo.convert(desk / "ours", desk / "theirs", to="transformers"), oracle)
    tokens = torch.randint(0, 61, (3, 40))
    assert torch.equal(model(tokens, use_cache=False).logits, ours(tokens)[0])
    assert torch.equal(model(tokens, use_cache=False, logits_to_keep=2).logits, ours(tokens)[0][:, -2:])
    padding = (0, 5, 19)
    mask = (torch.arange(40) >= torch.tensor(padding)[:, None]).long()
    ends, cache, parts = [3, 11, 30, *range(31, 41)], None, []
    for start, end in zip([0, *ends], ends, strict=False):
        output = model(tokens[:, start:end], mask[:, :end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    for row, count, actual in zip(tokens, padding, torch.cat(parts, 1), strict=True):
        expected = ours(row[None, count:])[0][0]
        torch.testing.assert_close(actual[count:], expected, rtol=0, atol=2e-5 * expected.abs().max().item())


def test_a_folder_is_loaded_saved_and_generates(
    command: Command, code: None, desk: Path, oracle: Callable[[str], ModuleType]
):
    ours = zoo.load(export("tnl", desk / "ours"))
    done = command("convert", "--checkpoint=ours", "--to=transformers", "--output=theirs", "--max_shard_size=20000")
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["theirs", "next: fill in theirs/README.md, which says how to load it"]
    assert "trust_remote_code=True" in (desk / "theirs" / "README.md").read_text()
    assert len([*(desk / "theirs").glob("*.safetensors")]) > 2
    model = loaded(desk / "theirs", oracle)
    model.save_pretrained("again")
    again = loaded(desk / "again", oracle)
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in model.state_dict().items())
    tokenizer = oracle("transformers").AutoTokenizer.from_pretrained(
        "theirs", trust_remote_code=True, padding_side="left"
    )
    tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    together = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options, prefill_chunk_size=7), together)
    for tokens, mask, new in zip(batch.input_ids, batch.attention_mask, together, strict=True):
        alone = tokens[mask.bool()][None]
        for _ in range(8):
            alone = torch.cat([alone, ours(alone)[0][:, -1:].argmax(-1)], 1)
        assert torch.equal(new[-alone.shape[1] :], alone[0])
    beams = [model.generate(**batch, **options, num_beams=3, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("case", ["kda", "mamba2", "expanded gla"])
def test_half_precision_keeps_what_stays_in_fp32(
    case: str, code: None, desk: Path, oracle: Callable[[str], ModuleType]
):
    ours = zoo.load(export(case, desk / "ours"))
    half = loaded(zoo.convert(desk / "ours", desk / "theirs", to="transformers"), oracle, dtype=torch.bfloat16)
    expected = {f"model.{name}": p.dtype for name, p in ours.bfloat16().named_parameters()}
    assert {name: p.dtype for name, p in half.named_parameters()} == expected
    assert {torch.float32, torch.bfloat16} == {*expected.values()}


def test_arguments(code: None, desk: Path, oracle: Callable[[str], ModuleType]):
    ours = zoo.load(export("gla", desk / "ours"))
    model = loaded(zoo.convert(desk / "ours", desk / "theirs", to="transformers"), oracle)
    tokens, mask = torch.randint(0, 61, (1, 9)), torch.tensor([[1] * 7 + [0] * 2])
    with torch.no_grad():
        assert torch.equal(model(tokens, mask, use_cache=False).logits[:, :7], ours(tokens)[0][:, :7])
        with pytest.raises(ValueError, match=r"^attention_mask: padding must be on the left"):
            model(tokens, mask)
        with pytest.raises(ValueError, match=r"^attention_mask: must be \[1,9\], got \[1, 7\]"):
            model(tokens, mask[:, :7])
        loss = model(tokens, labels=tokens).loss
        expected = F.cross_entropy(ours(tokens)[0][0, :-1], tokens[0, 1:])
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert model(tokens, return_dict=False)[0].shape == (1, 9, VOCABULARY)
    assert model.get_input_embeddings() is model.model.embeddings


def test_a_foreign_config_names_no_code(code: None, desk: Path, oracle: Callable[[str], ModuleType]):
    """Whoever trusts the code of the folder, which is this project's, does not trust its config."""
    folder = zoo.convert(export("gla", desk / "ours"), desk / "theirs", to="transformers")
    config = json.loads((folder / "config.json").read_text())
    config["zoo"]["stack"] = {"class_path": "os.system", "init_args": {"command": "touch canary"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(zoo.UserError, match=r"config\.json .*os\.system"):
        loaded(folder, oracle)
    assert not Path("canary").exists()


def test_lm_eval(code: None, desk: Path, oracle: Callable[[str], ModuleType]):
    """lm-eval's adaptor of transformers, given the folder, says what ours says."""
    folder = zoo.convert(export("h2", desk / "ours"), desk / "theirs", to="transformers")
    adaptor = oracle("lm_eval.models.huggingface").HFLM
    theirs = adaptor(pretrained=str(folder), trust_remote_code=True, device="cpu", dtype="float32", batch_size=2)
    ours = oracle("zoo.evaluation.lm_eval.model").SubjectLM(load_subject(desk / "ours", "ours", bf16=False))
    pairs = [("Open a jar", " Turn"), ("".join(TEXTS) * 4, " and then some"), ("Open a ", "jar")]
    expected, actual = (lm.loglikelihood(instances("loglikelihood", *pairs)) for lm in (ours, theirs))
    for (score, greedy), (their_score, their_greedy) in zip(expected, actual, strict=True):
        assert their_score == pytest.approx(score, abs=1e-3)
        assert their_greedy == greedy
    arguments = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    prompts = [(text, dict(arguments)) for text in TEXTS]  # of different lengths: a padded batch
    expected, actual = (lm.generate_until(instances("generate_until", *prompts)) for lm in (ours, theirs))
    assert actual == expected
    assert any(actual)


def test_it_is_not_read_back(desk: Path):
    folder = zoo.convert(export("retnet", desk / "ours"), desk / "theirs", to="transformers")
    with pytest.raises(
        zoo.UserError, match=r"theirs was written by convert with to=transformers, .* cannot be read back"
    ):
        zoo.load(folder)


def test_a_later_model_replaces_it(desk: Path):
    """With everything of it, also the file of code; the model card may have been edited, and is kept."""
    public = {"class_path": "Uniform", "init_args": {"mixer": {"class_path": "GLA", "init_args": {"norm_eps": 1e-6}}}}
    model = zoo.build({"model": {**SIZES, "stack": public}})
    write_folder(desk / "gla", {CONFIG: dump_yaml(model.config)}, TensorsInMemory(model.state_dict()))
    zoo.convert(export("tnl", desk / "ours"), desk / "theirs", to="transformers")
    zoo.convert(desk / "gla", desk / "theirs", to="fla", overwrite=True)
    names = {file.name for file in (desk / "theirs").iterdir()}
    assert names == {"README.md", "README.old.md", "config.json", "model.safetensors"}
    weights = load_file(desk / "theirs" / "model.safetensors")
    assert any(re.search("gk_proj", name) for name in weights)


def test_what_is_refused_leaves_nothing(command: Command, desk: Path):
    export("gla", desk / "ours")
    done = command("convert", "--checkpoint", "ours", "--to=transformer", "--output", "theirs")
    assert "to: 'transformer' is not one of fla, huggingface, transformers, " in done.err
    assert not (desk / "theirs").exists()
