"""`strop chat` and `strop generate`: talk to a model, or have it answer prompts one JSON line each."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from strop.cli.args import Options
from strop.cli.parser import ConfigFile
from strop.cli.yaml_config import apply_environment, read_config

if TYPE_CHECKING:  # torch is imported once the options are known to be good
    from transformers import GenerationConfig

Message = dict[str, str]

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message and start anew; without TEXT, remove it
/help           this list
/exit           leave (so does the end of the input)"""


@dataclass
class LoadArguments:
    """The model."""

    model: str
    """The model: an output folder of a run, an adapter's folder, a .gguf file, or a hub id."""

    base_model: str | None = None
    """The model that an adapter goes on, if it is no longer where the adapter says."""

    dtype: str | None = None
    """Precision of the weights; that of the saved weights on an accelerator, float32 on a CPU, if not set."""


@dataclass
class AnswerArguments(LoadArguments):
    """How answers are drawn."""

    max_new_tokens: int = 512
    """Longest answer in tokens."""

    temperature: float = 0.0
    """0 always takes the likeliest token; above, tokens are drawn, more evenly the higher it is."""

    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability; needs a temperature."""

    seed: int = 0
    """Random state of the draws."""

    system: str | None = None
    """System message."""

    plain: bool = False
    """Continue the text as it is, without the chat template."""

    def __post_init__(self):
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"temperature={self.temperature} must be at least 0, top_p={self.top_p} above 0 and at most 1, "
                f"max_new_tokens={self.max_new_tokens} at least 1."
            )
        if self.temperature == 0 and self.top_p < 1:
            raise ValueError(
                f"top_p={self.top_p} has no effect at temperature=0, where the likeliest token is taken. Set a "
                "temperature, e.g. --temperature 0.7, or leave top_p out."
            )
        if self.plain and self.system is not None:
            raise ValueError("system needs the chat template, which plain leaves out. Drop one of the two.")


@dataclass
class PromptArguments:
    """The prompts to answer."""

    prompt: list[str] | None = None
    """One prompt, or several in quotes."""

    prompts: str | None = None
    """A .jsonl file of rows with `prompt` (text or messages) or `messages`; what a row's last assistant turn says is
    not shown to the model."""

    batch_size: int = 8
    """Prompts answered at a time."""

    def __post_init__(self):
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError('give either prompts on the command line (--prompt "...") or a file (--prompts FILE).')
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1.")


@dataclass
class Answer:
    """What a model said, and why it stopped: "stop" at the end of its turn, "length" at max_new_tokens."""

    text: str
    num_tokens: int
    finish_reason: str


class Answerer:
    """A model with its tokenizer, ready to answer."""

    def __init__(self, args: AnswerArguments):
        from transformers.utils.logging import disable_progress_bar

        from strop.data.inspect import stop_token_ids
        from strop.models.load import SCORING, task_of
        from strop.rollout.generate import refuse_virtual_tokens

        disable_progress_bar()
        if task_of(args.model) in SCORING:
            raise ValueError(
                f"{args.model} is a reward model: it scores answers and writes none. Use it with: strop score "
                f"{args.model}"
            )
        self.model, self.tokenizer = load(args)
        refuse_virtual_tokens(self.model, "a chat")
        self.args = args
        self.is_chat = self.tokenizer.chat_template is not None and not args.plain
        if args.system is not None and not self.is_chat:
            raise ValueError(
                f"{args.model} has no chat template, so there is no place for the system message. Drop it."
            )
        self.stop_ids = sorted({*stop_token_ids(self.tokenizer), *_as_list(self.model.generation_config.eos_token_id)})
        self.config = generation_config(args, self.tokenizer, self.stop_ids)

    def opening(self) -> list[Message]:
        """The messages that a conversation starts with."""
        return [] if self.args.system is None else [{"role": "system", "content": self.args.system}]

    def render(self, prompt: str | list[Message]) -> list[int]:
        """The ids that the model continues: text as it is, messages by the template."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        rendered = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def answers(self, prompts: Sequence[Sequence[int]], streamer: Any = None) -> list[Answer]:
        """One answer a prompt of ids, all drawn in one batch. Raises ValueError for a prompt that leaves no room."""
        import torch

        self._refuse_too_long(prompts)
        width, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[self.config.pad_token_id] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids, attention_mask=mask, generation_config=self.config, streamer=streamer
            )
        return [self._answer(line) for line in out[:, width:].tolist()]

    def _answer(self, ids: list[int]) -> Answer:
        stop = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        text = self.tokenizer.decode(ids[:stop], skip_special_tokens=True)
        return Answer(text, len(ids) if stop is None else stop + 1, "length" if stop is None else "stop")

    def _refuse_too_long(self, prompts: Sequence[Sequence[int]]) -> None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, prompts))
        if limit is not None and longest + self.args.max_new_tokens > limit:
            raise ValueError(
                f"the prompt has {longest} tokens and an answer may have {self.args.max_new_tokens}, but the model "
                f"reads at most {limit}. Shorten the prompt (in a chat: /reset) or lower max_new_tokens."
            )


@dataclass
class Chat:
    """A conversation between lines of text and a model."""

    answerer: Answerer
    out: TextIO
    notes: TextIO
    history: list[Message] = field(default_factory=list)

    def run(self, lines: Iterable[str]) -> None:
        """Answer each line until /exit or the end."""
        self.history = self.answerer.opening()
        for line in lines:
            text = line.rstrip("\n")
            if text.strip() in ("/exit", "/quit"):
                return
            if text.startswith("/") and self.command(*text[1:].strip().partition(" ")[::2]):
                continue
            if text.strip():
                self.say(text)

    def command(self, name: str, rest: str) -> bool:
        """Do what a line that begins with / asks for; False if it asks for nothing known."""
        if name == "reset":
            self.history = self.history[:1] if self.history and self.history[0]["role"] == "system" else []
        elif name == "system" and self.answerer.is_chat:
            self.history = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
        elif name == "help":
            print(HELP, file=self.notes)
        else:
            return False
        return True

    def say(self, text: str) -> None:
        """Stream the answer to `text`; a conversation remembers both. Ctrl-C ends the answer, not the chat."""
        asked = [*self.history, {"role": "user", "content": text}]
        streamer = Streamer(self.answerer.tokenizer, self.out)
        try:
            self.answerer.answers([self.answerer.render(asked if self.answerer.is_chat else text)], streamer)
        except ValueError as error:
            print(f"! {error}", file=self.notes)
            return
        except KeyboardInterrupt:
            print("\n! interrupted", file=self.notes)
        print(file=self.out, flush=True)
        if self.answerer.is_chat:
            self.history = [*asked, {"role": "assistant", "content": streamer.text}]


class Streamer:
    """Writes an answer as it grows, in whole characters. The first ids that `generate` hands over are the prompt's."""

    def __init__(self, tokenizer: Any, out: TextIO):
        self.tokenizer, self.out, self.text = tokenizer, out, ""
        self._ids: list[int] | None = None

    def put(self, value: Any) -> None:
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # the rest of a character is still to come
            self._show(text)

    def end(self) -> None:
        self._show(self.tokenizer.decode(self._ids or [], skip_special_tokens=True))

    def _show(self, text: str) -> None:
        self.out.write(text[len(self.text) :])
        self.out.flush()
        self.text = text


def main(argv: list[str]) -> int:
    """`strop chat MODEL`: answer lines from the terminal, or from a pipe. Returns the exit code."""
    instances = read("strop chat", [AnswerArguments], argv)
    if instances is None:
        return 0
    (args,) = instances
    answerer = Answerer(args)
    interactive = sys.stdin.isatty()
    if not answerer.is_chat:
        print("no chat template: each line is continued as it is, and nothing is remembered", file=sys.stderr)
    elif interactive:
        print("/help lists the commands", file=sys.stderr)
    seed_everything(args.seed)
    Chat(answerer, sys.stdout, sys.stderr).run(typed_lines() if interactive else sys.stdin)
    return 0


def generate_main(argv: list[str]) -> int:
    """`strop generate MODEL`: print {"prompt", "completion", "num_tokens", "finish_reason"} a prompt. The exit code."""
    instances = read("strop generate", [AnswerArguments, PromptArguments], argv)
    if instances is None:
        return 0
    args, prompt_args = instances
    prompts = prompt_args.prompt if prompt_args.prompts is None else read_prompts(prompt_args.prompts)
    answerer = Answerer(args)
    asked = [as_asked(prompt, answerer) for prompt in prompts]
    seed_everything(args.seed)
    for start in range(0, len(asked), prompt_args.batch_size):
        part = slice(start, start + prompt_args.batch_size)
        answers = answerer.answers([answerer.render(prompt) for prompt in asked[part]])
        for prompt, answer in zip(prompts[part], answers, strict=True):
            line = {"prompt": prompt, "completion": answer.text, "num_tokens": answer.num_tokens}
            print(json.dumps(line | {"finish_reason": answer.finish_reason}, ensure_ascii=False), flush=True)
    return 0


def read(prog: str, classes: list[type], argv: list[str]) -> list[Any] | None:
    """The options, MODEL being the first word; None if only help was asked for. They may be in a file (--config)."""
    options = Options(prog, [ConfigFile, *classes], f"{prog} MODEL [options]")
    if {"-h", "--help"} & set(argv):
        options.parser.print_help()
        return None
    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    config = options.read(argv).get("config")
    file = apply_environment(read_config(config.value)) if config else {}
    return options.build(options.read(argv, file))[1:]


def load(args: LoadArguments, **loading: Any) -> tuple[Any, Any]:
    """The model, in evaluation mode, and its tokenizer (`strop.models.load.load_to_use`)."""
    from strop.models.load import load_to_use

    return load_to_use(args.model, args.dtype, args.base_model, **loading)


def generation_config(args: AnswerArguments, tokenizer: Any, stop_ids: list[int]) -> "GenerationConfig":
    """How to draw, by our options alone: what a model's own file says about sampling is left aside."""
    from transformers import GenerationConfig

    draws = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    pad: Any = tokenizer.pad_token_id
    return GenerationConfig(
        max_new_tokens=args.max_new_tokens,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0] if pad is None else pad,
        **(draws if args.temperature > 0 else {"do_sample": False}),
    )


def as_asked(prompt: str | list[Message], answerer: Answerer) -> str | list[Message]:
    """A prompt as the model gets it: in a conversation if it chats, as text if not."""
    if not answerer.is_chat:
        if not isinstance(prompt, str):
            raise ValueError(
                f"{answerer.args.model} answers plain text, but a prompt is messages: {str(prompt)[:80]}. Give it text."
            )
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return messages if messages[0]["role"] == "system" else [*answerer.opening(), *messages]


def read_prompts(path: str) -> list[str | list[Message]]:
    """The prompts of a .jsonl file. Raises ValueError naming file and line of a row that has none."""
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r} with prompts.")
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            prompts.append(_prompt_of(line, f"{path}:{number}"))
    return prompts


def _prompt_of(line: str, where: str) -> str | list[Message]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no line of JSON: {error}") from error
    prompt = row if isinstance(row, str) else row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
    if isinstance(prompt, list) and prompt and prompt[-1].get("role") == "assistant":
        prompt = prompt[:-1]
    if not prompt or not isinstance(prompt, (str, list)):
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has neither `prompt` nor `messages` to answer, but {found}.")
    return prompt


def typed_lines() -> Iterator[str]:
    """Lines typed at a prompt, until the end of the input."""
    import readline  # noqa: F401  (editing and history)

    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def seed_everything(seed: int) -> None:
    from transformers import set_seed

    set_seed(seed)


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
