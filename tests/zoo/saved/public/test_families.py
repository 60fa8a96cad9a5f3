"""Each family, with small random models of its own project: bits there and back, and equal logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from zoo.saved.public.import_export import family_of

from . import hybrids
from .formulas import logits
from .zoo_of_others import CASES, Oracle, build, in_pytorch, save, stored

pytestmark = pytest.mark.parity
LENGTHS = (1, 7, 67)  # the last one is also decoded
TOLERANCE = 2e-5  # of the largest logit: fp32 rounding through three layers


@pytest.fixture(autouse=True)
def theirs_in_pytorch(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle("transformers")
    in_pytorch(monkeypatch)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


def target(case: str) -> str:
    if case in hybrids.CASES:  # a hybrid without linear layers is also a model of another family
        return f"hf_{hybrids.CASES[case][0]}"
    return "fla" if CASES[case][0] == "fla" else "huggingface"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_weights_return_bit_for_bit(case: str, oracle: Oracle, tmp_path: Path):
    model = build(case, oracle).to(torch.bfloat16)
    for name, parameter in model.named_parameters():  # every tensor keeps a dtype of its own
        if any(part in name for part in ("lm_head", "norm", "A_log", "dt_bias")):
            parameter.data = parameter.data.float()
    written = save(model, tmp_path / "theirs", max_shard_size="50KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    zoo.convert(tmp_path / "theirs", tmp_path / "ours", max_shard_size=40_000)
    zoo.convert(tmp_path / "ours", tmp_path / "back", to=target(case), max_shard_size=60_000)
    returned, loaded = stored(tmp_path / "back"), type(model).from_pretrained(tmp_path / "back").state_dict()
    if target(case) in hybrids.RENAMED:
        written, returned = (
            type(model).from_pretrained(tmp_path / name, dtype="auto").state_dict() for name in ("theirs", "back")
        )
    assert returned.keys() == written.keys()
    for name, tensor in written.items():
        assert returned[name].dtype == tensor.dtype, name
        assert torch.equal(returned[name], tensor), name
        if name in loaded:  # Nemotron-H has other names in memory
            assert torch.equal(loaded[name].to(tensor.dtype), tensor), name  # they keep some weights in fp32
    config, before = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("back", "theirs"))
    # without a window, it is the same model as a Llama
    assert config["model_type"] == ("llama" if case == "mistral, no window" else before["model_type"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_theirs(case: str, oracle: Oracle, tmp_path: Path):
    model = build(case, oracle)
    save(model, tmp_path / "theirs")
    ours = zoo.load(tmp_path / "theirs")  # without converting it first
    zoo.convert(tmp_path / "theirs", tmp_path / "ours")
    zoo.convert(tmp_path / "ours", tmp_path / "back", to=target(case))
    converted = zoo.load(tmp_path / "ours")
    reference = model if CASES[case][0] == "transformers" else theirs_on_a_cpu(case, model, oracle)
    again = type(model).from_pretrained(tmp_path / "back")

    def theirs(source: torch.nn.Module, tokens: Tensor) -> Tensor:
        """Logits of a model of theirs, or of its weights and config by a written-out formula."""
        with torch.no_grad():
            if source is model and reference is not None:
                return reference(tokens).logits
            if CASES[case][0] == "transformers":
                return source(tokens).logits
            config = source.config.to_dict()
            return logits(source.config.model_type, source.state_dict(), config, tokens[0])[None]

    for length in LENGTHS:
        tokens = torch.randint(0, ours.vocab_size, (1, length))
        with torch.no_grad():
            expected, found = theirs(model, tokens), ours(tokens)[0]
            close(found, expected)
            assert torch.equal(converted(tokens)[0], found)
    cut = torch.tensor([0, 11, length], dtype=torch.int32)
    with torch.no_grad():
        packed = ours(tokens, cu_seqlens=cut)[0]
    close(packed, torch.cat([theirs(model, tokens[:, :11]), theirs(model, tokens[:, 11:])], 1))
    if case != "fla mamba2":  # whose formula is transformers' model
        close(theirs(again, tokens), found)
    close(decoded(ours, tokens, 52), found)  # windows are full, and a chunk ends on the way


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if CASES[case][0] == "transformers" and (case not in hybrids.CASES or case in hybrids.CLASSES)
    ],
)
def test_padded_batches(case: str, oracle: Oracle, tmp_path: Path):
    model, lengths = build(case, oracle), (50, 7, 67)
    save(model, tmp_path)
    ours, rows = zoo.load(tmp_path), [torch.randint(1, 96, (length,)) for length in lengths]
    starts = [67 - length for length in lengths]
    padded = torch.stack([F.pad(row, (a, 67 - a - len(row))) for row, a in zip(rows, starts, strict=True)])
    mask = torch.arange(67) >= torch.tensor(starts)[:, None]
    for row, start, expected in zip(rows, starts, model(padded, attention_mask=mask.long()).logits, strict=True):
        close(ours(row[None])[0][0], expected[start : start + len(row)])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "num_attention_heads": None}, "num_attention_heads is null; .* 1 or more"),
        ({"model_type": "gla", "num_heads": None}, "num_heads is null; .* 1 or more"),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": True}}, "rope_theta is true; .* numbers"),
        ({"model_type": "bamba", "rope_parameters": {"rope_theta": "5"}}, 'rope_theta is "5"; .* numbers'),
        ({"model_type": "bamba", "rope_parameters": {"partial_rotary_factor": "1"}}, 'factor is "1"; .* numbers'),
    ],
    ids=str,
)
def test_values_that_no_shape_contradicts(config: dict[str, Any], message: str):
    with pytest.raises(zoo.UserError, match=message):
        family_of(config, Path()).read(config)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_partial_rotary_positions_where_transformers_turns_whole_heads(name: str):
    def read(**config: Any) -> dict[str, Any]:
        config = {"model_type": name, "rope_theta": 100.0, **config}
        return family_of(config, Path()).read(config)

    turning = {"rope_type": "default", "rope_theta": 100.0}
    assert read() == read(partial_rotary_factor=1.0)
    assert read() == read(rope_parameters={**turning, "partial_rotary_factor": 1.0})
    for config in (
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {**turning, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    ):
        with pytest.raises(zoo.UserError, match=r"partial_rotary_factor is 0.5, which transformers ignores"):
            read(**config)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2"])
def test_transformers_turns_whole_heads_or_fails(case: str, oracle: Oracle):
    """If this fails, transformers has learnt partial rotary positions here, and the families must follow."""
    tokens, turning = torch.randint(97, (1, 20)), {"rope_theta": 100.0, "partial_rotary_factor": 0.5}
    whole = build(case, oracle, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    part = build(case, oracle, rope_parameters={"rope_type": "default", **turning})
    part.load_state_dict(whole.state_dict())
    with torch.no_grad():
        assert torch.equal(part(tokens).logits, whole(tokens).logits)
        with pytest.raises(RuntimeError, match="size of tensor"):
            build(case, oracle, rope_parameters={"rope_type": "linear", "factor": 2.0, **turning})(tokens)


def test_one_layout_becomes_another(oracle: Oracle, tmp_path: Path):
    written = save(build("fla mamba2", oracle), tmp_path / "fla")
    zoo.convert(tmp_path / "fla", tmp_path / "hf", to="huggingface")
    loaded = oracle("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in written.items())


def decoded(model: zoo.LanguageModel, tokens: Tensor, prompt: int) -> Tensor:
    """Logits of a prompt, and then of one token at a time, by states."""
    with torch.no_grad():
        part, state = model(tokens[:, :prompt], model.init_state(len(tokens)))
        parts = [part]
        for t in range(prompt, tokens.shape[1]):
            part, state = model(tokens[:, t : t + 1], state)
            parts.append(part)
    return torch.cat(parts, 1)


def theirs_on_a_cpu(case: str, model: torch.nn.Module, oracle: Oracle) -> torch.nn.Module | None:
    """The same model in transformers, where flash-linear-attention has its layout from there; else None."""
    if case != "fla mamba2":
        return None
    other = build("mamba2", oracle)
    other.load_state_dict(model.state_dict())
    return other


def what_their_kernels_can(case: str) -> dict[str, Any]:
    """Changes to a case's config for flash-linear-attention 0.6.0 on a GPU."""
    if case.startswith(("deltanet", "deltaproduct")):
        return {"attn_mode": "fused_recurrent"}  # its chunkwise kernels of both refuse fp32
    # Without the package mamba_ssm, its prefill gives head h the keys of group h % n_groups, where its decoding and
    # Mamba2's own code have h // (num_heads / n_groups), as transformers had (huggingface/transformers#37533).
    return {"n_groups": 1} if case == "fla mamba2" else {}


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] == "fla"])
def test_logits_are_those_of_their_kernels(case: str, oracle: Oracle, tmp_path: Path):
    model = build(case, oracle, **what_their_kernels_can(case)).cuda()
    save(model, tmp_path / "theirs")
    ours, tokens = zoo.load(tmp_path / "theirs", device="cuda"), torch.randint(0, 97, (2, 130), device="cuda")
    with torch.no_grad():
        expected, found = model(tokens).logits.float(), ours(tokens)[0]
    # their kernels multiply in TF32
    assert (found - expected).norm() < 1e-2 * expected.norm()
