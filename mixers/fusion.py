"""Classes with a method that fused kernels compute as well."""

from typing import Any, ClassVar


class Fusable:
    """A part with methods that fused kernels compute as well, together with its neighbours.

    A subclass that overrides such a method is not fused, unless it sets `fused` or `fused_token` itself.

    Attributes:
        fused_method: The method that fused kernels replace.
        fused: Whether they compute what that method does.
        token_methods: The methods that a kernel for a single token replaces.
        fused_token: Whether it computes what those methods do.
    """

    fused_method: ClassVar[str] = "forward"
    fused: ClassVar[bool] = True
    token_methods: ClassVar[tuple[str, ...]] = ()
    fused_token: ClassVar[bool] = True

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if Fusable in cls.__bases__:
            return
        for name, methods in (("fused", (cls.fused_method,)), ("fused_token", cls.token_methods)):
            if name not in vars(cls) and any(method in vars(cls) for method in methods):
                setattr(cls, name, False)
