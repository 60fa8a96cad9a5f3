"""The same weights, read by Hugging Face's code through lm-eval's own adaptor, give the same numbers."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.zoo.evaluation.lm_eval.conftest import TEXTS
from tests.zoo.evaluation.lm_eval.test_model import instances
from tests.zoo.saved.public.public_folder import byte_level
from zoo.evaluation.loaded import load_subject

pytestmark = [pytest.mark.parity, pytest.mark.slow]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 260, "eos_token_id": 256, "bos_token_id": 256}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "Mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 32},
}
LONG = "".join(TEXTS) * 4


@pytest.fixture(params=CONFIGS)
def both(request: pytest.FixtureRequest, tmp_path: Path, oracle: Callable[[str], ModuleType]) -> tuple[Any, Any]:
    """lm-eval's adaptor of a small model of transformers, with sharp logits, and ours of the folder that it saves."""
    transformers = oracle("transformers")
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **CONFIGS[request.param])
    torch.manual_seed(0)
    model = getattr(transformers, f"{request.param}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(6)
    model.save_pretrained(tmp_path / "theirs")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<done>")
    fast.save_pretrained(tmp_path / "theirs")
    # the model itself, not its folder: flash-linear-attention, once imported, reads a folder of Mamba2 with its kernels
    theirs = oracle("lm_eval.models.huggingface").HFLM(pretrained=model.eval(), tokenizer=fast, device="cpu")
    ours = oracle("zoo.evaluation.lm_eval.model").SubjectLM(load_subject(tmp_path / "theirs", "ours", bf16=False))
    return theirs, ours


def test_log_likelihoods(both: tuple[Any, Any]) -> None:
    pairs = [("Open a jar", " Turn"), (LONG, " and then some"), ("", "Turn it"), ("Open a ", "jar")]
    expected, actual = (lm.loglikelihood(instances("loglikelihood", *pairs)) for lm in both)
    for theirs, ours in zip(expected, actual, strict=True):
        assert ours == (pytest.approx(theirs[0], abs=1e-4), theirs[1])
    expected, actual = (lm.loglikelihood_rolling(instances("loglikelihood_rolling", (LONG,), ("a",))) for lm in both)
    assert actual == pytest.approx(expected, abs=1e-3, rel=1e-6)


@pytest.mark.parametrize("max_length", [5, 9, 30])
def test_prompts_that_are_too_long(both: tuple[Any, Any], max_length: int) -> None:
    """They lose as many tokens as in lm-eval's adaptor, and texts are cut into the same windows."""
    theirs, ours = both
    theirs._max_length = ours.max_length = max_length
    pairs = [(LONG, "!"), (LONG[3:], " T"), ("a", "b"), (LONG, " and")]
    expected, actual = (lm.loglikelihood(instances("loglikelihood", *pairs)) for lm in both)
    for theirs_score, ours_score in zip(expected, actual, strict=True):
        assert ours_score == (pytest.approx(theirs_score[0], abs=1e-4), theirs_score[1])
    tokens = ours.tok_encode(LONG)
    lengths = [max_length - 1, max_length, max_length + 1, 3 * max_length + 1]
    texts = [(ours.text.decode(tokens[:length]),) for length in lengths]
    assert [len(ours.tok_encode(text)) for (text,) in texts] == lengths
    expected, actual = (lm.loglikelihood_rolling(instances("loglikelihood_rolling", *texts)) for lm in both)
    assert actual == pytest.approx(expected, abs=1e-3, rel=1e-6)


def test_greedy_answers(both: tuple[Any, Any]) -> None:
    arguments = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    prompts = [(text, dict(arguments)) for text in (*TEXTS, LONG)]
    expected, actual = (lm.generate_until(instances("generate_until", *prompts)) for lm in both)
    assert actual == expected
    assert any(actual)
