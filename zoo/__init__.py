"""Language models of pluggable token mixers: built from configs, trained by Lightning."""

from kernels import UserError

from .config import build
from .loading import load, load_tokenizer
from .model import LanguageModel
from .states import join_states, load_state, save_state, take_states

__version__ = "0.1.0"

__all__ = [
    "LanguageModel",
    "UserError",
    "build",
    "join_states",
    "load",
    "load_state",
    "load_tokenizer",
    "save_state",
    "take_states",
]
