"""Token mixers: one layer at one site. A mixer is one file; adding one touches that file and the import below."""

from kernels import UserError

from .attention import SlidingWindowAttention, SoftmaxAttention
from .base import LinearMixer, LinearState, Site, Streams, TokenMixer, positions
from .contract import ContractError, check_mixer
from .decay import Discretisation
from .expansion import Expanded, Expansion, HeadWise
from .features import FeatureMap, Features, Rotary
from .gated_deltanet import GatedDeltaNet
from .mamba2 import Mamba2
from .norm import GatedRMSNorm, RMSNorm
from .projection import Projection, split_heads
from .registry import did_you_mean, entry, get, names, register

__all__ = [
    "ContractError",
    "Discretisation",
    "Expanded",
    "Expansion",
    "FeatureMap",
    "Features",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "HeadWise",
    "LinearMixer",
    "LinearState",
    "Mamba2",
    "Projection",
    "RMSNorm",
    "Rotary",
    "Site",
    "SlidingWindowAttention",
    "SoftmaxAttention",
    "Streams",
    "TokenMixer",
    "UserError",
    "check_mixer",
    "did_you_mean",
    "entry",
    "get",
    "names",
    "positions",
    "register",
    "split_heads",
]
