"""Both layouts, token by token."""

import pytest
import torch

from strop.data.collate import (
    Example,
    SupervisedCollator,
    TokenRow,
    as_batch,
    collate,
    flat_labels,
    keep_examples,
    some_rows,
)

PAIR = [TokenRow([11, 12], None), TokenRow([13, 14], [13, 14], parent=0), TokenRow([15], [15], parent=0)]
#  stream of the pair, packed:  11 12 | 13 14 | 15     what predicts 13 and 15 is 12, at index 1


def test_packed_prompt_stands_once():
    batch = collate(PAIR, "packed", pad_token_id=0)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14, 15]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 2]]
    assert batch["targets"].tolist() == [[13, 14], [15, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["predictors"].tolist() == [[1, 2], [1, 0]]
    assert batch["num_tokens"] == 5


def test_padded_prompt_is_repeated():
    batch = collate(PAIR, "padded", pad_token_id=9)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14], [11, 12, 15, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["predictors"].tolist() == [[1, 2], [5, 0]]
    assert batch["num_tokens"] == 7


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_what_losses_read_is_the_same_in_both(layout):
    batch = collate(PAIR, layout, 0)
    ids = batch["input_ids"].flatten()
    mask = batch["completion_mask"].bool()
    assert ids[batch["predictors"]][mask].tolist() == [12, 13, 12]
    assert batch["targets"][mask].tolist() == [13, 14, 15]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_first_token_of_a_root_has_no_loss(layout):
    batch = collate([TokenRow([1, 2, 3], [1, 2, 3]), TokenRow([4, 5], [4, 5])], layout, 0)
    assert batch["completion_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_padding_is_known_by_position_not_by_value(layout):
    """Rows that end in, and contain, the padding token itself: all of it is attended and trained."""
    rows = [[5, 6, 7, 2], [5, 2, 7, 8, 9, 2]]
    batch = collate([TokenRow(ids, ids) for ids in rows], layout, pad_token_id=2)
    assert batch["completion_mask"].tolist() == [[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]
    assert batch["targets"][0].tolist() == [0, 6, 7, 2, 0, 0]
    if layout == "padded":
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]


def test_multiple_of_adds_a_segment_that_no_one_sees():
    batch = collate(PAIR, "packed", pad_token_id=0, multiple_of=8)
    assert batch["input_ids"].shape == (1, 8)
    assert batch["segments"].lengths == (2, 2, 1, 3)
    assert batch["segments"].parents == (-1, 0, 0, -1)
    assert batch["num_tokens"] == 5
    assert collate(PAIR, "padded", 0, multiple_of=8)["input_ids"].shape == (2, 8)


def test_streams_follow_their_tokens():
    rows = [TokenRow([1, 2], [1, 2], streams={"old_logps": [0.0, -0.5]}), TokenRow([3], [3], 0, {"old_logps": [-1.0]})]
    batch = collate(rows, "packed", 0)
    torch.testing.assert_close(batch["old_logps"], torch.tensor([[0.0, -0.5], [-1.0, 0.0]]))


def test_packed_examples_come_apart_into_their_rows():
    #  rows A = 1..5 trained from its third token on, B = 6..8 from its second: labels of a pack of capacity 8
    example = {
        "input_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "labels": [-100, -100, 3, 4, 5, -100, 7, 8],
        "seq_lengths": [5, 3],
    }
    batch = SupervisedCollator(0)([example])
    assert batch["segments"].lengths == (5, 3)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch["completion_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert batch["examples"] == [Example(2, 8)]


def test_masks_stand_in_for_labels_and_intersect():
    example = {"input_ids": [1, 2, 3, 4], "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}
    assert SupervisedCollator(0)([example])["completion_mask"].tolist() == [[0, 1, 0, 1]]


def test_examples_that_do_not_count_lose_their_rows():
    examples = [{"input_ids": [1, 2, 3, 4], "seq_lengths": [2, 2]}, {"input_ids": [5, 6]}]
    batch = SupervisedCollator(0)(examples)
    assert keep_examples(batch, 1)["completion_mask"].tolist() == [[0, 1], [0, 1], [0, 0]]
    assert keep_examples(batch, 1)["num_tokens"] == 4
    assert keep_examples(batch, 0)["completion_mask"].sum() == 0
    assert batch["completion_mask"].sum() == 3


def test_a_foreign_padded_batch_is_read():
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    inputs = {
        "input_ids": ids,
        "labels": torch.tensor([[5, 6, 7], [-100, 9, -100]]),
        "attention_mask": (ids > 0).long(),
    }
    batch = as_batch(inputs | {"token_type_ids": ids})
    assert batch["completion_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]
    assert batch["predictors"].tolist() == [[0, 0, 1], [0, 3, 0]]
    assert batch["num_tokens"] == 5
    assert set(batch["model_kwargs"]) == {"token_type_ids"}


def test_a_foreign_stream_is_cut_where_positions_restart():
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    batch = as_batch({"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1]])})
    assert batch["segments"].lengths == (3, 2)
    assert batch["completion_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]


def test_a_collator_without_labels_is_refused():
    with pytest.raises(ValueError, match=r"gave \['attention_mask', 'input_ids'\].*needs `input_ids` and `labels`"):
        as_batch({"input_ids": torch.ones(1, 1), "attention_mask": torch.ones(1, 1)})


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("packed", [[-100, -100, 13, 14, 15]]), ("padded", [[-100, -100, 13, 14], [-100, -100, 15, -100]])],
)
def test_flat_labels_stand_where_their_token_stands(layout, expected):
    assert flat_labels(collate(PAIR, layout, 0)).tolist() == expected


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("side", [0, 1])
def test_some_rows_are_a_batch_of_their_own(layout, side):
    rows = [
        *[TokenRow([11, 12], None), TokenRow([13, 14], [13, 14], 0, {"ref": [1.0, 2.0]})],
        *[TokenRow([15], [15], 0, {"ref": [3.0]}), TokenRow([21], [21], -1, {"ref": [0.0]})],
        TokenRow([22, 23, 24], [22, 23, 24], -1, {"ref": [4.0, 5.0, 6.0]}),
    ]
    kept = [[row for i, row in enumerate(rows) if i in chosen] for chosen in ((0, 1, 3), (0, 2, 4))][side]
    whole, alone = (collate(part, layout, 0) for part in (rows, kept))
    found = some_rows(whole | {"label": torch.tensor([True, False])}, slice(side, None, 2))
    assert found.pop("label").tolist() == [True, False]
    mask = alone["completion_mask"].bool()
    width = mask.shape[1]
    ids, own_ids = (batch["input_ids"].flatten() for batch in (found, alone))
    assert found["completion_mask"][:, :width].equal(alone["completion_mask"])
    for name in ("targets", "ref"):
        assert found[name][:, :width][mask].equal(alone[name][mask])
    assert ids[found["predictors"][:, :width][mask]].equal(own_ids[alone["predictors"][mask]])
    assert ids[found["ends"]].equal(own_ids[alone["ends"]])
    if layout == "packed":
        assert {name: found[name] for name in ("segments", "rows")} == {n: alone[n] for n in ("segments", "rows")}
        assert found["input_ids"].equal(alone["input_ids"])
        assert found["position_ids"].equal(alone["position_ids"])
