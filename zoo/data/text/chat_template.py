"""Chat templates: conversations as text, by a Jinja template that may be someone else's.

A template runs in Jinja's sandbox, where it sees plain values only. It can call methods of text, lists and mappings,
the macros in it and four functions, and change nothing outside. It is ended after `MAX_SECONDS`.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import BuiltinMethodType, NoneType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from kernels.errors import UserError

Message = Mapping[str, str]  # role and content

MAX_SECONDS = 10
MAX_CHARACTERS = 1 << 20  # of a template; the largest published ones have 20,000
# For tokenizers without a template: it needs no special token but the end of a document, which ends each reply.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_PLAIN = (str, bytes, int, float, bool, list, tuple, dict, NoneType)


class _Namespace(Namespace):
    """`namespace()` of templates, whose attributes begin with no underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_FUNCTIONS = {
    "range": safe_range,
    "namespace": _Namespace,
    "raise_exception": _raise_exception,
    "strftime_now": lambda form: datetime.now().strftime(form),
}


class _Generation(Extension):
    """Renders what is between `generation` and `endgeneration`, by which some templates mark replies."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which here also calls nothing but the functions above, macros, and methods of plain values."""

    intercepted_binops = frozenset(["*", "**"])

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, Macro | LoopContext) or any(obj is function for function in _FUNCTIONS.values()):
            return True
        owner = getattr(obj, "__self__", None)
        plain = isinstance(obj, BuiltinMethodType) and type(owner) in _PLAIN
        # a loop has the methods cycle and changed
        return (plain or type(owner) is LoopContext) and super().is_safe_callable(obj)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        # both could take all memory in one step, which no limit on time would end
        if operator == "**" or not all(isinstance(each, int | float) for each in (left, right)):
            raise jinja2.exceptions.SecurityError(f"{operator} is refused here")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.globals = dict(_FUNCTIONS)
    environment.filters["tojson"] = _to_json
    return environment


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def read_template(path: str) -> str:
    """The chat template in a file.

    Raises:
        UserError: It cannot be read, or is not one.
    """
    file, name = Path(path).expanduser(), f"data.chat_template: {path}"
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name} cannot be read as text ({getattr(error, 'strerror', None) or error}).") from None
    check_template(source, name)
    return source


def check_template(source: str, name: str) -> None:
    """Check that a template can be compiled; nothing of it is run.

    Raises:
        UserError: It cannot; the message begins with `name`.
    """
    if len(source) > MAX_CHARACTERS:
        raise UserError(f"{name} has more than {MAX_CHARACTERS:,} characters.")
    try:
        _compiled(source)
    except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError, MemoryError) as error:
        raise UserError(f"{name} is not a Jinja template ({_one_line(error)}).") from None


def render(source: str, messages: Sequence[Message], tokens: Mapping[str, str], reply: bool, name: str) -> str:
    """The text of a conversation.

    Args:
        source: The Jinja template.
        messages: The conversation so far.
        tokens: Further variables: bos_token and eos_token.
        reply: Whether the text ends where the assistant's reply begins.
        name: The template's name in messages of errors.

    Raises:
        UserError: The template cannot be compiled, fails, refuses the conversation, or takes more than `MAX_SECONDS`.
    """
    check_template(source, name)
    template, results = _compiled(source), list[str | Exception]()
    variables: dict[str, Any] = {**tokens, "messages": [dict(message) for message in messages], "tools": None}

    def run() -> None:
        try:
            results.append(template.render(**variables, add_generation_prompt=reply))
        except Exception as error:  # a template can raise what operations on plain values raise
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)  # which cannot be ended, but does not keep the process alive
    thread.start()
    thread.join(MAX_SECONDS)
    if not results:
        raise UserError(f"{name} takes more than {MAX_SECONDS} s for {len(messages)} messages.")
    if isinstance(results[0], Exception):
        raise UserError(f"{name} cannot be used for this conversation ({_one_line(results[0])}).")
    return results[0]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
