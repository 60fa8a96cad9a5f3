"""The time of a token, and the size of the state, over the length."""

import torch

from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Cell, Row, Task
from zoo.performance.steps import OurSteps
from zoo.performance.timing import medians

DECODED_AFTER = (1024, 16_384, 65_536)  # tokens
SECONDS = 1.0  # at least, of repetitions


class Decoding(Task):
    """Milliseconds per token of one sequence that is decoded after some tokens, and the size of its state then.

    The state is random, as in `bench decode`, so that no prompt has to be read.
    """

    name = "decoding"
    measures = "time to decode a token of one sequence after a number of tokens, and the size of its state"

    def cells(self, subject: LoadedModel) -> list[Cell]:
        """One for each length."""
        return [{"length": length} for length in self.options.lengths or DECODED_AFTER]

    def run(self, subject: LoadedModel, cell: Cell) -> list[Row]:
        """Time steps after one length."""
        with torch.no_grad(), torch.autocast(subject.device.type, torch.bfloat16, enabled=subject.bf16):
            steps = OurSteps(subject.model, 1, cell["length"], subject.graphs)
            ms = medians({"step": steps}, subject.device, SECONDS)["step"]
        values = {"ms_per_token": ms, "state_mib": steps.state_bytes / 2**20}
        return [{**cell, "metric": metric, "value": value} for metric, value in values.items()]
