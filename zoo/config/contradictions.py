"""Overrides that contradict each other: one of them would have no effect."""

from collections.abc import Iterable

from kernels import UserError
from zoo.config.overlays import NULL
from zoo.data.text.corpus import BUILT_IN  # text that comes with Python, which can be cut


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuse overrides of one command of which one would have no effect.

    A config may have what an override makes useless: most set a `data.vocab_size`, and some command a tokenizer.

    Args:
        overrides: Overrides `key=value`.

    Raises:
        UserError: Two of them contradict each other.
    """
    values = {}
    for item in overrides:
        key, _, value = item.partition("=")
        values[key.replace(".init_args.", ".")] = value
    values = {key: value for key, value in values.items() if value not in NULL}
    if "data.tokenizer" in values and "data.vocab_size" in values:
        raise UserError(
            f"data.vocab_size: {values['data.vocab_size']} is the size of a tokenizer that is trained, but "
            f"data.tokenizer={values['data.tokenizer']} is one that is loaded; leave one of them out"
        )
    path = values.get("data.path", BUILT_IN[0])
    if "data.max_characters" in values and not path.startswith(BUILT_IN):
        raise UserError(
            f"data.max_characters: {values['data.max_characters']} is the size of text that comes with Python, but "
            f"data.path={path} are your own files, which are never cut; leave it out"
        )
