"""The keys of run configs, which are the signatures of constructors, and the functions that read configs.

Four keys define a run: `model` is LanguageModel's constructor, `optim` the optimiser and its schedule, `data` a data
module, `trainer` Lightning's Trainer; smaller ones configure the callbacks. Files and overrides merge in order
(`merge.py`), and what they merge to is checked and completed (`resolve.py`).
"""

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jsonargparse import ArgumentParser, Namespace

import mixers
from kernels import UserError
from zoo.config.jsonargparse_internals import take_no_files
from zoo.config.keys import GROUPS, OF_LIGHTNING, SCALARS
from zoo.config.merge import merged
from zoo.config.overlays import NULL, Item, load_items
from zoo.config.resolve import Group, Keys, Resolver, resolved
from zoo.config.signatures import Parameter
from zoo.data.text.corpus import BUILT_IN  # text that comes with Python, which can be cut
from zoo.lm.model import LanguageModel
from zoo.train.distillation import Teacher
from zoo.train.optim import Optimisation

MAX_SEED = (1 << 32) - 1  # NumPy's, and so Lightning's

# defaults of Lightning's Trainer that runs of this project have others for; they are counted in steps
_OF_TRAINER = {"max_epochs": -1, "check_val_every_n_epoch": None, "log_every_n_steps": 10}


@functools.cache
def run_keys(lightning: bool = True) -> Keys:
    """The keys of a run; `lightning` adds those whose classes derive from Lightning's, which takes seconds to import.

    (A config names further classes, which are looked up when it is read.)
    """
    keys: dict[str, Parameter | Group] = {key: Parameter(kind, value) for key, (kind, value, _) in SCALARS.items()}
    keys |= {"model": Group(LanguageModel), "optim": Group(Optimisation), "teacher": Group(Teacher)}
    if lightning:
        import lightning as L

        from zoo.config.classes import CALLBACKS, CLASSES

        keys["data"] = Parameter(L.LightningDataModule, _default_data())
        keys["trainer"] = Group(CLASSES["trainer"], _OF_TRAINER)
        keys |= {key: Group(callback) for key, callback in CALLBACKS.items()}
    return keys


def _default_data() -> Namespace:
    from zoo.data import TextData

    return Namespace(class_path=f"{TextData.__module__}.{TextData.__qualname__}")


def add_run_keys(parser: ArgumentParser) -> None:
    """Add the keys of a run to a parser, for its help and for links between them.

    No value of a key is ever opened as a file: only `--config` names files.
    """
    settings: dict[str, Any] = {"fail_untyped": False, "instantiate": False}
    for key, entry in run_keys().items():
        if isinstance(entry, Group):
            parser.add_class_arguments(entry.cls, key, **settings)
        elif key in SCALARS:
            parser.add_argument(f"--{key}", type=entry.hint, default=entry.default, help=SCALARS[key][2])
        else:
            parser.add_subclass_arguments(entry.hint, key, required=True, **settings)
    take_no_files(parser)
    parser.set_defaults(
        {"data": vars(_default_data()), **{f"trainer.{key}": each for key, each in _OF_TRAINER.items()}}
    )


def read(*configs_and_overrides: Item) -> Namespace:
    """Resolve configs and `key=value` overrides, in order, without building anything.

    Raises:
        UserError: A file is missing, or a key or value is wrong.
    """
    return _read(configs_and_overrides, run_keys())


def read_model(*configs_and_overrides: Item) -> Namespace:
    """As `read`, but without what a model does not depend on: `data`, `trainer` and the callbacks.

    These require Lightning, which takes longer to import than a model takes to be built. What they hold is not checked.
    """
    return _read(configs_and_overrides, run_keys(lightning=False), skipped=OF_LIGHTNING)


def check_model_keys(items: Iterable[str]) -> None:
    """Check that the configs of a run exist, and the keys of its model and optimiser, without importing Lightning.

    Raises:
        UserError: A file is missing, or a key does not exist and it is certain which one is meant.
    """
    keys = run_keys(lightning=False)
    mixers.names()
    resolver = Resolver(keys)
    resolver.all(_merged(load_items(items), keys, OF_LIGHTNING))
    resolver.check_keys(OF_LIGHTNING)


def _read(configs_and_overrides: Iterable[Item], keys: Keys, skipped: Collection[str] = ()) -> Namespace:
    items = load_items(configs_and_overrides)
    check_overrides(item for item in items if isinstance(item, str))
    config = _resolved(items, keys, skipped)
    seed = config.seed_everything
    if not isinstance(seed, bool) and not 0 <= seed <= MAX_SEED:
        raise UserError(f"seed_everything: {seed} must be a number from 0 to {MAX_SEED}, true or false")
    return config


def parse(config: Mapping[str, Any]) -> Namespace:
    """Resolve a config from a checkpoint or other plain containers.

    Raises:
        UserError: A key or value is wrong.
    """
    return _resolved([config], run_keys())


def parse_model(config: Mapping[str, Any]) -> Namespace:
    """As `parse`, for a config without `data`, `trainer` and the callbacks, and without their defaults.

    Raises:
        UserError: A key or value is wrong.
    """
    return _resolved([config], run_keys(lightning=False))


def _resolved(items: Iterable[str | Mapping[str, Any]], keys: Keys, skipped: Collection[str] = ()) -> Namespace:
    mixers.names()  # plug-ins register before a class is looked up
    return resolved(_merged(items, keys, skipped), keys, skipped)


def _merged(items: Iterable[str | Mapping[str, Any]], keys: Keys, skipped: Collection[str] = ()) -> dict[str, Any]:
    data = keys.get("data")
    first = [{"data": vars(data.default)}] if isinstance(data, Parameter) else []
    config = merged([*first, *items], GROUPS)
    return {key: value for key, value in config.items() if key not in skipped}


def known_keys(items: Iterable[str | Mapping[str, Any]], lightning: bool = True) -> set[str]:
    """All keys that the result of `load_items` may have, with those of the classes that it names; see `run_keys`."""
    keys = run_keys(lightning)
    resolver = Resolver(keys)
    resolver.all(_merged(items, keys, () if lightning else OF_LIGHTNING))
    return resolver.names


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
