from collections.abc import Callable

import pytest

import zoo
from kernels import UserError
from mixers import Mamba2, Site, SlidingWindowAttention
from zoo.lm.stack import H1, H2, Pattern, Stack, Uniform


def named(name: str) -> Callable[[Site], str]:
    """A factory whose mixer is its name and the layer."""
    return lambda site: f"{name}{site.layer}"


A, B, C = named("a"), named("b"), named("c")


@pytest.mark.parametrize(
    ("stack", "order"),
    [
        (Uniform(A), "a0 a1 a2 a3 a4 a5 a6"),
        (H1(A, B), "a0 b1 a2 b3 a4 b5 a6"),
        (H2(A, B, C), "a0 b1 c2 a3 b4 c5 a6"),
        (Pattern("MMGS", {"S": C, "G": B, "M": A}), "a0 a1 b2 c3 a4 a5 b6"),
        (Pattern("MG", {"M": A, "G": B}), "a0 b1 a2 b3 a4 b5 a6"),
    ],
    ids=["Uniform", "H1", "H2", "Pattern", "a pattern of two"],
)
def test_order(stack: Stack, order: str):
    assert " ".join(stack(Site(8, 1, layer, 7)) for layer in range(7)) == order


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("MGS", r"'MGS' has no mixer for \['S'\].*\(M, G\)"),
        ("MM", r"'MM' never uses \['G'\]"),
        ("", "'' is empty"),
        ("mG", r"has no mixer for \['m'\]"),
    ],
)
def test_a_pattern_and_its_mixers_must_agree(pattern: str, reason: str):
    with pytest.raises(UserError, match=f"pattern: .*{reason}"):
        Pattern(pattern, {"M": A, "G": B})


def test_a_pattern_says_which_layers_have_their_norms_after():
    stack = Pattern("MMG", {"M": A, "G": B}, post_norm="G")
    assert [stack.post_norm(layer) for layer in range(6)] == [False, False, True] * 2
    assert not any(plain.post_norm(1) for plain in (Uniform(A), H1(A, B), Pattern("MG", {"M": A, "G": B})))
    with pytest.raises(UserError, match=r"^post_norm: 'GS' has \['S'\]; its letters are those of pattern 'MMG'$"):
        Pattern("MMG", {"M": A, "G": B}, post_norm="GS")


def test_a_pattern_in_a_config(tmp_path):
    config = tmp_path / "samba.yaml"
    config.write_text("""
model:
  num_layers: 5
  hidden_size: 64
  num_heads: 2
  vocab_size: 7
  stack:
    class_path: Pattern
    init_args: {pattern: MMS, mixers: {M: Mamba2, S: {class_path: SlidingWindowAttention, init_args: {window_size: 9}}}}
""")
    mixers = zoo.build(config, device="meta").mixers
    assert [type(mixer) for mixer in mixers] == [Mamba2, Mamba2, SlidingWindowAttention, Mamba2, Mamba2]
    assert mixers[2].window_size == 9
