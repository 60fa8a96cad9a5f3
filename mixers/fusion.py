"""Classes with a method that fused kernels compute as well."""

from typing import Any, ClassVar


class Fusable:
    """A part with a method that fused kernels compute as well, together with its neighbours.

    A subclass that overrides the method is not fused, unless it sets `fused` itself.

    Attributes:
        fused_method: The method that fused kernels replace.
        fused: Whether they compute what that method does.
    """

    fused_method: ClassVar[str] = "forward"
    fused: ClassVar[bool] = True

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        overridden = cls.fused_method in vars(cls) and Fusable not in cls.__bases__
        if overridden and "fused" not in vars(cls):
            cls.fused = False
