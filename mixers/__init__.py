"""Token mixers: one layer at one site. A mixer is one file; to add one, write that file and the import below."""

from .package_conflict import warn_of_hidden  # isort: skip  # first: raises unless `kernels` is this project's
from kernels import UserError

from .attention import SoftmaxAttention
from .base import LinearMixer, LinearState, Site, Streams, TokenMixer, positions
from .bidirectional import Bidirectional
from .comba import Comba
from .context_parallel import ContextParallel, takes_context_parallel
from .contract import ContractError, check_mixer
from .cosformer2 import CosFormer2
from .decay import (
    BoundedChannelDecay,
    ChannelDecay,
    ConstantDecay,
    Discretisation,
    Mamba2Discretisation,
    alibi_slopes,
)
from .deltanet import DeltaNet
from .expanded import Expanded
from .expansion import DPFP, LFM, Expansion, HeadWise, LowRank
from .features import LRPE, FeatureMap, Features, Rotary
from .forgetting_attention import ForgettingAttention
from .gated_deltanet import GatedDeltaNet
from .gated_deltanet2 import GatedDeltaNet2
from .gated_deltaproduct import GatedDeltaProduct
from .gla import GLA
from .growth import Growth, growths
from .hgrn1 import HGRN1
from .hgrn2 import HGRN2, LowerBounds
from .kda import KDA
from .latent_attention import MultiheadLatentAttention
from .linear_attention import LinearAttention
from .mamba1 import Mamba1
from .mamba2 import Mamba2
from .mamba3 import Mamba3
from .mlstm import MLSTM
from .norm import (
    GatedRMSNorm,
    GateOnly,
    LayerNorm,
    Norm,
    NormOnly,
    Output,
    RMSNorm,
    SigmoidGatedRMSNorm,
    SimpleRMSNorm,
    ZeroCentredRMSNorm,
)
from .per_document import per_document
from .precision import KeepsFp32
from .preconditioner import Preconditioner
from .projection import OutputProjection, Projection, split_heads
from .registry import did_you_mean, entry, get, names, register, similar
from .retnet import RetNet
from .sliding_window import SlidingWindowAttention
from .state import Cache, History, Position, remembered
from .tnl import TNL, LayerwiseAlibi, LayerwiseLinear
from .tpe import TPE
from .wrapped import Wrapped, wrap

warn_of_hidden()

__all__ = [
    "DPFP",
    "GLA",
    "HGRN1",
    "HGRN2",
    "KDA",
    "LFM",
    "LRPE",
    "MLSTM",
    "TNL",
    "TPE",
    "Bidirectional",
    "BoundedChannelDecay",
    "Cache",
    "ChannelDecay",
    "Comba",
    "ConstantDecay",
    "ContextParallel",
    "ContractError",
    "CosFormer2",
    "DeltaNet",
    "Discretisation",
    "Expanded",
    "Expansion",
    "FeatureMap",
    "Features",
    "ForgettingAttention",
    "GateOnly",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedRMSNorm",
    "Growth",
    "HeadWise",
    "History",
    "KeepsFp32",
    "LayerNorm",
    "LayerwiseAlibi",
    "LayerwiseLinear",
    "LinearAttention",
    "LinearMixer",
    "LinearState",
    "LowRank",
    "LowerBounds",
    "Mamba1",
    "Mamba2",
    "Mamba2Discretisation",
    "Mamba3",
    "MultiheadLatentAttention",
    "Norm",
    "NormOnly",
    "Output",
    "OutputProjection",
    "Position",
    "Preconditioner",
    "Projection",
    "RMSNorm",
    "RetNet",
    "Rotary",
    "SigmoidGatedRMSNorm",
    "SimpleRMSNorm",
    "Site",
    "SlidingWindowAttention",
    "SoftmaxAttention",
    "Streams",
    "TokenMixer",
    "UserError",
    "Wrapped",
    "ZeroCentredRMSNorm",
    "alibi_slopes",
    "check_mixer",
    "did_you_mean",
    "entry",
    "get",
    "growths",
    "names",
    "per_document",
    "positions",
    "register",
    "remembered",
    "similar",
    "split_heads",
    "takes_context_parallel",
    "wrap",
]
