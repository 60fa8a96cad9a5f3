"""The modelling file computes what our models compute: prompts, padded batches, decoding and generation."""

import ast
import copy
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from mixers import Expansion, FeatureMap
from zoo.checkpoints.tensor_files import TensorsInMemory
from zoo.saved.public.standalone import written
from zoo.saved.public.standalone.described import ATTENTION, LINEAR
from zoo.saved.public.standalone.written import standalone

from .models import CASES, MODELLING, SIZES, build, component, expanded, theirs, uniform

Oracle = Callable[[str], ModuleType]
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 2e-5  # of the largest logit: fp32 rounding through three layers
PADDING, PROMPT, DECODED = (0, 5, 19), 35, 32


def close(actual: Tensor, expected: Tensor, exact: Tensor | None = None) -> None:
    """Compare logits in fp32; where norms magnify rounding, as far as ours are from ours in fp64."""
    atol = TOLERANCE * expected.abs().max().item()
    if exact is not None:
        atol = max(atol, 4 * (expected - exact).abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def exactly(model: nn.Module) -> nn.Module:
    """The model in fp64."""
    return copy.deepcopy(model).double()


def padded(length: int) -> tuple[Tensor, Tensor]:
    """Tokens of three rows, and the mask of the padding in front."""
    place = torch.arange(length)
    mask = (place >= torch.tensor(PADDING)[:, None]).long()
    return torch.randint(0, 61, mask.shape), mask


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_ours(case: str, oracle: Oracle):
    """Prompts of odd length; then a batch with padding, read in two parts and decoded token by token."""
    ours = build(case)
    model, exact = theirs(ours, oracle), exactly(ours)
    with torch.no_grad():
        for length in (1, 7, 67):
            tokens = torch.randint(0, 61, (2, length))
            close(model(tokens).logits, ours(tokens)[0], expected := exact(tokens)[0])
        # decay rates and frequencies are stored in fp32
        torch.testing.assert_close(exactly(model)(tokens).logits, expected, rtol=0, atol=2e-6 * expected.abs().max())
        tokens, mask = padded(PROMPT + DECODED)
        ends = [21, *range(PROMPT, PROMPT + DECODED + 1)]
        cache, parts = None, []
        for start, end in zip([0, *ends], ends, strict=False):
            output = model(tokens[:, start:end], mask[:, :end], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        for decoded, row, count in zip(torch.cat(parts, 1), tokens, PADDING, strict=True):
            alone = row[None, count:]
            close(decoded[count:], ours(alone)[0][0], exact(alone)[0][0])


def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, e: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, a token at a time."""
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        u = v[:, t] if e is None else v[:, t] - torch.einsum("brkv,brk->brv", state, e[:, t])
        state = state + k[:, t, :, :, None] * u[:, :, None]
        outputs.append(torch.einsum("brkv,brk->brv", state, q[:, t]))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("length", [1, 15, 67, 131])
def test_the_recurrence_is_a_loop(length: int, per_channel: bool, delta: bool, oracle: Oracle):
    """In outputs and gradients, with decays from none to total within a chunk."""
    oracle("transformers")
    shape = (2, length, 3)
    q, k, v = (torch.randn(*shape, 8, dtype=torch.float64) for _ in range(3))
    k = F.normalize(k, dim=-1)
    g = -(torch.rand(*shape, 8 if per_channel else 1, dtype=torch.float64) * 8 - 6).exp()
    g[:, length // 2] = -1e5
    g[:, length // 3] = 0
    e = 2 * torch.rand(*shape, 1, dtype=torch.float64) * k if delta else None
    arguments = [q, k, v, g, e, torch.randn(2, 3, 8, 8, dtype=torch.float64)]
    inputs = [x.requires_grad_() for x in arguments if x is not None]
    results = []
    for function in (oracle(MODELLING).recurrence, loop):
        o, state = function(*arguments)
        weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
        loss = (o * weights).sum() + state.square().sum()
        results.append((o, state, *torch.autograd.grad(loss, inputs)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["h2", "cosFormer2", "mamba2"])
def test_a_padded_batch_is_continued_as_each_prompt_alone(case: str, oracle: Oracle):
    ours = build(case)
    model = theirs(ours, oracle)
    tokens, mask = padded(27)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    together = model.generate(tokens, attention_mask=mask, **options)  # type: ignore[operator]
    for i, count in enumerate(PADDING):
        alone = tokens[i : i + 1, count:]
        for _ in range(12):
            with torch.no_grad():
                alone = torch.cat([alone, ours(alone)[0][:, -1:].argmax(-1)], 1)
        assert torch.equal(together[i, count:], alone[0])
    search = {**options, "attention_mask": mask, "num_beams": 3}
    beams = [model.generate(tokens, use_cache=cached, **search) for cached in (True, False)]  # type: ignore[operator]
    assert torch.equal(*beams)


def test_the_cache_is_as_large_as_the_layers_need(oracle: Oracle):
    """A matrix and convolutions' last inputs, and the keys and values of a window but one, however long the text."""
    model = theirs(build("h1"), oracle)
    caches = [model(torch.randint(0, 61, (2, length))).past_key_values for length in (30, 67)]
    shapes = [[[tuple(x.shape) for x in past] for past in cache.pasts] for cache in caches]
    assert shapes[0] == shapes[1]
    assert shapes[0][0] == [(2, 2, 16, 16), (2, 3, 32), (2, 3, 32), (2, 3, 32)]
    assert shapes[0][1][:2] == [(2, 6, 2, 16)] * 2


def test_padding_behind_a_prompt(oracle: Oracle):
    """It changes nothing, but a state that read it could not be continued."""
    ours = build("gla")
    model = theirs(ours, oracle)
    tokens, mask = torch.randint(0, 61, (1, 9)), torch.tensor([[1] * 7 + [0] * 2])
    with torch.no_grad():
        close(model(tokens, mask, use_cache=False).logits[:, :7], ours(tokens[:, :7])[0])
        with pytest.raises(ValueError, match=r"^attention_mask: padding must be on the left"):
            model(tokens, mask)
        with pytest.raises(ValueError, match=r"^attention_mask: must be \[1,9\], got \[1, 7\]"):
            model(tokens, mask[:, :7])


def test_labels_and_the_last_logits(oracle: Oracle):
    ours = build("h1")
    model, tokens = theirs(ours, oracle), torch.randint(0, 61, (2, 9))
    with torch.no_grad():
        logits = ours(tokens)[0]
        output = model(tokens, labels=tokens, logits_to_keep=0)
        close(model(tokens, logits_to_keep=2).logits, logits[:, -2:])
        close(model(inputs_embeds=model.embeddings(tokens)).logits, logits)  # type: ignore[operator]
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=1e-4)
    assert model(tokens, return_dict=False)[0].shape == logits.shape


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("layers", 0, "settings", "headz"), 2, "Linear.headz is unknown; choose from num_heads, num_key_heads, "),
        (("layers", 0, "settings", "scale"), None, "Linear.scale is missing"),
        (("layers", 0, "settings", "scale"), "1", "Linear.scale is '1'; it must be float"),
        (("layers", 0, "settings", "subheads"), True, "Linear.subheads is True; it must be int"),
        (("layers", 0, "settings", "gate"), "swish", "Linear.gate is 'swish'; it must be 'identity' or 'silu' or "),
        (("layers", 0, "settings", "decay", "kind"), "softpls", "Decay.kind is 'softpls'; it must be 'constant' or "),
        (("layers", 0, "settings", "features", "q", "norm"), "l3", "Features.norm is 'l3'; it must be 'none' or 'l1' "),
        (("layers", 0, "kind"), "mamba", "Layer.kind is 'mamba'; it must be 'linear' or 'attention'"),
        (("order",), [0, 2], r"stack.order is \[0, 2\]; it must be a list with a number below 2 for each of 2 layers"),
        (
            ("order",),
            [0.0, 1.0],
            r"stack.order is \[0.0, 1.0\]; it must be a list with a number below 2 for each of 2 layers",
        ),
        (
            ("order",),
            [[0], 1],
            r"stack.order is \[\[0\], 1\]; it must be a list with a number below 2 for each of 2 layers",
        ),
        (("layers", 0), 5, "Layer is 5; it must be an object with settings"),
        (("layers", 0, "settings", "features", "q"), 5, "Features is 5; it must be an object with settings"),
        (
            ("layers", 0, "settings", "features"),
            {"q": {}},
            r"features is \{'q': \{\}\}; it must be an object with q, k, v",
        ),
        (
            ("layers", 0, "settings", "features", "q", "turning"),
            3,
            "Features.turning is 3; it must be an even number",
        ),
        (("layers", 0, "settings", "features", "q", "conv"), -1, "Features.conv is -1; it must be a finite number of "),
        (
            ("layers", 0, "settings", "num_heads"),
            -2,
            "Linear.num_heads is -2; it must be a finite number of at",
        ),
        (("layers", 0, "settings", "num_key_heads"), 0, "Linear.num_key_heads is 0; it must be a finite number of at "),
        (("layers", 0, "settings", "num_key_heads"), 7, "Linear.num_key_heads is 7; it must be a divisor of "),
        (("layers", 0, "settings", "scale"), math.nan, "Linear.scale is nan; it must be a finite number of at least 0"),
        (("layers", 1, "settings", "window"), 0, "Attention.window is 0; it must be a finite number of at least 1"),
        (("layers", 1, "settings", "gates"), 5, "Attention.gates is 5; it must be a multiple of "),
        (("norm", "eps"), math.inf, "Norm.eps is inf; it must be a finite number of at least 0"),
        (("norm", "groups"), 7, "Norm.groups is 7; it must be a divisor of "),
        (("norm", "eps"), None, "Norm.eps is missing"),
        (("mlps",), {}, "stack.mlps is unknown; choose from layers, order, position, norm, mlp"),
    ],
)
def test_settings_are_checked(path: tuple[Any, ...], value: object, message: str, oracle: Oracle):
    oracle("transformers")
    modelling, ours = oracle(MODELLING), build("h1")
    config = json.loads(json.dumps(standalone(ours, TensorsInMemory(ours.state_dict())).config))
    place = config["model"]
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(ValueError, match=f"^config.json: {message}"):
        modelling.ZooForCausalLM(modelling.ZooConfig(**config))


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [0, -64, "64", math.nan])
def test_sizes_of_the_model_are_checked(key: str, value: object, oracle: Oracle):
    oracle("transformers")
    modelling, sizes = oracle(MODELLING), {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1}
    with pytest.raises(ValueError, match=f"^config.json: {key} is {value!r}; it must be a whole number of at least 1"):
        modelling.ZooForCausalLM(modelling.ZooConfig(**{**sizes, key: value}, model={}))


class Doubled(FeatureMap):
    """A feature map of a user."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return 2 * x


class Twice(Expansion):
    """An expansion of a user."""

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        return torch.cat([stream, stream], -1)


YARN = component("YarnRotary", factor=2.0, original_length=30)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"stack": uniform("Mamba1")}, "the mixer Mamba1; it can hold CosFormer2, DeltaNet, GLA, .* TNL"),
        ({"stack": component("H1", first="GLA", second="MLSTM")}, "the mixer MLSTM; it can hold "),
        ({"stack": uniform("GLA", qk={"map": f"{__name__}.Doubled"})}, "the feature map Doubled"),
        ({"stack": uniform("GLA", qk={"map": YARN})}, "the feature map YarnRotary"),
        ({"stack": uniform("GatedDeltaNet", preconditioner="Preconditioner")}, "the preconditioner Preconditioner"),
        ({"stack": uniform("GLA"), "head": component("Classifier", num_classes=3)}, "the head Classifier"),
        ({"stack": uniform("GLA"), "position": "GLA"}, "the position GLA"),
        ({"stack": uniform("GLA"), "embedding_norm": True}, "the norm of embeddings RMSNorm"),
        ({"stack": uniform("GLA"), "logit_cap": 5.0}, "logit_cap 5 of this model; only null"),
        ({"stack": expanded("GLA", 2, expansion=f"{__name__}.Twice")}, "the expansion Twice"),
        ({"stack": uniform("GLA"), "multipliers": {"embedding": 12.0}}, "multipliers.embedding 12; it can hold 1"),
        ({"stack": uniform("GLA"), "multipliers": {"residual": 0.22}}, "multipliers.residual 0.22; it can hold 1"),
        (
            {"stack": uniform("GLA"), "multipliers": {"logits_scaling": 3.0}},
            "multipliers.logits_scaling 3; it can hold 1",
        ),
        ({"stack": uniform("SoftmaxAttention", scale=0.5, head_dim=16)}, "scale · √head_dim 2; it can hold 1"),
        ({"stack": uniform("GLA"), "mlp": "SquaredReLU"}, "the channel mixer SquaredReLU"),
        ({"stack": uniform("MLPLayer")}, "the mixer MLPLayer; it can hold "),
    ],
)
def test_other_components_are_refused(model: dict[str, Any], message: str):
    ours = zoo.build({"model": {**SIZES, **model}})
    with pytest.raises(zoo.UserError, match=f"^to: transformers cannot hold {message}"):
        standalone(ours, TensorsInMemory(ours.state_dict()))


def test_no_tensor_is_left_behind():
    ours = build("retnet")
    tensors = {**ours.state_dict(), "layers.0.mixer.secret": torch.zeros(1)}
    with pytest.raises(
        zoo.UserError, match=r"^to: transformers cannot hold the tensors layers\.0\.mixer\.secret of this model"
    ):
        standalone(ours, TensorsInMemory(tensors))


def test_the_page_lists_the_mixers():
    page = (Path(__file__).parents[5] / "docs" / "transformers.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| mixer |"))
    assert re.findall(r"`(\w+)`", row) == sorted(kind.__name__ for kind in {**LINEAR, **ATTENTION})


def test_the_file_stands_alone():
    """It imports PyTorch, transformers and Python's library, and can be read in one sitting."""
    text = (Path(written.__file__).parent / f"{written.NAME}.py").read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "." for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= {"torch", "transformers", *sys.stdlib_module_names}
    assert len(text.splitlines()) < 600
