"""Benchmarks of ops (`kernels`), training steps (`training`), generation (`decode`) and several devices (`scaling`)."""

from zoo.benchmarks.run import KINDS, bench

HELP = """\
usage: python cli.py bench kernels|training|decode|scaling …

  kernels    forward and backward times of the ops:
             python cli.py bench kernels --ops=delta_rule,window_attention [--peers]
  training   tokens per second in training, and where the time of a step goes:
             python cli.py bench training --config gated_deltanet.yaml --config size/400m.yaml --length=4096
  decode     time of the next token, at a batch size and a position:
             python cli.py bench decode --config gated_deltanet.yaml --batch_sizes=[1,64] --positions=[1024,65536]
  scaling    training on 1, 2, 4 … devices with DDP, ZeRO and others: speed, memory, and whether the losses are equal:
             python cli.py bench scaling --config gated_deltanet.yaml --config size/400m.yaml --devices=[1,2,4]

python cli.py bench KIND --help lists the options of each.
"""

__all__ = ["HELP", "KINDS", "bench"]
