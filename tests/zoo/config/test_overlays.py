"""Configs and overrides as they are given."""

from pathlib import Path

import pytest

import zoo
from kernels import UserError
from zoo import config as configs
from zoo.config.overlays import first_name, is_override, load_items
from zoo.files.safe_yaml import dump_yaml, parse_yaml
from zoo.train.history import differences

# a value for each group that is not its default
LATER = {
    "data": {"class_path": "MarkovChain", "init_args": {"vocab_size": 9}},
    "model": {"hidden_size": 48, "stack": {"class_path": "Uniform", "init_args": {"mixer": "GLA"}}},
    "optim": {"learning_rate": 0.5},
    "teacher": {"temperature": 3},
    "trainer": {"max_steps": 3},
    "samples": {"max_new_tokens": 3},
    "guard": {"spike": 3},
    "checkpoints": {"every_n_steps": 7},
    "loss_curve": {"every_n_steps": 3},
}


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("trainer.max_steps=3", True),
        ("--trainer.callbacks+=my.Callback", True),
        ("gdn_h2.yaml", False),
        ("runs/factor=1,seed=0/config.yaml", False),  # a path may have an equals sign
        ('{"data": {"path": "a=b"}}', False),
        (Path("a=b.yaml"), False),
    ],
)
def test_what_is_an_override(item, expected: bool) -> None:
    assert is_override(item) is expected


def test_a_path_with_an_equals_sign_is_a_config_in_every_function(command, desk: Path) -> None:
    file = desk / "num_heads=1,seed=0" / "config.yaml"
    file.parent.mkdir()
    file.write_text((configs.CONFIGS / "gla.yaml").read_text())
    name = str(file.relative_to(desk))
    assert zoo.build(name, "tiny.yaml", "model.vocab_size=300", device="meta").hidden_size == 32
    printed = command("fit", f"--config={name}", "--config=tiny.yaml", "--print_config").ok()
    assert "GLA" in printed.out
    missing = command("fit", "--config=num_heads=2,seed=0/config.yaml")
    assert missing.err.startswith("error: config: 'num_heads=2,seed=0/config.yaml' is neither a file nor")


def test_a_run_is_named_after_its_first_file() -> None:
    assert first_name(['{"model": {}}', {"trainer": {}}, "optim.eps=1", "size/400m.yaml", "gla.yaml"]) == "400m"
    assert first_name(["trainer.max_steps=3"]) is None


def test_later_ones_count_whatever_their_form(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {max_steps: 2}\noptim: {weight_decay: 0.5}\n")
    config = configs.read(
        "gla.yaml", {"trainer": {"max_steps": 1}}, file, '{"optim": {"eps": 1}}', "--trainer.max_steps=3"
    )
    assert (config.trainer.max_steps, config.optim.weight_decay, config.optim.eps) == (3, 0.5, 1)
    assert load_items([file]) == [{"trainer": {"max_steps": 2}, "optim": {"weight_decay": 0.5}}]


def test_a_group_that_is_null_has_its_defaults() -> None:
    """Whatever earlier configs say; later ones count."""
    groups = [*configs.GROUPS]
    assert sorted(LATER) == sorted(groups)
    groups.remove("model")
    null = dict.fromkeys(groups)
    model = {"model": LATER["model"]}
    parsed = configs.read(model), configs.read(LATER, null), configs.parse({**model, **null}), configs.read(null, LATER)
    plain, reset, saved, changed = map(configs.to_dict, parsed)
    for group in groups:
        assert reset[group] == saved[group] == plain[group], group
        assert changed[group] != plain[group], group
    with pytest.raises(UserError, match=r"model\.stack: missing; give a config with a model"):
        configs.read(LATER, {"model": None})


@pytest.mark.slow
@pytest.mark.parametrize("null", ["empty_group.yaml", "{optim: null}", "optim=null", "--optim=~"])
def test_null_has_one_meaning_however_it_is_written(null: str, desk: Path) -> None:
    (desk / "empty_group.yaml").write_text("optim:\n")
    assert configs.read("gdn_h2.yaml", "optim.weight_decay=0.5", null).optim == configs.read(LATER, null).optim
    assert configs.read(null, LATER).optim.learning_rate == 0.5


def test_a_run_without_a_group(command, desk: Path) -> None:
    (desk / "few.yaml").write_text("samples:\nguard: null\nloss_curve: ~\n")
    done = command("fit", "--config=few.yaml", "--config=gla.yaml", "--trainer=null", "--print_config").ok()
    printed = parse_yaml(done.out, "printed")
    assert printed["trainer"]["max_steps"] == -1
    assert printed["samples"]["max_new_tokens"] == 64


def test_a_misspelt_group_that_is_null_is_still_refused() -> None:
    with pytest.raises(UserError, match="smaples: unknown key; did you mean 'samples'"):
        configs.read("gla.yaml", {"smaples": None})


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "model.stack.mixer.mixer=TNL",
        "model.stack.mixer.mixer=mixers.TNL",
        "model.stack.init_args.mixer.init_args.mixer.class_path=TNL",
        {"model": {"stack": {"mixer": {"mixer": "TNL"}}}},
        {"model": {"stack": {"mixer": {"mixer": {"class_path": "TNL"}}}}},
        "tnl.yaml",
    ],
)
def test_another_class_starts_from_its_own_defaults(change) -> None:
    def eps(*items) -> float:
        return zoo.config.read(*items).model.stack.init_args.mixer.init_args.mixer.init_args.norm_eps

    assert eps("gla.yaml") == 1e-3
    assert eps("gla.yaml", change) == eps("tnl.yaml") == 1e-6
    assert eps("gla.yaml", change, "model.stack.mixer.mixer.norm_eps=1e-4") == 1e-4
    same = {"model": {"stack": {"mixer": {"mixer": {"class_path": "mixers.GLA", "init_args": {"expand_k": 1.0}}}}}}
    assert eps("gla.yaml", same) == 1e-3


HYBRID = "model.stack.mixers.K.mixer"


@pytest.mark.parametrize(
    "change",
    [
        f"{HYBRID}.decay=ChannelDecay",
        f"{HYBRID}.decay.class_path=ChannelDecay",
        f"{HYBRID}={{decay: ChannelDecay}}",
        "model.stack.init_args.mixers.K.init_args.mixer.init_args.decay=ChannelDecay",
        {"model": {"stack": {"mixers": {"K": {"mixer": {"decay": "ChannelDecay"}}}}}},
        {"model": {"stack": {"init_args": {"mixers": {"K": {"init_args": {"mixer": {"decay": "ChannelDecay"}}}}}}}},
    ],
)
def test_a_key_in_a_dictionary_of_components_leaves_the_others(change) -> None:
    before, after = (configs.to_dict(configs.read("kda_hybrid.yaml", *items)) for items in ([], [change]))
    changed = [(key, new) for key, _, new in differences(before, after) if key.endswith("class_path")]
    assert changed == [
        ("model.stack.init_args.mixers.K.init_args.mixer.init_args.decay.class_path", "mixers.ChannelDecay")
    ]
    model = zoo.build("kda_hybrid.yaml", change, "model.vocab_size=64", device="meta")
    assert [type(mixer).__name__ for mixer in model.mixers[:4]] == ["KDA", "KDA", "KDA", "SoftmaxAttention"]


def test_null_removes_a_key_of_a_dictionary() -> None:
    for null in ("model.stack.mixers.A=null", {"model": {"stack": {"mixers": {"A": None}}}}):
        assert [*configs.read("kda_hybrid.yaml", null).model.stack.init_args.mixers] == ["K"]
    model = zoo.build("kda_hybrid.yaml", "model.stack.pattern=K", null, "model.vocab_size=64", device="meta")
    assert {type(mixer).__name__ for mixer in model.mixers} == {"KDA"}
    with pytest.raises(UserError, match="pattern: 'KKKA' has no mixer for"):
        zoo.build("kda_hybrid.yaml", null, "model.vocab_size=64", device="meta")


def test_sources_and_validation_sets_are_merged_key_by_key_too() -> None:
    changed = configs.read("gla.yaml", "data/mixture.yaml", "data.sources.library.weight=7").data.init_args.sources
    plain = configs.read("gla.yaml", "data/mixture.yaml").data.init_args.sources
    assert [*changed] == [*plain]
    assert changed["library"].weight == 7
    assert changed["library"].path == plain["library"].path
    fewer = configs.read("gla.yaml", "data/mixture.yaml", {"data": {"sources": {"library": None}}}).data.init_args
    assert [*fewer.sources] == [name for name in plain if name != "library"]
    sets = ({"data": {"validation_sets": {name: {"path": f"{name}.txt"}}}} for name in "ab")
    read = configs.read("gla.yaml", *sets, "data.validation_sets.a.text_field=body").data.init_args.validation_sets
    assert {name: (each.path, each.text_field) for name, each in read.items()} == {
        "a": ("a.txt", "body"),
        "b": ("b.txt", "text"),
    }


def test_null_deep_in_a_component() -> None:
    config = configs.read("gdn_h2.yaml", "model.mlp=null")
    assert config.model.mlp is None


def test_numbers_and_text_keep_their_types(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-3 as text and writes the text "1e5" as a number; neither is what a config means."""
    file = tmp_path / "quoted.yaml"
    file.write_text('optim: {learning_rate: 1e-3}\ndata: {init_args: {text_field: "1e5", path: "007"}}\n')
    config = configs.read("gla.yaml", file)
    written = tmp_path / "written.yaml"
    written.write_text(dump_yaml(configs.to_dict(config)))
    for each in (config, configs.read(written), configs.read(configs.to_dict(config))):
        data = each.data.init_args
        assert (each.optim.learning_rate, data.text_field, data.path) == (0.001, "1e5", "007")


@pytest.mark.parametrize(
    "text", ["&x", "*x", "!x", "%x", "@x", "`x", "&x null", "# a", "#x", "007", "1e5", "true", "[a"]
)
def test_text_stays_text_where_text_is_expected(text: str) -> None:
    """`&x` is null in YAML, which would be the embedded corpus."""
    for items in ((f"data.text_field={text}", f"data.path={text}"), ({"data": {"text_field": text, "path": text}},)):
        data = configs.read("gla.yaml", *items).data.init_args
        assert (data.text_field, data.path) == (text, text)
