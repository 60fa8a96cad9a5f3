"""What the weights of a larger model are, and what it computes."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from kernels import UserError

from .subjects import STACKS, exported, loaded, logits

PRESERVING = [
    ("Mamba2", "widen"),
    ("Mamba2", "expand"),
    *((name, "expand") for name in ("GLA", "HGRN2", "GatedDeltaNet", "KDA", "Comba", "GatedDeltaProduct", "RetNet")),
    ("KDA, preconditioned", "expand"),
    ("MLSTM", "expand"),
    ("Mamba3", "expand"),
    ("RWKV7", "expand"),
]
GROWING = [(name, way) for name in ("GLA", "HGRN2", "GatedDeltaNet") for way in ("merge", "expand")] + PRESERVING[:1]
GROWING += [("KDA", "merge"), ("KDA, preconditioned", "merge"), ("GatedDeltaProduct", "expand")]
INHERITING = [("HGRN2", "expand"), ("Mamba2", "widen")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with each model; only to be read."""
    folder = tmp_path_factory.mktemp("trained")
    return {name: exported(folder / name, name) for name in STACKS}


def weights(folder: Path) -> dict[str, Tensor]:
    return loaded(folder).state_dict()


def gradients(model: zoo.LanguageModel) -> None:
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(3))
    predicted, _ = model(tokens[:, :-1])
    F.cross_entropy(predicted.flatten(0, 1), tokens[:, 1:].flatten()).backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "name", "way"),
    [
        *(("reinit", *subject) for subject in GROWING),
        # the rest is nightly, since test_merged_heads_inherit and test_every_tensor_keeps_its_dtype see the same layers
        *(
            pytest.param("inherit", *subject, marks=pytest.mark.slow if subject in INHERITING else pytest.mark.nightly)
            for subject in GROWING
        ),
    ],
)
def test_layers_that_stay_are_the_same_bit_by_bit(
    init: str, name: str, way: str, trained: dict[str, Path], tmp_path: Path
):
    grown = zoo.statex(trained[name], tmp_path / "larger", layers=[2, 1], init=init, way=way)
    before, after = weights(trained[name]), weights(grown.folder)
    stay = [n for n in before if not n.startswith(("layers.1.mixer", "layers.2.mixer"))]
    assert all(torch.equal(before[n], after[n]) for n in stay)
    assert [layer for layer in grown.layers] == [1, 2]
    sizes = [mixer.state_size() for mixer in loaded(grown.folder).mixers]
    assert sizes[0] == sizes[3] < sizes[1] == sizes[2]
    assert logits(grown.folder).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GLA", "HGRN2"])
def test_merged_heads_inherit_everything_but_for_the_norm(name: str, trained: dict[str, Path], tmp_path: Path):
    grown = zoo.statex(trained[name], tmp_path / "larger", layers=[1], init="inherit")
    before, after = weights(trained[name]), weights(grown.folder)
    changed = {n for n in before if before[n].shape != after[n].shape}
    assert changed == ({"layers.1.mixer.o_norm.weight"} if name == "GLA" else set())
    assert all(torch.equal(before[n], after[n]) for n in before if n not in changed)
    for n in changed:
        assert torch.equal(after[n], torch.cat([before[n], before[n]]))


@pytest.mark.slow
def test_reinit_of_merged_heads_draws_the_layer_and_its_norm_anew(trained: dict[str, Path], tmp_path: Path):
    grown = zoo.statex(trained["GLA"], tmp_path / "larger", layers=1)
    before, after = weights(trained["GLA"]), weights(grown.folder)
    of_layer = [n for n in after if n.startswith("layers.0.mixer")]
    assert "layers.0.mixer_norm.weight" in of_layer
    assert not any(before[n].shape == after[n].shape and torch.equal(before[n], after[n]) for n in of_layer)
    assert (after["layers.0.mixer_norm.weight"] == 1).all()
    again = zoo.statex(trained["GLA"], tmp_path / "again", layers=1)
    other = zoo.statex(trained["GLA"], tmp_path / "other", layers=1, seed=1)
    assert all(torch.equal(after[n], tensor) for n, tensor in weights(again.folder).items())
    assert not torch.equal(
        after["layers.0.mixer.in_proj.q.weight"], weights(other.folder)["layers.0.mixer.in_proj.q.weight"]
    )


@pytest.mark.slow
def test_reinit_of_mamba2_spares_what_is_no_recurrence(trained: dict[str, Path], tmp_path: Path):
    grown = zoo.statex(trained["Mamba2"], tmp_path / "larger", layers=1)
    before, after = weights(trained["Mamba2"]), weights(grown.folder)
    renewed = {n for n in after if before[n].shape != after[n].shape or not torch.equal(before[n], after[n])}
    parts = {n.removeprefix("layers.0.mixer.") for n in renewed}
    convolutions = {f"{stream}_features.{kind}" for stream in "qk" for kind in ("weight", "bias")}
    assert parts == {"in_proj.B.weight", "in_proj.C.weight", "decay.A_log", "decay.dt_bias", *convolutions}


@pytest.mark.slow
@pytest.mark.parametrize("layers", [[1, 2], [3]])  # the last layer is read last, so its bounds are the ones that count
def test_lower_bounds_that_other_layers_share_are_never_drawn_anew(
    layers: list[int], trained: dict[str, Path], tmp_path: Path
):
    grown = zoo.statex(trained["HGRN2"], tmp_path / "larger", layers=layers)
    before, after = weights(trained["HGRN2"]), weights(grown.folder)
    for layer in (1, 2, 3):
        name = f"layers.{layer}.mixer.lower_bounds.weight"
        assert torch.equal(before[name], after[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), PRESERVING)
def test_preserve_computes_what_the_model_computed(name: str, way: str, trained: dict[str, Path], tmp_path: Path):
    grown = zoo.statex(trained[name], tmp_path / "larger", layers=4, init="preserve", way=way)
    # the previous values of Mamba-3 do not grow
    assert grown.after.state == pytest.approx(4 * grown.before.state, rel=0.01 if name == "Mamba3" else 0)
    # in fp64: the normaliser of mLSTM may be close to zero, which magnifies rounding
    exact, actual = (logits(folder, dtype=torch.float64) for folder in (trained[name], grown.folder))
    torch.testing.assert_close(actual, exact, rtol=1e-9, atol=1e-9)
    # token by token, with states
    model = copy.deepcopy(loaded(grown.folder)).double()
    tokens = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(2))
    state, pieces = model.init_state(2), []
    with torch.no_grad():
        for cut in (tokens[:, :7], *tokens[:, 7:].split(1, 1)):
            piece, state = model(cut, state)
            pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_new_keys_of_mamba2_get_gradients_at_once_and_one_step_changes_what_is_read(
    trained: dict[str, Path], tmp_path: Path
):
    model = zoo.load(zoo.statex(trained["Mamba2"], tmp_path / "larger", layers=1, init="preserve").folder)
    mixer = model.mixers[0]
    G, K = mixer.num_key_heads, mixer.key_size

    def new_rows(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (G, K))[:, K // 4 :]

    def rows_of_C() -> Tensor:
        return new_rows(mixer.state_dict()["in_proj.C.weight"])

    assert (rows_of_C() == 0).all()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients(model)
    assert mixer.q_features.bias.grad is not None
    assert (new_rows(mixer.q_features.bias.grad) != 0).all()
    optimizer.step()
    assert (rows_of_C().abs().sum(-1) > 0).all()
    optimizer.zero_grad()
    gradients(model)  # now B has one as well, as C reads it
    assert mixer.k_features.bias.grad is not None
    assert (new_rows(mixer.k_features.bias.grad) != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GLA", "HGRN2", "GatedDeltaNet", "Mamba2"])
def test_gains_get_a_gradient_at_the_first_step_and_the_subheads_theirs_at_the_second(
    name: str, trained: dict[str, Path], tmp_path: Path
):
    model = zoo.load(zoo.statex(trained[name], tmp_path / "larger", layers=1, init="preserve", way="expand").folder)
    mixer = model.mixers[0]
    expansions = (mixer.q_expand.others.weight, mixer.k_expand.others.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients(model)
    assert (mixer.q_gain.weight.grad != 0).all()
    assert all((weight.grad == 0).all() for weight in expansions)
    optimizer.step()
    optimizer.zero_grad()
    gradients(model)
    assert all((weight.grad.abs().amax((1, 2)) > 0).all() for weight in expansions)


@pytest.mark.slow
def test_preserve_is_checked_where_options_forbid_it(tmp_path: Path):
    """1 + ELU(0) is 1, so that C reads new rows at once; constant decays of TNL depend on the number of subheads."""
    elu = exported(tmp_path / "elu", "Mamba2", "model.stack.mixer.mixer.init_args.xbc.activation=elu1")
    constant = exported(tmp_path / "constant", "TNL")
    for folder, name in ((elu, "Mamba2"), (constant, "TNL")):
        with pytest.raises(
            UserError, match=f"^init: preserve is impossible for layer 0, as {name} with these arguments"
        ):
            zoo.statex(folder, tmp_path / "larger", init="preserve")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["constant", "elu"]


@pytest.mark.slow
def test_a_hybrid_keeps_its_order(trained: dict[str, Path], tmp_path: Path):
    grown = zoo.statex(trained["hybrid"], tmp_path / "larger", layers=3, init="inherit")
    assert list(grown.layers) == [0, 1, 3]  # layer 2 is attention
    kinds = [[type(mixer) for mixer in loaded(folder).mixers] for folder in (trained["hybrid"], grown.folder)]
    assert kinds[0] == kinds[1]


@pytest.mark.slow
def test_what_grew_grows_again_in_another_layer(trained: dict[str, Path], tmp_path: Path):
    first = zoo.statex(trained["GLA"], tmp_path / "first", layers=[0], init="inherit")
    second = zoo.statex(first.folder, tmp_path / "second", layers=[2], init="inherit")
    sizes = [mixer.state_size() for mixer in loaded(second.folder).mixers]
    assert sizes[0] == sizes[2] == 2 * sizes[1] == 2 * sizes[3]
    with pytest.raises(UserError, match=r"^way: GLA has one head, so there is nothing to merge; choose way=expand$"):
        zoo.statex(second.folder, tmp_path / "third", layers=[0])


def test_the_folder_is_that_of_an_export(trained: dict[str, Path], tmp_path: Path):
    grown = zoo.statex(trained["GLA"], tmp_path / "new" / "larger", layers=1)
    files = json.loads((grown.folder / "hashes.json").read_text())["files"]
    assert set(files) == {"config.yaml", "model.safetensors"}
    assert [path.name for path in grown.folder.parent.iterdir()] == ["larger"]
    assert oct(grown.folder.stat().st_mode & 0o777) == oct(trained["GLA"].stat().st_mode & 0o777)
