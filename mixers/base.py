"""The token mixer interface, and the computation that all matrix-state mixers share.

Letters, here and in every mixer: B batch, T time, H value heads, G key heads, E expansion factor, S subheads, K key
size, V value size, n steps per token, N documents (with `cu_seqlens`, B = 1 and states have N rows instead of B). Time
comes first: streams are [B,T,heads,size]. Gates live in log space and are called `log_decay` (≤ 0). States are at least
fp32.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

import kernels
from kernels.core.documents import places
from kernels.core.torch_internals import tree_leaves, tree_map
from kernels.precondition import precondition

from .arguments import check_sizes, size_or
from .context_parallel import ContextParallel, run_recurrence
from .counting import counted_flops, on_meta
from .expansion import Expand, Expansion
from .features import FeaturePath, Features, HeadProduct, alike, together
from .fusion import Fusable
from .heads import HeadMap, check_heads, converted
from .precision import KeepsFp32
from .preconditioner import Preconditioner
from .projection import OutputProjection
from .replay import Chunk
from .shift import check_sequences
from .state import History, Position, Slots, remembered

TUTORIAL = "tutorials/02_your_own_mixer.md"
SITE = "mixers.Site(hidden_size=512, num_heads=8)"  # in messages
Carried = tuple[Tensor, ...]  # what tokens leave for later ones besides the matrix of a LinearMixer [N,…]
State = Any  # a pytree of tensors, usually a NamedTuple; `state.py` says how to type its fields


class Site(NamedTuple):
    """Position of a layer in the model. One argument, so that fields can be added without changing plug-ins."""

    hidden_size: int
    num_heads: int
    layer: int = 0
    num_layers: int = 1
    expand: Expand | None = None  # set by Expanded, read by LinearMixer
    passed: tuple[str, ...] = ()  # names of the streams that mixers of lower layers pass; set by the model
    window_size: int = 2048  # of mixers with a window that do not set their own

    def heads(self, num_heads: int | None = None, head_dim: int | None = None) -> tuple[int, int]:
        """num_heads and head_dim of a mixer, with the model's values where they are None.

        Raises:
            UserError: head_dim is None and num_heads does not divide hidden_size, or only head_dim is given and the
                model's number of heads of that size are wider than hidden_size, or a size is not a whole number from 1.
        """
        check_sizes({"num_heads": self.num_heads if num_heads is None else num_heads, "head_dim": head_dim})
        if num_heads is None and head_dim is not None and self.num_heads * head_dim > self.hidden_size:
            raise kernels.UserError(
                f"num_heads: the model's {self.num_heads} heads of head_dim {head_dim} are wider than hidden_size "
                f"{self.hidden_size}; set num_heads of the mixer, or a smaller head_dim"
            )
        num_heads = self.num_heads if num_heads is None else num_heads
        if head_dim is None and self.hidden_size % num_heads:
            raise kernels.UserError(
                f"num_heads: {num_heads} does not divide hidden_size {self.hidden_size}; choose a divisor"
            )
        return num_heads, self.hidden_size // num_heads if head_dim is None else head_dim

    def head_sizes(self, num_heads: int | None, head_dim: int | None, value_dim: int | None) -> tuple[int, int, int]:
        """`heads`, and the value size of a head; head_dim where value_dim is None.

        Raises:
            UserError: As for `heads`, or only value_dim is given, or it is not a whole number from 1.
        """
        if value_dim is not None and head_dim is None:
            raise kernels.UserError(f"value_dim: {value_dim} is given without head_dim; give both, or neither")
        num_heads, head_dim = self.heads(num_heads, head_dim)
        return num_heads, head_dim, size_or("value_dim", value_dim, head_dim)


def checked_site(site: object, mixer: type) -> Site:
    """The first argument of a mixer, if it is a Site.

    Raises:
        UserError: It is something else.
    """
    if not isinstance(site, Site):
        raise kernels.UserError(f"site: {mixer.__name__} takes a mixers.Site, such as {SITE}, not {site!r}")
    return site


def checked_input(x: Tensor, hidden_size: int) -> Tensor:
    """x, if it is [B,T,hidden_size].

    Raises:
        UserError: It has another shape.
    """
    if x.dim() != 3 or x.shape[2] != hidden_size:
        raise kernels.UserError(f"x: must be [batch, time, {hidden_size}], got shape {tuple(x.shape)}")
    return x


class TokenMixer(KeepsFp32):
    """A layer that moves information along time: x [B,T,hidden] → y [B,T,hidden], causally unless it says otherwise.

    Subclass it, take a `Site` first and named arguments after it, and run `mixers.check_mixer` on the result. Write
    `forward` and, if it is causal, `init_state`; `state_size` and `flops` are derived, unless you write them.
    List parameters that must not decay in `no_weight_decay` (those with fewer than two axes never do), and those for
    which bf16 is too coarse in `keep_fp32`. Give every module with parameters or computed buffers a
    `reset_parameters()`, so that a model built on the meta device can be filled. Make the last linear map an
    `OutputProjection`.

    A mixer that passes streams to higher layers names them in `passes`, and one that cannot do without a stream of a
    lower layer names it in `needs`; `site.passed` has the names that lower layers pass. Its `forward` also takes
    `passed`, a mapping from names to streams [B,T,…] of the tokens of x, and then returns (y, state, streams), with
    every stream of `passes`. Called alone, without `passed`, it returns (y, state) as others do.

    `zoo.inspect` looks into the recurrences and the attention that a class has as attributes, such as `recurrence`.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ()
    constant_state: ClassVar[bool] = True  # False: the state grows with the sequence
    causal: ClassVar[bool] = (
        True  # False: y_t depends on later x; such a mixer has no state, and only a classifier can use it
    )
    mixes_tokens: ClassVar[bool] = True  # False: y_t depends on x_t alone, as in a layer that is only an MLP
    passes: ClassVar[tuple[str, ...]] = ()  # streams that it passes to higher layers
    needs: ClassVar[tuple[str, ...]] = ()  # streams without which a model is refused
    write_delay: ClassVar[int] = 0  # tokens by which a write follows the token whose value it has
    site: Site  # set by the model, unless the mixer does

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Refuse sizes in place of a site, as layers of other libraries take them."""
        if "hidden_size" in named or (len(arguments) > 1 and isinstance(arguments[0], int)):
            raise kernels.UserError(f"site: {cls.__name__} takes a mixers.Site, such as {SITE}, not its sizes")
        return super().__new__(cls)

    def forward(
        self,
        x: Tensor,
        state: State = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, State]:
        """Mix, and continue `state` if one is given.

        Args:
            x: [B,T,hidden].
            state: None for training (no state is kept), else the state to continue from. It is consumed: a step of a
                single token may write the next state into its tensors.
            cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1).
            context_parallel: Which part of each sequence x is, if several processes share them; None if x holds whole
                sequences. A mixer that cannot work on a part leaves this argument out of its signature.

        Returns:
            y [B,T,hidden], and the continued state or None.
        """
        raise self._lacks("forward", "a token mixer maps x and a state to (y, state)")

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before the first token; device and dtype default to those of the parameters."""
        raise self._lacks("init_state", "decoding starts from the state that it returns")

    @property
    def takes_chunks(self) -> bool:
        """Return whether `forward` takes a `Chunk` in place of a state, for decoding in deterministic mode.

        It is then given x of the newest tokens [B,1,hidden], or of all tokens of the chunk [B,CHUNK,hidden] in the
        first call, and returns y of these tokens, with the bits of the whole chunk, and the chunk after it. Other
        mixers are called with all tokens of the chunk, for each new one.
        """
        return False

    def check_device(self, device: torch.device) -> None:
        """Raise a UserError if the layer cannot run on a device; called before a run starts. By default it can."""

    def state_size(self, length: int | None = None) -> int | float:
        """Elements of the recurrent matrix (attention: keys and values) of one sequence after `length` tokens.

        Integers, and what is typed `History` or `Position`, do not count. Without a length, the bound; `math.inf` if
        there is none. By default, the size of `init_state`, if it is constant.
        """
        if not self.constant_state:
            raise self._lacks("state_size", "of a state that grows it cannot be derived")
        return sum(tensor.numel() for tensor in remembered(self.init_state(1, "meta")))

    def flops(self, length: int) -> int:
        """Forward FLOPs of one sequence of `length` tokens, as the chunkwise path executes them.

        By default, those that PyTorch counts.
        """
        if getattr(self, "site", None) is None:
            raise self._lacks("flops", "without self.site = site it cannot be derived")
        like = next(self.parameters(), torch.zeros(0))
        x = torch.empty(1, length, self.site.hidden_size, device="meta", dtype=like.dtype)
        try:
            return counted_flops(partial(on_meta, self, x))
        except Exception as error:  # a mixer may do anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise self._lacks("flops", f"it cannot be counted on the meta device: {reason}") from error

    def head_maps(self) -> dict[str, HeadMap]:
        """The maps of queries `q`, keys `k`, values `v` and outputs `o`; by default none can be named."""
        return {}

    def _lacks(self, method: str, why: str) -> kernels.UserError:
        return kernels.UserError(f"{method}: {type(self).__name__} does not have it, and {why} ({TUTORIAL})")

    def masked_flops(self, length: int) -> int:
        """Return the part of `flops` that is spent on pairs of tokens that the mask of attention leaves out."""
        return 0

    @property
    def in_stream(self) -> nn.Parameter:
        """A parameter that has the device and dtype of the activations, since it is not kept in fp32."""
        return next(
            parameter
            for part in self.modules()
            for name, parameter in part.named_parameters(recurse=False)
            if name not in getattr(part, "keep_fp32", ())
        )

    def share(self, below: Sequence["TokenMixer"]) -> None:
        """Take over modules from the mixers of lower layers; called from the bottom up.

        Share modules, not parameters: tied parameters come apart when a module is cast or moved.
        """


class Streams(NamedTuple):
    """Everything that a mixer computes from x. `project` fills in raw values; features and gates refine them."""

    q: Tensor  # [B,T,G,K], then [B,T,G·S,K']
    k: Tensor  # [B,T,n·G,K], then [B,nT,G·S,K']
    v: Tensor  # [B,T,n·H,V], then [B,nT,H,V]
    log_decay: Tensor | None = None  # raw, then [H·S] | [B,T,H·S] | [B,T,H·S,K']
    beta: Tensor | None = None  # raw, then [B,nT,H·S] | [B,nT,H·S,K']
    gate: Any = None  # whatever `readout` needs
    erase: Tensor | None = None  # raw, then the erase keys of the delta rule [B,nT,H·S,K']
    curvature: tuple[Tensor, Tensor] | None = None  # raw gates of a preconditioner, each [B,T,G·S]
    erase_write: Tensor | None = None  # what erased values are written with [B,nT,H·S,K']; None for k

    def replace(self, **streams: Any) -> Self:
        """A copy with some streams replaced."""
        return self._replace(**streams)


class LinearState(NamedTuple):
    """The state of a LinearMixer."""

    matrix: Tensor  # [N,H·S,K',V], at least fp32
    histories: tuple[History, ...]  # last conv inputs [N,W−1,C] of q, k, v; empty without conv
    position: Position  # tokens seen [N], int64; empty where no feature map asks
    carried: Carried = ()  # what `carry` needs of earlier tokens [N,…], at least fp32, or integers


class LinearMixer(TokenMixer, Fusable):
    """A mixer whose state is a matrix per head: project → expand → features → gates → carry → recurrence → readout.

    A subclass implements `project`, `gates` and `readout`, names its `recurrence` and declares its features as data.
    `Expanded` can then expand its state, provided that its gates have size `gate_heads` (per key channel:
    `gate_heads * subhead_size`) and not the number of heads. A mixer that needs more of the earlier tokens than the
    matrix overrides `carry` and `init_carried`; by default, a preconditioner acts on the keys there.

    Args:
        site: Where the layer sits in the model.
        num_heads: Value heads H.
        key_size: Size K of a key head, as `project` makes it.
        value_size: Size V of a value head.
        num_key_heads: Key heads G, a divisor of H; H by default.
        steps: Steps n that the delta rule takes per token. `project` then makes n·G keys and n·H values per token.
        q: Features of the queries.
        k: Features of the keys.
        v: Features of the values.
        preconditioner: The module that preconditions the keys of a delta rule with one step per token; None for none.
    """

    fused_token = False  # whether `token_ops` stands for these methods; a class that defines it sets this
    token_methods = ("project", "gates", "gained", "carry", "recurrence", "read_before", "readout")
    recurrence: ClassVar[Callable[..., tuple[Tensor, Tensor | None]]] = staticmethod(kernels.linear_recurrence)
    scale: ClassVar[float | None] = None  # None: (size of the key that reaches the recurrence)^-½
    decay_per_channel: ClassVar[bool] = False
    erase_keys: ClassVar[bool] = False  # whether `gates` returns erase keys
    erase_writes: ClassVar[bool] = False  # whether `gates` returns `erase_write`
    read_before: ClassVar[bool] = False  # whether the erase key reads the state before it decays
    o_proj: OutputProjection  # unless a class has its own `token_readout`
    # weights that make queries, keys, values and outputs; None for what has no counterpart in attention
    head_weights: ClassVar[tuple[str | None, ...]] = (
        *("in_proj.q.weight", "in_proj.k.weight", "in_proj.v.weight"),
        "o_proj.weight",
    )

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int,
        key_size: int,
        value_size: int,
        num_key_heads: int | None = None,
        steps: int = 1,
        q: Features = Features(),
        k: Features = Features(),
        v: Features = Features(),
        preconditioner: Callable[[int], Preconditioner] | None = None,
    ):
        super().__init__()
        sizes = {"num_heads": num_heads, "key_size": key_size, "value_size": value_size, "num_key_heads": num_key_heads}
        check_sizes(sizes | {"steps": steps})
        self.site, self.num_heads, self.steps = site, num_heads, steps
        self.num_key_heads = num_heads if num_key_heads is None else num_key_heads
        if num_heads % self.num_key_heads:
            raise kernels.UserError(
                f"num_key_heads: {self.num_key_heads} does not divide the {num_heads} (value) heads"
            )
        self.key_size, self.value_size = key_size, value_size
        G, expand = self.num_key_heads, site.expand
        self.q_expand = expand.build(G, key_size, site.hidden_size) if expand else None
        self.k_expand = expand.build(steps * G, key_size, site.hidden_size) if expand else None
        self.q_gain = expand.build_gain(G) if expand else None
        self.subheads = expand.subheads if expand else 1
        self.subhead_size = key_size * (expand.factor if expand else 1) // self.subheads
        self.gate_heads = num_heads * self.subheads
        recompute = True if expand is None else expand.recompute
        self.keep_states = True if recompute is False else None  # None: few are kept, many are not
        self.q_features = FeaturePath(q, G * self.subheads, self.subhead_size, kept=recompute in ("states", False))
        self.k_features = FeaturePath(k, steps * G * self.subheads, self.subhead_size, kept=recompute is not True)
        self.v_features = FeaturePath(v, steps * num_heads, value_size)
        self.preconditioner = None if preconditioner is None else preconditioner(G * self.subheads)
        if preconditioner is not None and (steps > 1 or type(self).recurrence is not kernels.delta_rule):
            raise kernels.UserError("preconditioner: only a delta rule with one step per token can have one")

    def head_maps(self) -> dict[str, HeadMap]:
        keys, values, names = (self.num_key_heads, self.key_size), (self.num_heads, self.value_size), self.state_dict()
        shapes = (*keys, 1), (*keys, self.steps), (*values, self.steps), (*values, 1)
        every = zip("qkvo", self.head_weights, shapes, strict=True)
        return {kind: HeadMap(name, *shape) for kind, name, shape in every if name is not None and name in names}

    @classmethod
    def sized_like(cls, num_heads: int, head_dim: int, hidden_size: int) -> dict[str, object]:
        """Return arguments that give keys and values as many heads of the same size as attention has.

        Those that the constructor lacks are left out.
        """
        shared = {"state_dim": head_dim, "num_groups": num_heads, "expand": num_heads * head_dim // hidden_size}
        return {"num_heads": num_heads, "head_dim": head_dim, **shared}

    @torch.no_grad()
    def inherited(self, old: TokenMixer) -> dict[str, Tensor]:
        """The parameters that this mixer, just initialised, takes over from attention, by their names.

        By default: the maps of queries, keys, values and outputs, with their biases where both have them. Heads that
        share keys and values get one copy each, and short convolutions start by passing on the token itself, so that
        the maps have their meaning. Override it where more can be taken over.

        Raises:
            UserError: The heads have other numbers or sizes.
        """
        weights, own, taken = old.state_dict(), self.state_dict(), dict[str, Tensor]()
        maps, layer = old.head_maps(), f"{type(old).__name__} in layer {self.site.layer}"
        for kind, new in self.head_maps().items():
            if (before := maps.get(kind)) is None:
                continue
            check_heads(kind, before, new, layer)
            taken[new.weight] = converted(weights[before.weight], before, new, int(kind == "o"))
            if new.bias in own and before.bias in weights:
                bias = weights[before.bias]
                taken[new.bias] = bias if kind == "o" else converted(bias, before, new)
        for name in ("q_features.weight", "k_features.weight", "v_features.weight"):
            if name in own:
                taken[name] = torch.zeros_like(own[name])
                taken[name][..., -1] = 1
        return taken

    @property
    def _features(self) -> tuple[FeaturePath, FeaturePath, FeaturePath]:
        return self.q_features, self.k_features, self.v_features

    def project(self, x: Tensor) -> Streams:
        """All projections of x, gates as raw pre-activations. Afterwards only expansions see x."""
        raise self._lacks("project", "a LinearMixer makes its queries, keys and values there")

    def gate_inputs(self, s: Streams) -> kernels.GateInputs | None:
        """Return the inputs of the delta rule's gates, to compute the gates with the features; None to call `gates`."""
        return None

    def gates(self, s: Streams) -> Streams:
        """Compute the final log_decay, beta and erase; any stream may be replaced. Not called with `gate_inputs`."""
        return s

    def _streams(self, returned: Streams, method: str) -> Streams:
        """Return what a method of a subclass returned; a UserError if that is something else."""
        if not isinstance(returned, Streams):
            kind, how = type(returned).__name__, "Streams(q, k, v, …)" if method == "project" else "s or s.replace(…)"
            raise kernels.UserError(f"{type(self).__name__}.{method}: returned {kind}, must return {how}")
        return returned

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        """o [B,T,H,V] → y [B,T,hidden]: norm, output gate, skip, projection."""
        raise self._lacks("readout", "a LinearMixer makes its output there")

    def forward(
        self,
        x: Tensor,
        state: LinearState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, LinearState | None]:
        x = checked_input(x, self.site.hidden_size)
        if isinstance(state, Chunk):
            return self._replayed(x, state)
        s = self._projected(x)
        return self.mixed(s, x, state, cu_seqlens, context_parallel)

    def _projected(self, x: Tensor) -> Streams:
        s = self._streams(self.project(x), "project")
        for name, stream in zip("qkv", s[:3], strict=True):
            if stream.dim() != 4:
                shape = tuple(stream.shape)
                raise kernels.UserError(
                    f"{type(self).__name__}.project: {name} must be [B,T,heads,size], got {shape}; use split_heads"
                )
        return s

    def mixed(
        self,
        s: Streams,
        x: Tensor,
        state: LinearState | None,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None,
    ) -> tuple[Tensor, LinearState | None]:
        """Everything after `project`, whose result is s; the other arguments are those of `forward`."""
        alone = s.v.shape[1] == 1 and cu_seqlens is None and context_parallel is None
        if state is not None and alone and self.fused_token and (result := self.one_token(s, state)) is not None:
            return result
        s, histories, position = self._featurise(s, x, state, cu_seqlens, context_parallel)
        o, s, after = self._recurred(s, state, cu_seqlens, context_parallel, consume_state=True)
        return self.readout(o, s), None if after is None else after._replace(histories=histories, position=position)

    def one_token(self, s: Streams, state: LinearState) -> tuple[Tensor, LinearState] | None:
        """Compute y and the next state of one token of each sequence by `kernels.recurrence_token`.

        None if the mixer has no `token_ops`, or has an expansion, a preconditioner or a map of queries and keys that
        the op does not compute.
        """
        if self.q_expand is not None or self.preconditioner is not None or (ops := self.token_ops(s)) is None:
            return None
        q, k, v = self._features
        turn = None if q.map is None else q.map.turn(s.q, state.position)
        if v.map is not None or not alike(q, k) or (turn is None and q.map is not None):
            return None
        parts = zip(self._features, s[:3], state.histories, strict=True)
        streams = [path.stream(part, None, history, None, True) for path, part, history in parts]
        delta = type(self).recurrence is kernels.delta_rule
        ops = ops._replace(delta=delta, turn=turn, steps=self.steps, scale=self.scale, carried=state.carried)
        token = kernels.recurrence_token(streams, ops, state.matrix, consume_state=True)
        position = state.position if token.position is None else token.position
        return self.token_readout(token.y, s), LinearState(token.state, tuple(token.histories), position, token.carried)

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        """Return the gates, norm and skip of a token's raw streams; None if `kernels.recurrence_token` lacks one.

        The base class adds what is declared elsewhere: the recurrence, its steps and scale, positions, and `carried`.
        """
        return None

    def token_readout(self, y: Tensor, s: Streams) -> Tensor:
        """y [B,1,H,V] of `kernels.recurrence_token` → [B,1,hidden]: what `readout` does after the norm and gate."""
        return self.o_proj(y.flatten(2))

    def _recurred(
        self,
        s: Streams,
        state: LinearState | None,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None,
        *,
        consume_state: bool,
        return_state: bool = True,
    ) -> tuple[Tensor, Streams, LinearState | None]:
        """Compute the arguments of `readout` for featurised streams s, and the next matrix and `carried` of a state."""
        past = None if state is None else state.carried
        s, carried = self.carry(s, past, cu_seqlens, context_parallel)
        o, matrix = run_recurrence(
            self.recurrence,
            s.q,
            s.k,
            s.v,
            gates=self._gates_of_recurrence(s),
            initial_state=None if state is None else state.matrix,
            return_state=state is not None and return_state,
            cu_seqlens=cu_seqlens,
            consume_state=consume_state,
            keep_states=self.keep_states,
            context_parallel=context_parallel,
        )
        return o, s, None if state is None or matrix is None else state._replace(matrix=matrix, carried=carried)

    @property
    def takes_chunks(self) -> bool:
        cls = type(self)  # a subclass with its own `forward` or `mixed` may do anything
        return (cls.forward, cls.mixed) == (LinearMixer.forward, LinearMixer.mixed)

    def _replayed(self, x: Tensor, chunk: Chunk) -> tuple[Tensor, Chunk]:
        """Featurise the newest tokens, run the recurrence over the chunk, and read out the newest tokens.

        The inputs of the chunk are the memory of streams, and the histories and the position after the newest tokens.
        """
        s, before, memory = self._projected(x), chunk.state, None
        if chunk.inputs is None:
            histories, position = tree_map(lambda x: x.repeat_interleave(2, 0), (before.histories, before.position))
            documents = before._replace(histories=histories, position=position)
            (s, x), boundaries = chunk.packed((s, x)), chunk.cu_seqlens
            s, histories, position = self._featurise(s, x, documents, boundaries, None)
            s, after = chunk.unpacked(s), tree_map(lambda x: x[::2].clone(), (histories, position))
        else:
            memory, after = chunk.inputs
            before = before._replace(histories=after[0], position=after[1])
            s, histories, position = self._featurise(s, x, before, None, None)
            for old, new in zip(tree_leaves(after), tree_leaves((histories, position)), strict=True):
                if new is not old:
                    old.copy_(new)
        before = before._replace(histories=after[0], position=after[1])
        # by default, only `readout` reads the gate
        gate = s.gate if type(self).carry is LinearMixer.carry else None
        s = s if gate is None else s.replace(gate=None)
        whole, memory = chunk.kept(s, memory)
        o, read, state = self._recurred(whole, before, None, None, consume_state=False, return_state=chunk.ends)
        if chunk.inputs is not None:
            newest = {id(x): y for x, y in zip(tree_leaves(whole), tree_leaves(s), strict=True)}
            o, read = chunk.newest(o), tree_map(lambda x: newest[id(x)] if id(x) in newest else chunk.newest(x), read)
        read = read if gate is None else read.replace(gate=gate)
        return self.readout(o, read), chunk._replace(state=state, inputs=(memory, after))

    def _gates_of_recurrence(self, s: Streams) -> dict[str, Any]:
        gates = dict(log_decay=s.log_decay, beta=s.beta, subheads=self.subheads, scale=self.scale)
        if s.erase is not None or self.steps > 1:  # only the delta rule has these
            gates |= dict(erase=s.erase, read_before=self.read_before, steps=self.steps)
        if s.erase_write is not None:
            gates |= dict(erase_write=s.erase_write)
        return gates

    def heads_of(self, parameter: str) -> int:
        """Return the number of heads that follow each other in a parameter which becomes larger with subheads."""
        if parameter.startswith("k_features."):
            return self.steps * self.num_key_heads
        of_key_heads = ("q_features.", "in_proj.curvature_", "preconditioner.")
        return self.num_key_heads if parameter.startswith(of_key_heads) else self.num_heads

    def steps_of(self, x: Tensor) -> Tensor:
        """[B,T,n·heads,…] → [B,nT,heads,…]: the steps of a token follow each other."""
        return x if self.steps == 1 else x.unflatten(2, (self.steps, -1)).flatten(1, 2)

    def to_value_heads(self, x: Tensor) -> Tensor:
        """[B,T,G·S,…] → [B,T,H·S,…]: what the value heads of each key head read."""
        repeats = self.num_heads // self.num_key_heads
        if repeats == 1:
            return x
        grouped = x.unflatten(2, (self.num_key_heads, 1, self.subheads))
        return grouped.expand(*grouped.shape[:3], repeats, *grouped.shape[4:]).flatten(2, 4)

    def _featurise(
        self,
        s: Streams,
        x: Tensor,
        state: LinearState | None,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None,
    ) -> tuple[Streams, tuple[Tensor, ...], Tensor]:
        """Expand queries and keys, apply the features of each stream, compute the gates: the one place to fuse them.

        Returns:
            The streams, and the next histories and position of a state.
        """
        q_product = k_product = None
        if self.q_expand is not None and self.k_expand is not None:
            q, q_product = self._expand(self.q_expand, s.q, x)
            k, k_product = self._expand(self.k_expand, s.k, x)
            s = s.replace(q=q, k=k)
        where = following = s.v.new_zeros(0, dtype=torch.int64)
        if self._needs_positions:
            where, following = positions(s.v, None if state is None else state.position, cu_seqlens, context_parallel)
        histories_before = [None] * 3 if state is None else state.histories
        gate_inputs = self.gate_inputs(s)
        products = (q_product, k_product, None)
        names = ["gate", "erase", "erase_write", *["log_decay", "beta"] * (gate_inputs is None)]
        # a tensor without an axis of tokens is not a column of the projection
        others = {name: x for name in names if isinstance(x := getattr(s, name), Tensor) and x.dim() > 2}
        made, gates, others_after = together(
            *(self._features, s[:3], histories_before, where, cu_seqlens, context_parallel, gate_inputs, products),
            others=[*others.values()],
        )
        done, histories = zip(*made, strict=True)
        s = s.replace(q=done[0], k=self.steps_of(done[1]), v=self.steps_of(done[2]))
        s = s.replace(**dict(zip(others, others_after, strict=True)))
        s = self._streams(self.gates(s), "gates") if gates is None else s.replace(log_decay=gates[0], beta=gates[1])
        return self.gained(s), histories, following

    def gained(self, s: Streams) -> Streams:
        """Scale the queries of grown subheads, after the gates, as a norm would cancel the factors."""
        return s if self.q_gain is None else s.replace(q=self.q_gain(s.q))

    def carry(
        self, s: Streams, carried: Carried | None, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
    ) -> tuple[Streams, Carried]:
        """Refine the streams by what earlier tokens left besides the matrix, after the gates.

        By default, erase with the keys and write with preconditioned ones times β, if there is a preconditioner.

        Args:
            s: Streams as `gates` returns them.
            carried: What the tokens before s left, as `init_carried` makes it; None without a state.
            cu_seqlens: As in `forward`.
            context_parallel: As in `forward`.

        Returns:
            The streams of the recurrence, and what these tokens leave; the latter is ignored without a state.
        """
        if self.preconditioner is None:
            return s, ()
        assert s.beta is not None
        assert s.curvature is not None
        past = None if carried is None else carried[0]
        curvature, last = self.preconditioner(s.k, s.curvature, past, cu_seqlens, context_parallel)
        q, k, curvature = (self.to_value_heads(x) for x in (s.q, s.k, curvature))
        centre = self.to_value_heads(self.preconditioner.centre.view(1, 1, -1)).flatten()
        written = precondition(k, curvature, s.beta, centre, limit=self.preconditioner.limit)
        return s.replace(q=q, k=written, beta=None, erase=k), () if last is None else (last,)

    def _expand(self, expansion: Expansion, stream: Tensor, x: Tensor) -> tuple[Tensor, HeadProduct | None]:
        """The subheads of a stream; or a stream, and the product that makes them of its heads."""
        y, product = expansion.factors(stream, x)
        if product is None:
            # with parameters in fp32, under autocast, an expansion may make more of a stream than it was
            y = y.to(stream.dtype).unflatten(-1, (self.subheads, self.subhead_size)).flatten(2, 3)
        return y, product

    @property
    def _needs_positions(self) -> bool:
        return any(path.map is not None for path in self._features)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LinearState:
        like = self.in_stream
        device, dtype = device or like.device, dtype or like.dtype
        matrix_dtype = torch.promote_types(dtype, torch.float32)
        return LinearState(
            torch.zeros(batch_size, *self.matrix_shape, device=device, dtype=matrix_dtype),
            tuple(path.init_history(batch_size, device, dtype) for path in self._features),
            torch.zeros(batch_size if self._needs_positions else 0, device=device, dtype=torch.int64),
            self.init_carried(batch_size, device, matrix_dtype),
        )

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Shape [H·S,K',V] of the state of one sequence."""
        return self.gate_heads, self.k_features.out_size, self.v_features.out_size

    def init_carried(self, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> Carried:
        """Return what `carry` receives before the first token; dtype is at least fp32."""
        if self.preconditioner is None:
            return ()
        shape = (batch_size, self.k_features.heads, 1, self.k_features.out_size)
        return (torch.zeros(shape, device=device, dtype=dtype),)

    @property
    def recurrent_key_heads(self) -> int:
        """Number of key heads that the recurrence reads, without subheads. `gates` or `carry` may add some to G."""
        return self.num_key_heads

    def state_size(self, length: int | None = None) -> int:
        carried = self.init_carried(1, "meta", torch.float32)
        return math.prod(self.matrix_shape) + sum(x.numel() for x in remembered(carried))

    def flops(self, length: int) -> int:
        _, key_size, value_size = self.matrix_shape
        recurrence = kernels.recurrence_flops(
            type(self).recurrence,
            length,
            heads=self.num_heads,
            key_heads=self.recurrent_key_heads,
            subheads=self.subheads,
            key_size=key_size,
            value_size=value_size,
            per_channel=self.decay_per_channel,
            erase=self.erase_keys or self.preconditioner is not None,
            steps=self.steps * (2 if self.erase_writes else 1),  # the op erases in a step of its own
        )
        curvature = 0 if self.preconditioner is None else self.preconditioner.flops(length, key_size)
        return dense_flops(self, length) + recurrence + curvature


def dense_flops(module: nn.Module, length: int) -> int:
    """FLOPs of a layer's weights: each matrix, convolution or expansion is applied once to each of `length` tokens.

    Parameters that a module exempts from weight decay (angles, bounds) do not count as matrices.
    """
    return (
        2
        * length
        * sum(
            parameter.numel()
            for part in module.modules()
            for name, parameter in part.named_parameters(recurse=False)
            if parameter.dim() > 1 and name not in getattr(part, "no_weight_decay", ())
        )
    )


def positions(
    x: Tensor,
    offset: Tensor | None,
    cu_seqlens: Tensor | None,
    context_parallel: ContextParallel | None = None,
    cache: Tensor | Slots | None = None,
) -> tuple[Tensor, Tensor]:
    """The position of each token of x [B,T,…] in its sequence or document, and that of the token after the last.

    Args:
        x: Any stream [B,T,…].
        offset: Number of tokens already seen [N] (N = B without `cu_seqlens`); None for 0.
        cu_seqlens: Boundaries [N+1] of packed documents, or None.
        context_parallel: Which part of each sequence x is; None if x holds whole sequences.
        cache: A cache that `attend_to_cache` is called with. If it is `Slots`, that writes the next position.

    Returns:
        Positions [B,T] (or [1,T] where all rows agree), and the next position [N]; an empty tensor instead with
        `context_parallel`, where no state follows.

    Raises:
        UserError: The state that `offset` is from has another number of sequences.
    """
    length = x.shape[1]
    check_sequences(offset, x, cu_seqlens)
    if context_parallel is not None:
        where = context_parallel.positions(x.device)
        return where, where[:, :0]
    if cu_seqlens is not None:
        owner, place = places(cu_seqlens, length)
        counts = cu_seqlens.diff().to(torch.int64)
        start = torch.zeros_like(counts) if offset is None else offset
        return (place + start[owner])[None], start + counts
    if offset is not None and length == 1:
        return offset[:, None], torch.empty_like(offset) if isinstance(cache, Slots) else offset + 1
    time = torch.arange(length, device=x.device)
    if offset is None:
        return time[None], torch.full((x.shape[0],), length, device=x.device)
    return offset[:, None] + time, offset + length
