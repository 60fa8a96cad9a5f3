"""Hostile folders and files: a kind of file, an attack on it, and the verb that meets it."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from .test_trust import FILES, IN_RUN, SIZES, Bomb, of_config, rewrite

Attack = Callable[[Path], None]  # on the working directory, which holds the folders of `INPUTS`

WRITTEN = (  # by a run
    *("config.yaml", "tokenizer.json", "metrics.jsonl", "metrics.csv", "samples.txt", "results.json", "loss.png"),
    *(".lock", "fit-profile.txt", "checkpoints", "checkpoints/last.ckpt", "checkpoints/best.ckpt"),
)
INPUTS = ("theirs", "exported", "public", "evaluation", "sweep")
SMALL = ("--trainer.max_steps=5", "--trainer.limit_val_batches=1")
NEW = ("fit", "--config=gdn_h2.yaml", "--config=tiny.yaml", "--trainer.max_steps=1", "--run=new")
# verb → its command line, where `{}` is the input, and what it may write in the working directory
VERBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "resume": (("fit", "--resume={}", *SMALL), ("{}",)),
    "resume a checkpoint": (("fit", "--resume={}/checkpoints/last.ckpt", *SMALL), ("{}",)),
    "initial weights": (("fit", "--config=tiny.yaml", "--optim.initial_weights={}", "--run=new", *SMALL), ("runs",)),
    "initial tensors": ((*NEW, "--optim.initial_weights={}", *SMALL), ("runs",)),
    "tokenizer": ((*NEW, "--data.tokenizer={}"), ("runs",)),
    "config": (("fit", "--config={}/config.yaml", "--print_config"), ()),
    "validate": (("validate", "--checkpoint={}", "--trainer.limit_val_batches=1"), ()),
    "test": (("test", "--checkpoint={}", "--trainer.limit_test_batches=1"), ()),
    "predict": (("predict", "--checkpoint={}", "--trainer.limit_predict_batches=1", "--output=out"), ("out",)),
    "generate": (("generate", "--checkpoint={}", "--max_new_tokens=2"), ()),
    "evaluate": (
        ("evaluate", "--checkpoint={}", "--tasks=passkey", "--lengths=[256]", "--samples=1", "--output=out"),
        ("out",),
    ),
    "evaluate into": (
        ("evaluate", "--checkpoint=mine", "--tasks=passkey", "--lengths=[256]", "--samples=1", "--output={}"),
        ("{}",),
    ),
    "export": (("export", "--checkpoint={}", "--output=out"), ("out",)),
    "convert": (("convert", "--checkpoint={}", "--output=out"), ("out",)),
    "convert back": (("convert", "--checkpoint={}", "--to=huggingface", "--output=out"), ("out",)),
    "statex": (("statex", "--checkpoint={}", "--layers=1", "--output=out"), ("out",)),
    "linearise": (("linearise", "--checkpoint={}", "--mixer=GLA", "--keep=[]", "--output=out"), ("out",)),
    "scaling fit": (("scaling", "fit", "{}", "--output=out", "--draws=0"), ("out",)),
    "sweep": (("sweep", "--config=layers.yaml", "--folder={}", "--dry-run"), ("{}",)),
    "sweep into": (("sweep", "--config=layers.yaml", "--folder={}"), ("{}",)),
}
OF_MODELS = (
    "generate",
    "evaluate",
    "export",
    "convert back",
    "statex",
    "linearise",
    "initial weights",
    "validate",
    "resume",
)
OF_RUNS = ("resume", "validate", "test", "predict", "resume a checkpoint")  # refused without --trust
OF_EXPORTS = ("generate", "evaluate", "statex", "convert back", "initial weights", "initial tensors")
OF_PUBLIC = ("generate", "convert", "evaluate", "initial weights", "initial tensors")


class Case(NamedTuple):
    """An attack and the verb that meets it.

    Attributes:
        name: Of the test.
        attack: What is done to a fresh copy of the folders.
        verb: A key of `VERBS`.
        input: The folder or file that the verb is given.
    """

    name: str
    attack: Attack
    verb: str
    input: str

    @property
    def arguments(self) -> list[str]:
        """The command line."""
        return [argument.replace("{}", self.input) for argument in VERBS[self.verb][0]]

    @property
    def may_write(self) -> list[str]:
        """Names in the working directory."""
        return [name.replace("{}", self.input) for name in VERBS[self.verb][1]]


# what a text or JSON file may hold instead of its content
BYTES: dict[str, bytes] = {
    "nothing": b"",
    "zeros": b"\0" * 1000,
    "noise": bytes(range(256)) * 8,
    "half of a letter": b'{"a": "\xc3',
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "a number": b"3",
    "not a number": b'{"step": NaN, "val_loss": Infinity, "status": -Infinity}',
    "a key twice": b'{"step": 1, "step": {"step": []}, "status": 1, "status": []}',
    "paths": b'{"files": {"../../canary/file": {}}, "weight_map": {"a": "../../canary/file"}, "step": "../file"}',
    "a pickle": b"\x80\x02cposix\nsystem\nX\x0c\x00\x00\x00touch canary\x85R.",
}
# file → the verbs that read it, and the input that they are given
READ: dict[str, tuple[tuple[str, ...], str]] = {
    "theirs/config.yaml": (("resume", "config", "scaling fit"), "theirs"),
    "theirs/tokenizer.json": (("generate", "tokenizer", "resume"), "theirs"),
    "theirs/metrics.jsonl": (("resume", "scaling fit"), "theirs"),
    "theirs/metrics.csv": (("resume",), "theirs"),
    "theirs/samples.txt": (("resume",), "theirs"),
    "theirs/results.json": (("resume", "scaling fit"), "theirs"),
    "theirs/loss.png": (("resume",), "theirs"),
    "theirs/checkpoints/last.ckpt": (OF_MODELS, "theirs"),
    "exported/config.yaml": (OF_EXPORTS, "exported"),
    "exported/tokenizer.json": (("generate", "evaluate", "initial weights"), "exported"),
    "exported/hashes.json": (OF_EXPORTS, "exported"),
    "exported/model.safetensors": (OF_EXPORTS, "exported"),
    "public/config.json": (OF_PUBLIC, "public"),
    "public/tokenizer.json": (("convert", "generate"), "public"),
    "public/tokenizer_config.json": (("convert", "generate"), "public"),
    "public/model.safetensors": (OF_PUBLIC, "public"),
    "public/model.safetensors.index.json": (OF_PUBLIC, "public"),
    "evaluation/rows.jsonl": (("evaluate into",), "evaluation"),
    "sweep/sweep.csv": (("scaling fit", "sweep into"), "sweep"),
    "sweep/runs.json": (("sweep into",), "sweep"),
    "sweep/sweep.png": (("sweep into",), "sweep"),
    "sweep/a/metrics.jsonl": (("scaling fit",), "sweep"),
    "sweep/a/results.json": (("scaling fit", "sweep into"), "sweep"),
}


def unsigned(change: Callable[[dict[str, Any]], None]) -> Attack:
    def attack(desk: Path) -> None:
        def unsign_and_change(contents: dict[str, Any]) -> None:
            contents["zoo"]["signature"] = "0" * 64
            change(contents)

        rewrite(desk / "theirs", unsign_and_change, signed=True)

    return attack


def with_bytes(file: str, content: bytes) -> Attack:
    def attack(desk: Path) -> None:
        (desk / file).write_bytes(content)
        if file.startswith("exported") and file != "exported/hashes.json":
            (desk / "exported" / "hashes.json").unlink()  # which would tell
        if file.endswith("index.json"):
            (desk / "public" / "model.safetensors").unlink()

    return attack


def in_checkpoint(attack: Callable[[Path], None]) -> Attack:
    return lambda desk: attack(desk / "theirs" / "checkpoints" / "last.ckpt")


def linked(file: str, to: str) -> Attack:
    """A symbolic link for a file or folder: to a canary, or to its content, which lies elsewhere."""

    def attack(desk: Path) -> None:
        path, outside = desk / file, desk.parent / "canary" / "moved"
        if to == "its content" and path.exists():
            path.rename(outside)
        else:
            outside = desk.parent / "canary" / ("folder" if path.is_dir() else "file")
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
        path.symlink_to(outside)

    return attack


def piped(file: str) -> Attack:
    def attack(desk: Path) -> None:
        path = desk / file
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return attack


def renamed(odd: str) -> Attack:
    """Another name for the folder, and files of such names in it."""

    def attack(desk: Path) -> None:
        (desk / "theirs" / odd).write_text("x")
        (desk / "theirs").rename(desk / odd)

    return attack


def json_of(file: str, change: Callable[[Any], Any]) -> Attack:
    def attack(desk: Path) -> None:
        content = json.loads((desk / file).read_text())
        (desk / file).write_text(json.dumps(change(content) or content))

    return attack


ODD = ("the\nirs", "the\x1b[31mirs", "the\x07irs", "-theirs", "the irs; touch canary", "$(touch canary)", "th{run}eirs")


def cases() -> Iterator[Case]:
    """All cases, with different names. `test_trust.py` has those of models and of YAML, with all verbs."""
    for number, (name, change) in enumerate(IN_RUN.items()):
        yield Case(f"run: {name}", unsigned(of_config(change)), OF_RUNS[number % len(OF_RUNS)], "theirs")
    for name, change in SIZES.items():
        if name.startswith("layers"):  # many of which take time to build, and nothing else
            continue
        yield Case(f"size: {name}, resume", unsigned(of_config(change)), "resume", "theirs")
    for name, attack in FILES.items():
        for verb in ("generate", "resume"):
            yield Case(f"archive: {name}, {verb}", in_checkpoint(attack), verb, "theirs")
    for file, (verbs, folder) in READ.items():
        for number, (name, content) in enumerate(BYTES.items()):
            verb = verbs[number % len(verbs)]
            yield Case(f"bytes: {name} as {file}, {verb}", with_bytes(file, content), verb, folder)
        for to in ("a canary", "its content"):
            for verb in verbs[:2]:
                yield Case(f"link: {file} to {to}, {verb}", linked(file, to), verb, folder)
    for name in WRITTEN:
        yield Case(f"link: theirs/{name} resumed", linked(f"theirs/{name}", "its content"), "resume", "theirs")
        yield Case(f"pipe: theirs/{name} resumed", piped(f"theirs/{name}"), "resume", "theirs")
    for name in (".lock", "a", "a.log", "runs.json", "sweep.csv"):
        yield Case(f"link: sweep/{name} continued", linked(f"sweep/{name}", "a canary"), "sweep into", "sweep")
    yield Case("link: .lock of an evaluation", linked("evaluation/.lock", "a canary"), "evaluate into", "evaluation")
    for odd in ODD:
        for verb in ("resume", "generate"):
            yield Case(f"name: {odd!r}, {verb}", renamed(odd), verb, odd)
    yield from _public()


def _public() -> Iterator[Case]:
    code = {"auto_map": {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}, "trust_remote_code": True}
    changes: dict[str, Callable[[Any], Any]] = {
        "code of its own": lambda content: {**content, **code},
        "no type": lambda content: {**content, "model_type": ["llama"]},
        "a type with a path": lambda content: {**content, "model_type": "../../canary/file"},
        "no epsilon": lambda content: {**content, "rms_norm_eps": float("nan")},
        "an end that is no token": lambda content: {**content, "eos_token_id": 10**12},
        "a negative end": lambda content: {**content, "eos_token_id": -5},
        "an end of words": lambda content: {**content, "eos_token_id": ["a", {}]},
    }
    for name, change in changes.items():
        for verb in ("convert", "generate"):
            yield Case(f"public: {name}, {verb}", json_of("public/config.json", change), verb, "public")

    def pickled(desk: Path) -> None:
        (desk / "public" / "model.safetensors").unlink()
        torch.save({"weights": Bomb()}, desk / "public" / "pytorch_model.bin")

    yield Case("public: weights in a pickle", pickled, "convert", "public")
    for name, key in (("dots", "../../canary/x"), ("a path", "/etc/passwd"), ("a lookalike", "a/../a.safetensors")):
        places = json.dumps({"weight_map": {"model.embed_tokens.weight": key}}).encode()
        attack = with_bytes("public/model.safetensors.index.json", places)
        yield Case(f"public: an index with {name}", attack, "convert", "public")


def prepare(desk: Path, run: Callable[..., None], done: Path) -> None:
    """Write the folders of `INPUTS` into the working directory.

    Args:
        desk: The working directory.
        run: Runs a command line there.
        done: A finished run, which stays as it is.
    """
    shutil.copytree(done, desk / "mine")
    shutil.copytree(done, desk / "theirs")
    rewrite(desk / "theirs", lambda contents: None)
    run("export", "--checkpoint=theirs", "--output=exported")
    stack = "{class_path: zoo.lm.Uniform, init_args: {mixer: mixers.SoftmaxAttention}}"
    run("fit", "--config=tiny.yaml", f"--model.stack={stack}", "--run=transformer")
    run("convert", "--checkpoint=runs/transformer", "--to=huggingface", "--output=public")
    (desk / "runs" / "transformer").rename(desk / "transformer")
    (desk / "runs").rmdir()
    run("evaluate", "--checkpoint=mine", "--tasks=passkey", "--lengths=[256]", "--samples=1", "--output=evaluation")
    (desk / "layers.yaml").write_text("base: [gdn_h2.yaml, tiny.yaml]\naxes: {model.num_layers: [3]}\n")
    for name in ("a", "b"):
        shutil.copytree(desk / "theirs", desk / "sweep" / name)
    row = "seed=0,complete,9000,3.5"
    (desk / "sweep" / "sweep.csv").write_text(f"name,status,parameters,val_loss\na,{row}\nb,{row}\n")
    shutil.copy(done / "loss.png", desk / "sweep" / "sweep.png")
    (desk / "evil.py").write_text("open('canary', 'w').close()\nclass Evil:\n    pass\n")
    (desk / "evil.yaml").write_text(yaml.safe_dump({"class_path": "evil.Evil"}))
    (desk / "secret.txt").write_text("secret " * 1000)
