"""A small model that is trained on short needles."""

import json
import random
from pathlib import Path

import pytest

import zoo
from zoo.data.text.needles import NOISE, PASSKEY, draw_needles

# DeltaNet forgets nothing by itself. It recalls nothing until it has learned to copy the key. With four heads and 3,072
# tokens a step, eleven seeds of eleven had learned it by step 700; with two heads or 2,048 tokens some needed longer.
MODEL = {"hidden_size": 64, "num_heads": 4, "num_layers": 2}
OPTIM = {"learning_rate": 0.01, "warmup_steps": 20, "schedule": "wsd"}


def document(number: int) -> str:
    """A pass key in at most two lines of noise, the question and the answer: 37 to 90 tokens."""
    rng = random.Random(number)
    needle = next(draw_needles(rng, "passkey", "training"))
    lines = [NOISE] * rng.randrange(3)
    lines.insert(rng.randint(0, len(lines)), PASSKEY.state(needle))
    return "\n".join(lines) + PASSKEY.ask(needle) + PASSKEY.reply(needle)


@pytest.mark.nightly
def test_it_recalls_short_needles_and_loses_long_ones(desk: Path):
    """Trained on sequences of 96 tokens, in 90 seconds; none of the evaluated pass keys was among them."""
    (desk / "keys.jsonl").write_text("\n".join(json.dumps({"text": document(i)}) for i in range(30_000)))
    data = {"path": "keys.jsonl", "vocab_size": 400, "sequence_length": 96, "batch_size": 32}
    trainer = {"max_steps": 700, "val_check_interval": 700, "limit_val_batches": 4, "accelerator": "cpu"}
    config = {"model": MODEL, "data": data, "optim": OPTIM, "trainer": trainer}
    run = zoo.fit("deltanet.yaml", config, run="keys").folder
    rows = zoo.evaluate(run, "passkey", lengths=[64, 128, 2048, 4096], samples=40, device="cpu")
    recall = {row["length"]: row["value"] for row in rows}
    assert min(recall[64], recall[128]) > 0.8
    assert max(recall[2048], recall[4096]) < 0.3
