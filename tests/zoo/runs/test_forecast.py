"""`fit --dry_run`: estimates against measured steps, disk, layouts, and refused arguments."""

import csv
import re
from pathlib import Path

import pytest

import zoo
from kernels import UserError
from tests.shipped_configs import parsed
from tests.zoo.saved.grow.subjects import exported
from zoo import config as configs
from zoo.runs.estimate import step_seconds, training_pass
from zoo.runs.forecast import GIB, Forecast, forecast

MEASURED = Path(__file__).parents[3] / "reproductions" / "measured"
MEMORY, TIME = 0.15, 0.25  # largest relative errors
# a scan and a score function that take longer than their products and their memory traffic
SLOWER = {"mamba1", "forgetting_attention"}
RECIPES = [
    "gated_deltanet",
    "gdn_h1",
    "gdn_h2",
    "mamba2",
    "gla",
    "hgrn2",
    "transformer",
]  # and others in the nightly tier
ROWS = [row for row in csv.DictReader((MEASURED / "mixers_400m.csv").open()) if row["step_ms"]]
FITS = [*csv.DictReader((MEASURED / "dry_run_h200.csv").open())]
PARALLEL = [row for row in csv.DictReader((MEASURED / "scaling_h200.csv").open()) if "shared" not in row["model"]]
TEXT = ["data.batch_size=8", "data.sequence_length=4096", "trainer.precision=bf16-mixed", "trainer.max_steps=1"]


def estimated(*items: str, on: str) -> Forecast:
    return forecast(configs.read(*items), on)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row["model"], marks=[] if row["model"] in RECIPES else [pytest.mark.nightly])
        for row in ROWS
    ],
)
def test_memory_and_time_of_measured_steps(row: dict[str, str]):
    text = [*TEXT, f"data.batch_size={row['batch_size']}"]
    result = estimated(f"{row['model']}.yaml", row["overlay"], *text, on="H100")
    assert sum(result.memory.values()) == pytest.approx(float(row["peak_gib"]), rel=MEMORY)
    if row["model"] not in SLOWER:
        assert result.hours is not None
        assert result.hours * 3.6e6 == pytest.approx(float(row["step_ms"]), rel=TIME)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{row['model']} {row['way']} {row['devices']}") for row in PARALLEL]
)
def test_memory_and_time_on_several_gpus(row: dict[str, str]):
    if row["model"] == "400m" and row["way"] != "one device":
        pytest.skip("their memory is that of one device")
    way = [] if row["way"] == "one device" else [f"train/{row['way']}.yaml"]
    rows = int(row["batch_size"]) * int(row["devices"])
    result = estimated(
        "gated_deltanet.yaml",
        f"size/{row['model']}.yaml",
        *way,
        *TEXT,
        f"data.batch_size={rows}",
        on=f"{row['devices']}xH200",
    )
    assert sum(result.memory.values()) == pytest.approx(float(row["peak_gib"]), rel=MEMORY)
    assert result.hours is not None
    assert rows * 4096 / result.hours / 3600 == pytest.approx(float(row["tokens_per_second"]), rel=TIME)


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row['config']} on {row['on']}") for row in FITS])
def test_memory_and_time_of_recipes(row: dict[str, str]):
    result = estimated(f"{row['config']}.yaml", "recipe/400m.yaml", on=row["on"])
    assert sum(result.memory.values()) == pytest.approx(float(row["measured_gib"]), rel=MEMORY)
    assert result.hours is not None
    assert result.tokens is not None
    seconds = 3600 * result.hours * 128 * 4096 / result.tokens
    assert seconds == pytest.approx(float(row["measured_seconds"]), rel=TIME)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["60M", "1.3B"])
def test_time_at_other_sizes(size: str):
    from reproductions.cost_over_size import config_of

    measured = csv.DictReader((MEASURED / "cost_over_size_h100.csv").open())
    for row in measured:
        if row["mode"] != "captured" or row["size"] != size or row["library"] or row["model"] == "h2":
            continue
        if (row["model"], size) == ("attention", "60M"):
            continue  # measured before rotary positions had a kernel, which takes a quarter off a small step
        config = configs.read(*config_of(row["model"], size))
        model = configs.from_config(config, "meta").bfloat16()
        rows, length, parts = int(row["batch_size"]), int(row["length"]), int(row["micro_batches"])
        passed = training_pass(model, rows, length, "H100")
        seconds = step_seconds(model, passed, "H100", micro_batches=parts)
        assert 1000 * seconds == pytest.approx(float(row["step_ms"]), rel=TIME)


def test_a_recipe_before_it_is_trained(capsys: pytest.CaptureFixture[str]):
    result = zoo.fit("gla.yaml", "recipe/400m.yaml", dry_run=True, on="8xA100-80GB")
    row = result.row
    assert row["tokens"] == 15259 * 128 * 4096
    assert row["shards"] == pytest.approx(2 * row["tokens"] / GIB)
    assert row["checkpoints"] == pytest.approx((2 + 15259 // 5000) * 12 * row["parameters"] / GIB)
    assert {"fla_gla", "transformers"} <= set(row["layouts"])
    (caution,) = row["cautions"]  # the text is not here yet
    assert re.match(r"data\.(path|tokenizer): .*does not exist; ", caution)
    assert not result.folder.exists()
    printed = capsys.readouterr().out
    assert "8 × A100 80GB" in printed
    assert "fla_gla" in printed


def test_what_saves_memory():
    def memory(*items: str) -> dict[str, float]:
        return dict(estimated("gated_deltanet.yaml", "recipe/160m.yaml", *items, on="8xH100").memory)

    plain, saved = memory(), memory("train/zero3.yaml", "activation_checkpointing=1", "rows_per_device=8")
    assert saved["weights"] == pytest.approx(plain["weights"] / 8)
    assert saved["optimiser"] == pytest.approx(plain["optimiser"] / 8)
    assert saved["activations"] < plain["activations"] / 4
    assert memory("train/zero1.yaml")["gradients"] == pytest.approx(plain["weights"])
    assert memory("train/fsdp.yaml")["gradients"] == pytest.approx(plain["weights"] / 8)


@pytest.mark.parametrize(
    ("items", "on", "sentence"),
    [
        ((), "8xFOO", "on: '8xFOO' must be a number and a GPU, such as 8xH100; known are B200, H200"),
        ((), "0xH100", "on: '0xH100' must be"),
        ((), "2H200", "on: '2H200' must be a number and a GPU, such as 8xH100; did you mean 2xH200?"),
        ((), "h100x8", "on: 'h100x8' must be a number and a GPU, such as 8xH100; did you mean 8xH100?"),
        (("trainer.devices=4",), "8xH100", "on: 8xH100 has 8 GPUs, but trainer.devices and num_nodes make 4"),
    ],
)
def test_gpus_that_cannot_be(items: tuple[str, ...], on: str, sentence: str):
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        forecast(parsed("gla.yaml", *items), on)


@pytest.mark.slow
def test_a_size_that_is_missed_is_told_once(caplog: pytest.LogCaptureFixture):
    estimated("gla.yaml", "model.nominal_size=9e6", on="H100")
    assert caplog.text.count("model.nominal_size is 9.0M parameters") == 1


def test_gpus_without_a_dry_run():
    with pytest.raises(UserError, match=r"^on: 8xH100 is for an estimate without training; add dry_run"):
        zoo.fit("gla.yaml", on="8xH100")


def test_data_without_tokens():
    with pytest.raises(UserError, match=r"^dry_run: counts the tokens of a language model; Images"):
        forecast(parsed("image/digits.yaml"))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["trainer.strategy=ddpp"], "trainer.strategy: ddpp is unknown; did you mean 'ddp'?"),
        (["data.batch_size=100"], "data.batch_size: 100 counts the rows of all devices, so it must be a multiple of"),
        (["context_parallel=3"], "context_parallel: 3 needs a multiple of 3 devices, not 8"),
        (["train/zero1.yaml", "train/muon.yaml"], "optim.optimizer is Muon, which needs whole matrices"),
        (["data.vocab_size=40000"], "model.vocab_size: 32000 is smaller than the tokenizer's 40000 tokens"),
        (["data.tokenizer=null", "data.vocab_size=10"], "data.vocab_size is 10; a byte-level tokenizer needs"),
        (["data.sequence_length=0"], "data.sequence_length is 0; it must be at least 1"),
    ],
)
def test_it_refuses_what_fit_refuses(items: list[str], message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        zoo.fit("gdn_h2.yaml", "recipe/60m.yaml", *items, dry_run=True, on="8xH100")


@pytest.mark.slow
def test_text_that_is_not_here_yet():
    def sentences(path: str) -> list[str]:
        return estimated("gla.yaml", f"data.path={path}", on="H100").cautions

    assert not sentences("embedded:library")
    with pytest.raises(UserError) as refused:
        zoo.fit("gla.yaml", "data.path=missing")
    assert sentences("missing") == [str(refused.value)]


@pytest.mark.slow
def test_a_run_that_cannot_be_continued(finished: Path):
    run = finished / "runs" / "done"
    for change in ("model.hidden_size=64", "trainer.max_steps=2", "optim.eps=0.1"):
        sentences = []
        for dry in (False, True):
            with pytest.raises(UserError) as refused:
                zoo.fit(change, resume=run, dry_run=dry)
            sentences.append(str(refused.value))
        assert sentences[0] == sentences[1]
    assert zoo.fit("trainer.max_steps=8", resume=run, dry_run=True).row["tokens"] == 8 * 2 * 32


@pytest.mark.slow
def test_memory_of_optimisers():
    def gib(*items: str) -> float:
        return estimated("gdn_h2.yaml", "recipe/60m.yaml", *items, on="H100").memory["optimiser"]

    model = zoo.build("gdn_h2.yaml", "recipe/60m.yaml", device="meta")
    assert gib() == gib("optim.optimizer=torch.optim.Adafactor") == pytest.approx(8 * model.num_parameters() / GIB)
    matrices = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    assert gib("train/muon.yaml") == pytest.approx((8 * model.num_parameters() - 4 * matrices) / GIB)
    assert gib("optim.optimizer=torch.optim.SGD") == 0


def test_names_of_precisions_and_of_strategies():
    def memory(*items: str) -> float:
        return sum(estimated("gdn_h2.yaml", "recipe/60m.yaml", *items, on="8xH100").memory.values())

    assert memory() < memory("trainer.precision=32") == pytest.approx(memory("trainer.precision=32-true"), rel=1e-3)
    assert memory() > memory("trainer.strategy=fsdp") == pytest.approx(memory("train/fsdp.yaml"), rel=1e-3)


def test_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str]):
    zoo.fit("gdn_h2.yaml", "recipe/1.5b.yaml", dry_run=True, on="8x4090")
    printed = " ".join(capsys.readouterr().out.split())
    assert "of 24 GiB, which does not fit" in printed
    assert "micro-batches of 4 rows on each of 8 GPUs (ddp)" in printed
    assert "use train/checkpointing.yaml" in printed


def test_a_teacher_counts(tmp_path: Path):
    teacher = exported(tmp_path / "teacher", "transformer")
    student = zoo.linearise(teacher, tmp_path / "student", mixer="GatedDeltaNet", keep=[3]).folder

    def of(*items: str) -> Forecast:
        data = ("data=MarkovChain", "data.vocab_size=64", "data.batch_size=8", "data.sequence_length=512")
        trainer = ("trainer.precision=bf16-mixed", "trainer.max_steps=9")
        return estimated(f"{student}/config.yaml", *data, *trainer, *items, on="H100")

    alone, logits = of(), of(f"teacher.checkpoint={teacher}")
    layers = of(f"teacher.checkpoint={teacher}", "teacher.match=layers")
    model = zoo.load(teacher)
    assert alone.memory["teacher"] == 0
    for each in (logits, layers):
        assert each.memory["teacher"] == pytest.approx(4 * model.num_parameters() / GIB)
    forward = model.flops(512) / 512 * (logits.tokens or 0)
    assert logits.flops == pytest.approx(alone.flops + forward)
    assert forward < layers.flops < logits.flops
    assert logits.memory["gradients"] == alone.memory["gradients"]
    trained = sum(x.numel() for mixer in zoo.load(student).mixers[:3] for x in mixer.parameters())
    assert layers.memory["gradients"] == pytest.approx(4 * trained / GIB)
    assert layers.memory["activations"] < alone.memory["activations"]
    assert logits.hours is not None
    assert logits.hours > (alone.hours or 0)
    with pytest.raises(UserError, match=r"teacher\.checkpoint: there is nothing at"):
        of("teacher.checkpoint=missing")
