"""Values of all types that constructors of users have, from text and from YAML, to what the constructor gets."""

import enum
import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, NewType

import pytest

from kernels import UserError
from zoo.config.imports import import_module, import_path
from zoo.config.merge import merged
from zoo.config.resolve import built, resolved
from zoo.config.serialise import to_dict
from zoo.config.signatures import Parameter

Number = NewType("Number", int)


class Kind(enum.Enum):
    one = 1
    two = "zwei"


class Pair(NamedTuple):
    first: int
    second: int = 2


class Part:
    def __init__(self, size: int = 1, scale: float = 1.0):
        self.size, self.scale = size, scale


class Other(Part):
    def __init__(self, scale: float = 2.0, **rest: Any):
        super().__init__(scale=scale, **rest)


def part_of(size: int) -> Part:
    return Part(size)


PART, OTHER, FUNCTION = (f"{__name__}.{name}" for name in ("Part", "Other", "part_of"))
VALUES: list[tuple[Any, str, Any]] = [
    (int, "1e3", 1000),
    (int, "1_000", 1000),
    (float, "3", 3.0),
    (float, "1e-3", 0.001),
    (float, ".inf", math.inf),
    (int | float, "1", 1),
    (int | float, "1.0", 1.0),
    (int | float, "100.0", 100),
    (float | int | None, "1e2", 100),
    (bool, "yes", True),
    (bool | int, "1", 1),
    (str, "1e3", "1e3"),
    (str, "007", "007"),
    (str | None, "null", None),
    (str | list[str], "[a, b]", ["a", "b"]),
    (list[int] | str | int, "0,1", "0,1"),
    (list[int] | str | int, "[0, 1]", [0, 1]),
    (Literal[16, "16-mixed"], "16", 16),
    (Literal["auto", "warn"] | bool, "warn", "warn"),
    (tuple[float, float], "[0, 1]", (0.0, 1.0)),
    (tuple[int, ...], "[1, 2, 3]", (1, 2, 3)),
    (set[int], "[1, 1]", {1}),
    (Sequence[float], "[1]", [1.0]),
    (dict[str, list[int]], "{a: [1]}", {"a": [1]}),
    (dict[int, str], "{1: a}", {1: "a"}),
    (Kind, "two", Kind.two),
    (Path, "x/y", Path("x/y")),
    (str | Path, "x/y", "x/y"),
    (timedelta, "1 day, 0:30:00", timedelta(days=1, minutes=30)),
    (Pair, "{first: 1}", Pair(1)),
    (Number, "3", 3),
    (Any, "{x: [1]}", {"x": [1]}),
    (None, "some", "some"),
    (type, PART, Part),
    (Callable[[float], float], "math.sqrt", math.sqrt),
]


@pytest.mark.parametrize(("hint", "text", "expected"), VALUES, ids=str)
def test_a_value_on_the_command_line(hint: Any, text: str, expected: Any) -> None:
    config = resolved(merged([f"compile={text}"]), {"compile": Parameter(hint, None)})
    value = built(config.compile, hint)
    assert (value, type(value)) == (expected, type(expected))
    written = to_dict(config)  # and read back
    again = built(resolved(merged([written]), {"compile": Parameter(hint, None)}).compile, hint)
    assert (again, type(again)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("hint", "text"),
    [(int, "1.0"), (int, "1.5"), (float, "x"), (bool, "1"), (int, "true"), (tuple[int, int], "[1]"), (Kind, "zwei")],
    ids=str,
)
def test_a_value_that_does_not_fit(hint: Any, text: str) -> None:
    with pytest.raises(UserError, match=r"^data\.key: .* is not "):
        resolved(merged([f"data.key={text}"]), {"data": Parameter(dict[str, hint], None)})


def attributes(items: list[Any], hint: Any, default: Any = None) -> tuple[int, float]:
    part = built(resolved(merged(items), {"data": Parameter(hint, default)}).data, hint)
    part = part if isinstance(part, Part) else part(5)
    return part.size, part.scale


def test_components() -> None:
    """By instance, and by a function that is called with the arguments that are passed by position."""
    assert import_path(Part) == PART
    assert attributes([f"data={PART}", "data.scale=3"], Part) == (1, 3.0)
    assert attributes([f"data={OTHER}", "data.size=4"], Part) == (4, 2.0)  # passed on by **rest
    factory = Callable[[int], Part]
    assert attributes([{"data": {"class_path": PART, "init_args": {"scale": 3}}}], factory) == (5, 3.0)
    assert attributes([f"data={FUNCTION}"], factory) == (5, 1.0)
    assert attributes([], factory, Part) == (5, 1.0)
    assert attributes([], factory, functools.partial(Part, scale=7.0)) == (5, 7.0)
    assert attributes(["data.scale=3"], factory, Part) == (5, 3.0)
    with pytest.raises(UserError, match=r"^data\.size: unknown key \(allowed: scale\)"):
        attributes([f"data={PART}", "data.size=3"], factory)


def test_another_class_takes_over_what_was_set_and_fits() -> None:
    before = [f"data={PART}", "data.size=4"]
    assert attributes([*before, "data.scale=1.0", f"data={OTHER}"], Part) == (4, 2.0)  # 1.0 is the default of Part
    assert attributes([*before, "data.scale=5", {"data": {"class_path": OTHER}}], Part) == (4, 5.0)
    assert attributes([*before, f"data={OTHER}", "data.scale=5", "data.size=6"], Part) == (6, 5.0)


def test_a_folder_without_init_may_be_installed_and_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that was installed in place, and has runs of its own, hides no module in `runs` of another folder."""
    for place, module in (("checkout", "theirs"), ("here", "mine")):
        folder = tmp_path / place / "shared_runs"
        folder.mkdir(parents=True)
        (folder / f"{module}.py").write_text(f"PLACE = {place!r}\n")
    monkeypatch.syspath_prepend(tmp_path / "checkout")
    monkeypatch.chdir(tmp_path / "here")
    assert import_module("shared_runs.mine").PLACE == "here"
    assert import_module("shared_runs.theirs").PLACE == "checkout"
