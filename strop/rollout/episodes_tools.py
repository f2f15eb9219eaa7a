"""Episodes in which the model calls tools: it writes, its calls are made, and it reads what they came to, in turn.

Tokens in, tokens out: what the model wrote stays as it was sampled. Only what a tool answers is tokenised, in the text
that the chat template puts between a turn with calls and the next one (`Seam`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from strop.data.chat import ChatTemplate, Conversation
from strop.data.formats import Message
from strop.data.turns import ALPHA, BETA, assistant_spans
from strop.rollout.encode import Encoder
from strop.rollout.environments import Environments
from strop.rollout.generator import is_sharded
from strop.rollout.parsing import NAMELESS, Syntax, ToolCall, assistant_calling, read, syntax_of
from strop.rollout.tools import Tool, Toolbox, ToolResult, ToolRunner
from strop.rollout.types import Completion, FinishReason, Generator, Rollout, Sampling

TURNS = 2**40
"""What the numbers of a row's turns are apart, so that each turn has random numbers of its own."""
QUESTION: Message = {"role": "user", "content": "A question."}


class Seam:
    """What a chat template writes after a turn that calls tools: the end of the turn, the results, the next header.

    It is what a rendering with the results has more than the turn itself, and is proven not to depend on what was said.
    Raises ValueError, naming the template, where it can't be told or would rewrite the turn.
    """

    def __init__(self, template: ChatTemplate, syntax: Syntax):
        self.template, self.syntax = template, syntax
        self.heads: dict[tuple[Any, ...], tuple[str, str]] = {}

    def marker_id(self, conversation: Conversation) -> int:
        """The token that ends a turn with a call. Raises ValueError if the template can't continue such a turn."""
        results = [ToolResult("look_up", BETA)]
        seams = {self._text(conversation, results, argument) for argument in (ALPHA, BETA)}
        if len(seams) > 1:
            raise self._unproven("what it writes after the turn depends on what is said in it")
        if not any(BETA in text for _, text in seams):
            raise self._unproven("it doesn't write what a tool answered")
        return self.ids(conversation, results)[0]

    def ids(self, conversation: Conversation, results: Sequence[ToolResult]) -> tuple[int, list[int]]:
        """The token that ends a turn with calls, and the tokens after it up to the model's next turn."""
        marker, text = self._text(conversation, results)
        marker_id: int = self.template.tokenizer.convert_tokens_to_ids(marker)  # type: ignore[assignment]
        ids = self.template.tokenizer(marker + text, add_special_tokens=False).input_ids
        if marker_id not in ids[:2]:  # some tokenizers put a space before the first word
            raise self._unproven(f"its tokenizer doesn't read {marker!r} as a token of its own")
        return marker_id, ids[ids.index(marker_id) + 1 :]

    def _text(
        self, conversation: Conversation, results: Sequence[ToolResult], argument: str = ALPHA
    ) -> tuple[str, str]:
        """The marker that ends the turn, and the text after it."""
        known = {tool["function"]["name"] for tool in conversation.tools or ()}
        names = [result.name if result.name in known else NAMELESS for result in results]
        key = (tuple(names), argument, repr(conversation.tools), repr(conversation.options))
        asked = self._asked(conversation, names, argument)
        if key not in self.heads:
            self.heads[key] = self._head(conversation, asked, names)
        head, marker = self.heads[key]
        contents = [self._harmless(result.content) for result in results]
        text = conversation.render([*asked, *_answers(names, contents)], generation_prompt=True)
        if not text.startswith(head):
            raise self._unproven("it rewrites a turn depending on what tools answer")
        return marker, text[len(head) :]

    def _asked(self, conversation: Conversation, names: list[str], argument: str) -> list[Message]:
        """A question and a turn with these calls; with one, where the template refuses several."""
        calls = [(name, {"value": argument}) for name in names]
        asked = [QUESTION, assistant_calling(calls)]
        if len(calls) > 1:
            try:
                conversation.render(asked)
            except ValueError:
                return [QUESTION, assistant_calling(calls[:1])]
        return asked

    def _head(self, conversation: Conversation, asked: list[Message], names: list[str]) -> tuple[str, str]:
        """The rendering up to the end of the turn with calls, and the token that ends it."""
        messages = [*asked, *_answers(names, [ALPHA] * len(names))]
        text, spans, _ = assistant_spans(conversation, messages)
        if len(spans) != 1:
            raise self._unproven(f"it marks {len(spans)} turns where the assistant has one")
        (start, end), specials = spans[0], self.template.specials
        said = text[:end].rstrip()
        marker = next((token for token in specials if said.endswith(token)), "")
        if marker and not any(call.error for call in read(said[start : -len(marker)], self.syntax, {}).calls):
            return said, marker
        # what ends the turn doesn't belong to it, or ends the call in it: then the next token is what says so
        end += len(text[end:]) - len(text[end:].lstrip())
        marker = next((token for token in specials if text.startswith(token, end)), "")
        if not marker:
            raise self._unproven("no token ends a turn with calls, so generation would not stop there")
        return text[: end + len(marker)], marker

    def _harmless(self, content: str) -> str:
        """What a tool answered, without what the tokenizer would take for the end or the start of a turn."""
        for token in self.template.tokenizer.all_special_tokens:
            if token in content:
                content = content.replace(token, f"{token[:1]} {token[1:]}")
        return content

    def _unproven(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.template} can't be used with tools: {reason}. Use a template whose turns with tool calls stand as "
            "they were written (chat_template_path)"
        )


def _answers(names: Sequence[str], contents: Sequence[str]) -> list[Message]:
    return [
        {"role": "tool", "name": name, "tool_call_id": f"call{k:05d}", "content": content}
        for k, (name, content) in enumerate(zip(names, contents, strict=True))
    ]


@dataclass(eq=False)
class Episode:
    """One conversation while it goes on."""

    row: dict[str, Any]
    """The row, with the prompt and the tools that the model sees."""
    number: int
    toolbox: Toolbox
    conversation: Conversation
    prompt_length: int
    token_ids: list[int]
    environment: Any = None
    completion_mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    sampled_logps: list[float] = field(default_factory=list)
    """As `logps`; those of a draw from a distribution that isn't the policy's."""
    is_filtered: bool = False
    messages: list[Message] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    """Calls of the last turn that wait for an answer."""
    finish_reason: FinishReason = "stop"
    num_calls: int = 0
    num_failures: int = 0

    def __post_init__(self):
        for stream in (self.completion_mask, self.logps, self.sampled_logps):
            stream += [0] * self.prompt_length

    @property
    def length(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.prompt_length

    def extend(self, completion: Completion) -> None:
        """Append what the model wrote."""
        self.token_ids += completion.token_ids
        self.completion_mask += [1] * len(completion.token_ids)
        self.logps += completion.logps
        self.sampled_logps += completion.logps if completion.sampled_logps is None else completion.sampled_logps
        self.is_filtered |= completion.sampled_logps is not None
        self.finish_reason = completion.finish_reason

    def extend_context(self, token_ids: Sequence[int]) -> None:
        """Append what the model only reads."""
        self.token_ids += token_ids
        for stream in (self.completion_mask, self.logps, self.sampled_logps):
            stream += [0] * len(token_ids)

    def rollout(self, row: dict[str, Any]) -> Rollout:
        metrics = {
            "tools/call_frequency": (float(self.num_calls), 1.0),
            "tools/failure_frequency": (float(self.num_failures), float(self.num_calls)),
        }
        return Rollout(
            row=row,
            token_ids=self.token_ids,
            completion_mask=self.completion_mask,
            logps=self.logps,
            finish_reason=self.finish_reason,
            sampled_logps=self.sampled_logps if self.is_filtered else None,
            prompt_length=self.prompt_length,
            prompt=self.row["prompt"],
            completion=self.messages,
            columns={} if self.environment is None else {"environments": self.environment},
            metrics={name: value for name, value in metrics.items() if value[1]},
        )


class ToolEpisodes:
    """Conversations of the model with tools, and with an environment each if there are any.

    The model may call several tools in a turn, at most `max_turns` times in a conversation (None: as often as it
    likes), each call within `timeout` seconds. `sampling.max_tokens` bounds all that comes after the prompt,
    `context_size` all with it: results that leave the model no room are taken back, and the conversation ends there as
    one cut short.

    Raises ValueError for functions that are no tools, for two of one name, and for chat templates with which a
    conversation can't go on as it was written.
    """

    own_rewards: Sequence[str] = ()

    def __init__(
        self,
        generator: Generator,
        encoder: Encoder,
        tools: Sequence[Callable[..., Any]] = (),
        environments: Environments | None = None,
        *,
        max_turns: int | None = None,
        context_size: int | None = None,
        timeout: float | None = None,
    ):
        if max_turns is not None and max_turns < 0:
            raise ValueError(f"max_tool_calling_iterations={max_turns} must be 0 or more, or None for no limit")
        self.generator, self.encoder = generator, encoder
        self.tools = [Tool(function) for function in tools]
        self.environments = environments
        self.max_turns, self.context_size = max_turns, context_size
        self.runner = ToolRunner(timeout)
        self.own_rewards = environments.own_rewards if environments is not None else ()
        self.seam: Seam | None = None
        """None where no conversation has tools."""
        self.marker_ids: set[int] = set()
        for toolbox in environments.toolboxes(self.tools) if environments is not None else [Toolbox(self.tools)]:
            if toolbox.tools:
                conversation = encoder.template.conversation({"tools": toolbox.schemas})
                self.seam = Seam(encoder.template, syntax_of(conversation))
                self.marker_ids.add(self.seam.marker_id(conversation))

    def roll_out(self, rows: Sequence[dict[str, Any]], numbers: Sequence[int], sampling: Sampling) -> list[Rollout]:
        """One rollout a row, in order."""
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *sorted(self.marker_ids)))
        episodes = self._begin(rows, numbers)
        speaking, turn = episodes, 0
        while self._goes_on(speaking):
            completions = self.generator.generate(
                [episode.token_ids for episode in speaking],
                sampling,
                rows=[episode.number + turn * TURNS for episode in speaking],
                max_tokens=[self._room(episode, sampling) if turn else sampling.max_tokens for episode in speaking],
            )
            for episode, completion in zip(speaking, completions, strict=True):
                self._hear(episode, completion)
            calling = [episode for episode in speaking if episode.calls]
            if turn == self.max_turns:
                break
            speaking = self._answer(calling, sampling)
            turn += 1
        rollouts = [episode.rollout(row) for episode, row in zip(episodes, rows, strict=True)]
        if self.environments is not None:
            self.environments.judge(rollouts, self.runner)
        return rollouts

    def _begin(self, rows: Sequence[dict[str, Any]], numbers: Sequence[int]) -> list[Episode]:
        begun: list[Episode] = []
        environments = [None] * len(rows) if self.environments is None else self.environments.enter(rows, self.runner)
        common = Toolbox(self.tools)
        for i, (row, number, environment) in enumerate(zip(rows, numbers, environments, strict=True)):
            if environment is None and i and row is rows[i - 1]:
                seen, ids = begun[-1].row, begun[-1].token_ids
                toolbox = common
            else:
                toolbox = common if environment is None else Toolbox([*self.tools, *environment.tools])
                seen = self._seen(row, toolbox, None if environment is None else environment.observation)
                ids = self._prompt_ids(seen)
            begun.append(
                Episode(
                    seen,
                    number,
                    toolbox,
                    self.encoder.template.conversation(seen),
                    len(ids),
                    list(ids),
                    environment=None if environment is None else environment.instance,
                )
            )
        return begun

    def _seen(self, row: dict[str, Any], toolbox: Toolbox, observation: str | None) -> dict[str, Any]:
        """The row as the model sees it: with the tools, and what the environment said at first."""
        prompt = row.get("prompt")
        if not isinstance(prompt, Sequence) or isinstance(prompt, str):
            raise ValueError(
                f"the prompt is {str(prompt)[:80]!r}, but only conversations have a place for tools. Write it as "
                '[{"role": "user", "content": ...}]'
            )
        if row.get("tools"):
            raise ValueError(
                "the rows have a column 'tools', and there are tools to call besides: the model would be told of tools "
                "that nobody runs. Drop the column"
            )
        return {**row, "prompt": _observed(list(prompt), observation), "tools": toolbox.schemas}

    def _prompt_ids(self, seen: dict[str, Any]) -> list[int]:
        """The prompt in tokens. Raises ValueError for one that would lose the tools at its start."""
        ids, limit = self.encoder.whole_prompt_ids(seen), self.encoder.max_prompt_length
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"the prompt {str(seen['prompt'])[:80]!r} has {len(ids)} tokens with its tools, more than "
                f"max_prompt_length={limit}: cut, the model would not know what it may call. Raise the limit, or drop "
                "the row"
            )
        return ids

    def _goes_on(self, speaking: Sequence[Episode]) -> bool:
        """Whether somebody speaks: on any rank, where all ranks must generate together."""
        model = getattr(self.generator, "model", None)
        if model is None or not is_sharded(model):
            return bool(speaking)
        count = torch.tensor(len(speaking), device=next(model.parameters()).device)
        torch.distributed.all_reduce(count)
        return bool(count)

    def _hear(self, episode: Episode, completion: Completion) -> None:
        """Take down what the model wrote, and what it calls; calls cut short by the limit are text."""
        episode.extend(completion)
        episode.calls = []
        plain = self.encoder.words(episode.row, completion.token_ids)
        assert not isinstance(plain, str)
        if self.seam is not None and completion.finish_reason == "stop":
            tokenizer = self.encoder.tokenizer
            reply = read(self._said(completion.token_ids), self.seam.syntax, episode.toolbox.by_name)
            if reply.calls:
                content = reply.content
                for token in () if self.encoder.keep_special_tokens else tokenizer.all_special_tokens:
                    content = content.replace(token, "")
                episode.calls = reply.calls
                calls = [call.message for call in reply.calls]
                plain = [{"role": "assistant", "tool_calls": calls, "content": content.strip()}]
        episode.messages += [dict(message) for message in plain]

    def _said(self, token_ids: Sequence[int]) -> str:
        """A turn's text, special tokens included, without the one that ends it."""
        tokenizer = self.encoder.tokenizer
        ends = self._is_end(token_ids[-1])
        return tokenizer.decode(token_ids[:-1] if ends else token_ids, skip_special_tokens=False)

    def _answer(self, episodes: Sequence[Episode], sampling: Sampling) -> list[Episode]:
        """Make the calls; the episodes that go on with their results."""
        results = self.runner.run([(episode.toolbox, episode.calls) for episode in episodes])
        going_on = []
        for episode, answers in zip(episodes, results, strict=True):
            episode.num_calls += len(answers)
            episode.num_failures += sum(answer.failed for answer in answers)
            ids = self._continuation(episode, answers)
            if self._room(episode, sampling) - len(ids) < 1:
                episode.finish_reason = "length"
                continue
            episode.extend_context(ids)
            episode.messages += [answer.message for answer in answers]
            going_on.append(episode)
        return going_on

    def _continuation(self, episode: Episode, answers: Sequence[ToolResult]) -> list[int]:
        """What the model reads next; with the end of its turn where a stop text ended it."""
        assert self.seam is not None
        marker_id, ids = self.seam.ids(episode.conversation, answers)
        return ids if self._is_end(episode.token_ids[-1]) else [marker_id, *ids]

    def _is_end(self, token_id: int) -> bool:
        return token_id in self.marker_ids or token_id in self.encoder.tokenizer.all_special_ids

    def _room(self, episode: Episode, sampling: Sampling) -> int:
        """Tokens that may still come."""
        room = sampling.max_tokens - episode.length
        return room if self.context_size is None else min(room, self.context_size - len(episode.token_ids))


def _observed(prompt: list[Message], observation: str | None) -> list[Message]:
    """The prompt with what an environment says at first, at the end of the last message if that is the user's."""
    if not observation:
        return prompt
    if not prompt or prompt[-1]["role"] != "user":
        return [*prompt, {"role": "user", "content": observation}]
    content = prompt[-1].get("content") or ""
    added = content + observation if isinstance(content, str) else [*content, {"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": added}]
