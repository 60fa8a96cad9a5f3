"""Text from a language model: the prompt in one call, then one token per call with the carried state."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from kernels import deterministic, is_deterministic
from kernels.errors import UserError
from kernels.linear_cross_entropy import losses_of_logits
from zoo.arguments import check_seed
from zoo.data.text.tokenizer import Tokenizer
from zoo.generation.chunk_decoder import ChunkDecoder
from zoo.generation.decoder import Decoder
from zoo.generation.graphs import DecodingGraphs
from zoo.generation.read import read
from zoo.lm.classifier import check_predicts_tokens
from zoo.lm.model import LanguageModel

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 2.0**-126, 1e30  # fp32 has no full precision below, and no room above
WORTH_CAPTURING = 8  # tokens: capturing a CUDA graph takes as long as a few steps without one
_INCOMPLETE = "\ufffd"  # what decoders return for bytes that are not, or not yet, a character


class Sampling(TypedDict, total=False):
    """The options of `generate` that do not depend on the text."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    graphs: DecodingGraphs | None


class Drawing(Sampling, total=False):
    """The options of `generate_tokens` and `sample_tokens`, of which `max_new_tokens` is required."""

    seed: int | None
    eos_id: int | Sequence[int] | None


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    graphs: DecodingGraphs | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    special_tokens: bool = False,
) -> Iterator[str]:
    """Continue `prompt`, piece by piece as the text becomes known.

    Args:
        model: A language model of the zoo.
        tokenizer: The tokenizer that the model was trained with.
        prompt: The text to continue, at the start of a document if the tokenizer has a token for that; an empty one
            starts a new document.
        max_new_tokens: Stop after this many tokens, or at the end of the document if that comes first.
        temperature: Divides the logits; 0 picks the likeliest token.
        top_k: Sample only from the k likeliest tokens.
        top_p: Sample only from the smallest set of likeliest tokens with at least this total probability.
        graphs: The owner of the CUDA graphs of decoding steps, which later calls can reuse; None for this call's own.
        seed: Makes the samples reproducible; None for other samples each time. Global generators are not touched.
        stop: Strings that end the text before them.
        special_tokens: Whether what spells a special token in the prompt, such as "<eos>", is that token.

    Returns:
        An iterator over pieces of text without the prompt. A character of several tokens comes in one piece; an
        incomplete one at the end is left out.

    Raises:
        UserError: An argument is out of range or the prompt is not valid text; while it generates, if the model's
            logits are not finite.
    """
    check_prompt(prompt)
    ids = ids_of_prompt(tokenizer, prompt, special_tokens)
    sampling: Sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling["graphs"] = graphs
    stop = checked_stops(stop)
    ends = stop_ids(tokenizer)
    prompts = torch.tensor([ids], device=next(model.parameters()).device)  # [1, P]
    tokens = generate_tokens(model, prompts, seed=seed, eos_id=tuple(ends), **sampling)
    new = itertools.takewhile(lambda token: token not in ends, (int(drawn) for drawn in tokens))
    return until(stream_text(tokenizer, ids if prompt else [], new), stop)


def checked_stops(stop: str | Sequence[str] | None) -> Sequence[str]:
    """Return the strings that end a text; a UserError if one is empty."""
    stops = [stop] if isinstance(stop, str) else stop or ()
    if "" in stops:
        raise UserError("stop: '' is in every text; name strings of at least one character.")
    return stops


def ids_of_prompt(tokenizer: Tokenizer, prompt: str, special_tokens: bool) -> list[int]:
    """Return the tokens of a prompt; for none, the token that starts a document, or else the one that ends it."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = tokenizer.encode(prompt, special_tokens=True) if special_tokens else tokenizer.encode(prompt)
    return (ids if start and ids[:1] == start else start + ids) or [tokenizer.eos_id]


def check_prompt(prompt: str) -> None:
    """Raise a UserError for text that has no UTF-8, as of bytes of a command line that are not UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"prompt: {prompt!r} cannot be encoded as UTF-8") from None


def write(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str | Sequence[str] = "",
    *,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    special_tokens: bool = False,
    stream: Callable[[str], object] | None = None,
    cuda_graph: bool = True,
    **options: Unpack[Sampling],
) -> str | list[str]:
    """Return a prompt and its continuation; for several prompts, a list of them, number i drawn with `seed` + i.

    Args:
        model, tokenizer: As in `generate`.
        prompt: One prompt, or several.
        seed, stop, special_tokens: As in `generate`.
        stream: Called with each prompt, and then with each piece of text once it is generated.
        cuda_graph: Whether to capture decoding steps as CUDA graphs on a GPU.
        options: As in `generate`.

    Raises:
        UserError: As in `generate`, the model is a classifier, or a prompt is not text.
    """
    check_predicts_tokens(model, "generate")
    if not cuda_graph or options.get("graphs") is None:
        options["graphs"] = DecodingGraphs(cuda_graph)
    if not isinstance(prompt, str):
        if not isinstance(prompt, Sequence) or not all(isinstance(each, str) for each in prompt):
            raise UserError(f"prompt: {prompt!r} is neither text nor a list of texts")
        texts = []
        for number, each in enumerate(prompt):
            own = None if seed is None else seed + number
            settings: dict[str, Any] = {"stop": stop, "special_tokens": special_tokens, "stream": stream}
            texts.append(str(write(model, tokenizer, each, seed=own, **settings, **options)))
        return texts
    text = ""
    pieces = generate(
        model, tokenizer, prompt, seed=seed, stop=checked_stops(stop), special_tokens=special_tokens, **options
    )
    for piece in itertools.chain([prompt], pieces):
        text += piece
        if stream is not None:
            stream(piece)
    return text


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """All ids that end a text, that of the end of a document first."""
    return getattr(tokenizer, "stop_ids", (tokenizer.eos_id,))


def generate_tokens(
    model: LanguageModel, prompts: Tensor | Sequence[Tensor], **options: Unpack[Drawing]
) -> Iterator[Tensor]:
    """Continue several prompts together.

    They are read in pieces of bounded size (`read`), so long prompts take no more memory than short ones.

    Args:
        model: A language model of the zoo.
        prompts: [B, P] int, P ≥ 1, or B vectors [P_i] of different lengths.
        options: `max_new_tokens`, and by choice `temperature`, `top_k`, `top_p`, `graphs` and `seed`, as in `generate`;
            `eos_id` ends a sequence, which repeats it (the first of several) from then on; the iterator stops when all
            have ended. None for sequences that never end.

    Returns:
        An iterator over the next tokens, [B] int64 each; a UserError as in `generate`, or if the model is a classifier.
    """
    drawn = _draws(model, prompts, False, **options)
    return (tokens for tokens, _ in drawn)


def sample_tokens(
    model: LanguageModel, prompts: Tensor | Sequence[Tensor], **options: Unpack[Drawing]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Continue several prompts together, with the log-probability that the model gives each token.

    Inside `kernels.deterministic()` the log-probabilities are bit by bit the negative losses of
    `LanguageModel.token_losses` for the same tokens, in any batch and in the same precision; elsewhere nearly.

    Args:
        model, prompts, options: As in `generate_tokens`.

    Returns:
        An iterator over the next tokens [B] and their log-probabilities [B] in fp32 under the model itself: at a
        temperature of 1, without `top_k` and `top_p`. The end that a sequence repeats has one, too.
    """
    return _draws(model, prompts, True, **options)


def _draws(
    model: LanguageModel,
    prompts: Tensor | Sequence[Tensor],
    scored: bool,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos_id: int | Sequence[int] | None = None,
    graphs: DecodingGraphs | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens of `sample_tokens`, with log-probabilities if they are to be `scored`, else with empty tensors."""
    check_predicts_tokens(model, "generate")
    # not in the generator, which would raise at its first use only
    check_sampling(max_new_tokens, temperature, top_k, top_p, seed)
    rows = list(prompts)
    for row in rows:
        if row.ndim != 1 or not len(row):
            raise UserError(
                f"prompts: one has shape {tuple(row.shape)}, but each must be a vector of at least 1 token."
            )
    if not rows:
        raise UserError("prompts: there are none.")
    generator = torch.Generator(rows[0].device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    stops = [] if eos_id is None else [eos_id] if isinstance(eos_id, int) else list(eos_id)
    draw = partial(_draw, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    graphs = None if max_new_tokens <= WORTH_CAPTURING else graphs or DecodingGraphs()
    return _tokens(model, rows, max_new_tokens, stops, draw, scored, graphs)


def _tokens(
    model: LanguageModel,
    prompts: list[Tensor],
    max_new_tokens: int,
    stops: list[int],
    draw: Callable[[Tensor], Tensor],
    scored: bool,
    graphs: DecodingGraphs | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    training, mode = model.training, is_deterministic()
    model.eval()
    decoder: ChunkDecoder | Decoder | None = None
    try:
        drawn = None
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=prompts[0].device)
        broken, ends = ended.any(), torch.tensor(stops, dtype=torch.int64, device=ended.device)
        for number in range(1, max_new_tokens + 1):
            # closed before the yield, as a generator's contexts leak into its caller
            with torch.no_grad(), deterministic(mode):
                if drawn is not None and decoder is not None:
                    logits = decoder(drawn)
                elif mode:
                    decoder = ChunkDecoder(model, prompts, graphs=graphs)
                    logits = decoder()
                else:
                    logits, state = read(model, prompts)
                    decoder = Decoder(model, state, graphs, room=max_new_tokens)
                    del state  # which would keep caches that the decoder has copied
                broken = broken | ~logits.amax(-1).isfinite().all()  # NaN, or nothing to draw
                drawn = draw(logits)
            complete = False
            if stops:
                drawn = drawn.masked_fill(ended, stops[0])
                ended = ended | torch.isin(drawn, ends)
                complete, failed = torch.stack([ended.all(), broken]).tolist()  # the device is waited for once
                _check_finite(failed, number)
            with torch.no_grad(), deterministic(mode):
                scores = -losses_of_logits(logits, drawn) if scored else logits.new_zeros(0)
            yield drawn, scores
            if complete:
                return
        _check_finite(bool(broken), max_new_tokens)  # without an end, the device is waited for only here
    finally:
        if decoder is not None:
            decoder.close()
        model.train(training)


def _check_finite(broken: bool, number: int) -> None:
    if broken:
        raise UserError(
            f"generation ended at token {number}: the model's logits are NaN or infinite, as those of a model whose "
            "training diverged are; try an earlier checkpoint."
        )


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """Tokens [B] from logits [B, vocab], without waiting for the device."""
    if temperature < LOWEST_TEMPERATURE:
        return logits.argmax(-1)
    probabilities = sampling_probabilities(logits, temperature, top_k, top_p)
    # the first of exponential clocks with these rates: `multinomial` does the same, but waits to check its input
    return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)


def sampling_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution that tokens are sampled from.

    Args:
        logits: [B, vocab].
        temperature: Divides the logits; 0 keeps only the likeliest token (the first, if several are equal).
        top_k: Keep the k likeliest tokens.
        top_p: Of these, keep the smallest set of likeliest ones with at least this total probability.

    Returns:
        [B, vocab] fp32; each row sums to 1.
    """
    logits = logits.float()
    if temperature < LOWEST_TEMPERATURE:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # relative to the largest, of which no quotient overflows
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / min(temperature, HIGHEST_TEMPERATURE)).softmax(-1)
    if top_p is not None and top_p >= 1:
        top_p = None  # which keeps all, whatever their rounded sum is
    if top_k is None and top_p is None:
        return probabilities
    probabilities, order = probabilities.sort(stable=True, descending=True)
    if top_k is not None:
        probabilities[:, top_k:] = 0
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if top_p is not None:
        before = probabilities.cumsum(-1) - probabilities  # of the likelier ones; 0 for the first
        probabilities = probabilities.masked_fill(before >= top_p, 0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, order, probabilities)


def stream_text(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Decode tokens as they come, after the ids of a prompt, into pieces of text that end with a complete character.

    Ids are decoded together with those of the previous piece, since some decoders treat the first token differently.
    """
    ids = list(prompt)
    start, end = 0, len(ids)  # ids[start:end] have been yielded, ids[end:] have not
    previous, text = tokenizer.decode(ids), ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids[start:])[len(previous) :]
        if text and not text.endswith(_INCOMPLETE):
            yield text
            start, end = end, len(ids)
            previous, text = tokenizer.decode(ids[start:end]), ""
    if rest := text.rstrip(_INCOMPLETE):
        yield rest


def text_after(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """Decode tokens after the ids of a prompt, without an incomplete character at the end."""
    return tokenizer.decode(prompt + tokens)[len(tokenizer.decode(prompt)) :].rstrip(_INCOMPLETE)


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield the pieces of a text up to the first of some non-empty strings, and ask for no more of them then.

    The end of a piece that may be the beginning of such a string waits for the next piece.
    """
    waiting = ""
    for piece in pieces:
        waiting += piece
        if starts := [at for stop in stops if (at := waiting.find(stop)) >= 0]:
            waiting = waiting[: min(starts)]
            break
        certain = len(waiting) - max((_begun(waiting, stop) for stop in stops), default=0)
        if certain:
            yield waiting[:certain]
            waiting = waiting[certain:]
    if waiting:
        yield waiting


def _begun(text: str, stop: str) -> int:
    """The length of the longest proper beginning of a stop string that the text ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def check_sampling(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int | None
) -> None:
    """Raise a UserError for the first setting of `generate` that is out of its range."""
    check_seed(seed)
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}, but must be 1 or more.")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature is {temperature}, but must be 0 or a positive number.")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k is {top_k}, but must be 1 or more.")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}, but must be above 0 and at most 1.")
