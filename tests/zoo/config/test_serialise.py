"""Configs as plain containers, and their way back."""

import copy

import pytest

from kernels import UserError
from zoo import config as configs
from zoo.files.safe_yaml import dump_yaml, parse_yaml
from zoo.lm import Uniform


@pytest.mark.slow
def test_a_written_config_is_read_back_as_it_was():
    config = configs.read("gdn_h2.yaml", "data/mixture.yaml", "seed_everything=3")
    written = configs.to_dict(config)
    assert written == configs.to_dict(configs.parse(copy.deepcopy(written)))


def test_text_that_looks_like_yaml_is_read_back_as_text():
    config = configs.read("gla.yaml")
    config.trainer.devices = "[0]"
    assert configs.parse(parse_yaml(dump_yaml(configs.to_dict(config)), "config")).trainer.devices == "[0]"


def test_objects_are_not_written():
    config = configs.read("gla.yaml")
    config.model.stack = Uniform(lambda site: None)
    with pytest.raises(UserError, match=r"model.stack: .*Uniform.* is not a plain value; give it in the config as"):
        configs.to_dict(config)
