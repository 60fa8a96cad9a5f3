"""The mixers of this package and their parts, which any config may name (`zoo/config/own.py`)."""

from .attention import SoftmaxAttention
from .bidirectional import Bidirectional
from .comba import Comba
from .cosformer2 import CosFormer2
from .decay import BoundedChannelDecay, ChannelDecay, ConstantDecay, Discretisation, Mamba2Discretisation
from .deltanet import DeltaNet
from .expanded import Expanded
from .expansion import DPFP, LFM, HeadWise, LowRank, Residual
from .features import LRPE, Rotary
from .forgetting_attention import ForgettingAttention
from .gated_deltanet import GatedDeltaNet
from .gated_deltanet2 import GatedDeltaNet2
from .gated_deltaproduct import GatedDeltaProduct
from .gla import GLA
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
    NormOnly,
    RMSNorm,
    SigmoidGatedRMSNorm,
    SimpleRMSNorm,
    ZeroCentredRMSNorm,
)
from .preconditioner import Preconditioner
from .retnet import RetNet
from .sliding_window import SlidingWindowAttention
from .tnl import TNL, LayerwiseAlibi, LayerwiseLinear, LowRankGated
from .tpe import TPE
from .wrapped import Wrapped

MIXERS = (
    *(Bidirectional, Comba, CosFormer2, DeltaNet, Expanded, GatedDeltaNet, GatedDeltaNet2, GatedDeltaProduct, GLA),
    *(ForgettingAttention, HGRN1, HGRN2, KDA, LinearAttention, Mamba1, Mamba2, Mamba3, MLSTM),
    *(MultiheadLatentAttention, RetNet, SlidingWindowAttention, SoftmaxAttention, TNL, TPE, LowRankGated, Wrapped),
)
PARTS_OF_MIXERS = (
    *(DPFP, HeadWise, LFM, LowRank, Residual),
    *(ConstantDecay, LayerwiseAlibi, LayerwiseLinear, LowerBounds),
    *(BoundedChannelDecay, ChannelDecay, Discretisation, Mamba2Discretisation, Preconditioner, LRPE, Rotary),
    *(LayerNorm, RMSNorm, SimpleRMSNorm, ZeroCentredRMSNorm),
    *(GatedRMSNorm, GateOnly, NormOnly, SigmoidGatedRMSNorm),
)
COMPONENTS: tuple[type, ...] = (*MIXERS, *PARTS_OF_MIXERS)
