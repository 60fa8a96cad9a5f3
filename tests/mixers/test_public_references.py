"""Where the code of flash-linear-attention 0.6.0 disagrees with itself: what `docs/delta_family.md` says of it.

A test that fails after an update of that package shows that the page, and the tests of parity, can be simpler.
"""

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from mixers import BoundedChannelDecay, Comba, GatedDeltaProduct

Oracle = Callable[[str], ModuleType]
pytestmark = [pytest.mark.parity, pytest.mark.slow]


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_the_naive_loop_of_comba_reads_after_the_decay_and_its_chunks_before(oracle: Oracle):
    theirs = oracle("fla.ops.comba.naive")
    q, k = (F.normalize(torch.randn(2, 70, 3, 8), dim=-1) for _ in "qk")
    v, beta, decay = torch.randn(2, 70, 3, 12), torch.rand(2, 70, 3), -torch.rand(2, 70, 3)
    p = 0.7 * k

    def ours(read_before: bool) -> Tensor:
        strength = beta.unsqueeze(-1)
        return kernels.delta_rule(q, k, strength * v, log_decay=decay, erase=strength * p, read_before=read_before)[0]

    loop, chunks = theirs.naive_recurrent_comba(q, k, v, p, beta, decay)[0], theirs.naive_chunk_comba
    assert distance(ours(read_before=False), loop) < 1e-5
    assert distance(ours(read_before=True), chunks(q, k, v, p, decay, beta)[0]) < 1e-5
    assert distance(ours(read_before=True), loop) > 0.05
    assert Comba.read_before


def test_the_layer_of_comba_has_its_kernels_normalise_p(oracle: Oracle):
    # the kernels need a GPU, where tests/zoo/saved/public compares whole models
    assert "use_qk_l2norm_in_kernel=True" in inspect.getsource(oracle("fla.layers.comba").Comba.forward)
    kernel = inspect.getsource(inspect.unwrap(oracle("fla.ops.comba.chunk").ChunkCombaFunction.forward))
    assert "l2norm_fwd(p)" in kernel
    assert not inspect.signature(Comba).parameters["unit_feedback"].default


def test_the_two_sets_of_defaults_of_gated_deltaproduct(oracle: Oracle):
    layer = oracle("fla.layers.gated_deltaproduct").GatedDeltaProduct
    config = oracle("fla.models").GatedDeltaProductConfig
    names = ("num_householder", "use_forget_gate", "allow_neg_eigval")
    of_layer, of_config = (
        [inspect.signature(made).parameters[name].default for name in names] for made in (layer, config)
    )
    assert (of_layer, of_config) == ([2, True, True], [1, False, False])
    ours = inspect.signature(GatedDeltaProduct).parameters
    steps, decay, reflects = (ours[name].default for name in ("num_steps", "decay", "allow_neg_eigval"))
    assert [steps, decay is not None, reflects] == of_layer


def test_the_lower_bound_of_kda_is_a_sigmoid(oracle: Oracle):
    theirs = oracle("fla.ops.kda.gate").naive_kda_lowerbound_gate
    ours, f = BoundedChannelDecay(2, 3, lower_bound=-5.0), torch.linspace(-20, 20, 30).view(1, 5, 6)
    torch.nn.init.uniform_(ours.A_log, -1, 1)
    expected = theirs(f.unflatten(-1, (2, 3)), ours.A_log, ours.dt_bias, lower_bound=-5.0)
    torch.testing.assert_close(ours(f), expected)


def test_the_heads_of_their_preconditioners(oracle: Oracle):
    sizes = dict(hidden_size=32, num_heads=2, num_v_heads=4, head_dim=8)
    layers = oracle("fla.layers")
    heads = [len(layer(**sizes).log_atk_scale) for layer in (layers.PrecondKDA, layers.PrecondGatedDeltaNet)]
    assert heads == [4, 2]


def test_importing_transformers_and_our_kernels(oracle: Oracle):
    # it asks any importable package called `kernels` for its version, and takes some versions for its own companion
    assert oracle("transformers").Mamba2Config.model_type == "mamba2"
    assert oracle("kernels") is kernels
