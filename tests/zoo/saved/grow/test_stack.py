"""The pattern of a larger model."""

from typing import Any

import pytest

from kernels import UserError
from zoo.saved.grow.stack import Spec, replaced

A, B = ({"class_path": f"mixers.{name}", "init_args": {}} for name in ("GLA", "SlidingWindowAttention"))


def larger(spec: Spec) -> Spec:
    return {**spec, "init_args": {"num_heads": 1}}


def stack(name: str, **arguments: Any) -> Spec:
    return {"class_path": f"zoo.lm.{name}", "init_args": arguments}


@pytest.mark.parametrize(
    ("before", "layers", "pattern"),
    [
        (stack("Uniform", mixer=A), [0, 3], "BAABAA"),
        (stack("Uniform", mixer=A), [0, 1, 2, 3, 4, 5], "BBBBBB"),
        (stack("H1", first=A, second=B), [2, 4], "ABCBCB"),
        (stack("H2", first=A, second=B, third=A), [0, 5], "DBCABE"),
        (stack("Pattern", pattern="GGS", mixers={"G": A, "S": B}), [1, 3], "GASAGS"),
    ],
)
def test_every_layer_has_a_letter(before: Spec, layers: list[int], pattern: str):
    after = replaced(before, 6, dict.fromkeys(layers, larger))
    assert after["class_path"].endswith("Pattern")
    assert after["init_args"]["pattern"] == pattern
    mixers = after["init_args"]["mixers"]
    assert set(mixers) == set(pattern)
    assert all(mixers[pattern[layer]]["init_args"] == {"num_heads": 1} for layer in layers)


def test_what_a_pattern_says_of_its_letters_holds_for_the_new_ones():
    before = stack("Pattern", pattern="GS", mixers={"G": A, "S": B}, post_norm="G")
    assert replaced(before, 4, {0: larger})["init_args"] == {
        "pattern": "ASGS",
        "mixers": {"A": larger(A), "G": A, "S": B},
        "post_norm": "GA",
    }


def test_a_stack_of_ones_own_is_refused():
    with pytest.raises(UserError, match=r"^stack: Mine is not Uniform, H1, H2 or Pattern"):
        replaced({"class_path": "my.Mine", "init_args": {}}, 2, {0: larger})
