"""Ends of text by position, one BOS, and the seam of prompt and completion by characters."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from strop.data.pieces import pieces_of
from strop.data.report import Fate
from strop.data.tokenize import encoded, eos_id, tokenise_chats, tokenise_texts

BOS, EOS = 0, 1
LETTERS = "abcdefghx "
VOCABULARY = {"<s>": BOS, "</s>": EOS} | {("Ġ" if letter == " " else letter): i + 2 for i, letter in enumerate(LETTERS)}
A, B, C, X, SPACE, AB, SPACE_C = (
    VOCABULARY["a"],
    VOCABULARY["b"],
    VOCABULARY["c"],
    VOCABULARY["x"],
    VOCABULARY["Ġ"],
    12,
    13,
)


def make(around: str = "$A", trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """Letters a to h and x, with "ab" and " c" merged; `around` says what the tokenizer itself puts around a text."""
    tokenizer = Tokenizer(models.BPE({**VOCABULARY, "ab": AB, "Ġc": SPACE_C}, [("a", "b"), ("Ġ", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = processors.TemplateProcessing(single=around, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    trim = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.post_processor = processors.Sequence([trim, template])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def ids_of(rows):
    return [row.input_ids for row in rows]


@pytest.mark.parametrize("around", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("text", ["cx", "cx</s>"])
def test_exactly_one_eos_at_the_end(around, text):
    (row,) = tokenise_texts(make(around), [text], eos=EOS)
    assert row.input_ids == ([BOS] if "<s> $" in around else []) + [C, X, EOS]


@pytest.mark.parametrize("text", ["cx", "<s>cx"])
def test_exactly_one_bos_from_a_tokenizer_that_adds_one(text):
    assert ids_of(tokenise_texts(make("<s> $A"), [text], eos=EOS)) == [[BOS, C, X, EOS]]


def test_markers_within_a_text_are_content():
    (row,) = tokenise_texts(make("<s> $A"), ["c</s>x<s>c"], eos=EOS)
    assert row.input_ids == row.labels == [BOS, C, EOS, X, BOS, C, EOS]


def test_a_rendered_conversation_has_its_own_end():
    (row,) = tokenise_texts(make(), ["cx</s> "], eos=EOS)
    assert row.input_ids == [C, X, EOS, SPACE]


def test_without_eos_nothing_is_added():
    assert ids_of(tokenise_texts(make(), ["cx", ""], eos=None)) == [[C, X], []]


def test_eos_token_by_name():
    assert eos_id(make()) == EOS
    assert eos_id(make(), "<s>") == BOS
    with pytest.raises(ValueError, match="eos_token='<nope>' is not in the vocabulary"):
        eos_id(make(), "<nope>")


@pytest.mark.parametrize("around", ["$A", "<s> $A"])
@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("prompt", "completion", "context", "trained", "merged"),
    [
        ("x ", "cc", [X], [SPACE_C, C], True),  # " c" begins with the prompt's space
        ("x", " cc", [X], [SPACE_C, C], False),
        ("xa", "b", [X], [AB], True),
        ("xa", "c", [X, A], [C], False),
        ("", "ab", [], [AB], False),
        ("x  ", " x", [X, SPACE, SPACE], [SPACE, X], False),
    ],
)
def test_the_token_at_the_seam_is_trained(around, trim_offsets, prompt, completion, context, trained, merged):
    if trim_offsets and merged and prompt == "x ":
        merged = False  # the offsets of " c" don't show the space: trained all the same, but not counted
    (row,) = tokenise_texts(make(around, trim_offsets), [prompt + completion], [len(prompt)], EOS)
    bos = [BOS] * ("<s> $" in around)
    assert row.input_ids == [*bos, *context, *trained, EOS]
    expected = [*bos, *context] if prompt else []
    assert row.labels == [-100] * len(expected) + row.input_ids[len(expected) :]
    assert bool(row.fate & Fate.MERGED) == merged


def test_the_seam_moves_with_a_bos_written_out():
    (row,) = tokenise_texts(make("<s> $A"), ["<s>xc"], [len("<s>x")], EOS)
    assert (row.input_ids, row.labels) == ([BOS, X, C, EOS], [-100, -100, C, EOS])


class WithoutOffsets:
    """A tokenizer that, like those written in Python, knows no offsets."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *arguments, **options):
        encoded = self.tokenizer(*arguments, **options)
        encoded._encodings = None
        return encoded


@pytest.mark.parametrize("around", ["$A", "<s> $A"])
def test_without_offsets_the_seam_is_found_by_tokens(around):
    tokenizer = WithoutOffsets(make(around))
    clean, merged = tokenise_texts(tokenizer, ["xac", "xab"], [2, 2], EOS)
    bos = [BOS] * ("<s> $" in around)
    assert clean.labels == [-100] * len(bos) + [-100, -100, C, EOS]
    assert merged.labels == [-100] * len(bos) + [-100, AB, EOS]
    assert merged.fate == Fate.MERGED


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_spans_of_a_conversation(trim_offsets):
    """Characters "x" [0, 1), "cab" [1, 4), " x" [4, 6), "c</s>" [6, 11), " " [11, 12)."""
    tokenizer = make("<s> $A </s>", trim_offsets)
    (row,) = tokenise_chats(tokenizer, ["xcab xc</s> "], [[(1, 4), (6, 11)]], [Fate.REWRITTEN])
    assert row.input_ids == [X, C, AB, SPACE, X, C, EOS, SPACE]
    assert row.labels == [-100, C, AB, -100, -100, C, EOS, -100]
    assert row.fate == Fate.REWRITTEN


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("text", "span", "trained"),
    [("x </s>x", (0, 2), [X, SPACE]), (" xx", (0, 2), [SPACE, X]), (" ", (0, 1), [SPACE])],
)
def test_white_space_without_offsets_is_trained_where_it_stands(trim_offsets, text, span, trained):
    (row,) = tokenise_chats(make(trim_offsets=trim_offsets), [text], [[span]], [Fate(0)])
    assert [label for label in row.labels if label != -100] == trained
    assert row.labels[: len(trained)] == trained


def test_letters_of_several_tokens_belong_together():
    """é is two bytes, each a token with the offsets of the letter."""
    tokenizer = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (row,) = tokenise_chats(PreTrainedTokenizerFast(tokenizer_object=tokenizer), ["éxéx"], [[(2, 3)]], [Fate(0)])
    assert [label != -100 for label in row.labels] == [False, False, False, True, True, False]


@pytest.mark.parametrize("special", [False, True])
def test_texts_get_the_same_tokens_one_by_one_and_together(monkeypatch, special):
    tokenizer, texts = make("<s> $A", trim_offsets=True), ["xab c", "", "c</s>x cc"]
    found = []
    for threads in (1, 2):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        tokenizer("x" * 9, truncation=True, max_length=4)  # leaves its settings behind
        found.append([(ids, encoding.offsets) for ids, encoding in encoded(tokenizer, texts, special)])
    assert found[0] == found[1]
    assert len(found[0][2][0]) == 5 + special


@pytest.mark.parametrize("around", ["$A", "<s> $A", "<s> $A </s>"])
def test_texts_by_pieces_are_those_of_whole_texts(around):
    tokenizer = make(around)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces, rng = pieces_of(tokenizer), random.Random(0)
    texts = ["".join(rng.choices(["ab", "c", " ", " c", "x", "<s>", "</s>"], k=rng.randint(0, 8))) for _ in range(300)]
    starts = [rng.randint(0, len(text)) for text in texts]
    for given in (starts, None):
        expected = tokenise_texts(tokenizer, texts, given, EOS)
        assert tokenise_texts(tokenizer, texts, given, EOS, pieces) == expected
