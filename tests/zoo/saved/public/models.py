"""Small models of many mixers, expansions and stacks."""

from typing import Any

import torch
from torch import nn

import zoo

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_heads": 2, "num_layers": 2, "intermediate_size": 48}
Spec = dict[str, Any]


def component(name: str, **arguments: Any) -> Spec:
    return {"class_path": name, "init_args": arguments}


def uniform(name: str, **arguments: Any) -> Spec:
    return component("Uniform", mixer=component(name, **arguments))


def expanded(name: str, factor: int, arguments: Spec | None = None, **options: Any) -> Spec:
    return uniform("Expanded", mixer=component(name, **(arguments or {})), factor=factor, **options)


GROUPED = {"num_heads": 4, "num_key_heads": 2, "head_dim": 8}
MAMBA2 = {"head_dim": 16, "state_dim": 16}
WINDOW = component("SlidingWindowAttention", window_size=7)
CONVOLVED = {"conv": 4, "activation": "silu"}

# name → the model's stack, and other keys of `model`
CASES: dict[str, tuple[Spec, Spec]] = {
    "attention": (uniform("SoftmaxAttention"), {}),
    "attention, gated": (
        uniform(
            "SoftmaxAttention",
            gate="channel",
            qk_norm="ZeroCentredRMSNorm",
            num_kv_heads=1,
            bias=True,
            output_bias=True,
            qk={"map": component("Llama3Rotary", fraction=0.5, factor=4.0, original_length=30)},
        ),
        {},
    ),
    "attention, normed": (
        uniform(
            "SoftmaxAttention", gate="head", qk_norm="RMSNorm", qk_norm_over="width", num_kv_heads=1, qk={"conv": 3}
        ),
        {},
    ),
    "cosFormer2": (uniform("CosFormer2"), {"position": "TPE"}),
    "deltanet": (uniform("DeltaNet", beta_bias=True), {"tie_embeddings": True}),
    "gated deltanet": (uniform("GatedDeltaNet", **GROUPED, value_dim=16, allow_neg_eigval=True), {}),
    "gated deltanet, bare": (uniform("GatedDeltaNet", decay=None, output="GateOnly", beta_bias=True), {}),
    "gated deltanet-2": (uniform("GatedDeltaNet2", **GROUPED, value_dim=16, decay="BoundedChannelDecay"), {}),
    "gla": (uniform("GLA"), {"norm": "LayerNorm"}),
    "gla, convolved": (uniform("GLA", expand_k=1.0, output_gate=False, qk=CONVOLVED, v=CONVOLVED), {}),
    "gla, values with positions": (uniform("GLA", v={"map": "Rotary"}), {}),  # which are not relative
    "h1": (component("H1", first=component("GatedDeltaNet"), second=WINDOW), {}),
    "h2": (
        component("H2", first=component("Mamba2", **MAMBA2), second=component("GatedDeltaNet"), third=WINDOW),
        {"num_layers": 3},
    ),
    "hgrn2": (uniform("HGRN2", head_dim=16), {"norm": "ZeroCentredRMSNorm"}),
    "hgrn2, unbounded": (uniform("HGRN2", head_dim=16, lower_bounds=None, norm="SimpleRMSNorm"), {}),
    "kda": (uniform("KDA"), {}),
    "kda, bounded": (uniform("KDA", **GROUPED, decay="BoundedChannelDecay", output="NormOnly"), {}),
    "linear attention": (
        uniform(
            "LinearAttention", qk={"activation": "relu", "map": component("LinearRotary", factor=2.0), "norm": "l1"}
        ),
        {},
    ),
    "mamba2": (uniform("Mamba2", num_groups=2, **MAMBA2), {"mlp": None}),
    "norms after the layers": (
        component(
            "Pattern",
            pattern="LA",
            mixers={"L": component("DeltaNet"), "A": component("SoftmaxAttention", qk={"map": None})},
            post_norm="A",
        ),
        {},
    ),
    "retnet": (uniform("RetNet"), {}),
    "tnl": (uniform("TNL"), {"mlp": "GLU", "tie_embeddings": True, "norm": "SimpleRMSNorm"}),
    "expanded cosFormer2": (expanded("CosFormer2", 2), {"position": "TPE"}),
    "expanded deltanet": (expanded("DeltaNet", 2), {}),
    "expanded gated deltanet": (expanded("GatedDeltaNet", 3, GROUPED), {}),
    "expanded gated deltanet, residual": (expanded("GatedDeltaNet", 3, residual=True), {}),
    "expanded gated deltanet-2": (expanded("GatedDeltaNet2", 2, GROUPED), {}),
    "expanded gla": (expanded("GLA", 2, expansion="LFM"), {}),
    "expanded hgrn2": (expanded("HGRN2", 4, {"head_dim": 16}), {}),
    "expanded kda": (expanded("KDA", 2, expansion="LowRank"), {}),
    "expanded linear attention": (
        expanded("LinearAttention", 2, expansion=component("HeadWise", activation="elu1")),
        {},
    ),
    "expanded mamba2": (expanded("Mamba2", 4, MAMBA2), {}),
    "expanded mamba2, one head": (expanded("Mamba2", 4, MAMBA2, subheads=False), {}),
    "expanded retnet": (expanded("RetNet", 2), {}),
    "expanded tnl": (expanded("TNL", 2, expansion="DPFP"), {}),
}


def build(case: str) -> zoo.LanguageModel:
    """A model of the zoo whose mixers, gates and biases all matter."""
    stack, others = CASES[case]
    return excited(zoo.build({"model": {**SIZES, **others, "stack": stack}}))


@torch.no_grad()
def excited(model: zoo.LanguageModel) -> zoo.LanguageModel:
    """The model with larger linear maps, and everything moved from where it starts."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mul_(8)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()
