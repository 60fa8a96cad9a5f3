"""Every file in configs/, found by its name: a config that rots is a test that fails."""

import functools
import importlib
import itertools
import math
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import zoo
from kernels import UserError
from mixers import Bidirectional, Expanded, LinearMixer, SlidingWindowAttention, SoftmaxAttention
from zoo import config as configs
from zoo.config.overlays import load_config
from zoo.lm.size_table import parameters_without_embeddings
from zoo.scaling.runs import find_runs, select
from zoo.sweeps import Sweep

from .command_lines import with_tokenizer
from .commands import ROOT, Command

pytest_plugins = "tests.desk"

CONTENTS: dict[str, dict[str, Any]] = {
    path.relative_to(configs.CONFIGS).as_posix(): yaml.safe_load(path.read_text())
    for path in sorted(configs.CONFIGS.rglob("*.yaml"))
    if path.parent.name not in ("sweep", "scaling")  # these are no configs
}
# A whole config names a stack; those in paper folders may leave the size to an overlay.
WHOLE = [name for name, keys in CONTENTS.items() if "class_path" in keys.get("model", {}).get("stack", {})]
OVERLAYS = [name for name in CONTENTS if name not in WHOLE]
RECALL = [name for name in WHOLE if name.startswith("recall/")]
# The training of a paper, as an overlay on the general configs.
PAPERS = ("gated_delta_networks/recipe.yaml", "hgrn2/pile.yaml", "hgrn2/slimpajama.yaml", "hgrn2/wikitext_103.yaml")
SMALL = ("recall/", "image/", "lra/")  # tasks that two layers solve
RUNS_AS_IT_IS = [name for name in WHOLE if "hidden_size" in CONTENTS[name]["model"]]
SIZED = [name for name in WHOLE if name not in RUNS_AS_IT_IS]
GENERAL = [name for name in WHOLE if "/" not in name]


def header(name: str) -> list[str]:
    """The lines of comment that a config opens with; a command that goes on in the next line is one line."""
    text = (configs.CONFIGS / name).read_text()
    comment = re.match(r"(#.*\n)*", text)
    assert comment
    return comment.group().replace("\\\n# ", "").splitlines()


def commands(name: str) -> list[str]:
    """The commands in the header of a config."""
    return [line.removeprefix("#   ") for line in header(name) if line.startswith("#   python cli.py")]


def named(command: str) -> list[str]:
    """The configs of a command, in order."""
    arguments = shlex.split(command)
    return [value for option, value in zip(arguments, arguments[1:], strict=False) if option == "--config"]


def bases_of(overlay: str) -> list[str]:
    """The configs that an overlay is meant for."""
    folder, _, name = overlay.rpartition("/")
    if folder == "scaling_laws":
        every = {"llama", "tnl", "hgrn2", "cosformer2"}
        fewer_layers = {"tnl", "cosformer2"}
        fitting = {"410m.yaml": every - fewer_layers, "410m-25.yaml": fewer_layers}.get(name, every)
        return [f"scaling_laws/{base}.yaml" for base in sorted(fitting)]
    if overlay in PAPERS:
        return named(commands(overlay)[0])[:1]
    if folder == "gated_delta_networks":
        base = name.partition("-")[0]
        paper = f"gated_delta_networks/{base}.yaml"
        return [paper if paper in WHOLE else f"{'mamba2' if base == 'mamba' else base}.yaml"]
    if folder == "hgrn2":
        return ["hgrn2.yaml"]
    if folder in ("ablate", "recall"):
        return named(commands(overlay)[0])[:1]
    if name in ("h2.yaml", "l.yaml"):  # for one of the two models, as published
        return ["state_expansion/gated_deltanet.yaml"]
    if overlay == "state_expansion/2k.yaml":
        return ["state_expansion/transformer.yaml"]
    if folder == "state_expansion":
        return [f"state_expansion/{base}.yaml" for base in ("gla", "gated_deltanet", "transformer")]
    if folder == "size":
        kind = name.rpartition("-")[0]
        return [{"": "gdn_h2", "h1": "gdn_h1", "mamba": "mamba2"}.get(kind, kind) + ".yaml"]
    return ["gdn_h2.yaml"]


def sizes_of(name: str) -> list[str]:
    """The overlays that give a config without a size one."""
    kind = "transformer-" if name.endswith("transformer.yaml") else ""
    general = [f"size/{kind}{size}.yaml" for size in ("400m", "1.5b")] if name.startswith("state_expansion/") else []
    fitting = [overlay for overlay in OVERLAYS if name in bases_of(overlay)]
    return general + [overlay for overlay in fitting if "hidden_size" in CONTENTS[overlay].get("model", {})]


BASED = [(overlay, base) for overlay in OVERLAYS for base in bases_of(overlay)]
SIZES = [(name, size) for name in SIZED for size in sizes_of(name)]


@functools.cache
def resolved(name: str) -> dict[str, Any]:
    """All of a config, defaults included; only to be read."""
    return configs.to_dict(configs.read(name))


def slots(spec: Any, inside: type | None = None) -> Iterator[tuple[type, type | None, dict[str, Any]]]:
    """(class, the class around it, its arguments) of all components in a resolved config."""
    if isinstance(spec, dict):
        module, _, name = spec.get("class_path", "").rpartition(".")
        found = getattr(importlib.import_module(module), name) if module else None
        if found:
            yield found, inside, spec.get("init_args") or {}
        for value in spec.values():
            yield from slots(value, found or inside)


def test_they_are_found():
    assert {"gdn_h2.yaml", "gdn_h1.yaml", "gated_deltanet.yaml", "mamba2.yaml", "swa.yaml", "transformer.yaml"} <= {
        *WHOLE
    }
    assert {"size/400m.yaml", "size/1.5b.yaml", "size/transformer-400m.yaml", "size/transformer-1.5b.yaml"} <= {
        *OVERLAYS
    }
    assert {name for name in WHOLE if name.startswith("gated_delta_networks/h2_")} == {
        f"gated_delta_networks/h2_{order}.yaml"
        for order in ("gdn_swa_mamba2", "gdn_mamba2_swa", "mamba2_swa_gdn", "mamba2_gdn_swa")
    }
    sizes = {name: len(sizes_of(name)) for name in SIZED}
    tables = {f"scaling_laws/{name}.yaml": 6 for name in ("llama", "tnl", "hgrn2", "cosformer2")}
    twos = (
        "state_expansion/gla",
        "state_expansion/gated_deltanet",
        "state_expansion/transformer",
        "gated_delta_networks/gdn",
        "gated_delta_networks/h1",
    )
    assert sizes == {**tables, **{f"{name}.yaml": 2 for name in twos}}
    assert set(GENERAL) <= set(RUNS_AS_IT_IS)
    assert all(base in WHOLE for _, base in BASED)


@pytest.mark.parametrize("name", RUNS_AS_IT_IS)
def test_a_config_builds(name: str):
    model = zoo.build(name, "model.vocab_size=1024", device="meta")
    assert model.num_layers == len(model.mixers) >= (2 if name.startswith(SMALL) else 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_around_the_model_can_be_made(name: str):
    config = configs.read(name)
    for factory in configs.GROUPS:
        if factory != "model":
            configs.instantiate(factory, config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), SIZES, ids=" ".join)
def test_a_config_of_a_paper_builds_at_its_sizes(name: str, size: str):
    model = zoo.build(name, size, device="meta")
    assert model.num_layers == len(model.mixers) >= 6
    assert model.num_layers == CONTENTS[size]["model"]["num_layers"]
    assert model.num_parameters() > 5e7


FAMILIES = {
    "": ("gated_deltanet.yaml", "gdn_h2.yaml", "samba.yaml"),
    "h1-": ("gdn_h1.yaml",),
    "retnet-": ("retnet.yaml",),
    "mamba-": ("mamba1.yaml", "mamba2.yaml"),
}


def family(name: str) -> str:
    """Which of the size overlays fit a general config: the beginning of their names."""
    return next((kind for kind, names in FAMILIES.items() if name in names), "transformer-")


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERAL)
@pytest.mark.parametrize(("size", "width", "nominal"), [("400m", 1024, 4e8), ("1.5b", 2048, 1.5e9)])
def test_a_size_is_what_it_says(name: str, size: str, width: int, nominal: float, caplog: pytest.LogCaptureFixture):
    overlay = f"size/{family(name)}{size}.yaml"
    model = zoo.build(name, overlay, device="meta")
    assert model.num_parameters() == pytest.approx(nominal, rel=0.03)
    assert (model.hidden_size, model.vocab_size) == (width, 32_000)
    assert model.flops(4096) > 4096 * model.num_parameters()
    assert "nominal_size" not in caplog.text
    assert overlay in "\n".join(header(name)), "a config names its sizes"


@pytest.mark.parametrize("name", ["mamba1.yaml", "mamba2.yaml", "retnet.yaml", "transformer.yaml"])
def test_a_size_that_does_not_fit_says_so(name: str, caplog: pytest.LogCaptureFixture):
    model = zoo.build(name, "size/400m.yaml", device="meta")
    size = model.num_parameters() / 1e6
    assert f"model.nominal_size is 400.0M parameters, but this model has {size:.1f}M" in caplog.text


HEADS = [f"ablate/heads_{count}.yaml" for count in (1, 2, 4, 8, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_other_numbers_of_heads_are_of_equal_size_or_refused(name: str):
    size = (sizes_of(name) or [f"size/{family(name)}400m.yaml"])[0]
    base = [name, size, "model.vocab_size=1024", "model.num_layers=3"]
    expected, built = zoo.build(*base, device="meta").num_parameters(), []
    for overlay in HEADS:
        try:
            model = zoo.build(*base, overlay, device="meta")
        except UserError:
            continue
        built.append(overlay)
        assert {mixer.num_heads for mixer in model.mixers} == {CONTENTS[overlay]["model"]["num_heads"]}
        assert model.num_parameters() == pytest.approx(expected, rel=0.01)
    assert built == HEADS or name not in ("gated_deltanet.yaml", "deltanet.yaml", "retnet.yaml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mamba2.yaml", "num_heads"), ("hgrn2.yaml", "num_heads"), ("tnl.yaml", "head_dim"), ("gdn_h2.yaml", "mixer")],
)
def test_heads_that_a_mixer_does_not_choose_are_refused_in_one_sentence(name: str, expected: str, command: Command):
    done = command("fit", "--config", name, "--config", "ablate/heads_8.yaml", "--print_config")
    assert done.code == 2
    assert expected in done.err
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", WHOLE)
def test_a_config_opens_with_its_command(name: str):
    assert commands(name)
    if name in RUNS_AS_IT_IS:
        assert commands(name) == [f"python cli.py fit --config {name}"]
    assert len(header(name)) > 3 + len(commands(name)), "after the command comes what to expect"


COMMANDS = [(name, command) for name in SIZED for command in commands(name)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), COMMANDS, ids=lambda value: value.partition(" --data")[0])
def test_a_command_of_a_header_parses(name: str, line: str, command: Command):
    _, _, verb, *arguments = shlex.split(line)
    files = named(line)
    assert files[0] == name
    assert set(files) & set(sizes_of(name))
    shown = command(verb, *arguments, "--print_config")
    assert shown.code == 0, shown.err
    config = yaml.safe_load(shown.out)
    assert config["model"]["hidden_size"] == CONTENTS[files[1]]["model"]["hidden_size"]
    assert config["data"]["init_args"]["tokenizer"].endswith("tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "base"), BASED, ids=" ".join)
def test_an_overlay_changes_its_base(name: str, base: str):
    before, after = resolved(base), configs.to_dict(configs.read(base, name))
    assert before != after
    changed = {key for key in before if before[key] != after[key]}
    assert changed == set(CONTENTS[name]), "each of its keys has an effect"
    if base in RUNS_AS_IT_IS and name not in ABLATIONS:  # the others have tests of their own
        assert zoo.build(base, name, "model.vocab_size=32000", device="meta").num_parameters() > 0


PUBLISHED_TEXT = [name for name in OVERLAYS if "hf download" in (configs.CONFIGS / name).read_text()]


@pytest.mark.parametrize("name", PUBLISHED_TEXT)
def test_what_a_data_config_reads_is_what_its_commands_fetch(name: str):
    fetched = [shlex.split(line.removeprefix("#   ")) for line in header(name) if "hf download" in line]
    folders = [words[words.index("--local-dir") + 1] for words in fetched]
    data = CONTENTS[name]["data"]
    read = [data["path"], *(text["path"] for text in data.get("validation_sets", {}).values()), data["tokenizer"]]
    assert all(f"{path}/".startswith(f"{folders[0]}/") for path in read[:-1])
    assert read[-1] == f"{folders[1]}/{fetched[1][3]}"
    included = [pattern for word, pattern in itertools.pairwise(fetched[0]) if word == "--include"] or [""]
    for path in read[:-1]:
        part = path.removeprefix(folders[0]).strip("/")
        assert path.endswith(".txt") or any(pattern.startswith(part) for pattern in included), path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name in (*PAPERS, *PUBLISHED_TEXT) for line in commands(name)], ids=str
)
def test_a_command_of_an_overlay_parses(name: str, line: str, command: Command):
    _, _, verb, *arguments = shlex.split(line)
    assert name in named(line)
    shown = command(verb, *arguments, "--print_config")
    assert shown.code == 0, shown.err


def test_wikitext_is_made_of_its_rows(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    folder = tmp_path / "corpora" / "wikitext" / "wikitext-103-raw-v1"
    folder.mkdir(parents=True)
    for number, part in enumerate(("train", "train", "validation", "test")):
        rows = ["", f" = Title {number} = \n", " é words \n"]
        parquet.write_table(pyarrow.table({"text": rows}), folder / f"{part}-0000{number}-of-2.parquet")
    lines = [line.removeprefix("#   ") for line in header("data/wikitext_103.yaml")]
    loop = "\n".join(
        lines[next(n for n, line in enumerate(lines) if line.startswith("for ")) : lines.index("done") + 1]
    )
    subprocess.run(["bash", "-c", loop], cwd=tmp_path, check=True)
    text = (folder.parent / "train.txt").read_text()
    assert text == " = Title 0 = \n é words \n = Title 1 = \n é words \n"
    assert (folder.parent / "test.txt").read_text().startswith(" = Title 3 = ")


ABLATIONS = [name for name in OVERLAYS if name.startswith("ablate/")]


def test_there_is_an_overlay_for_every_ablation():
    """Table S.1 of arXiv 2412.06464, table 7 of Liu et al., and HGRN2's."""
    switches = ["no_decay", "no_conv", "no_output_gate", "no_output_norm", "l2_relu", "l2_elu1", "neg_eigval"]
    norms = ["l1_relu", "l1_elu1", "l1_silu"]
    heads = [f"heads_{n}" for n in (1, 2, 4, 8, 16)]
    kinds = ["low_rank", "dpfp", "lfm", "relu", "elu1", "identity"]
    expansions = ["expand_2", "expand_4", "expand_8", "no_subheads", *(f"expansion_{kind}" for kind in kinds)]
    hgrn2 = ["hgrn2_no_bounds", *(f"hgrn2_expand_{n}" for n in (16, 32, 64, 128))]
    assert {f"ablate/{name}.yaml" for name in (*switches, *norms, *heads, *expansions, *hgrn2)} <= {*ABLATIONS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_is_a_few_lines_that_change_what_its_command_says(name: str):
    assert len((configs.CONFIGS / name).read_text().splitlines()) <= 5
    (command,) = commands(name)
    files = named(command)
    assert files[-1] == name
    rest = [argument for argument in shlex.split(command)[3:] if "=" in argument]
    before, after = configs.read(*files[:-1], *rest), configs.read(*files, *rest)
    assert configs.to_dict(before)["model"] != configs.to_dict(after)["model"]
    assert configs.to_dict(before)["data"] == configs.to_dict(after)["data"]
    after.model.vocab_size = 64
    configs.from_config(after, device="meta")


SWEEPS = sorted(path.relative_to(configs.CONFIGS).as_posix() for path in configs.CONFIGS.glob("sweep/*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_is_about_something(name: str, command: Command, finished: Path):
    """Each run builds, and at least three seeds are behind each number."""
    (line,) = [line.removeprefix("#   ") for line in header(name) if "cli.py sweep" in line]
    contents = yaml.safe_load((configs.CONFIGS / name).read_text())
    assert len(contents["seeds"]) >= 3
    arguments = shlex.split(line)[2:]
    shown = command(*arguments, *with_tokenizer(arguments, finished), "--dry-run")
    assert shown.code == 0, shown.err
    assert shown.out.count("seed=0") * len(contents["seeds"]) == shown.out.count("seed=")


@pytest.mark.slow
def test_the_miniature_of_scaling_laws():
    """Six sizes over more than a decade of five mixers, which see the same 200M tokens at a constant learning rate."""
    (line,) = commands("scaling/miniature.yaml")
    assert "sweep --config scaling/miniature.yaml" in line
    sizes: dict[str, list[int]] = {}
    rates: dict[tuple[str, int], float] = {}
    names = set()
    for run in Sweep(**load_config("scaling/miniature.yaml")).runs():
        names.add(run.name)
        config = run.read()
        data = config.data.init_args
        assert config.optim.schedule == "constant"
        assert config.trainer.max_steps * data.batch_size * data.sequence_length >= 200e6
        config.model.vocab_size = data.vocab_size
        size = parameters_without_embeddings(configs.from_config(config, device="meta"))
        assert config.optim.learning_rate == pytest.approx(3.239e-3 - 1.395e-4 * math.log(size), rel=0.05)
        mixer = dict(run.cell)["mixer"]
        sizes.setdefault(mixer, []).append(size)
        rates[mixer, config.model.hidden_size] = config.optim.learning_rate
    assert len(sizes) == 5
    assert all(len(found) == 6 for found in sizes.values())
    assert all(0.9e6 < min(found) < 1.2e6 and 36e6 < max(found) < 44e6 for found in sizes.values())
    measured = select(find_runs([ROOT / "tutorials" / "measured" / "miniature"]), {})
    assert {run.folder.name for run in measured.runs} <= names
    assert not measured.left_out
    checks: dict[tuple[str, int], list[float]] = {}
    names = set()
    for run in Sweep(**load_config("scaling/miniature_rates.yaml")).runs():
        names.add(run.name)
        config = run.read()
        assert config.trainer.max_steps == 768
        place = dict(run.cell)["mixer"], config.model.hidden_size
        checks.setdefault(place, []).append(config.optim.learning_rate / rates[place])
    assert set(checks) == {place for place in rates if place[1] in (128, 640)}
    assert all(found == pytest.approx([0.5, 2, 4]) for found in checks.values())
    assert {run.name for run in find_runs([ROOT / "tutorials" / "measured" / "miniature_rates"])} <= names
    again = {}
    for run in Sweep(**load_config("scaling/miniature_twice.yaml")).runs():
        config = run.read()
        assert config.trainer.max_steps == 3072
        again[dict(run.cell)["mixer"], config.model.hidden_size] = config.optim.learning_rate / 2
    assert again == pytest.approx(rates)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_recurrent_mixer_ships_expandable(name: str):
    """`factor` is one key of every config, so that one override is the whole ablation."""
    found = list(slots(resolved(name)["model"]["stack"]))
    assert found
    for cls, around, arguments in found:
        if cls is Expanded:
            assert arguments["factor"] == 1
        elif issubclass(cls, LinearMixer):
            assert around in (Expanded, Bidirectional), f"{cls.__name__} stands in {around}"


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_printed_configs_can_be_read_back(name: str, command: Command, desk: Path):
    printed = command("fit", "--config", name, "--print_config")
    assert printed.code == 0, printed.err
    (desk / "printed.yaml").write_text(printed.out)
    again = command("fit", "--config", "printed.yaml", "--print_config")
    assert again.out == printed.out
    given = CONTENTS[name]["data"]
    for key, value in given.get("init_args", given).items():
        shown_value = yaml.safe_load(printed.out)["data"]["init_args"][key]
        assert shown_value == value or key == "tasks", key  # a task shows its weight too


@pytest.mark.slow
def test_a_written_config_can_be_read_back(tmp_path: Path):
    """What a run keeps of itself, nulls included: `mlp: null` must not turn into the default."""
    config = configs.read("mamba2.yaml", "model.stack.mixer.factor=2")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(configs.to_dict(config)))
    again = configs.read(tmp_path / "config.yaml")
    assert configs.to_dict(again) == configs.to_dict(config)
    assert again.model.mlp is None
    assert configs.to_dict(configs.parse(configs.to_dict(config))) == configs.to_dict(config)


# (config, size, E) → parameters. Table 3 of "Scaling up the State Size of RNN LLMs" (it prints 412M, 427M, 450M or 454M
# for E = 2, 4, 8), and what the configs of the authors' public code of "Gated Delta Networks" have with their shared
# embedding.
PUBLISHED = {
    ("state_expansion/gla.yaml", "size/400m.yaml", 1): 400_142_336,
    ("state_expansion/gla.yaml", "size/400m.yaml", 2): 413_339_648,
    ("state_expansion/gla.yaml", "size/400m.yaml", 4): 427_151_360,
    ("state_expansion/gla.yaml", "size/400m.yaml", 8): 454_774_784,
    ("state_expansion/gated_deltanet.yaml", "size/400m.yaml", 1): 399_724_928,
    ("state_expansion/gated_deltanet.yaml", "size/1.5b.yaml", 8): 1_675_930_624,
    ("gated_delta_networks/gdn.yaml", "gated_delta_networks/gdn-0.4b.yaml", None): 516_837_830,
    ("gated_delta_networks/gdn.yaml", "gated_delta_networks/gdn-1.3b.yaml", None): 1_309_295_488,
    ("gated_delta_networks/h1.yaml", "gated_delta_networks/h1-0.4b.yaml", None): 530_764_908,
    ("gated_delta_networks/h1.yaml", "gated_delta_networks/h1-1.3b.yaml", None): 1_316_608_290,
    ("state_expansion/transformer.yaml", "size/transformer-400m.yaml", None): 399_561_728,
    ("state_expansion/transformer.yaml", "size/transformer-1.5b.yaml", None): 1_467_066_368,
}


@pytest.mark.slow
@pytest.mark.parametrize("key", PUBLISHED, ids=str)
def test_published_sizes(key: tuple[str, str, int | None]):
    config, size, factor = key
    overrides = [] if factor is None else [f"model.stack.mixer.factor={factor}"]
    assert zoo.build(config, size, *overrides, device="meta").num_parameters() == PUBLISHED[key]


@pytest.mark.slow
def test_the_sizes_of_gated_delta_networks():
    """H·K is ¾ of the width and V = 2K, with 9 heads; attention has heads of 128."""
    for name, size in SIZES:
        if name.startswith("gated_delta_networks/"):
            model = zoo.build(name, size, device="meta")
            deltas = [mixer for mixer in model.mixers if isinstance(mixer, LinearMixer)]
            windows = [mixer for mixer in model.mixers if not isinstance(mixer, LinearMixer)]
            assert {(m.num_heads, 4 * m.num_heads * m.key_size) for m in deltas} == {(9, 3 * model.hidden_size)}
            assert all(mixer.value_size == 2 * mixer.key_size for mixer in deltas)
            assert {(m.head_dim, m.window_size) for m in windows} == ({(128, 2048)} if "h1" in name else set())
            assert model.lm_head is None


@pytest.mark.slow
@pytest.mark.parametrize("size", ["0.4b", "1.3b"])
def test_baselines_have_as_many_parameters_as_the_models_of_the_paper(size: str):
    """And are trained alike, with windows of 2048 tokens where there are any."""
    folder, recipe = "gated_delta_networks", "gated_delta_networks/recipe.yaml"
    published = {
        model: zoo.build(f"{folder}/{model}.yaml", f"{folder}/{model}-{size}.yaml", device="meta")
        for model in ("gdn", "h1")
    }
    counts = [model.num_parameters() for model in published.values()]
    fitting = {"mamba1": "mamba", "mamba2": "mamba", "deltanet": "transformer", "hgrn2": "transformer"}
    fitting |= {name: name for name in ("transformer", "retnet", "samba", f"{folder}/h2_mamba2_gdn_swa")}
    orders = [name.removesuffix(".yaml") for name in WHOLE if name.startswith(f"{folder}/h2_") and size == "0.4b"]
    for name, overlay in (fitting | {order: order for order in orders}).items():
        overlay = f"{folder}/{overlay.rpartition('/')[2]}-{size}.yaml"
        config = configs.read(f"{name}.yaml", recipe, overlay)
        model = configs.from_config(config, device="meta")
        assert min(counts) * 0.99 < model.num_parameters() < max(counts) * 1.02, name
        assert model.num_parameters() == pytest.approx(CONTENTS[overlay]["model"]["nominal_size"], rel=0.03)
        assert {m.window_size for m in model.mixers if isinstance(m, SlidingWindowAttention)} <= {2048}
        assert {m.head_dim for m in model.mixers if isinstance(m, SoftmaxAttention)} <= {128}
    trained = [configs.to_dict(configs.read(*files)) for files in ((f"{folder}/gdn.yaml",), ("mamba2.yaml", recipe))]
    for config in trained:
        del config["data"]["init_args"]["vocab_size"]  # of a tokenizer that is trained, which is not used
        for key in ("hidden_size", "num_heads", "num_layers", "stack", "mlp"):
            del config["model"][key]
    assert trained[0] == trained[1]


# The parameters that the paper names; it has no other numbers of these models in our copy.
HGRN2 = {
    ("hgrn2.yaml", "hgrn2/wikitext_103.yaml"): 44e6,
    ("hgrn1.yaml", "hgrn2/wikitext_103.yaml"): 44e6,
    ("mamba1.yaml", "hgrn2/wikitext_103.yaml", "model.mlp=null", "model.num_layers=11"): 44e6,
    ("hgrn2.yaml", "hgrn2/pile.yaml", "hgrn2/150m.yaml"): 150e6,
    ("hgrn1.yaml", "hgrn2/pile.yaml", "hgrn2/150m.yaml"): 150e6,
    ("hgrn2.yaml", "hgrn2/pile.yaml", "scaling_laws/410m.yaml"): 385e6,  # in Figure 5
    ("hgrn2.yaml", "hgrn2/pile.yaml", "scaling_laws/1b.yaml"): 1e9,
    ("hgrn2.yaml", "hgrn2/pile.yaml", "scaling_laws/3b.yaml"): 3e9,
    ("hgrn2.yaml", "hgrn2/pile.yaml", "scaling_laws/7b.yaml"): 7e9,
    ("hgrn2.yaml", "hgrn2/slimpajama.yaml", "hgrn2/1.3b.yaml"): 1.3e9,
    ("hgrn2.yaml", "hgrn2/slimpajama.yaml", "hgrn2/2.7b.yaml"): 2.7e9,
}


@pytest.mark.slow
@pytest.mark.parametrize("files", HGRN2, ids=" ".join)
def test_the_models_of_hgrn2(files: tuple[str, ...], caplog: pytest.LogCaptureFixture):
    model = zoo.build(*files, device="meta")
    assert "nominal_size" not in caplog.text
    assert model.num_parameters() == pytest.approx(HGRN2[files], rel=0.06)
    assert {mixer.key_size for mixer in model.mixers if isinstance(mixer, LinearMixer)} <= {128}


@pytest.mark.slow
def test_transformer_2k_is_the_same_model_with_a_window():
    files = ("state_expansion/transformer.yaml", "size/transformer-400m.yaml")
    model = zoo.build(*files, "state_expansion/2k.yaml", device="meta")
    assert {(type(m), m.window_size) for m in model.mixers} == {(SlidingWindowAttention, 2048)}
    assert model.num_parameters() == zoo.build(*files, device="meta").num_parameters()


def test_the_best_order_of_h2_is_the_general_one():
    assert resolved("gdn_h2.yaml") == resolved("gated_delta_networks/h2_mamba2_gdn_swa.yaml")
