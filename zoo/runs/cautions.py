"""Warnings about settings that do not suit the size of a run, for `fit` before its first step and for its dry run."""

from jsonargparse import Namespace

from zoo.runs.rows import tokens_per_step

DEMO_LENGTH, DEMO_RATE = 256, 2e-3  # of the configs that run on a laptop: at most, and at least
LARGE = 100_000_000  # parameters, above which these settings are a mistake
SMALL = 10_000_000  # parameters of models to be tried out on few tokens


def cautions(config: Namespace, parameters: int, vocabulary: int | None, devices: int) -> list[str]:
    """Return a sentence for each setting of a run that does not suit its size.

    Args:
        config: A resolved config with `model.vocab_size`.
        parameters: Parameters of the model.
        vocabulary: Entries of the tokenizer; None if they are not known.
        devices: Devices that share the rows.
    """
    data, optim, sentences = config.data.get("init_args", Namespace()), config.optim, list[str]()
    length, rate = data.get("sequence_length"), optim.learning_rate
    per_step, steps = tokens_per_step(config) or 0, config.trainer.max_steps
    size, recipe = f"{parameters / 1e6:,.0f}M parameters", "--config recipe/400m.yaml and its like set all of them"
    if parameters > LARGE and length is not None and length <= DEMO_LENGTH and rate >= DEMO_RATE:
        sentences.append(
            f"data.sequence_length {length} and optim.learning_rate {rate:g} are settings of a demo with 3M "
            f"parameters, and this model has {size}; {recipe}"
        )
    embeddings = config.model.vocab_size
    if vocabulary is not None and embeddings and 2 * vocabulary < embeddings:
        sentences.append(
            f"the tokenizer has {vocabulary:,} entries, fewer than half of model.vocab_size {embeddings:,}: other "
            "embeddings are never trained; set data.tokenizer or data.vocab_size"
        )
    groups = devices // config.context_parallel
    if (rows := data.get("batch_size")) is not None and rows < groups:
        sentences.append(f"data.batch_size {rows} has fewer rows than the {groups} devices, which share them")
    if optim.initial_weights is None and parameters > SMALL and 0 < steps * per_step < parameters:
        sentences.append(
            f"trainer.max_steps {steps:,} of {per_step:,} tokens are {steps * per_step / parameters:.2g} tokens a "
            f"parameter for {size}; about 20 are usual (arXiv 2203.15556)"
        )
    return sentences
