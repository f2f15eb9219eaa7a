"""Texts tokenised piece by piece get the tokens of whole texts; tokenizers of which that isn't proven get no pieces."""

import pickle
import random
from itertools import product

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from strop.data.pieces import EXPRESSIONS, LONGEST, PIECE, pieces_of
from strop.data.report import Fate
from strop.data.tokenize import tokenise_chats

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
QWEN, LLAMA = (
    pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), BYTES]) for expression in EXPRESSIONS
)
CUTTERS = {
    "gpt2": GPT2,
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "qwen": QWEN,
    "llama": LLAMA,
}
LATIN = (
    "a",
    " Bob",
    "cd",
    "'s",
    "'LL",
    "7",
    "12345",
    ".",
    ", ",
    "<<",
    "$",
    "_",
    "-",
    "é",
    "e\u0301",
    "\u017f",
    "\u212b",
)
OTHERS = ("\u0301", "日本。", " да", "½", "٣", "👩\u200d🚀", "\u200b")
WHITE = (" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2003", "\x1c", "\x85")
PARTS = LATIN + OTHERS + WHITE
ADDED = ("<|im_end|>", "<|im|>", "<|im|>>")


def texts(count: int, parts: tuple[str, ...] = PARTS + ADDED) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(parts, k=rng.randint(0, 12))) for _ in range(count)]


def make(cutter=GPT2, normalizer=None, dropout=None, added=ADDED) -> PreTrainedTokenizerFast:
    """Byte pairs, merged as they occur in `texts`."""
    tokenizer = Tokenizer(models.BPE(dropout=dropout))
    tokenizer.pre_tokenizer = cutter
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(1000, PARTS), trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("cutter", CUTTERS)
def test_the_tokenizer_cuts_wherever_a_piece_ends(cutter):
    """For all texts of four characters, one of each kind that the expressions tell apart, and some longer ones."""

    def cut(text: str) -> list[str]:
        return [word for word, _ in CUTTERS[cutter].pre_tokenize_str(text)]

    kinds = ("a", "s", "1", ".", "'", " ", "\n", "\t", "é", "\u0301")
    for text in [*map("".join, product(kinds, repeat=4)), *texts(1500, PARTS)]:
        pieces = PIECE.findall(text)
        assert "".join(pieces) == text
        assert [word for piece in pieces for word in cut(piece)] == cut(text), (text, pieces)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "nfc"])
@pytest.mark.parametrize("cutter", CUTTERS)
def test_tokens_and_spans_are_those_of_whole_texts(cutter, normalizer):
    tokenizer = make(CUTTERS[cutter], normalizer)
    pieces, rng = pieces_of(tokenizer), random.Random(1)
    some = [text for text in texts(1500) if text]
    spans = [[sorted(rng.sample(range(len(text) + 1), 2))] for text in some]
    for _ in range(2):  # the second time, most pieces are known
        by_piece = tokenise_chats(tokenizer, some, spans, [Fate(0)] * len(some), pieces)
        assert by_piece == tokenise_chats(tokenizer, some, spans, [Fate(0)] * len(some))
    assert sum(found is not None for found in map(pieces.encode, some, spans)) > len(some) / 20
    assert max(map(len, pieces)) <= LONGEST


def test_a_span_within_a_piece_is_left_to_the_whole_text():
    pieces = pieces_of(make())
    assert pieces.encode("cd Bob", [(2, 6)]) is not None
    assert pieces.encode("cd Bob", [(3, 6)]) is None
    assert pieces.encode("cd Bob", [(2, 5)]) is None
    assert pieces.encode("Bob\n日本", [(4, 6)]) is not None  # as an answer after a header starts
    assert pieces.encode("Bob\n\n日本", [(5, 7)]) is None


def test_truncation_and_padding_that_a_tokenizer_was_left_with_do_not_show():
    tokenizer = make()
    pieces = pieces_of(tokenizer)
    expected = tokenise_chats(tokenizer, ["Bob 12345"], [[(0, 9)]], [Fate(0)])
    tokenizer.pad_token = ADDED[0]
    tokenizer("Bob 12345", truncation=True, max_length=2, padding="max_length")
    assert tokenise_chats(tokenizer, ["Bob 12345"], [[(0, 9)]], [Fate(0)], pieces) == expected


def test_pieces_reach_other_processes_without_what_they_know():
    pieces = pieces_of(make())
    expected = pieces.encode("cd Bob", [])
    copy = pickle.loads(pickle.dumps(pieces))
    assert not copy
    assert copy.encode("cd Bob", []) == expected


class TestNotProven:
    @pytest.mark.parametrize(
        "options",
        [
            {"cutter": pre_tokenizers.ByteLevel(add_prefix_space=True)},
            {"cutter": BYTES},
            {"cutter": pre_tokenizers.Metaspace()},
            {"cutter": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{L}+ ?"), "isolated"), BYTES])},
            {"cutter": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(EXPRESSIONS[0]), "removed"), BYTES])},
            {"cutter": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), GPT2])},
            {"normalizer": normalizers.Prepend("_")},
            {"normalizer": normalizers.NFKC()},
            {"dropout": 0.1},
        ],
    )
    def test_ways_to_cut(self, options):
        assert pieces_of(make(**options)) is None

    @pytest.mark.parametrize("how", ["lstrip", "rstrip", "single_word", "normalized"])
    def test_added_tokens_that_look_around(self, how):
        assert pieces_of(make(added=[AddedToken("<mark>", **{"normalized": False, how: True})])) is None

    def test_special_tokens_read_as_text(self):
        tokenizer = make()
        tokenizer.split_special_tokens = True
        assert pieces_of(tokenizer) is None

    def test_tokenizers_written_in_python(self):
        assert pieces_of(lambda text: None) is None
