"""`convert --to=transformers`: the folder loads where this project is not, and in lm-eval's adaptor of transformers."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
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

from ..public_folder import VOCABULARY, byte_level
from .models import CASES, SIZES, excited

pytest_plugins = "tests.desk"
pytestmark = [pytest.mark.parity, pytest.mark.slow]
PROMPTS = ["def", "a longer prompt, which is not padded"]
# run where the folders of this project are not on the path
LOAD = """
import json, os, sys
sys.path = [path for path in sys.path if not os.path.isdir(os.path.join(path or ".", "mixers"))]
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompts = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, padding_side="left")
tokenizer.pad_token = tokenizer.eos_token
model, report = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not any(report.values()), report
half = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
batch = tokenizer(prompts, return_tensors="pt", padding=True)
out = model.generate(**batch, max_new_tokens=8, do_sample=False)
rows = [row[mask.argmax():].tolist() for row, mask in zip(batch.input_ids, batch.attention_mask)]
with torch.no_grad():
    logits = [m(torch.tensor([rows[1]])).logits[0].float().tolist() for m in (model, half)]
dtypes = sorted({str(p.dtype) for name, p in half.named_parameters() if "decay" in name or "norm" in name})
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
assert all(torch.equal(p, again.state_dict()[name]) for name, p in model.state_dict().items())
assert not {"zoo", "mixers", "kernels"} & {*sys.modules}
result = {"prompts": rows, "new": out[:, batch.input_ids.shape[1]:].tolist(), "logits": logits, "dtypes": dtypes}
sys.stdout.write("\\n" + json.dumps(result))
"""


def export(case: str, folder: Path) -> Path:
    """A model of ours with a tokenizer of bytes, as `export` writes it."""
    stack, others = CASES[case]
    model = excited(zoo.build({"model": {**SIZES, **others, "vocab_size": VOCABULARY, "stack": stack}}))
    tokenizer = Tokenizer(byte_level(), "tokenizer", "<done>")
    texts = {CONFIG: dump_yaml(model.config), TOKENIZER: tokenizer.to_json()}
    write_folder(folder, texts, TensorsInMemory(model.state_dict()), hashed=True, signature=sign(model.config))
    return folder


def test_it_loads_without_this_project(command: Command, desk: Path, oracle: Callable[[str], ModuleType]):
    oracle("transformers")
    ours = zoo.load(export("tnl", desk / "ours")).eval()
    done = command(
        "convert", "--checkpoint", "ours", "--to=transformers", "--output", "theirs", "--max_shard_size=20000"
    )
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["theirs", "next: fill in theirs/README.md, which says how to load it"]
    assert "trust_remote_code=True" in (desk / "theirs" / "README.md").read_text()
    assert len([*(desk / "theirs").glob("*.safetensors")]) > 2
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, "theirs", json.dumps(PROMPTS)],
        cwd=desk,
        stdin=subprocess.DEVNULL,
        env={**environment, "HF_HOME": str(desk / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Do you wish to run" not in ran.stdout + ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    tokenizer = zoo.load_tokenizer(desk / "ours")
    assert result["prompts"] == [tokenizer.encode(prompt) for prompt in PROMPTS]
    with torch.no_grad():
        expected = ours(torch.tensor([result["prompts"][1]]))[0][0]
        exact, half = (torch.tensor(logits) for logits in result["logits"])
        torch.testing.assert_close(exact, expected, rtol=0, atol=2e-5 * expected.abs().max().item())
        assert (half - expected).norm() < 0.05 * expected.norm()
        for prompt, new in zip(result["prompts"], result["new"], strict=True):
            tokens = prompt
            for token in new:
                assert ours(torch.tensor([tokens]))[0][0, -1].argmax() == token
                tokens = [*tokens, token]
                if token == tokenizer.eos_id:
                    break
    assert result["dtypes"] == ["torch.float32"]


def test_lm_eval(desk: Path, oracle: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch):
    """lm-eval's adaptor of transformers, given the folder, says what ours says."""
    code = oracle("transformers.dynamic_module_utils")
    monkeypatch.setattr(code, "HF_MODULES_CACHE", str(desk / "cache"))
    monkeypatch.syspath_prepend(str(desk / "cache"))
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
    """With everything of it, also the modelling file; the model card may have been edited, and is kept."""
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
    stack = {"class_path": "Uniform", "init_args": {"mixer": "HGRN1"}}
    model = zoo.build({"model": {**SIZES, "stack": stack}})
    write_folder(desk / "ours", {CONFIG: dump_yaml(model.config)}, TensorsInMemory(model.state_dict()))
    done = command("convert", "--checkpoint", "ours", "--to=transformers", "--output", "theirs", "--trust=true")
    assert done.code == 2
    assert "to: transformers cannot hold the mixer HGRN1; it can hold CosFormer2, DeltaNet, " in done.err
    done = command("convert", "--checkpoint", "ours", "--to=transformer", "--output", "theirs", "--trust=true")
    assert "to: 'transformer' is not one of fla, huggingface, transformers, " in done.err
    assert not (desk / "theirs").exists()
