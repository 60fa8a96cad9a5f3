"""Token mixers: one layer at one site. A mixer is one file of this package, and all of them are imported here."""

from typing import TYPE_CHECKING

from .package_conflict import warn_of_hidden  # isort: skip  # first: raises unless `kernels` is this project's
from kernels import UserError

from .base import LinearMixer, LinearState, Site, Streams, TokenMixer, positions
from .context_parallel import ContextParallel, takes_context_parallel
from .contract import ContractError, check_mixer
from .decay import (
    BoundedChannelDecay,
    ChannelDecay,
    ConstantDecay,
    Discretisation,
    Mamba2Discretisation,
    alibi_slopes,
)
from .expanded import Expanded, MixerFactory
from .expansion import DPFP, LFM, Expansion, HeadWise, LowRank
from .features import LRPE, FeatureMap, Features, HeadProduct, Rotary
from .fla_layer import FLALayer
from .growth import Growth, growths
from .hgrn2 import LowerBounds
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
from .registry import did_you_mean, entry, get, import_mixers, names, register, similar
from .replay import Chunk
from .rotary import LinearRotary, Llama3Rotary, YarnRotary
from .state import Cache, History, Position, Slots, SlottedCache, remembered
from .tnl import LayerwiseAlibi, LayerwiseLinear
from .tpe import TPE
from .wrapped import Wrapped, wrap

if TYPE_CHECKING:  # for editors and type checkers; `python docs/tables.py` writes these lines
    from .attention import SoftmaxAttention as SoftmaxAttention
    from .bidirectional import Bidirectional as Bidirectional
    from .comba import Comba as Comba
    from .cosformer2 import CosFormer2 as CosFormer2
    from .deltanet import DeltaNet as DeltaNet
    from .forgetting_attention import ForgettingAttention as ForgettingAttention
    from .gated_deltanet import GatedDeltaNet as GatedDeltaNet
    from .gated_deltanet2 import GatedDeltaNet2 as GatedDeltaNet2
    from .gated_deltaproduct import GatedDeltaProduct as GatedDeltaProduct
    from .gated_slot_attention import GatedSlotAttention as GatedSlotAttention
    from .gla import GLA as GLA
    from .hgrn1 import HGRN1 as HGRN1
    from .hgrn2 import HGRN2 as HGRN2
    from .kda import KDA as KDA
    from .latent_attention import MultiheadLatentAttention as MultiheadLatentAttention
    from .linear_attention import LinearAttention as LinearAttention
    from .mamba1 import Mamba1 as Mamba1
    from .mamba2 import Mamba2 as Mamba2
    from .mamba3 import Mamba3 as Mamba3
    from .mlstm import MLSTM as MLSTM
    from .retnet import RetNet as RetNet
    from .rwkv7 import RWKV7 as RWKV7
    from .sliding_window import SlidingWindowAttention as SlidingWindowAttention
    from .tnl import TNL as TNL

warn_of_hidden()
_mixers = import_mixers(__name__, __path__)
globals().update(_mixers)

__all__ = [
    "DPFP",
    "LFM",
    "LRPE",
    "TPE",
    "BoundedChannelDecay",
    "Cache",
    "ChannelDecay",
    "Chunk",
    "ConstantDecay",
    "ContextParallel",
    "ContractError",
    "Discretisation",
    "Expanded",
    "Expansion",
    "FeatureMap",
    "FLALayer",
    "Features",
    "GateOnly",
    "GatedRMSNorm",
    "Growth",
    "HeadProduct",
    "HeadWise",
    "History",
    "KeepsFp32",
    "LayerNorm",
    "LayerwiseAlibi",
    "LayerwiseLinear",
    "LinearMixer",
    "LinearRotary",
    "LinearState",
    "Llama3Rotary",
    "LowRank",
    "LowerBounds",
    "Mamba2Discretisation",
    "MixerFactory",
    "Norm",
    "NormOnly",
    "Output",
    "OutputProjection",
    "Position",
    "Preconditioner",
    "Projection",
    "RMSNorm",
    "Rotary",
    "SigmoidGatedRMSNorm",
    "SimpleRMSNorm",
    "Site",
    "Slots",
    "SlottedCache",
    "Streams",
    "TokenMixer",
    "UserError",
    "Wrapped",
    "YarnRotary",
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
    *_mixers,
]
