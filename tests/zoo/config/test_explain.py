"""Mistakes in keys and classes are found by the signatures of constructors, whatever else is in the config."""

import pytest

from kernels import UserError
from zoo import config as configs

MISTAKES = {
    "model.stack.mixer.fctor=1": "model.stack.mixer.fctor: unknown key; did you mean 'factor'?",
    "model.stack.mixer.init_args.fctor=1": "model.stack.mixer.fctor: unknown key; did you mean 'factor'?",
    "model.stack.mixer.mixer.decay=null": "model.stack.mixer.mixer.decay: unknown key (allowed: ",
    "model.stack.mixer=mixers.names": "model.stack.mixer: 'mixers.names' is not a TokenMixer; write its dotted path, ",
    "model.stack=H1": "model.stack: H1 needs a value for first, second, under init_args",
    "model.num_layers=two": "model.num_layers: 'two' is not a whole number",
    "model.hidden_size=null": "model.hidden_size: null is not a whole number",
    "model.norm=null": "model.norm: null is not a Norm",
    "model.stack.mixer.mixer.qk=null": "model.stack.mixer.mixer.qk: null is not a mapping",
    "model.stack.mixer.factor=null": "model.stack.mixer.factor: null is not a whole number",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_in_a_model(override: str) -> None:
    with pytest.raises(UserError) as raised:
        configs.read_model("gla.yaml", override)
    assert str(raised.value).startswith(MISTAKES[override])


def test_arguments_of_a_class_that_was_replaced_are_no_mistake() -> None:
    """The first mistake is the one that is there, not one that a later config has removed."""
    for component in ("model.stack.mixer=RetNet", "model.stack=Uniform"):
        with pytest.raises(UserError, match=r"model\.num_layers: 'two' is not a whole number"):
            configs.read_model("gla.yaml", component, "model.num_layers=two")


@pytest.mark.parametrize(
    "override",
    [
        "model.stack.mixer.init_args={factor: 2}",
        "model.stack.mixer.init_args.factor=2",
        "model.stack.mixer={factor: 2}",
        "model.stack.init_args.mixer.init_args={factor: 2, mixer: {class_path: RetNet}}",
        'model.stack={"class_path": "Uniform", "init_args": {"mixer": {"class_path": "Mamba2", "init_args": {}}}}',
        "model={num_layers: 2}",
        "model.mlp=null",
        "optim.optimizer={class_path: SGD, init_args: {momentum: 0.9}}",
        "optim.betas=[0.9, 0.99]",
    ],
)
def test_no_way_to_write_a_key_is_refused(override: str) -> None:
    configs.read_model("gla.yaml", override)


@pytest.mark.parametrize("strange", [{"class_path": 3}, {"class_path": None}, {1: 2}, [1], 3, {"init_args": 3}])
def test_strange_values_are_one_sentence(strange: object) -> None:
    with pytest.raises(UserError) as raised:
        configs.read_model("gla.yaml", {"model": {"stack": strange}})
    assert "\n" not in str(raised.value)
