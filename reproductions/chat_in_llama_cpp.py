"""Compare a model finetuned on tutorial 13's conversations with its GGUF files in llama.cpp, on one thread of a CPU.

    python reproductions/chat_in_llama_cpp.py runs/hybrid_chat runs/published/chat-f32.gguf runs/published/chat.gguf

Needs llama-cpp-python. Writes `reproductions/measured/llama_cpp_cpu.csv`: for the run and each file its bytes, tokens
per CPU second while it decodes the 200 most likely tokens, the number of first tokens that equal those of the run, and
correct replies to 99 questions. Files that llama.cpp's own quantiser makes from the f32 file are measured as well.
"""

import csv
import ctypes
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import torch

import zoo
from zoo.data.text.chat import Chat

OUTPUT = Path(__file__).parent / "measured" / "llama_cpp_cpu.csv"
NUMBER_OF_TOKENS, START = 200, "def main("
QUANTISED = {"Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K, "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}
Decode = Callable[[list[int]], Iterator[int]]  # prompt → the most likely tokens after it, without an end


def decoded_here(model: zoo.LanguageModel) -> Decode:
    @torch.inference_mode()
    def decode(tokens: list[int]) -> Iterator[int]:
        state = model.init_state(1)
        while True:
            logits, state = model(torch.tensor([tokens]), state)
            tokens = [int(logits[0, -1].argmax())]
            yield tokens[0]

    return decode


def decoded_there(file: Path) -> Decode:
    model = llama_cpp.Llama(str(file), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    return lambda tokens: model.generate(tokens, temp=0, repeat_penalty=1.0)


def measured(decode: Decode, tokenizer: zoo.data.Tokenizer) -> tuple[list[int], float, int]:
    """Return tokens after `START`, tokens per CPU second, and the number of correct replies."""
    start = tokenizer.encode(START)
    next(decode(start))  # warm
    began = time.process_time()
    tokens = list(itertools.islice(decode(start), NUMBER_OF_TOKENS))
    speed = NUMBER_OF_TOKENS / (time.process_time() - began)
    correct = 0
    for number in range(99):
        prompt = Chat(tokenizer).prompt([{"role": "user", "content": f"What comes after {number}?"}])
        reply = itertools.takewhile(lambda token: token != tokenizer.eos_id, itertools.islice(decode(prompt), 20))
        correct += tokenizer.decode(list(reply)).strip() == f"{number + 1}."
    return tokens, speed, correct


def main(run: str, full: str, small: str) -> None:
    torch.set_num_threads(1)
    model, tokenizer = zoo.load(run).eval(), zoo.load_tokenizer(run)
    files = {"f32": Path(full), "q8_0": Path(small)}
    for name, kind in QUANTISED.items():
        files[name] = Path(full).with_name(f"{Path(run).name}-{name}.gguf")
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = kind
        assert not llama_cpp.llama_model_quantize(full.encode(), str(files[name]).encode(), ctypes.byref(options))
    expected, speed, correct = measured(decoded_here(model), tokenizer)
    rows = [{"model": "the run", "tokens_per_cpu_second": f"{speed:.0f}", "correct": correct}]
    for name, file in files.items():
        tokens, speed, correct = measured(decoded_there(file), tokenizer)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, expected, strict=True))))
        rows.append({"model": name, "bytes": file.stat().st_size, "tokens_per_cpu_second": f"{speed:.0f}"})
        rows[-1] |= {"equal_tokens": same, "correct": correct, "llama_cpp_python": llama_cpp.__version__}
    with OUTPUT.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[1]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
