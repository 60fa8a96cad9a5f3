"""Layers of flash-linear-attention as mixers: with stand-ins on a CPU, and theirs on a GPU."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import kernels
import mixers
import zoo
from mixers import DeltaNet, FLALayer, Site

from .test_parity import Oracle

SITE = Site(hidden_size=64, num_heads=2, layer=1, num_layers=3)


class Sums(nn.Module):
    """y_t = W_o Σ_{s≤t} a^(t−s) ⊙ W x_s, with the interface of `fla.layers`."""

    def __init__(self, hidden_size: int = 8, width: int = 16, layer_idx: int | None = None, **kwargs):
        super().__init__()
        if width % 2:
            raise ValueError(f"width {width} is odd")
        self.layer_idx, self.calls = layer_idx, 0
        self.i_proj = nn.Linear(hidden_size, width, bias=False)
        self.rate = nn.Parameter(torch.rand(1, width))
        self.rate._no_weight_decay = True
        self.register_buffer("shift", torch.full((width,), 0.5))
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, **kwargs):
        return self.mix(hidden_states, kwargs.get("cu_seqlens")), None, past_key_values

    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        self.calls += 1
        x = self.i_proj(x)
        a, y = torch.sigmoid(self.rate + self.shift), []
        starts = [] if cu_seqlens is None else cu_seqlens.tolist()
        assert len({*starts}) == len(starts), "an empty document"
        for t in range(x.shape[1]):
            y.append(x[:, t] if t == 0 or t in starts else a * y[-1] + x[:, t])
        return self.o_proj(torch.stack(y, 1))


class SumsOfRows(Sums):
    """`Sums` that takes no packed documents, and returns its output alone."""

    def forward(self, hidden_states, attention_mask=None):
        return self.mix(hidden_states, None)


class Higher(Sums):
    """A layer that needs what a lower one computed."""

    def forward(self, hidden_states, v_first=None):
        return self.mix(hidden_states + v_first, None), None, None, v_first


class OnGPU(Sums):
    """A layer of the package itself."""

    __module__ = "fla.layers.on_gpu"


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch):
    classes = {each.__name__: each for each in (Sums, SumsOfRows, Higher, OnGPU)}
    monkeypatch.setitem(sys.modules, "fla.layers", SimpleNamespace(__all__=[*classes], **classes))


@pytest.mark.usefixtures("layers")
@pytest.mark.parametrize("layer", ["Sums", "SumsOfRows"])
def test_a_layer_is_a_mixer(layer: str):
    assert len(mixers.check_mixer(partial(FLALayer, layer=layer, arguments={"width": 6}))) == 10


@pytest.mark.usefixtures("layers")
@pytest.mark.parametrize(("layer", "calls"), [("Sums", 1), ("SumsOfRows", 2)])
def test_packed_documents_are_one_call_where_the_layer_takes_them(layer: str, calls: int):
    mixer, x = FLALayer(SITE, layer=layer), torch.randn(1, 9, 64)
    packed, _ = mixer(x, cu_seqlens=torch.tensor([0, 4, 4, 9]))
    assert mixer.module.calls == calls
    torch.testing.assert_close(packed, torch.cat([mixer(x[:, :4])[0], mixer(x[:, 4:])[0]], 1))


@pytest.mark.usefixtures("layers")
def test_what_comes_from_the_model():
    mixer = FLALayer(SITE, layer="Sums", arguments={"width": 6})
    assert (mixer.module.layer_idx, mixer.module.i_proj.weight.shape) == (1, (6, 64))
    assert mixer.module.no_weight_decay == ("rate",)
    assert mixer.state_size(7) == 7 * 64
    assert mixer.flops(10) == 10 * 2 * 2 * 6 * 64
    with torch.no_grad():
        for x in (mixer.module.rate, mixer.module.shift):
            x.fill_(torch.nan)
    mixer.reset_parameters()
    assert 0 <= mixer.module.rate.min() <= mixer.module.rate.max() <= 1
    assert (mixer.module.shift == 0.5).all()


@pytest.mark.usefixtures("layers")
@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (
            "Sum",
            None,
            r"layer: fla.layers has no 'Sum'; did you mean 'Sums'\? \(known: Sums, SumsOfRows, Higher, OnGPU\)",
        ),
        ("Higher", None, "layer: Higher reads v_first of another layer, which FLALayer does not support"),
        ("Sums", {"widht": 6}, r"arguments: Sums takes no 'widht'; did you mean 'width'\? \(known: width\)"),
        ("Sums", {"hidden_size": 64}, "arguments: hidden_size of Sums comes from the model; leave it out"),
        ("Sums", {"width": 3}, r"layer: Sums cannot be built with these arguments \(ValueError: width 3 is odd\)"),
    ],
)
def test_mistakes_are_one_sentence(layer: str, arguments: dict | None, message: str):
    with pytest.raises(kernels.UserError, match=f"^{message}$"):
        FLALayer(SITE, layer=layer, arguments=arguments)


@pytest.mark.usefixtures("layers")
def test_what_it_cannot_do():
    mixer, x = FLALayer(SITE, layer="OnGPU"), torch.randn(1, 4, 64)
    with pytest.raises(kernels.UserError, match=r"^layer: the kernels of flash-linear-attention require a GPU, "):
        mixer(x)
    assert not mixers.takes_context_parallel(FLALayer)
    with pytest.raises(kernels.UserError, match=r"^mixer: FLALayer has no matrix state to expand"):
        mixers.Expanded(mixer=partial(FLALayer, layer="Sums"), factor=2)(SITE)


@pytest.mark.usefixtures("layers")
def test_a_run_on_a_cpu_is_refused_before_it_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    stack = {"mixer": {"class_path": "FLALayer", "init_args": {"layer": "OnGPU"}}}
    config = {"model": {"stack": {"class_path": "Uniform", "init_args": stack}}, "trainer": {"accelerator": "cpu"}}
    with pytest.raises(kernels.UserError, match=r"^layer: the kernels of flash-linear-attention require a GPU, "):
        zoo.fit(config, "model.vocab_size=8", "data=MarkovChain", "data.vocab_size=8")
    assert not [*tmp_path.iterdir()]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fla.layers", None)
    with pytest.raises(kernels.UserError, match=r"^layer: needs flash-linear-attention \(.*\); pip install "):
        FLALayer(SITE, layer="GatedDeltaNet")


@pytest.mark.slow
@pytest.mark.parity
def test_every_layer_of_the_package_is_built_or_refused(oracle: Oracle):
    layers, refused = oracle("fla.layers"), {}
    for name in layers.__all__:
        try:
            with torch.device("meta"):
                mixer = FLALayer(Site(256, 4, layer=1, num_layers=3), layer=name)
        except kernels.UserError as error:
            refused[name] = str(error)
        else:
            assert all(x.is_meta for x in (*mixer.parameters(), *mixer.buffers()))
    needs = {"Attention": "ImportError", "MultiheadLatentAttention": "ImportError", "LogLinearMamba2": "num_heads"}
    needs |= {"RWKV7Attention": "v_first", "YOCOCrossAttention": "shared_k"}
    assert {*refused} <= {*needs}  # flash-attn may be installed
    assert all(needs[name] in sentence for name, sentence in refused.items())


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch):
    """FLA's kernels run in the first configuration that they offer: tuning each of them takes minutes."""
    tuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    prune = tuner.prune_configs
    monkeypatch.setattr(tuner, "prune_configs", lambda self, arguments: prune(self, arguments)[:1])


def theirs_and_ours() -> tuple[FLALayer, DeltaNet]:
    """DeltaNet of both packages, with equal weights. It has the fewest kernels of the delta rules."""
    site = Site(hidden_size=128, num_heads=2)
    theirs = FLALayer(site, layer="DeltaNet", arguments={"num_heads": 2})
    ours, weights = DeltaNet(site), theirs.module.state_dict()
    names = {f"in_proj.{n}.weight": f"{n}_proj.weight" for n in "qkvb"}
    names |= {f"{n}_features.weight": f"{n}_conv1d.weight" for n in "qkv"}
    names |= {n: n for n in ("o_norm.weight", "o_proj.weight")}
    ours.load_state_dict({name: weights[other] for name, other in names.items()})
    return theirs, ours


@pytest.mark.gpu
@pytest.mark.parity
@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("packed", [False, True])
def test_deltanet_of_both_packages(oracle: Oracle, packed: bool):
    oracle("fla.layers")
    theirs, ours = (each.cuda() for each in theirs_and_ours())
    cu_seqlens = torch.tensor([0, 70, 70, 200, 333], dtype=torch.int32, device="cuda") if packed else None
    x, dy = torch.randn(2, 1, 333, 128, device="cuda")
    results = []
    for mixer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y, _ = mixer(leaf, cu_seqlens=cu_seqlens)
        y.backward(dy.to(y.dtype))
        results.append((y, leaf.grad))
    for one, other in zip(*results, strict=True):
        assert (one.float() - other.float()).norm() < 2e-2 * other.float().norm()
