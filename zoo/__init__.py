"""Language models with pluggable token mixers: built from configs, trained with Lightning."""

from kernels import UserError
from zoo import scaling as scaling
from zoo.benchmarks import bench
from zoo.config import build
from zoo.doctor import doctor
from zoo.evaluation import evaluate
from zoo.lm import LanguageModel, join_states, load_state, save_state, take_states
from zoo.loading.convert import convert
from zoo.loading.export import export
from zoo.loading.load import load, load_tokenizer
from zoo.report import report
from zoo.runs.fit import Result, fit, predict, test, validate
from zoo.runs.generate import generate
from zoo.statex import statex
from zoo.sweeps import compare, sweep

__version__ = "0.1.0"

__all__ = [
    "LanguageModel",
    "Result",
    "UserError",
    "bench",
    "build",
    "compare",
    "convert",
    "doctor",
    "evaluate",
    "export",
    "fit",
    "generate",
    "join_states",
    "load",
    "load_state",
    "load_tokenizer",
    "predict",
    "report",
    "save_state",
    "statex",
    "sweep",
    "take_states",
    "test",
    "validate",
]
