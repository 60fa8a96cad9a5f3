"""The verb `bench` of the command line."""

import sys

from zoo.benchmarks.run import KINDS, bench
from zoo.config import KEYS
from zoo.config.command_line import Keys, arguments_of

HELP = """\
usage: python cli.py bench kernels|training|decode|scaling|expansion|length …

  kernels    forward and backward times of the ops:
             python cli.py bench kernels --ops=delta_rule,window_attention [--peers]
  training   tokens per second in training, and where the time of a step goes:
             python cli.py bench training --config gated_deltanet.yaml --config size/400m.yaml --length=4096
  decode     time of the next token, at a batch size and a position:
             python cli.py bench decode --config gated_deltanet.yaml --batch_sizes=[1,64] --positions=[1024,65536]
  scaling    training on 1, 2, 4 … devices with DDP, ZeRO and others: speed, memory, and whether the losses are equal:
             python cli.py bench scaling --config gated_deltanet.yaml --config size/400m.yaml --devices=[1,2,4]
  expansion  what a larger state costs in training: E = 1, 2, 4 …, with subheads and with one long head:
             python cli.py bench expansion --mixers=[gated_deltanet,gla] --sizes=[400m]
  length     training speed over the length of sequences, of recurrent models, attention and hybrids:
             python cli.py bench length --mixers=[gated_deltanet,mamba2,transformer,h1] --lengths=[2048,4096,8192,16384]

python cli.py bench KIND --help lists the options of each.
"""


def run_bench(arguments: list[str]) -> int:
    """Run the benchmark named by the first argument; returns 1 if a result was wrong.

    Raises:
        UserError: The name, an option or a value is wrong.
    """
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("-h", "--help"):
        sys.stdout.write(HELP)
        return 0
    if name not in KINDS:
        bench(name)  # raises an error that lists the benchmarks
    # without help: some benchmarks have options of the same names
    keys = None if name == "kernels" else Keys(KEYS, lambda parser: None)
    items, options = arguments_of(KINDS[name], rest, f"bench {name}", keys)
    return int(bench(name, *items, **options).failed)
