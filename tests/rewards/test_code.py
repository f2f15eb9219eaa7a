"""Programs that pass tests, and those that only look as if they did."""

import json
import pickle
import shutil
from textwrap import indent

import pytest

from strop.rewards import code_reward

ADD = "def add(a, b):\n    return a + b"
ASSERTS = ["assert add(1, 2) == 3", "assert add(0, -1) == -1"]
DOUBLE = "print(2 * int(input()))"
INPUTS = [{"input": "1\n", "output": "2"}, {"input": "5\n", "output": "10 \n\n"}]


@pytest.fixture(scope="module", params=["bwrap", "subprocess"])
def where(request):
    """Options for a backend; no test here does harm."""
    if request.param == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    return {"backend": request.param, "allow_unsafe": request.param == "subprocess", "seconds": 10.0, "workers": 2}


def test_right_and_wrong_programs(where):
    cases = [
        (ADD, ASSERTS, 1),
        (ADD.replace("+", "-"), ASSERTS, 0),
        ("def add(a, b)", ASSERTS, 0),
        (f"Here:\n```python\n{ADD}\n```\nIt adds.", ASSERTS, 1),
        ("1. Code:\n   ```\n" + indent(ADD, "   ") + "\n   ```", ASSERTS, 1),
        (f"```\nprint(1)\n```\nor rather\n```py\n{ADD}\n```", ASSERTS, 1),
        ("I can't.", ASSERTS, 0),
        (DOUBLE, INPUTS, 1),
        ("print(2)", INPUTS, 0),
        (DOUBLE + "\nraise SystemExit(1)", INPUTS, 0),
        (ADD, [], None),
        (ADD, None, None),
        (ADD, json.dumps(ASSERTS), 1),
        (ADD, "assert add(2, 2) == 4", 1),
    ]
    completions = [[{"role": "assistant", "content": program}] for program, _, _ in cases]
    rewards = pickle.loads(pickle.dumps(code_reward(**where)))(completions, tests=[tests for _, tests, _ in cases])
    assert rewards == [reward for _, _, reward in cases]


def test_parts_that_pass_count_if_they_may(where):
    half = "def add(a, b):\n    return 3"
    partial = code_reward("checks", partial_credit=True, **where)
    assert partial([half, "print(2)"], checks=[ASSERTS, INPUTS]) == [0.5, 0.5]
    assert code_reward("checks", **where)([half], checks=[ASSERTS]) == [0]


@pytest.mark.parametrize(
    "trick",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "print('0')\nprint('test 0 passed')",
        "import builtins\nbuiltins.compile = None",
        "class Yes:\n    pass\nimport sys\nfor line in sys.stdin:\n    print(line)",
        "import os\nos.lseek(0, 0, 0)\nword = eval(os.read(0, 9999))[2]\nprint(f'\\n{word} 0\\n{word} 1')",
        "import sys\nword = sys._getframe(1).f_locals['word']\nprint(f'\\n{word} 0\\n{word} 1')",
        "def add(a, b):\n    import sys\n    frame = sys._getframe()\n    while 'word' not in frame.f_locals:\n"
        "        frame = frame.f_back\n    print(f'\\n{frame.f_locals[\"word\"]} 0\\n')",
        "import builtins\nbuiltins.exec = lambda *given: None",
        "import builtins\nmade = compile\nbuiltins.compile = lambda text, *given: made('pass', *given)",
        "import builtins\nbuiltins.enumerate = lambda tests: [(i, 'pass') for i in range(len(tests))]",
    ],
)
def test_ending_early_and_printing_pass_nothing(trick, where):
    assert code_reward(partial_credit=True, **where)([trick], tests=[ASSERTS]) == [0]


def test_a_test_that_hangs_leaves_those_before_it():
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    tests = [*ASSERTS, "while True: pass", "assert True"]
    assert code_reward(partial_credit=True, seconds=1.0)([ADD], tests=[tests]) == [0.5]


@pytest.mark.parametrize("tests", [5, [5], [{"input": "1"}], {"a": 1}, "5"])
def test_what_are_no_tests_is_refused_with_its_row(tests, where):
    with pytest.raises(ValueError, match="tests of row 1 is"):
        code_reward(**where)([ADD, ADD], tests=[ASSERTS, tests])


def test_rows_without_the_column_are_refused(where):
    with pytest.raises(ValueError, match="needs the column 'tests'"):
        code_reward(**where)([ADD])
    with pytest.raises(ValueError, match="workers=0"):
        code_reward(**where | {"workers": 0})
