"""Language models of the zoo as lm-eval sees them: text in; log-likelihoods and text out."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kernels import UserError
from zoo.evaluation.loaded import LoadedModel

log = logging.getLogger(__name__)

SUPPORTED = (
    *("until", "do_sample", "temperature"),
    *("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"),
)
# Other options of a task, and the values with which they change nothing; those of sampling change no greedy answer.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "repetition_penalty"), (1,)),
    **dict.fromkeys(("length_penalty", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("min_new_tokens", "min_length", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("diversity_penalty", "presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("early_stopping", "use_cache"), (False, True)),
}
OF_SAMPLING = ("top_k", "top_p", "min_p", "typical_p", "seed")


class SubjectLM(TemplateLM):
    """Answers lm-eval's requests with a subject.

    A prompt may be longer than the model's training context: a recurrent model reads all of it. Text starts with the
    tokenizer's `bos_id`, if it has one.

    Args:
        subject: The model.
        max_length: Tokens that the model reads: prompt and answer together, without the last token of an answer that is
            scored, as in lm-eval's adaptor of Hugging Face. Longer prompts lose their beginnings, and the log says how
            many did. None for whole prompts.

    Raises:
        UserError: The subject has no tokenizer, or `max_length` is below 2.
    """

    def __init__(self, subject: LoadedModel, max_length: int | None = None) -> None:
        super().__init__()
        if subject.tokenizer is None:
            raise UserError("lm_eval: the model was trained without a tokenizer, so it cannot read lm-eval's tasks")
        if max_length is not None and max_length < 2:
            raise UserError(f"lm_eval: max_length is {max_length}; it must be at least 2, or left out")
        self.subject, self.text, self.max_length = subject, subject.tokenizer, max_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.text.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Token before a text that has no context."""
        return self.text.eos_id if self.text.bos_id is None else self.text.bos_id

    @property
    def tokenizer_name(self) -> str:
        """Distinguishes tokenizers in lm-eval's cache of requests."""
        return self.text.hash

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Tokens of a text, after the token that starts documents unless `add_special_tokens` is False."""
        start = [] if self.text.bos_id is None or add_special_tokens is False else [self.text.bos_id]
        return start + self.text.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods of the second lists of tokens after the first."""
        contexts = self._last([(context, len(continuation) - 1) for _, context, continuation in requests])
        scores = self.subject.log_likelihoods(
            [(context, request[2]) for context, request in zip(contexts, requests, strict=True)]
        )
        return [(scored.log_likelihood, scored.greedy) for scored in scores]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of each text, every token counted once.

        Without `max_length` a text is read from end to end with one state; with it, in windows as lm-eval makes them.
        """
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            tokens = self.tok_encode(text, add_special_tokens=False)
            longest = len(tokens) if self.max_length is None else self.max_length
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, longest, context_len=1)
            pairs += map(make_disjoint_window, rolling)
            owners += [number] * (len(pairs) - len(owners))
        totals = [0.0] * len(requests)
        for owner, scored in zip(owners, self.subject.log_likelihoods(pairs), strict=True):
            totals[owner] += scored.log_likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy answers, without the first of their stop strings and what follows.

        Raises:
            UserError: A task wants its answers sampled, or found in another way that we have not.
        """
        groups: dict[int, list[tuple[int, list[str]]]] = defaultdict(list)
        for number, request in enumerate(requests):
            wanted = normalize_gen_kwargs(request.args[1])
            _check_options(request.args[1])
            if wanted["do_sample"]:
                raise UserError(
                    "lm_eval: the task samples its answers (do_sample: true); the zoo answers greedily only"
                )
            groups[wanted["max_gen_toks"]].append((number, wanted["until"]))
        answers = [""] * len(requests)
        for new_tokens, members in groups.items():
            prompts = self._last([(self.tok_encode(requests[number].args[0]), new_tokens) for number, _ in members])
            continuations = self.subject.continuations(prompts, new_tokens)
            for (number, stops), tokens in zip(members, continuations, strict=True):
                answers[number] = postprocess_generated_text(self.text.decode(tokens), stops, None)
        return answers

    def _last(self, prompts: Sequence[tuple[list[int], int]]) -> list[list[int]]:
        """The ends of prompts that leave room for so many tokens that are read after them; none is empty.

        Raises:
            UserError: `max_length` tokens or more come after a prompt.
        """
        kept, cut = [], 0
        for prompt, after in prompts:
            prompt = prompt or [self.prefix_token_id]
            room = len(prompt) if self.max_length is None else self.max_length - after
            if room < 1:
                raise UserError(
                    f"lm_eval: max_length is {self.max_length}, but must be more than the {after} tokens that are read "
                    "after a prompt"
                )
            cut += room < len(prompt)
            kept.append(prompt[-room:])
        if cut:
            log.warning("%d of %d prompts lost their beginnings: max_length is %d.", cut, len(prompts), self.max_length)
        return kept


def _check_options(options: dict[str, Any]) -> None:
    """Refuse options of a task that would change its answers, and that greedy decoding does not have."""
    for name, value in options.items():
        if name in SUPPORTED or name in OF_SAMPLING or value is None or value in NEUTRAL.get(name, ()):
            continue
        allowed = f"; only {' or '.join(map(str, NEUTRAL[name]))} is" if name in NEUTRAL else ""
        raise UserError(f"lm_eval: the task's {name} is {value!r:.80}, which is not supported{allowed}")
