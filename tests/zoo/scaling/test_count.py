"""`scaling count`: the conventions of papers, against sums by hand."""

import pytest

import mixers
import zoo

pytest_plugins = "tests.desk"
MODEL = {"hidden_size": 64, "num_heads": 2, "num_layers": 3, "vocab_size": 100, "mlp": None}


def overlaid(desk, **stack) -> str:
    """A config of a small model without MLPs whose mixer is attention."""
    text = {"model": MODEL | {"stack": {"class_path": "Uniform", "init_args": {"mixer": stack}}}}
    (desk / "small.yaml").write_text(str(text).replace("None", "null"))
    return "small.yaml"


@pytest.mark.parametrize("window", [None, 5, 64, 1000])
def test_attention_by_hand(desk, window: int | None) -> None:
    length = 300
    mixer = {"class_path": "SoftmaxAttention"}
    if window is not None:
        mixer = {"class_path": "SlidingWindowAttention", "init_args": {"window_size": window}}
    (row,) = zoo.scaling.count(overlaid(desk, **mixer), length, verbose=False)
    pairs = sum(min(t + 1, window or length) for t in range(length))
    products = 3 * 2 * (row.without_embeddings - 64 * (3 + 1))  # norms are no products
    head = 3 * 2 * 64 * 100
    # two products over 64 channels for each pair
    assert row.causal == pytest.approx(3 * (2 * 2 * 64 * pairs / length) * 3 + products + head)
    assert row.flops - row.without_head == head
    assert row.flops >= row.causal
    assert (row.six_n, row.six_n_all) == (6 * row.without_embeddings, 6 * row.parameters)


@pytest.mark.slow
def test_every_registered_mixer(command) -> None:
    done = command("scaling", "count", "--length=1024")
    assert done.code == 0, done.err
    for name in mixers.names():
        assert (name in done.out) == mixers.get(name).causal
    for word in ("non-emb.", "causal", "6N, all", "at 1024 tokens"):
        assert word in done.out


@pytest.mark.parametrize(
    ("argument", "expected"),
    [("glaa.yaml", "did you mean 'gla.yaml'"), ("--length=0", "length: 0 must be at least 1")],
)
def test_a_mistake_is_one_sentence(command, argument: str, expected: str) -> None:
    done = command("scaling", "count", argument)
    assert (done.code, len(done.err.splitlines())) == (2, 1), done.err
    assert expected in done.err
