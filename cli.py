"""The command line: each verb is a function of `zoo`, whose parameters are its options."""

import errno
import logging
import os
import signal
import sys
import warnings

# warnings meant for library authors, not for users
for pattern in (
    "isinstance.treespec",
    "LeafSpec",
    "many workers",
    "pynvml",
    "infer the batch indices",
    "callbacks used to create",
    "is deprecated. Please use `torch.distributed",  # called by DeepSpeed
    "sync_dist=True",  # our metrics cover all processes already
):
    warnings.filterwarnings("ignore", message=f".*{pattern}.*")
warnings.filterwarnings("ignore", category=DeprecationWarning)

from rich.console import Console  # noqa: E402

try:
    import mixers
except ImportError as error:  # another package named `kernels` is in the way
    sys.exit(f"error: {error}")
import zoo  # noqa: E402
from kernels import UserError  # noqa: E402
from zoo import config as configs  # noqa: E402
from zoo.benchmarks import HELP as BENCH_HELP  # noqa: E402
from zoo.benchmarks import KINDS  # noqa: E402
from zoo.benchmarks.tune import tune  # noqa: E402
from zoo.config.command_line import Keys, arguments_of  # noqa: E402
from zoo.lm.catalogue import catalogue, page  # noqa: E402
from zoo.runs.folder import launched  # noqa: E402
from zoo.scaling import HELP as SCALING_HELP  # noqa: E402
from zoo.scaling import part  # noqa: E402
from zoo.sweeps import Sweep  # noqa: E402
from zoo.sweeps.ablation import FIELDS  # noqa: E402
from zoo.train.signals import end_with_parent  # noqa: E402

HELP = """\
usage: python cli.py VERB …

Train and compare language models of pluggable token mixers.

  fit        train:     python cli.py fit --config gdn_h2.yaml
             continue:  python cli.py fit --resume runs/NAME
  validate   the loss of a checkpoint on its validation data: --checkpoint runs/NAME
  test       the same, reported as test loss
  predict    the loss of every token, to a file: --checkpoint runs/NAME --output losses.jsonl
  generate   text:      python cli.py generate --checkpoint runs/NAME --prompt "def "
  evaluate   what models remember: python cli.py evaluate --checkpoint runs/NAME --tasks=s_niah_1,passkey
             all tasks: --tasks=list; several models side by side: repeat --checkpoint
  export     a trained model as a folder with one model.safetensors: --checkpoint runs/NAME --output FOLDER
  statex     a trained model with a larger state in some layers, to train on:
             python cli.py statex --checkpoint runs/NAME --layers=4 --init=reinit|inherit|preserve --output FOLDER
  convert    a public checkpoint into such a folder: --checkpoint some-hf-folder --output FOLDER
             and back: --checkpoint runs/NAME --to=fla --output FOLDER (or huggingface)
  compare    several configs on the same data, in one table and one picture:
             python cli.py compare gdn_h2.yaml gla.yaml transformer.yaml --trainer.max_steps=300
  sweep      an ablation: all combinations of the axes in a YAML, in one table, CSV and picture:
             python cli.py sweep --config sweep/heads.yaml [--dry-run]
  bench      speed on this machine: python cli.py bench kernels|training|decode|scaling
  scaling    scaling laws: python cli.py scaling plan|fit
  tune       the best launch configurations for this GPU, to a file: python cli.py tune [--kernels=delta_rule]
  mixers     a table of the token mixers, or a page about one: python cli.py mixers GatedDeltaNet

Configs are found in configs/ by name. Give several --config to overlay them, and --key=value to override:
  python cli.py fit --config gdn_h2.yaml --config size/400m.yaml --model.stack.second.factor=4
  python cli.py fit --config gdn_h2.yaml --print_config      shows what would run
  python cli.py VERB --help                                  lists every key of a verb
"""

# errors of a disk, which are not bugs: full, over quota, read-only, no permission
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
OF_RUNS = Keys(configs.KEYS, configs.add_arguments)
OF_BENCHES = Keys(configs.KEYS, lambda parser: None)  # without help: some benchmarks have options of the same names
OF_SWEEPS = Keys((*FIELDS, *configs.KEYS), lambda parser: parser.add_class_arguments(Sweep))
VERBS = ["fit", "validate", "test", "predict", "generate", "evaluate", "export", "convert"]
VERBS += ["statex", "compare", "sweep", "bench", "scaling", "tune", "mixers"]


def show_mixers(name: str | None = None, hidden_size: int = 1024, num_heads: int = 8, length: int = 4096) -> None:
    """List the token mixers with their sizes, or describe one of them.

    Args:
        name: The mixer to describe; by default all are listed.
        hidden_size: Size of the residual stream.
        num_heads: Number of heads.
        length: Tokens in a sequence, for FLOPs and growing states.
    """
    site = mixers.Site(hidden_size, num_heads)
    Console().print(catalogue(site, length) if name is None else page(name, site, length))


def write(text: str) -> None:
    """Write text to the terminal immediately."""
    sys.stdout.write(text)
    sys.stdout.flush()


def run(arguments: list[str]) -> int:
    """Run a command line, and return the exit code.

    Raises:
        UserError: The verb, an option or a value is wrong.
    """
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if verb in ("-h", "--help", "help"):
        write(HELP)
    elif verb in ("fit", "validate", "test", "predict"):
        function = getattr(zoo, verb)
        items, options = arguments_of(function, rest, verb, OF_RUNS)
        function(*items, **options)
    elif verb == "compare":
        items, options = arguments_of(zoo.compare, rest, verb, OF_RUNS, positional="configs")
        zoo.compare(*items, **options)
    elif verb == "sweep":
        items, options = arguments_of(zoo.sweep, rest, verb, OF_SWEEPS)
        zoo.sweep(*items, **options)
    elif verb == "evaluate":
        zoo.evaluate(**arguments_of(zoo.evaluate, rest, verb)[1])
    elif verb == "generate":
        zoo.generate(**arguments_of(zoo.generate, rest, verb)[1], stream=write)
        write("\n")
    elif verb == "export":
        folder = zoo.export(**arguments_of(zoo.export, rest, verb)[1])
        Console().print(f"{folder}/model.safetensors", style="dim")
    elif verb == "statex":
        grown = zoo.statex(**arguments_of(zoo.statex, rest, verb)[1])
        Console().print(grown.report())
        Console().print(f"{grown.folder}/model.safetensors", style="dim")
    elif verb == "convert":
        folder = zoo.convert(**arguments_of(zoo.convert, rest, verb)[1])
        Console().print(str(folder), style="dim")
    elif verb == "bench":
        return bench(rest)
    elif verb == "scaling":
        scaling(rest)
    elif verb == "tune":
        tune(**arguments_of(tune, rest, verb)[1])
    elif verb == "mixers":
        show_mixers(**arguments_of(show_mixers, rest, verb, positional="name")[1])
    else:
        raise UserError(f"{verb!r} is not a verb{mixers.did_you_mean(verb, VERBS)} (verbs: {', '.join(VERBS)})")
    return 0


def bench(arguments: list[str]) -> int:
    """Run the benchmark named by the first argument; returns 1 if a result was wrong."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("-h", "--help"):
        write(BENCH_HELP)
        return 0
    if name not in KINDS:
        zoo.bench(name)  # raises an error that lists the benchmarks
    keys = None if name == "kernels" else OF_BENCHES
    items, options = arguments_of(KINDS[name], rest, f"bench {name}", keys)
    return int(zoo.bench(name, *items, **options).failed)


def scaling(arguments: list[str]) -> None:
    """Run the part of `scaling` named by the first argument."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        write(SCALING_HELP)
    else:
        function, positional = part(name)
        function(**arguments_of(function, rest, f"scaling {name}", positional=positional)[1])


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2; a bug keeps its traceback."""
    mixers.names()  # imports installed plug-ins, before the working folder is searched for modules
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for the user's mixers; last, so as not to shadow the standard library
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    end_with_parent(signal.SIGTERM if int(os.environ.get("LOCAL_RANK", "0")) == 0 else signal.SIGKILL)
    try:
        code = run(launched(sys.argv[1:]))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        code = 2
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        sys.stderr.write(f"error: {error.strerror}{'' if error.filename is None else f': {error.filename}'}\n")
        code = 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # so that a second Ctrl-C does not interrupt the exit
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
