"""Small models to make larger, as exported folders; no training is needed."""

import copy
import functools
from pathlib import Path
from typing import Any

import torch

import zoo
from zoo.checkpoints.tensor_files import TensorsInMemory
from zoo.config import from_config, read, to_dict
from zoo.files.safe_yaml import dump_yaml
from zoo.saved.exported_folder import write_folder

SMALL = (
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.num_layers=4",
    "model.intermediate_size=48",
    "model.vocab_size=64",
    "model.initializer_range=0.2",  # so that every layer matters
)
STACKS: dict[str, tuple[Any, ...]] = {
    "GLA": ("gla.yaml", *SMALL),
    "HGRN2": ("hgrn2.yaml", *SMALL, "model.stack.mixer.mixer.init_args.head_dim=8"),
    "GatedDeltaNet": ("gated_deltanet.yaml", *SMALL),
    "KDA": ("kda.yaml", *SMALL),
    "KDA, preconditioned": ("kda.yaml", "ablate/preconditioned.yaml", *SMALL),
    "Comba": ("comba.yaml", *SMALL),
    "GatedDeltaProduct": ("gated_deltaproduct.yaml", *SMALL),
    "Mamba2": (
        "mamba2.yaml",
        *SMALL,
        "model.stack.mixer.mixer.init_args.head_dim=16",
        "model.stack.mixer.mixer.init_args.state_dim=8",
        "model.stack.mixer.mixer.init_args.num_groups=2",
    ),
    "MLSTM": ("mlstm.yaml", *SMALL, "model.stack.mixer.mixer.init_args.input_bias=0"),
    "Mamba3": ("mamba3.yaml", *SMALL, "model.stack.mixer.mixer.init_args.head_dim=16"),
    "RWKV7": ("rwkv7.yaml", *SMALL, "model.stack.mixer.mixer.init_args.head_dim=8"),
    "RetNet": ("retnet.yaml", *SMALL),
    "TNL": ("tnl.yaml", *SMALL),
    "transformer": ("transformer.yaml", *SMALL),
    "hybrid": ("gdn_h2.yaml", *SMALL),
}


def exported(folder: Path, name: str, *overrides: str) -> Path:
    """An exported folder with a model of random weights, biases included."""
    config = read(*STACKS[name], *overrides)
    torch.manual_seed(1)
    model = from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    texts = {"config.yaml": dump_yaml(to_dict(config))}
    write_folder(folder, texts, TensorsInMemory(model.state_dict()), hashed=True)
    return folder


@functools.cache
def loaded(folder: Path) -> zoo.LanguageModel:
    """The model in a folder whose files do not change; only to be read."""
    return zoo.load(folder)


def logits(folder: Path, length: int = 40, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of random tokens [2,length]."""
    tokens = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model = loaded(folder)
        return (model if dtype == torch.float32 else copy.deepcopy(model).to(dtype))(tokens)[0]
