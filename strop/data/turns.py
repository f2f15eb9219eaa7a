"""Where in a rendered conversation the assistant speaks, proven for any chat template.

The span of a turn is what the model would have generated: from the end of the header that the generation prompt also
writes, over reasoning, content and tool calls, to the end-of-turn marker. Templates rarely mark it, so it is derived:

1. `{% generation %}` markers, where the template has them, are taken at their word.
2. *By prefix.* If the rendering of the messages before the turn, generation prompt included, begins the whole
   rendering, the turn starts where it ends: the context is the one at inference. The rendering that ends with this
   turn says where the turn ends.
3. *By sentinel.* Templates that rewrite history (reasoning of earlier turns deleted) are rendered again with two
   different words in the turn's place. What differs is the content; what stands around it, in both and in the
   original, is header and end-of-turn marker.

Where neither is conclusive, ValueError: a wrong mask trains the wrong thing and nobody would see.
"""

import re
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from strop.data.chat import ChatTemplate, Conversation, common_prefix
from strop.data.formats import Message

Span = tuple[int, int]
"""First character and the one after the last."""

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
ALPHA, BETA = "Qzv7alphaK", "Xwj5betaZ"
"""Words no row contains, different in their first and last letter, that templates have no reason to parse."""


class Unproven(Exception):
    """Why a span could not be told."""


def assistant_spans(
    conversation: Conversation, messages: list[Message], which: Literal["all", "last"] = "all"
) -> tuple[str, list[Span], bool]:
    """The rendered conversation, the spans of the assistant's turns in it (all or the last), and whether history is
    rewritten.

    Raises ValueError where the spans can't be proven.
    """
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if which == "last":
        turns = turns[-1:]
    if GENERATION.search(conversation.template.source(conversation.tools)):
        return _marked_spans(conversation, messages, turns)
    text, spans, rewritten = conversation.render(messages), [], False
    for k in turns:
        try:
            span = _by_prefix(conversation, messages, k, text)
            if span is None:
                rewritten = rewritten or k < len(messages) - 1
                span = _by_sentinel(conversation, messages, k, text, spans[-1][1] if spans else 0)
        except Unproven as reason:
            raise _unproven(conversation, k, reason) from reason
        spans.append(span)
    return text, spans, rewritten


def completion_start(conversation: Conversation, prompt: list[Message], completion: list[Message]) -> tuple[str, int]:
    """The rendered prompt + completion, and the character where the completion starts.

    Raises ValueError where it can't be proven.
    """
    messages = prompt + completion
    text = conversation.render(messages)
    answers = completion[0]["role"] == "assistant"
    before = conversation.render(prompt, generation_prompt=answers)
    if text.startswith(before):
        return text, len(before)
    try:
        if not answers:
            raise Unproven("the rendering of the prompt does not begin the rendering of prompt and completion")
        return text, _by_sentinel(conversation, messages, len(prompt), text, 0)[0]
    except Unproven as reason:
        raise _unproven(conversation, len(prompt), reason) from reason


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What ends an answer: the end-of-sequence token, and the token that the chat template puts after an answer."""
    end: Any = tokenizer.eos_token_id
    return sorted({index for index in (end, end_of_turn(tokenizer)) if index is not None})


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The added token that the chat template puts after an answer; None without one, or where it can't be told."""
    if not tokenizer.chat_template:
        return None
    answer = "An answer."
    messages = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": answer}]
    template = ChatTemplate(tokenizer)
    try:
        text, (span,), _ = assistant_spans(template.conversation({}), messages)
    except ValueError:  # a template that some rows can do without need not take these messages
        return None
    marker = text[slice(*span)].partition(answer)[2].strip()
    added: dict[str, int] = tokenizer.get_added_vocab()  # type: ignore[operator]
    return added.get(marker) if marker else None


def _unproven(conversation: Conversation, k: int, reason: Exception) -> ValueError:
    return ValueError(
        f"{conversation.template} does not show where the assistant's turn in message {k} starts and ends: {reason}. "
        f"Put "
        "{% generation %}...{% endgeneration %} around what the assistant says in the template, or use "
        'train_on_turns="expand" or "last", '
        "which need the last turn of a conversation only"
    )


def _marked_spans(
    conversation: Conversation, messages: list[Message], turns: list[int]
) -> tuple[str, list[Span], bool]:
    text, spans = conversation.render_marked(messages)
    if turns and not spans:
        raise ValueError(
            f"{conversation.template} has {{% generation %}} markers but none around the turns of this row"
        )
    rewritten = False
    if len(turns) > 1:
        ends = [conversation.render_marked(messages[: k + 1])[1] for k in turns[:-1]]
        rewritten = any(not set(end) <= set(spans) for end in ends)
    elif turns and len(spans) > 1:
        before = conversation.render(messages[: turns[0]], generation_prompt=True)
        spans = [span for span in spans if span[1] > len(before)] if text.startswith(before) else spans[-1:]
    return text, spans, rewritten


def _by_prefix(conversation: Conversation, messages: list[Message], k: int, text: str) -> Span | None:
    """The span of turn `k` where all before it is rendered as at inference, and itself as at the end; else None."""
    before = conversation.render(messages[:k], generation_prompt=True) if k else _header(conversation)
    if not text.startswith(before):
        return None
    alone = text if k == len(messages) - 1 else conversation.render(messages[: k + 1])
    if not alone.startswith(before):
        return None
    start = len(before)
    end = start + _end_of_turn(conversation, messages[: k + 1], alone[start:])
    return (start, end) if start < end and text[start:end] == alone[start:end] else None


def _header(conversation: Conversation) -> str:
    """What begins a conversation that the assistant opens."""
    try:
        return conversation.render([], generation_prompt=True)
    except ValueError:
        return ""


def _end_of_turn(conversation: Conversation, messages: list[Message], tail: str) -> int:
    """How much of `tail`, the rendering of the last message, is the turn with its end-of-turn marker.

    The marker is the last added token with nothing but white space after it, if it is the only one there. Without any,
    the white space after a turn is what ends it.
    """
    specials = conversation.template.specials
    closers = _closers(tail, specials)
    said = messages[-1].get("content")
    said = said.rstrip() if isinstance(said, str) else ""
    if len(closers) > 1 or (closers and said.endswith(specials)):
        rank = _marker_rank(conversation, messages)
        closers = closers[rank:] if rank is not None else []
    if closers:
        return closers[0][1]
    bare = tail.rstrip()
    is_unmarked = bare.endswith(said) if said else not bare
    return len(tail) if is_unmarked else len(bare)


def _marker_rank(conversation: Conversation, messages: list[Message]) -> int | None:
    """Which of the added tokens that end a conversation marks the end of its last turn, counted from the last.

    Told from a turn without added tokens of its own. If several are left, the later ones end the conversation rather
    than the turn if they vanish when somebody speaks on. None if the template writes none.
    """
    try:
        _around(conversation, messages, len(messages) - 1)
        messages = [*messages[:-1], _saying(messages[-1], ALPHA)]
    except Unproven:  # then nothing can stand in for what is said
        pass
    text = conversation.render(messages)
    closers = _closers(text, conversation.template.specials)
    if len(closers) < 2:
        return 0 if closers else None
    try:
        shared = common_prefix(text, conversation.render([*messages, {"role": "user", "content": BETA}]))
    except ValueError:  # the template lets nobody speak after this turn
        return 0
    return next((rank for rank, closer in enumerate(closers) if closer[1] <= shared), 0)


def _closers(text: str, specials: tuple[str, ...]) -> list[Span]:
    """The added tokens at the end of `text`, the last first; white space between them is skipped."""
    spans: list[Span] = []
    text = text.rstrip()
    while text.endswith(specials):
        token = next(token for token in specials if text.endswith(token))
        spans.append((len(text) - len(token), len(text)))
        text = text[: -len(token)].rstrip()
    return spans


def _by_sentinel(conversation: Conversation, messages: list[Message], k: int, text: str, previous_end: int) -> Span:
    """The span of turn `k`, from renderings with other words in its place. Raises Unproven."""
    prefix, tail = _around(conversation, messages, k)
    start = _after_header(conversation, messages[:k], prefix, text, previous_end)
    marker, end = _marker(conversation, messages, k, tail)
    if not text.endswith(tail[marker:]):
        raise Unproven("what stands after the turn depends on what is said in it")
    span = start, len(text) - len(tail) + end
    if span[0] >= span[1]:
        raise Unproven("nothing of the turn is rendered")
    return span


def _around(conversation: Conversation, messages: list[Message], k: int) -> tuple[str, str]:
    """The rendering before and after the content of message `k`."""
    a, b = (
        conversation.render([*messages[:k], _saying(messages[k], word), *messages[k + 1 :]]) for word in (ALPHA, BETA)
    )
    start, end = common_prefix(a, b), common_prefix(a[::-1], b[::-1])
    if a[start : len(a) - end] != ALPHA:
        raise Unproven("the content of the turn is not rendered once and as it is")
    return a[:start], a[len(a) - end :]


def _saying(message: Message, word: str) -> Message:
    """The message with `word` as its content and no reasoning; tool calls stay, since tool results refer to them."""
    content = [{"type": "text", "text": word}] if isinstance(message.get("content"), list) else word
    kept = {key: message[key] for key in ("tool_calls", "name") if key in message}
    return {"role": message["role"], "content": content, **kept}


def _after_header(conversation: Conversation, context: list[Message], prefix: str, text: str, previous_end: int) -> int:
    """Where the header of a turn ends in `text`; `prefix` is what stands before its content when a sentinel is its
    content.

    Of the generation prompt, only as much is header as stands there: it may open a block of reasoning that earlier
    turns don't have. And what the template puts between header and content (an empty block of reasoning) is for the
    model to generate.
    """
    header = _generation_header(conversation, context)
    opener = _leading(header, conversation.template.specials) or header.split("\n")[0]
    found = prefix.rfind(opener, previous_end)
    if found < 0:
        raise Unproven(f"the header {header!r} of the generation prompt does not stand before the turn")
    end = found + common_prefix(prefix[found:], header)
    common = common_prefix(prefix, text)
    if common < min(end, found + len(opener) + 1):
        raise Unproven("what stands before the turn depends on what is said in it")
    return min(end, common)


def _generation_header(conversation: Conversation, context: list[Message]) -> str:
    """What the generation prompt adds to the rendering of `context`."""
    context = context or [{"role": "user", "content": ALPHA}]
    prompt, bare = (conversation.render(context, generation_prompt=generation) for generation in (True, False))
    header = prompt[common_prefix(prompt, bare) :]
    if not header.strip():
        raise Unproven("the generation prompt adds no header to look for")
    return header


def _marker(conversation: Conversation, messages: list[Message], k: int, tail: str) -> Span:
    """Where in `tail`, the text after the content of message `k`, its end-of-turn marker starts and ends."""
    specials = conversation.template.specials
    last = _around(conversation, messages[: k + 1], k)[1]
    closers = [span for span in _closers(last, specials) if tail.startswith(last[: span[1]])]
    if closers:
        return closers[0]
    if not _closers(last, specials):
        bare = last.rstrip() or last
        if tail.startswith(bare):
            return 0, len(bare)
    return _marker_before_header(conversation, messages, k, tail)


def _marker_before_header(conversation: Conversation, messages: list[Message], k: int, tail: str) -> Span:
    """The marker where turns end otherwise within a conversation than at its end: a token right before a header."""
    specials = conversation.template.specials
    opener = _leading(_generation_header(conversation, messages[:k]), specials)
    marker = _leading(tail, specials)
    if opener and marker and tail[len(marker) :].lstrip().startswith(opener):
        return 0, len(marker)
    raise Unproven("the turn does not end with the same token as it would at the end of the conversation")


def _leading(text: str, specials: tuple[str, ...]) -> str:
    """The added token that `text` starts with, or ""."""
    return next((token for token in specials if text.startswith(token)), "")
