"""`workbench chat DIR`: text from a saved model, as it is written; `--beside` shows the original's answer next to it.

In a terminal it asks for prompts, and a model with a chat template remembers the conversation. Otherwise each line of
the standard input is a prompt of its own, and the answers are printed one after the other.
"""

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

NARROW = 70  # columns of a terminal below which two answers stand one below the other
_LEAVE = ("/quit", "/exit")


def declare(command) -> None:
    """The options of `workbench chat`."""
    from notebooks.batch.verbs.loading import baseline_option, model_argument

    parser = command("chat", chat, "write with a saved model, next to the original with --beside", model_argument())
    parser.add_argument("--beside", action="store_true", help="show the answer of the original model, too")
    baseline_option(parser)
    parser.add_argument("--tokens", metavar="N", type=int, default=128, help="most tokens of an answer (default: 128)")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="0 (default): the likeliest token; above: sampled"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of sampling (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda")
    parser.add_argument(
        "--max-memory",
        metavar="BYTES",
        default="",
        help="for a model that does not fit into memory: the most bytes of its weights in memory at once, such as 6GB; "
        "the others are read from disk for every token",
    )
    parser.add_argument(
        "--continue",
        dest="continues",
        action="store_true",
        help="continue each prompt as a text, although the model has a chat template",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")


def chat(options: argparse.Namespace) -> int:
    """Answer prompts until the input ends."""
    from kernels.support.units import memory_limit
    from notebooks.batch.verbs.loading import baseline_of, check_device, check_model

    if options.tokens < 1:
        raise ValueError(f"`--tokens` (={options.tokens}) must be 1 or more")
    if not 0 <= options.temperature < 100:
        raise ValueError(f"`--temperature` (={options.temperature}) must be 0 or above")
    check_device(options.device)
    if memory_limit(options.max_memory, "--max-memory", options.device) and options.beside:
        raise ValueError("`--max-memory` holds one model, and --beside shows two; leave one out")
    check_model(options.model)
    if options.baseline and not options.beside:
        raise ValueError("`--baseline` names the model that --beside shows; give --beside, too")
    original = baseline_of(options.model, options.baseline, needed=True) if options.beside else ""
    with ExitStack() as held:
        _converse([_Writer.of(name, options, held) for name in filter(None, (options.model, original))], options)
    return 0


def _converse(writers: list["_Writer"], options: argparse.Namespace) -> None:
    remembers = sys.stdin.isatty() and writers[0].has_template
    for prompt in _prompts(writers[0]):
        if options.json:
            print(json.dumps(_as_json(prompt, writers)), flush=True)
        elif len(writers) == 2 and sys.stdout.isatty() and shutil.get_terminal_size().columns >= NARROW:
            _in_columns(prompt, writers)
        else:
            _in_turn(prompt, writers)
        if not remembers:
            for writer in writers:
                writer.turns.clear()


def _rate(rate: float) -> str:
    """Tokens per second; slow ones with a decimal."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


@dataclass
class _Writer:
    """A model that answers, accelerated, or with some weights on disk; turns: the conversation so far."""

    name: str
    model: Any
    tokenizer: Any
    how: dict[str, Any]
    seed: int
    has_template: bool
    device: str
    turns: list[dict[str, str]] = field(default_factory=list)
    said: str = ""  # tokens and speed of the last answer
    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, name: str, options: argparse.Namespace, held: ExitStack) -> "_Writer":
        """held: keeps the window of a model on disk."""
        from transformers.utils.logging import disable_progress_bar

        from compress.inputs.model import load_model
        from compress.walk.window import in_window
        from kernels.step.accelerate import accelerate

        _note(f"{name} is loaded")
        disable_progress_bar()
        weights = "disk" if options.max_memory else "memory"
        try:
            model, tokenizer = load_model(name, dtype="bfloat16", device=options.device, weights=weights)
        except ValueError as error:
            if options.max_memory and "weights='memory'" in str(error):
                said = (
                    str(error)
                    .replace("`weights` (='disk')", "`--max-memory`")
                    .replace("weights='memory'", "without it")
                )
                raise ValueError(said) from error
            raise
        if options.max_memory:
            window = held.enter_context(in_window(model, options.max_memory, parameter="--max-memory"))
            _note(
                f"{window.held_bytes / 1e9:.1f} GB stay in memory, {window.streamed_bytes / 1e9:.1f} are read per token"
            )
        else:
            model = accelerate(model)
        how: dict[str, Any] = {"max_new_tokens": options.tokens, "do_sample": options.temperature > 0}
        how |= {"temperature": options.temperature} if options.temperature else {}
        template = bool(getattr(tokenizer, "chat_template", None)) and not options.continues
        return cls(name, model, tokenizer, how, options.seed, template, options.device)

    def answer(self, prompt: str, show: Callable[[str], None] = lambda _: None) -> str:
        """The answer to a prompt; `show` is given each piece of text as soon as it is known."""
        import torch
        from transformers import TextStreamer

        class Shown(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                show(text)

        self.turns.append({"role": "user", "content": prompt})
        inputs = {name: tensor.to(self.device) for name, tensor in self._inputs().items()}
        torch.manual_seed(self.seed)
        begin = time.perf_counter()
        streamer = Shown(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids = self.model.generate(**inputs, **self.how, streamer=streamer, pad_token_id=self._padding())
        self.seconds = time.perf_counter() - begin
        self.tokens = ids.shape[1] - inputs["input_ids"].shape[1]
        text = self.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        self.turns.append({"role": "assistant", "content": text})
        self.said = f"{self.tokens} tokens, {_rate(self.tokens / self.seconds)} a second with the prompt"
        return text

    def _inputs(self) -> dict[str, Any]:
        """The tokens of the conversation. Its oldest turns are left out while the model has no room for an answer.

        Raises:
            ValueError: there is no room behind the last prompt alone.
        """
        from kernels.support.positions import positions

        while True:
            if self.has_template:
                how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
                inputs = self.tokenizer.apply_chat_template(self.turns, **how)
            else:
                text = self.turns[-1]["content"]
                inputs = self.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            length, most = inputs["input_ids"].shape[1], positions(self.model)
            if length + self.how["max_new_tokens"] <= most:
                return inputs
            if len(self.turns) == 1:
                raise ValueError(
                    f"the prompt has {length} tokens, and {self.name} {most} positions: that leaves no room for "
                    f"`--tokens` (={self.how['max_new_tokens']})"
                )
            del self.turns[:2]

    def _padding(self) -> int | None:
        found = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if found is None else found


def _prompts(writer: _Writer) -> Iterator[str]:
    """The prompts: typed one after the other, or the lines of the standard input that are not empty."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    about = "" if writer.has_template else "It continues the text that you type. "
    _note(f"{about}An empty line, /quit or Ctrl-D ends.")
    while True:
        try:
            prompt = input("> ").strip()
        except EOFError:
            print()
            return
        if not prompt or prompt in _LEAVE:
            return
        yield prompt


def _as_json(prompt: str, writers: list[_Writer]) -> dict[str, Any]:
    """The answers to a prompt with their models, numbers of tokens and seconds."""
    made: dict[str, Any] = {"prompt": prompt}
    for name, writer in zip(("answer", "original"), writers, strict=False):
        text = writer.answer(prompt)
        made[name] = {"model": writer.name, "text": text, "tokens": writer.tokens, "seconds": round(writer.seconds, 3)}
    return made


def _in_turn(prompt: str, writers: list[_Writer]) -> None:
    """The answers one after the other, each as it is written."""
    for writer in writers:
        if len(writers) > 1:
            print(f"[{writer.name}]")
        writer.answer(prompt, lambda text: print(text, end="", flush=True))
        print(flush=True)
        if sys.stdout.isatty():
            _note(writer.said)
    if not sys.stdout.isatty():
        print(flush=True)


def _in_columns(prompt: str, writers: list[_Writer]) -> None:
    """Both answers side by side. The first model's lines are complete before the other one writes, so that each line
    is printed as soon as the other model has filled its part."""
    width = (shutil.get_terminal_size().columns - 3) // 2
    print(" | ".join(_cut(writer.name, width) for writer in writers))
    left, right, printed = _wrapped(writers[0].answer(prompt), width), "", 0

    def show(text: str) -> None:
        nonlocal right, printed
        right += text
        for line in _wrapped(right, width)[printed:-1]:  # the last one may still grow
            print(f"{(left[printed] if printed < len(left) else '').ljust(width)} | {line}", flush=True)
            printed += 1

    writers[1].answer(prompt, show)
    for ours, theirs in zip_longest(left[printed:], _wrapped(right, width)[printed:], fillvalue=""):
        print(f"{ours.ljust(width)} | {theirs}")
    print(" | ".join(_cut(writer.said, width) for writer in writers))


def _wrapped(text: str, width: int) -> list[str]:
    """A text as lines that fit; a line that was printed stays as it is when the text grows."""
    return [line for part in text.split("\n") for line in textwrap.wrap(part, width) or [""]]


def _cut(text: str, width: int) -> str:
    return (text if len(text) <= width else f"…{text[-(width - 1) :]}").ljust(width)


def _note(text: str) -> None:
    print(f"workbench: {text}", file=sys.stderr)
