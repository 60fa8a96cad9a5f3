"""RWKV-7 from its author's `.pth` files, and what is refused of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import zoo
from tests.commands import Command
from tests.test_trust import Bomb
from zoo.checkpoints.tensor_files import TensorsInMemory
from zoo.saved.public.import_export import exported, family_of

from . import rwkv7
from .zoo_of_others import RWKV7, Oracle, build, save, stored

VOCABULARY, SIZE, LAYERS, HEAD = 97, 128, 3, 64
INNER, RANKS = 160, {"w": 5, "a": 5, "v": 4, "g": 6}


def author(layers: int = LAYERS, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A model in the author's names, shapes and order of axes."""
    vectors = [f"att.x_{x}" for x in "rwkvag"] + ["att.w0", "att.a0", "att.v0", "att.k_k", "att.k_a", "ffn.x_k"]
    shapes = {name: (1, 1, SIZE) for name in vectors} | {"att.r_k": (SIZE // HEAD, HEAD)}
    for name, rank in RANKS.items():
        shapes |= {f"att.{name}1": (SIZE, rank), f"att.{name}2": (rank, SIZE)}
    shapes |= {f"att.{name}.weight": (SIZE, SIZE) for name in ("receptance", "key", "value", "output")}
    shapes |= {"ffn.key.weight": (INNER, SIZE), "ffn.value.weight": (SIZE, INNER)}
    shapes |= {f"{norm}.{part}": (SIZE,) for norm in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")}
    whole = {f"blocks.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()}
    whole |= {f"{norm}.{part}": (SIZE,) for norm in ("blocks.0.ln0", "ln_out") for part in ("weight", "bias")}
    whole |= {"emb.weight": (VOCABULARY, SIZE), "head.weight": (VOCABULARY, SIZE)}
    for part in "012":
        del whole[f"blocks.0.att.v{part}"]
    return {name: (torch.randn(shape) * 0.2 + 0.5 * (len(shape) == 1)).to(dtype) for name, shape in whole.items()}


def close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.slow
@torch.no_grad()
def test_the_logits_of_the_author(tmp_path: Path):
    weights, tokens = author(), torch.randint(VOCABULARY, (2, 67))
    torch.save(weights, tmp_path / "RWKV-x070.pth")
    ours = zoo.load(tmp_path / "RWKV-x070.pth")
    expected = torch.stack([rwkv7.logits(weights, row, 1e-5) for row in tokens])
    close(ours(tokens)[0], expected)
    logits, state = ours(tokens[:, :35], ours.init_state(2))
    parts = [logits]
    for token in tokens[:, 35:].split(1, 1):
        logits, state = ours(token, state)
        parts.append(logits)
    close(torch.cat(parts, 1), expected)
    packed = ours(tokens.flatten()[None], cu_seqlens=torch.tensor([0, 67, 134], dtype=torch.int32))[0]
    close(packed[0], expected.flatten(0, 1))


@pytest.mark.slow
@pytest.mark.parity
def test_a_file_of_the_author_becomes_a_folder_of_fla(tmp_path: Path, oracle: Oracle):
    weights = author(dtype=torch.bfloat16)
    torch.save(weights, tmp_path / "model.pth")
    zoo.convert(tmp_path / "model.pth", tmp_path / "ours", max_shard_size=200_000)
    for source in ("model.pth", "ours"):
        folder = tmp_path / f"fla from {source}"
        zoo.convert(tmp_path / source, folder, to="fla")
        returned = rwkv7.by_the_author(stored(folder))
        assert returned.keys() == weights.keys()
        for name, tensor in weights.items():
            assert returned[name].dtype == torch.bfloat16
            assert torch.equal(returned[name], tensor), name
    oracle("fla.models").RWKV7ForCausalLM.from_pretrained(folder)


def without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in author(1).items() if name not in names}


def changed(**tensors: object) -> Callable[[], object]:
    """A model of one layer with other tensors, whose names have __ for a dot."""
    return lambda: {**author(1), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "code": (changed(x=Bomb()), "model.pth is refused: it names posix.system"),
    "more": (changed(blocks__0__ffn__s_emb=torch.ones(3)), "holds .*0.ffn.s_emb, for which fla_rwkv7 has no place"),
    "integers": (changed(emb__weight=torch.ones(97, 128, dtype=torch.int8)), "'emb.weight' has the dtype torch.int8"),
    "a vector": (changed(emb__weight=torch.ones(128)), "is not a model of RWKV-7: it has no matrix emb.weight"),
    "small heads": (
        changed(blocks__0__att__r_k=torch.ones(4, 32)),
        "has heads of 32 channels; those of RWKV-7 have 64",
    ),
    "ranks": (changed(blocks__0__att__w1=torch.ones(128, 7)), "a_low_rank_dim is 5; our mixers can do .* 7"),
    "axes": (changed(blocks__0__att__g2=torch.ones(128, 6)), r"g_lora.* \[6, 128\] instead of \[128, 6\]"),
    "layers": (changed(blocks__300__att__k_k=torch.ones(128)), "is not a model of RWKV-7: it lacks blocks.1.att.v1"),
    "no embeddings": (lambda: without("emb.weight"), "is not a model of RWKV-7: it lacks emb.weight"),
    "half a norm": (lambda: without("blocks.0.ln0.bias"), "lacks model.layers.0.pre_norm.bias"),
    "another model": (lambda: {"x": torch.ones(1)}, "is not a model of RWKV-7: it lacks emb.weight"),
    "a list": (lambda: [torch.ones(1)], "holds no weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(case: str, command: Command, desk: Path):
    contents, message = REFUSED[case]
    torch.save(contents(), desk / "model.pth")
    command("convert", "--checkpoint=model.pth", "--output=ours").sentence()
    with pytest.raises(zoo.UserError, match=message):
        zoo.load("model.pth")
    assert not (desk / "canary").exists()
    assert not (desk / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a_low_rank_dim": 6}, "a_low_rank_dim is 6; our mixers can do decay_low_rank_dim, 5"),
        ({"value_dim": [64, 128]}, r"value_dim is \[64, 128\]; our mixers can do hidden_size 64 in all layers"),
        ({"num_heads": 4}, "num_heads is 4; our mixers can do hidden_size / head_dim, 64 / 32"),
        ({"attn": {"layers": [1], "num_heads": 2}}, "attn is .*; our mixers can do null"),
        ({"hidden_act": "relu"}, 'hidden_act is "relu"; our mixers can do "sqrelu"'),
        ({"norm_bias": False, "fuse_norm": False}, "norm_bias is false; our mixers can do true"),
    ],
    ids=str,
)
def test_models_of_fla_that_are_refused(changes: dict[str, Any], message: str):
    config = {"model_type": "rwkv7", "hidden_size": 64, "num_hidden_layers": 2, **RWKV7}
    with pytest.raises(zoo.UserError, match=message):
        family_of(config, Path()).read({**config, **changes})


@pytest.mark.slow
@pytest.mark.parity
def test_older_folders(oracle: Oracle, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Those have the six mixtures in one tensor, and unused weights in the lowest layer."""
    new = save(build("rwkv7", oracle), tmp_path)
    expected, old = zoo.load(tmp_path).state_dict(), dict(new)
    for layer in range(3):
        parts = [old.pop(f"model.layers.{layer}.attn.x_{x}") for x in "rwkvag"]
        old[f"model.layers.{layer}.attn.x_x"] = torch.cat(parts).flatten(1)
    old["model.layers.0.attn.v_lora.lora.0.weight"] = torch.ones(4, 64)
    save_file(old, tmp_path / "model.safetensors")
    loaded = zoo.load(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert "v_lora.lora.0.weight" in caplog.text


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("normed", [True, False])
def test_a_model_of_our_config(normed: bool):
    sizes = ("model.hidden_size=128", "model.num_layers=2", f"model.vocab_size={VOCABULARY}")
    model = zoo.build("rwkv7.yaml", *sizes, f"model.embedding_norm={str(normed).lower()}")
    for mixer, mlp in zip(model.mixers, model.mlps, strict=True):
        mixer.o_proj.weight.normal_(std=0.1)
        mlp.down_proj.weight.normal_(std=0.1)
    public = exported(model, TensorsInMemory(model.state_dict()), "fla")
    assert public.config["norm_first"] == normed
    theirs = rwkv7.by_the_author({name: public.weights.tensor(name) for name in public.weights.specs})
    tokens = torch.randint(VOCABULARY, (35,))
    close(model(tokens[None])[0][0], rwkv7.logits(theirs, tokens, public.config["norm_eps"]))


def test_a_norm_that_their_layout_cannot_hold():
    model = zoo.build("rwkv7.yaml", "model.vocab_size=97", "model.norm_eps=1e-6", device="meta")
    with pytest.raises(
        zoo.UserError, match=r"to: fla_rwkv7 cannot hold this model: .*o_norm.eps is 0.00064 instead of"
    ):
        exported(model, TensorsInMemory(model.state_dict()), "fla")
