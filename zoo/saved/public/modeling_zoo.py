"""Models of the token-mixer zoo with the interface of transformers; `convert --to=transformers` copies this file."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from zoo.config.build import from_config
from zoo.config.parser import parse_model
from zoo.lm.states import join_states, take_states
from zoo.saved.trust import vet_model


class ZooCache:
    """The state of a model after some tokens; None before the first."""

    is_compileable = False

    def __init__(self) -> None:
        self.state: Any = None
        self.started, self.length = torch.tensor(False), 0  # started [B]: was there more than padding?

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read, including padding."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by those at these indices."""
        self.state, self.started = take_states(self.state, beam_idx), self.started[beam_idx.to(self.started.device)]


class ZooConfig(PretrainedConfig):
    """The contents of config.json; `zoo` is the `model` config of a run."""

    model_type = "zoo"

    def __init__(self, zoo: dict[str, Any] | None = None, vocab_size: int = 0, **others: Any):
        self.zoo, self.vocab_size, self.use_cache = zoo or {}, vocab_size, others.pop("use_cache", True)
        super().__init__(**others)


class ZooForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of the zoo with the interface of transformers."""

    config_class = ZooConfig
    _input_embed_layer = "embeddings"
    _is_stateful = True

    def __init__(self, config: ZooConfig):
        super().__init__(config)
        vet_model(config.zoo, "config.json")
        self.model = from_config(parse_model({"model": config.zoo}), str(torch.get_default_device()))
        parts = ((at, getattr(part, "keep_fp32", ())) for at, part in self.model.named_modules(prefix="model"))
        self._keep_in_fp32_modules_strict = {f"{at}.{name}" for at, names in parts for name in names}
        self.post_init()

    def state_dict(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the parameters by the names of fused ones, whose parts transformers does not know."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any) -> bool:
        if generation_config.use_cache:
            model_kwargs.setdefault("past_key_values", ZooCache())
        return False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: ZooCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Map tokens [B,T] → logits [B,T,vocab_size], with the usual arguments of transformers' models.

        `attention_mask` [B,P+T], after P cached tokens, is 0 for padding, which must be on the left if a cache is used.
        """
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = ZooCache() if past_key_values is None and use_cache else past_key_values
        x = self._hidden(input_ids, attention_mask, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(x[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)  # type: ignore[arg-type]
        return output.to_tuple() if return_dict is False else output

    def _hidden(self, tokens: Tensor, mask: Tensor | None, cache: ZooCache | None) -> Tensor:
        """Return the input of the head [B,T,hidden]; padding on the left is not read, and gets zeros."""
        (B, T), seen = tokens.shape, 0 if cache is None else cache.length
        if mask is not None and mask.shape not in ((B, T), (B, seen + T)):
            raise ValueError(f"attention_mask: must be [{B},{seen + T}], got {[*mask.shape]}")
        valid = (
            torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask[:, -T:].to(tokens.device, torch.bool)
        )
        if cache is not None and cache.state is None:
            cache.state, cache.started = self.model.init_state(B, tokens.device), torch.zeros_like(valid[:, 0])
        state, started = (None, torch.zeros_like(valid[:, 0])) if cache is None else (cache.state, cache.started)
        padding = ~started[:, None] & (valid.cumsum(1) == 0)
        if cache is not None:
            if not bool((valid | padding).all()):
                raise ValueError(
                    "attention_mask: padding must be on the left (padding_side='left'), or use_cache=False"
                )
            cache.length, cache.started = seen + T, started | valid.any(1)
        if not bool(padding.any()):
            x, state = self.model.last_hidden(tokens, state)
        else:
            x = self.model.embeddings.weight.new_zeros(B, T, self.model.hidden_size)
            states = [None if state is None else take_states(state, [row]) for row in range(B)]
            for row, start in enumerate(padding.sum(1).tolist()):
                if start < T:
                    x[row : row + 1, start:], states[row] = self.model.last_hidden(tokens[[row], start:], states[row])
            state = None if state is None else join_states(states)
        if cache is not None:
            cache.state = state
        return x
