"""The metrics of the scaling-law paper."""

import numpy as np
import pytest

from reproductions.niah import NiahEasy, NiahStandard, consistency, niah_score, weight_map, weighted_accuracy
from tests.zoo.evaluation.subjects import Guesser, Reader
from zoo.data import Tokenizer
from zoo.evaluation.task import Options

DEPTHS = 35


def column(*runs: int) -> np.ndarray:
    """Successes over 35 depths: a run of 1s, then one of 0s, and so on."""
    values = [i % 2 == 0 for i, run in enumerate(runs) for _ in range(run)]
    assert len(values) == DEPTHS
    return np.array(values)


@pytest.mark.parametrize(
    ("success", "factor"),
    [
        (column(35), 1),
        (column(0, 35), 0),
        (column(20, 15), 2**-0.5),  # one break: .707
        (column(0, 20, 15), 2**-0.5),
        (column(10, 1, 24), 0.5),
        (column(*[1] * 35), 2**-17),
    ],
)
def test_a_length_counts_by_how_consistent_it_is(success: np.ndarray, factor: float):
    assert consistency(success) == pytest.approx(factor)
    heatmap = np.repeat(success[:, None].astype(float), 3, axis=1)
    assert niah_score(heatmap) == pytest.approx(factor * weighted_accuracy(heatmap))


def test_weights_grow_geometrically_with_depth_and_length():
    assert weight_map(3, 2, ratio=2).tolist() == [[1, 2], [2, 4], [4, 8]]
    assert weighted_accuracy(np.array([[1.0, 0], [0, 0], [0, 0]]), ratio=2) == pytest.approx(1 / 21)
    assert weighted_accuracy(np.array([[0, 0], [0, 0], [0, 1.0]]), ratio=2) == pytest.approx(8 / 21)
    assert weighted_accuracy(np.full((35, 8), 0.3)) == pytest.approx(0.3)


def test_a_success_is_an_accuracy_of_a_half():
    heatmap = np.tile([[0.5], [0.4]], (1, 2))
    assert niah_score(heatmap) == pytest.approx(2**-0.5 * weighted_accuracy(heatmap))
    assert niah_score(heatmap, threshold=0.4) == pytest.approx(weighted_accuracy(heatmap))


def test_what_table_12_prints_for_llama():
    """All is recalled up to 8k of 16k tokens, and nothing further on."""
    lengths = np.arange(1, 36) / 35
    for average, weighted in ((0.564, 0.523), (0.478, 0.441)):
        heatmap = np.clip(35 * (average - lengths) + 1, 0, 1) * np.ones((DEPTHS, 1))
        assert heatmap.mean() == pytest.approx(average, abs=0.02)
        assert weighted_accuracy(heatmap) == pytest.approx(weighted, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NiahEasy, NiahStandard])
def test_the_summary_is_of_the_whole_heatmap(kind: type[NiahEasy], tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["large"]
    for subject, expected in ((Reader(tokenizer), 1), (Guesser(tokenizer), 0)):
        task = kind(Options(lengths=(200, 300)))
        rows = [row for cell in task.cells(subject) for row in task.run(subject, cell)]
        assert len({row["depth"] for row in rows}) == 35
        summary = {row["metric"]: row["value"] for row in task.summary(rows)}
        assert summary == {"average_accuracy": expected, "weighted_accuracy": expected, "niah_score": expected}
    rows = [{**row, "value": float(row["depth"] < 0.5)} for row in rows]
    summary = {row["metric"]: row["value"] for row in task.summary(rows)}
    assert summary["average_accuracy"] == pytest.approx(17 / 35)
    assert summary["weighted_accuracy"] < 17 / 35
    assert summary["niah_score"] == pytest.approx(summary["weighted_accuracy"] * 2**-0.5)
