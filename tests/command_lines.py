"""Commands that documents print: which there are, and whether they parse, without the hours that they would take."""

import importlib.util
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

import zoo
from reproductions import (
    bench,
    beside,
    cost_over_size,
    decays,
    decode_400m,
    inspection,
    mixers_400m,
    multi_device,
    paper_tables,
    peers_400m,
    performance,
    steep_decays,
    vocabulary_loss,
)
from zoo.config import CONFIGS, KEYS, add_run_keys, find_config
from zoo.config.command_line import PRINTING, Keys, arguments_of
from zoo.config.overlays import load_config
from zoo.evaluation.task import Options
from zoo.evaluation.tasks import tasks_of
from zoo.files.safe_yaml import dump_yaml
from zoo.lm.mixers_table import show_mixers

from .commands import ROOT, Command
from .shipped_configs import parsed

SHELLS = ("bash", "sh", "shell", "console")
FENCED = re.compile(r"^[ ]*```(\w*).*?\n(.*?)^[ ]*```$", re.MULTILINE | re.DOTALL)
PROGRAMS = ("python", "python3", "pytest", "pip")
INLINE = re.compile(r"(?<!`)`([^`]+)`")
ON_GPUS = tuple(["bench", kind] for kind in ("training", "decode"))  # for minutes
OF_CONFIGS = ("fit", "validate", "test", "predict")  # verbs that take the config of a run
# verbs that take no config: their functions, and the option that plain arguments set
FUNCTIONS: dict[str, tuple[Callable[..., Any], str | None]] = {
    "evaluate": (zoo.evaluate, None),
    "generate": (zoo.generate, None),
    "inspect": (zoo.inspect, None),
    "export": (zoo.export, None),
    "statex": (zoo.statex, None),
    "linearise": (zoo.linearise, None),
    "convert": (zoo.convert, None),
    "doctor": (zoo.doctor, None),
    "mixers": (show_mixers, "name"),
    "scaling plan": (zoo.scaling.plan, None),
    "scaling fit": (zoo.scaling.fit, "runs"),
}
WITH_CONFIGS: dict[str, Any] = {  # the function of a script, or those of its kinds
    "reproductions/bench.py": bench.KINDS,
    "reproductions/beside.py": beside.KINDS,
    "reproductions/multi_device.py": multi_device.multi_device,
}
SCRIPTS: dict[str, Callable[..., Any]] = {
    "reproductions/cost_over_size.py": cost_over_size.cost_over_size,
    "reproductions/decode_400m.py": decode_400m.decode_400m,
    "reproductions/inspection.py": inspection.inspection,
    "reproductions/mixers_400m.py": mixers_400m.mixers_400m,
    "reproductions/paper_tables.py": paper_tables.paper_tables,
    "reproductions/peers_400m.py": peers_400m.peers_400m,
    "reproductions/performance.py": performance.performance,
    "reproductions/steep_decays.py": steep_decays.steep_decays,
    "reproductions/vocabulary_loss.py": vocabulary_loss.vocabulary_loss,
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def commands_of(text: str, languages: Collection[str] = SHELLS) -> list[list[str]]:
    """All commands of Python and pytest in a document, each once, as their arguments.

    Args:
        text: Markdown: commands stand in fenced blocks and, between backticks, in the running text and in tables.
        languages: Of the fenced blocks that count.
    """
    lines = [line for language, block in FENCED.findall(text) if language in languages for line in _lines(block)]
    lines += [" ".join(code.split()) for code in INLINE.findall(FENCED.sub("", text))]
    actual = [piece for line in lines for piece in _pieces(line)]
    return [list(piece) for piece in dict.fromkeys(map(tuple, actual))]


def _lines(block: str) -> list[str]:
    """The lines of a block: continued ones are one line, and what the block assigns to variables is filled in."""
    lines = re.sub(r"\\\n\s*", " ", block).splitlines()
    values = dict(actual for line in lines for actual in re.findall(r"^(\w+)=(\S+)", line))
    return [re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1], name[0]), line) for line in lines]


def _pieces(line: str) -> Iterator[list[str]]:
    """The commands in a line, which `&&` and its like divide."""
    lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    try:
        tokens = [*lexer]
    except ValueError:  # no command: a quotation mark that is not closed
        return
    pieces: list[list[str]] = [[]]
    for token in tokens:
        if set(token) <= set("&|;<>"):
            pieces.append([])
        else:
            pieces[-1].append(token)
    for piece in pieces:
        if piece[:1] == ["zoo"]:  # the console command
            piece = ["python", "cli.py", *piece[1:]] if piece[1:] else []
        if piece[:1] and piece[0] in PROGRAMS and piece[1:]:
            yield piece


def check_parses(arguments: list[str], command: Command, finished: Path, folder: Path) -> None:
    """Assert that what follows `python cli.py` is a command; cheap ones are run, and write into `folder`."""
    if arguments[:1] == ["compare"]:  # would train for an hour
        keys = [argument.removeprefix("--") for argument in arguments[1:] if argument.startswith("--")]
        overrides = [key for key in keys if not key.startswith(("jobs=", "folder="))]
        names = [argument for argument in arguments[1:] if not argument.startswith("--")]
        assert names
        # what is set outside `model` means the same for each config, all of which test_configs.py reads
        each = any(override.startswith("model") for override in overrides)
        for number, name in enumerate(names):
            if each or number == 0:
                parsed(name, *overrides)
            else:
                find_config(name)
        return
    prints = any(argument in PRINTING or argument.endswith(".help") for argument in arguments)  # and runs nothing
    if arguments[:1] and arguments[0] in OF_CONFIGS and not prints:
        parse_command(arguments)
        return
    arguments = [*arguments]
    if prints:
        pass
    elif arguments[:1] == ["sweep"]:
        short = [_shortened(argument, folder) for argument in arguments]
        arguments = [*short, *with_tokenizer(arguments, finished), "--dry-run"]
    elif arguments[:2] in ON_GPUS:
        arguments.append("--help")  # the options have to exist, or be keys of the configs
        shown = command(*arguments).out
        keys = [a.removeprefix("--") for a in arguments if a.startswith("--") and a.partition("=")[0] not in shown]
        files = [after for word, after in itertools.pairwise(arguments) if word == "--config"]
        if keys:
            parsed(*files, *keys)
    elif arguments[:1] == ["bench"]:
        arguments += ["--shapes=[[1,1,64,16]]", "--seconds=0.01", f"--folder={folder}"]
    elif arguments[:2] == ["scaling", "fit"]:
        arguments.append("--help")  # of runs that take hours
    command(*arguments).ok()


def parse_command(arguments: list[str]) -> Namespace:
    """Parse what follows `python cli.py` in a command of one of OF_CONFIGS, options and config, and run nothing.

    Raises:
        UserError: An option, a config, a key or a value is wrong.
    """
    verb, *rest = arguments
    items, options = arguments_of(getattr(zoo, verb), rest, verb, Keys(KEYS, add_run_keys))
    continued = options.get("resume") or options.get("checkpoint")
    return parsed(*(["gdn_h2.yaml"] if continued else []), *items)  # in place of the config in the checkpoint


def with_tokenizer(arguments: list[str], finished: Path) -> list[str]:
    """Options for a sweep of configs/ not to train a tokenizer, which takes a minute, but to take that of a run."""
    for name in arguments:
        if name.endswith(".yaml") and (CONFIGS / name).is_file():
            base = load_config(name)["base"]
            sources = [
                json.dumps(part) if isinstance(part, dict) else part
                for part in (base if isinstance(base, list) else [base])
            ]
            settings = parsed(*sources).data.get("init_args", {})
            if settings.get("tokenizer", "") is None:
                return [f"--data.tokenizer={finished}/runs/done/tokenizer.json"]
    return []


def _shortened(argument: str, folder: Path) -> str:
    """For a sweep in configs/, one in `folder` with a single value for each axis and one learning rate.

    All of its runs are built by test_shipped_sweeps.py.
    """
    if not (argument.endswith(".yaml") and (CONFIGS / argument).is_file()):
        return argument
    sweep = load_config(argument)
    first = {
        name: dict([*values.items()][:1]) if isinstance(values, dict) else values[:1]
        for name, values in sweep["axes"].items()
    }
    rates = sweep.get("learning_rates", [])[:1]
    short = sweep | {"axes": first, "controls": {}, "gates": [], "learning_rates": rates}
    (folder / "shortened.yaml").write_text(dump_yaml(short))
    return str(folder / "shortened.yaml")


def takes_no_config(arguments: list[str]) -> bool:
    """Whether `check_options` can check what follows `python cli.py`."""
    return _verb(arguments) in FUNCTIONS


def check_options(arguments: list[str]) -> None:
    """Check the options and tasks of what follows `python cli.py`, and nothing that they name.

    Raises:
        UserError: An option, its value or a task does not exist.
    """
    verb = _verb(arguments)
    function, positional = FUNCTIONS[verb]
    rest = arguments[len(verb.split()) :]
    if "--help" in rest:
        return
    keys = Keys(KEYS, add_run_keys) if verb == "linearise" else None  # of its stages
    _, options = arguments_of(function, rest, verb, keys, positional)
    if verb == "evaluate" and options["tasks"] != "list":
        names = options["tasks"] if isinstance(options["tasks"], list) else options["tasks"].split(",")
        assert tasks_of(names, Options(data=options["data"]))


def _verb(arguments: list[str]) -> str:
    return " ".join(arguments[: 2 if arguments[:1] == ["scaling"] else 1])


def check_tool(arguments: list[str]) -> None:
    """Assert that files, tests, markers, extras and modules exist that a command of pytest, pip or Python names."""
    program, *rest = arguments
    if program == "pytest":
        _check_pytest(rest)
    elif program == "pip":
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert {*extra.split(",")} <= PYPROJECT["project"]["optional-dependencies"].keys(), extra
    elif rest[:1] == ["-m"]:
        assert importlib.util.find_spec(rest[1]) is not None, rest[1]
    elif rest[:1] == ["reproductions/beside.py"] and rest[1] == "kernels":
        arguments_of(beside.kernels, rest[2:], "kernels")
    elif rest[:1] == ["reproductions/decays.py"]:
        arguments_of(decays.VERBS[rest[1]], rest[2:], rest[1])
    elif rest and rest[0] in WITH_CONFIGS:
        kinds = WITH_CONFIGS[rest[0]]
        function, of_function = (kinds[rest[1]], rest[2:]) if isinstance(kinds, dict) else (kinds, rest[1:])
        items, _ = arguments_of(function, of_function, rest[0], Keys(KEYS, lambda parser: None))
        for item in items:
            assert "=" in item or find_config(item)
    elif rest and rest[0] in SCRIPTS:
        _, options = arguments_of(SCRIPTS[rest[0]], rest[1:], rest[0])
        if "tables" in options:
            for tasks, *_ in paper_tables.evaluations(options["tables"]):
                assert tasks_of(tasks, Options())
    elif rest and rest[0].endswith(".py"):
        source = (ROOT / rest[0]).read_text()  # raises if there is no such file
        for option in (argument.partition("=")[0] for argument in rest[1:] if argument.startswith("--")):
            assert f'"{option}"' in source, f"{rest[0]} has no {option}"
        for path in (argument for argument in rest[1:] if not argument.startswith(("--", "runs/"))):  # runs of readers
            assert (ROOT / path).exists(), path


def _check_pytest(rest: list[str]) -> None:
    markers = {line.partition(":")[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    words = iter(rest)
    for word in words:
        if word == "-m":
            assert {*re.findall(r"\w+", next(words))} <= markers | {"and", "or", "not"}
        elif word in ("-n", "-k", "--dist"):
            next(words)
        elif not word.startswith("-"):
            file, _, test = word.partition("::")
            assert (ROOT / file).exists(), file
            assert f"def {test}(" in (ROOT / file).read_text() if test else True, word
