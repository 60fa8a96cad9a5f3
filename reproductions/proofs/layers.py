"""Properties of mixers and whole models, as `ops.py` has those of ops."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernels
import mixers
from kernels.core.chunking import CHUNK
from mixers import Site, TokenMixer
from mixers.contract import BF16_TOLERANCE
from reproductions.proofs.findings import as_finding, attempted
from reproductions.proofs.op_calls import LENGTH
from reproductions.proofs.ops import CUTS, DOCUMENTS, DTYPES, exactly, nearly
from zoo.config import build
from zoo.generation.generate import sample_tokens
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Uniform
from zoo.performance.accuracy import relative_error
from zoo.performance.doctor import Finding

SITE = Site(hidden_size=64, num_heads=2, layer=1, num_layers=3)
LIMITS = {"fp32": 1e-4, "bf16": BF16_TOLERANCE}
STEPS = 24  # tokens that are decoded one by one
VOCABULARY = 64
HYBRIDS = ("gdn_h1.yaml", "gdn_h2.yaml", "kda_hybrid.yaml", "qwen3_5.yaml", "samba.yaml")
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 2)  # of prompts
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_heads": 2, "num_layers": 3}


def registered(name: str, site: Site) -> TokenMixer:
    """A small mixer of the registry; matrices that start at zero are drawn, as they would hide what is before them."""
    entry = mixers.entry(name)
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        mixer = entry.mixer(site, **entry.tiny)
        for parameter in mixer.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.1)
    return mixer


class Layer(NamedTuple):
    """A mixer, or a whole model, in a dtype."""

    label: str
    dtype: str
    module: TokenMixer | LanguageModel
    x: Tensor  # two rows of inputs
    other: Tensor  # two more

    @property
    def name(self) -> str:
        """The label and the dtype."""
        return f"{self.label}, {self.dtype}"

    @torch.no_grad()
    def __call__(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """The outputs, for a model the logits."""
        return self.module(x, cu_seqlens=cu_seqlens)[0]


def layers(device: torch.device) -> Iterator[tuple[str, str]]:
    """The names of all registered mixers and of hybrid models, each with each dtype."""
    for name in (*mixers.names(), *HYBRIDS):
        for dtype in DTYPES:
            yield name, dtype


def built(label: str, dtype: str, device: torch.device) -> Layer:
    """A mixer of the registry, or a small language model of a config."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        if label in mixers.names():
            module: TokenMixer | LanguageModel = registered(label, SITE)
            x, other = torch.randn(2, 2, LENGTH, SITE.hidden_size, generator=generator).to(device, DTYPES[dtype])
        else:
            module = build(label, *(f"model.{key}={size}" for key, size in SIZES.items()))
            x, other = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=generator).to(device)
    return Layer(label, dtype, module.to(device, DTYPES[dtype]).eval(), x, other)


def prove(label: str, dtype: str, device: torch.device, checks: Collection[str] | None = None) -> Iterator[Finding]:
    """The findings about a mixer or a model, of all checks or some."""
    layer = built(label, dtype, device)
    ordered = isinstance(layer.module, LanguageModel) or layer.module.causal
    for check, proof in PROOFS.items():
        if (ordered or check not in ("causal", "pieces", "sampled")) and (checks is None or check in checks):
            yield attempted(layer.name, check, partial(proof, layer))


def causal(layer: Layer) -> Finding:
    """Check that no bit of an output depends on later tokens."""
    expected, changed, total, worst = layer(layer.x), 0, 0, 0.0
    for cut in CUTS:
        x, y = layer(torch.cat([layer.x[:, :cut], layer.other[:, cut:]], 1))[:, :cut], expected[:, :cut]
        changed, total, worst = changed + int((x != y).sum()), total + y.numel(), max(worst, relative_error(x, y))
    says = "exact" if not changed else f"{changed / total:.0e} of the outputs change, by {worst:.0e}"
    return as_finding(layer.name, "causal", not changed, says, changed=changed, outputs=total, change=worst)


def _compared(layer: Layer, check: str, actual: Tensor, expected: Tensor) -> Finding:
    """A finding about two results that should be the same."""
    differing = [] if torch.equal(actual, expected) else ["outputs"]
    return nearly(layer.name, check, differing, relative_error(actual, expected), LIMITS[layer.dtype])


def packed(layer: Layer) -> Finding:
    """Compare a packed document with the document alone."""
    start, stop = DOCUMENTS[1:3]
    together, alone = (
        torch.tensor(x, dtype=torch.int32, device=layer.x.device) for x in (DOCUMENTS, (0, stop - start))
    )
    return _compared(
        layer, "packed", layer(layer.x[:1], together)[:, start:stop], layer(layer.x[:1, start:stop], alone)
    )


def rows(layer: Layer) -> Finding:
    """Compare a row of a batch with the row alone."""
    return _compared(layer, "rows", layer(layer.x[:1].repeat(16, *[1] * (layer.x.dim() - 1)))[:1], layer(layer.x[:1]))


@torch.no_grad()
def steps(layer: Layer) -> Finding:
    """Compare decoding, a prompt and then token by token, with one call; of a model its log-probabilities."""
    module, x = layer.module, layer.x[:1]
    expected, first = layer(x), LENGTH - STEPS
    y, state = module(x[:, :first], module.init_state(1))
    outputs = [y]
    for t in range(first, LENGTH):
        y, state = module(x[:, t : t + 1], state)
        outputs.append(y)
    actual = torch.cat(outputs, 1)
    if isinstance(module, LanguageModel):
        actual, expected = (y.float().log_softmax(-1) for y in (actual, expected))
    return _compared(layer, "pieces", actual, expected)


@torch.no_grad()
def invariant(layer: Layer) -> Finding:
    """Check that in deterministic mode rows, documents and pieces of whole chunks have the results of one alone."""
    with kernels.deterministic():
        alone = layer(layer.x[:1])
        same = {"rows": rows(layer).says == "exact", "packed": packed(layer).says == "exact"}
        if isinstance(layer.module, LanguageModel) or layer.module.causal:
            module: Any = layer.module
            outputs, state = [], module.init_state(1)
            for piece in layer.x[:1].split(CHUNK, 1):
                y, state = module(piece, state)
                outputs.append(y)
            same["pieces"] = torch.equal(torch.cat(outputs, 1), alone)
    return exactly(layer.name, "invariant", [name for name, exact in same.items() if not exact])


def language_model(layer: Layer) -> LanguageModel:
    """The model, or one of two such mixers."""
    if isinstance(layer.module, LanguageModel):
        return layer.module
    entry = mixers.entry(layer.label)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = LanguageModel(Uniform(partial(entry.mixer, **entry.tiny)), **SIZES | {"num_layers": 2})
    return model.to(layer.x.device, DTYPES[layer.dtype]).eval()


@torch.no_grad()
def sampled(layer: Layer) -> Finding:
    """Check that in deterministic mode sampled tokens have the log-probabilities that training computes for them.

    Prompts end around the ends of chunks, alone and in batches of up to 64, and sampling leaves their chunks. Training
    has batches and packed documents.
    """
    model, generator = language_model(layer), torch.Generator().manual_seed(1)
    device, differing = layer.x.device, []
    with kernels.deterministic():
        for lengths, new in ((LENGTHS, CHUNK + 2), ((LENGTHS * 13)[:64], 3), ((CHUNK - 1,), 3)):
            prompts = [torch.randint(VOCABULARY, (length,), generator=generator).to(device) for length in lengths]
            drawn = [*sample_tokens(model, prompts, max_new_tokens=new, seed=1)]
            drawn_tokens, scores = (torch.stack(each, 1) for each in zip(*drawn, strict=True))
            documents = [torch.cat([prompt, row]) for prompt, row in zip(prompts, drawn_tokens, strict=True)]
            bounds = torch.tensor([0, *(len(x) - 1 for x in documents)], device=device).cumsum(0).to(torch.int32)
            inputs, labels = (torch.cat([x[cut] for x in documents])[None] for cut in (slice(-1), slice(1, None)))
            packed_losses = model.token_losses(inputs, labels, cu_seqlens=bounds).losses[0]
            for row, (document, score) in enumerate(zip(documents, scores, strict=True)):
                twice = document.expand(2, -1)
                alone = model.token_losses(twice[:, :-1], twice[:, 1:]).losses[0, -new:]
                losses = packed_losses[bounds[row] : bounds[row + 1]][-new:]
                if not torch.equal(score, -alone) or not torch.equal(score, -losses):
                    differing.append(f"those after {lengths[row]} tokens in a batch of {len(lengths)}")
    return exactly(layer.name, "sampled", [*dict.fromkeys(differing)])


def repeats(layer: Layer) -> Finding:
    """Check that results are the same bits each time."""
    expected = layer(layer.x)
    same = all(torch.equal(layer(layer.x), expected) for _ in range(4))
    return as_finding(layer.name, "repeats", same, "exact" if same else "changes from one call to the next")


PROOFS = {
    "causal": causal,
    "packed": packed,
    "rows": rows,
    "pieces": steps,
    "repeats": repeats,
    "invariant": invariant,
    "sampled": sampled,
}
