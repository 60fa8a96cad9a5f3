"""One token of a layer with a matrix state, from its projections to the input of its output projection."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activation_gate import activation_gate
from ..core.autocast import autocast_dtype
from ..core.autograd import plain
from ..core.backend import Op
from ..core.deterministic import is_deterministic
from ..core.elementwise import sigmoid, soft_cap
from ..core.recurrence import at_least_fp32, check_scale
from ..delta_gates import GateInputs, channel_decay, strength
from ..delta_rule import delta_rule
from ..discretise import discretise
from ..features import MOST_TAPS, FeatureStream, features, features_and_gates, features_together
from ..forget_gate import lower_bound_odds, tied_gates
from ..linear_recurrence import linear_recurrence
from ..norm import ACTIVATIONS, GatedNorm, gated_rms_norm, rms_norm
from ..rotary import Turn
from ..skip_readout import skip_readout

LARGEST = 128 * 256  # elements of a head's state, with both sizes rounded up to powers of two


class Strength(NamedTuple):
    """β = largest · σ(b + bias) of each step."""

    b: Tensor  # [B,1,n·H]
    bias: Tensor | None = None  # [n·H]
    largest: float = 1.0


class ChannelStrength(NamedTuple):
    """β = largest · σ(b) of each key channel, and σ(w) of each value channel, which multiplies the value."""

    b: Tensor  # [B,1,H·K]
    w: Tensor  # [B,1,H·V]
    largest: float = 1.0


class Feedback(NamedTuple):
    """An erase key σ(rate) · k that reads the state before it decays, and a query q − correction · σ(rate) · k.

    Both are made from the features of q and k, which are then brought to length one (Comba, arXiv 2506.02475).
    """

    rate: Tensor  # [G]
    correction: Tensor | None  # [G]
    unit: bool = False  # whether the erase key is k itself


class TiedGates(NamedTuple):
    """The arguments of `tied_gates` besides x, which is k: the input gates become the keys."""

    bounds: Tensor | None = None  # rows of all layers [L,H·K], as `lower_bound_odds` takes them; None for none
    layer: int = 0


class CappedGates(NamedTuple):
    """log_decay = log σ(f) and β = exp(i) of mLSTM, where x = cap · tanh((raw + bias) / cap) of the raw f and i.

    With the stabiliser m_t = max(log σ(f_t) + m_{t−1}, i_t), states are kept without their factor exp(m_t).
    """

    f: Tensor  # [B,1,H]
    i: Tensor  # [B,1,H]
    f_bias: Tensor  # [H]
    i_bias: Tensor  # [H]
    cap: float | None = None
    exponential: bool = True  # False: β = σ(i), without a stabiliser

    def gates(self, carried: Sequence[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor | None]:
        """Return log_decay and β [B,1,H] without exp(m), the next `carried`, and exp(−m) [B,1,H] or None."""
        f, i = at_least_fp32(self.f) + self.f_bias, at_least_fp32(self.i) + self.i_bias
        f, i = F.logsigmoid(soft_cap(f, self.cap)), soft_cap(i, self.cap)
        if not self.exponential:
            return f, sigmoid(i), (), None
        before = carried[0][:, None]
        m = torch.maximum(f.double() + before, i.double()).detach()
        return *without_stabiliser(f, i, m, before), (m[:, 0],), (-m).exp().to(i.dtype)


def without_stabiliser(f: Tensor, i: Tensor, m: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return log_decay and β of logs of gates f and i, relative to the stabiliser m and that of the previous token."""
    # f_t + m_{t−1} − m_t is 0 where m_t is the decayed maximum. Rounding must not lift it above 0. The bound is on
    # the other terms, since a clamp of the sum would leave f without a gradient.
    return (f + torch.minimum(before - m, -f.detach())).to(f.dtype), (i - m).exp().to(i.dtype)


Decay = GateInputs | TiedGates | CappedGates | Tensor | None
Beta = Strength | ChannelStrength | None


class TokenOps(NamedTuple):
    """Gates, recurrence and output of each head, which `recurrence_token` computes after the features."""

    delta: bool = False  # whether the recurrence is `delta_rule` rather than `linear_recurrence`
    # the arguments of `delta_gates`, of H recurrences, with a decay per head or per channel; or `TiedGates`,
    # `CappedGates`, or log decays as `linear_recurrence` takes them
    decay: Decay = None
    # β, if `decay` does not contain it. Without either, β is dt of `discretise` in a linear recurrence whose `decay`
    # has its arguments, and 1 in others.
    beta: Beta = None
    # the arguments of `gated_rms_norm` besides the output of the recurrence, of each head; without a gate those of
    # `rms_norm`
    norm: GatedNorm | None = None
    turn: Turn | None = None  # positions of queries and keys
    feedback: Feedback | None = None  # of the delta rule
    skip: Tensor | None = None  # factor of the value that is added to the output of each head [H]
    steps: int = 1  # n, of the delta rule
    scale: float | None = None  # factor on the output of the recurrence; by default (key size of the state)^-½
    centred: bool = False  # whether the norm subtracts the mean first; its weight is then [H,V]
    # added to the divisor max(|n·q|, exp(−m)) of the output, where n is the last column of the state, that of a value
    # of 1, and m the stabiliser, or 0; None for no divisor
    divisor_eps: float | None = None
    carried: tuple[Tensor, ...] = ()  # what earlier tokens leave besides the state: the stabiliser [B,H] in fp64

    def tensors(self) -> list[Tensor]:
        """All tensors."""
        parts = (self.beta, self.norm, self.turn, self.feedback)
        decay = self.decay.tensors if isinstance(self.decay, GateInputs) else self.decay
        decays = decay if isinstance(decay, tuple) else (decay,)
        every = [decays, self.carried, (self.skip,), *(part or () for part in parts)]
        return [x for part in every for x in part if isinstance(x, Tensor)]

    @property
    def step_writes(self) -> bool:
        """Return whether β is dt."""
        decay = self.decay
        if not isinstance(decay, GateInputs) or decay.b is not None or decay.dt_bias.dim() > 1:
            return False
        return decay.lower_bound is None and not self.delta and self.beta is None

    def raw(self) -> list[Tensor]:
        """The tensors that are columns of the projection."""
        gates = [self.decay.a, self.decay.b] if isinstance(self.decay, GateInputs) else []
        gates += [self.decay.f, self.decay.i] if isinstance(self.decay, CappedGates) else []
        gates += [] if self.beta is None else [self.beta.b]
        gates += [self.beta.w] if isinstance(self.beta, ChannelStrength) else []
        return [x for x in (*gates, None if self.norm is None else self.norm.gate) if x is not None]


class TokenResult(NamedTuple):
    """The results of `recurrence_token`."""

    y: Tensor  # [B,1,H,V]
    histories: list[Tensor]  # of q, k and v, for the next token
    state: Tensor  # [B,H,K,V], with a divisor [B,H,K,V+1]
    position: Tensor | None  # tokens seen [B], if there is a `Turn`
    carried: tuple[Tensor, ...] = ()  # for the next token


def padded(size: int) -> int:
    """The smallest power of two that is not less than a size."""
    return 1 << (size - 1).bit_length()


def without_casts(tensors: Sequence[Tensor | None], raw: Sequence[Tensor], state: Tensor) -> bool:
    """Return whether a kernel for one token may run: neither gradients nor casts, nor deterministic mode.

    That mode uses the kernels of longer sequences.

    Args:
        tensors: All tensors of the call.
        raw: Those that are columns of the projection.
        state: The state.
    """
    kinds = {x.dtype for x in raw}
    return (
        not is_deterministic()
        and plain(tensors)
        and not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))
        and len(kinds) == 1
        and torch.float64 not in {state.dtype, *kinds}
        and autocast_dtype(raw[0].device) is None
    )


def in_one_launch(streams: Sequence[FeatureStream], ops: TokenOps, state: Tensor) -> bool:
    """Return whether one kernel computes a token: it may run, and there is one for these sizes."""
    q, k, v = streams
    tensors = [*ops.tensors(), state, *(x for s in streams for x in (s.x, s.weight, s.bias, s.history))]
    pairs = None if ops.turn is None or ops.turn.doubles else len(ops.turn.rates)
    return (
        without_casts(tensors, [*(stream.x for stream in streams), *ops.raw()], state)
        and (pairs is None or 2 * pairs == q.size == padded(q.size))
        and padded(q.size) * (state.shape[2] // q.size) * padded(v.size) <= LARGEST
        and all(s.product is None and s.taps <= MOST_TAPS for s in streams)
    )


def check(streams: Sequence[FeatureStream], ops: TokenOps, state: Tensor) -> None:
    """Check the arguments of `recurrence_token`; streams and `GateInputs` have checked theirs.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if len(streams) != 3:
        raise ValueError(f"streams: expected those of q, k and v, got {len(streams)}")
    (q, k, v), n = streams, ops.steps
    B, T = v.x.shape[:2]
    (G, K), (H, V) = (q.x.shape[2], q.size), (v.x.shape[2] // max(n, 1), v.size)
    if T != 1 or any(stream.cu_seqlens is not None for stream in streams):
        raise ValueError(f"streams: expected one token of each sequence, got {T}, or packed documents")
    if not all(stream.return_history for stream in streams):
        raise ValueError("streams: return_history has to be set for all of them")
    if n < 1 or k.x.shape != (B, 1, n * G, q.x.shape[3]) or q.x.shape[:2] != (B, T) or v.x.shape[2] != n * H or H % G:
        shapes, heads = ", ".join(str(tuple(stream.x.shape)) for stream in streams), "G" if n == 1 else f"{n}·G"
        values = "H" if n == 1 else f"{n}·H"
        wanted = f"q [B,1,G,K], k [B,1,{heads},K] and v [B,1,{values},V], H a multiple of G"
        raise ValueError(f"streams: expected {wanted}, got {shapes}")
    if not ops.delta and (n > 1 or ops.feedback is not None or isinstance(ops.beta, ChannelStrength)):
        raise ValueError("delta: steps, feedback and strengths of channels are those of a delta rule")
    strong = isinstance(ops.decay, GateInputs) and ops.decay.b is not None
    if strong and (n > 1 or ops.beta is not None):
        raise ValueError("beta: with several steps, or a separate β, `decay` must not have b")
    if isinstance(ops.decay, CappedGates) and (ops.delta or ops.beta is not None):
        raise ValueError("decay: CappedGates are those of a linear recurrence without a separate β")
    if ops.divisor_eps is not None and (ops.delta or ops.skip is not None):
        raise ValueError("divisor_eps: only a linear recurrence without a skip has a divisor")
    stabilisers = int(isinstance(ops.decay, CappedGates) and ops.decay.exponential)
    if len(ops.carried) != stabilisers:
        raise ValueError(f"carried: expected {stabilisers} tensors, got {len(ops.carried)}")
    if n > 1 and ops.feedback is not None:
        raise ValueError(f"steps: a feedback takes one step, got {n}")
    doubled = ops.turn is not None and ops.turn.doubles
    for name, x, wanted_shape in _shapes(ops, (B, G, H, 2 * K if doubled else K, V), K, k.x, state):
        if x is not None and tuple(x.shape) != wanted_shape:
            raise ValueError(f"{name}: expected {list(wanted_shape)}, got shape {tuple(x.shape)}")
    bounds = ops.decay.bounds if isinstance(ops.decay, TiedGates) else None
    if isinstance(ops.decay, TiedGates) and bounds is not None and not 0 < ops.decay.layer < len(bounds):
        raise ValueError(f"decay.layer: must be from 1 to {len(bounds) - 1}, got {ops.decay.layer}")
    if ops.norm is not None and ops.norm.activation not in ACTIVATIONS:
        raise ValueError(f"norm.activation: {ops.norm.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if not state.is_floating_point() or state.device != v.x.device:
        raise ValueError(f"initial_state: expected floats on {v.x.device}, got {state.dtype} on {state.device}")
    if ops.scale is not None:
        check_scale(ops.scale)


Shapes = list[tuple[str, Tensor | None, tuple[int, ...]]]


def _shapes(ops: TokenOps, sizes: tuple[int, ...], size: int, k: Tensor, state: Tensor) -> Shapes:
    """Names, tensors and expected shapes; `sizes` are B, G, H, K and V, and `size` is that of k before its turn."""
    (B, G, H, K, V), decay, beta = sizes, ops.decay, ops.beta
    shapes: Shapes = [("skip", ops.skip, (H,))]
    if ops.turn is not None:
        shapes += [("turn.positions", ops.turn.positions, (B,))]
        shapes += [("turn.rates", ops.turn.rates, (G, size))] if ops.turn.doubles else []
    if ops.feedback is not None:
        shapes += [("feedback.rate", ops.feedback.rate, (G,)), ("feedback.correction", ops.feedback.correction, (G,))]
    if isinstance(decay, GateInputs):
        shapes += [("decay", decay.b, (B, 1, H)), ("decay.dt_bias", decay.dt_bias, (H, K)[: decay.dt_bias.dim()])]
    elif isinstance(decay, Tensor):
        shapes += [("decay", decay, {1: (H,), 3: (B, 1, H)}.get(decay.dim(), (B, 1, H, K)))]
    elif isinstance(decay, CappedGates):
        shapes += [("decay.f", decay.f, (B, 1, H)), ("decay.i", decay.i, (B, 1, H))]
        shapes += [("decay.f_bias", decay.f_bias, (H,)), ("decay.i_bias", decay.i_bias, (H,))]
        shapes += [("carried", x, (B, H)) for x in ops.carried]
    elif decay is not None:
        layers = 0 if decay.bounds is None else len(decay.bounds)
        shapes += [("k", k, (B, 1, H, size)), ("decay.bounds", decay.bounds, (layers, H * K))]
    if isinstance(beta, Strength):
        shapes += [("beta.b", beta.b, (B, 1, ops.steps * H)), ("beta.bias", beta.bias, (ops.steps * H,))]
    elif beta is not None:
        shapes += [("k", k, (B, 1, H, size)), ("beta.b", beta.b, (B, 1, H * K)), ("beta.w", beta.w, (B, 1, H * V))]
    if ops.norm is not None:
        per_channel = (H, V) if ops.centred else (V,)
        shapes += [("norm.gate", ops.norm.gate, (B, 1, H, V)), ("norm.weight", ops.norm.weight, per_channel)]
    return [*shapes, ("initial_state", state, (B, H, K, V + (ops.divisor_eps is not None)))]


def recurrence_token(
    streams: Sequence[FeatureStream], ops: TokenOps, initial_state: Tensor, *, consume_state: bool = False
) -> TokenResult:
    """Compute one token from the projections to the norm and gate of the output, in one launch where possible.

    A GPU reads and writes the state of each head once. Other calls run the ops one after another.

    Args:
        streams: The arguments of `features` for q [B,1,G,K], k [B,1,n·G,K] and v [B,1,n·H,V], with `return_history`.
        ops: What follows the features.
        initial_state: S_0 [B,H,K,V]; with a `Turn` that doubles heads [B,H,2K,V], with a divisor [B,H,K,V+1].
        consume_state: Whether the next state may be written into `initial_state`, and `carried` in place.

    Returns:
        The output, the history of each stream, and the next state, position and `carried`.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    check(streams, ops, initial_state)
    run = OP.choose(streams[2].x) if in_one_launch(streams, ops, initial_state) else composed
    token: TokenResult = run(streams, ops, initial_state, consume_state)
    return token


def composed(
    streams: Sequence[FeatureStream], ops: TokenOps, initial_state: Tensor, consume_state: bool
) -> TokenResult:
    """The ops one after another; the arguments are those of `recurrence_token`."""
    decay, gates, n = ops.decay, None, ops.steps
    if isinstance(decay, GateInputs) and decay.b is not None:
        results, gates = features_and_gates(streams, decay)
    else:
        results = features_together(streams)
    (q, k, v), histories = zip(*results, strict=True)
    if ops.turn is not None:
        q, k = ops.turn(q), ops.turn(k)
    k, v = (x.unflatten(2, (n, -1)).flatten(1, 2) for x in (k, v))
    log_decay, beta = (None, None) if gates is None else gates
    carried, floor = ops.carried, None
    if isinstance(decay, CappedGates):
        log_decay, beta, carried, floor = decay.gates(carried)
    elif isinstance(decay, TiedGates):
        odds = None if decay.bounds is None else lower_bound_odds(decay.bounds, decay.layer)
        log_decay, written = tied_gates(k.flatten(2), odds=odds, dtype=k.dtype)
        k, log_decay = written.view_as(k), log_decay.view_as(k)
    elif isinstance(decay, Tensor):
        log_decay = decay
    elif decay is not None and gates is None:
        a, A_log, dt_bias, *_ = decay.multiplied().tensors
        if ops.step_writes:
            log_decay, beta = discretise(a, A_log, dt_bias)
        else:
            log_decay = channel_decay(a, A_log, dt_bias, decay.lower_bound)
    if isinstance(ops.beta, Strength):
        beta = strength(*ops.beta).unflatten(2, (n, -1)).flatten(1, 2)
    elif ops.beta is not None:
        beta = activation_gate(ops.beta.b, largest=ops.beta.largest).view(k.shape).to(k.dtype)
        v = activation_gate(ops.beta.w, v.flatten(2)).view(v.shape)
    erase = None
    if ops.feedback is not None:
        q, k, erase = _fed_back(q, k, ops.feedback, v.shape[2])
    options: dict[str, Any] = {"scale": ops.scale, "initial_state": initial_state, "return_state": True}
    options["consume_state"] = consume_state
    if ops.delta:
        ones = at_least_fp32(v.new_ones(v.shape[:3])) if beta is None else beta
        before = ops.feedback is not None
        o, state = delta_rule(q, k, v, ones, log_decay, erase=erase, read_before=before, steps=n, **options)
    else:
        wide = v if ops.divisor_eps is None else torch.cat([v, v.new_ones(1).expand(*v.shape[:3], 1)], -1)
        o, state = linear_recurrence(q, k, wide, log_decay, beta, **options)
    assert state is not None
    if ops.divisor_eps is not None:
        o, divisor = at_least_fp32(o).split([v.shape[3], 1], -1)
        floor = divisor.new_ones(()) if floor is None else floor[..., None]
        o = o / (torch.maximum(divisor.abs(), floor) + ops.divisor_eps)
    o = o if ops.skip is None else skip_readout(o, v, ops.skip.expand(o.shape[:3]))
    following = [
        s.x.new_zeros(len(o), 0, s.channels) if x is None else x for s, x in zip(streams, histories, strict=True)
    ]
    if ops.centred:
        o = at_least_fp32(o)
        o = o - o.mean(-1, keepdim=True)
    y = _normed(o, ops.norm)
    y = y if o.dtype == v.dtype else y.to(v.dtype)
    return TokenResult(y, following, state, None if ops.turn is None else ops.turn.positions + 1, carried)


def _fed_back(q: Tensor, k: Tensor, feedback: Feedback, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and erase keys of all value heads."""
    rate = feedback.rate.sigmoid()[:, None]
    q = q if feedback.correction is None else (q - feedback.correction[:, None] * rate * k).to(q.dtype)
    q, k = (features(x, norm="l2")[0] for x in (q, k))
    erase = k if feedback.unit else (rate * k).to(k.dtype)
    return q, k, erase.repeat_interleave(heads // k.shape[2], 2)


def _normed(o: Tensor, norm: GatedNorm | None) -> Tensor:
    """The output o [B,1,H,V] after its norm and gate."""
    if norm is None:
        return o
    gate, weight, eps, gate_first, activation = norm
    if weight is not None and weight.dim() > 1:
        return _normed(o, norm._replace(weight=None)) * weight
    if gate is None:
        return rms_norm(o, weight, eps)
    return gated_rms_norm(o, gate, weight, eps, gate_first=gate_first, activation=activation)


OP = Op("recurrence_token", reference=composed, torch=composed, gpu="kernels.recurrence_token.gpu.op:forward")
