"""Every overlay in configs/ changes its base in the keys that it names, and the result can be built and written."""

import re
import shlex
from typing import Any

import pytest
from jsonargparse import Namespace

from zoo import config as configs

from .shipped_configs import (
    ABLATIONS,
    BASED,
    CONTENTS,
    RUNS_AS_IT_IS,
    SIZES,
    bases_of,
    built,
    commands,
    named,
    parsed,
    resolved,
)

# keys of the run before, which an overlay sets to their defaults
BEFORE = {"train/distil_logits.yaml": ["teacher.match=layers"], "train/next_token.yaml": ["teacher.checkpoint=teacher"]}


def changed(before: Namespace, after: Namespace) -> set[str]:
    """The keys of a run that differ between two parsed configs."""
    return {key for key in configs.KEYS if before[key] != after[key]}


def names_a_class(contents: Any) -> bool:
    """Whether a config names a component, whose arguments could be values that cannot be written."""
    if isinstance(contents, dict | list):
        return any(map(names_a_class, contents.values() if isinstance(contents, dict) else contents))
    return isinstance(contents, str) and re.fullmatch(r"([\w.]+\.)?[A-Z]\w+", contents) is not None


def marks(name: str, base: str) -> pytest.MarkDecorator | tuple[()]:
    """A size has an effect on its first base in every run; test_configs.py builds it on all of them."""
    return pytest.mark.nightly if (base, name) in SIZES and base != bases_of(name)[0] else ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "base"),
    [
        pytest.param(name, base, id=f"{name} {base}", marks=marks(name, base))
        for name, base in BASED
        if name not in ABLATIONS
    ],
)
def test_an_overlay_changes_its_base(name: str, base: str):
    before = [base, *BEFORE.get(name, [])]
    assert changed(parsed(*before), parsed(*before, name)) == set(CONTENTS[name]), "each of its keys has an effect"
    if names_a_class(CONTENTS[name]):
        assert resolved(base, name)
    if base in RUNS_AS_IT_IS:
        assert built(base, name, vocab_size=32_000).num_parameters() > 0


def test_there_is_an_overlay_for_every_ablation():
    """Table S.1 of arXiv 2412.06464, table 7 of Liu et al., and HGRN2's."""
    switches = ["no_decay", "no_conv", "no_output_gate", "no_output_norm", "l2_relu", "l2_elu1", "neg_eigval"]
    norms = ["l1_relu", "l1_elu1", "l1_silu"]
    heads = [f"heads_{n}" for n in (1, 2, 4, 8, 16)]
    kinds = ["low_rank", "dpfp", "lfm", "relu", "elu1", "identity"]
    expansions = ["expand_2", "expand_4", "expand_8", "no_subheads", *(f"expansion_{kind}" for kind in kinds)]
    hgrn2 = ["hgrn2_no_bounds", *(f"hgrn2_expand_{n}" for n in (16, 32, 64, 128))]
    assert {f"ablate/{name}.yaml" for name in (*switches, *norms, *heads, *expansions, *hgrn2)} <= {*ABLATIONS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_is_a_few_lines_that_change_what_its_command_says(name: str):
    assert len((configs.CONFIGS / name).read_text().splitlines()) <= 5
    (command,) = commands(name)
    files = named(command)
    assert files[-1] == name
    rest = [argument.removeprefix("--") for argument in shlex.split(command)[3:] if "=" in argument]
    assert set(CONTENTS[name]) == changed(parsed(*files[:-1], *rest), parsed(*files, *rest)) == {"model"}
    assert built(*files, *rest, vocab_size=64).num_parameters() > 0
    if names_a_class(CONTENTS[name]):
        assert resolved(*files, *rest)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "base"), [pytest.param(*pair, id=" ".join(pair)) for pair in BASED])
def test_a_config_with_an_overlay_can_be_written_and_read_back(name: str, base: str):
    assert resolved(base, name) != resolved(base)
