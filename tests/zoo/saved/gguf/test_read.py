"""GGUF files as checkpoints: the models, tokenizers and number types that return, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zoo
from kernels import UserError

from .models import CASES, TEXT, exported, tokenizers

gguf = pytest.importorskip("gguf")

# ours are logarithms of the decay rates in the file, and norms around zero, to which it adds one
NEARLY = ("A_log", "norm.weight")


def logits(folder: Path) -> Tensor:
    tokens = torch.randint(288, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return zoo.load(folder)(tokens)[0].float()


def edited(file: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """Write a file again with other metadata or tensors."""
    reader = gguf.GGUFReader(file)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    metadata = {name: (field.contents(), field.types) for name, field in fields.items()}
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(metadata, tensors)
    new = file.with_name("edited.gguf")
    writer = gguf.GGUFWriter(new, metadata.pop("general.architecture")[0])
    for name, (value, types) in metadata.items():
        writer.add_key_value(name, value, types[0], types[1] if len(types) > 1 else None)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return new


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return zoo.convert(exported(folder / "ours", "llama"), folder / "model.gguf", to="gguf")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "llama" else pytest.mark.slow) for c in CASES])
def test_a_model_returns(case: str, tmp_path: Path):
    """Matrices are in bf16, and parameters that training keeps in fp32 are in fp32."""
    ours = exported(tmp_path / "ours", case, dtype=torch.bfloat16)
    file = zoo.convert(ours, tmp_path / "model.gguf", to="gguf")
    back = zoo.convert(file, tmp_path / "back")
    before, after = load_file(ours / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in before.values()} == {torch.float32, torch.bfloat16}
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        tolerance = 1e-6 if name.endswith(NEARLY) else 0
        torch.testing.assert_close(after[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    theirs, mine = zoo.load_tokenizer(back), zoo.load_tokenizer(ours)
    assert (theirs.encode(TEXT), theirs.stop_ids, theirs.bos_id) == (mine.encode(TEXT), mine.stop_ids, mine.bos_id)
    expected = logits(ours)
    torch.testing.assert_close(logits(back), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("quantize", ["f32", "f16", "q8_0"])
def test_quantised_numbers_become_fp32(quantize: str, tmp_path: Path):
    file = zoo.convert(exported(tmp_path / "ours", "llama"), tmp_path / "a.gguf", to="gguf", quantize=quantize)
    weights = load_file(zoo.convert(file, tmp_path / "back") / "model.safetensors")
    name = "layers.0.mlp.down_proj.weight"
    stored = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.0.ffn_down.weight")
    numbers = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float32))
    assert weights[name].dtype == (torch.float16 if quantize == "f16" else torch.float32)
    assert torch.equal(weights[name].float(), numbers)


def test_a_file_of_others(llama: Path, tmp_path: Path):
    """Notes, names, and metadata at values without effect say nothing about the model."""

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        text, number = gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT32
        metadata |= {"general.license": ("mit", [text]), "llama.expert_count": (0, [number])}
        del metadata["llama.attention.key_length"], metadata["llama.attention.value_length"]

    file = edited(llama, change)
    before, after = (load_file(zoo.convert(f, tmp_path / f.stem) / "model.safetensors") for f in (llama, file))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_the_tokenizer_of_each_name(tmp_path: Path):
    """Tokens of texts are those of the tokenizer that was written."""
    for name, made in tokenizers().items():
        ours = exported(tmp_path / name, "llama", made)
        file = zoo.convert(ours, tmp_path / f"{name}.gguf", to="gguf")
        assert gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents() == name
        theirs, mine = zoo.load_tokenizer(file), zoo.load_tokenizer(ours)
        for text in (TEXT, "it'S 12345678\r\n\r\n  x", "ÅÅ 字字 😀 ١٢٣ e\u0301"):
            assert theirs.encode(text) == mine.encode(text)
            assert theirs.decode(theirs.encode(text)) == text
        special = "a<turn>b<eos>"
        assert theirs.encode(special, special_tokens=True) == mine.encode(special, special_tokens=True)


def test_an_unknown_tokenizer_is_left_out(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["tokenizer.ggml.pre"] = ("poro-chat", metadata["tokenizer.ggml.pre"][1])

    back = zoo.convert(edited(llama, change), tmp_path / "back")
    assert not (back / "tokenizer.json").exists()
    assert "its tokenizer (gpt2, poro-chat) has no known rules, so it is left out" in caplog.text


def test_the_length_of_a_context_is_kept(llama: Path, tmp_path: Path):
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["llama.context_length"] = (777, metadata["llama.context_length"][1])

    again = zoo.convert(edited(llama, change), tmp_path / "again.gguf", to="gguf")
    assert gguf.GGUFReader(again).fields["llama.context_length"].contents() == 777


def _experts(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    metadata["llama.expert_count"] = (8, [gguf.GGUFValueType.UINT32])


def _another(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    metadata["general.architecture"] = ("mamba3", metadata["general.architecture"][1])


def _partial(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    metadata["llama.rope.dimension_count"] = (8, metadata["llama.rope.dimension_count"][1])


def _without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        del (metadata if name in metadata else tensors)[name]

    return change


def _smaller(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["blk.0.ffn_down.weight"] = tensors["blk.0.ffn_down.weight"][:32]


def _more(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["blk.0.attn_sinks.weight"] = tensors["blk.0.attn_norm.weight"]


def _turned(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["rope_freqs.weight"] = np.arange(1, 9, dtype=np.float32)


def _with(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata[key] = (value, metadata[key][1] if key in metadata else [gguf.GGUFValueType.UINT32])

    return change


def _beginning(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    _with("tokenizer.ggml.bos_token_id", 99999)(metadata, tensors)
    metadata["tokenizer.ggml.add_bos_token"] = (True, [gguf.GGUFValueType.BOOL])


REFUSED = {
    "no tokens": (_without("tokenizer.ggml.tokens"), r"edited.gguf has a damaged tokenizer \(KeyError: 'tokens'\)"),
    "a merge of nothing": (_with("tokenizer.ggml.merges", ["a"]), "has a damaged tokenizer"),
    "an impossible first token": (_beginning, r"has a damaged tokenizer \(ValueError: bos_token_id is 99999\)"),
    "experts": (_experts, "edited.gguf, llama.expert_count is 8, which .* --ignore=llama.expert_count leaves"),
    "an unknown architecture": (_another, "has the architecture 'mamba3', which is none of kimi-linear, llama, "),
    "positions over a part of heads": (_partial, "llama.rope.dimension_count is 8, which"),
    "no size": (_without("llama.block_count"), "lacks block_count"),
    "no matrix": (_without("blk.1.ffn_up.weight"), "model.layers.1.mlp.up_proj.weight"),
    "a smaller matrix": (_smaller, r"has blk.0.ffn_down.weight \(32, 96\) instead of \(64, 96\)"),
    "another tensor": (_more, "blk.0.attn_sinks.weight"),
    "other frequencies": (_turned, "the divisors of its frequencies are not those of Llama 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_refused(case: str, llama: Path, tmp_path: Path):
    change, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as refused:
        zoo.convert(edited(llama, change), tmp_path / "back")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "back").exists()


def test_metadata_that_is_ignored(llama: Path, tmp_path: Path):
    back = zoo.convert(edited(llama, _experts), tmp_path / "back", ignore="llama.expert_count")
    assert torch.equal(logits(back), logits(zoo.convert(llama, tmp_path / "first")))


@pytest.mark.parametrize("length", [0, 3, 40, 5000, -1000])
def test_a_damaged_file(length: int, llama: Path, tmp_path: Path):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(llama.read_bytes()[:length])
    with pytest.raises(UserError, match=r"damaged\.gguf cannot be read as GGUF: "):
        zoo.load(file)
