"""A mixer is one file: in a copy of the project, a new file and its config suffice."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mixers
from docs.tables import PACKAGE, with_imports

from ..commands import ROOT

MIXER = '''"""A test of the registry."""

from .gla import GLA
from .growth import MergedHeads
from .registry import register


@register(recurrence="S_t = diag(α_t) S_{t−1} + k_t v_tᵀ", paper="none", tiny={"gate_rank": 4})
class Newcomer(GLA):
    """S_t = diag(α_t) S_{t−1} + k_t v_tᵀ."""


class MergedNewcomer(MergedHeads):
    """Newcomer: fewer heads."""

    grows = Newcomer

    def merged(self, factor: int) -> dict[str, object]:
        return {"num_heads": self.mixer.num_heads // factor}
'''
PROGRAM = """
import mixers, zoo
from docs import tables
from mixers.newcomer import Newcomer
from zoo.config.own import own_component

assert mixers.Newcomer is mixers.get("Newcomer") is own_component("Newcomer") is Newcomer
assert "Newcomer" in mixers.__all__
model = zoo.build("newcomer.yaml", "model.vocab_size=16", device="meta")
assert {type(mixer) for mixer in model.mixers} == {Newcomer}
assert [growth.way for growth in mixers.growths(model.mixers[0])] == ["merge", "merge", "expand"]
assert "import Newcomer as Newcomer" in tables.with_imports(tables.PACKAGE.read_text())
for page in ("README.md", "docs/zoo.md"):
    assert "`Newcomer`" in tables.rewrite((tables.ROOT / page).read_text())
"""


def test_editors_see_every_mixer():
    """`python docs/tables.py` writes the imports."""
    text = PACKAGE.read_text(encoding="utf-8")
    assert with_imports(text) == text


def test_every_mixer_is_exported():
    own = {name for name in mixers.names() if mixers.get(name).__module__.startswith("mixers.")}
    assert own <= set(mixers.__all__)
    assert all(getattr(mixers, name) is mixers.get(name) for name in own)
    assert len(set(mixers.__all__)) == len(mixers.__all__)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with one more mixer and its config."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("kernels", "mixers", "zoo", "configs", "docs", "reproductions", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml", "cli.py", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "mixers" / "newcomer.py").write_text(MIXER, encoding="utf-8")
    config = (ROOT / "configs" / "gla.yaml").read_text(encoding="utf-8")
    (folder / "configs" / "newcomer.yaml").write_text(config.replace("GLA", "Newcomer"), encoding="utf-8")
    return folder


def python(folder: Path, *arguments: str) -> str:
    """Return what Python prints in a copy of the project."""
    environment = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_a_new_file_and_a_config_are_a_new_mixer(copy: Path):
    python(copy, "-c", PROGRAM)


@pytest.mark.nightly
def test_a_new_mixer_is_tested(copy: Path):
    files = [f"tests/mixers/test_{name}.py" for name in ("contract", "arguments", "decoding", "growth", "registry")]
    options = ["-q", "-k", "Newcomer or newcomer", "-p", "no:cacheprovider", "-m", "not nightly"]
    assert " passed" in python(copy, "-m", "pytest", *options, *files, "tests/test_configs.py")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = (", "mixers/aside.py, line 1: '(' was never closed"),
        (MIXER.replace("class Newcomer(", "class KDA("), "the name 'KDA' is taken by mixers."),
    ],
)
def test_a_file_that_cannot_be_a_mixer_is_one_sentence(copy: Path, text: str, sentence: str):
    file = copy / "mixers" / "aside.py"
    file.write_text(text.partition("class MergedNewcomer")[0], encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "cli.py", "mixers"], cwd=copy, capture_output=True, text=True, check=False
        )
    finally:
        file.unlink()
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
