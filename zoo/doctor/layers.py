"""The registered mixers on a device, as whole layers: packed documents, and bf16."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

import mixers
from mixers import Site, TokenMixer
from mixers.contract import BF16_TOLERANCE
from zoo.benchmarks.gate import relative_error
from zoo.doctor.finding import Finding, found
from zoo.doctor.ops import DOCUMENTS, LENGTH, attempted

SITE = Site(hidden_size=64, num_heads=2, layer=1, num_layers=3)
CHANGE = 1e-4  # relative: norms magnify what sums of another order round


def examine_layers(device: torch.device, seen: Callable[[str], None] = lambda name: None) -> Iterator[Finding]:
    """Findings about all registered mixers.

    Args:
        device: Where they run.
        seen: Called with the name of each mixer before it is examined.
    """
    for name in mixers.names():
        seen(name)
        yield from examine_layer(name, device)


def examine_layer(name: str, device: torch.device) -> Iterator[Finding]:
    """Findings about one mixer."""
    for check, run in {"packed": isolation, "bf16": in_bf16}.items():
        yield attempted(name, check, partial(run, name, device))


def _built(name: str, device: torch.device) -> TokenMixer:
    entry = mixers.entry(name)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return entry.mixer(SITE, **entry.tiny).to(device)


@torch.no_grad()
def isolation(name: str, device: torch.device) -> Finding:
    """Check that a packed document's output does not depend on its neighbours."""
    mixer, generator = _built(name, device), torch.Generator().manual_seed(0)
    x, others = torch.randn(2, 1, LENGTH, SITE.hidden_size, generator=generator).to(device)
    start, stop = DOCUMENTS[1:3]
    others[:, start:stop] = x[:, start:stop]
    cu_seqlens = torch.tensor(DOCUMENTS, dtype=torch.int32, device=device)
    one, other = (mixer(batch, cu_seqlens=cu_seqlens)[0][:, start:stop] for batch in (x, others))
    change = relative_error(other, one)
    says = "alone" if change <= CHANGE else f"outputs of a document change by {change:.1e} with its neighbours"
    return found(name, "packed", change <= CHANGE, says, change=change, limit=CHANGE)


@torch.no_grad()
def in_bf16(name: str, device: torch.device) -> Finding:
    """Check that the layer in bf16 is close to that in fp32; its gates and decays stay in fp32."""
    mixer, generator = _built(name, device), torch.Generator().manual_seed(0)
    x = torch.randn(2, LENGTH, SITE.hidden_size, generator=generator).to(device)
    exact, _ = mixer(x)
    rounded, _ = mixer.bfloat16()(x.bfloat16())
    error = relative_error(rounded, exact)
    passed = error <= BF16_TOLERANCE
    says = f"{error:.0e}" if passed else f"off by {error:.1e}, allowed {BF16_TOLERANCE:.0e}"
    return found(name, "bf16", passed, says, error=error, limit=BF16_TOLERANCE)
