"""Configs and checkpoints of earlier versions name classes where they were."""

import json

import pytest

from zoo import config as configs
from zoo.config.moved import MOVED

OLD_PATHS = [
    ("zoo.lm.H2", "zoo.stack.H2"),
    ("zoo.lm.SwiGLU", "zoo.mlp.SwiGLU"),
    ("mixers.Expanded", "mixers.expansion.Expanded"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("new", "old"), OLD_PATHS)
def test_a_class_is_found_where_it_was(new: str, old: str) -> None:
    now = configs.to_dict(configs.read("gdn_h2.yaml"))
    text = json.dumps(now)
    assert f'"{new}"' in text
    earlier = json.loads(text.replace(f'"{new}"', f'"{old}"'))
    for read in (configs.read(earlier), configs.parse(earlier)):
        assert configs.to_dict(read) == now


def test_data_on_the_command_line_too() -> None:
    config = configs.read("gla.yaml", "data=zoo.data.mqar.MQAR")
    assert config.data.class_path == "zoo.data.MQAR"


@pytest.mark.parametrize("module", sorted(set(MOVED.values())))
def test_modules_are_where_the_table_says(module: str) -> None:
    assert __import__(module, fromlist=["_"]).__name__ == module


def test_multipliers_are_found_where_they_were() -> None:
    earlier = {"model": {"embedding_multiplier": 12.0, "logits_scaling": 3.0}}
    multipliers = configs.read("gla.yaml", earlier).model.multipliers
    assert (multipliers.embedding, multipliers.residual, multipliers.logits_scaling) == (12.0, 1.0, 3.0)
