"""Small models that llama.cpp runs, as exported folders."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as kinds

import zoo
from tests.zoo.saved.public.models import Spec, component, uniform
from zoo.checkpoints.tensor_files import TensorsInMemory
from zoo.data.text.tokenizer import Tokenizer as Ours
from zoo.files.safe_yaml import dump_yaml
from zoo.saved.exported_folder import write_folder

VOCABULARY = 300  # ten of which have no token
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_layers": 3, "intermediate_size": 96}
TEXT = (
    "def main(arguments):\n    return [int(a) for a in arguments if a != '12345']\n\n\tHello  wörld, it's 7 o'clock!\n"
)
ROTARY = {"qk": {"map": component("Rotary")}}
CONVOLVED = {"conv": 4, "activation": "silu"}
LINEAR = dict(num_heads=4, num_key_heads=2, head_dim=16, value_dim=16, qk={**CONVOLVED, "norm": "l2"}, v=CONVOLVED)
FULL = dict(num_heads=4, num_kv_heads=2, head_dim=32, gate="channel", bias=False, output_bias=False) | {
    "qk": {"map": component("Rotary", base=1e6, fraction=0.25)}
}
QWEN = {"norm_eps": 1e-6, "norm": "ZeroCentredRMSNorm"}


def hybrid(pattern: str, eps: float = 1e-6, positions: Spec | None = None, **linear: Any) -> Spec:
    output = component("GatedRMSNorm", eps=eps)
    full = FULL if positions is None else {**FULL, "qk": {"map": positions}}
    mixers = {
        "A": component("SoftmaxAttention", **full, qk_norm=component("ZeroCentredRMSNorm", eps=eps)),
        "L": component("GatedDeltaNet", **{**LINEAR, "output": output, **linear}),
    }
    return component("Pattern", pattern=pattern, mixers={letter: mixers[letter] for letter in sorted(set(pattern))})


def scaled(name: str, **arguments: Any) -> Spec:
    return uniform("SoftmaxAttention", num_heads=4, qk={"map": component(name, factor=3.0, **arguments)})


def kimi(pattern: str, eps: float = 1e-6, **linear: Any) -> Spec:
    mixers = {
        "A": component(
            "MultiheadLatentAttention",
            **dict(num_heads=4, head_dim=16, rope_dim=8, value_dim=24, kv_rank=32, rotary=None),
            norm=component("RMSNorm", eps=1e-6),
        ),
        "L": component(
            "KDA",
            **{"num_heads": 4, "head_dim": 32, "qk": {**CONVOLVED, "norm": "l2"}, "v": CONVOLVED, "gate_bias": False}
            | {"output": component("SigmoidGatedRMSNorm", eps=eps), **linear},
        ),
    }
    return component("Pattern", pattern=pattern, mixers={letter: mixers[letter] for letter in sorted(set(pattern))})


RWKV7 = {"hidden_size": 128, "mlp": "RWKV7ChannelMix", "norm": "LayerNorm", "embedding_norm": True, "norm_eps": 1e-5}
# name → llama.cpp's architecture, the model's stack, and other keys of `model`
CASES: dict[str, tuple[str, Spec, Spec]] = {
    "llama": ("llama", uniform("SoftmaxAttention", num_heads=4, **ROTARY), {}),
    "llama, grouped, biased and tied": (
        "llama",
        uniform("SoftmaxAttention", num_heads=4, num_kv_heads=2, head_dim=32, bias=True, output_bias=True, **ROTARY),
        {"tie_embeddings": True, "norm_eps": 1e-4},
    ),
    "qwen2": (
        "qwen2",
        uniform("SoftmaxAttention", num_heads=4, num_kv_heads=2, bias=True, output_bias=False, **ROTARY),
        {},
    ),
    "llama, positions divided": ("llama", scaled("LinearRotary"), {}),
    "llama, positions of Llama 3.1": ("llama", scaled("Llama3Rotary", original_length=30), {}),
    "llama, positions of YaRN": ("llama", scaled("YarnRotary", original_length=200, amplitude=1.2), {}),
    "qwen2, positions of YaRN": (
        "qwen2",
        uniform(
            "SoftmaxAttention",
            **dict(num_heads=4, bias=True, output_bias=False),
            qk={"map": component("YarnRotary", factor=4.0, original_length=200)},
        ),
        {},
    ),
    "mamba": ("mamba", uniform("Mamba1"), {"mlp": None, "norm_eps": 1e-5}),
    "mamba2": ("mamba2", uniform("Mamba2", head_dim=16, state_dim=32, num_groups=2), {"mlp": None, "norm_eps": 1e-5}),
    "qwen3.5": ("qwen35", hybrid("LLLA"), {**QWEN, "num_layers": 4}),
    "qwen3.5, as many keys": ("qwen35", hybrid("ALL", num_key_heads=4), QWEN),
    "qwen3.5, positions divided": (
        "qwen35",
        hybrid("LA", positions=component("LinearRotary", base=1e6, fraction=0.25, factor=3.0)),
        QWEN,
    ),
    "qwen3.5, positions of YaRN": (
        "qwen35",
        hybrid("LA", positions=component("YarnRotary", base=1e6, fraction=0.25, factor=4.0, original_length=200)),
        QWEN,
    ),
    "rwkv7": ("rwkv7", uniform("RWKV7"), RWKV7),
    "rwkv7, tied": ("rwkv7", uniform("RWKV7", rate_rank=16, value_rank=8), {**RWKV7, "tie_embeddings": True}),
    "kimi linear": ("kimi-linear", kimi("LLLA"), {"norm_eps": 1e-6, "num_layers": 4}),
    "kimi linear, attention first": ("kimi-linear", kimi("AL", head_dim=16), {"norm_eps": 1e-6}),
}


def byte_level(text: str = TEXT * 3) -> Tokenizer:
    """A tokenizer as ours are, with fewer tokens than the models have rows, a special token and another added one."""
    made = Tokenizer(kinds.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=288, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([text], trainer)
    made.add_special_tokens(["<turn>"])
    made.add_tokens(["12345"])
    return made


def exported(folder: Path, case: str, tokenizer: Tokenizer | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """A model with random weights as `export` writes it; by default with the tokenizer above.

    In bf16, norms, `A_log`, `dt_bias` and the like stay in fp32.
    """
    torch.manual_seed(0)
    _, stack, keys = CASES[case]
    model = zoo.build({"model": {**SIZES, **keys, "stack": stack}})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = Ours(tokenizer or byte_level(), "tokenizer", stop_tokens=["<turn>"])
    config = model.config
    files = {"config.yaml": dump_yaml(config), "tokenizer.json": ours.to_json()}
    write_folder(folder, files, TensorsInMemory(model.to(dtype).state_dict()))
    return folder


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


def divided(pre_tokenizer: pre_tokenizers.PreTokenizer, ignore_merges: bool = False) -> Tokenizer:
    made = byte_level()
    made.pre_tokenizer, made.model.ignore_merges = pre_tokenizer, ignore_merges
    return made


def tokenizers() -> dict[str, Tokenizer]:
    """A tokenizer for each name that llama.cpp has for rules which divide text."""
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    return {
        "gpt-2": byte_level(),
        "smollm": divided(digits),
        "llama-bpe": divided(split(LLAMA3), ignore_merges=True),
        "smaug-bpe": divided(split(LLAMA3)),
        "qwen2": divided(split(QWEN2)),
        "qwen35": divided(split(QWEN35)),
    }
