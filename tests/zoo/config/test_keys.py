"""The table of keys, which stands for the classes behind them where these are not imported."""

import inspect
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from kernels import UserError
from zoo import config as configs
from zoo.config.classes import CLASSES
from zoo.config.keys import GROUPS, KEYS, OF_LIGHTNING, PURPOSES
from zoo.config.parser import run_keys
from zoo.train.callbacks.run_callback import run_callbacks


def test_the_table_has_the_keys_of_all_classes_in_their_order():
    assert (*GROUPS,) == ("data", *CLASSES)
    assert [key for key in OF_LIGHTNING[2:]] == [cls.key for cls in run_callbacks() if cls.key is not None]
    configs.add_run_keys(parser := ArgumentParser())
    defaults = parser.get_defaults()
    assert {*KEYS} == {*run_keys()} == {*vars(defaults)}
    resolved = configs.read("gla.yaml")
    for key in ("trainer", "optim", "samples", "checkpoints"):  # help shows the defaults that runs have
        assert {*vars(defaults[key])} == {*vars(resolved[key])}
    assert defaults.trainer.max_epochs == resolved.trainer.max_epochs == -1


@pytest.mark.parametrize("key", [key for key in CLASSES if key != "trainer"])
def test_its_sentences_are_those_of_the_classes(key: str):
    assert (inspect.getdoc(CLASSES[key]) or "").partition("\n")[0].rstrip(".") == PURPOSES[key]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        ("modle.hidden_size=64",),
        ("model.hiden_size=64",),
        ("model.hidden_size=wide",),
        ("optim.learning_rte=1",),
        ("optim.schedule=none",),
        ("backend=fast",),
        ("seed_everything=-1",),
        ("data.tokenizer=some", "data.vocab_size=8"),
        ({"smaples": {"every": 3}},),
        ({"optim": {"learning_rte": 1}},),
    ],
)
def test_without_lightning_mistakes_have_the_same_sentences(wrong: tuple[Any, ...]):
    sentences = []
    for read in (configs.read, configs.read_model):
        with pytest.raises(UserError) as error:
            read("gla.yaml", *wrong)
        sentences.append(str(error.value))
    assert sentences[0] == sentences[1]


def test_a_model_is_read_as_in_a_whole_config():
    items = ("gdn_h2.yaml", "train/muon.yaml", "model.stack.second.factor=2", "data=MQAR", "samples.prompts=[a]")
    whole, model = configs.read(*items), configs.read_model(*items)
    assert {*vars(model)} == {*KEYS} - {*OF_LIGHTNING}
    assert all(model[key] == whole[key] for key in ("model", "optim", "compile"))


def test_reading_keeps_nothing_of_earlier_configs():
    before = configs.to_dict(configs.read("gla.yaml"))
    configs.read("gdn_h2.yaml", "data=MQAR", "trainer.max_steps=3", "samples.prompts=[a]").trainer.max_steps = 7
    with pytest.raises(UserError):
        configs.read("gla.yaml", "model.stack=H2", "model.nope=1")
    assert configs.to_dict(configs.read("gla.yaml")) == before
