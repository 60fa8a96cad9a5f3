"""Random models of each family, there and back; the dated numbers of the same comparison are in the docs."""

import csv

import pytest

from zoo.saved.public.families import FAMILIES
from zoo.saved.public.family import Family

from .random_models import FILE, MODELS, cases, differences


@pytest.mark.parity
@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_ten_random_models_of_a_family_come_back(family: Family):
    counts = differences(family)
    assert counts.models == MODELS
    assert counts.tensors >= 10 * MODELS
    assert counts.sizes[0] < counts.sizes[1]  # they are not one model
    assert counts.total == 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_cases_and_a_dated_comparison(family: Family):
    """`python -m tests.zoo.saved.public.random_models NAME` adds that of a new family."""
    with FILE.open(encoding="utf-8", newline="") as stream:
        rows = {row["family"]: row for row in csv.DictReader(stream)}
    row = rows[family.name]
    assert int(row["configs"]) == len(cases(family)) > 0
    assert (int(row["models"]), int(row["differences"])) == (MODELS, 0)
    assert int(row["tensors"]) >= 10 * MODELS
