"""The published laws are those of the paper, and `scaling plan` reads them."""

from pathlib import Path

import pytest

from kernels import UserError
from reproductions.published_laws import LAWS, write
from zoo.scaling.curves import PF_DAY
from zoo.scaling.law import crossing
from zoo.scaling.plan import law_named


def test_table_3_of_the_paper():
    """arXiv 2406.16690: losses at 1 and 100 PF-days, LLaMA's model for 179 of them, and where others cross it."""
    losses = {name: [round(float(law.loss(days * PF_DAY)), 3) for days in (1, 100)] for name, law in LAWS.items()}
    assert losses == {
        "llama": [3.709, 2.568],
        "tnl": [3.539, 2.485],
        "hgrn2": [3.479, 2.459],
        "cosformer2": [3.588, 2.533],
    }
    assert float(LAWS["llama"].size(179 * PF_DAY)) == pytest.approx(7.31e9, rel=0.005)
    assert float(LAWS["llama"].tokens(179 * PF_DAY)) == pytest.approx(361e9, rel=0.005)
    crossings = {"tnl": 5.97e6, "hgrn2": 1.50e6, "cosformer2": 2690}
    for name, days in crossings.items():
        at = crossing(LAWS["llama"], LAWS[name], (1e-3 * PF_DAY, 1e9 * PF_DAY))
        assert at / PF_DAY == pytest.approx(days, rel=0.02)
    sums = {name: round(law.balance, 4) for name, law in LAWS.items()}
    assert sums == {"llama": 1.222, "tnl": 1.1154, "hgrn2": 1.0927, "cosformer2": 1.1045}
    assert crossing(LAWS["llama"], LAWS["hgrn2"], (PF_DAY, 10 * PF_DAY)) is None


def test_a_law_is_written_for_a_plan(desk: Path):
    assert law_named(str(write("hgrn2"))) == LAWS["hgrn2"]
    with pytest.raises(UserError, match=r"law: 'hgrn' is not one of llama, tnl, .*; did you mean 'hgrn2'"):
        write("hgrn")
