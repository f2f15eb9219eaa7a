"""Segments of a stream, by hand."""

import pytest

from strop.models.segments import Segments

EXAMPLE = Segments((3, 2, 1, 2), (-1, 0, 0, -1))
"""P P P A A B C C, where A A and B continue P P P."""
CHAIN = Segments((2, 1, 3, 1), (-1, 0, 1, 1))


def test_the_example_of_the_docstring():
    assert EXAMPLE.starts == (0, 3, 5, 6)
    assert EXAMPLE.depths == (0, 3, 3, 0)
    assert EXAMPLE.num_tokens == 8
    assert EXAMPLE.position_ids().tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert EXAMPLE.predecessors().tolist() == [-1, 0, 1, 2, 3, 2, -1, 6]


def test_two_levels():
    """The second level's segments stand after 2 + 1 tokens; both follow the token of the segment between."""
    assert CHAIN.depths == (0, 2, 3, 3)
    assert CHAIN.ancestors(3) == (0, 1)
    assert CHAIN.ancestors(0) == ()
    assert CHAIN.position_ids().tolist() == [[0, 1, 2, 3, 4, 5, 3]]
    assert CHAIN.predecessors().tolist() == [-1, 0, 1, 2, 3, 4, 2]
    assert CHAIN.span(2) == slice(3, 6)


def test_flat_or_not():
    assert Segments((1, 2), (-1, -1)).is_flat
    assert not EXAMPLE.is_flat


def test_equal_segments_share_what_is_worked_out_for_them():
    assert hash(Segments((3, 1), (-1, 0))) == hash(Segments((3, 1), (-1, 0)))
    assert Segments((3, 1), (-1, 0)) != Segments((3, 1), (-1, -1))


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((3, 2), (-1,), "2 segment lengths but 1 parents"),
        ((3, 0), (-1, -1), "segment 1 has 0 tokens"),
        ((3, 2), (1, -1), "segment 0 names segment 1 as its parent"),
        ((3, 2), (-1, -2), "segment 1 names segment -2"),
    ],
)
def test_what_is_no_stream_is_refused(lengths, parents, message):
    with pytest.raises(ValueError, match=message):
        Segments(lengths, parents)
