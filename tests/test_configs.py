"""Every whole config in configs/ is read, built and written back, and has the size that it or its paper names."""

import copy
import math
import re
from pathlib import Path

import pytest

from kernels import UserError
from mixers import KDA, Bidirectional, Expanded, LinearMixer, SlidingWindowAttention, SoftmaxAttention
from zoo import config as configs

from .commands import Command
from .shipped_configs import (
    BASED,
    CONTENTS,
    GENERAL,
    OVERLAYS,
    RUNS_AS_IT_IS,
    SIZED,
    SIZES,
    WHOLE,
    built,
    header,
    parsed,
    resolved,
    sizes_of,
    slots,
)

SMALL = ("recall/", "image/")  # tasks that two layers solve


def test_they_are_found():
    assert {"gdn_h2.yaml", "swa.yaml", "transformer.yaml"} <= {*WHOLE}
    assert {"size/400m.yaml", "size/transformer-1.5b.yaml"} <= {*OVERLAYS}
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


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS_AS_IT_IS)
def test_a_config_builds(name: str):
    model = built(name, vocab_size=1024)
    assert model.num_layers == len(model.mixers) >= (2 if name.startswith(SMALL) else 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_around_the_model_can_be_made(name: str):
    config = parsed(name)
    for factory in configs.GROUPS:
        if factory != "model":
            configs.instantiate(factory, config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [pytest.param(*pair, id=" ".join(pair)) for pair in SIZES])
def test_a_config_of_a_paper_builds_at_its_sizes(name: str, size: str):
    model = built(name, size)
    assert model.num_layers == len(model.mixers) >= 6
    assert model.num_layers == CONTENTS[size]["model"]["num_layers"]
    assert model.num_parameters() > 5e7


def fitting(name: str, size: str) -> str:
    """Return the size overlay, 400m or 1.5b, that fits a general config, as its header says."""
    lines = [line for line in header(name) if line.startswith("# Larger: ")]
    assert len(lines) == 1, f"{name} has no line such as '# Larger: size/400m.yaml, size/1.5b.yaml.'"
    (overlay,) = re.findall(rf"size/[\w-]*{re.escape(size)}\.yaml", lines[0])
    return overlay


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERAL)
@pytest.mark.parametrize(("size", "width", "nominal"), [("400m", 1024, 4e8), ("1.5b", 2048, 1.5e9)])
def test_a_size_is_what_it_says(name: str, size: str, width: int, nominal: float, caplog: pytest.LogCaptureFixture):
    model = built(name, fitting(name, size))
    assert model.num_parameters() == pytest.approx(nominal, rel=0.03)
    assert (model.hidden_size, model.vocab_size) == (width, 32_000)
    assert model.flops(4096) > 4096 * model.num_parameters()
    assert "nominal_size" not in caplog.text


@pytest.mark.parametrize("name", ["mamba1.yaml", "mamba2.yaml", "retnet.yaml", "transformer.yaml"])
def test_a_size_that_does_not_fit_says_so(name: str, caplog: pytest.LogCaptureFixture):
    size = built(name, "size/400m.yaml").num_parameters() / 1e6
    assert f"model.nominal_size is 400.0M parameters, but this model has {size:.1f}M" in caplog.text


HEADS = {count: f"ablate/heads_{count}.yaml" for count in (1, 2, 4, 8, 16)}


def test_the_overlays_of_heads_differ_in_their_number_only():
    for count, overlay in HEADS.items():
        model = CONTENTS[overlay]["model"]
        assert CONTENTS[overlay] == {"model": CONTENTS[HEADS[8]]["model"] | {"num_heads": count}}, model


@pytest.mark.slow
@pytest.mark.parametrize("size", ["400m", "1.5b"])
def test_heads_of_kda_have_128_channels(size: str):
    """Kernels for wider ones are slower."""
    with_kda = [name for name in GENERAL if "KDA" in str(CONTENTS[name]["model"]["stack"])]
    assert {*with_kda} >= {"kda.yaml", "kda_hybrid.yaml", "kimi_linear.yaml"}
    for name in with_kda:
        sizes = {mixer.matrix_shape[1:] for mixer in built(name, fitting(name, size)).mixers if isinstance(mixer, KDA)}
        assert sizes == {(128, 128)}, name


def test_decays_of_the_hybrid_of_kda_are_bounded():
    assert {mixer.decay.lower_bound for mixer in built("kda_hybrid.yaml").mixers if isinstance(mixer, KDA)} == {-5.0}


@pytest.mark.slow
# heads of a size that the config chooses would make the model narrower
@pytest.mark.parametrize("name", [name for name in WHOLE if name != "olmo_hybrid.yaml"])
def test_other_numbers_of_heads_are_of_equal_size_or_refused(name: str):
    general = fitting(name, "400m") if name in GENERAL else "size/400m.yaml"
    base = [name, (sizes_of(name) or [general])[0]]
    if name in ("kda.yaml", "gated_deltanet2.yaml"):  # otherwise the rank is the size of a head
        base.append("model.stack.mixer.mixer.rank=64")
    expected, counts = built(*base, vocab_size=1024, num_layers=3).num_parameters(), []
    for count in HEADS:
        try:  # the parser refuses all of them, or a mixer refuses some
            model = built(*base, HEADS[8], vocab_size=1024, num_layers=3, num_heads=count)
        except UserError:
            continue
        counts.append(count)
        assert {mixer.num_heads for mixer in model.mixers} == {count}
        assert model.num_parameters() == pytest.approx(expected, rel=0.01)
    assert counts == [*HEADS] or name not in ("gated_deltanet.yaml", "deltanet.yaml", "retnet.yaml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mamba2.yaml", "head_dim"), ("hgrn2.yaml", "num_heads"), ("tnl.yaml", "head_dim"), ("gdn_h2.yaml", "mixer")],
)
def test_heads_that_a_mixer_does_not_choose_are_refused_in_one_sentence(name: str, expected: str, command: Command):
    done = command("fit", "--config", name, "--config", "ablate/heads_8.yaml", "--print_config")
    assert expected in done.sentence()


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_recurrent_mixer_ships_expandable(name: str):
    """`factor` is one key of every config, so that one override is the whole ablation."""
    actual = list(slots(resolved(name)["model"]["stack"]))
    assert actual
    for cls, around, arguments in actual:
        if cls is Expanded:
            assert arguments["factor"] == 1
        elif issubclass(cls, LinearMixer):
            assert around in (Expanded, Bidirectional), f"{cls.__name__} stands in {around}"


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_resolved_config_keeps_the_data_that_its_file_names(name: str):
    """`to_dict` has parsed all of it again, and compared."""
    arguments = resolved(name)["data"]["init_args"]
    data = CONTENTS[name]["data"]
    for key, value in data.get("init_args", data).items():
        assert arguments[key] == value or key == "tasks", key  # a task shows its weight too


PRINTED = ("gdn_h2.yaml", "recall/mqar.yaml", "image/digits.yaml")  # text, synthetic tasks, labels


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PRINTED else pytest.mark.nightly) for name in WHOLE]
)
def test_printed_configs_can_be_read_back(name: str, command: Command, desk: Path):
    printed = command("fit", "--config", name, "--print_config").ok()
    (desk / "printed.yaml").write_text(printed.out)
    repeated = command("fit", "--config", "printed.yaml", "--print_config")
    assert repeated.out == printed.out


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
@pytest.mark.parametrize("key", [pytest.param(key, id=" ".join(map(str, key))) for key in PUBLISHED])
def test_published_sizes(key: tuple[str, str, int | None]):
    config, size, factor = key
    overrides = [] if factor is None else [f"model.stack.mixer.factor={factor}"]
    assert built(config, size, *overrides).num_parameters() == PUBLISHED[key]


@pytest.mark.slow
def test_the_sizes_of_gated_delta_networks():
    """H·K is ¾ of the width and V = 2K, with 9 heads; attention has heads of 128."""
    for name, size in SIZES:
        if name.startswith("gated_delta_networks/"):
            model = built(name, size)
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
    published = {model: built(f"{folder}/{model}.yaml", f"{folder}/{model}-{size}.yaml") for model in ("gdn", "h1")}
    counts = [model.num_parameters() for model in published.values()]
    fitting = {"mamba1": "mamba", "mamba2": "mamba", "deltanet": "transformer", "hgrn2": "transformer"}
    fitting |= {name: name for name in ("transformer", "retnet", "samba", f"{folder}/h2_mamba2_gdn_swa")}
    orders = [name.removesuffix(".yaml") for name in WHOLE if name.startswith(f"{folder}/h2_") and size == "0.4b"]
    for name, overlay in (fitting | {order: order for order in orders}).items():
        overlay = f"{folder}/{overlay.rpartition('/')[2]}-{size}.yaml"
        model = built(f"{name}.yaml", recipe, overlay)
        assert min(counts) * 0.99 < model.num_parameters() < max(counts) * 1.02, name
        assert model.num_parameters() == pytest.approx(CONTENTS[overlay]["model"]["nominal_size"], rel=0.03)
        assert {m.window_size for m in model.mixers if isinstance(m, SlidingWindowAttention)} <= {2048}
        assert {m.head_dim for m in model.mixers if isinstance(m, SoftmaxAttention)} <= {128}
    trained = [copy.deepcopy(resolved(*files)) for files in ((f"{folder}/gdn.yaml",), ("mamba2.yaml", recipe))]
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
@pytest.mark.parametrize("files", [pytest.param(files, id=" ".join(files)) for files in HGRN2])
def test_the_models_of_hgrn2(files: tuple[str, ...], caplog: pytest.LogCaptureFixture):
    model = built(*files)
    assert "nominal_size" not in caplog.text
    assert model.num_parameters() == pytest.approx(HGRN2[files], rel=0.06)
    assert {mixer.key_size for mixer in model.mixers if isinstance(mixer, LinearMixer)} <= {128}


@pytest.mark.slow
def test_transformer_2k_is_the_same_model_with_a_window():
    files = ("state_expansion/transformer.yaml", "size/transformer-400m.yaml")
    model = built(*files, "state_expansion/2k.yaml")
    assert {(type(m), m.window_size) for m in model.mixers} == {(SlidingWindowAttention, 2048)}
    assert model.num_parameters() == built(*files).num_parameters()


def test_the_best_order_of_h2_is_the_general_one():
    assert resolved("gdn_h2.yaml") == resolved("gated_delta_networks/h2_mamba2_gdn_swa.yaml")


RECIPES = ("20m", "60m", "160m", "400m", "1.5b", "3b")
MIXERS = ["gated_deltanet", "gdn_h1", "gdn_h2", "kda_hybrid", "qwen3_5", "mamba2", "gla", "hgrn2", "transformer"]


@pytest.mark.slow
@pytest.mark.parametrize("size", RECIPES)
def test_a_recipe_gives_every_mixer_its_size(size: str):
    for name in MIXERS:
        config = configs.read_model(f"{name}.yaml", f"recipe/{size}.yaml")
        model = configs.from_config(config, device="meta")
        assert model.num_parameters() == pytest.approx(config.model.nominal_size, rel=0.03), name
        assert config.model.num_layers == model.num_layers
        assert {mixer.window_size for mixer in model.mixers if isinstance(mixer, SlidingWindowAttention)} <= {2048}


@pytest.mark.slow
@pytest.mark.parametrize("size", RECIPES)
def test_a_recipe_follows_the_rules_in_its_header(size: str):
    config = parsed("gated_deltanet.yaml", f"recipe/{size}.yaml")
    model, data, steps = config.model, config.data.init_args, config.trainer.max_steps
    per_step, tokens = data.batch_size * data.sequence_length, 20 * model.nominal_size
    assert steps * per_step == pytest.approx(tokens, rel=1e-3)
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    flops = 6 * (model.nominal_size - embeddings) * tokens
    assert config.optim.learning_rate == pytest.approx(0.3118 * flops**-0.125, rel=0.04)
    assert data.batch_size == 2 ** round(math.log2(0.2920 * flops**0.3271 / data.sequence_length))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3_5", 24),  # six patterns of four layers; 25 layers are closer to 1.5 billion parameters
        ("gdn_h2", 24),
        ("kda_hybrid", 26),  # 24 and 28 layers are more than 3 % off
    ],
)
def test_a_depth_keeps_whole_patterns(name: str, layers: int):
    config = configs.read_model(f"{name}.yaml", "recipe/1.5b.yaml")
    assert configs.from_config(config, device="meta").num_layers == layers


def test_a_depth_needs_a_size():
    with pytest.raises(UserError, match=r"^model\.num_layers: null means the depth closest to"):
        built("gla.yaml", "model.num_layers=null")
