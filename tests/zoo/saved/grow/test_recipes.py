"""The training that follows, as the paper describes it (StateX, sections 5.1 and 5.7)."""

from typing import Any

import pytest
import yaml

import zoo
from reproductions.paper_tables import TABLES
from zoo.config import CONFIGS
from zoo.train.optim import Optimisation


def contents(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / name).read_text())


def test_the_baseline_sees_the_same_tokens_in_the_same_way():
    assert contents("train/lpt.yaml") == contents("train/statex.yaml")


def test_the_recipe_is_the_papers():
    recipe = contents("train/statex.yaml")
    steps, data = recipe["trainer"]["max_steps"], recipe["data"]
    tokens = data["batch_size"] * data["sequence_length"] * recipe["trainer"]["accumulate_grad_batches"]
    assert data["sequence_length"] == 65536
    assert tokens == pytest.approx(5e5, rel=0.05)
    assert steps * tokens == pytest.approx(1e10, rel=1e-3)
    optim = Optimisation(**recipe["optim"])
    assert (optim.learning_rate, optim.warmup(steps)) == (3e-4, round(0.05 * steps))
    assert optim.factor(optim.warmup(steps), steps) == 1
    assert optim.factor(steps, steps) == 0


def test_heads_of_equal_size():
    sweep = contents("sweep/gla_heads.yaml")
    base, overlay = sweep["base"]
    states, heads = [], sweep["axes"]["model.num_heads"]
    for number in heads:
        model = zoo.build(base, overlay, f"model.num_heads={number}", device="meta")
        assert model.num_parameters() == pytest.approx(3.4e8, rel=0.01)
        assert {mixer.num_heads * mixer.key_size for mixer in model.mixers} == {512}
        assert model.num_layers == 24
        states.append(model.state_size() * number)
    assert heads == [1, 4, 8, 16]
    assert set(states) == {24 * 512 * 1024}


def test_the_papers_evaluations_have_its_tasks():
    recall, examples, needles = (TABLES[f"statex/table{number}"] for number in (2, 3, 5))
    assert all(task.endswith("Twice") for task in recall.metrics)
    assert {task.partition("@")[2] for task in examples.metrics} == {"8", "16", "24"}
    assert {*needles.metrics} == {"passkey", "s_niah_2"}
    assert (needles.lengths[0], needles.lengths[-1], needles.samples) == (4096, 65536, 256)
