"""What follows from other options is told from what was given."""

import copy
import json
import pickle
from dataclasses import dataclass, replace

import pytest

from strop.trainer.settled import as_given, plain, settled, told


@dataclass
class Sizes:
    """`total` follows from the others unless it is given."""

    width: int = 2
    height: float = 3.0
    total: float | None = None

    def __post_init__(self):
        as_given(self)
        if self.total is None:
            self.total = settled(self.width * self.height)


def test_a_replaced_config_settles_anew():
    sizes = Sizes()
    assert sizes.total == 6
    assert replace(sizes, width=4).total == 12
    assert replace(replace(sizes, total=5.0), width=4).total == 5
    assert replace(replace(sizes, total=5.0), total=None).total == 6


@pytest.mark.parametrize("value", [3, 0.5])
def test_a_marked_number_is_a_number(value):
    marked = settled(value, given=-1)
    assert marked == value
    assert told(marked) == -1
    assert isinstance(marked, type(value))
    assert type(plain(marked)) is type(value)
    assert json.dumps(marked) == str(marked) == str(value)
    for other in (copy.deepcopy(marked), pickle.loads(pickle.dumps(marked))):
        assert told(other) == -1


@pytest.mark.parametrize("value", [None, True, "auto"])
def test_what_is_no_number_has_no_mark(value):
    assert settled(value) is value
    assert told(value) is value
    assert plain(value) is value
