"""What this project uses of jsonargparse's private functions, with the oldest and the newest version allowed."""

from typing import Any

import pytest
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from zoo.config.jsonargparse_internals import entries, followed_parameters, link_targets, take_no_files


class Base:
    def __init__(self, size: int = 3, *, names: list[str] | None = None):
        self.size, self.names = size, names


class Derived(Base):
    def __init__(self, first: str, **rest: Any):
        super().__init__(**rest)


def test_arguments_that_are_passed_on_are_followed() -> None:
    parameters = {each.name: (each.annotation, each.default) for each in followed_parameters(Derived)}
    assert parameters.pop("first")[0] is str
    assert parameters == {"size": (int, 3), "names": (list[str] | None, None)}


@pytest.mark.parametrize("option", ["--part=FILE", "--base=FILE", "--base.size=FILE"])
def test_no_option_reads_a_file(option: str, tmp_path) -> None:
    file = tmp_path / "auto"
    file.write_text(f"{{class_path: {__name__}.Base, init_args: {{size: 5}}}}" if "part" in option else "{size: 5}")
    parsers = [ArgumentParser(exit_on_error=False) for _ in range(2)]
    for parser in parsers:
        parser.add_class_arguments(Base, "base", sub_configs=True)
        parser.add_subclass_arguments(Base, "part", required=False)
    take_no_files(parsers[1])
    option = option.replace("FILE", str(file))
    if not option.startswith("--base.size"):
        assert "5" in str(parsers[0].parse_args([option]))  # jsonargparse itself does
    with pytest.raises(ArgumentError):
        parsers[1].parse_args([option])
    assert parsers[1].parse_args(["--base.size=4"]).base.size == 4


def test_targets_of_links() -> None:
    parser = ArgumentParser()
    assert link_targets(parser) == ([], [])
    parser.add_class_arguments(Base, "model")
    parser.add_class_arguments(Base, "data")
    parser.add_class_arguments(Base, "other")
    parser.link_arguments("other.size", "model.size")
    parser.link_arguments("data.size", "model.names", apply_on="instantiate")
    parser.link_arguments("data.names", "other.names")
    assert link_targets(parser) == (["model.size"], ["model.names"])


def test_entries_of_a_namespace() -> None:
    assert entries(Namespace({"items": 1, "keys": 2, "size": 3})) == [("items", 1), ("keys", 2), ("size", 3)]
