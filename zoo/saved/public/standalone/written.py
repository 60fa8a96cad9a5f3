"""Conversion of a model into config.json, weights and a modelling file, for transformers' `trust_remote_code`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels import UserError
from mixers import TPE
from zoo.checkpoints.tensor_files import Spec, Weights
from zoo.lm.block import Block, PostNormBlock
from zoo.lm.mlp import GLU, SwiGLU
from zoo.lm.model import LanguageModel
from zoo.saved.public.family import TIED, Exported, Target
from zoo.saved.public.standalone.described import described
from zoo.saved.public.standalone.parts import Part, Rule, check_ones, copied, norm_part, refusal
from zoo.saved.public.tensors import ComputedWeights

STANDALONE: Target = "transformers"
NAME = "modeling_token_mixer_zoo"
MODEL_TYPE = "token_mixer_zoo"


def standalone(model: LanguageModel, weights: Weights) -> Exported:
    """Return config, weights and code of a model (on the meta device) for the modelling file.

    Raises:
        UserError: The modelling file cannot compute a component of the model.
    """
    settings, rules = _model(model)
    if unused := sorted({*weights.specs}.difference(*(rule.sources for rule in rules.values()))):
        raise UserError(f"to: transformers cannot hold the tensors {', '.join(unused[:5])} of this model.")
    config = {
        "architectures": ["ZooForCausalLM"],
        "auto_map": {"AutoConfig": f"{NAME}.ZooConfig", "AutoModelForCausalLM": f"{NAME}.ZooForCausalLM"},
        "model_type": MODEL_TYPE,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        TIED: model.lm_head is None,
        "dtype": str(weights.specs["embeddings.weight"].dtype).removeprefix("torch."),
        "model": settings,
    }
    source = (Path(__file__).parent / f"{NAME}.py").read_text(encoding="utf-8")
    return Exported(MODEL_TYPE, STANDALONE, config, _computed(weights, rules), {f"{NAME}.py": source})


def _model(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Rule]]:
    """Return the settings of a whole model, and the rules of its tensors."""
    refused = ((model.head, "head"), (model.inputs, "input layer"), (model.embedding_norm, "norm of embeddings"))
    for component, kind in refused:
        if component is not None:
            raise refusal(component, kind)
    if model.logit_cap is not None:
        raise UserError(f"to: transformers cannot hold logit_cap {model.logit_cap:g} of this model; only null.")
    check_ones({f"multipliers.{name}": value for name, value in vars(model.multipliers).items()})
    size, last = model.hidden_size, norm_part(model.norm, "norm", "norm", model.hidden_size)
    names = ("embeddings.weight",) if model.lm_head is None else ("embeddings.weight", "lm_head.weight")
    rules = {name: Rule((name,)) for name in names} | last.rules
    position = _position(model.position)
    rules |= position.under("layers.0.", "position.")
    layers: list[dict[str, Any]] = []
    order, mlp = [], Part({"mlp": None})
    for i, block in enumerate(model.layers):
        if type(block) not in (Block, PostNormBlock):
            raise refusal(block, "block")
        assert isinstance(block, Block)
        around = norm_part(block.mixer_norm, "mixer_norm", "mixer_norm", size)
        if block.mlp is not None and block.mlp_norm is not None:
            around |= norm_part(block.mlp_norm, "mlp_norm", "mlp_norm", size)
            mlp = _mlp(block.mlp)
        mixer = described(block.mixer, type(block) is PostNormBlock)
        if mixer.settings not in layers:
            layers.append(mixer.settings)
        order.append(layers.index(mixer.settings))
        theirs = f"layers.{i + bool(position.rules)}."
        for inside, part in (("", around), ("mixer.", mixer), ("mlp.", mlp)):
            rules |= part.under(theirs + inside, f"layers.{i}.{inside}")
    return {"layers": layers, "order": order, **position.settings, **last.settings, **mlp.settings}, rules


def _mlp(mlp: nn.Module) -> Part:
    if type(mlp) not in (GLU, SwiGLU):
        raise refusal(mlp, "channel mixer")
    assert isinstance(mlp, GLU)
    rules = copied(gate_proj="in_proj.gate", up_proj="in_proj.up", down_proj="down_proj")
    return Part({"mlp": {"size": mlp.down_proj.in_features, "activation": mlp.activation}}, rules)


def _position(position: nn.Module | None) -> Part:
    """Describe the running sums before the first layer, which have constant rates."""
    if position is None:
        return Part({"position": None})
    if type(position) is not TPE:
        raise refusal(position, "position")
    size = position.size
    rates = Rule((), lambda: -(2 ** -torch.linspace(-4, 13, size)))
    return Part({"position": size}, {"weight": Rule(("weight",)), "log_decay": rates})


def _computed(weights: Weights, rules: Mapping[str, Rule]) -> Weights:
    """Return the tensors of the rules; each is computed when it is read."""

    def spec(rule: Rule) -> Spec:
        specs = [weights.specs[source] for source in rule.sources]
        tensor = rule.compute(*(torch.empty(s.shape, dtype=s.dtype, device="meta") for s in specs))
        return Spec(tuple(tensor.shape), tensor.dtype)

    def read(name: str) -> Tensor:
        return rules[name].compute(*(weights.tensor(source) for source in rules[name].sources)).contiguous()

    return ComputedWeights({name: spec(rule) for name, rule in rules.items()}, read)
