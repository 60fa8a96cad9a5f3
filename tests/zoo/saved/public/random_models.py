"""Ten random models of each public family, there and back: `python -m tests.zoo.saved.public.random_models`.

It writes the numbers of differences to `docs/public_families.csv`, from which the table in `docs/public_checkpoints.md`
is made. The models are built by flash-linear-attention, transformers, from a case of the
tests with random sizes.
"""

import csv
import datetime
import importlib
import json
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import zoo
from zoo.saved.public.families import FAMILIES
from zoo.saved.public.family import Family
from zoo.saved.public.import_export import difference, on_meta

from . import hybrids, zoo_of_others

FILE = Path(zoo.__file__).parents[1] / "docs" / "public_families.csv"
MODELS = 10
_PER_LAYER = (
    "attn",
    "layer_types",
    "mlp_layer_types",
    "linear_attn_config",
    "attn_layer_indices",
    "layers_block_type",
    "hybrid_override_pattern",
)  # keys that fix the number of layers
_PACKAGES = {"fla": "fla", "huggingface": "transformers"}
_OF_ANOTHER_FAMILY = "mistral, no window"  # which is a Llama


class Differences(NamedTuple):
    """Counts over random models of a family, there and back; `sizes` are their parameters, smallest and largest."""

    models: int
    tensors: int
    differing_tensors: int
    differing_configs: int
    differing_logits: int
    sizes: tuple[int, int]

    @property
    def total(self) -> int:
        """All differences."""
        return self.differing_tensors + self.differing_configs + self.differing_logits


def cases(family: Family) -> list[dict[str, Any]]:
    """The configs of a family's cases in the tests."""
    name, package = family.architecture.replace("ForCausalLM", "Config"), _PACKAGES[family.target]
    return [
        arguments
        for case, (project, config, arguments) in zoo_of_others.CASES.items()
        if (project, config.replace("Text", "")) == (package, name) and case != _OF_ANOTHER_FAMILY
    ]


def _random_sizes(arguments: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    larger = 1 if "mamba_n_heads" in arguments else draw.choice((1, 1, 2))  # whose heads have its width
    changes = {"vocab_size": draw.randrange(40, 200), "hidden_size": larger * arguments["hidden_size"]}
    for key in ("intermediate_size", "shared_intermediate_size"):
        if arguments.get(key) is not None:
            changes[key] = 16 * draw.randrange(2, 12)
    if "state_size" in arguments and "num_heads" in arguments:  # Mamba2's heads have the width of the layer
        changes["num_heads"] = larger * arguments["num_heads"]
    if not any(arguments.get(key) for key in _PER_LAYER):
        changes["num_hidden_layers"] = draw.randrange(2, 5)
    return {**arguments, **changes}


def _model(family: Family, draw: random.Random) -> Any:
    """A model of a family, with random sizes, weights and dtype."""
    module = importlib.import_module("fla.models" if family.target == "fla" else "transformers")
    attention = importlib.import_module("fla.layers.attn") if family.target == "fla" else None
    if attention is not None and attention.flash_attn_func is None:
        attention.flash_attn_func = zoo_of_others.window_attention  # otherwise their attention cannot be built
    name = family.architecture.replace("ForCausalLM", "TextConfig" if family.name == "hf_qwen3_5" else "Config")
    config = getattr(module, name)(**_random_sizes(draw.choice(cases(family)), draw))
    torch.manual_seed(draw.randrange(1 << 30))
    model = getattr(module, family.architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(draw.choice((torch.float32, torch.bfloat16)))


def differences(family: Family, models: int = MODELS) -> Differences:
    """Convert random models of a family to ours and back, and count what differs."""
    draw = random.Random(family.name)
    tensors = differing_tensors = differing_configs = differing_logits = 0
    sizes = list[int]()
    for _ in range(models):
        with tempfile.TemporaryDirectory() as temporary:
            theirs, ours, back = (Path(temporary) / name for name in ("theirs", "ours", "back"))
            model = _model(family, draw)
            before = zoo_of_others.save(model, theirs)
            zoo.convert(theirs, ours)
            zoo.convert(ours, back, to=family.name)
            after = zoo_of_others.stored(back)
            if family.name in hybrids.RENAMED:
                before, after = (type(model).from_pretrained(x, dtype="auto").state_dict() for x in (theirs, back))
            tensors += len(before)
            differing_tensors += len(before.keys() ^ after.keys())
            differing_tensors += sum(
                before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])
                for n in before.keys() & after.keys()
            )
            configs = [json.loads((folder / "config.json").read_text()) for folder in (theirs, back)]
            differing_configs += difference(*(on_meta(family.read(config)) for config in configs)) is not None
            first, second = zoo.load(theirs), zoo.load(back)
            tokens = torch.randint(first.vocab_size, (2, 19))
            with torch.no_grad():
                differing_logits += not torch.equal(first(tokens)[0], second(tokens)[0])
            sizes.append(first.num_parameters())
    return Differences(
        models, tensors, differing_tensors, differing_configs, differing_logits, (min(sizes), max(sizes))
    )


def main(names: list[str]) -> None:
    """Measure the named families, or all, and write them to the file."""
    header = ["family", "models", "tensors", "differences", "smallest", "largest", "date"]
    header += ["torch", "transformers", "fla", "configs"]
    rows = {}
    if FILE.exists():
        with FILE.open(encoding="utf-8", newline="") as stream:
            rows = {row["family"]: row for row in csv.DictReader(stream)}
    versions = [version(package) for package in ("torch", "transformers", "flash-linear-attention")]
    for family in FAMILIES:
        if names and family.name not in names:
            continue
        counts = differences(family)
        date = datetime.date.today().isoformat()
        values = [
            family.name,
            counts.models,
            counts.tensors,
            counts.total,
            *counts.sizes,
            date,
            *versions,
            len(cases(family)),
        ]
        rows[family.name] = dict(zip(header, values, strict=True))
        print(*values, flush=True)  # noqa: T201
        with FILE.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, header, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[each.name] for each in FAMILIES if each.name in rows)


if __name__ == "__main__":
    main(sys.argv[1:])
