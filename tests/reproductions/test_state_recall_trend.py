"""`reproductions/state_recall_trend.py`: the longest context over the size of the state."""

import pytest

from reproductions.state_recall_trend import picture, trend


def test_a_line_over_the_size_of_the_state():
    line = trend([(100, 600), (200, 1100), (400, 2100)])
    assert line is not None
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((5, 100, 1))
    scattered = trend([(1, 0), (2, 10), (3, 0), (4, 10)])
    assert scattered is not None
    assert (scattered.slope, scattered.intercept, scattered.r_squared) == pytest.approx((2, 0, 0.2))
    assert trend([(100, 600), (100, 700)]) is None
    assert trend([]) is None


def test_the_figure_has_a_point_for_each_model_and_a_line_for_each_threshold():
    sizes = {"small": 1024, "large": 4096}
    rows = [
        {"model": model, "threshold": threshold, "value": size, "state_size": size}
        for model, size in sizes.items()
        for threshold in (0.5, 0.6, 0.7, 0.8)
    ]
    figure = picture([*rows, {"model": "small", "metric": "accuracy", "value": 1.0}])
    assert [text.get_text() for text in figure.legends[0].texts] == [
        f"recall ≥ {threshold} (R² = 1.00)" for threshold in (0.5, 0.6, 0.7, 0.8)
    ]
    assert {text.get_text() for text in figure.axes[0].texts} == {*sizes}
