"""Tensors in, tensors out: the recurrences, attention, and the small ops around them.

This package knows nothing of modules, layers or YAML. Every op has a plain fp32 loop (``reference``) and a chunkwise
PyTorch form (``torch``); some also have Triton kernels (``triton``). :func:`backend` chooses between them, and
:func:`implementations` tells which ran.
"""

from . import openmp as openmp  # isort: skip  # before torch is imported
from .bonus_readout import bonus_readout
from .core.backend import BACKENDS, backend, implementations, same_backend
from .core.deterministic import deterministic, is_deterministic
from .core.documents import documents
from .core.read_only import read_only
from .core.recompute import recomputing
from .core.recurrence import at_least_fp32
from .delta_gates import GateInputs, delta_gates
from .delta_rule import delta_rule
from .discretise import discretise
from .erase_gates import erase_gates
from .errors import Option, UserError
from .features import (
    ACTIVATIONS,
    NORMS,
    FeatureStream,
    features,
    features_and_gates,
    features_of_columns,
    features_together,
)
from .flops import attention_flops, recurrence_flops
from .forget_gate import forget_gate, tied_gates
from .forget_gate.low_rank import low_rank_forget_gate
from .gated_linear import gated_linear
from .gated_linear.mlp import gated_mlp
from .head_linear import head_linear
from .linear import linear
from .linear.columns import split_columns
from .linear_cross_entropy import linear_cross_entropy, linear_token_losses
from .linear_kl import linear_kl
from .linear_recurrence import linear_recurrence
from .norm import GatedNorm, QKNorm, add_rms_norm, gated_rms_norm, rms_norm
from .precondition import precondition
from .recurrence_token import (
    CappedGates,
    ChannelStrength,
    Feedback,
    Strength,
    TiedGates,
    TokenOps,
    TokenResult,
    recurrence_token,
)
from .rotary import Turn, rotary
from .selective_scan import selective_scan
from .short_conv import short_conv
from .sigmoid_mix import sigmoid_mix
from .token_shift import token_shift
from .value_decay_recurrence import value_decay_recurrence
from .window_attention import AttentionOps, KeyCache, window_attention

# `transformers` reads the version of any importable `kernels`, and takes 0.18 to 0.19 for a different package
__version__ = "0.1.0"

__all__ = [
    "ACTIVATIONS",
    "BACKENDS",
    "NORMS",
    "AttentionOps",
    "CappedGates",
    "ChannelStrength",
    "FeatureStream",
    "Feedback",
    "GateInputs",
    "GatedNorm",
    "KeyCache",
    "Option",
    "QKNorm",
    "Strength",
    "TiedGates",
    "TokenOps",
    "TokenResult",
    "Turn",
    "UserError",
    "add_rms_norm",
    "at_least_fp32",
    "attention_flops",
    "backend",
    "bonus_readout",
    "delta_gates",
    "delta_rule",
    "deterministic",
    "discretise",
    "documents",
    "erase_gates",
    "features",
    "features_and_gates",
    "features_of_columns",
    "features_together",
    "forget_gate",
    "gated_linear",
    "gated_mlp",
    "gated_rms_norm",
    "head_linear",
    "implementations",
    "is_deterministic",
    "linear",
    "linear_cross_entropy",
    "linear_kl",
    "linear_recurrence",
    "linear_token_losses",
    "low_rank_forget_gate",
    "precondition",
    "read_only",
    "recomputing",
    "recurrence_flops",
    "recurrence_token",
    "rms_norm",
    "rotary",
    "same_backend",
    "selective_scan",
    "short_conv",
    "sigmoid_mix",
    "split_columns",
    "tied_gates",
    "token_shift",
    "value_decay_recurrence",
    "window_attention",
]
