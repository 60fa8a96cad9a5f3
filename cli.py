"""The command line: verbs and what they call.

fit, validate, test and predict are LightningCLI's; the others need no trainer.
"""

import dataclasses
import errno
import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# these speak to library authors, not to the person at the terminal
for words in (
    "isinstance.treespec",
    "LeafSpec",
    "many workers",
    "pynvml",
    "infer the batch indices",
    "callbacks used to create",
    "CLI's args parameter",  # the processes that a strategy starts repeat our command line, so it stays in sys.argv
    "is deprecated. Please use `torch.distributed",  # DeepSpeed's calls
    "sync_dist=True",  # the metrics are of all processes already
):
    warnings.filterwarnings("ignore", message=f".*{words}.*")
warnings.filterwarnings("ignore", category=DeprecationWarning)

import lightning as L  # noqa: E402
import yaml  # noqa: E402
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI  # noqa: E402
from lightning.pytorch.loggers import Logger  # noqa: E402
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # noqa: E402
from rich.console import Console  # noqa: E402

import mixers  # noqa: E402
import zoo  # noqa: E402
from kernels import UserError  # noqa: E402
from zoo import config as configs  # noqa: E402
from zoo import saving  # noqa: E402
from zoo.activations import CheckpointedBlocks  # noqa: E402
from zoo.bench import bench  # noqa: E402
from zoo.bench.tune import tune  # noqa: E402
from zoo.callbacks import PeakMemory, StepSeeds, Throughput, Validations  # noqa: E402
from zoo.catalogue import catalogue, page  # noqa: E402
from zoo.comparison import compare as compare_configs  # noqa: E402
from zoo.compilation import CompiledBlocks  # noqa: E402
from zoo.curves import MetricsFile  # noqa: E402
from zoo.export import export as export_model  # noqa: E402
from zoo.generate import generate as generate_text  # noqa: E402
from zoo.loading import checkpoint_of, saved  # noqa: E402
from zoo.loggers import LoggedConfig, for_run, missing_package  # noqa: E402
from zoo.predictions import Predictions  # noqa: E402
from zoo.processor import use_processor  # noqa: E402
from zoo.progress import Progress, Summary  # noqa: E402
from zoo.results import ResultRow  # noqa: E402
from zoo.run import RunFiles, claimed, find_run, launched, new_run  # noqa: E402
from zoo.signals import end_with_parent  # noqa: E402
from zoo.signature import is_own  # noqa: E402
from zoo.step_times import StepTimes  # noqa: E402
from zoo.sweep import Runner, Sweep, failed, report  # noqa: E402
from zoo.sweep.cluster import run_on_cluster  # noqa: E402
from zoo.training import Pretraining, best_precision  # noqa: E402
from zoo.trust import own_words, vet_run  # noqa: E402

HELP = """\
usage: python cli.py VERB …

Train and compare language models of pluggable token mixers.

  fit        train:     python cli.py fit --config gdn_h2.yaml
             continue:  python cli.py fit --resume runs/NAME
  validate   the loss of a checkpoint on its validation data: --checkpoint runs/NAME
  test       the same, reported as test loss
  predict    the loss of every token, to a file: --checkpoint runs/NAME --output losses.jsonl
  generate   text:      python cli.py generate --checkpoint runs/NAME --prompt "def "
  export     a trained model as a folder with one model.safetensors: --checkpoint runs/NAME --output FOLDER
  compare    several configs on the same data, in one table and one picture:
             python cli.py compare gdn_h2.yaml gla.yaml transformer.yaml --trainer.max_steps=300
  sweep      an ablation: all combinations of the axes in a YAML, in one table, CSV and picture:
             python cli.py sweep --config sweep/heads.yaml [--dry-run]
  bench      how fast it is here: python cli.py bench kernels|training|decode|scaling
  tune       launches of the kernels that suit this GPU, to a file: python cli.py tune [--kernels=delta_rule]
  mixers     a table of the token mixers, or everything about one: python cli.py mixers GatedDeltaNet

Configs are found in configs/ by name. Give several --config to overlay them, and --key=value to override:
  python cli.py fit --config gdn_h2.yaml --config size/400m.yaml --model.stack.second.factor=4
  python cli.py fit --config gdn_h2.yaml --print_config      shows what would run
  python cli.py VERB --help                                  lists every key of a verb
"""

# what is wrong with a disk, and no bug: full, over its quota, read-only, not ours
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)

# numbers that Lightning takes as they are, and divides by later
LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")  # of training
LEAST = {
    "accumulate_grad_batches": 1,
    "num_nodes": 1,
    "max_steps": -1,
    "log_every_n_steps": 0,
    **dict.fromkeys(LIMITS, 0),
}
# keys of a config
CALLBACKS = ("guard", "watchdog", "checkpoints", "samples", "loss_curve", "state_norms", "profile")

COMMAND = [sys.executable, str(Path(__file__).resolve())]  # to start runs in processes of their own

DESCRIPTIONS = {
    "fit": "Train a model. It writes config, checkpoints, metrics, samples, results and a curve to runs/NAME.",
    "validate": "Measure the loss of a checkpoint on its validation data.",
    "test": "Measure the loss of a checkpoint on its test data (the validation split, for text).",
    "predict": "Write the negative log-likelihood of every token, in nats, to a file of JSON lines.",
}


TRUST = "Import, call, read and write what the run's config names, if it is not your own."


class CLI(LightningCLI):
    """fit, validate, test and predict on a model built from `model`, `optim`, `data` and `trainer`.

    Args:
        held: What is to be held until the verb has ended: the run's folder.
        settings: LightningCLI's own.
    """

    def __init__(self, held: ExitStack, **settings: Any) -> None:
        self.held = held
        super().__init__(**settings)

    def init_parser(self, **settings: Any) -> LightningArgumentParser:
        parser = configs.Parser(**settings)
        parser.add_argument("-c", "--config", action=configs.ConfigFile, help="A file, or a name in configs/.")
        return parser

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        configs.add_arguments(parser)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **settings: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **settings)
        if subcommand == "fit":
            parser.add_argument("--run", type=str | None, help="Name of the new run, a folder in runs/.")
            parser.add_argument(
                "--resume", type=str | None, help="The run, or one of its checkpoints, to continue from."
            )
        else:
            parser.add_argument("--checkpoint", type=str | None, help="A run's folder or a .ckpt file.")
        parser.add_argument("--trust", type=bool, default=False, help=TRUST)
        if subcommand == "predict":
            parser.add_argument("--output", type=str, default="losses.jsonl", help="The file to write.")
        return parser

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Checkpoints are named by --resume and --checkpoint, and always loaded without running code in them."""
        return {verb: skip | {"ckpt_path", "weights_only"} for verb, skip in LightningCLI.subcommands().items()}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        with configs.explained(self._subcommand_parsers[args[0]]):  # type: ignore[arg-type]
            super().parse_arguments(parser, args)

    def instantiate_classes(self) -> None:
        assert self.subcommand is not None
        config = self.config[self.subcommand]
        fitting = self.subcommand == "fit"
        self.checkpoint = _checkpoint(config, self.subcommand)
        self.datamodule = configs.instantiate("data", config)
        tokenizer = self.datamodule.get_tokenizer()
        config.model.vocab_size = configs.vocabulary(config, configs.vocabulary_of(self.datamodule))
        self._set_seed()  # again: whether a tokenizer was trained just now must not change the model
        model = configs.from_config(config)
        length = self.datamodule.sequence_length
        if config.get("resume"):
            config.optim.initial_weights = None  # the checkpoint has later ones
        plain = configs.to_dict(config)
        tasks = getattr(self.datamodule, "validation_names", ())
        optim, sharing = configs.instantiate("optim", config), config.context_parallel
        if sharing > 1 and config.compile:
            raise UserError(f"context_parallel: {sharing} processes cannot share sequences of compiled blocks yet")
        self.model = Pretraining(model, optim, tokenizer, plain, length, tasks, sharing)
        folder = _run_folder(config) if fitting else None
        if folder is not None:
            self.held.enter_context(claimed(folder, new=config.resume is None))
        trainer = _trainer_arguments(for_run(config, folder))
        trainer["precision"] = trainer["precision"] or best_precision(str(trainer["accelerator"]))
        trainer["callbacks"] = [*_listed(trainer["callbacks"]), Progress()]
        trainer["enable_model_summary"] = False  # ours knows the mixers
        trainer["logger"] = [logger for logger in _listed(trainer["logger"]) if isinstance(logger, Logger)]
        if fitting:
            self._prepare_run(folder, config, tokenizer, trainer)
        elif self.subcommand == "predict":
            trainer["callbacks"].append(Predictions(config.output))
        try:
            self.trainer = L.Trainer(**trainer)
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:  # Lightning's words for a key
            raise UserError(f"trainer: {' '.join(str(error).split())}") from None
        if self.trainer.strategy.root_device.type == "cpu":
            use_processor()
        saving.install(self.trainer)
        self.config_init = self.config

    def _prepare_run(self, folder: Any, config: Any, tokenizer: Any, trainer: dict[str, Any]) -> None:
        """The callbacks that write to the run's folder."""
        self.result_row = ResultRow()
        trainer["default_root_dir"] = str(folder)
        trainer["logger"].insert(0, MetricsFile(folder))
        trainer["enable_checkpointing"] = True
        trainer["callbacks"] += [
            StepTimes(),  # first, so that what the others do is not taken for a part of the step
            RunFiles(folder, config, tokenizer),
            LoggedConfig(),
            Summary(),
            StepSeeds(),
            Throughput(),
            PeakMemory(),
            *([CompiledBlocks()] if config.compile else []),
            *([CheckpointedBlocks(every)] if (every := config.activation_checkpointing) is not None else []),
            *(configs.instantiate(key, config) for key in CALLBACKS),
            Validations(),  # those that it runs are seen by all before it
            self.result_row,
        ]

    def after_fit(self) -> None:
        """Complete what was killed after its last step."""
        self.result_row.finish(self.trainer, self.model, self.datamodule)

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except SystemExit as error:  # Lightning ends the process after Ctrl-C, with code 1
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        if subcommand == "predict":
            arguments["return_predictions"] = False  # they are in the file
        return {**arguments, "ckpt_path": self.checkpoint}


def _run_folder(config: Any) -> Path:
    """The folder of the run, new or to be continued."""
    if config.resume:
        return find_run(config.resume)[0]
    files = [Path(str(file)) for file in config.config or [] if str(file).endswith((".yaml", ".yml"))]
    return new_run(config.run, files[0].stem if files else "run")


def _trainer_arguments(config: Any) -> dict[str, Any]:
    """The arguments of the Trainer, built."""
    for name, least in LEAST.items():
        if (value := config.trainer.get(name)) is not None and value < least:
            raise UserError(f"trainer.{name}: {value} must be at least {least}")
    if (interval := config.trainer.val_check_interval) == 0:
        raise UserError(
            f"trainer.val_check_interval: {interval} must be above 0; no validation is limit_val_batches: 0"
        )
    try:
        return dict(configs.instantiate("trainer", config))
    except ValueError as error:
        if config.trainer.logger is not None and (missing := missing_package(error)) is not None:
            raise missing from None
        raise


def _checkpoint(config: Any, verb: str) -> str | None:
    """The checkpoint that a verb starts from."""
    if verb == "fit":
        if config.resume and config.run:
            raise UserError("run: --run names a new run and --resume continues one; give one of them")
        return None if config.resume is None else str(find_run(config.resume)[1])
    if config.checkpoint is None:
        raise UserError(f"checkpoint: {verb} needs one, --checkpoint runs/NAME")
    return str(checkpoint_of(config.checkpoint))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _value(arguments: list[str], option: str) -> str | None:
    """The value of an option that must be known before the others can be parsed."""
    for i, argument in enumerate(arguments):
        if argument == option and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(option + "="):
            return argument.partition("=")[2]
    return None


def lightning(verb: str, arguments: list[str]) -> int:
    """Run a verb of the trainer. A run or checkpoint that is named brings its own config, below those given."""
    name = _value(arguments, "--resume") if verb == "fit" else _value(arguments, "--checkpoint")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        if name is not None:
            run, file = find_run(name) if verb == "fit" else (Path("checkpoint"), checkpoint_of(name))
            contents = saved(file)
            kept = contents["config"]
            if (_value(arguments, "--trust") or "").lower() != "true" and not is_own(kept, contents.get("signature")):
                kept = vet_run(kept, file, own_words(arguments))
            if verb != "fit":
                kept["trainer"] = {key: value for key, value in kept["trainer"].items() if key not in LIMITS}
            path = Path(folder) / f"{run.name}.yaml"
            path.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
            arguments = ["--config", str(path), *arguments]
        usage = f"cli.py {verb} --config NAME [--config OVERLAY …] [--key=value …]"
        CLI(
            held,
            model_class=Pretraining,
            datamodule_class=L.LightningDataModule,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={verb: {"usage": usage, "description": DESCRIPTIONS[verb]}},
            args=[verb, *configs.as_overlays(arguments)],
        )
    return 0


def generate(
    checkpoint: str,
    prompt: str = "",
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> None:
    """Continue a prompt, streaming to the terminal.

    Args:
        checkpoint: A run's folder, a .ckpt file, or an exported folder.
        prompt: Where to start; nothing starts a new document.
        max_new_tokens: Where to stop, unless the document ends earlier.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw from so many of the likeliest tokens only.
        top_p: Draw from the fewest likeliest tokens that together have this probability only.
        seed: Makes the draws repeatable.
        device: Where to run: cpu, cuda, mps.
        trust: Whether to import and call what its config names, if it is not your own.
    """
    model, tokenizer = zoo.load(checkpoint, device=device, trust=trust), zoo.load_tokenizer(checkpoint)
    pieces = generate_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def export(checkpoint: str, output: str, trust: bool = False) -> None:
    """Write a trained model to model.safetensors, config.yaml and tokenizer.json.

    Args:
        checkpoint: A run's folder or a .ckpt file; of a sharded one the weights are put together.
        output: The folder to write.
        trust: Whether to import and call what its config names, if it is not your own.
    """
    Console().print(f"{export_model(checkpoint, output, trust)}/model.safetensors", style="dim")


def show_mixers(name: str | None = None, hidden_size: int = 1024, num_heads: int = 8, length: int = 4096) -> None:
    """List the token mixers with their size at a site, or show everything about one.

    Args:
        name: A mixer; without it, all of them.
        hidden_size: Size of the residual stream.
        num_heads: Heads of the model.
        length: Tokens of a sequence, for the FLOPs and for states that grow.
    """
    site = mixers.Site(hidden_size, num_heads)
    Console().print(catalogue(site, length) if name is None else page(name, site, length))


def _split(arguments: list[str], own: tuple[str, ...]) -> tuple[list[str], list[str], list[str]]:
    """The options of a verb itself, its names, and the `--key=value` overrides for the runs that it starts."""
    options, names, overrides = [], [], []
    rest = iter(arguments)
    for argument in rest:
        key = argument.split("=")[0]
        if key in own or key in ("-h", "--help"):
            options.append(argument)
            if "=" not in argument and key in own and key != "--dry-run":
                options += [value for value in [next(rest, None)] if value is not None]
        else:
            (overrides if argument.startswith("-") else names).append(argument)
    if wrong := next((a for a in overrides if "=" not in a), None):
        raise UserError(f"{wrong} has no value; options are written --key=value")
    return options, names, overrides


def compare(arguments: list[str]) -> int:
    """Train several configs on the same data, and print one table: their names, then --folder, --jobs, overrides."""
    parser = configs.Parser(prog="cli.py compare", description=compare.__doc__)
    parser.add_argument("--folder", type=str, default="runs/compare", help="Where the runs go.")
    parser.add_argument("--jobs", type=int | None, help="Runs at a time; one for each GPU, or one, by default.")
    own, names, overrides = _split(arguments, ("--folder", "--jobs"))
    with configs.explained(parser):
        values = parser.parse_args(own)
    Console().print(compare_configs(COMMAND, names, overrides, Path(values.folder), values.jobs))
    return 0


def sweep(arguments: list[str]) -> int:
    """Run all combinations of a sweep's axes, and print one table: --config, then overrides for all of the runs."""
    parser = configs.Parser(prog="cli.py sweep", description=sweep.__doc__)
    parser.add_argument("-c", "--config", action=configs.ConfigFile, help="A sweep, such as sweep/heads.yaml.")
    parser.add_class_arguments(Sweep)
    parser.add_argument("--folder", type=str | None, help="Where the runs go; runs/NAME of the sweep by default.")
    parser.add_argument("--jobs", type=int | None, help="Runs at a time; one for each GPU, or one, by default.")
    parser.add_argument("--dry-run", action="store_true", help="List the runs with their sizes, and stop.")
    parser.add_argument("--cluster", type=str | None, help="Hand the runs to a cluster, through submitit: slurm.")
    parser.add_argument(
        "--cluster_options", type=dict[str, Any], default={}, help="submitit's, such as {slurm_partition: gpu}."
    )
    names = tuple(f"--{option}" for option in parser.options() if option not in ("help", "print_config"))
    own, unknown, overrides = _split(arguments, (*names, "-c"))
    if unknown:
        raise UserError(f"sweep: {unknown[0]!r} is no option; the sweep is named by --config")
    if not any(argument.split("=")[0] in ("-c", "--config", "--base", "-h", "--help") for argument in own):
        raise UserError("sweep: which one? --config sweep/heads.yaml, or a file of your own (tutorial 06)")
    with configs.explained(parser):
        values = parser.parse_args(own)
    given = values.config[-1] if values.config else None
    name = Path(str(given)).stem if given is not None else "sweep"
    folder = Path(values.folder or Path("runs") / name)
    plan = parser.instantiate(values)
    plan = Sweep(**{field.name: plan[field.name] for field in dataclasses.fields(Sweep)})
    runs = plan.runs(tuple(override.removeprefix("--") for override in overrides))
    if values.dry_run:
        Console().print(report.preview(runs, folder))
        return 0
    runner = Runner(COMMAND, folder, values.jobs)
    if values.cluster is None:
        failures = runner.run(runs)
    else:
        failures = run_on_cluster(runner, runs, values.cluster, values.cluster_options)
    Console().print(report.write(plan, report.outcomes(runs, folder), folder))
    if failures:
        raise failed(failures, len(runs))
    Console().print(f"{folder}/sweep.csv · {folder}/sweep.png", style="dim")
    return 0


def function(verb: Callable[..., None], arguments: list[str], positional: str | None = None) -> int:
    """Run a verb that is a function: its signature is its command line."""
    parser = configs.Parser(prog=f"cli.py {verb.__name__.removeprefix('show_')}", description=verb.__doc__)
    if positional and arguments and not arguments[0].startswith("-"):
        arguments = [f"--{positional}={arguments[0]}", *arguments[1:]]
    parser.add_function_arguments(verb, as_positional=False)
    with configs.explained(parser):
        values = parser.parse_args(arguments)
    verb(**vars(values))
    return 0


def run(arguments: list[str]) -> int:
    """Dispatch a command line; returns the exit code."""
    verb = arguments[0] if arguments else "--help"
    arguments = ["--trust=true" if argument == "--trust" else argument for argument in arguments]
    if verb in ("-h", "--help", "help"):
        sys.stdout.write(HELP)
        return 0
    if verb in LightningCLI.subcommands():
        return lightning(verb, arguments[1:])
    if verb == "generate":
        return function(generate, arguments[1:])
    if verb == "export":
        return function(export, arguments[1:])
    if verb == "compare":
        return compare(arguments[1:])
    if verb == "sweep":
        return sweep(arguments[1:])
    if verb == "bench":
        return bench(arguments[1:])
    if verb == "tune":
        return function(tune, arguments[1:])
    if verb == "mixers":
        return function(show_mixers, arguments[1:], positional="name")
    known = [*LightningCLI.subcommands(), "generate", "export", "compare", "sweep", "bench", "tune", "mixers"]
    raise UserError(f"{verb!r} is no verb{mixers.did_you_mean(verb, known)} (verbs: {', '.join(known)})")


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2; a bug keeps its traceback."""
    mixers.names()  # plug-ins that are installed, before those are found that lie in this folder
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # mixers of one's own, by dotted path; last, or its files would hide Python's own
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    end_with_parent(signal.SIGTERM if int(os.environ.get("LOCAL_RANK", "0")) == 0 else signal.SIGKILL)
    try:
        code = run(launched(sys.argv[1:]))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        code = 2
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        sys.stderr.write(f"error: {error.strerror}{'' if error.filename is None else f': {error.filename}'}\n")
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
