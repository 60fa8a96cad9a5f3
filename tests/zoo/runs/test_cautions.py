"""Warnings about a run whose settings do not suit its size, and the division of its steps."""

import logging
from pathlib import Path

import pytest

import zoo
from kernels import UserError
from tests.shipped_configs import parsed
from zoo.runs.cautions import cautions
from zoo.runs.rows import device_count, divide_step, tokens_per_step

LARGE = "size/400m.yaml"
TRAINED = ("trainer.max_steps=300000",)


@pytest.mark.parametrize(
    ("items", "vocabulary", "devices", "beginnings"),
    [
        (("gla.yaml",), 1024, 1, []),
        (("gla.yaml", "recipe/400m.yaml"), 32_000, 8, []),
        (("gla.yaml", LARGE, *TRAINED), 32_000, 1, ["data.sequence_length 256 and optim.learning_rate 0.003"]),
        (("gla.yaml", LARGE, "optim.learning_rate=1e-3", *TRAINED), 15_999, 1, ["the tokenizer has 15,999 entries"]),
        (("gla.yaml", LARGE, "optim.learning_rate=1e-3", *TRAINED), 16_000, 1, []),
        (("gla.yaml",), 1024, 9, ["data.batch_size 8 has fewer rows than the 9 devices"]),
        (("gla.yaml", "context_parallel=2"), 1024, 16, []),
        (("gla.yaml", "recipe/400m.yaml", "trainer.max_steps=700"), 32_000, 8, ["trainer.max_steps 700 of 524,288"]),
        (("gla.yaml", LARGE), 1024, 16, ["data.seq", "the tok", "data.batch", "trainer.max"]),
    ],
)
def test_settings_that_do_not_suit(items: tuple[str, ...], vocabulary: int, devices: int, beginnings: list[str]):
    config = parsed(*items)
    config.model.vocab_size = config.model.vocab_size or vocabulary
    divide_step(config, 8)
    parameters = 3_000_000 if config.model.nominal_size is None else 400_000_000
    sentences = cautions(config, parameters, vocabulary, devices)
    assert len(sentences) == len(beginnings)
    assert all(map(str.startswith, sentences, beginnings))


def test_fit_warns_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        zoo.fit(
            "gla.yaml",
            "model.vocab_size=2048",
            "data.vocab_size=300",
            "data.max_characters=20000",
            "trainer.max_steps=1",
        )
    assert [r.message for r in caplog.records if r.name == "zoo.runs.training"] == [
        "the tokenizer has 300 entries, fewer than half of model.vocab_size 2,048: other embeddings are never trained; "
        "set data.tokenizer or data.vocab_size"
    ]


@pytest.mark.parametrize(
    ("devices", "rows", "parts"), [(1, 8, 16), (8, 64, 2), (16, 128, 1), (32, 128, 1), (3, 128, 1)]
)
def test_a_step_is_divided_among_devices(devices: int, rows: int, parts: int):
    config = parsed("gla.yaml", "recipe/400m.yaml")
    divide_step(config, devices)
    assert (config.data.init_args.batch_size, config.trainer.accumulate_grad_batches or 1) == (rows, parts)
    assert config.trainer.val_check_interval == 500 * parts
    assert config.rows_per_device is None
    assert tokens_per_step(config) == 128 * 4096


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        (("rows_per_device=0",), "rows_per_device: 0 must be 1 or more"),
        (("rows_per_device=4", "trainer.accumulate_grad_batches=2"), "rows_per_device: 4 chooses the number of micro-"),
        (("rows_per_device=3", "deterministic_kernels=true"), "rows_per_device: 3 must divide the 8 rows of a device"),
    ],
)
def test_rows_that_cannot_be(items: tuple[str, ...], sentence: str):
    with pytest.raises(UserError, match=f"^{sentence}"):
        divide_step(parsed("gla.yaml", *items), 1)


@pytest.mark.parametrize(
    ("items", "count"),
    [
        (("trainer.devices=4", "trainer.num_nodes=2"), 8),
        (("trainer.devices=[0,1,2]",), 3),
        (("trainer.accelerator=cpu",), 1),
    ],
)
def test_devices_of_a_config(items: tuple[str, ...], count: int):
    assert device_count(parsed("gla.yaml", *items).trainer) == count
