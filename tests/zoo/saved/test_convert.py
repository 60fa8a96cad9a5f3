"""`convert` at the command line: what it writes, what it refuses, and that it leaves nothing half-written."""

import json
import pickle
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import zoo
from kernels import UserError
from tests.commands import Command
from tests.forked_python import forked_python
from tests.test_trust import Bomb
from tests.zoo.saved.gguf.models import exported
from tests.zoo.saved.public.public_folder import VOCABULARY, tensors, write


@pytest.mark.slow
def test_a_public_folder_becomes_one_of_ours(command: Command, desk: Path):
    write(desk / "theirs")
    command("convert", "--checkpoint", "theirs", "--output", "ours/").ok()
    assert sorted(file.name for file in (desk / "ours").iterdir()) == [
        "config.yaml",
        "hashes.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    prompt = torch.randint(0, VOCABULARY, (1, 9))
    assert torch.equal(zoo.load("ours")(prompt)[0], zoo.load("theirs")(prompt)[0])
    for folder in ("ours", "theirs"):
        done = command("generate", "--checkpoint", folder, "--prompt", "a", "--max_new_tokens=4", "--temperature=0")
        assert done.code == 0, done.err
    command("evaluate", "--checkpoint", "ours", "--tasks=decoding", "--lengths=[32]", "--samples=1").ok()


@pytest.mark.slow
@pytest.mark.parametrize(("case", "other", "kind"), [("qwen3.5", 1, "ZeroCentredRMSNorm"), ("llama", -1, "RMSNorm")])
def test_norms_of_the_other_convention_are_warned_of(
    case: str, other: int, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    theirs = zoo.convert(exported(tmp_path / "model", case), tmp_path / "theirs", to="huggingface")
    zoo.convert(theirs, tmp_path / "same")
    assert "norms" not in caplog.text
    weights = load_file(theirs / "model.safetensors")
    norms = [name for name in weights if "norm" in name and "linear_attn" not in name]
    save_file({name: x + other * (name in norms) for name, x in weights.items()}, theirs / "model.safetensors")
    zoo.convert(theirs, tmp_path / "other")
    assert f"but those of {kind} start at {int(kind == 'RMSNorm')}" in caplog.text


def test_values_that_are_not_finite_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    weights = tensors()
    weights["model.layers.1.mlp.up_proj.weight"][3, 4:6] = torch.nan
    zoo.convert(write(tmp_path / "theirs", weights), tmp_path / "ours")
    assert "layers.1.mlp.in_proj.up.weight has 2 values that are not finite" in caplog.text


def test_what_comes_next_is_said(command: Command, desk: Path):
    """A command that works on what was written, or the model card of a layout of others."""
    write(desk / "theirs")
    done = command("convert", "--checkpoint", "theirs", "--output", "my models/a")
    assert done.out.splitlines() == [
        "my models/a",
        "next: python cli.py generate --checkpoint 'my models/a' --prompt \"def \"",
    ]
    write(desk / "plain", tokenizer=False)
    done = command("convert", "--checkpoint", "plain", "--output", "b")
    assert done.out.splitlines() == ["b", "next: python cli.py evaluate --checkpoint b --tasks=decoding"]
    done = command("convert", "--checkpoint", "my models/a", "--to=fla", "--output", "back")
    assert done.out.splitlines() == ["back", "next: fill in back/README.md, which says how to load it"]
    assert "from_pretrained" in (desk / "back" / "README.md").read_text()


@pytest.mark.slow
def test_a_converted_model_is_trained_on(command: Command, desk: Path):
    zoo.convert(write(desk / "theirs"), desk / "ours", max_shard_size=20_000)
    (desk / "data.yaml").write_text("data: {sequence_length: 32, batch_size: 2, max_characters: 20000}")
    initial = ("--optim.initial_weights=ours", "--data.tokenizer=ours")
    steps = ("--trainer.max_steps=1", "--trainer.limit_val_batches=1", "--trainer.accelerator=cpu")
    configs = ("--config", "ours/config.yaml", "--config", "data.yaml", "--run", "more")
    command("fit", *configs, *initial, *steps, "--optim.learning_rate=1e-12").ok()
    before, after = zoo.load("ours").state_dict(), zoo.load("runs/more").state_dict()
    assert all(torch.allclose(after[name], tensor, atol=1e-9) for name, tensor in before.items())


def test_training_with_another_tokenizer_is_refused(command: Command, desk: Path):
    zoo.convert(write(desk / "theirs"), desk / "ours")
    (desk / "data.yaml").write_text("data: {sequence_length: 32, batch_size: 2, max_characters: 20000}")
    configs = ("--config", "ours/config.yaml", "--config", "data.yaml", "--run", "more")
    done = command("fit", *configs, "--optim.initial_weights=ours", "--trainer.accelerator=cpu").refused()
    assert "data.tokenizer: ours was trained with another tokenizer" in done.err
    assert not (desk / "runs").exists()


def test_there_and_back_in_shards(command: Command, desk: Path):
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in tensors().items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    write(desk / "theirs", weights, shards=3)
    assert command("convert", "--checkpoint", "theirs", "--output", "ours", "--max_shard_size=20000").code == 0
    shards = sorted((desk / "ours").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(file.stat().st_size < 24_000 for file in shards)
    command("convert", "--checkpoint", "ours", "--to=fla", "--output", "back").ok()
    actual = load_file(desk / "back" / "model.safetensors")
    assert actual.keys() == weights.keys()
    assert all(
        torch.equal(actual[name], weights[name]) and actual[name].dtype == weights[name].dtype for name in actual
    )
    config = json.loads((desk / "back" / "config.json").read_text())
    assert (config["architectures"], config["dtype"], config["eos_token_id"]) == (["GLAForCausalLM"], "bfloat16", 256)
    assert zoo.load_tokenizer("back").encode("a<done>") == zoo.load_tokenizer("theirs").encode("a<done>")


@pytest.mark.slow
def test_a_run_is_converted(command: Command, desk: Path):
    (desk / "gla.yaml").write_text(
        "model: {stack: {class_path: Uniform, init_args: {mixer: {class_path: GLA, init_args: {norm_eps: 1.0e-6}}}}}"
    )
    run = ("--config", "./gla.yaml", "--config", "tiny.yaml", "--run", "first", "--trainer.max_steps=1")
    assert command("fit", *run, "--trainer.val_check_interval=1").code == 0
    command("convert", "--checkpoint", "runs/first", "--to=fla", "--output", "for-fla/").ok()
    prompt = torch.randint(0, 512, (1, 9))
    assert torch.equal(zoo.load("for-fla")(prompt)[0], zoo.load("runs/first")(prompt)[0])
    assert zoo.load_tokenizer("for-fla").encode("def") == zoo.load_tokenizer("runs/first").encode("def")
    modes = {path.name: path.stat().st_mode for path in (desk / "for-fla").iterdir()}
    assert len(modes) > 3
    assert len(set(modes.values())) == 1  # others may read the weights if they may read the rest


def test_shards_of_ours_are_checked(desk: Path):
    ours = zoo.convert(write(desk / "theirs"), desk / "ours", max_shard_size=20_000)
    shard = sorted(ours.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=f"{shard.name} is damaged"):
        zoo.load(ours)
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name} is missing"):
        zoo.load(ours)


def test_a_weight_may_have_two_names(desk: Path):
    """As the gated norm does with and without `fuse_norm`."""
    renamed = {name.replace("g_norm_swish_gate", "g_norm"): tensor for name, tensor in tensors().items()}
    models = zoo.load(write(desk / "one")), zoo.load(write(desk / "other", renamed, fuse_norm=False))
    prompt = torch.randint(0, VOCABULARY, (1, 9))
    assert torch.equal(models[0](prompt)[0], models[1](prompt)[0])


def test_the_size_of_mlps_by_their_ratio(desk: Path):
    """2/3 · hidden_ratio · hidden_size, rounded up to a multiple of 256."""
    folder = write(desk / "theirs", tensors(inner=512), intermediate_size=None, hidden_ratio=12.5)
    assert zoo.load(folder).mlps[0].down_proj.in_features == 512


def test_links_within_the_cache_of_hugging_face(desk: Path):
    snapshot = write(desk / "models--a--b" / "snapshots" / "1a2b")
    blobs = desk / "models--a--b" / "blobs"
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    assert zoo.load(snapshot).vocab_size == VOCABULARY
    assert zoo.load_tokenizer(snapshot).eos_id == 256


def without(name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in tensors().items() if other != name}


def shard_outside(folder: Path) -> None:
    write(folder / "theirs", shards=2)
    save_file(tensors(), folder / "x.safetensors")
    index = folder / "theirs" / "model.safetensors.index.json"
    index.write_text(re.sub(r"model-00001-of-\d+", "../x", index.read_text()))


def link_outside(folder: Path) -> None:
    write(folder / "theirs")
    (folder / "theirs" / "model.safetensors").rename(folder / "secret.safetensors")
    (folder / "theirs" / "model.safetensors").symlink_to(folder / "secret.safetensors")


def missing_shard(folder: Path) -> None:
    write(folder / "theirs", shards=3)
    (folder / "theirs" / "model-00002-of-00003.safetensors").unlink()


def damaged_shard(folder: Path) -> None:
    write(folder / "theirs", shards=3)
    shard = folder / "theirs" / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])


def pickled(name: str) -> Callable[[Path], object]:
    def prepare(folder: Path) -> None:
        write(folder / "theirs")
        (folder / "theirs" / "model.safetensors").unlink()
        (folder / "theirs" / name).write_bytes(pickle.dumps(Bomb()))

    return prepare


def with_file(name: str, content: str) -> Callable[[Path], object]:
    def prepare(folder: Path) -> None:
        write(folder / "theirs")
        (folder / "theirs" / name).write_text(content)

    return prepare


def with_config(**config: object) -> Callable[[Path], object]:
    return lambda folder: write(folder / "theirs", **config)


def with_weights(weights: Callable[[], dict[str, torch.Tensor]], **config: object) -> Callable[[Path], object]:
    return lambda folder: write(folder / "theirs", weights(), **config)


CLASS = {"class_path": "os.system", "init_args": {"command": "touch canary"}}
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown family": (with_config(model_type="glb"), r'model_type "glb", .*did you mean .gla.*known: .*mamba2'),
    "no family": (with_config(model_type=None), "model_type null"),
    "a class as family": (with_config(model_type=CLASS), "model_type .*os.system"),
    "activation": (with_config(hidden_act="gelu"), 'hidden_act is "gelu"; our mixers can do "swish"'),
    "shared keys": (with_config(num_kv_heads=1), "num_kv_heads is 1; .* num_heads, 2"),
    "attention as a number": (with_config(attn=3), "attn is 3; our mixers can do settings of attention"),
    "attention without heads": (with_config(attn={"layers": [0]}), "attn is .* with layers and num_heads"),
    "attention with more": (with_config(attn={"layers": [0], "num_heads": 2, "sinks": 4}), "sinks.*no others than"),
    "attention in no layer": (with_config(attn={"layers": [2], "num_heads": 2}), r"attn.layers is \[2\]; .* 0 to 1"),
    "attention alone": (with_config(attn={"layers": [0, 1], "num_heads": 2}), "attn.layers is .* not of attention"),
    "attention without weights": (with_config(attn={"layers": [0], "num_heads": 2, "qkv_bias": True}), "lacks .*bias"),
    "unheard of": (with_config(new_trick=3), "new_trick is 3, which fla_gla does not know"),
    "quantised": (with_config(quantization_config={"bits": 4}), "quantization_config is"),
    "no heads": (with_config(num_heads=0), "num_heads is 0; .* 1 or more"),
    "neither yes nor no": (with_config(use_short_conv=1), "use_short_conv is 1; .* true or false"),
    "too many layers": (with_config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000; .* 10,000,000 at most"),
    "another size": (with_config(intermediate_size=64), r"mlp.gate_proj.weight \[48, 32\] instead of \[64, 32\]"),
    "more layers": (with_config(num_hidden_layers=3), "lacks model.layers.2.attn.*attn_norm.weight.* and 9 more"),
    "fewer layers": (with_config(num_hidden_layers=1), "holds model.layers.1.*no place"),
    "a tensor too few": (with_weights(lambda: without("model.norm.weight")), "lacks model.norm.weight"),
    "no head": (with_weights(lambda: without("lm_head.weight")), "lacks lm_head.weight"),
    "an untied head": (with_weights(tensors, tie_word_embeddings=True), "ties lm_head.weight .* differ"),
    "whole numbers": (with_weights(lambda: {**tensors(), "model.norm.weight": torch.ones(32, dtype=torch.int8)}), "I8"),
    "a shard too few": (missing_shard, "model-00002-of-00003.safetensors.* is missing"),
    "a damaged shard": (damaged_shard, "model-00002-of-00003.safetensors cannot be read as safetensors"),
    "a shard outside": (shard_outside, r"'../x.safetensors' is not a .safetensors file in its folder"),
    "a link outside": (link_outside, "is a link that leaves its folder"),
    "a pickle": (pickled("pytorch_model.bin"), "pytorch_model.bin is refused, as only tensors are unpickled"),
    "a pickle in disguise": (pickled("model.safetensors"), "cannot be read as safetensors"),
    "no weights": (lambda folder: write(folder / "theirs").joinpath("model.safetensors").unlink(), "has no weights"),
    "no config": (
        lambda folder: write(folder / "theirs").joinpath("config.json").unlink(),
        "missing, or config.json if",
    ),
    "no JSON": (with_file("config.json", "{"), "config.json cannot be read as JSON"),
    "no tokenizer": (with_file("tokenizer.json", "{}"), "is not a tokenizer.json"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, command: Command, desk: Path):
    prepare, message = REFUSED[case]
    prepare(desk)
    before = sorted(desk.rglob("*"))
    said = command("convert", "--checkpoint", "theirs", "--output", "ours").sentence()
    assert re.search(message, said), said
    assert sorted(desk.rglob("*")) == before  # no output, nothing half-written, nothing run


@pytest.mark.slow
def test_refusals_of_outputs_and_targets(command: Command, finished: Path, desk: Path):
    write(desk / "theirs")
    zoo.convert("theirs", "ours")
    (desk / "taken").mkdir()
    run = str(finished / "runs" / "done")
    for arguments, message in {
        ("theirs", "--output", "taken"): "output: taken exists already",
        ("nowhere", "--output", "new"): "there is nothing at nowhere",
        ("ours", "--output", "new"): "to: null reads public checkpoints, and ours is not one",
        ("ours", "--output", "new", "--to=flax"): "to: 'flax' is not one of fla, huggingface, .*; did you mean 'fla'",
        ("ours", "--output", "new", "--to=huggingface"): "no family of huggingface has layers of GLA",
        ("ours", "--output", "new", "--max_shard_size=0"): "max_shard_size: 0 must be at least 1",
        (run, "--output", "new", "--to=fla"): "no family of fla has layers of GatedDeltaNet, Mamba2, .* in one model",
        ("theirs", "--output", "theirs/config.json/new"): "output: .* cannot be written",
    }.items():
        done = command("convert", "--checkpoint", *arguments)
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert re.search(message, done.err), done.err
        assert not (desk / "new").exists()


def refused_by_fla(stack: dict, message: str, command: Command, desk: Path) -> None:
    model = {"stack": stack, "vocab_size": 40, "hidden_size": 32, "num_layers": 2}
    (desk / "ours").mkdir()
    (desk / "ours" / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    save_file(zoo.build("ours/config.yaml").state_dict(), desk / "ours" / "model.safetensors")
    done = command("convert", "--checkpoint", "ours", "--output", "new", "--to=fla")
    assert re.match(f"error: to: {message}", done.err), done.err
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert not (desk / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_eps": 1e-3}, "layers.0.mixer.o_norm.eps is 0.001 instead of 1e-06"),
        ({"gate_normalizer": 8.0}, "layers.0.mixer.gate_normalizer is 8.0 instead of 16.0"),
        ({"qk": {"activation": "relu"}}, "layers.0.mixer.q_features.spec.activation is relu instead of identity"),
        ({"factor": 2}, "layers.0.mixer"),
    ],
)
def test_a_model_that_their_layout_cannot_hold(change: dict, message: str, command: Command, desk: Path):
    """All that differs from what their config would build is found, without a list of what to look for."""
    mixer = {"class_path": "GLA", "init_args": {"num_heads": 2, "norm_eps": 1e-6, **change}}
    if "factor" in change:
        mixer["init_args"].pop("factor")
        mixer = {"class_path": "Expanded", "init_args": {"mixer": mixer, **change}}
    stack = {"class_path": "Uniform", "init_args": {"mixer": mixer}}
    refused_by_fla(stack, f"fla_gla cannot hold this model: .*{re.escape(message)}", command, desk)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "attention", "message"),
    [
        ("LA", {"gate": "head"}, "fla_gla cannot hold this model: layers.1.mixer"),
        (
            "LA",
            {"qk": {"map": None}},
            "fla_gla cannot hold this model: it always has layers.1.mixer.q_features.map (Rotary), which is missing",
        ),
        ("LA", {"head_dim": 8}, "fla_gla cannot hold this model: layers.1.mixer"),
        ("A", {}, "fla is for models with linear layers, and all of this one are attention"),
    ],
)
def test_attention_that_their_hybrids_cannot_hold(
    pattern: str, attention: dict, message: str, command: Command, desk: Path
):
    kinds = {"L": ("GLA", {"num_heads": 2, "norm_eps": 1e-6}), "A": ("SoftmaxAttention", {"num_heads": 2, **attention})}
    mixers = {letter: {"class_path": kinds[letter][0], "init_args": kinds[letter][1]} for letter in pattern}
    stack = {"class_path": "Pattern", "init_args": {"pattern": pattern, "mixers": mixers}}
    refused_by_fla(stack, re.escape(message), command, desk)


# resource.getrusage would include what the parent held
MEASURE = """
import re, pathlib, zoo
def measured(name):
    return int(re.search(name + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
zoo.load({small!r})  # what is imported on first use is no memory of weights
before = measured("VmRSS")
{action}
print(measured("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_stays_near_one_shard(tmp_path: Path):
    """A model of 400 MB in shards of 50. A second copy of it in memory would be 366 MB.

    The pages of mapped files that the kernel counts vary: loading took 135 to 202 MB beside the parameters in ten runs.
    """
    weights = tensors(layers=20, inner=50_000)
    write(tmp_path / "theirs", weights, shards=8, intermediate_size=50_000, num_hidden_layers=20)
    size = sum(tensor.nbytes for tensor in weights.values()) / 2**20
    assert size > 360
    small = str(write(tmp_path / "small"))
    convert = f"zoo.convert({str(tmp_path / 'theirs')!r}, {str(tmp_path / 'ours')!r}, max_shard_size=50_000_000)"
    load = f"model = zoo.load({str(tmp_path / 'ours')!r})"
    for action, most in ((convert, 150), (load, size + 250)):
        program = tmp_path / "program.py"
        program.write_text(MEASURE.format(action=action, small=small))
        done = subprocess.run([forked_python(), str(program)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < most, (action, done.stdout)
