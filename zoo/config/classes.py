"""The classes whose constructors define the keys of a config. Importing them imports Lightning."""

from typing import Any

import lightning as L

from zoo.config.own import OF_MODELS, of_data
from zoo.lm.model import LanguageModel
from zoo.train.callbacks.run_callback import RunCallback, run_callbacks
from zoo.train.distillation import Teacher
from zoo.train.optim import Optimisation

COMPONENTS = (*OF_MODELS, *of_data())  # imported, so that a config can name them without their modules
CALLBACKS: dict[str, type[RunCallback]] = {cls.key: cls for cls in run_callbacks() if cls.key is not None}
CLASSES: dict[str, Any] = {
    "model": LanguageModel,
    "optim": Optimisation,
    "teacher": Teacher,
    "trainer": L.Trainer,
    **CALLBACKS,
}
