"""Decays of trained models: what is recorded, and training with them."""

import csv
import json
from pathlib import Path

import pytest
import torch

import mixers
from reproductions.decay_kinds import SHARES
from reproductions.decays import Replaced, main, quantiles, replace_decays, steep_chunks

TINY = "--overrides=[model.num_layers=2,model.hidden_size=32,model.num_heads=2,model.intermediate_size=32]"


def test_quantiles():
    actual = quantiles(-torch.arange(101.0).view(1, 101, 1, 1))
    assert len(actual) == len(SHARES)
    assert (actual[0], actual[SHARES.index(0.5)], actual[-1]) == (-100, -50, 0)


def test_a_chunk_is_steep_if_one_channel_decays_by_e69_in_half_of_it():
    log_decay = torch.full((1, 130, 2, 4), -0.1)
    assert steep_chunks(log_decay) == 0
    log_decay[:, 32:64, 1, 2] = -2.2  # the second half of the first of two whole chunks
    assert steep_chunks(log_decay) == 0.25


def test_a_layer_computes_with_other_decays_and_its_own_get_the_gradient():
    torch.manual_seed(0)
    mixer, x = mixers.KDA(mixers.Site(hidden_size=16, num_heads=2)), torch.randn(1, 20, 16)
    expected, _ = mixer(x)
    replace_decays(mixer, torch.zeros_like)
    assert not torch.allclose(mixer(x)[0], expected)
    replace_decays(mixer, lambda own: Replaced.apply(own, own.detach()))
    y, _ = mixer(x)
    torch.testing.assert_close(y, expected)
    gradients = [torch.autograd.grad(o.sum(), [mixer.decay.A_log])[0] for o in (y, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_speed_with_decays_of_two_kinds(desk: Path):
    options = ("--sizes=[own]", "--kinds=[gentle,recorded]", "--steps=1", "--batch_size=1", "--length=64")
    main(["training", "--models=[kda_hybrid]", *options, "--precision=32-true", "--file=speed.csv", TINY])
    with Path("speed.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [row["decays"] for row in rows] == ["gentle", "recorded"]
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)


@pytest.mark.nightly
def test_decays_of_a_trained_model_are_recorded(desk: Path):
    more = ",model.nominal_size=null,data.max_characters=2000000,data.vocab_size=512,model.vocab_size=512]"
    options = ("--steps=2", "--batch_size=1", "--length=128", "--file=recorded.json", TINY.replace("]", more))
    main(["record", "--models=[hgrn2]", *options])
    row = json.loads(Path("recorded.json").read_text())["hgrn2"]
    assert [len(layer) for layer in row["quantiles"]] == [len(SHARES)] * 2
    assert row["steps"] == 2
