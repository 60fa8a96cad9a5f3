"""Input layers for data other than tokens."""

from torch import Tensor, nn

from kernels import UserError
from mixers.arguments import check_sizes
from mixers.projection import Linear


class Inputs(nn.Module):
    """The lowest layer: a batch's inputs [B,T,…] → x [B,T,hidden]. Subclass it for another kind of data."""

    def flops(self, length: int) -> int:
        """Forward FLOPs of `length` positions; by default every weight matrix is applied at every position once."""
        return 2 * length * sum(p.numel() for p in self.parameters() if p.dim() > 1)


class Patches(Inputs):
    """A linear map with bias of the pixels of each patch: [B,T,patch_size²·channels] → [B,T,hidden].

    Args:
        hidden_size: Size of the residual stream.
        patch_size: Height and width of a patch in pixels, as `data.patch_size` says.
        channels: Values of a pixel: 1 for grey, 3 for colours.

    Raises:
        UserError: A size is below 1, or the data has other patches.
    """

    def __init__(self, hidden_size: int, patch_size: int = 4, channels: int = 3):
        super().__init__()
        check_sizes({"hidden_size": hidden_size, "patch_size": patch_size, "channels": channels})
        self.patch_size, self.channels = patch_size, channels
        self.proj = Linear(patch_size**2 * channels, hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        size = self.proj.in_features
        if patches.dim() != 3 or patches.shape[-1] != size or not patches.is_floating_point():
            raise UserError(
                f"model.inputs: patches of {self.patch_size} × {self.patch_size} pixels with {self.channels} channels "
                f"have {size} values, but the data has {_described(patches)}"
            )
        return self.proj(patches)


def _described(x: Tensor) -> str:
    return f"{x.shape[-1]} at each position" if x.dim() == 3 else f"{x.dtype} of shape {tuple(x.shape)}"
