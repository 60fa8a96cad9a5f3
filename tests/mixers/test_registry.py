import gc
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import mixers
from mixers import registry

PLUGIN = '''
import mixers

@mixers.register(recurrence="S_t = S_{t−1}", paper="none")
class Visitor(mixers.GatedDeltaNet):
    """From another distribution."""
'''


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that forgets what the test adds."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registry._load_plugins.cache_clear()
    yield
    registry._load_plugins.cache_clear()
    gc.collect()  # classes are in cycles, and a config finds every class that is alive


def test_names_are_class_names_in_order():
    names = mixers.names()
    assert names == sorted(names)
    assert {"GatedDeltaNet", "Mamba2", "SlidingWindowAttention", "SoftmaxAttention"} <= set(names)
    assert all(mixers.get(name).__name__ == name for name in names)


@pytest.mark.parametrize("name", mixers.names())
def test_entries_fill_the_table(name: str):
    entry = mixers.entry(name)
    assert entry.mixer is mixers.get(name)
    assert "_t" in entry.recurrence
    assert entry.paper
    # the documentation opens with the recurrence
    assert "_t = " in (entry.mixer.__doc__ or "").splitlines()[0]


def test_dotted_paths():
    assert mixers.get("mixers.mamba2.Mamba2") is mixers.Mamba2
    assert mixers.get("mixers.GLA") is mixers.GLA


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("GatedDeltanet", "GatedDeltaNet"), ("hgrn", "HGRN1' or 'HGRN2"), ("SlidingWindow", "SlidingWindowAttention")],
)
def test_did_you_mean(name: str, suggestion: str):
    with pytest.raises(mixers.UserError, match=rf"^mixer: '{name}' .*did you mean '{suggestion}'\?"):
        mixers.get(name)


def test_far_from_everything():
    with pytest.raises(mixers.UserError, match=r"^mixer: 'xyzzy' .*known: .*Mamba2") as caught:
        mixers.get("xyzzy")
    assert "did you mean" not in str(caught.value)
    assert mixers.did_you_mean("xyzzy", mixers.names()) == ""


@pytest.mark.parametrize(
    "path", ["nowhere.at.all.Mixer", "mixers.mamba2.Mamba9", "mixers.names", "torch.nn.Linear", "mixers.mamba2."]
)
def test_paths_that_lead_to_no_mixer(path: str):
    with pytest.raises(mixers.UserError, match=rf"^mixer: '{path}' "):
        mixers.get(path)


@pytest.mark.usefixtures("fresh")
def test_registering():
    register = mixers.register(recurrence="S_t = 0", paper="none", tiny={"num_heads": 2})

    @register
    class Newcomer(mixers.GatedDeltaNet):
        pass

    assert "Newcomer" in mixers.names()
    assert mixers.get("Newcomer") is Newcomer
    assert dict(mixers.entry("Newcomer").tiny) == {"num_heads": 2}
    # the same module may register again, as on a reload
    register(Newcomer)


@pytest.mark.usefixtures("fresh")
def test_a_name_is_taken_once():
    impostor = type("Mamba2", (mixers.Mamba2,), {"__module__": "elsewhere"})
    with pytest.raises(ValueError, match=r"'Mamba2' is taken by mixers\.mamba2"):
        mixers.register(recurrence="S_t = 0", paper="none")(impostor)
    assert mixers.get("Mamba2") is mixers.Mamba2


@pytest.mark.usefixtures("fresh")
def test_entry_points_are_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "visiting_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    asked = []

    def entry_points(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint("visitor", "visiting_plugin", group)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert "Visitor" in mixers.names()
    assert mixers.get("Visitor").__module__ == "visiting_plugin"
    assert asked == ["token_mixer_zoo.mixers"]
    sys.modules.pop("visiting_plugin")


@pytest.mark.slow
def test_an_installed_plugin_is_found(tmp_path: Path):
    # what pip leaves behind: a module, and a folder of metadata with the entry point
    (tmp_path / "visiting_plugin.py").write_text(PLUGIN)
    metadata = tmp_path / "visiting_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: visiting-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[token_mixer_zoo.mixers]\nvisitor = visiting_plugin\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mixers; print(mixers.get('Visitor').__module__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(mixers.__file__).parents[1], check=False
    )
    assert done.stdout.strip() == "visiting_plugin", done.stderr
