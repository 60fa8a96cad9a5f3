"""The command line: each verb is a function of `zoo`, whose parameters are its options."""

import errno
import io
import os
import re
import shlex
import signal
import sys
import time
import warnings
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

# meant for library authors, not for users; `quiet` of zoo/runs/errors.py hides such warnings in training
warnings.filterwarnings("ignore", message=".*pynvml.*")  # when torch is imported
warnings.filterwarnings("ignore", category=DeprecationWarning)

HELP = """\
usage: python cli.py VERB …

Train and compare language models of pluggable token mixers.

  fit        train:     python cli.py fit --config gdn_h2.yaml
             continue:  python cli.py fit --resume runs/NAME
             estimate:  python cli.py fit --config gdn_h2.yaml --config recipe/400m.yaml --dry_run --on=8xH100
  validate   the loss of a checkpoint on its validation data: --checkpoint runs/NAME
  test       the loss on its test data; text has some if data.test_fraction is set
  predict    the loss of every token, to a file: --checkpoint runs/NAME --output losses.jsonl
  generate   text:      python cli.py generate --checkpoint runs/NAME --prompt "def "
  evaluate   what models remember: python cli.py evaluate --checkpoint runs/NAME --tasks=s_niah_1,passkey
             all tasks: --tasks=list; several models side by side: repeat --checkpoint
  inspect    what the states hold of a text: --checkpoint runs/NAME --prompt "def f(x):" --output FOLDER
  export     a trained model as a folder with one model.safetensors: --checkpoint runs/NAME --output FOLDER
  statex     a trained model with a larger state in some layers, to train on:
             python cli.py statex --checkpoint runs/NAME --layers=4 --init=reinit|inherit|preserve --output FOLDER
  linearise  a trained model with a matrix state in place of attention in some layers, trained in --stages:
             python cli.py linearise --checkpoint runs/NAME --mixer=GatedDeltaNet --keep=every:4 --output FOLDER
  convert    a public checkpoint into such a folder: --checkpoint some-hf-folder --output FOLDER
             and back: --checkpoint runs/NAME --to=fla --output FOLDER (or huggingface)
             for llama.cpp: --checkpoint runs/NAME --to=gguf --output FILE.gguf
  compare    several configs on the same data, in one table and one picture:
             python cli.py compare gdn_h2.yaml gla.yaml transformer.yaml [--config OVERLAY …] --trainer.max_steps=300
  sweep      an ablation: all combinations of the axes in a YAML, in one table, CSV and picture:
             python cli.py sweep --config sweep/heads.yaml [--dry-run]
  bench      speed on this machine: python cli.py bench kernels|training|decode
  scaling    scaling laws: python cli.py scaling plan|fit
  doctor     whether this machine computes what it should: python cli.py doctor [--output doctor.json]
  mixers     a table of the token mixers, or a page about one: python cli.py mixers GatedDeltaNet

Configs are found in configs/ by name. Give several --config to overlay them, and --key=value to override:
  python cli.py fit --config gdn_h2.yaml --config size/400m.yaml --model.stack.second.factor=4
  python cli.py fit --config gdn_h2.yaml --print_config      shows what would run
  python cli.py VERB --help                                  lists every key of a verb
  python cli.py --version                                    of this project, torch and triton
"""

# errors of a disk, which are not bugs: full, over quota, read-only, no permission
MEMORY_ERRORS = re.compile(r"tried to allocate [0-9]+ bytes|Tried to allocate [0-9.]+ [KMG]iB")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# environment variables that launchers such as torchrun set to numbers
LAUNCHER_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK")
SAID_BY_ANOTHER = 10.0  # seconds
VERBS = ["fit", "validate", "test", "predict", "generate", "evaluate", "inspect", "export", "convert"]
VERBS += ["statex", "linearise", "compare", "sweep", "bench", "scaling", "doctor", "mixers"]
SYNONYMS = {"train": "fit", "eval": "evaluate", "sample": "generate", "benchmark": "bench", "ablate": "sweep"}


class Output(io.FileIO):
    """Standard output or error. After its reader has left (`| head`), text is dropped, and the command continues."""

    def write(self, data: Any) -> int:
        """Write bytes, and return how many."""
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            with suppress(OSError):  # standard error may have had the same reader
                os.write(2, b"warning: nothing reads the output any more; the command continues without it\n")
            return len(data)


def outlive_reader(stream: Any) -> Any:
    """Return a text stream to the file of one, which outlives its reader; other streams and terminals are unchanged."""
    if stream is None or stream not in (sys.__stdout__, sys.__stderr__) or stream.isatty():
        return stream
    file = io.BufferedWriter(Output(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=stream.line_buffering)


def write(text: str) -> None:
    """Write text to the terminal immediately; whoever read it may have left (`| head`), which ends the process."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its exit
        sys.exit(128 + signal.SIGPIPE)


def run(arguments: list[str]) -> int:
    """Run a command line, and return the exit code.

    Raises:
        UserError: The verb, an option or a value is wrong.
    """
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help", "help"):
        if not rest:
            write(HELP)
            return 0
        verb, rest = rest[0], ["--help", *rest[1:]]
    if "--version" in (verb, *rest[:1]):
        write(_versions())
        return 0
    import mixers
    from kernels import UserError

    if verb not in VERBS:
        hint = f"; did you mean {SYNONYMS[verb]!r}?" if verb in SYNONYMS else mixers.did_you_mean(verb, VERBS)
        raise UserError(f"{verb!r} is not a verb{hint} (verbs: {', '.join(VERBS)})")
    from rich.console import Console

    # what only one verb needs is imported where it is used: most of it imports Lightning, which takes seconds
    import zoo
    from zoo.config import KEYS, add_run_keys, check_model_keys
    from zoo.config.command_line import Keys, arguments_of, printing

    of_runs = Keys(KEYS, add_run_keys)
    if verb in ("fit", "validate", "test", "predict"):
        # without Lightning: help, and most mistakes
        items, options = arguments_of(getattr(zoo, verb), printing(rest)[0], verb, of_runs)
        if not {"resume", "checkpoint"} & {key for key, value in options.items() if value is not None}:
            check_model_keys(items)
        from zoo.runs.command_line import ZooCLI

        ZooCLI([verb, *rest])
    elif verb == "compare":
        items, options = arguments_of(zoo.compare, rest, verb, of_runs, positional="configs")
        zoo.compare(*items, **options)
    elif verb == "sweep":
        from zoo.experiments import Sweep
        from zoo.experiments.commands import FIELDS

        of_sweeps = Keys((*FIELDS, *KEYS), lambda parser: parser.add_class_arguments(Sweep))
        items, options = arguments_of(zoo.sweep, rest, verb, of_sweeps)
        zoo.sweep(*items, **options)
    elif verb in ("evaluate", "inspect"):
        function = getattr(zoo, verb)
        function(**arguments_of(function, rest, verb)[1])
    elif verb == "generate":
        from zoo.display import screen_text

        on_screen = sys.stdout.isatty()  # where the text of a model must not be obeyed
        show = (lambda text: write(screen_text(text))) if on_screen else write
        written = zoo.generate(**arguments_of(zoo.generate, rest, verb)[1], stream=show)
        write("\n" if isinstance(written, str | list) else f"{written.report()}\n")
    elif verb in ("export", "convert"):
        function = getattr(zoo, verb)
        options = arguments_of(function, rest, verb)[1]
        written = function(**options)
        says = "nothing was written" if options.get("dry_run") else _saved(written)
        Console().print(says, style="dim", soft_wrap=True)
    elif verb in ("statex", "linearise"):
        function = getattr(zoo, verb)
        items, options = arguments_of(function, rest, verb, of_runs if verb == "linearise" else None)
        grown = function(**options, **({"configs": items} if items else {}))
        Console().print(grown.report())
        folder = shlex.quote(str(grown.folder))
        if (grown.folder / "checkpoints").is_dir():  # of the last stage
            models = (options["checkpoint"], f"{options['output']}/student", grown.folder)
            checkpoints = " ".join(f"--checkpoint {shlex.quote(str(model))}" for model in models)
            step = f"next: python cli.py evaluate {checkpoints} --tasks=perplexity,s_niah_1,decoding"
            Console().print(f"{grown.folder}\n{step}", style="dim", soft_wrap=True)
            return 0
        further = f"python cli.py fit --config {folder}/config.yaml --optim.initial_weights={folder}"
        if verb == "linearise":
            teacher = shlex.quote(str(options["checkpoint"]))
            further += f" --config train/distil_layers.yaml --teacher.checkpoint={teacher}"
        if (grown.folder / "tokenizer.json").is_file():
            further += f" --data.tokenizer={folder}/tokenizer.json"
        Console().print(f"{grown.folder}\nnext: {further}", style="dim", soft_wrap=True)
    elif verb == "bench":
        from zoo.performance.command import run_bench

        return run_bench(rest)
    elif verb == "scaling":
        from zoo.scaling.command_line import run_scaling

        run_scaling(rest)
    elif verb == "doctor":
        return int(bool(zoo.doctor(**arguments_of(zoo.doctor, rest, verb)[1]).failures))
    elif verb == "mixers":
        from zoo.lm.mixers_table import show_mixers

        show_mixers(**arguments_of(show_mixers, rest, verb, positional="name")[1])
    return 0


def _versions() -> str:
    """The versions of this project and of the packages that its numbers depend on most, without importing them."""
    version = re.search(r'^__version__ = "(.*)"', (Path(__file__).parent / "zoo/__init__.py").read_text(), re.MULTILINE)
    lines = [f"token-mixer-zoo {version[1] if version else 'unknown'} ({Path(__file__).parent})"]
    here = Path.cwd()
    if here != Path(__file__).resolve().parent and (here / "cli.py").is_file() and (here / "zoo/__init__.py").is_file():
        lines.append(f"warning: the working folder, {here}, is another checkout, whose code is not used")
    for package in ("torch", "triton"):
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:  # triton exists on Linux only
            lines.append(f"{package} not installed")
    return "\n".join(lines) + "\n"


def _saved(folder: Path) -> str:
    """Where a model lies now, and a command that uses it; a layout of others has a model card that says how."""
    if folder.is_file():
        return f'{folder}\nnext, in llama.cpp: llama-cli -m {shlex.quote(str(folder))} -p "def "'
    if not (folder / "config.yaml").is_file():
        return f"{folder}\nnext: fill in {folder}/README.md, which says how to load it"
    shown = shlex.quote(str(folder))
    if not (folder / "tokenizer.json").is_file():
        return f"{folder}\nnext: python cli.py evaluate --checkpoint {shown} --tasks=decoding"
    return f'{folder}\nnext: python cli.py generate --checkpoint {shown} --prompt "def "'


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2; a bug keeps its traceback."""
    try:
        sys.exit(started())
    except KeyboardInterrupt:  # perhaps of an import
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # so that a second Ctrl-C does not interrupt the exit
        sys.exit(130)


def started() -> int:
    """Run the command line of this process, and return the exit code."""
    # these need no imports, which take seconds
    if sys.argv[1:2] in ([], ["-h"], ["--help"], ["help"], ["--version"]):
        return run(sys.argv[1:])
    for name in LAUNCHER_VARIABLES:
        if not re.fullmatch(r"\s*-?[0-9]+\s*", value := os.environ.get(name, "0")):
            sys.stderr.write(
                f"error: {name}: this environment variable is {value!r} instead of a number; unset it, since only "
                "launchers such as torchrun set it\n"
            )
            return 2
    if sys.argv[1] != "generate":  # whose output is all that it makes
        sys.stdout, sys.stderr = outlive_reader(sys.stdout), outlive_reader(sys.stderr)
    try:
        import mixers  # noqa: F401
    except ModuleNotFoundError as error:
        missing = printable(str(error.name))
        sys.exit(f"error: {missing} is not installed for {sys.executable}; activate the environment of this project")
    except ImportError as error:  # another package named `kernels` is in the way, or a file in mixers/ is wrong
        sys.exit(f"error: {printable(str(error))}")
    from kernels import UserError
    from zoo.runs.folder import launched
    from zoo.train.signals import end_with_parent

    rank = int(os.environ.get("LOCAL_RANK", "0"))
    end_with_parent(signal.SIGTERM if rank == 0 else signal.SIGKILL)
    try:
        return run(launched(sys.argv[1:]))
    except UserError as error:
        message = error.on_command_line
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        message = f"{error.strerror}{'' if error.filename is None else f': {error.filename}'}"
    except RuntimeError as error:
        if (memory := MEMORY_ERRORS.search(str(error))) is None:
            raise
        message = f"not enough memory: PyTorch {memory[0]}; choose a smaller model, batch or sequence"
    if rank > 0:
        time.sleep(SAID_BY_ANOTHER)  # the first process makes most mistakes, too, says so, and ends the others
    sys.stderr.write(f"error: {printable(message)}\n")
    return 2


def printable(text: str) -> str:
    """A message on one line: names of foreign files may hold line breaks and codes that terminals obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


if __name__ == "__main__":
    main()
