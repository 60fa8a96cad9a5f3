"""`--print_config=skip_default` prints what differs from the defaults, and means the same."""

from pathlib import Path

import pytest
import yaml

from tests.commands import Command

UNTYPED = """
from mixers import GLA

class UntypedGLA(GLA):
    def __init__(self, site, size=1, *, flag=False):
        super().__init__(site)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--config=gdn_h2.yaml", "--config=data/mixture.yaml"],
        ["--config=gla.yaml", "--model.stack.mixer.mixer=untyped.UntypedGLA", "--model.stack.mixer.mixer.flag=true"],
        ["--config=transformer.yaml", "--trainer.callbacks=DeviceStatsMonitor", "--model.norm_eps=1e-5"],
    ],
)
def test_it_is_read_as_the_whole_config(command: Command, desk: Path, arguments: list[str]):
    Path("untyped.py").write_text(UNTYPED)
    whole = command("fit", *arguments, "--print_config")
    short = command("fit", *arguments, "--print_config=skip_default").ok()
    Path("short.yaml").write_text(short.out)
    assert command("fit", "--config=short.yaml", "--print_config").out == whole.out
    assert len(short.out) < len(whole.out) / 3
    assert "seed_everything" not in yaml.safe_load(short.out)


def test_another_value_is_refused(command: Command):
    done = command("fit", "--config=gla.yaml", "--print_config=comments").refused()
    assert done.err == "error: print_config: 'comments' must be skip_default, or left out\n"
