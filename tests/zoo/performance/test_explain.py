"""Which kernels run for a model or a mixer, as a table; nothing runs, so no GPU is needed."""

import pytest

pytest.importorskip("triton")
from zoo.performance.explain import explain, main, parser

CASES = {
    "GLA": ("linear_recurrence.vector_decay.channel_scores", "linear_recurrence.vector_decay.channel_grads"),
    "GatedDeltaNet --documents 3": ("delta_rule.prepare.prepare", "features.kernels.backward"),
    "GatedDeltaNet --inference --state --T 1": ("recurrence_token.op.advance_token", None),
    "rwkv7.yaml --T 256 --state": ("token_shift.op.mix", "bonus_readout.op.differentiate"),
    "gla.yaml model.num_layers=2 --documents 4": (
        "linear_cross_entropy.rows.softmax_loss",
        "forget_gate.low_rank.low_rank_backward",
    ),
}


@pytest.mark.parametrize("words", CASES)
def test_kernels_of_a_layer_and_of_a_model(words: str):
    (forward, backward), ran = explain(parser().parse_args(["explain", *words.split(), "--device", "A100"]))
    for record, expected in zip((forward, backward), CASES[words], strict=True):
        names = [spec.name for spec in record.launches]
        assert expected in names if expected else not names
    assert all(backends == {"triton"} for backends in ran.values())


def test_ops_in_pytorch_are_named(capsys: pytest.CaptureFixture[str]):
    main(["explain", "SoftmaxAttention", "--B", "1", "--T", "64"])
    assert "in PyTorch: window_attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("none.yaml", "'none.yaml' is neither a file nor one of configs/"),
        ("GLA --num_heads 3", "num_heads: 3 does not divide hidden_size 1024"),
        ("GLA --device V100", "invalid choice: 'V100'"),
    ],
)
def test_mistakes(words: str, says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as error:
        main(["explain", *words.split()])
    assert says in f"{error.value} {capsys.readouterr().err}"
