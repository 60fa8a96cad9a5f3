"""A conversation with a model: its history, its end, and what Ctrl-C does."""

import builtins
from pathlib import Path

import pytest
import torch

import zoo
from kernels import UserError
from tests.commands import Command
from tests.zoo.data.text.test_chat import CHATML, TURNS, ours
from zoo.data.text.chat import Chat
from zoo.data.text.documents import conversation_of
from zoo.generation.chat import Conversation
from zoo.lm.model import LanguageModel
from zoo.runs.chat import talk

from .test_generate import Scripted

pytest_plugins = "tests.desk"


class Answers(Scripted):
    """Writes the same reply after each prompt, and keeps the prompts."""

    def __init__(self, reply: str, template: str | None = CHATML) -> None:
        self.tokenizer, self.prompts = ours(template), list[list[int]]()
        super().__init__(self.tokenizer.encode(reply, special_tokens=True), self.tokenizer.vocab_size)

    def forward(self, tokens, state=None, *, cu_seqlens=None):
        if tokens.shape[1] > 1:
            self.calls.clear()
            self.prompts.append(tokens[0].tolist())
        return super().forward(tokens, state, cu_seqlens=cu_seqlens)


def conversation(model: Answers, **options: object) -> Conversation:
    return Conversation(model, model.tokenizer, temperature=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (None, "<|endoftext|>")])
def test_each_reply_sees_all_that_was_said(template: str | None, end: str):
    model = Answers(f" Fine.{end}more", template)
    session = conversation(model, system="Be brief.")
    assert "".join(session.reply("How are you?")) == " Fine."  # the end of a turn is the template's
    assert "".join(session.reply("And now?<|im_end|>")) == " Fine."
    assert session.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "And now?<|im_end|>"},
        {"role": "assistant", "content": "Fine."},
    ]
    expected = [Chat(model.tokenizer).prompt(session.messages[:length]) for length in (2, 4)]
    assert model.prompts == expected


def test_a_reply_that_is_ended_stays_as_it_is_then():
    session = conversation(Answers("one two three<|im_end|>"))
    pieces = session.reply("Count.")
    assert [next(pieces) for _ in range(4)] == [*"one "]
    pieces.close()  # type: ignore[attr-defined]
    assert session.messages[-1] == {"role": "assistant", "content": "one"}
    assert "".join(session.reply("Again.")) == "one two three"


def test_ctrl_c_ends_a_reply_and_then_the_chat(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "".join(said) in ("one tw", "one tw\none"):
            raise KeyboardInterrupt

    lines = iter(["", "Count.", "Again.", "Once more."])

    def asked(prompt: str = "") -> str:
        if (line := next(lines, None)) is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(builtins, "input", asked)
    session = conversation(Answers("one two<|im_end|>"))
    assert talk(session, "First.", say) == ["one tw", "one", "one two", "one two"]
    assert [m["content"] for m in session.messages if m["role"] == "user"] == [
        "First.",
        "Count.",
        "Again.",
        "Once more.",
    ]


def test_a_refusal_of_the_template_is_one_sentence():
    template = "{{ raise_exception('no system') if messages[0].role == 'system' }}{{ messages[0].content }}"
    session = conversation(Answers("x", template), system="Be brief.")
    with pytest.raises(UserError, match=r"^the chat template cannot be used for this conversation \(no system\)\.$"):
        next(session.reply("a"))


@pytest.mark.slow
def test_chat_at_the_command_line(command: Command, finished: Path, monkeypatch: pytest.MonkeyPatch):
    run = finished / "runs" / "done"
    lines = iter(["Hello", "And?"])

    def asked(prompt: str = "") -> str:
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", asked)
    done = command("generate", "--checkpoint", str(run), "--chat", "--max_new_tokens=4", "--seed=1", "--system=Short.")
    assert done.code == 0, done.err
    lines = iter(["And?"])
    replies = zoo.generate(run, "Hello", max_new_tokens=4, seed=1, chat=True, system="Short.")
    assert len(replies) == 2
    assert done.out.split() == " ".join(replies).split()
    assert command("generate", "--checkpoint", str(run), "--system=x").err.startswith("error: system: 'x' is the first")
    with pytest.raises(UserError, match=r"^chat: needs the path of a model and one prompt\.$"):
        zoo.generate(run, ["a", "b"], chat=True)


@pytest.mark.slow
def test_special_tokens_of_a_prompt_are_parsed_when_asked(finished: Path):
    model, tokenizer = zoo.load(finished / "runs" / "done"), zoo.load_tokenizer(finished / "runs" / "done")
    assert isinstance(model, LanguageModel)
    seen: list[torch.Tensor] = []
    model.embeddings.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))  # type: ignore[union-attr]
    for special in (False, True):
        seen.clear()
        model.generate("a<eos>b", max_new_tokens=1, special_tokens=special)
        assert (tokenizer.eos_id in seen[0].flatten().tolist()) == special


def test_a_model_is_asked_as_it_was_trained():
    tokenizer = ours()
    encoded = Chat(tokenizer).encode(conversation_of(TURNS, "turns"))
    prompt = Chat(tokenizer).prompt(TURNS[:4])
    assert encoded.ids[: len(prompt)].tolist() == prompt


def test_a_message_that_is_not_text_leaves_the_conversation_unchanged():
    chat = conversation(Answers("yes<eos>"))
    with pytest.raises(UserError, match=r"^prompt: 'a\\udcff' cannot be encoded as UTF-8$"):
        list(chat.reply("a\udcff"))
    assert chat.messages == []
