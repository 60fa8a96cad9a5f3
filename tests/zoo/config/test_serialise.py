"""Configs as plain containers, and their way back."""

import copy

import pytest

from kernels import UserError
from zoo import config as configs
from zoo.lm import Uniform


@pytest.mark.slow
def test_a_written_config_is_read_back_as_it_was():
    config = configs.read("gdn_h2.yaml", "data/mixture.yaml", "seed_everything=3")
    written = configs.verified(config)
    assert written == configs.to_dict(config) == configs.to_dict(configs.parse(copy.deepcopy(written)))


def test_what_would_be_read_back_as_another_value_is_not_written():
    config = configs.read("gla.yaml")
    config.trainer.devices = "[0]"
    assert configs.to_dict(config)["trainer"]["devices"] == "[0]"
    with pytest.raises(UserError, match=r"trainer.devices: '\[0\]' is read back from config.yaml as \[0\]; give it"):
        configs.verified(config)


@pytest.mark.parametrize("function", [configs.to_dict, configs.verified])
def test_objects_are_not_written(function):
    config = configs.read("gla.yaml")
    config.model.stack = Uniform(lambda site: None)
    with pytest.raises(UserError, match=r"model.stack: .*Uniform.* is not a plain value; give it in the config as"):
        function(config)
