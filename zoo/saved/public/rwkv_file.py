"""The `.pth` file that RWKV's author publishes a model in, under the names of flash-linear-attention."""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from kernels import UserError
from zoo.checkpoints.format import read_weights
from zoo.checkpoints.tensor_files import TensorsInMemory
from zoo.saved.public.folder import PublicFolder

_HEAD = 64  # channels; the eps of the norm of a head is 64e-5 whatever its size
_WHOLE = {
    "emb.weight": "model.embeddings.weight",
    "head.weight": "lm_head.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
}
# parts of a name inside a block: theirs → flash-linear-attention's
_IN_BLOCK: Mapping[str, str] = {
    r"^ln0\.": "pre_norm.",
    r"^ln1\.": "attn_norm.",
    r"^ln2\.": "ffn_norm.",
    r"^att\.receptance\.": "attn.r_proj.",
    r"^att\.key\.": "attn.k_proj.",
    r"^att\.value\.": "attn.v_proj.",
    r"^att\.output\.": "attn.o_proj.",
    r"^att\.ln_x\.": "attn.g_norm.",
    r"^att\.([wavg])0$": r"attn.\1_lora.lora.2.bias",
    r"^att\.([wavg])1$": r"attn.\1_lora.lora.0.weight",
    r"^att\.([wavg])2$": r"attn.\1_lora.lora.2.weight",
    r"^att\.": "attn.",
}
_TRANSPOSED, _FLAT = re.compile(r"_lora\.lora\.\d\.weight$"), re.compile(r"(lora\.2\.bias|\.k_[ka]|ffn\.x_k)$")


class RwkvFile(PublicFolder):
    """A `.pth` file, read as a folder of flash-linear-attention's RWKV-7 is. Only tensors are unpickled.

    A UserError if it holds anything else, or lacks tensors that the sizes of the model are read from.
    """

    @cached_property
    def _stored(self) -> dict[str, Tensor]:
        stored = read_weights(self.path)
        if other := next((name for name, tensor in stored.items() if not tensor.is_floating_point()), None):
            raise UserError(f"checkpoint: {self.path} is refused: {other!r:.80} has the dtype {stored[other].dtype}.")
        return stored

    def config(self, name: str = "") -> dict[str, Any]:
        """Return the contents of config.json for the sizes of the tensors."""
        vocabulary, hidden = self._shape("emb.weight")
        heads, head = self._shape("blocks.0.att.r_k")
        if head != _HEAD:
            raise UserError(f"checkpoint: {self.path} has heads of {head} channels; those of RWKV-7 have {_HEAD}.")
        numbers = [int(match[1]) for name in self._stored if (match := re.match(r"blocks\.(\d{1,4})\.", name))]
        return {
            "model_type": "rwkv7",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "num_hidden_layers": 1 + max(numbers),
            "head_dim": head,
            "num_heads": heads,
            "intermediate_size": self._shape("blocks.0.ffn.key.weight")[0],
            "norm_first": "blocks.0.ln0.weight" in self._stored,
            "decay_low_rank_dim": self._shape("blocks.0.att.w1")[1],
            "a_low_rank_dim": self._shape("blocks.0.att.a1")[1],
            "gate_low_rank_dim": self._shape("blocks.0.att.g1")[1],
            **({"v_low_rank_dim": self._shape("blocks.1.att.v1")[1]} if max(numbers) else {}),
        }

    def has(self, name: str) -> bool:
        """Return false: nothing lies next to the weights."""
        return False

    @cached_property
    def weights(self) -> TensorsInMemory:
        """The weights."""
        named = {_renamed(name): tensor for name, tensor in self._stored.items()}
        return TensorsInMemory({name: _as_stored_by_fla(name, tensor) for name, tensor in named.items()})

    def _shape(self, name: str) -> tuple[int, int]:
        """The shape of a matrix."""
        tensor = self._stored.get(name)
        if tensor is None or tensor.dim() != 2 or not tensor.numel():
            problem = "lacks" if tensor is None else "has no matrix"
            raise UserError(f"checkpoint: {self.path} is not a model of RWKV-7: it {problem} {name}.")
        return tensor.shape[0], tensor.shape[1]


def _renamed(name: str) -> str:
    """A name of flash-linear-attention's; one that is unknown stays."""
    if (match := re.fullmatch(r"blocks\.(\d+)\.(.+)", name)) is None:
        return _WHOLE.get(name, name)
    inside = match[2]
    for pattern, new in _IN_BLOCK.items():
        inside = re.sub(pattern, new, inside)
    return f"model.layers.{match[1]}.{inside}"


def _as_stored_by_fla(name: str, tensor: Tensor) -> Tensor:
    if _TRANSPOSED.search(name) and tensor.dim() == 2:
        return tensor.T
    return tensor.flatten() if _FLAT.search(name) else tensor
