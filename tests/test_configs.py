"""Every file in configs/, found by its name: a config that rots is a test that fails."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import zoo
from mixers import Expanded, LinearMixer
from zoo import config as configs

from .commands import Command

pytest_plugins = "tests.desk"

FILES = sorted(path.relative_to(configs.CONFIGS) for path in configs.CONFIGS.rglob("*.yaml"))
WHOLE = [str(path) for path in FILES if len(path.parts) == 1]
OVERLAYS = [str(path) for path in FILES if len(path.parts) > 1]


def base_of(overlay: str) -> str:
    """A config that the overlay is meant for."""
    return "transformer.yaml" if "transformer" in overlay else "gdn_h2.yaml"


def slots(spec: Any, inside: type | None = None) -> Iterator[tuple[type, type | None, dict[str, Any]]]:
    """(class, the class around it, its arguments) of all components in a resolved config."""
    if isinstance(spec, dict):
        module, _, name = spec.get("class_path", "").rpartition(".")
        found = getattr(importlib.import_module(module), name) if module else None
        if found:
            yield found, inside, spec.get("init_args") or {}
        for value in spec.values():
            yield from slots(value, found or inside)


def test_they_are_found():
    assert {"gdn_h2.yaml", "gdn_h1.yaml", "gated_deltanet.yaml", "mamba2.yaml", "swa.yaml", "transformer.yaml"} <= {
        *WHOLE
    }
    assert {"size/400m.yaml", "size/1.5b.yaml", "size/transformer-400m.yaml", "size/transformer-1.5b.yaml"} <= {
        *OVERLAYS
    }


@pytest.mark.parametrize("name", WHOLE)
def test_a_config_builds(name: str):
    model = zoo.build(name, "model.vocab_size=1024", device="meta")
    assert model.num_layers == len(model.mixers) >= 6
    for factory in configs.CLASSES:
        if factory != "model":
            configs.instantiate(factory, configs.read(name))


@pytest.mark.parametrize("name", WHOLE)
def test_a_config_opens_with_its_command(name: str):
    lines = (configs.CONFIGS / name).read_text().splitlines()
    header = [line for i, line in enumerate(lines) if all(above.startswith("#") for above in lines[: i + 1])]
    assert f"#   python cli.py fit --config {name}" in header
    assert len(header) > 3, "after the command comes what to expect"


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_changes_its_base(name: str):
    base = base_of(name)
    before, after = configs.to_dict(configs.read(base)), configs.to_dict(configs.read(base, name))
    assert before != after
    changed = {key for key in before if before[key] != after[key]}
    assert changed == set(yaml.safe_load((configs.CONFIGS / name).read_text())), "each of its keys has an effect"
    assert zoo.build(base, name, "model.vocab_size=32000", device="meta").num_parameters() > 0


@pytest.mark.parametrize("name", WHOLE)
def test_every_recurrent_mixer_ships_expandable(name: str):
    """`factor` is one key of every config, so that one override is the whole ablation."""
    found = list(slots(configs.to_dict(configs.read(name))["model"]["stack"]))
    assert found
    for cls, around, arguments in found:
        if cls is Expanded:
            assert arguments["factor"] == 1
        elif issubclass(cls, LinearMixer):
            assert around is Expanded, f"{cls.__name__} stands in {around}"


@pytest.mark.parametrize("name", WHOLE)
def test_printed_configs_can_be_read_back(name: str, command: Command, desk: Path):
    printed = command("fit", "--config", name, "--print_config")
    assert printed.code == 0, printed.err
    (desk / "printed.yaml").write_text(printed.out)
    again = command("fit", "--config", "printed.yaml", "--print_config")
    assert again.out == printed.out
    assert yaml.safe_load(printed.out)["data"]["init_args"]["sequence_length"] == 256


def test_a_written_config_can_be_read_back(tmp_path: Path):
    """What a run keeps of itself, nulls included: `mlp: null` must not turn into the default."""
    config = configs.read("mamba2.yaml", "model.stack.mixer.factor=2")
    configs.write(config, tmp_path / "config.yaml")
    again = configs.read(tmp_path / "config.yaml")
    assert configs.to_dict(again) == configs.to_dict(config)
    assert again.model.mlp is None
    assert configs.to_dict(configs.parse(configs.to_dict(config))) == configs.to_dict(config)
