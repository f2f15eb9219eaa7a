"""A small random model for benchmarks that should take seconds: SmolLM2's shape and vocabulary in 6 narrow layers.

python benchmarks/mini.py SMOLLM2_FOLDER TARGET_FOLDER
"""

import sys

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(source: str, target: str) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
