"""The language model around the mixers: tokens → logits. Plain PyTorch, and it never asks which mixer it holds."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from kernels import UserError, at_least_fp32, linear_cross_entropy, linear_kl, linear_token_losses
from kernels.core.elementwise import soft_cap
from kernels.core.torch_internals import tree_leaves
from kernels.linear.tiles import linear
from mixers import ContextParallel, Norm, OutputProjection, RMSNorm, Site, TokenMixer
from mixers.arguments import check_numbers, check_sizes
from mixers.interface import placed
from mixers.projection import Linear, Projection
from zoo.lm.block import Block, Multipliers, PostNormBlock, mix, note_layer
from zoo.lm.classifier import Classifier
from zoo.lm.inputs import Inputs
from zoo.lm.mlp import ChannelMixer, SwiGLU
from zoo.lm.stack import Stack

log = logging.getLogger(__name__)

TOLERANCE = 0.03  # of a nominal size
LinearInitializer = Literal["normal", "uniform"]


class TokenLosses(NamedTuple):
    """Losses of labels, token by token.

    Attributes:
        losses: Negative log-likelihood of each label in nats, [B,T] fp32; 0 where there is none.
        correct: Whether the label is the likeliest token, [B,T]; false where there is none.
        state: The next state if a state was passed.
    """

    losses: Tensor
    correct: Tensor
    state: tuple[Any, ...] | None = None


class LanguageModel(nn.Module):
    """A causal language model: embedding, blocks of a token mixer and an MLP, norm, head.

    With other `inputs` it reads images and the like; with a `head` such as Classifier it labels whole sequences, and
    its mixers may look both ways. Where a method says tokens, it then takes what `inputs` does, and where it says
    labels [B,T], one per sequence: [B,1], or [1,N] of N packed documents.

    Args:
        stack: Which token mixer is used at which depth: Uniform, H1, H2, Pattern.
        vocab_size: Number of tokens; null for the tokenizer's, or if there are none.
        hidden_size: Size of the residual stream.
        num_heads: Heads of every mixer that does not set their number.
        num_layers: Number of blocks; null in a config for the number closest to `nominal_size` parameters, in
            whole periods of the stack if these are within 3 % of it.
        intermediate_size: Inner size of the MLPs; null for the default of the MLP.
        mlp: The channel mixer of every block; null for none.
        position: A mixer that is applied to the embeddings before the first block, such as TPE; null for none.
        inputs: What takes the place of token embeddings, such as Patches; null for token embeddings.
        head: What takes the place of logits for the next tokens, such as Classifier; null for these logits.
        tie_embeddings: Whether the head reuses the embedding matrix.
        norm: The norm before (or after) each mixer and MLP, and before the head: RMSNorm, ZeroCentredRMSNorm,
            SimpleRMSNorm (without a weight), LayerNorm (with a bias), or a subclass of Norm.
        norm_eps: Added inside the root of these norms.
        embedding_norm: Whether such a norm also follows the embeddings (RWKV).
        logit_cap: Logits become logit_cap · tanh(logits / logit_cap), so none exceeds it; null for no bound.
        multipliers: Factors of embeddings, residual stream and logits, such as `{embedding: 12, residual: 0.22}`.
        initializer_range: Initial standard deviation of all linear and embedding weights.
        linear_initializer: How linear weights start: `normal`, as above, or `uniform`, PyTorch's default U(±inputs^-½).
        scale_output_projections: Whether the weights of every `OutputProjection`, whose results are added to the
            residual stream, are initially divided by the square root of their number, one or two per block.
        recompute: Whether a GPU computes what is cheap (norms, gates, gated products, expanded queries and keys) again
            in the backward pass. False keeps it, even where an `Expanded` would not: more memory, less time.
        nominal_size: How many parameters the model is meant to have; a difference of more than 3 % is logged.
        window_size: Tokens that a query sees in every sliding-window mixer that does not set their number.

    Attributes:
        config: `{"model": …}`, from which `zoo.build` or `zoo.load` made it; None if its constructor was called.
        writer: Function of the model and the arguments of `generate`; set by `zoo.load` and `zoo.fit`, which know the
            tokenizer.

    Raises:
        UserError: A size is below 1, a layer has no output projection to scale, a mixer sees the tokens that it is to
            predict or needs a stream that no layer below passes, or there are no embeddings to tie.
    """

    def __init__(
        self,
        stack: Stack,
        vocab_size: int | None = None,
        hidden_size: int = 256,
        num_heads: int = 4,
        num_layers: int | None = 6,
        intermediate_size: int | None = None,
        mlp: Callable[[int, int | None], ChannelMixer] | None = SwiGLU,
        position: Callable[[Site], TokenMixer] | None = None,
        inputs: Callable[[int], Inputs] | None = None,
        head: Callable[[int], Classifier] | None = None,
        tie_embeddings: bool = False,
        norm: Callable[[int, float], Norm] = RMSNorm,
        norm_eps: float = 1e-6,
        embedding_norm: bool = False,
        logit_cap: float | None = None,
        multipliers: Multipliers = Multipliers(),
        initializer_range: float = 0.02,
        linear_initializer: LinearInitializer = "normal",
        scale_output_projections: bool = False,
        recompute: bool = True,
        nominal_size: float | None = None,
        window_size: int = 2048,
    ):
        super().__init__()
        if vocab_size is None and (inputs is None or head is None):
            raise UserError("vocab_size: null means the tokenizer's; a model without a tokenizer needs a number")
        if num_layers is None:
            raise UserError("num_layers: null is resolved by zoo.build and fit; a constructor needs a number")
        if tie_embeddings and (inputs is not None or head is not None):
            raise UserError("tie_embeddings: true needs token embeddings and logits, so null as inputs and head")
        sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_heads": num_heads, "num_layers": num_layers}
        check_sizes({**sizes, "intermediate_size": intermediate_size, "window_size": window_size})
        check_numbers({"norm_eps": norm_eps, "initializer_range": initializer_range}, positive=False)
        check_numbers({"nominal_size": nominal_size, "logit_cap": logit_cap})
        if logit_cap is not None and head is not None:
            raise UserError("logit_cap: bounds the logits of tokens, so it needs null as head")
        self.vocab_size = vocab_size or 0  # if it reads no tokens and predicts none
        self.config: dict[str, Any] | None = None
        self.writer: Callable[..., str | list[str]] | None = None
        self.hidden_size, self.num_layers, self.logit_cap = hidden_size, num_layers, logit_cap
        self.initializer_range, self.linear_initializer = initializer_range, linear_initializer
        self.multipliers, self.scale_output_projections = multipliers, scale_output_projections
        if linear_initializer not in get_args(LinearInitializer):
            raise UserError(f"linear_initializer: {linear_initializer!r} is not one of normal, uniform")
        self.embeddings = nn.Embedding(self.vocab_size, hidden_size) if inputs is None else None
        self.inputs = None if inputs is None else inputs(hidden_size)
        make_norm = partial(norm, hidden_size, norm_eps)
        self.embedding_norm = make_norm() if embedding_norm else None
        site = Site(hidden_size, num_heads, 0, num_layers, window_size=window_size)
        self.position = None if position is None else placed(position(site), site)
        passed: tuple[str, ...] = () if self.position is None else self.position.passes
        self.layers = nn.ModuleList()
        for layer in range(num_layers):
            site = site._replace(layer=layer, passed=passed)
            mixer = placed(stack(site), site)
            passed = tuple(dict.fromkeys((*passed, *mixer.passes)))
            channel_mixer = None if mlp is None else mlp(hidden_size, intermediate_size)
            if channel_mixer is not None:
                channel_mixer.site = site
            kind = PostNormBlock if stack.post_norm(layer) else Block
            factor = multipliers.residual
            self.layers.append(kind(mixer, channel_mixer, make_norm, recompute=recompute, residual_multiplier=factor))
        self.norm = make_norm()
        self.head = None if head is None else head(hidden_size)
        self.lm_head = None if tie_embeddings or head is not None else Linear(hidden_size, self.vocab_size, bias=False)
        for mixer in self._token_mixers:
            if not mixer.causal and head is None:
                raise UserError(
                    f"stack: {type(mixer).__name__} is not causal and would see the tokens it predicts; "
                    "give the model a head that labels whole sequences, such as Classifier"
                )
        for layer, mixer in enumerate(self.mixers):
            mixer.share(self.mixers[:layer])
        self.reset_parameters()
        size = self.num_parameters()
        if nominal_size is not None and abs(size / nominal_size - 1) > TOLERANCE:
            log.warning(
                "model.nominal_size is %.1fM parameters, but this model has %.1fM", nominal_size / 1e6, size / 1e6
            )

    @property
    def mixers(self) -> list[TokenMixer]:
        """The token mixers, from the bottom up."""
        return [block.mixer for block in self.layers]  # type: ignore[misc]

    @property
    def mlps(self) -> list[ChannelMixer]:
        """The channel mixers, from the bottom up."""
        return [block.mlp for block in self.layers if block.mlp is not None]  # type: ignore[misc]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all parameters: linear and embedding weights as the arguments say, biases as zero.

        Every other module, and every subclass with another `reset_parameters`, initialises itself by that method.
        """
        for module in self.modules():
            reset = getattr(type(module), "reset_parameters", None)
            if reset in (nn.Linear.reset_parameters, nn.Embedding.reset_parameters):
                self._initialise(module)  # type: ignore[arg-type]
            elif module is not self and callable(reset):
                reset(module)
        if self.scale_output_projections:
            projections = self._output_projections()
            for projection in projections:
                projection.weight.div_(math.sqrt(len(projections)))

    def _initialise(self, module: nn.Linear | nn.Embedding) -> None:
        if isinstance(module, nn.Linear) and self.linear_initializer == "uniform":
            nn.init.uniform_(module.weight, -(module.in_features**-0.5), module.in_features**-0.5)
        else:
            nn.init.normal_(module.weight, std=self.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Projection):
            module.start_at_zero()

    def _output_projections(self) -> list[OutputProjection]:
        """The output projections of all mixers and MLPs.

        Raises:
            UserError: A layer has none.
        """
        projections = []
        for layer in (*self.mixers, *self.mlps):
            of_layer = [part for part in layer.modules() if isinstance(part, OutputProjection)]
            if not of_layer:
                raise UserError(f"scale_output_projections: {type(layer).__name__} has no OutputProjection to scale")
            projections += of_layer
        return projections

    def forward(
        self,
        tokens: Tensor,
        state: tuple[Any, ...] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, tuple[Any, ...] | None]:
        """tokens [B,T] int → logits [B,T,vocab_size], and the next state if a state was passed (which is consumed).

        Args:
            tokens: [B,T].
            state: From `init_state` or an earlier call; None to train.
            cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1).
            context_parallel: Which part of each sequence `tokens` is; `cu_seqlens` are then those of the part. None for
                whole sequences.

        Raises:
            UserError: With `context_parallel`: a mixer works on whole sequences only, or there is a state.
        """
        x, state = self.last_hidden(tokens, state, cu_seqlens=cu_seqlens, context_parallel=context_parallel)
        return self.logits(x), state

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> Tensor:
        """Sum of the cross entropies of all labels in nats, without holding the logits of all tokens in memory.

        It does not go through `forward`. Lightning's strategies wrap the LightningModule, so they see both; if you wrap
        the model itself, let the wrapper know about this method (FSDP: `register_fsdp_forward_method`).

        Args:
            tokens: [B,T].
            labels: [B,T] int64, already shifted; -100 has no loss.
            cu_seqlens, context_parallel: As in `forward`, which raises the same errors.

        Returns:
            A scalar in fp32.
        """
        x, _ = self.last_hidden(tokens, cu_seqlens=cu_seqlens, context_parallel=context_parallel)
        self._check_labels(labels, x)
        return linear_cross_entropy(x.flatten(0, 1), self._head.weight, labels.flatten(), cap=self.logit_cap)

    def divergence(
        self,
        tokens: Tensor,
        labels: Tensor,
        teacher: "LanguageModel",
        cu_seqlens: Tensor | None = None,
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """Sum of KL(teacher ‖ model) of the next token in nats, over tokens with a label, as `kernels.linear_kl` does.

        The arguments are those of `loss`; no gradient flows to the teacher.
        """
        with torch.no_grad():
            y, _ = teacher.last_hidden(tokens, cu_seqlens=cu_seqlens)
        x, _ = self.last_hidden(tokens, cu_seqlens=cu_seqlens)
        self._check_labels(labels, x)
        return linear_kl(
            x.flatten(0, 1),
            self._head.weight,
            y.flatten(0, 1),
            teacher._head.weight,
            labels.flatten(),
            temperature=temperature,
            cap=self.logit_cap,
            teacher_cap=teacher.logit_cap,
        )

    def token_losses(
        self,
        tokens: Tensor,
        labels: Tensor,
        state: tuple[Any, ...] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
        every_token: bool = False,
    ) -> TokenLosses:
        """The loss of each label, for evaluation: without gradients, and without the logits of all tokens in memory.

        The arguments are those of `loss` and `forward`. With `every_token` nothing waits for the device to count the
        labels; logits are then also computed where there are none.
        """
        x, state = self.last_hidden(tokens, state, cu_seqlens=cu_seqlens, context_parallel=context_parallel)
        self._check_labels(labels, x)
        if every_token:
            losses, correct = linear_token_losses(
                x.flatten(0, 1), self._head.weight, labels.flatten(), cap=self.logit_cap
            )
            return TokenLosses(losses.view(labels.shape), correct.view(labels.shape), state)
        labelled = labels != -100  # in questions with short answers, few are
        label_losses, label_correct = linear_token_losses(
            x[labelled], self._head.weight, labels[labelled], cap=self.logit_cap
        )
        losses, correct = label_losses.new_zeros(labels.shape), torch.zeros_like(labelled)
        losses[labelled], correct[labelled] = label_losses, label_correct
        return TokenLosses(losses, correct, state)

    @property
    def _head(self) -> nn.Linear | nn.Embedding:
        return next(head for head in (self.head, self.lm_head, self.embeddings) if head is not None)

    def _check_labels(self, labels: Tensor, x: Tensor) -> None:
        if labels.shape != x.shape[:2]:
            kind = "language model" if self.head is None else f"model with the head {type(self.head).__name__}"
            raise UserError(
                f"labels: the data has {tuple(labels.shape)}, but this {kind} makes {tuple(x.shape[:2])} predictions"
            )

    def logits(self, x: Tensor) -> Tensor:
        """The head: x […,hidden] of `last_hidden` → logits […,vocab_size], or those of a classifier's classes."""
        head = self._head
        logits = head(x) if isinstance(head, nn.Linear) else linear(x, head.weight)
        return logits if self.logit_cap is None else soft_cap(at_least_fp32(logits), self.logit_cap).to(logits.dtype)

    def last_hidden(
        self,
        tokens: Tensor,
        state: tuple[Any, ...] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, tuple[Any, ...] | None]:
        """tokens [B,T] → the input of the head [B,T,hidden], and the next state; otherwise as `forward`.

        A classifier gets one vector per sequence, [B,1,hidden], or [1,N,hidden] of N packed documents.

        Where only some logits are needed, call `logits` with these positions: those of all positions take
        T · vocab_size numbers per sequence.
        """
        if self.head is not None and not (state is None and context_parallel is None):
            what = "state" if context_parallel is None else "context_parallel"
            raise UserError(f"{what}: a model with the head {type(self.head).__name__} reads whole sequences only")
        x, states = self._embed(tokens), []
        x = x if self.multipliers.embedding == 1 else x * self.multipliers.embedding
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        self._check_state(state, len(tokens) if cu_seqlens is None else len(cu_seqlens) - 1)
        layer_states = iter(state) if state is not None else itertools.repeat(None)
        passed: Mapping[str, Tensor] = {}
        if self.position is not None:
            x, following, passed = mix(self.position, x, next(layer_states), cu_seqlens, context_parallel, passed)
            states.append(following)
        y = None
        for layer, block in enumerate(self.layers):
            try:
                x, y, following, passed = block(x, y, next(layer_states), cu_seqlens, context_parallel, passed)
            except Exception as error:
                note_layer(error, layer, block.mixer, block.mlp)
                raise
            states.append(following)
        _, x = self.norm(x, y)
        x = x if self.multipliers.logits_scaling == 1 else x / self.multipliers.logits_scaling
        if self.head is not None:
            x = self.head.pool(x, cu_seqlens)
        return x, None if state is None else tuple(states)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.inputs is not None:
            return self.inputs(tokens)
        is_tensor = isinstance(tokens, Tensor)
        if self.embeddings is None or (is_tensor and tokens.is_floating_point()):
            raise UserError("inputs: null embeds tokens, but the data has numbers; patches of images need Patches")
        if not is_tensor or tokens.dim() != 2 or tokens.dtype == torch.bool:
            kind = f"{tokens.dtype} of shape {tuple(tokens.shape)}" if is_tensor else f"a {type(tokens).__name__}"
            example = "such as torch.tensor([[1, 2]])"
            raise UserError(f"tokens: must be an integer tensor [batch, time], {example}, got {kind}")
        if not tokens.shape[1]:
            raise UserError(f"tokens: shape {tuple(tokens.shape)} has no tokens; at least one is needed")
        try:
            return self.embeddings(tokens)
        except IndexError:
            low, high = tokens.min().item(), tokens.max().item()
            raise UserError(f"tokens: {low} to {high} are not all from 0 to {self.vocab_size - 1}") from None

    def _check_state(self, state: tuple[Any, ...] | None, count: int) -> None:
        """Raise a UserError unless a state is of `count` sequences, and of a model with as many layers."""
        if state is None:
            return
        if not isinstance(state, tuple) or len(state) != len(self._stateful):
            raise UserError("state: must be a state of init_state, or of an earlier call of this model")
        tensors = (leaf for leaf in tree_leaves(state[0]) if isinstance(leaf, Tensor) and leaf.numel())
        if (first := next(tensors, None)) is not None and len(first) != count:
            raise UserError(f"state: has {len(first)} sequences, but the input has {count}")

    def generate(
        self,
        prompt: str | Sequence[str] = "",
        max_new_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = 0.95,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        special_tokens: bool = False,
        cuda_graph: bool = True,
        stream: Callable[[str], object] | None = None,
    ) -> str | list[str]:
        """Continue a prompt, or each of several; `zoo.generate` describes the arguments.

        Raises:
            UserError: The model has no tokenizer, or as `zoo.generate`.
        """
        if self.writer is None:
            raise UserError(
                "prompt: this model has no tokenizer, which only those of zoo.load and zoo.fit have; "
                "zoo.generation.generate.generate_tokens continues tokens"
            )
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        further = {"seed": seed, "stop": stop, "special_tokens": special_tokens, "cuda_graph": cuda_graph}
        return self.writer(self, prompt=prompt, stream=stream, **further, **sampling)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Any, ...]:
        """The state before the first token of `batch_size` sequences: of `position`, if any, then of each layer.

        A layer whose channel mixer has a state as well has a `LayerState`.
        """
        return tuple(part.init_state(batch_size, device, dtype) for part in self._stateful)

    @property
    def _stateful(self) -> list[TokenMixer | Block]:
        blocks: list[Any] = list(self.layers)
        return blocks if self.position is None else [self.position, *blocks]

    @property
    def _token_mixers(self) -> list[TokenMixer]:
        return self.mixers if self.position is None else [self.position, *self.mixers]

    def num_parameters(self) -> int:
        """Number of parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters())

    def state_size(self, length: int | None = None) -> int | float:
        """State elements of one sequence after `length` tokens; without a length, the bound (`math.inf` if none)."""
        return sum(part.state_size(length) for part in self._stateful)

    def flops(self, length: int) -> int:
        """Forward FLOPs of one sequence of `length` tokens: matrix products only, so the embedding look-up is free."""
        predictions = length if self.head is None else 1
        return (
            (0 if self.inputs is None else self.inputs.flops(length))
            + sum(mixer.flops(length) for mixer in self._token_mixers)
            + sum(mlp.flops(length) for mlp in self.mlps)
            + 2 * predictions * self._head.weight.numel()
        )

    @contextmanager
    def without_mixers(self) -> Iterator[None]:
        """Inside the ``with`` block all token mixers output zero, so that the model sees single tokens only.

        A stateful channel mixer still sees earlier tokens.
        """

        def silence(module: nn.Module, inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
            return torch.zeros_like(output[0]), *output[1:]

        hooks = [mixer.register_forward_hook(silence) for mixer in self.mixers if mixer.mixes_tokens]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
