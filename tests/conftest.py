"""What all tests share: no network, one thread, and tiny models and tokenizers built in process."""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "WANDB_DISABLED": "true",
}

import gc
import socket

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template without `{% generation %}` markers, like most that models come with."""

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = (
    "a and answer are blue cold does eight fire green has hot how ice is it legs many red sky spider the water what . ?"
)
ROLES = ["system", "user", "assistant", "tool"]
SENTENCES = [
    "What is the capital of Norway? The capital of Norway is Oslo.",
    "How many legs does a spider have? A spider has eight legs.",
    "Ice is cold, fire is hot, and water is wet: 1 + 2 = 3.",
    "system user assistant tool: naïve café, ½ litre — «ok» 🙂",
]
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Connections to other machines fail at once, so that no test can depend on one."""
    connect = socket.socket.connect

    def connect_on_this_machine(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOOPBACK:
            raise PermissionError(f"a test tried to reach {address[0]}; tests run without a network")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_on_this_machine)


@pytest.fixture(autouse=True, scope="session")
def modules_are_no_garbage():
    """Every training begins with a full garbage collection, which else goes through all that was imported: 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state."""
    torch.manual_seed(0)


def with_chat(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of `WORDS` (anything else is <unk>), so that expected ids can be written by hand."""
    names = [*SPECIAL_TOKENS, "<unk>", *ROLES, *WORDS.split()]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return with_chat(tokenizer)


@pytest.fixture(scope="session")
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 400 tokens: any text goes through it and back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return with_chat(tokenizer)


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """A Llama of two layers with grouped key-value heads, float32, for either tokenizer; a fresh one each test."""
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


@pytest.fixture
def tiny_folder(tmp_path, tiny_llama, bpe_tokenizer):
    """A folder as `from_pretrained` reads it: `tiny_llama` with `bpe_tokenizer`."""
    folder = tmp_path / "tiny"
    tiny_llama.save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chat_rows() -> list[dict]:
    """Conversations of one and two turns, one with a system prompt."""
    return [
        {"messages": [user("What is the sky?"), assistant("The sky is blue.")]},
        {
            "messages": [
                {"role": "system", "content": "Answer in a word."},
                user("Is ice hot?"),
                assistant("Cold."),
                user("Is fire cold?"),
                assistant("Hot."),
            ]
        },
        {"messages": [user("How many legs has a spider?"), assistant("A spider has eight legs.")]},
    ]


@pytest.fixture
def prompt_completion_rows() -> list[dict]:
    """Plain text, the completion beginning with its separating space."""
    return [
        {"prompt": "What is the sky?", "completion": " The sky is blue."},
        {"prompt": "Is ice hot?", "completion": " Ice is cold."},
        {"prompt": "How many legs has a spider?", "completion": " Eight."},
    ]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}
