"""Needles: facts with a key and a random value, and the sentences that state them and ask for them.

The wording of `NUMBERS` and `UUIDS` is RULER's (arXiv 2404.06654) for one needle that is queried, that of `PASSKEY`
∞Bench's as table 7 of StateX prints it.
"""

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zoo.data.synthetic.recall import number_of

Stream = Literal["training", "evaluation"]
Kind = Literal["number", "uuid", "passkey"]

# Words of the keys: 128 adjectives and 128 nouns. The list is fixed, rather than taken from the package `wonderwords`
# as in RULER, so that a sample is the same with every version of every package. The words are short and common, so that
# small tokenizers need few tokens for them.
ADJECTIVES = tuple(
    """
    able amber ancient arctic autumn bitter blank blue bold brave bright brisk broad bronze busy calm careful cheap
    clean clear clever cold common cool copper crimson curious daring dark deep distant double dry early east easy
    empty exact fair famous fancy fast final fine firm flat formal free fresh gentle giant glad golden grand gray great
    green happy heavy hidden high hollow honest humble icy idle inner ivory jolly keen kind large late lazy level light
    little lively local lone long loud low lucky main mellow mild modern narrow neat new noble north odd old open
    orange outer pale patient plain polite proud pure quick quiet rapid rare red rich rough round royal scarlet secret
    sharp shy silent silver simple sleepy slow small smooth soft solid sour steady
    """.split()  # noqa: SIM905
)
NOUNS = tuple(
    """
    anchor apple arrow autumn badge banner barrel basket beacon bell bench bird blanket boat book bottle branch bread
    bridge brook bucket button cabin camera candle canyon carpet castle cave chair circle cliff clock cloud coast
    comet corner cottage cradle crown desert desk dragon drum eagle engine farm feather fence field finger flag flame
    flower forest fountain fox garden gate glacier glove guitar hammer harbor hat hill horse house island jacket
    jungle kettle key kite ladder lake lamp lantern leaf letter lion market meadow mirror moon mountain needle nest
    ocean orchard paper path pencil piano pillow planet pocket pond prairie puzzle rabbit river road rocket roof
    saddle sail school shadow shell ship shore spoon spring square star station stone street summer table temple ticket
    tower train valley village window
    """.split()  # noqa: SIM905
)

KEYS = len(ADJECTIVES) * len(NOUNS)  # there are no more than these
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_EVALUATION_SHARE = 8  # one value in 8 is kept for evaluation


@dataclass(frozen=True)
class Needle:
    """A fact: what its key is, and the value to remember."""

    key: str
    value: str


@dataclass(frozen=True)
class Wording:
    """Text before, in and after the haystack; `{key}` and `{value}` are replaced by those of the needle."""

    kind: Kind
    head: str
    fact: str
    question: str
    answer: str = " {value}."

    def state(self, needle: Needle) -> str:
        """The sentence that states a needle."""
        return self.fact.format(key=needle.key, value=needle.value)

    def ask(self, needle: Needle) -> str:
        """The question for a needle, without the answer."""
        return self.question.format(key=needle.key)

    def reply(self, needle: Needle) -> str:
        """The answer to the question for a needle."""
        return self.answer.format(key=needle.key, value=needle.value)


def _ruler(kind: Kind) -> Wording:
    return Wording(
        kind,
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n",
        f"One of the special magic {kind}s for {{key}} is: {{value}}.",
        f"\nWhat is the special magic {kind} for {{key}} mentioned in the provided text? "
        f"The special magic {kind} for {{key}} mentioned in the provided text is",
    )


NUMBERS, UUIDS = _ruler("number"), _ruler("uuid")
PASSKEY = Wording(
    "passkey",
    "",
    "The pass key is {value}. Remember it. {value} is the pass key.",
    "\nWhat is the pass key? The pass key is",
)
# The modes of "Scaling Laws for Linear Complexity Language Models", which does not print its sentences: in the haystack
# are the question and the answer, or the answer alone.
EASY = Wording(
    "number",
    "",
    "What is the special magic number for {key}? The special magic number for {key} is {value}.",
    "\nWhat is the special magic number for {key}?",
    " The special magic number for {key} is {value}.",
)
STANDARD = replace(EASY, fact="The special magic number for {key} is {value}.")
RECORDS = Wording("number", "", "{key}: {value}", "\nWhat is the value of {key}? The value of {key} is")


def draw_needles(rng: random.Random, kind: Kind, stream: Stream) -> Iterator[Needle]:
    """Yield needles with different keys and values, `KEYS` in all: numbers of 7 digits, passkeys of 5, or UUIDs.

    A hash divides all values between the streams of training and evaluation, so that they share none.
    """
    keys: set[str] = set()
    values: set[str] = set()
    while len(keys) < KEYS:
        key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        if kind == "uuid":
            value = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        else:
            digits = 5 if kind == "passkey" else 7
            value = str(rng.randrange(10 ** (digits - 1), 10**digits))
        evaluated = number_of(value) % _EVALUATION_SHARE == 0
        if key not in keys and value not in values and evaluated == (stream == "evaluation"):
            keys.add(key)
            values.add(value)
            yield Needle(key, value)


def mentions(text: str, needles: Sequence[Needle]) -> bool:
    """Return whether a text contains the key or value of any of the needles, ignoring case."""
    folded = text.casefold()
    return any(needle.value in folded or needle.key in folded for needle in needles)
