"""Any optimiser and any schedule of PyTorch, through the command line: named, checked, continued exactly."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import zoo
from zoo.config.find import CONFIGS
from zoo.train.muon import Muon
from zoo.train.optim import Optimisation, build_optimizer, parameter_groups

from .commands import FIT, Command, run_process

SCHEDULES = "torch.optim.lr_scheduler"
# one kind of layer, so that the config is read in half the time
PLAIN = ("fit", "--config=gla.yaml", "--config=tiny.yaml", "--model.num_layers=1")
SHORT = (*PLAIN, "--optim.warmup_steps=null", "--checkpoints.keep_every_n_steps=1")
PROJECTIONS = {"in_proj", "o_proj", "out_proj", "down_proj", "g_up", "decay_up", "kv_up", "q_up", "x_proj", "dt_proj"}
PROJECTIONS |= {"r_proj", "k_proj", "v_proj", "up_proj", "down", "up"}  # of RWKV-7, whose inputs differ
OPTIMISERS = {
    "muon": ("--config=train/muon.yaml",),
    "sgd": ("--optim.class_path=torch.optim.SGD", "--optim.init_args.momentum=0.9"),
    "short": ("--optim=NAdam", "--optim.optimizer.betas=[0.8,0.9]"),
    "adafactor": ("--optim.optimizer=torch.optim.Adafactor",),
    "one_cycle": (
        f"--optim.schedule={SCHEDULES}.OneCycleLR",
        "--optim.schedule.init_args={max_lr: 0.01, total_steps: 9}",
    ),
    "milestones": (f"--optim.schedule={SCHEDULES}.MultiStepLR", "--optim.schedule.milestones=[1,3]"),
}
# built only when the data is ready
LATE_MISTAKES = {
    (
        "--optim.optimizer=torch.optim.Muon",
    ): "optim.optimizer: Muon only supports 2D parameters whereas we found a param",
    ("--optim=SGD", "--optim.optimizer.momentum=-1"): "optim.optimizer: Invalid momentum value: -1.0",
    ("--optim=Adam", "--optim.optimizer.weight_decay=0.3"): "optim.optimizer.init_args.weight_decay is 0.3: set optim.",
    ("--optim.optimizer={}",): "optim.optimizer: names no class; write --optim.optimizer=CLASS",
    ("--optim=LBFGS",): "optim.optimizer: LBFGS doesn't support per-parameter options (parameter groups)",
    ("--optim=SparseAdam",): "optim.optimizer is SparseAdam, but the gradients here are dense; use torch.optim.Adam.",
    (
        f"--optim.schedule={SCHEDULES}.ReduceLROnPlateau",
    ): "optim.schedule is ReduceLROnPlateau, which follows a loss; it must be",
    ("--optim.schedule=OneCycleLR", "--optim.schedule.max_lr=1"): "optim.schedule: You must define either total_steps",
    ("--config=train/muon.yaml", "--optim.train_only=[embeddings.*]"): "optim.optimizer is Muon, but no trained param",
    ("--config=train/muon.yaml", "--optim.optimizer.ns_steps=100"): "optim.optimizer.ns_steps is 100, but must be from",
}


def rows(run: Path) -> dict[int, tuple[float, float]]:
    """Step → loss and learning rate, as last written."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["train_loss"], row["learning_rate"]) for row in lines if "train_loss" in row}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_continued_run_is_the_whole_one(command: Command, desk: Path, name: str):
    command(*SHORT, *OPTIMISERS[name], "--run=whole").ok()
    whole, cut = desk / "runs" / "whole", desk / "runs" / "cut"
    (cut / "checkpoints").mkdir(parents=True)
    shutil.copy(whole / "checkpoints" / "step-00000002.ckpt", cut / "checkpoints" / "last.ckpt")
    command("fit", "--resume=cut").ok()
    assert rows(cut) == {step: rows(whole)[step] for step in (1, 2, 3)}  # 1 is in the checkpoint
    saved = yaml.safe_load((whole / "config.yaml").read_text())["optim"]
    repeated = yaml.safe_load((cut / "config.yaml").read_text())["optim"]
    assert saved == repeated
    assert isinstance(saved["optimizer"] or saved["schedule"], dict)


@pytest.mark.slow
def test_a_schedule_moves_the_rate(command: Command, desk: Path):
    assert command(*SHORT, *OPTIMISERS["milestones"], "--optim.learning_rate=1", "--run=r").code == 0
    rates = [rate for _, rate in rows(desk / "runs" / "r").values()]
    assert rates == pytest.approx([1, 0.1, 0.1, 0.01])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", LATE_MISTAKES, ids=" ".join)
def test_a_mistake_is_one_sentence(command: Command, arguments: tuple[str, ...]):
    done = command(*SHORT, *arguments).refused()
    assert done.err.splitlines()[-1].startswith(f"error: {LATE_MISTAKES[arguments]}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("--optim=Adam", "optim.optimizer is torch.optim.Adam, but the checkpoint was trained with null; resume with "),
        ("--optim.schedule=LinearLR", "optim.schedule is torch.optim.lr_scheduler.LinearLR, but the checkpoint was "),
        ("--optim.train_only=[layers.0.*]", "optim.train_only is ['layers.0.*'], but the checkpoint was trained with "),
        ("--optim.betas=[0.5,0.6]", "optim.betas is [0.5, 0.6], but the checkpoint was trained with [0.9, 0.95]"),
    ],
)
def test_what_a_checkpoint_would_override_is_refused(
    command: Command, finished: Path, desk: Path, changed: str, said: str
):
    shutil.copytree(finished / "runs" / "done", desk / "runs" / "r")
    done = command("fit", "--resume=r", "--trainer.max_steps=5", changed).refused()
    assert done.err.splitlines()[-1].startswith(f"error: {said}")


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", [(), ("--config=train/muon.yaml",)], ids=["adamw", "muon"])
def test_rate_and_weight_decay_change_in_the_middle_of_a_run(command: Command, desk: Path, optimiser: tuple[str, ...]):
    run = desk / "runs" / "r"
    assert command(*SHORT, *optimiser, "--optim.schedule=constant", "--optim.warmup_steps=0", "--run=r").code == 0
    steps, before = len(rows(run)), yaml.safe_load((run / "config.yaml").read_text())["optim"]
    changed = ("--optim.learning_rate=0.001", "--optim.weight_decay=0.5", f"--trainer.max_steps={steps + 2}")
    done = command("fit", "--resume=r", *changed).ok()
    rates = [rate for _, rate in rows(run).values()]
    assert rates == pytest.approx([before["learning_rate"]] * steps + [0.001] * 2)
    (state,) = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"]
    assert {group["weight_decay"] for group in state["param_groups"]} == {0.0, 0.5}
    assert f"from step {steps}: optim.learning_rate: {before['learning_rate']} → 0.001; " in done.out
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [(row["step"], row["key"], row["from"], row["to"]) for row in history] == [
        (steps, "optim.learning_rate", before["learning_rate"], 0.001),
        (steps, "optim.weight_decay", before["weight_decay"], 0.5),
        (steps, "trainer.max_steps", steps, steps + 2),
    ]
    fewer = command("fit", "--resume=r", f"--trainer.max_steps={steps}").refused()
    assert f"trainer.max_steps: {steps} is below step {steps + 2}, which the run has reached" in fewer.err
    assert command("fit", "--resume=r").code == 0  # complete, and unchanged
    assert len((run / "history.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("key", ["learning_rate", "weight_decay"])
def test_a_schedule_that_is_a_class_keeps_its_settings(command: Command, desk: Path, key: str):
    assert command(*SHORT, *OPTIMISERS["milestones"], "--run=r").code == 0
    done = command("fit", "--resume=r", "--trainer.max_steps=9", f"--optim.{key}=0.5").refused()
    assert done.err.splitlines()[-1].startswith(f"error: optim.{key} is 0.5, but the checkpoint was trained with")


@pytest.mark.slow
def test_the_history_is_that_of_the_weights(command: Command, desk: Path):
    """Changes of a continuation that was abandoned, or had no step left, are not in it."""
    run = desk / "runs" / "r"
    assert command(*SHORT, "--optim.schedule=constant", "--optim.warmup_steps=0", "--run=r").code == 0
    steps, config = len(rows(run)), (run / "config.yaml").read_text()
    assert command("fit", "--resume=r", "--optim.learning_rate=0.002").code == 0  # no step is left
    assert not (run / "history.jsonl").exists()
    assert (run / "config.yaml").read_text() == config
    longer = f"--trainer.max_steps={steps + 1}"
    assert command("fit", "--resume=r", longer, "--optim.learning_rate=0.002").code == 0
    earlier = run / "checkpoints" / "step-00000002.ckpt"
    assert command("fit", f"--resume={earlier}", longer, "--optim.learning_rate=0.001").code == 0
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [(row["step"], row["to"]) for row in history] == [(2, 0.001), (2, steps + 1)]
    for damaged in ('{"step": 1', "[1, 2]", '{"step": 0, "tokens": "x", "key": "a", "from": 1, "to": 2}'):
        (run / "history.jsonl").write_text(damaged)
        done = command("fit", "--resume=r", f"--trainer.max_steps={steps + 9}").refused()
        assert "history.jsonl: line 1 is not a change of a run; repair the file, or delete it" in done.err


@pytest.mark.slow
def test_another_formula_for_the_rate_may_continue(command: Command, finished: Path, desk: Path):
    shutil.copytree(finished / "runs" / "done", desk / "runs" / "r")
    assert command("fit", "--resume=r", "--trainer.max_steps=5", "--optim.schedule=constant").code == 0


@pytest.mark.slow
def test_a_config_may_name_it_as_lightning_does(command: Command, desk: Path):
    (desk / "sgd.yaml").write_text(
        "optim: {class_path: torch.optim.SGD, init_args: {momentum: 0.5}, weight_decay: 0}\n"
    )
    (desk / "nadam.yaml").write_text("optim: torch.optim.NAdam\n")
    printed = {}
    for name in ("sgd", "nadam"):
        done = command(*FIT, f"--config={name}.yaml", "--print_config").ok()
        printed[name] = yaml.safe_load(done.out)["optim"]
    assert printed["sgd"]["optimizer"]["init_args"]["momentum"] == 0.5
    assert printed["sgd"]["weight_decay"] == 0
    assert printed["nadam"]["optimizer"]["class_path"] == "torch.optim.NAdam"
    assert printed["nadam"]["learning_rate"] == 0.003  # of gdn_h2.yaml


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zoo.train.zero.Zero", "zoo.train.fsdp2.FSDP2"])
def test_muon_is_refused_where_matrices_are_sharded(desk: Path, shared_cache: Path, strategy: str):
    if strategy.endswith("Zero"):
        pytest.importorskip("deepspeed")
    sharded = (*FIT, f"--trainer.strategy.class_path={strategy}", "--config=train/muon.yaml")
    done = run_process(desk, shared_cache, *sharded, timeout=180).refused()
    said = "error: optim.optimizer is Muon, which needs whole matrices, and trainer.strategy shards them; use ddp"
    assert said in done.err


@pytest.mark.slow
def test_muon_takes_the_matrices_of_the_blocks():
    model = zoo.build("gdn_h2.yaml", "model.vocab_size=32", "model.hidden_size=32", "model.num_heads=2")
    optimizer = build_optimizer(model, Optimisation(optimizer=Muon))
    assert isinstance(optimizer, Muon)
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_algorithm = {
        hidden: [names[p] for group in optimizer.param_groups if group["hidden"] == hidden for p in group["params"]]
        for hidden in (True, False)
    }
    assert sorted(by_algorithm[True] + by_algorithm[False]) == sorted(names.values())  # each once
    assert all(name.startswith("layers.") and name.endswith("weight") for name in by_algorithm[True])
    assert "layers.0.mlp.down_proj.weight" in by_algorithm[True]
    assert {"embeddings.weight", "lm_head.weight", "layers.0.mixer.q_features.weight"} <= {*by_algorithm[False]}


@pytest.mark.slow
@pytest.mark.parametrize("config", [path.name for path in CONFIGS.glob("*.yaml")])
def test_muon_takes_projections_only(config: str):
    """Convolutions, decays and the vectors of gates are AdamW's, in every mixer."""
    model = zoo.build(config, "model.vocab_size=32", device="meta")
    hidden, *_ = parameter_groups(model, 0.1, split=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners = {names[id(parameter)].rsplit(".", 2)[1] for parameter in hidden["params"]}
    assert owners & {"in_proj", "r_proj"}  # RWKV-7 mixes the inputs of each projection, so they are not fused
    assert owners <= PROJECTIONS
    for parameter, rows in zip(hidden["params"], hidden["matrices"], strict=True):
        assert parameter.ndim == 2
        assert sum(rows) == parameter.shape[0]


def test_muon_orthogonalises_each_map_of_a_fused_projection():
    """One step without momentum or decay changes each map by a matrix whose singular values are about equal."""
    model = zoo.build("gated_deltanet.yaml", "model.vocab_size=32", "model.hidden_size=32", "model.num_heads=2")
    projection = model.layers[0].mixer.in_proj
    before = projection.weight.detach().clone()
    optimizer = build_optimizer(model, Optimisation(optimizer=Muon, learning_rate=0.01, weight_decay=0.0))
    torch.manual_seed(1)
    scale = torch.cat([torch.full((width, 1), 10.0**-n) for n, width in enumerate(projection.widths.values())])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    projection.weight.grad *= scale  # together, the small ones would hardly be changed at first, then all alike
    optimizer.step()
    for change in (projection.weight.detach() - before).split([*projection.widths.values()]):
        values = torch.linalg.svdvals(change) / (0.01 * 0.2 * max(change.shape) ** 0.5)
        assert 0.3 < values.min() < values.max() < 1.6


def test_a_checkpoint_of_muon_before_maps_were_apart_can_be_continued():
    """Its groups have no `matrices`, which are not taken from there."""
    model = zoo.build("gla.yaml", "model.vocab_size=32", "model.hidden_size=32", "model.num_heads=2")
    optimizer = build_optimizer(model, Optimisation(optimizer=Muon))
    assert all("matrices" not in group for group in optimizer.state_dict()["param_groups"])
    optimizer.load_state_dict(optimizer.state_dict())
    model(torch.zeros(1, 4, dtype=torch.long))[0].sum().backward()
    optimizer.step()


@pytest.mark.slow
def test_muon_is_torchs_muon_and_torchs_adamw():
    """A step is the step of PyTorch's two optimisers, each on its parameters and on each map of a projection."""
    models = [zoo.build("gla.yaml", "model.vocab_size=32", "model.hidden_size=32", "model.num_heads=2") for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    hidden, *others = parameter_groups(models[1], 0.1, split=True)
    ours = build_optimizer(models[0], Optimisation(optimizer=Muon, learning_rate=0.01))
    whole = [*zip(hidden["params"], hidden["matrices"], strict=True)]
    maps = [torch.nn.Parameter(part) for weight, rows in whole for part in weight.detach().split(rows)]
    theirs = [
        torch.optim.Muon(maps, 0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, 0.01, betas=(0.9, 0.95)),
    ]
    tokens = torch.randint(32, (2, 16))
    for _ in range(3):
        for model, optimizers in zip(models, ([ours], theirs), strict=True):
            model.zero_grad()
            model(tokens)[0].square().mean().backward()
            if model is models[1]:
                gradients = [part for weight, rows in whole for part in weight.grad.split(rows)]
                for part, gradient in zip(maps, gradients, strict=True):
                    part.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
