"""What somebody else saved runs nothing here, reads and writes nothing of ours; what is our own needs no word more."""

import copy
import itertools
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import mixers
import zoo
from kernels import UserError
from zoo.checkpoints.archive import save_sealed
from zoo.checkpoints.signature import sign
from zoo.files.atomic import atomic_write

from .commands import CLI, FIT, Command

Change = Callable[[dict[str, Any]], None]
TOUCH = "open('canary', 'w').close()"
EVIL = f"{TOUCH}\nclass Evil:\n    pass\ndef run(*args, **kwargs):\n    {TOUCH}\n"
CALLS: dict[str, Any] = {
    "cProfile": {"class_path": "cProfile.run", "init_args": {"statement": TOUCH}},
    "system": {"class_path": "os.system", "init_args": {"command": "touch canary"}},
    "getoutput": {"class_path": "subprocess.getoutput", "init_args": {"cmd": "touch canary"}},
    "runpy": {"class_path": "runpy.run_path", "init_args": {"path_name": "evil.py"}},
    "module here": {"class_path": "evil.Evil"},
    "function here": "evil.run",
    "shorthand": "os.abort",
    "our own, but no component": {
        "class_path": "zoo.experiments.runner.Runner",
        "init_args": {"command": ["touch", "canary"]},
    },
    "through our own module": {"class_path": "zoo.runs.folder.os.system", "init_args": {"command": "touch canary"}},
    "text that is YAML": '{class_path: os.system, init_args: {command: "touch canary"}}',
    "without a class_path": {"init_args": {"command": "touch canary"}},
    "with dict_kwargs": {"class_path": "mixers.TPE", "dict_kwargs": {"mixer": "evil.run"}},
}


def put(*path: str | int) -> Callable[[Any], Change]:
    """A change of a config: what to put at this place."""

    def of(value: Any) -> Change:
        def change(config: dict[str, Any]) -> None:
            place: Any = config
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = copy.deepcopy(value)

        return change

    return of


SECOND = ("model", "stack", "init_args", "second", "init_args")
PLACES = {
    "position": put("model", "position"),
    "mlp": put("model", "mlp"),
    "stack": put("model", "stack"),
    "mixer of a layer": put("model", "stack", "init_args", "first"),
    "mixer of an expansion": put(*SECOND, "mixer"),
    "expansion": put(*SECOND, "expansion"),
    "map of features": put(*SECOND, "mixer", "init_args", "qk", "map"),
    "decay": put(*SECOND, "mixer", "init_args", "decay"),
    "a number": put("model", "num_layers"),
    "a number deep": put(*SECOND, "factor"),
    "features": put(*SECOND, "mixer", "init_args", "qk"),
    "part of features": put(*SECOND, "mixer", "init_args", "qk", "conv"),
    "unknown key": put("model", "fancy"),
}
IN_MODEL: dict[str, Change] = {
    **{f"{call} as the position": PLACES["position"](value) for call, value in CALLS.items()},
    **{f"a call as the {place}": change(CALLS["cProfile"]) for place, change in PLACES.items()},
    **{f"a module as the {place}": change(CALLS["module here"]) for place, change in PLACES.items()},
    "dotted keys": lambda config: config["model"].update(
        {"position.class_path": "cProfile.run", "position.init_args.statement": TOUCH}
    ),
    "dotted keys deep": put(*SECOND, "expansion.class_path")("evil.Evil"),
    "no mapping": put("model")("evil.yaml"),
    "a file of a component": put("model", "position")("evil.yaml"),
    "a list": put("model", "position")([CALLS["cProfile"]]),
}
PROFILE = {"class_path": "cProfile.run", "init_args": {"statement": TOUCH}}
LAMBDA = {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"setup": "evil.run"}}
PATHS = (
    ("data", "init_args", "path"),
    ("data", "init_args", "shards"),
    ("data", "init_args", "tokenizer"),
    ("checkpoints", "folder"),
)
IN_RUN: dict[str, Change] = {
    "callback": put("trainer", "callbacks")([LAMBDA]),
    "callback in short": put("trainer", "callbacks")("LambdaCallback"),
    "callback here": put("trainer", "callbacks")([{"class_path": "evil.Evil"}]),
    "callback from a file": put("trainer", "callbacks")(["evil.yaml"]),
    "more callbacks": put("trainer", "callbacks+")([LAMBDA]),
    "logger": put("trainer", "logger")([{"class_path": "evil.run"}]),
    "logger of Lightning": put("trainer", "logger")(
        {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "canary"}}
    ),
    "strategy": put("trainer", "strategy")({"class_path": "evil.run"}),
    "plugin": put("trainer", "plugins")([PROFILE]),
    "profiler": put("trainer", "profiler")({"class_path": "evil.Evil"}),
    "profiler in short": put("trainer", "profiler")("PyTorchProfiler"),
    "folder": put("trainer", "default_root_dir")("canary"),
    "number of the trainer": put("trainer", "devices")(PROFILE),
    "data class": put("data", "class_path")("evil.Evil"),
    "data function": put("data")(PROFILE),
    "data in short": put("data")("evil.Evil"),
    "data of Lightning": put("data", "class_path")("lightning.pytorch.demos.boring_classes.BoringDataModule"),
    "call in the data": put("data", "init_args", "vocab_size")(PROFILE),
    "data path": put("data", "init_args", "path")("secret.txt"),
    "data URL": put("data", "init_args", "path")(["http://127.0.0.1:9/x.txt"]),
    "tokenizer": put("data", "init_args", "tokenizer")("secret.json"),
    "shards": put("data", "init_args", "shards")("canary"),
    "task of the data": put("data")({"class_path": "zoo.data.TokenTasks", "init_args": {"tasks": ["evil.Evil"]}}),
    "sources": put("data")(
        {"class_path": "zoo.data.MixedText", "init_args": {"sources": {"a": {"path": "secret.txt"}}}}
    ),
    "optimiser": put("optim", "schedule")(PROFILE),
    "callback of ours": put("samples", "prompts")([PROFILE]),
    "compile": put("compile")(PROFILE),
    "folder of checkpoints": put("checkpoints", "folder")("../../../canary"),
    "option of a verb": put("output")("canary"),
    "more configs": put("config")(["evil.yaml"]),
    "dotted key": put("trainer.callbacks")([LAMBDA]),
    **{
        f"a path behind embedded: as {'.'.join(map(str, place))}": put(*place)("embedded:/../../../canary")
        for place in PATHS
    },
    **{
        f"a path behind synthetic: as {'.'.join(map(str, place))}": put(*place)("synthetic:needles/../canary")
        for place in PATHS
    },
    **{f"built-in text as {'.'.join(map(str, place))}": put(*place)("embedded:library") for place in PATHS[1:]},
    "built-in text in a list of files": put("data", "init_args", "path")(["embedded:library"]),
    "a data set by name": put("data", "init_args", "path")("datasets:someone/texts"),
    "built-in text that does not exist": put("data", "init_args", "path")("embedded:else"),
    "built-in text and a line": put("data", "init_args", "path")("synthetic:needles:2000\n"),
    "source behind embedded:": put("data")(
        {"class_path": "zoo.data.MixedText", "init_args": {"sources": {"a": {"path": "embedded:/../../secret.txt"}}}}
    ),
    "validation set behind embedded:": put("data", "init_args", "validation_sets")(
        {"a": {"path": "embedded:/../secret.txt"}}
    ),
    "a source called as a harmless argument": put("data")(
        {"class_path": "zoo.data.MixedText", "init_args": {"sources": {"text_field": {"path": "secret.txt"}}}}
    ),
    "a set called as a harmless argument": put("data", "init_args", "validation_sets")({"eos_token": "secret.txt"}),
}


class Bomb:
    """Pickled, it is a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch canary",)


@pytest.fixture
def theirs(finished: Path, desk: Path) -> Path:
    """The folder of a run of somebody else, in a folder with a few things that they left there."""
    (desk / "evil.py").write_text(EVIL)
    (desk / "evil.yaml").write_text(yaml.safe_dump({"class_path": "evil.Evil"}))
    (desk / "secret.txt").write_text("secret " * 100_000)
    shutil.copytree(finished / "runs" / "done", desk / "theirs")
    return desk / "theirs"


def rewrite(run: Path, change: Callable[[dict[str, Any]], None], signed: bool = False) -> None:
    """Save a run's checkpoint again with another content, and without our signature."""
    file = run / "checkpoints" / "last.ckpt"
    contents = torch.load(file, weights_only=True)
    change(contents)
    if not signed:
        contents["zoo"]["signature"] = "0" * 64
    with atomic_write(file) as opened:
        save_sealed(contents, opened)


def of_config(change: Change) -> Callable[[dict[str, Any]], None]:
    return lambda contents: change(contents["zoo"]["config"])


VERBS = {
    "generate": ("generate", "--checkpoint", "theirs", "--max_new_tokens=2"),
    "export": ("export", "--checkpoint", "theirs", "--output", "out"),
    "validate": ("validate", "--checkpoint", "theirs"),
    "test": ("test", "--checkpoint", "theirs"),
    "predict": ("predict", "--checkpoint", "theirs"),
    "fit": ("fit", "--resume", "theirs", "--trainer.max_steps=5"),
}


def nothing_ran() -> None:
    assert not Path("canary").exists()
    assert not [name for name in sys.modules if name.startswith("evil")]


OF_RUNS = ("validate", "test", "predict", "fit")  # of whom a run of someone else needs --trust
OF_MODELS = ("generate", "export")


def refuse_all(command: Command, verbs: Iterable[str], said: str) -> None:
    for verb in verbs:
        assert said in command(*VERBS[verb]).sentence(), verb
        nothing_ran()


def in_turn(cases: Iterable[str], verbs: Sequence[str]) -> Iterator[Any]:
    """Each case with two verbs, whose turn it is, and in the nightly tier with all of them.

    All verbs read a config through the same vetting: a fault of a case shows with any verb, that of a verb in any case.
    """
    turns = itertools.cycle(verbs)
    for case in cases:
        yield pytest.param(case, (next(turns), next(turns)), id=case)
        yield pytest.param(case, tuple(verbs), id=f"{case}, all verbs", marks=pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "verbs"), in_turn(IN_MODEL, (*VERBS, "load")))
def test_a_model_runs_nothing(command: Command, theirs: Path, what: str, verbs: tuple[str, ...]):
    rewrite(theirs, of_config(IN_MODEL[what]))
    refuse_all(command, [verb for verb in verbs if verb != "load"], "theirs/checkpoints/last.ckpt")
    if "load" in verbs:
        with pytest.raises(UserError, match=r"last.ckpt"):
            zoo.load(theirs)
    nothing_ran()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "verbs"), in_turn(IN_RUN, (*OF_RUNS, "generate")))
def test_a_run_runs_reads_and_writes_nothing(command: Command, theirs: Path, what: str, verbs: tuple[str, ...]):
    rewrite(theirs, of_config(IN_RUN[what]))
    said = "last.ckpt was not written by you, and its data, trainer and callbacks would be built"
    refuse_all(command, [verb for verb in verbs if verb != "generate"], said)
    if "generate" in verbs:  # which needs the model only
        command(*VERBS["generate"]).ok()
    nothing_ran()


@pytest.mark.slow
def test_the_model_of_a_run_of_somebody_else_is_used(command: Command, theirs: Path):
    """The other sections are not built, whatever they hold; with --trust they are."""
    rewrite(theirs, lambda contents: None)
    for verb in OF_RUNS:
        assert "if you trust who wrote it, add --trust" in command(*VERBS[verb]).sentence()
    for verb in OF_MODELS:
        assert command(*VERBS[verb]).code == 0
    command(*FIT[:1], *FIT[3:], "--optim.initial_weights=theirs", "--run", "mine").ok()
    assert command(*VERBS["validate"], "--trust").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["/tmp/elsewhere", "../elsewhere", "a/../../elsewhere"])
def test_checkpoints_lie_inside_their_run(command: Command, desk: Path, folder: str):
    said = command(*FIT, f"--checkpoints.folder={folder}").sentence()
    assert f"checkpoints.folder: {folder!r} is not inside the run's folder" in said


def test_a_forged_signature_is_none(command: Command, theirs: Path):
    for forged in ("", "ü" * 64, 7, None, sign({"model": {}})):

        def change(contents: dict[str, Any], forged: Any = forged) -> None:
            contents["zoo"]["signature"] = forged
            contents["zoo"]["config"]["model"]["position"] = CALLS["cProfile"]

        rewrite(theirs, change, signed=True)
        refuse_all(command, ("generate", "export"), "cProfile.run")
        refuse_all(command, ("validate",), "was not written by you")


def with_pickle(file: Path) -> None:
    contents = torch.load(file, weights_only=True)
    torch.save({**contents, "callbacks": Bomb()}, file)


FILES: dict[str, Callable[[Path], None]] = {
    "a pickle": with_pickle,
    "a bare pickle": lambda file: file.write_bytes(pickle.dumps(Bomb())),
}
SIZES: dict[str, Change] = {
    "layers": put("model", "num_layers")(300_000),
    "layers as text": put("model", "num_layers")("300000"),
    "hidden size": put("model", "hidden_size")(10**9),
    "a few more layers": put("model", "num_layers")(4),
    "another hidden size": put("model", "hidden_size")(64),
    "vocabulary": put("model", "vocab_size")(10**12),
    "heads": put("model", "num_heads")(10**9),
    "endless size": put("model", "intermediate_size")(float("inf")),
    "inner size": put("model", "intermediate_size")(10**12),
    "channel of a mixer": put(*SECOND, "mixer", "init_args", "head_dim")(10**9),
    "factor of an expansion": put(*SECOND, "factor")(10**9),
    "of nothing": put("model", "hidden_size")(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", [what for what in SIZES if what not in ("layers", "layers as text")])
def test_sizes_are_compared_with_the_weights(command: Command, theirs: Path, what: str):
    """Before memory is taken for them; that many layers take time to build is not guarded against."""
    rewrite(theirs, of_config(SIZES[what]))
    for arguments in (VERBS["generate"], ("statex", "--checkpoint", "theirs", "--output", "out")):
        command(*arguments).sentence()


def moved_out(path: Path, outside: Path) -> None:
    """Put a symbolic link to `outside`, which has its content, in the place of a file or folder."""
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("precious")
    path.symlink_to(outside)


@pytest.mark.parametrize("name", ["the\nirs", "the\x1b[31mirs"])
def test_names_of_files_are_printed_and_not_obeyed(command: Command, theirs: Path, name: str):
    rewrite(theirs, of_config(PLACES["position"](CALLS["cProfile"])))
    theirs.rename(theirs.with_name(name))
    assert name.encode("unicode_escape").decode() in command("generate", "--checkpoint", name).sentence()


def put_moment(contents: dict[str, Any]) -> None:
    contents["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda contents: contents.pop("loops"), "KeyError: 'loops'"),
        (
            lambda contents: contents["optimizer_states"][0]["param_groups"].pop(),
            "ValueError: loaded state dict has a ",
        ),
        (put_moment, "ValueError: moments of the optimiser have shapes [(3,), (512, 32)], not (512, 32)"),
    ],
)
def test_a_state_that_cannot_be_restored(command: Command, theirs: Path, change: Change, cause: str):
    rewrite(theirs, change)
    done = command("fit", "--resume=theirs", "--trust", "--trainer.max_steps=5").refused()
    said = (
        "resume: the state of the trainer in theirs/checkpoints/last.ckpt, which someone else saved, cannot be restored"
    )
    assert f"error: {said} ({cause}" in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.yaml", "checkpoints"])
def test_a_new_run_starts_in_no_folder_with_links(command: Command, desk: Path, name: str):
    (desk / "runs" / "x").mkdir(parents=True)
    outside = desk / "outside"
    outside.mkdir() if name == "checkpoints" else outside.write_text("precious")
    (desk / "runs" / "x" / name).symlink_to(outside)
    assert f"holds {name}, which is not a run's file" in command(*FIT, "--run", "x").sentence()


@pytest.mark.slow
def test_ones_own_run_may_lie_behind_a_link(command: Command, finished: Path, desk: Path):
    (desk / "runs").mkdir()
    shutil.copytree(finished / "runs" / "done", desk / "big disk")
    (desk / "runs" / "done").symlink_to(desk / "big disk")
    assert command("fit", "--resume", "done", "--trainer.max_steps=5").code == 0
    assert (desk / "runs" / "done").is_symlink()
    # a link where a run appends is refused; one where it replaces a file is replaced
    for name, appended in (("metrics.jsonl", True), ("config.yaml", False)):
        moved_out(desk / "big disk" / name, desk / name)
        content = (desk / name).read_bytes()
        done = command("fit", "--resume", "done", "--trainer.max_steps=6")
        assert (done.code == 2) == appended, done.err
        assert ("metrics.jsonl is a symbolic link" in done.err) == appended
        assert (desk / name).read_bytes() == content
        if appended:
            (desk / "big disk" / name).unlink()
            shutil.move(desk / name, desk / "big disk" / name)
    assert not (desk / "big disk" / "config.yaml").is_symlink()


CONTENTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a config of another type": lambda contents: contents["zoo"].update(config=["model"]),
    "a tokenizer of another type": lambda contents: contents["zoo"].update(tokenizer={"a": 1}),
    "weights of another type": lambda contents: contents.update(state_dict={"model.norm.weight": "x"}),
    "shards elsewhere": lambda contents: contents.update(
        shards={"folder": "../../secret", "files": {}, "stage": 2, "world_size": 1, "parameters": {}}
    ),
    "files of shards elsewhere": lambda contents: contents.update(
        shards={"folder": "shards-1", "files": {"../x": [1, "0"]}, "stage": 2, "world_size": 1, "parameters": {}}
    ),
    "shards of another type": lambda contents: contents.update(shards=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", [*FILES, *CONTENTS])
def test_a_file_runs_nothing(command: Command, theirs: Path, what: str):
    if what in FILES:
        FILES[what](theirs / "checkpoints" / "last.ckpt")
    else:
        rewrite(theirs, CONTENTS[what])
    refuse_all(command, tuple(VERBS), "last.ckpt")
    with pytest.raises(UserError, match=r"last.ckpt"):
        zoo.load(theirs)
    if what in FILES or "weights" in what or "shards" in what:
        command(*FIT, f"--optim.initial_weights={theirs / 'checkpoints' / 'last.ckpt'}").sentence()
    nothing_ran()


@pytest.mark.slow
def test_shards_run_nothing(command: Command, theirs: Path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is for Linux")
    from zoo.checkpoints.zero_shards import shard_hashes, shard_names

    shards = theirs / "checkpoints" / "shards-1"
    shards.mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"optimizer_state_dict": {"zero_stage": 2, "partition_count": 1}, "x": Bomb()}, shards / name)
    entry = {"folder": "shards-1", "stage": 2, "world_size": 1, "parameters": {}}

    def change(contents: dict[str, Any]) -> None:
        del contents["state_dict"]
        contents["shards"] = {**entry, "files": shard_hashes(shards, shard_names(shards))}

    rewrite(theirs, change)
    refuse_all(command, OF_MODELS, "last.ckpt is refused: its shards name posix.system")


TEXTS = {
    "an alias of itself": "model: &a [*a]",
    "brackets": "model: " + "[" * 100_000,
    "no YAML": "model: [",
    "a date that is none": "model: 2026-99-99",
    "an object": "model: !!python/object/apply:os.system ['touch canary']",
    "a list": "- model",
    "nothing": "",
    "bytes": "model: \x00",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TEXTS)
def test_yaml_runs_nothing(command: Command, theirs: Path, what: str):
    assert command("export", "--checkpoint", "theirs", "--output", "out").code == 0
    Path("out/hashes.json").unlink()
    Path("out/config.yaml").write_text(TEXTS[what])
    command("generate", "--checkpoint", "out").sentence()
    command("fit", "--config", "out/config.yaml").sentence()
    command("sweep", "--config", "out/config.yaml", "--dry-run").sentence()
    why = {
        "an alias of itself": "an alias inside the node it refers to",
        "brackets": "is nested more than 100 levels deep",
        **dict.fromkeys(("a list", "nothing"), "has no config of a model"),
    }
    with pytest.raises(UserError, match=rf"config\.yaml.* {why.get(what, 'is not YAML: ')}"):
        zoo.load("out")
    nothing_ran()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["position", "stack", "map of features"])
def test_an_exported_folder_runs_nothing(command: Command, theirs: Path, what: str):
    assert command("export", "--checkpoint", "theirs", "--output", "out").code == 0
    config = yaml.safe_load(Path("out/config.yaml").read_text())
    PLACES[what](CALLS["cProfile"])(config)
    Path("out/config.yaml").write_text(yaml.safe_dump(config))
    assert "hashes.json" in command("generate", "--checkpoint", "out").sentence()
    Path("out/hashes.json").unlink()
    said = command("generate", "--checkpoint", "out").sentence()
    assert "cProfile.run" in said
    assert "--trust" in said
    nothing_ran()


def in_a_process(folder: Path, cache: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "ZOO_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, str(CLI), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_the_working_directory_hides_nothing(theirs: Path, shared_cache: Path):
    here = theirs.parent
    libraries = ("resource", "wave", "lightning", "zoo", "_sitebuiltins")
    optional = ("cython", "uarray", "brotli", "librosa", "trio", "h2", "torchdistx")  # which libraries try to import
    for name in libraries + optional:
        (here / f"{name}.py").write_text(TOUCH)
    (here / "evil-1.0.dist-info").mkdir()
    (here / "evil-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (here / "evil-1.0.dist-info" / "entry_points.txt").write_text("[token_mixer_zoo.mixers]\nevil = evil\n")
    done = in_a_process(here, shared_cache, "generate", "--checkpoint", "theirs", "--max_new_tokens=2")
    assert done.returncode == 0, done.stderr
    assert not (here / "canary").exists()


# --- one's own things keep working ---

OWN = """
import mixers

class MyMixer(mixers.GatedDeltaNet):
    pass
"""


@pytest.fixture
def own(command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one's own mixer, on one's own text, with one's own callback."""
    (desk / "my_mixer.py").write_text(OWN)
    (desk / "my_callback.py").write_text("import lightning as L\nclass Mine(L.Callback):\n    pass\n")
    (desk / "my.txt").write_text("some words of my own, and more of them. " * 3000)
    (desk / "my.yaml").write_text("trainer: {callbacks: [{class_path: my_callback.Mine}]}\ndata: {path: my.txt}\n")
    for name in ("my_mixer", "my_callback"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    inputs = ("--config", "my.yaml", "--model.stack.second=my_mixer.MyMixer", "--data.vocab_size=300")
    command(*FIT, *inputs, "--run", "mine").ok()
    for name in ("my_mixer", "my_callback"):
        monkeypatch.delitem(sys.modules, name)
    return desk / "runs" / "mine"


@pytest.mark.slow
def test_ones_own_run_needs_no_word(command: Command, own: Path, monkeypatch: pytest.MonkeyPatch):
    for arguments in (
        ("generate", "--checkpoint", "runs/mine", "--max_new_tokens=2"),
        ("validate", "--checkpoint", "runs/mine"),
        ("predict", "--checkpoint", "runs/mine"),
        ("fit", "--resume", "runs/mine", "--trainer.max_steps=6"),
        ("fit", "--resume", "runs/mine", "--trainer.max_steps=8"),  # what was continued is signed, too
        ("export", "--checkpoint", "runs/mine", "--output", "out"),
        ("generate", "--checkpoint", "out", "--max_new_tokens=2"),
    ):
        monkeypatch.delitem(sys.modules, "my_mixer", raising=False)
        done = command(*arguments)
        assert done.code == 0, (arguments, done.err)


@pytest.mark.slow
def test_another_user_is_asked(command: Command, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another home"))
    generate = ("generate", "--checkpoint", "runs/mine", "--max_new_tokens=2")
    validate = ("validate", "--checkpoint", "runs/mine")
    for arguments, said in (
        (generate, "second names 'my_mixer.MyMixer', which would be imported and called"),
        (validate, "its data, trainer and callbacks would be built"),
        (("fit", "--resume", "runs/mine"), "its data, trainer and callbacks would be built"),
    ):
        assert said in command(*arguments).sentence()
        assert "my_mixer" not in sys.modules
    for arguments in (generate, validate):
        assert command(*arguments, "--trust").code == 0


@pytest.mark.slow
def test_what_is_registered_may_be_built(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another home"))
    with pytest.raises(UserError, match=r"my_mixer.MyMixer"):
        zoo.load("runs/mine")
    assert zoo.load("runs/mine", trust=True)
    mixer = mixers.get("my_mixer.MyMixer")
    with pytest.raises(UserError, match=r"my_mixer.MyMixer"):  # imported, which is no consent
        zoo.load("runs/mine")
    monkeypatch.setattr("mixers.registry._entries", dict(mixers.registry._entries))
    mixers.register(recurrence="as that of GatedDeltaNet", paper="none")(mixer)
    assert zoo.load("runs/mine")


@pytest.mark.slow
def test_where_no_key_can_be_kept(command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch):
    (desk / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(desk / "file"))
    assert command(*FIT, "--run", "unsigned").code == 0
    command("validate", "--checkpoint", "runs/unsigned").sentence()  # nobody knows whose it is
    assert command("validate", "--checkpoint", "runs/unsigned", "--trust").code == 0
    assert command("generate", "--checkpoint", "runs/unsigned", "--max_new_tokens=2").code == 0


def test_the_key_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    signature = sign({"a": 1})
    key = tmp_path / "token-mixer-zoo" / "key"
    assert sign({"a": 1}) == signature != sign({"a": 2})
    assert [path.name for path in key.parent.iterdir()] == ["key"]
    if os.name != "nt":
        assert key.stat().st_mode & 0o777 == 0o600
    key.write_bytes(b"short")
    assert sign({"a": 1}) is None
