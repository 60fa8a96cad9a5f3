"""The files in configs/: which there are, what their headers say, and each combination parsed once per process."""

import functools
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import yaml
from jsonargparse import Namespace

from zoo import config as configs
from zoo.lm import LanguageModel

# PyYAML's parser in C reads a hundred files in a tenth of the time, and all workers read them at collection
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CONTENTS: dict[str, dict[str, Any]] = {
    path.relative_to(configs.CONFIGS).as_posix(): yaml.load(path.read_text(), _LOADER)
    for path in sorted(configs.CONFIGS.rglob("*.yaml"))
    if path.parent.name not in ("sweep", "scaling")  # these are sweeps, and overlays of sweeps
    and (path.parent.name != "fla" or find_spec("fla"))  # its layers are built to be counted
}
# A whole config names a stack; those in paper folders may leave the size to an overlay.
WHOLE = [name for name, keys in CONTENTS.items() if "class_path" in keys.get("model", {}).get("stack", {})]
OVERLAYS = [name for name in CONTENTS if name not in WHOLE]
ABLATIONS = [name for name in OVERLAYS if name.startswith("ablate/")]
# The training of a paper, as an overlay on the general configs.
PAPERS = ("gated_delta_networks/recipe.yaml", "hgrn2/pile.yaml", "hgrn2/slimpajama.yaml", "hgrn2/wikitext_103.yaml")
RUNS_AS_IT_IS = [name for name in WHOLE if "hidden_size" in CONTENTS[name]["model"]]
SIZED = [name for name in WHOLE if name not in RUNS_AS_IT_IS]
GENERAL = [name for name in WHOLE if "/" not in name]
PUBLISHED_TEXT = [name for name in OVERLAYS if "hf download" in (configs.CONFIGS / name).read_text()]
SWEEPS = sorted(path.relative_to(configs.CONFIGS).as_posix() for path in configs.CONFIGS.glob("sweep/*.yaml"))


def header(name: str) -> list[str]:
    """The lines of comment that a config opens with; a command that goes on in the next line is one line."""
    text = (configs.CONFIGS / name).read_text()
    comment = re.match(r"(#.*\n)*", text)
    assert comment
    return comment.group().replace("\\\n# ", "").splitlines()


def commands(name: str) -> list[str]:
    """The commands in the header of a config."""
    return [line.removeprefix("#   ") for line in header(name) if line.startswith("#   python cli.py")]


def named(command: str) -> list[str]:
    """The configs of a command, in order."""
    arguments = shlex.split(command)
    return [value for option, value in zip(arguments, arguments[1:], strict=False) if option == "--config"]


def bases_of(overlay: str) -> list[str]:
    """The configs that an overlay is meant for."""
    folder, _, name = overlay.rpartition("/")
    if folder == "scaling_laws":
        every = {"llama", "tnl", "hgrn2", "cosformer2"}
        fewer_layers = {"tnl", "cosformer2"}
        fitting = {"410m.yaml": every - fewer_layers, "410m-25.yaml": fewer_layers}.get(name, every)
        return [f"scaling_laws/{base}.yaml" for base in sorted(fitting)]
    if overlay in PAPERS:
        return named(commands(overlay)[0])[:1]
    if folder == "gated_delta_networks":
        base = name.partition("-")[0]
        paper = f"gated_delta_networks/{base}.yaml"
        return [paper if paper in WHOLE else f"{'mamba2' if base == 'mamba' else base}.yaml"]
    if folder == "hgrn2":
        return ["hgrn2.yaml"]
    if folder in ("ablate", "recall"):
        return named(commands(overlay)[0])[:1]
    if name in ("h2.yaml", "l.yaml"):  # for one of the two models, as published
        return ["state_expansion/gated_deltanet.yaml"]
    if overlay == "state_expansion/2k.yaml":
        return ["state_expansion/transformer.yaml"]
    if folder == "state_expansion":
        return [f"state_expansion/{base}.yaml" for base in ("gla", "gated_deltanet", "transformer")]
    if folder == "size":
        kind = name.rpartition("-")[0]
        return [{"": "gdn_h2", "h1": "gdn_h1", "mamba": "mamba2"}.get(kind, kind) + ".yaml"]
    return ["gdn_h2.yaml"]


def sizes_of(name: str) -> list[str]:
    """The overlays that give a config without a size one."""
    kind = "transformer-" if name.endswith("transformer.yaml") else ""
    general = [f"size/{kind}{size}.yaml" for size in ("400m", "1.5b")] if name.startswith("state_expansion/") else []
    fitting = [overlay for overlay in OVERLAYS if name in bases_of(overlay)]
    return general + [overlay for overlay in fitting if "hidden_size" in CONTENTS[overlay].get("model", {})]


BASED = [(overlay, base) for overlay in OVERLAYS for base in bases_of(overlay)]
SIZES = [(name, size) for name in SIZED for size in sizes_of(name)]


@functools.cache
def _parsed(*configs_and_overrides: str) -> Namespace:
    return configs.read(*configs_and_overrides)


def parsed(*configs_and_overrides: str) -> Namespace:
    """`zoo.config.read` of configs in configs/, which takes a third of a second, once per process."""
    return _parsed(*configs_and_overrides).clone()


@functools.cache
def resolved(*configs_and_overrides: str) -> dict[str, Any]:
    """All of a config, defaults included, as plain values that `to_dict` has parsed again; only to be read."""
    return configs.to_dict(parsed(*configs_and_overrides))


def built(*configs_and_overrides: str, **sizes: int) -> LanguageModel:
    """`zoo.build` on the meta device, without writing the config and parsing it again (see `resolved`).

    Args:
        configs_and_overrides: As for `zoo.build`.
        sizes: Keys of `model` to set in the parsed config.
    """
    config = parsed(*configs_and_overrides)
    for name, value in sizes.items():
        config.model[name] = value
    config.model.vocab_size = configs.vocabulary(config)
    return configs.from_config(config, device="meta")


def slots(spec: Any, inside: type | None = None) -> Iterator[tuple[type, type | None, dict[str, Any]]]:
    """(class, the class around it, its arguments) of all components in a resolved config."""
    if isinstance(spec, dict):
        module, _, name = spec.get("class_path", "").rpartition(".")
        component = getattr(import_module(module), name) if module else None
        if component:
            yield component, inside, spec.get("init_args") or {}
        for value in spec.values():
            yield from slots(value, component or inside)
