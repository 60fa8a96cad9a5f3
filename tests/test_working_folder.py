"""Files in the working folder are read and imported only where the user names them."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zoo
from kernels import UserError

from .commands import CLI, FIT, Command
from .shipped_configs import BASED, RUNS_AS_IT_IS, SIZES, resolved

TOUCH = "open('canary', 'w').close()\n"
EVIL = f"{TOUCH}class Evil:\n    pass\n"
MIXER = "import mixers\n\nclass FromHere(mixers.LinearAttention):\n    pass\n"


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        yield from itertools.chain(*map(strings_in, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain(*map(strings_in, value))
    elif isinstance(value, str):
        yield value


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Every string of the resolved configs of all runs that ship: keys and values."""
    shipped = [(name,) for name in RUNS_AS_IT_IS] + [(base, overlay) for overlay, base in BASED] + SIZES
    return {string for combination in shipped for string in strings_in(resolved(*combination))}


@pytest.fixture
def hostile(desk: Path, finished: Path, names: set[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, with a file of every such name that names a class of someone else."""
    shutil.copytree(finished / "runs" / "done", desk, dirs_exist_ok=True)
    (desk / "evil.py").write_text(EVIL)
    written = 0
    for name in names:
        path = desk / name
        if name.strip("./ ") and len(name) < 200 and path.is_relative_to(desk) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{class_path: evil.Evil}")
            written += 1
    assert written > 200
    assert {"auto", "cosine", "zoo.data.TextData", "mixers.GatedDeltaNet"} <= {path.name for path in desk.iterdir()}
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    return desk


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("fit", "--config=gdn_h2.yaml", "--print_config"),
        ("fit", "--config=gdn_h2.yaml", "--trainer.accelerator=cpu", "--trainer.strategy=auto", "--print_config"),
        ("fit", "--resume=.", "--trainer.max_steps=5"),
        ("validate", "--checkpoint=."),
        ("generate", "--checkpoint=.", "--max_new_tokens=2"),
        ("sweep", "--config=sweep/heads.yaml", "--dry-run"),
    ],
    ids=" ".join,
)
def test_no_value_is_opened_as_a_file(command: Command, hostile: Path, arguments: tuple[str, ...]) -> None:
    command(*arguments).ok()
    assert not (hostile / "canary").exists()
    assert "evil" not in sys.modules


@pytest.mark.slow
def test_no_config_that_ships_opens_its_values_as_files(hostile: Path) -> None:
    for name in RUNS_AS_IT_IS:
        zoo.config.read(name)
    assert not (hostile / "canary").exists()


@pytest.mark.slow
def test_no_foreign_config_chooses_a_file(command: Command, hostile: Path) -> None:
    for key in ("trainer.strategy", "trainer.accelerator", "trainer.callbacks", "trainer.logger", "data", "model.mlp"):
        (hostile / "ddp_evil").write_text("{class_path: evil.Evil}")
        done = command("fit", "--config=gla.yaml", f"--{key}=ddp_evil", "--print_config")
        assert done.code == (0 if key == "trainer.accelerator" else 2), done.err
        assert not (hostile / "canary").exists()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [FIT, ("sweep", "--config=mine.yaml", "--dry-run")], ids=["fit", "sweep"])
def test_no_override_is_opened_as_a_file(command: Command, desk: Path, arguments: tuple[str, ...]) -> None:
    (desk / "evil.py").write_text(EVIL)
    (desk / "mine.yaml").write_text("base: gla.yaml\naxes: {model.num_layers: [1, 2]}\n")
    overrides = ["trainer.max_steps=2", *(["seeds=[0]", "x=state_size"] if "sweep" in arguments else ["compile=false"])]
    for override in (*overrides, "model.num_layers=1", "model.num_layers=2", "seed_everything=0", "seed_everything=1"):
        for name in (override, f"--{override}"):
            (desk / name).write_text("trainer: {callbacks: {class_path: evil.Evil}}")
    printing = [] if "sweep" in arguments else ["--print_config"]
    done = command(*arguments, *(f"--{override}" for override in overrides), *printing).ok()
    assert "evil" not in done.out
    assert zoo.config.read("gla.yaml", "trainer.max_steps=2").trainer.max_steps == 2
    assert not (desk / "canary").exists()


HIDE = """
import sys
from importlib.machinery import PathFinder

class Hide:
    '''Finds packages of these names in no installation.'''

    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            found = PathFinder.find_spec(name, [entry for entry in sys.path if "site-packages" not in entry])
            if found is None:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
            return found

sys.meta_path.insert(0, Hide())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("fla", (*FIT, "--model.stack.third=FLALayer", "--model.stack.third.layer=GatedDeltaNet")),
        ("gguf", ("convert", "--checkpoint=runs/done", "--to=gguf", "--output=model.gguf")),
        ("lm_eval", ("evaluate", "--checkpoint=runs/done", "--tasks=lm_eval/lambada_openai")),
        ("datasets", (*FIT, "--data.path=datasets:someone/texts")),
    ],
)
def test_a_package_that_is_not_installed_is_not_taken_from_here(
    desk: Path, finished: Path, shared_cache: Path, tmp_path: Path, module: str, arguments: tuple[str, ...]
) -> None:
    shutil.copytree(finished / "runs", desk / "runs")
    (desk / f"{module}.py").write_text(TOUCH)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(HIDE.format(names={module}))
    path = os.pathsep.join(filter(None, (str(tmp_path / "path"), str(CLI.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "ZOO_CACHE": str(shared_cache)}
    done = subprocess.run(
        [sys.executable, str(CLI), *arguments], cwd=desk, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert not (desk / "canary").exists()


@pytest.fixture
def mixer(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a mixer in the working folder."""
    for name in ("mixer_here", "beside_it", "optional_here"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (desk / "mixer_here.py").write_text(MIXER)
    return desk / "mixer_here.py"


ITS_CLASS = ("linear_attention.yaml", "tiny.yaml", "model.stack.mixer=mixer_here.FromHere")


def test_the_module_of_a_class_is_found_here(mixer: Path) -> None:
    model = zoo.build(*ITS_CLASS, "model.vocab_size=64", device="meta")
    assert {type(each).__module__ for each in model.mixers} == {"mixer_here"}
    assert str(mixer.parent) not in sys.path


def test_what_a_module_here_imports_if_it_can_is_not_found_here(mixer: Path) -> None:
    (mixer.parent / "optional_here.py").write_text(TOUCH)
    mixer.write_text(f"try:\n    import optional_here\nexcept ImportError:\n    pass\n{MIXER}")
    zoo.build(*ITS_CLASS, "model.vocab_size=64", device="meta")
    assert not (mixer.parent / "canary").exists()


def test_a_module_here_that_needs_another_one_says_so(mixer: Path) -> None:
    (mixer.parent / "beside_it.py").write_text("")
    mixer.write_text(f"import beside_it\n{MIXER}")
    with pytest.raises(
        UserError, match=r"^model\.stack\.mixer: .* as it imports 'beside_it', which is not installed; "
    ):
        zoo.build(*ITS_CLASS)
    assert "mixer_here" not in sys.modules


@pytest.mark.parametrize("package", ["package_here", "namespace_here"])
def test_a_package_here_imports_its_own_modules(mixer: Path, package: str) -> None:
    folder = mixer.parent / package
    folder.mkdir()
    if package == "package_here":
        (folder / "__init__.py").write_text("")
    (folder / "parts.py").write_text("")
    (folder / "inner.py").write_text(f"from {package} import parts\n{MIXER}")
    its_class = f"model.stack.mixer={package}.inner.FromHere"
    model = zoo.build(*ITS_CLASS[:2], its_class, "model.vocab_size=64", device="meta")
    assert type(model.mixers[0]).__module__ == f"{package}.inner"


def test_a_shipped_config_comes_before_a_file_of_its_name(desk: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert zoo.config.read("gdn_h2").model.num_layers == 6
    for name in ("gdn_h2", "gdn_h2.yaml", "size/400m.yaml"):
        (desk / name).parent.mkdir(exist_ok=True)
        (desk / name).write_text("model: {stack: {class_path: Uniform, init_args: {mixer: Mamba2}}, num_layers: 2}\n")
    for name in ("gdn_h2", "gdn_h2.yaml"):
        caplog.clear()
        assert zoo.config.read(name).model.num_layers == 6
        assert caplog.messages == [
            f"config: {name} is the config of this project; write ./{name} for the file in this folder"
        ]
        for file in (f"./{name}", str(desk / name), desk / name, Path(name)):
            assert zoo.config.read(file).model.num_layers == 2
    assert zoo.config.read("gdn_h2.yaml", "size/400m.yaml").model.num_layers == 24


@pytest.mark.parametrize("write", ["./gla.yaml", "gla"])
def test_a_sweep_takes_the_shipped_config_too(desk: Path, write: str) -> None:
    (desk / "gla.yaml").write_text("model: {stack: {class_path: Uniform, init_args: {mixer: Mamba2}}}\n")
    (desk / "mine.yaml").write_text(f"base: {write}\naxes: {{model.num_layers: [1]}}\n")
    (run,) = (outcome.run for outcome in zoo.sweep("mine.yaml", dry_run=True).outcomes)
    mixer = run.read().model.stack.init_args.mixer
    assert ("Mamba2" in str(mixer)) == write.startswith("./")
