"""Classes with a method that fused kernels compute as well."""

from typing import Any, ClassVar


class Fusable:
    """A part with methods that fused kernels compute as well, together with its neighbours.

    A subclass that overrides such a method, itself or with a mix-in, is not fused, unless it sets `fused` or
    `fused_token`.

    Attributes:
        fused_method: The method that fused kernels replace.
        fused: Whether they compute what that method does.
        token_methods: The methods, or other attributes, that a kernel for a single token replaces.
        fused_token: Whether it computes what those methods do.
    """

    fused_method: ClassVar[str] = "forward"
    fused: ClassVar[bool] = True
    token_methods: ClassVar[tuple[str, ...]] = ()
    fused_token: ClassVar[bool] = True

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for name, methods in (("fused", (cls.fused_method,)), ("fused_token", cls.token_methods)):
            says = next(base for base in cls.__mro__ if name in vars(base) or Fusable in base.__bases__)
            nearer = cls.__mro__[: cls.__mro__.index(says)]  # the class, and what it mixes in
            if any(method in vars(base) for base in nearer for method in methods):
                setattr(cls, name, False)
