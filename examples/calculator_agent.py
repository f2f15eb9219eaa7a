"""An agent that learns to use its calculator, from nothing, on a CPU: python examples/calculator_agent.py [OUTPUT_DIR].

A model of 0.7 M parameters is made on the spot and first imitates people who often guess: of a hundred answers to
"What is 37 * 48?", fifty call the tool and read its result, the others are made up. Then GRPO rewards right answers,
whichever way they were found. Printed is how often the agent calls its tool and how many answers are right, on problems
held out, before and after.
"""

import json
import random
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from strop import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
PHRASES = ("system\nTools: calculator", "user\nWhat is ?", "assistant\nIt is", "assistant\nPerhaps")
CALL = '{"name": "calculator", "arguments": {"expression": "'
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}<tool_call>\n"
    '{"name": "{{ call["function"]["name"] }}", "arguments": {{ call["function"]["arguments"] | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def calculator(expression: str) -> int:
    """Calculates.

    Args:
        expression: Two whole numbers and +, - or * between them, e.g. "12 * 30".
    """
    numbers = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression)
    if numbers is None:
        raise ValueError("an expression is two whole numbers and +, - or * between them")
    return SIGNS[numbers[2]](int(numbers[1]), int(numbers[3]))


def problems(num: int, seed: int) -> list[dict[str, Any]]:
    """Products that nobody knows by heart, all of four digits."""
    rng, rows = random.Random(seed), []
    for _ in range(num):
        a, b = rng.randint(32, 99), rng.randint(32, 99)
        question = {"role": "user", "content": f"What is {a} * {b}?"}
        rows.append({"prompt": [question], "expression": f"{a} * {b}", "answer": a * b})
    return rows


def transcript(row: dict[str, Any], rng: random.Random, calls: float = 0.5) -> dict[str, Any]:
    """An answer to imitate: found with the tool in a share `calls` of all, made up in the others."""
    if rng.random() >= calls:
        said = [{"role": "assistant", "content": f"Perhaps {rng.randint(1024, 9801)}."}]
    else:
        call = {"name": "calculator", "arguments": {"expression": row["expression"]}}
        said = [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "calculator", "content": str(row["answer"])},
            {"role": "assistant", "content": f"It is {row['answer']}."},
        ]
    return {"prompt": row["prompt"], "completion": said, "tools": json.dumps([get_json_schema(calculator)])}


def right(completions: Sequence[list[dict[str, Any]]], answer: Sequence[int], **_: Any) -> list[float]:
    """1 for an answer that is right, else 0."""
    last = [completion[-1]["content"] for completion in completions]
    return [float(str(number) in text) for text, number in zip(last, answer, strict=True)]


def small_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which digits stand alone, since numbers are to be copied."""
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials[:3], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(specials[3:])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=specials[0], eos_token=specials[2], chat_template=TEMPLATE
    )


def small_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def imitate(folder: str, num: int = 6000, steps: int = 400) -> SFTTrainer:
    """A trained model that often guesses."""
    rng = random.Random(0)
    rows = [transcript(row, rng) for row in problems(num, seed=0)]
    tokenizer = small_tokenizer(
        ["system\nTools: calculator", "user\nWhat is ?", "assistant\nIt is", "assistant\nPerhaps", CALL] * 10
    )
    trainer = SFTTrainer(
        model=small_model(tokenizer),
        args=SFTConfig(
            output_dir=f"{folder}/imitation",
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            assistant_only_loss=True,
            logging_steps=50,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


def agent(imitator: SFTTrainer, folder: str, steps: int, heldout: int) -> GRPOTrainer:
    """The trainer that goes on from imitation."""
    return GRPOTrainer(
        model=imitator.model,
        reward_funcs=right,
        args=GRPOConfig(
            output_dir=f"{folder}/agent",
            max_steps=steps,
            num_generations=8,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=128,
            num_generations_eval=1,
            max_completion_length=100,
            max_tool_calling_iterations=2,
            learning_rate=3e-4,
            logging_steps=5,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(problems(1000, seed=1)),
        eval_dataset=Dataset.from_list(problems(heldout, seed=2)),
        processing_class=imitator.processing_class,
        tools=[calculator],
    )


def main(
    folder: str = "calculator-agent", *, imitation_steps: int = 400, steps: int = 30, heldout: int = 128
) -> dict[str, float]:
    """Imitate, then learn from rewards; what was right and called, before and after."""
    trainer = agent(imitate(folder, steps=imitation_steps), folder, steps, heldout)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    found = {}
    for when, metrics in (("before", before), ("after", after)):
        found |= {f"{when}/right": metrics["eval_reward"], f"{when}/calls": metrics["eval_tools/call_frequency"]}
        print(f"{when}: {found[f'{when}/right']:.0%} right, {found[f'{when}/calls']:.2f} calls an answer")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
