"""The executable definition of "is a token mixer".

`check_mixer(factory)` runs every check below on a tiny layer, in fp64 where results must be exact. Authors of plug-ins
call it in a test; for registered mixers the tests of this project do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import kernels
from kernels.core.torch_internals import tree_leaves, tree_map
from kernels.flops import as_computed

from .base import TUTORIAL, LinearMixer, Site, TokenMixer
from .counting import counted_flops
from .expanded import Expanded, MixerFactory
from .interface import checked_result, placed, streams_of
from .state import remembered
from .two_layers import TwoLayers

FLOPS_TOLERANCE = 0.05  # between flops() and the counter: padding and small vectors
BF16_TOLERANCE = 0.05  # relative error of a whole layer in bf16
TINY = Site(hidden_size=64, num_heads=2, layer=1, num_layers=3)
UNCOUNTED = "without integers, and what is typed History or Position"
LENGTH, CUTS = 21, [0, 4, 4, 12, 21]  # one of the packed documents is empty


class ContractError(AssertionError):
    """A mixer breaks the contract; the message lists every broken clause."""


def check_mixer(
    factory: MixerFactory, *, site: Site = TINY, expanded: bool = True, below: MixerFactory | None = None
) -> list[str]:
    """Check that `factory(site)` is a token mixer.

    One that declares itself not causal is spared the clauses about states, and must mix both ways. One that passes
    streams is checked alone and above itself; one that needs a stream, above the mixer that passes it.

    Args:
        factory: A mixer class, or a partial of one, called with a site.
        site: Where to build it; tiny by default.
        expanded: Also check a LinearMixer with its state expanded by 2, with and without subheads.
        below: The mixer of the layer below, for a mixer that needs a stream of it; None for no layer below.

    Returns:
        The names of the clauses that the mixer satisfies.

    Raises:
        ContractError: It breaks a clause; the message lists every broken one, with the reason.
    """
    if below is not None:
        factory = partial(TwoLayers, lower=below, upper=factory)
    variants: dict[str, MixerFactory] = {"": factory}
    built = _with_interface(factory, site)
    if streams_of(built):
        variants["above itself: "] = partial(TwoLayers, lower=factory, upper=factory)
    if expanded and isinstance(built, LinearMixer) and built.site.expand is None:
        for subheads in (True, False):
            wrapped = Expanded(mixer=factory, factor=2, subheads=subheads)  # type: ignore[arg-type]
            variants[f"expanded {'with' if subheads else 'without'} subheads: "] = wrapped
    passed, broken = [], []
    for prefix, variant in variants.items():
        for clause in CLAUSES if built.causal else NOT_CAUSAL:
            name = prefix + clause.__name__.replace("_", " ")
            try:
                clause(variant, site)
            except Exception as error:  # a crash breaks the clause as much as a wrong number
                said = isinstance(error, ContractError | kernels.UserError)
                broken.append(f"{name}: {error if said else repr(error)}")
            else:
                passed.append(name)
    if broken:
        raise ContractError("\n".join(broken))
    return passed


def _with_interface(factory: Any, site: Site) -> TokenMixer:
    """A mixer that the clauses can call.

    Raises:
        ContractError: It cannot be built or called; one sentence says why, since every clause would fail for that.
    """
    if isinstance(factory, nn.Module):
        raise ContractError(f"factory: pass the class {type(factory).__name__}, not a module that was built already")
    if isinstance(factory, type) and issubclass(factory, nn.Module) and not issubclass(factory, TokenMixer):
        name = factory.__name__
        raise ContractError(f"{name} is not a TokenMixer; pass mixers.wrap({name}), or write one ({TUTORIAL})")
    if not callable(factory):
        hint = f"; pass mixers.get({factory!r})" if isinstance(factory, str) else ""
        raise ContractError(f"factory: {factory!r} is not a class or function that makes a mixer{hint}")
    name = getattr(factory, "__name__", "the factory")
    with _told(f"{name}(site) fails, and a mixer takes a mixers.Site first and then named arguments with defaults"):
        mixer, x = _build(factory, site)
    name = type(mixer).__name__
    with _told(f"forward of {name} fails for x of shape {tuple(x.shape)}"):
        y, _ = checked_result(mixer(x), mixer, x)
    _expect(bool(y.isfinite().all()), f"forward of {name} returns numbers that are not finite")
    if mixer.causal:
        with _told(f"init_state of {name} fails for a batch size of 2"):
            state = mixer.init_state(len(x))
        with _told(f"forward of {name} fails with the state of init_state"):
            _, state = checked_result(mixer(x, state), mixer, x)
        _expect(state is not None, f"forward of {name} must return the next state if it gets one, got None")
    return mixer


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn errors inside the block into a ContractError that begins with `what`, unless they say it themselves."""
    try:
        yield
    except kernels.UserError as error:
        raise ContractError(str(error)) from None
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ContractError(f"{what} ({reason})") from error


def shapes_and_dtypes(factory: MixerFactory, site: Site) -> None:
    mixer, x = _build(factory, site, torch.float32)
    y, state = mixer(x)
    _expect(y.dtype == x.dtype, f"x in {x.dtype} became {y.dtype}")
    _expect(state is None, "a state came back although none was given")
    if not mixer.causal:
        return
    _, state = mixer(x, mixer.init_state(len(x)))
    _expect(all(isinstance(leaf, Tensor) for leaf in tree_leaves(state)), "the state holds something besides tensors")


def causality(factory: MixerFactory, site: Site) -> None:
    mixer, x = _build(factory, site)
    y, other = mixer(x)[0], x.clone()
    other[:, 11:] += 1
    z = mixer(other)[0]
    _close(z[:, :11], y[:, :11], "outputs before a change of the input")
    _expect(not torch.allclose(z[:, 12:], y[:, 12:]), "the past has no effect on the outputs")


def mixes_both_ways(factory: MixerFactory, site: Site) -> None:
    mixer, x = _build(factory, site)
    y, other = mixer(x)[0], x.clone()
    other[:, 11] += 1
    z = mixer(other)[0]
    for side, outputs in {"past": slice(12, None), "future": slice(11)}.items():
        _expect(not torch.allclose(z[:, outputs], y[:, outputs]), f"the {side} has no effect on the outputs")


def takes_no_state(factory: MixerFactory, site: Site) -> None:
    mixer, x = _build(factory, site)
    for what, call in {"init_state": lambda: mixer.init_state(1), "forward": lambda: mixer(x, ())}.items():
        try:
            call()
        except kernels.UserError:
            continue
        raise ContractError(f"{what} must raise a UserError, as it has no state")


def whole_is_pieces_is_tokens(factory: MixerFactory, site: Site) -> None:
    mixer, x = _build(factory, site)
    y, _ = mixer(x)
    fresh_y, state = mixer(x, mixer.init_state(len(x)))
    _close(fresh_y, y, "outputs with a fresh state")
    for name, bounds in (("two pieces", [0, 8, LENGTH]), ("token by token", list(range(LENGTH + 1)))):
        piece, outputs = mixer.init_state(len(x)), []
        for start, stop in zip(bounds, bounds[1:], strict=False):
            out, piece = mixer(x[:, start:stop], piece)
            outputs.append(out)
        _close(torch.cat(outputs, 1), y, f"outputs in {name}")
        for a, b in zip(tree_leaves(piece), tree_leaves(state), strict=True):
            _close(a, b, f"states in {name}")


def packed_documents_are_separate(factory: MixerFactory, site: Site) -> None:
    mixer, x = _build(factory, site)
    x, documents = x[:1], list(zip(CUTS, CUTS[1:], strict=False))
    cu_seqlens = torch.tensor(CUTS, dtype=torch.int32)
    alone = torch.cat([mixer(x[:, i:j])[0] for i, j in documents if j > i], 1)
    _close(mixer(x, cu_seqlens=cu_seqlens)[0], alone, "outputs of packed documents")
    if not mixer.causal:
        return
    packed, states = mixer(x, mixer.init_state(len(documents)), cu_seqlens=cu_seqlens)
    _close(packed, alone, "outputs of packed documents with states")
    # continue each packed document by another piece, with other boundaries
    more = torch.tensor([0, 1, 6, 6, LENGTH], dtype=torch.int32)
    continued, _ = mixer(x, states, cu_seqlens=more)
    outputs = []
    for (i, j), (start, stop) in zip(documents, zip(more.tolist(), more.tolist()[1:], strict=False), strict=True):
        state = mixer.init_state(1)
        if j > i:
            _, state = mixer(x[:, i:j], state)
        if stop > start:
            outputs.append(mixer(x[:, start:stop], state)[0])
    _close(continued, torch.cat(outputs, 1), "outputs of packed documents that continue")


def every_parameter_has_a_gradient(factory: MixerFactory, site: Site) -> None:
    mixer, x = _build(factory, site, torch.float32)
    (mixer(x)[0] * torch.randn_like(x)).sum().backward()
    for name, parameter in mixer.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            raise ContractError(f"{name} has no gradient")
        _expect(bool(gradient.isfinite().all()), f"{name} has a gradient that is not finite")
        _expect(bool(gradient.any()), f"{name} has a gradient of zero")


def state_size_is_true(factory: MixerFactory, site: Site) -> None:
    mixer, x = _build(factory, site)
    size = _counted(mixer.init_state(1))
    _, after = mixer(x[:1], mixer.init_state(1))
    grown = _counted(after)
    if mixer.constant_state:
        declared = mixer.state_size()
        growing = "one that grows, even to a bound, says constant_state = False"
        _expect(grown <= size, f"the state grew from {size} to {grown} in {LENGTH} tokens; {growing}")
        _expect(size == declared, f"state_size() is {declared}, init_state holds {size} {UNCOUNTED}")
        _expect(grown == size, f"the state shrank from {size} to {grown} in {LENGTH} tokens")
    else:
        declared = mixer.state_size(LENGTH)
        _expect(grown == declared, f"state_size({LENGTH}) is {declared}, the state holds {grown} {UNCOUNTED}")
        _expect(grown > size, "constant_state is False, but the state does not grow")


def bf16_is_close_to_fp32(factory: MixerFactory, site: Site) -> None:
    mixer, x = _build(factory, site, torch.float32)
    with torch.no_grad():
        y, y_step = mixer(x)[0], _step(mixer, x)
        mixer.bfloat16()
        z = mixer(x.bfloat16())[0]
    _expect(z.dtype == torch.bfloat16, f"x in bf16 became {z.dtype}")
    error = float((z.float() - y).norm() / y.norm())
    _expect(error < BF16_TOLERANCE, f"relative error {error:.3f}, allowed {BF16_TOLERANCE}")
    mixer, _ = _build(factory, site, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        z, step = mixer(x)[0], _step(mixer, x)
    error = max(float((a.float() - b).norm() / b.norm()) for a, b in ((z, y), (step, y_step)))
    _expect(error < BF16_TOLERANCE, f"relative error {error:.3f} under autocast, allowed {BF16_TOLERANCE}")


def meta_device(factory: MixerFactory, site: Site) -> None:
    with torch.device("meta"):
        mixer = factory(site)
    tensors = [*mixer.named_parameters(), *mixer.named_buffers()]
    for name, tensor in tensors:
        _expect(tensor.is_meta, f"{name} was made on {tensor.device} under the meta device")
    mixer.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*mixer.parameters(), *mixer.buffers()]:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    for module in mixer.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    for name, tensor in [*mixer.named_parameters(), *mixer.named_buffers()]:
        _expect(bool(tensor.isfinite().all()), f"{name} is not filled by reset_parameters()")


def state_dict_round_trip(factory: MixerFactory, site: Site) -> None:
    mixer, x = _build(factory, site)
    other, _ = _build(factory, site, seed=1)
    _expect(not torch.equal(other(x)[0], mixer(x)[0]), "the outputs do not depend on the parameters")
    other.load_state_dict(mixer.state_dict())
    _expect(torch.equal(other(x)[0], mixer(x)[0]), "a loaded copy gives other outputs")


def flops_are_what_is_counted(factory: MixerFactory, site: Site) -> None:
    mixer, _ = _build(factory, site)  # in fp64, whose exponents are large enough for one path to serve all tokens
    for length in (64, 256):
        x = torch.randn(1, length, site.hidden_size, dtype=torch.float64)
        counted = counted_flops(partial(mixer, x))
        with as_computed():
            declared = mixer.flops(length)
        error = abs(declared / counted - 1) if counted else float(declared != 0)
        _expect(error < FLOPS_TOLERANCE, f"flops({length}) is {declared:,}, the counter saw {counted:,}")


CLAUSES = (
    shapes_and_dtypes,
    causality,
    whole_is_pieces_is_tokens,
    packed_documents_are_separate,
    every_parameter_has_a_gradient,
    state_size_is_true,
    bf16_is_close_to_fp32,
    meta_device,
    state_dict_round_trip,
    flops_are_what_is_counted,
)


NOT_CAUSAL = (
    *(clause for clause in CLAUSES if clause not in (causality, whole_is_pieces_is_tokens, state_size_is_true)),
    mixes_both_ways,
    takes_no_state,
)


def _step(mixer: TokenMixer, x: Tensor) -> Tensor:
    """Output of the first token of x, with a state if the mixer has one."""
    return mixer(x[:, :1], mixer.init_state(len(x)) if mixer.causal else None)[0]


def _build(
    factory: MixerFactory, site: Site, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[TokenMixer, Tensor]:
    """A mixer with reproducible parameters away from special values such as 0 and 1, and an input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixer = factory(site)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter) * parameter.abs().mean().clamp(min=0.1))
        torch.manual_seed(7)
        x = torch.randn(2, LENGTH, site.hidden_size, dtype=torch.float64).to(dtype)
    return placed(mixer, site).to(dtype), x


def _counted(state: Any) -> int:
    """Elements of one sequence's state."""
    return sum(tensor.numel() for tensor in remembered(state))


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContractError(otherwise)


def _close(actual: Tensor, expected: Tensor, what: str) -> None:
    actual, expected = tree_map(lambda t: t.detach().double(), (actual, expected))
    if actual.shape != expected.shape:
        raise ContractError(f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if actual.numel() and not torch.allclose(actual, expected, rtol=1e-6, atol=1e-8):
        raise ContractError(f"{what} differ by up to {float((actual - expected).abs().max()):.2g}")
