"""The exception for a user's mistake, with the one sentence that explains it."""

from typing import NamedTuple

_NAMING = ("checkpoint", "config", "resume", "run")  # options that are written `--run first`, the others `--tasks=list`


class Option(NamedTuple):
    """An argument that the sentence of a `UserError` tells the reader to write, in Python or on the command line."""

    name: str  # `config` for a config, a dotted key for an override
    value: str | bool | None = None  # True for a flag; None to name the argument without a value

    def __str__(self) -> str:
        if self.value is None:
            return self.name
        if self.name == "config":
            return f'"{self.value}"'
        return f'"{self.name}={self.value}"' if "." in self.name else f"{self.name}={self.value!r}"

    @property
    def on_command_line(self) -> str:
        """The option in the spelling of the command line."""
        if self.value is None or self.value is True:
            return f"--{self.name}"
        return f"--{self.name}{' ' if self.name in _NAMING else '='}{self.value}"


class UserError(ValueError):
    """A mistake in a config, a file or a request. The message is one sentence: the field, the value, what is allowed.

    The command line prints the message alone and exits with 2; every other exception is a bug and keeps its traceback.

    Args:
        parts: The sentence, in pieces where it names an `Option`, which Python and the command line spell differently.
    """

    def __init__(self, *parts: str | Option):
        super().__init__(*parts)

    def __str__(self) -> str:
        return "".join(map(str, self.args))

    @property
    def on_command_line(self) -> str:
        """The sentence with its options as they are written on the command line."""
        return "".join(part.on_command_line if isinstance(part, Option) else str(part) for part in self.args)
