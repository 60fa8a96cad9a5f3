"""Language models of linear and softmax attention for transformers, in plain PyTorch.

Load the folder of this file with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`. The entry
`model` of config.json holds the keyword arguments of `stack`, which contain those of the modules; missing, unknown,
misspelt and impossible ones raise an error. The model is for inference: derived parameters are plain tensors.

Symbols: B batch, T time, H value heads, G key heads, S subheads of a head, R = H·S recurrences, K key size, V value
size. Streams are [B,T,heads,size]. Log decays are at most 0. States are at least fp32.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

Activation = Literal["identity", "silu", "relu", "elu1", "sigmoid"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "relu": F.relu,
    "elu1": lambda x: 1 + F.elu(x),
    "sigmoid": torch.sigmoid,
}
Kind = Literal["linear", "attention"]
HeadNorm = Literal["none", "l1", "l2"]
Positions = Literal["none", "rotary", "lrpe"]
Expansions = Literal["head_wise", "low_rank", "dpfp", "lfm"]
Decays = Literal["constant", "softplus", "sigmoid", "tied", "bounded"]
EPS = 1e-6  # of the norms of queries and keys
MAY_BE_0 = ("conv", "turning", "rank", "gate_rank", "gates")  # all other whole numbers are sizes, at least 1
Past = list[Tensor]  # the cache of a layer; each tensor has one row per sequence


def build(make: Callable[..., Any], settings: Mapping[str, Any], *sizes: Any) -> Any:
    """Build a module from its sizes and, as keyword arguments, its settings in config.json.

    Raises:
        ValueError: A setting is missing, unknown, of another type or out of range; the message names it.
    """
    parameters, name = inspect.signature(make).parameters.values(), make.__name__
    require(isinstance(settings, Mapping), name, settings, "an object with settings")
    hints = {each.name: each.annotation for each in parameters if each.kind is each.KEYWORD_ONLY}
    for key in sorted(hints.keys() ^ settings.keys()):
        problem = "is missing" if key in hints else f"is unknown; choose from {', '.join(hints)}"
        raise ValueError(f"config.json: {name}.{key} {problem}")
    for key, hint in hints.items():
        value, options = settings[key], typing.get_args(hint) or (hint,)
        choices = [choice for option in options for choice in typing.get_args(option) or (option,)]
        if not (type(value) in choices or value in choices or (float in choices and type(value) is int)):
            allowed = " or ".join(getattr(choice, "__name__", repr(choice)) for choice in choices)
            raise ValueError(f"config.json: {name}.{key} is {value!r}; it must be {allowed}")
        if type(value) in (int, float):
            least = int(float not in choices and key not in MAY_BE_0)
            require(least <= value < float("inf"), f"{name}.{key}", value, f"a finite number of at least {least}")
    return make(*sizes, **settings)


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Refuse a value of config.json unless the condition holds."""
    if not condition:
        raise ValueError(f"config.json: {name} is {value!r}; it must be {allowed}")


def wide(x: Tensor) -> Tensor:
    """Return x in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run S_t = exp(g_t) S_{t−1} + k_t (v_t − S_{t−1}ᵀ exp(g_t) e_t)ᵀ and read o_t = S_tᵀ q_t, chunk by chunk.

    Return o [B,T,R,V] and the last state. Decays between tokens are sums, not differences of sums, and thus exact.

    Args:
        q, k, v: Queries and keys [B,T,R,K], values [B,T,R,V].
        log_decay: g, [B,T,R,1] or, per key channel, [B,T,R,K].
        erase: Erase keys e [B,T,R,K] of a delta rule; None for a linear recurrence.
        state: S_0 [B,R,K,V].
    """
    q, k, v, g = (wide(x).transpose(1, 2) for x in (q, k, v, log_decay))
    e = None if erase is None else wide(erase).transpose(1, 2)
    outputs, size = [], 64 if g.shape[-1] == 1 else 16  # per channel, each pair of tokens needs K numbers
    for part in (slice(start, start + size) for start in range(0, q.shape[2], size)):
        qc, kc, u, gc = (x[:, :, part] for x in (q, k, v, g))
        later = torch.ones(gc.shape[2], gc.shape[2], dtype=torch.bool, device=q.device).tril(-1)[..., None]
        between = torch.where(later, gc.unsqueeze(3), 0).cumsum(2).exp()  # [t,s]: exp(Σ_{s<j≤t} g_j)
        since = gc.cumsum(2).exp()  # [t]: exp(Σ_{j≤t} g_j)
        if e is not None:
            u = u - (e[:, :, part] * since) @ state
            u = torch.linalg.solve_triangular(scores(e[:, :, part], kc, between), u, upper=False, unitriangular=True)
        outputs.append((qc * since) @ state + scores(qc, kc, between) @ u)
        state = since[:, :, -1, :, None] * state + (kc * between[:, :, -1]).mT @ u
    return torch.cat(outputs, 2).transpose(1, 2), state


def scores(a: Tensor, b: Tensor, decay: Tensor) -> Tensor:
    """Return Σ_k a[t,k] b[s,k] decay[t,s,k] for s ≤ t, [B,R,T,T]."""
    if decay.shape[-1] == 1:
        return ((a @ b.mT) * decay[..., 0]).tril()
    return (a.unsqueeze(3) * decay * b.unsqueeze(2)).sum(-1).tril()


def projection(inputs: int, outputs: int, rank: int, bias: bool = False) -> nn.Module:
    """Return a linear map; if `rank` is not 0, a product of two maps of that rank."""
    if not rank:
        return nn.Linear(inputs, outputs, bias=bias)
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=bias))


def parameter(*shape: int, fixed: bool = False) -> nn.Parameter:
    """Return an uninitialised parameter; a fixed one has no gradient."""
    return nn.Parameter(torch.empty(shape), requires_grad=not fixed)


class Tokens(NamedTuple):
    """The new tokens of a batch."""

    length: int  # T
    positions: Tensor  # [B or 1,T], counted from the first token that is not padding
    valid: Tensor | None  # [B,P+T], False for padding among P earlier and T new tokens; None without padding

    def masked(self, x: Tensor) -> Tensor:
        """Return x [B,T,…] with padding set to 0."""
        return x if self.valid is None else x * self.valid[:, -self.length :].view(*x.shape[:2], *[1] * (x.dim() - 2))


class Features(nn.Module):
    """Short convolution of `conv` taps → activation → norm → map of positions, for each head [B,T,heads,size].

    rotary: rotate pairs of the first `turning` entries by the angles `frequency`·t. lrpe: [cos(angle)·x, sin(angle)·x].
    """

    def __init__(
        self, heads: int, size: int, *, conv: int, activation: Activation, norm: HeadNorm, map: Positions, turning: int
    ):
        super().__init__()
        require(turning % 2 == 0 and turning <= size, "Features.turning", turning, f"an even number, at most {size}")
        self.channels, self.taps, self.out_size = heads * size, max(conv - 1, 0), size * (1 + (map == "lrpe"))
        self.activation, self.norm, self.map, self.turning = activation, norm, map, turning
        self.conv_weight = parameter(heads * size, 1, conv) if conv else None
        self.conv_bias = parameter(heads * size) if conv else None
        shapes = {"none": None, "rotary": (1, turning // 2), "lrpe": (heads, size)}
        self.frequency = None if (shape := shapes[map]) is None else parameter(*shape, fixed=map == "rotary")

    def forward(self, x: Tensor, tokens: Tokens, history: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map x and the last inputs of the convolution [B,taps,channels] → the stream and the new last inputs."""
        shape, x = x.shape, tokens.masked(x).flatten(2)
        line = torch.cat([x.new_zeros(len(x), self.taps, self.channels) if history is None else history, x], 1)
        if self.conv_weight is not None:
            x = F.conv1d(line.mT, self.conv_weight, self.conv_bias, groups=self.channels).mT
        x = ACTIVATIONS[self.activation](x.unflatten(2, shape[2:]))
        if self.norm == "l2":
            x = x * (wide(x).square().sum(-1, keepdim=True) + EPS).rsqrt().to(x.dtype)
        elif self.norm == "l1":
            x = x / (wide(x).abs().sum(-1, keepdim=True) + EPS).to(x.dtype)
        if self.frequency is not None:
            angle = tokens.positions[..., None, None] * self.frequency
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            if self.map == "lrpe":
                x = torch.cat([x * cos, x * sin], -1)
            else:
                a, b = x[..., : self.turning].chunk(2, -1)
                x = torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., self.turning :]], -1)
        return x, line[:, line.shape[1] - self.taps :]


def features_of(settings: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]]) -> nn.ModuleDict:
    """Return the features of streams, made of their numbers of heads and sizes."""
    require(settings.keys() == sizes.keys(), "features", settings, f"an object with {', '.join(sizes)}")
    return nn.ModuleDict({x: build(Features, settings[x], *sizes[x]) for x in sizes})


class Expansion(nn.Module):
    """Expand queries or keys [B,T,heads,size] by `factor`; `residual` prepends the unchanged head."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        size: int,
        *,
        kind: Expansions,
        factor: int,
        activation: Activation,
        rank: int,
        residual: bool,
    ):
        super().__init__()
        self.kind, self.factor, self.activation, self.residual = kind, factor, activation, residual
        if kind == "head_wise":
            self.weight = parameter(heads, size, factor * size)
        elif kind == "low_rank":
            self.down, self.up = parameter(heads * size, rank), parameter(rank, factor * heads * size)
        elif kind == "lfm":
            self.p_proj = nn.Linear(hidden_size, heads * factor, bias=False)

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        """Expand a stream; x [B,T,hidden] is the layer's input."""
        heads, active = stream.shape[2], ACTIVATIONS[self.activation](stream)
        if self.kind == "head_wise":
            y = torch.einsum("bthk,hkn->bthn", active, self.weight)
        elif self.kind == "low_rank":
            y = (active.flatten(2) @ self.down @ self.up).unflatten(-1, (heads, -1))
        elif self.kind == "dpfp":
            r = torch.cat([stream, -stream], -1).relu()
            y = torch.cat([r * r.roll(-j, -1) for j in range(1, self.factor // 2 + 1)], -1)
        else:
            p = self.p_proj(x).relu().unflatten(-1, (heads, self.factor))
            y = (p[..., None] * stream.relu()[..., None, :]).flatten(-2)
        return torch.cat([stream, y], -1) if self.residual else y


class Norm(nn.Module):
    """RMSNorm, or LayerNorm, of each of `groups` equal parts of the last axis, computed in at least fp32."""

    def __init__(self, size: int, *, kind: Literal["rms", "layer"], eps: float, groups: int):
        super().__init__()
        require(size % groups == 0, "Norm.groups", groups, f"a divisor of {size}")
        self.eps, self.groups, self.weight = eps, groups, parameter(size)
        self.bias = parameter(size) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x […,size]."""
        y = wide(x).unflatten(-1, (self.groups, -1))
        if self.bias is not None:
            y = F.layer_norm(y, y.shape[-1:], eps=self.eps).flatten(-2)
            return torch.addcmul(self.bias, y, self.weight).to(x.dtype)
        y = y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (y.flatten(-2) * self.weight).to(x.dtype)


class Decay(nn.Module):
    """Log decays of recurrences: one number each, or one per key channel (`per_channel`).

    `constant`: a tensor. `softplus`: −rate · softplus(a + bias), and `sigmoid`: −rate · σ(a + bias), of a projection a.
    `tied`: log σ(k) of the raw keys k, and `bounded`: log(b + (1 − b) σ(k)) with lower bounds b, stored as log odds.
    """

    def __init__(self, hidden_size: int, recurrences: int, size: int, *, kind: Decays, rank: int, per_channel: bool):
        super().__init__()
        gates = recurrences * (size if per_channel else 1)
        self.kind, projected, self.ties_keys = kind, kind in ("softplus", "sigmoid"), kind in ("tied", "bounded")
        self.constant = parameter(gates, fixed=True) if kind == "constant" else None
        self.odds = parameter(gates) if kind == "bounded" else None
        self.proj = projection(hidden_size, gates, rank) if projected else None
        self.bias = parameter(gates) if projected else None
        self.rate = parameter(recurrences) if projected else None

    def forward(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map x [B,T,hidden] and keys [B,T,R,K] → log decays [B,T,R,1 or K], and step sizes or None."""
        if self.constant is not None:
            return self.constant[:, None].expand(*k.shape[:3], 1), None
        if self.proj is None or self.bias is None or self.rate is None:
            log_decay = F.logsigmoid(wide(k))
            if self.odds is not None:
                odds = self.odds.view(k.shape[2], -1)
                log_decay = torch.logaddexp(F.logsigmoid(odds), F.logsigmoid(-odds) + log_decay)
            return log_decay, None
        a = (self.proj(x.to(self.rate.dtype)) + self.bias).unflatten(-1, (k.shape[2], -1))
        step = F.softplus(a) if self.kind == "softplus" else a.sigmoid()
        return -self.rate[:, None] * step, step


class Linear(nn.Module):
    """A layer with a matrix state: projections → expansion → features → gates → recurrence → norm, gate, projection.

    `delta` enables the delta rule: the old value of a key is erased, and the new one written, with strength
    β = `delta`·σ(b). With `erase_per_channel`, β has a number per key channel and only erases; σ of a projection
    multiplies the values. `step_size` multiplies the values by the decay's step sizes. `skip` adds them to the output.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_key_heads: int,
        key_size: int,
        value_size: int,
        subheads: int,
        subhead_size: int,
        scale: float,
        features: dict,
        expansion: dict | None,
        decay: dict | None,
        delta: float | None,
        erase_per_channel: bool,
        step_size: bool,
        skip: bool,
        norm: dict | None,
        gate: Activation | None,
        gate_rank: int,
        gate_before_norm: bool,
    ):
        super().__init__()
        require(num_heads % num_key_heads == 0, "Linear.num_key_heads", num_key_heads, f"a divisor of {num_heads}")
        H, G, S, K, V, key = num_heads, num_key_heads, subheads, key_size, value_size, subhead_size
        self.repeats, self.subheads, self.subhead_size, self.scale = H // G, S, key, scale
        self.delta, self.step_size, self.gate_first = delta, step_size, gate_before_norm
        self.activation = gate or "identity"
        widths, self.sizes = {"q": G * K, "k": G * K, "v": H * V}, {"q": K, "k": K, "v": V}
        self.in_proj = nn.ModuleDict({x: nn.Linear(hidden_size, widths[x], bias=False) for x in widths})
        wider = {} if expansion is None else {x: build(Expansion, expansion, hidden_size, G, K) for x in "qk"}
        self.expand = nn.ModuleDict(wider)
        self.q_gain = parameter(G * S) if expansion is not None and expansion["residual"] else None
        self.features = features_of(features, {"q": (G * S, key), "k": (G * S, key), "v": (H, V)})
        self.decay = None if decay is None else build(Decay, decay, hidden_size, H * S, key)
        self.beta_proj = None if delta is None else nn.Linear(hidden_size, H * S * (key if erase_per_channel else 1))
        self.write_proj = nn.Linear(hidden_size, H * V, bias=False) if erase_per_channel else None
        self.skip = parameter(H) if skip else None
        self.norm = nn.Identity() if norm is None else build(Norm, norm, H * V)
        self.g_proj = None if gate is None else projection(hidden_size, H * V, gate_rank, bias=True)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False)

    def forward(self, x: Tensor, tokens: Tokens, past: Past | None) -> tuple[Tensor, Past]:
        """Map x [B,T,hidden] and the layer's cache → y [B,T,hidden] and the new cache."""
        state, *histories = [None] * 4 if past is None else past
        streams, following = [], []
        for (name, size), history in zip(self.sizes.items(), histories, strict=True):
            stream = self.in_proj[name](x).unflatten(-1, (-1, size))
            if name in self.expand:
                stream = self.expand[name](stream, x).unflatten(-1, (-1, self.subhead_size)).flatten(2, 3)
            stream, history = self.features[name](stream, tokens, history)
            streams.append(stream)
            following.append(history)
        q, k, v = self._to_value_heads(streams[0]), self._to_value_heads(streams[1]), streams[2]
        written, erase = tokens.masked(v), None
        if self.write_proj is not None:
            written = written * self.write_proj(x).sigmoid().view(v.shape)
        written = written.repeat_interleave(self.subheads, 2)
        log_decay = wide(k).new_zeros(*k.shape[:3], 1)
        if self.decay is not None:
            log_decay, step = self.decay(x, k)
            k = -torch.expm1(log_decay) if self.decay.ties_keys else k
            written = written * step if self.step_size else written
        if self.beta_proj is not None:
            beta = self.delta * wide(self.beta_proj(x)).sigmoid().unflatten(-1, (k.shape[2], -1))
            erase, written = beta * k, written * beta if self.write_proj is None else written
        if self.q_gain is not None:
            q = q * self._to_value_heads(self.q_gain.view(1, 1, -1, 1))
        if state is None:
            state = wide(written).new_zeros(len(x), *k.shape[2:], v.shape[-1])
        o, state = recurrence(self.scale * q, k, written, log_decay, erase, state)
        o = o.unflatten(2, (-1, self.subheads)).sum(3)
        o = (o if self.skip is None else o + self.skip[:, None] * v).flatten(2)
        gate = 1.0 if self.g_proj is None else ACTIVATIONS[self.activation](wide(self.g_proj(x)))
        o = self.norm(o * gate) if self.gate_first else self.norm(o) * gate
        return self.o_proj(o.to(x.dtype)), [state, *following]

    def _to_value_heads(self, x: Tensor) -> Tensor:
        """Repeat key heads for their value heads, [B,T,G·S,size] → [B,T,R,size]."""
        return x.unflatten(2, (-1, self.subheads)).repeat_interleave(self.repeats, 2).flatten(2, 3)


class Attention(nn.Module):
    """Softmax attention over the last `window` tokens, or all; the cache keeps only the keys and values of these."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_key_heads: int,
        head_dim: int,
        window: int | None,
        features: dict,
        q_norm: dict | None,
        k_norm: dict | None,
        gates: int,
    ):
        super().__init__()
        H, G, D = num_heads, num_key_heads, head_dim
        require(H % G == 0, "Attention.num_key_heads", G, f"a divisor of {H}")
        require(gates % H == 0, "Attention.gates", gates, f"a multiple of {H}")
        self.num_heads, self.repeats, self.head_dim, self.window = H, H // G, D, window
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, n * D) for n in (H, G, G))
        self.g_proj = nn.Linear(hidden_size, gates) if gates else None
        self.o_proj = nn.Linear(H * D, hidden_size)
        self.q_norm = nn.Identity() if q_norm is None else build(Norm, q_norm, H * D)
        self.k_norm = nn.Identity() if k_norm is None else build(Norm, k_norm, G * D)
        self.features = features_of(features, {"q": (H, D), "k": (G, D)})

    def forward(self, x: Tensor, tokens: Tokens, past: Past | None) -> tuple[Tensor, Past]:
        """Map x [B,T,hidden] and the layer's cache → y [B,T,hidden] and the new cache."""
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        old_k, old_v, *histories = [None] * 4 if past is None else past
        q, q_history = self.features["q"](q, tokens, histories[0])
        k, k_history = self.features["k"](k, tokens, histories[1])
        if old_k is not None and old_v is not None:
            k, v = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
        mask, (query, key, value) = self._mask(tokens, k.shape[1]), (y.transpose(1, 2) for y in (q, k, v))
        key, value = (y.repeat_interleave(self.repeats, 1) for y in (key, value))
        causal = mask is None and tokens.length > 1
        o = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal).transpose(1, 2)
        if self.g_proj is not None:
            o = o * self.g_proj(x).sigmoid().unflatten(-1, (self.num_heads, -1))
        if self.window is not None:
            k, v = (y[:, max(y.shape[1] - self.window + 1, 0) :] for y in (k, v))
        return self.o_proj(o.flatten(2)), [k, v, q_history, k_history]

    def _mask(self, tokens: Tokens, keys: int) -> Tensor | None:
        """Return a mask of the keys that each token sees [B or 1,1,T,keys]; None for a plain causal mask."""
        T, window = tokens.length, keys if self.window is None else self.window
        if tokens.valid is None and keys <= window and T in (1, keys):
            return None
        place = torch.arange(keys, device=tokens.positions.device)
        behind = place[keys - T :, None] - place
        seen = ((behind >= 0) & (behind < window))[None, None]
        if tokens.valid is None:
            return seen
        # padding sees itself, since a softmax over no keys is NaN
        return (seen & tokens.valid[:, None, None, -keys:]) | (behind == 0)


class RunningSums(nn.Module):
    """y_{t,c} = Σ_{s≤t} Σ_e weight_{c,e} exp(log_decay_e)^{t−s} x_{s,c}: positions before the first layer."""

    def __init__(self, hidden_size: int, size: int):
        super().__init__()
        self.weight, self.log_decay = parameter(hidden_size, size), parameter(size, fixed=True)

    def forward(self, x: Tensor, tokens: Tokens, past: Past | None) -> tuple[Tensor, Past]:
        """Map x [B,T,hidden] and the sums [B,hidden,size] → y [B,T,hidden] and the new sums."""
        weight, outputs = wide(self.weight), []
        state = weight.new_zeros(len(x), *weight.shape) if past is None else past[0]
        for part in wide(tokens.masked(x)).split(64, 1):
            time = torch.arange(part.shape[1] + 1, device=x.device)
            powers = (time[:, None] * self.log_decay).exp()  # [T+1,size]
            ago = time[:-1, None] - time[:-1]
            kernel = (powers @ weight.mT)[ago.clamp(min=0)] * (ago >= 0)[..., None]  # [T,T,hidden]
            old = torch.einsum("te,de,bde->btd", powers[1:], weight, state)
            outputs.append(old + torch.einsum("tsd,bsd->btd", kernel, part))
            state = powers[-1] * state + torch.einsum("se,bsd->bde", powers[:-1].flip(0), part)
        return torch.cat(outputs, 1).to(x.dtype), [state]


class MLP(nn.Module):
    """W_down (activation(W_gate x) ⊙ W_up x)."""

    def __init__(self, hidden_size: int, *, size: int, activation: Activation):
        super().__init__()
        self.activation = activation
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x […,hidden] → […,hidden]."""
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A mixer (`mixer` names the original) and an MLP, with the norms before them or, with `post_norm`, after them."""

    def __init__(
        self, hidden_size: int, norm: dict, mlp: dict | None, *, mixer: str, kind: Kind, settings: dict, post_norm: bool
    ):
        super().__init__()
        self.post_norm, self.mixer_norm = post_norm, build(Norm, norm, hidden_size)
        self.mixer = build(Linear if kind == "linear" else Attention, settings, hidden_size)
        self.mlp_norm = None if mlp is None else build(Norm, norm, hidden_size)
        self.mlp = None if mlp is None else build(MLP, mlp, hidden_size)

    def forward(self, x: Tensor, tokens: Tokens, past: Past | None) -> tuple[Tensor, Past]:
        """Map x [B,T,hidden] and the mixer's cache → x and the cache after the layer."""
        y, past = self.mixer(x if self.post_norm else self.mixer_norm(x), tokens, past)
        x = x + (self.mixer_norm(y) if self.post_norm else y)
        if self.mlp is None or self.mlp_norm is None:
            return x, past
        return x + (self.mlp_norm(self.mlp(x)) if self.post_norm else self.mlp(self.mlp_norm(x))), past


def stack(
    hidden_size: int, count: int, *, layers: list, order: list, position: int | None, norm: dict, mlp: dict | None
) -> tuple[nn.ModuleList, Norm]:
    """Return all layers, after `position` running sums per channel, and the last norm; `order` indexes `layers`."""
    fits = len(order) == count and all(type(i) is int and 0 <= i < len(layers) for i in order)
    require(fits, "stack.order", order, f"a list with a number below {len(layers)} for each of {count} layers")
    modules = [] if position is None else [RunningSums(hidden_size, position)]
    modules += [build(Layer, layers[i], hidden_size, norm, mlp) for i in order]
    return nn.ModuleList(modules), build(Norm, norm, hidden_size)


class ZooCache:
    """The cache of a model: the states, keys and values of all layers."""

    is_compileable = False

    def __init__(self) -> None:
        self.pasts: list[Past] = []  # one per layer
        self.valid: Tensor | None = None  # [B,P], False for padding
        self.padded = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read, including padding."""
        return 0 if self.valid is None else self.valid.shape[1]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by those at these indices."""
        self.pasts = [[x.index_select(0, beam_idx.to(x.device)) for x in past] for past in self.pasts]
        self.valid = None if self.valid is None else self.valid.index_select(0, beam_idx.to(self.valid.device))


class ZooConfig(PretrainedConfig):
    """The contents of config.json; `model` has the keyword arguments of `stack`."""

    model_type = "token_mixer_zoo"

    def __init__(
        self, vocab_size: int = 0, hidden_size: int = 0, num_hidden_layers: int = 0, model: Any = None, **others: Any
    ):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.model, self.use_cache = model or {}, others.pop("use_cache", True)
        super().__init__(**others)


class ZooForCausalLM(PreTrainedModel, GenerationMixin):
    """Embeddings, layers, a norm and the head: tokens → logits."""

    config_class = ZooConfig
    _input_embed_layer = "embeddings"
    _no_split_modules = ["Layer"]  # noqa: RUF012 (transformers wants lists and dicts)
    _tied_weights_keys = {"lm_head.weight": "embeddings.weight"}  # noqa: RUF012
    _is_stateful = True
    # bf16 is too coarse for these: a decay near 1 would round to 1
    _keep_in_fp32_modules_strict = ["norm", "decay", "frequency", "q_gain", "skip"]  # noqa: RUF012

    def __init__(self, config: ZooConfig):
        super().__init__(config)
        for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
            size = getattr(config, key)
            require(type(size) is int and size > 0, key, size, "a whole number of at least 1")
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers, self.norm = build(stack, config.model, config.hidden_size, config.num_hidden_layers)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` creates the cache

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: ZooCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Map tokens [B,T] → logits [B,T,vocab_size], with the usual arguments of transformers' models.

        `attention_mask` [B,P+T], after P cached tokens, is 0 for padding, which must be on the left if a cache is used.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = ZooCache() if past_key_values is None else past_key_values
        tokens, pasts = self._tokens(x, attention_mask, cache, use_cache), []
        before: list[Past | None] = [*cache.pasts] or [None] * len(self.layers)
        for layer, past in zip(self.layers, before, strict=True):
            x, past = layer(x, tokens, past)
            pasts.append(past)
        if use_cache:
            cache.pasts = pasts
        x = self.norm(x)
        logits = self.lm_head(x[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        kept: Any = cache if use_cache else None
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=kept)
        return output.to_tuple() if return_dict is False else output

    def _tokens(self, x: Tensor, attention_mask: Tensor | None, cache: ZooCache, use_cache: bool) -> Tokens:
        """Describe the new tokens x [B,T,hidden], and note in the cache which of them are padding."""
        (B, T, _), seen = x.shape, cache.get_seq_length()
        new = torch.ones(B, T, dtype=torch.bool, device=x.device)
        if attention_mask is not None:
            if attention_mask.shape not in ((B, T), (B, seen + T)):
                raise ValueError(f"attention_mask: must be [{B},{seen + T}], got {[*attention_mask.shape]}")
            new = attention_mask[:, -T:].to(x.device, torch.bool)
        valid = new if cache.valid is None else torch.cat([cache.valid, new], 1)
        padded = cache.padded or not bool(new.all())
        if padded and use_cache and bool((valid[:, 1:] < valid[:, :-1]).any()):
            raise ValueError("attention_mask: padding must be on the left (padding_side='left'), or use_cache=False")
        if use_cache:
            cache.valid, cache.padded = valid, padded
        counted = valid.cumsum(1)[:, -T:] - 1 if padded else torch.arange(seen, seen + T, device=x.device)[None]
        return Tokens(T, counted.clamp(min=0), valid if padded else None)
