"""Language models of pluggable token mixers: built from configs, trained by Lightning."""

from kernels import UserError

from .config import build
from .loading import load, load_tokenizer
from .model import LanguageModel

__version__ = "0.1.0"

__all__ = ["LanguageModel", "UserError", "build", "load", "load_tokenizer"]
