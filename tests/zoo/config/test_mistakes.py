"""Mistakes that people make, each with the whole sentence that answers it."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

import cli
import zoo
from kernels import UserError

pytestmark = pytest.mark.slow

FILES = {
    "made_mixers.py": "class Mine: ...\n",
    "null_character.py": "\0",
    "folder.py/note.txt": "",
    "run.yaml": "model: {stack: Uniform}\n",
    "runs/young/config.yaml": "",
    "papers/note.txt": "",
    "runs/first_try/checkpoints/last.ckpt": "",
    "runs/several/first/checkpoints/last.ckpt": "",
}
# what an answer begins with: "KEY: unknown key; did you mean 'NAME'?"
MEANT = {
    "fit --config gdn_h2.yaml --max_steps=5": ("max_steps", "trainer.max_steps"),
    "fit --config gdn_h2.yaml --lr=1e-3": ("lr", "optim.learning_rate"),
    "fit --config gdn_h2.yaml --wd=0.1": ("wd", "optim.weight_decay"),
    "fit --config gdn_h2.yaml --batch=8": ("batch", "data.batch_size"),
    "fit --config gdn_h2.yaml --layers=8": ("layers", "model.num_layers"),
    "fit --config gdn_h2.yaml --heads=8": ("heads", "model.num_heads"),
    "fit --config gdn_h2.yaml --model.dim=3": ("model.dim", "hidden_size"),
    "fit --config gdn_h2.yaml --model.hidden_dim=3": ("model.hidden_dim", "hidden_size"),
    "fit --config gla.yaml --model.stack.factor=4": ("model.stack.factor", "model.stack.mixer.factor"),
    "fit --config gdn_h2.yaml --seed=1": ("seed", "seed_everything"),
    "fit --config gdn_h2.yaml --steps=1": ("steps", "trainer.max_steps"),
    "fit --config gdn_h2.yaml --device=cpu": ("device", "trainer.accelerator"),
    "fit --config gdn_h2.yaml --gpus=1": ("gpus", "trainer.devices"),
    "fit --config gdn_h2.yaml --precision=16": ("precision", "trainer.precision"),
    "fit --config gdn_h2.yaml --model.n_layers=3": ("model.n_layers", "num_layers"),
    "fit --config gdn_h2.yaml --model.d_model=3": ("model.d_model", "hidden_size"),
    "fit --config gdn_h2.yaml --trainer.lr=3": ("trainer.lr", "optim.learning_rate"),
    "fit --config gdn_h2.yaml --optim.lr=3": ("optim.lr", "learning_rate"),
    "fit --config gdn_h2.yaml --optim.beta1=3": ("optim.beta1", "betas"),
    "fit --config gdn_h2.yaml --trainer.epochs=3": ("trainer.epochs", "max_epochs"),
    "fit --config gdn_h2.yaml --data.batch=3": ("data.batch", "batch_size"),
    "fit --config gdn_h2.yaml --data.seq_len=3": ("data.seq_len", "sequence_length"),
    "fit --config gdn_h2.yaml --data.file=x.txt": ("data.file", "path"),
    "fit --config gdn_h2.yaml --checkpoint.every_n_steps=3": ("checkpoint.every_n_steps", "checkpoints.every_n_steps"),
    "fit --config gdn_h2.yaml --name=first": ("name", "run"),
    "fit --config gdn_h2.yaml --output=first": ("output", "run"),
    "fit --config gla.yaml --model.mixer=GLA": ("model.mixer", "model.stack.mixer"),
    "fit --config gla.yaml --model.stack.mixers=GLA": ("model.stack.mixers", "mixer"),
    "fit --confg gdn_h2.yaml": ("confg", "config"),
    "fit --checkpoint runs/missing": ("checkpoint", "resume"),
    "sweep --config sweep/heads.yaml --seed=3": ("seed", "seeds"),
    "sweep --config sweep/heads.yaml --max_steps=3": ("max_steps", "trainer.max_steps"),
    "sweep --config sweep/heads.yaml --job=3": ("job", "jobs"),
    "compare gla.yaml --model.stack.factor=3": ("model.stack.factor", "model.stack.mixer.factor"),
    "generate --checkpoint runs/missing --promt x": ("promt", "prompt"),
    "generate --checkpoint runs/missing --max_tokens 5": ("max_tokens", "max_new_tokens"),
    "generate --checkpoint runs/missing --temp 5": ("temp", "temperature"),
    "bench kernels --op=delta_rule": ("op", "ops"),
    "bench training --config gla.yaml --max_steps=3": ("max_steps", "steps"),
    "bench decode --batch=3 --config gla.yaml": ("batch", "batch_sizes"),
    "doctor --out=x": ("out", "output"),
    "fit --config gla.yaml --print_config --max_steps=3": ("max_steps", "trainer.max_steps"),
    "fit --config gla.yaml --model.stack.mixer.num_head=2": (
        "model.stack.mixer.num_head",
        "model.stack.mixer.mixer.num_heads",
    ),
    "fit --config gla.yaml --model.stack.mixer.mixer.num_head=2": ("model.stack.mixer.mixer.num_head", "num_heads"),
    "fit --config gla.yaml --smaples.seed=2": ("smaples.seed", "samples.seed"),
    "fit --config gla.yaml --model.stack.num_heads=2": ("model.stack.num_heads", "model.stack.mixer.mixer.num_heads"),
    "fit --config gdn_h2.yaml --model.stack.secnd.factor=2": ("model.stack.secnd", "second"),
    "fit --config gla.yaml --optim=SGD --optim.init_args.momentun=0.9": ("optim.optimizer.momentun", "momentum"),
    "sweep --config sweep/heads.yaml --metrics=val_loss": ("metrics", "metric"),
    "evaluate --checkpoint runs/missing --task=passkey": ("task", "tasks"),
    "generate --resume runs/missing": ("resume", "checkpoint"),
}
ANSWERS = {
    "fit --config .": "config: '.' is neither a file nor one of configs/; . is a folder, and the config of a run is "
    "./config.yaml",
    "fit --config recipe/60m.yaml --config gla.yaml": "config: recipe/60m.yaml comes before the model, which would "
    "override it; name that first",
    "fit --config gla.yaml --foo.bar=1": "foo.bar: unknown key (--help lists them)",
    "fit --config gla.yaml --config='{model+: 1}'": "model+: unknown key; did you mean 'model'?",
    "fit --config gla.yaml --trainer.callbacks=[null]": "trainer.callbacks: null is not a Callback",
    "fit --config gla.yaml --data.path=[null]": "data.path: null is not text",
    "fit --config gla.yaml --data=..Mine": "data: '..Mine' cannot be imported, as there is no module '.' in this "
    "folder or installed; go to the folder that it is in, or add that to PYTHONPATH",
    "fit --config gla.yaml --data=null_character.Mine": "null_character is not Python (source code string cannot "
    "contain null bytes)",
    "fit --config gla.yaml --model.stack.dict_kwargs.foo=1": "model.stack.dict_kwargs: unknown key (allowed: mixer)",
    "fit --config gla.yaml --trainer.strategy=DDPStrategy --trainer.strategy.dict_kwargs=3": (
        "trainer.strategy.dict_kwargs: 3 is not a mapping"
    ),
    "fit --config gdn_h2.yaml --factor=4": (
        "factor: unknown key; did you mean 'model.stack.first.factor' or 'model.stack.second.factor'?"
    ),
    "fit --config gdn_h2.yaml --model.stack.factor=4": (
        "model.stack.factor: unknown key; did you mean 'model.stack.first.factor' or 'model.stack.second.factor'?"
    ),
    "fit --config gdn_h2.yaml --mixer=GLA": (
        "mixer: unknown key; did you mean 'model.stack.first.mixer' or 'model.stack.second.mixer'?"
    ),
    "fit --config gla.yaml --model.stack.mixer=GAL": (
        "model.stack.mixer: 'GAL' is not a known TokenMixer; did you mean 'GLA'?"
    ),
    "fit --config gla.yaml --model.stack.mixer=made_mixers.Missing": (
        "model.stack.mixer: the module 'made_mixers' has no 'Missing'"
    ),
    "fit --config gla.yaml --model.stack.mixer=made_mixers.Mine": (
        "model.stack.mixer: made_mixers.Mine is not a TokenMixer"
    ),
    "fit --config gla.yaml --model.stack.mixer=made_mixers": (
        "model.stack.mixer: 'made_mixers' is a module; name a class in it, made_mixers.CLASS"
    ),
    "fit --config gla.yaml --model.stack.mixer=nomod.Mixer": (
        "model.stack.mixer: 'nomod.Mixer' cannot be imported, as there is no module 'nomod' in this folder or"
        " installed; go to the folder that it is in, or add that to PYTHONPATH"
    ),
    "fit --config gla.yaml --model.stack.mixer=Mine": (
        "model.stack.mixer: Mine is in made_mixers.py, which is not imported; write made_mixers.Mine"
    ),
    "fit --config gla.yaml --model.stack.mixer=made_mixers.mine": (
        "model.stack.mixer: the module 'made_mixers' has no 'mine'; did you mean 'Mine'?"
    ),
    "fit -config gdn_h2.yaml": "'-config': options start with two dashes, --config",
    "fit gdn_h2.yaml": "'gdn_h2.yaml': an argument without a key; write --config gdn_h2.yaml",
    "fit --config": "--config has no value; options are written --key=value",
    "fit": "model.stack: missing; give a config with a model, such as --config gdn_h2.yaml",
    "fit --config gla.yaml --trainer.max_steps=none": "trainer.max_steps: 'none' is not a whole number",
    "fit --config gla.yaml --data.batch_size=null": "data.batch_size: null is not a whole number",
    "fit --config gla.yaml --data.vocab_size=null": (
        "data.vocab_size: null needs data.tokenizer; a tokenizer that is trained has a size"
    ),
    "fit --config gla.yaml --model.vocab_size=none": "model.vocab_size: 'none' is text; for no value, write null",
    "fit --config gla.yaml --trainer.max_steps=1.5": "trainer.max_steps: 1.5 is not a whole number",
    "fit --config gla.yaml --optim.learning_rate=fast": "optim.learning_rate: 'fast' is not a number",
    "fit --config gla.yaml --compile=maybe": "compile: 'maybe' is not true or false",
    "fit --config gla.yaml --backend=cuda": "backend: 'cuda' is not one of auto, triton, torch, reference",
    "fit --config gla.yaml --trainer.precision=fp16": (
        "trainer.precision: 'fp16' is not one of 64, 32, 16, transformer-engine, transformer-engine-float16, "
        "16-true, 16-mixed, bf16-true, bf16-mixed, 32-true, 64-true, bf16"
    ),
    "fit --config gla.yaml --optim.schedule=cosin": (
        "optim.schedule: 'cosin' is not one of cosine, constant, wsd, inverse_sqrt, nor a known class; did "
        "you mean 'cosine'?"
    ),
    "fit --config gla.yaml --data=TextDat": "data: 'TextDat' is not a known class; did you mean 'TextData'?",
    "fit --config gla.yaml --data=GLA": "data: GLA does not fit here, where a LightningDataModule is needed",
    "fit --config gla.yaml --model=GLA": "model: 'GLA' is not a mapping",
    "fit --config gla.yaml trainer.max_steps=5": (
        "'trainer.max_steps=5': options start with two dashes, --trainer.max_steps=5"
    ),
    "fit --config sweep/heads.yaml": (
        "base: a key of sweeps, not of runs; this config is for python cli.py sweep --config FILE"
    ),
    "fit --resume runs/missing": "resume: there is no run runs/missing; the latest is runs/first_try",
    "fit --resume runs/first_tyr": "resume: there is no run runs/first_tyr; did you mean 'first_try'?",
    "fit --resume runs/several": (
        "resume: runs/several is a folder of runs; name one of them, such as runs/several/first"
    ),
    "fit --resume runs/young": (
        "resume: the run runs/young has no checkpoint to continue from; start it again, with its config and --run young"
    ),
    "fit --resume papers": "resume: papers is not a run, whose folder has config.yaml and checkpoints/",
    "train --config gla.yaml": (
        "'train' is not a verb; did you mean 'fit'? (verbs: fit, validate, test, predict, generate, evaluate,"
        " inspect, export, convert, statex, linearise, compare, sweep, bench, scaling, doctor, mixers)"
    ),
    "sweep": "sweep: missing; give --config sweep/heads.yaml, or a file of your own (tutorial 06)",
    "sweep --config gla.yaml": (
        "model: a key of runs, not of sweeps; name the config of a run as the base of a sweep (tutorial 06)"
    ),
    "sweep --config run.yaml": (
        "model.stack: a key of runs, not of sweeps; name the config of a run as the base of a sweep (tutorial 06)"
    ),
    "compare gla.yaml gla.yaml": (
        "config: gla.yaml and gla.yaml have the same name, gla; copy one to a file of another name"
    ),
    "compare ablate/expand_4.yaml mamba1.yaml": "model.stack.mixer.factor: Mamba1 has no matrix state to expand",
    "validate": "checkpoint: validate needs one, --checkpoint runs/NAME",
    "validate --checkpoint gla.yaml": (
        "checkpoint: gla.yaml is a config, not a trained model; train it by python cli.py fit --config "
        "gla.yaml, and name the folder of that run"
    ),
    "validate --checkpoint runs/missing": "checkpoint: there is nothing at runs/missing",
    "validate --checkpoint runs/young": "checkpoint: the folder runs/young holds no checkpoints/last.ckpt",
    "generate": "checkpoint: missing; write --checkpoint runs/NAME",
    "evaluate --checkpoint runs/a,runs/b --tasks=passkey": (
        "checkpoint: there is nothing at runs/a,runs/b; several are written --checkpoint A --checkpoint B"
    ),
    "evaluate --tasks=needle": "tasks: 'needle' is not a task; if it is one of lm-eval, write lm_eval/needle "
    "(--tasks=list shows all of them)",
    "fit --resume runs/a --resume runs/b": "resume: is given twice; one run is continued at a time",
    "bench training": "config: missing; give a model, such as --config gated_deltanet.yaml",
    "bench kernel": "bench: 'kernel' is not one of kernels, training, decode; did you mean 'kernels'?",
    "scaling fit": "runs: missing; name at least one: python cli.py scaling fit RUNS …",
    "fit --config gla.yaml --optim.optimizer.lr=1": (
        "optim.optimizer: no class is named of which lr is an argument; write --optim.optimizer=CLASS before"
    ),
    "fit --config gla.yaml --trainer.callbacks=lightning.pytorch.callbacks.EarlyStopping": (
        "trainer.callbacks: EarlyStopping needs a value for monitor, under init_args"
    ),
    "fit --config gla.yaml --optim.betas=[0.9]": "optim.betas: [0.9] is not a list of 2",
    "fit --config gla.yaml --optim.train_only=mixers": (
        "optim.train_only: 'mixers' is not a list, as [mixers] would be"
    ),
    "fit --config gla.yaml --model.stack=Uniform --model.stack.first=GLA": (
        "model.stack.first: unknown key (allowed: mixer)"
    ),
    "fit --config gla.yaml --optim.schedule=torch.optim.lr_scheduler.StepLR": (
        "optim.schedule: StepLR needs a value for step_size, under init_args"
    ),
    "fit --config 400m.yaml": (
        "config: '400m.yaml' is neither a file nor one of configs/; did you mean 'recipe/400m.yaml' or "
        "'size/400m.yaml'?"
    ),
    "fit --config zero2": "config: 'zero2' is neither a file nor one of configs/; did you mean 'train/zero2.yaml'?",
    "fit --config runs/young": (
        "config: 'runs/young' is neither a file nor one of configs/; runs/young is a folder, and the config "
        "of a run is runs/young/config.yaml"
    ),
    "generate --checkpoint runs/missing --max_new_tokens=many": "max_new_tokens: 'many' is not a whole number",
}
IN_PYTHON = [
    (zoo.fit, ["gla.yaml", "max_steps=5"], "max_steps: unknown key; did you mean 'trainer.max_steps'?"),
    (zoo.build, ["gla.yaml", "hidden_size=5"], "hidden_size: unknown key; did you mean 'model.hidden_size'?"),
    (zoo.build, ["glaa"], "config: 'glaa' is neither a file nor one of configs/; did you mean 'gla.yaml'?"),
    (zoo.build, [], "model.stack: missing; give a config with a model, such as --config gdn_h2.yaml"),
    (zoo.build, ["run.yaml"], "model.stack: Uniform needs a value for mixer, under init_args"),
    (zoo.build, ["gla.yaml", "factor=5"], "factor: unknown key; did you mean 'model.stack.mixer.factor'?"),
    (zoo.build, ["gla.yaml", {"lr": 1}], "lr: unknown key; did you mean 'optim.learning_rate'?"),
    (zoo.build, ["gla.yaml", {"model": {"layers": 1}}], "model.layers: unknown key; did you mean 'num_layers'?"),
]


@pytest.fixture
def desk_with_files(desk: Path) -> Path:
    for name, text in FILES.items():
        (desk / name).parent.mkdir(parents=True, exist_ok=True)
        (desk / name).write_text(text)
    (desk / "loop.py").symlink_to("loop.py")
    os.mkfifo(desk / "pipe.py")
    return desk


@pytest.mark.usefixtures("desk_with_files")
@pytest.mark.parametrize("line", [*MEANT, *ANSWERS])
def test_the_answer_to_a_command(line: str) -> None:
    with pytest.raises(UserError) as raised:
        cli.run(shlex.split(line))
    if line in MEANT:
        key, meant = MEANT[line]
        assert raised.value.on_command_line == f"{key}: unknown key; did you mean {meant!r}?"
    else:
        assert raised.value.on_command_line == ANSWERS[line]


@pytest.mark.usefixtures("desk_with_files")
@pytest.mark.parametrize(("function", "arguments", "answer"), IN_PYTHON)
def test_the_answer_in_python(function: Any, arguments: list[Any], answer: str) -> None:
    with pytest.raises(UserError) as raised:
        function(*arguments)
    assert raised.value.on_command_line == answer


@pytest.mark.parametrize("line", ["--version", "fit --version", "bench"])
def test_what_is_answered_at_once(line: str) -> None:
    assert cli.run(shlex.split(line)) == 0


@pytest.mark.parametrize("line", ["help fit", "--help fit", "fit --help optim.eps"])
def test_help_wherever_it_is_asked_for(line: str) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.run(shlex.split(line))
