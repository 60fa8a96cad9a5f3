"""`reproductions/scaling_figure.py`: a row of panels for each mixer, and one for all."""

from pathlib import Path

import numpy as np
import pytest

from kernels import UserError
from reproductions.scaling_figure import draw
from tests.zoo.scaling.curves import write_run
from zoo.scaling.parametric import CHINCHILLA

pytest.importorskip("scipy")


@pytest.mark.slow
def test_the_figure_has_all_mixers(tmp_path: Path):
    for i, size in enumerate(np.geomspace(1e8, 1e10, 6)):
        write_run(tmp_path / "ladder" / f"run{i}", size)
        write_run(tmp_path / "more" / f"run{i}", size, law=CHINCHILLA._replace(E=1.6, A=600.0), mixers="Other×2")
    places = [str(tmp_path / "ladder"), str(tmp_path / "more")]
    drawn = draw(places, "parametric", str(tmp_path / "laws.svg"), draws=4)
    assert drawn.read_text(encoding="utf-8").count("Other×2") > 1  # in the legend, and its row
    assert draw(places[:1], output=str(tmp_path / "one.png"), draws=0).stat().st_size > 5000
    with pytest.raises(UserError, match="method: 'isoflops' is not one of"):
        draw(places, "isoflops")
