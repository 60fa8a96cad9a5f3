"""`ZooCLI`: the verbs `fit`, `validate`, `test` and `predict` as a LightningCLI.

Configs are read by `zoo.config`; the parser of Lightning's command line writes the help, and adds to the keys of a run
what a subclass adds: arguments, classes, and links between keys.
"""

import inspect
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from kernels import UserError
from zoo.config import KEYS, add_run_keys, to_dict
from zoo.config.command_line import PRINT_CONFIG, SKIP_DEFAULT, Keys, arguments_of, printing
from zoo.config.jsonargparse_internals import link_targets, take_no_files
from zoo.config.merge import merged
from zoo.config.overlays import load_items
from zoo.config.parser import parse
from zoo.config.serialise import without_defaults
from zoo.files.safe_yaml import dump_yaml, parse_yaml
from zoo.runs import fit as functions
from zoo.runs import training
from zoo.runs.errors import quiet
from zoo.train.callbacks.predictions import Predictions
from zoo.train.lightning_internals import parser_of


class ZooCLI(LightningCLI):
    """The command line of one verb: it parses its arguments, builds the run and runs it.

    A subclass may override what LightningCLI's documentation names: `add_arguments_to_parser` for arguments, classes
    and links, `before_instantiate_classes`, `after_instantiate_classes`, `before_fit`, `after_fit` and their like.

    Args:
        arguments: The command line: a verb, and its arguments.

    Attributes:
        config: The config by verb.
        result: What the verb returns in Python: `zoo.fit` a Result, `zoo.validate` the metrics, `zoo.predict` a path.

    Raises:
        UserError: An argument is wrong; otherwise as the verb in Python.
    """

    result: Any = None

    def __init__(self, arguments: Sequence[str]):
        self._verb, *self._arguments = arguments
        with quiet(), ExitStack() as self._claims:
            super().__init__(
                save_config_callback=None,  # the run's folder holds its config.yaml
                args=self._arguments,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,  # it would parse hyperparameters of checkpoints unvetted
            )

    def subcommands(self) -> dict[str, set[str]]:
        """The verb that is called, and the arguments of the Trainer's method, which the verb does not have."""
        return {self._verb: {*inspect.signature(getattr(L.Trainer, self._verb)).parameters} - {"self"}}

    def init_parser(self, **settings: Any) -> LightningArgumentParser:
        """A parser that raises instead of exiting. `--config` finds configs by name."""
        parser = LightningArgumentParser(**{"exit_on_error": False, **settings})
        parser.add_argument("-c", "--config", help="A file, or a name in configs/; several overlay.")
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add nothing: `seed_everything` is a key of a run."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys of a run."""
        add_run_keys(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Read the configs and overrides, and vet a checkpoint's config before it is laid under them."""
        take_no_files(own := parser_of(self, self._verb))
        names = dict.fromkeys(action.dest.split(".")[0] for action in own._actions)
        added = [name for name in names if name not in (*KEYS, "help", "config")]

        def add(parser: ArgumentParser) -> None:
            add_run_keys(parser)
            self.add_arguments_to_parser(parser)
            take_no_files(parser)

        arguments, printed = printing(self._arguments)
        keys = Keys((*KEYS, *added), add, LightningArgumentParser)
        items, options = arguments_of(getattr(functions, self._verb), arguments, self._verb, keys)
        self.verbose, self.output = options.pop("verbose", True), options.pop("output", None)
        dry, on = options.pop("dry_run", False), options.pop("on", None)
        if self._verb == "fit":
            self.plan = training.plan_fit(items, **options, others=added)
        else:
            self.plan = training.plan_evaluation(self._verb, items, **options, others=added)
        if dry or on is not None:
            training.dry_run(self.plan, dry, on)
            sys.exit(0)
        config = self.plan.config
        early, self._late_targets = link_targets(own)
        self._extra = Namespace()
        if added or early:
            extra = {key: _for_parser(value) for key, value in merged(load_items(items)).items() if key in added}
            try:
                parsed = own.parse_object({**to_dict(config), **extra})
            except ArgumentError as error:
                raise UserError(" ".join(str(error).split())) from None
            self._extra = Namespace({key: parsed[key] for key in added if key in parsed})
            for target in early:
                config[target] = parsed[target]
            config.update(parse(to_dict(config)))  # checks the values that links have set
        if printed is not None:
            run = without_defaults(config) if printed == SKIP_DEFAULT else to_dict(config)
            written = parse_yaml(own.dump(self._extra, skip_validation=True), PRINT_CONFIG) or {}
            sys.stdout.write(dump_yaml({**written, **run}))
            sys.exit(0)
        self.config = Namespace({"subcommand": self._verb, self._verb: config})

    def instantiate_classes(self) -> None:
        """Build the data, then the model, then the module and the trainer; the run's folder is claimed before."""
        self._callbacks: list[Any] = []
        if self._verb == "fit":
            session = training.build_fit(self.plan, self._callbacks, self._claims, self._instantiate_others)
        else:
            self._callbacks += [] if self.output is None else [Predictions(self.output)]
            session = training.build_evaluation(self._verb, self.plan, self._callbacks, self._instantiate_others)
        self._session = session
        self.datamodule, self.model, self.trainer = session.datamodule, session.module, session.trainer
        self.config_init = Namespace({self._verb: Namespace({**vars(self.plan.config), **vars(self._extra)})})

    def _instantiate_others(self, config: Namespace, datamodule: L.LightningDataModule) -> None:
        """Build what a subclass has added, among it callbacks, and set keys that are linked to the built data."""
        parser = parser_of(self, self._verb)
        if vars(self._extra) or self._late_targets:
            self._extra = parser.instantiate_classes(Namespace({**vars(self._extra), "data": datamodule}))
            self._callbacks += [self._extra[key] for key in parser.callback_keys]
            for target in self._late_targets:
                config[target] = self._extra[target]
            config.update(parse(to_dict(config)))

    def fit(self, model: L.LightningModule, datamodule: L.LightningDataModule) -> None:
        """Train the model."""
        self.result = functions.Result(*training.run_fit(self._session))

    def validate(self, model: L.LightningModule, datamodule: L.LightningDataModule) -> None:
        """Measure the validation loss."""
        self.result = training.run_evaluation("validate", self._session, self.verbose)

    def test(self, model: L.LightningModule, datamodule: L.LightningDataModule) -> None:
        """Measure the test loss."""
        self.result = training.run_evaluation("test", self._session, self.verbose)

    def predict(self, model: L.LightningModule, datamodule: L.LightningDataModule) -> None:
        """Write the loss of every token to a file."""
        training.run_prediction(self._session)
        self.result = Path(str(self.output))


def _for_parser(value: Any) -> Any:
    """A part of the result of `merged` as jsonargparse takes it: plain text, and arguments of a class apart."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [_for_parser(part) for part in value]
    if not isinstance(value, dict):
        return value
    parts = {key: _for_parser(part) for key, part in value.items()}
    if "class_path" not in parts:
        return parts
    return {"class_path": parts.pop("class_path"), "init_args": parts}
