"""Right answers: TRL's numbers, in any thread, and bounded in time."""

import json
import pickle
import threading
from pathlib import Path

import pytest

from strop.rewards import accuracy_reward, get_cosine_scaled_reward, math_process, reasoning_accuracy_reward

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "rewards.json").read_text())
CASES = GOLDEN["accuracy_reward"]


def judged():
    extra = {}
    completions = [[{"role": "assistant", "content": case["completion"]}] for case in CASES]
    rewards = accuracy_reward(completions, [case["solution"] for case in CASES], log_extra=extra.__setitem__)
    return rewards, extra


def test_answers_are_read_and_judged_as_in_trl():
    rewards, extra = judged()
    assert rewards == [case["reward"] for case in CASES]
    assert extra["gold_parsed"] == [case["gold_parsed"] for case in CASES]
    assert extra["answer_parsed"] == [case["answer_parsed"] for case in CASES]
    assert extra["solution"] == [case["solution"] for case in CASES]


def test_the_same_in_another_thread_and_for_plain_texts():
    found = []
    texts = [case["completion"] for case in CASES]
    thread = threading.Thread(target=lambda: found.extend(accuracy_reward(texts, [case["solution"] for case in CASES])))
    thread.start()
    thread.join()
    assert found == [case["reward"] for case in CASES]


@pytest.mark.parametrize("case", GOLDEN["reasoning_accuracy_reward"])
def test_answers_behind_the_reasoning(case):
    """One case is ours: a reasoning without an end is wrong whatever the solution."""
    found = reasoning_accuracy_reward([case["completion"]], [case["solution"]], case["reasoning_delimiters"])
    assert found == [case["reward"]]


@pytest.mark.parametrize("case", GOLDEN["cosine_scaled_reward"])
def test_rewards_that_go_with_the_length(case):
    reward = pickle.loads(pickle.dumps(get_cosine_scaled_reward(case["max_len"])))
    found = reward([case["completion"]], solution=[case["solution"]], completion_ids=[[0] * case["length"]])
    assert found == [None] if case["reward"] is None else found == pytest.approx([case["reward"]], abs=1e-12)


def test_the_cosine_on_paper():
    """A third of the way the cosine of 60 degrees is 1/2: three quarters of the short value and one of the long."""
    reward = get_cosine_scaled_reward(
        9, min_value_wrong=-8, max_value_wrong=-4, min_value_correct=4, max_value_correct=8
    )
    assert reward.scaled(True, 3) == pytest.approx(0.75 * 8 + 0.25 * 4)
    assert reward.scaled(False, 3) == pytest.approx(0.75 * -8 + 0.25 * -4)
    assert reward.scaled(True, 90) == 4


@pytest.mark.parametrize(
    ("solution", "answer", "verdict"),
    [
        ("5", r"\boxed{9^{9^{9^9}}}", 0.0),
        (r"$\frac{1}{2}$", r"\boxed{1000000000!}", 0.0),
    ],
)
def test_an_answer_that_takes_for_ever_is_wrong(solution, answer, verdict):
    found = math_process.verdicts([(solution, answer), ("5", r"\boxed{5}")], seconds=1)
    assert [result.reward for result in found] == [verdict, 1.0]


def test_a_process_that_hangs_or_dies_is_replaced(monkeypatch):
    """The time that it may take is taken away from it, so that it counts as hanging; the answer after it is judged."""
    assert accuracy_reward([r"\boxed{5}"], ["5"]) == [1.0]
    process = math_process._PROCESS.process
    monkeypatch.setattr(math_process._PROCESS, "reply", lambda seconds: math_process._PROCESS.close())
    assert accuracy_reward([r"\boxed{5}"], ["5"]) == [None]
    monkeypatch.undo()
    assert process.poll() is not None
    assert accuracy_reward([r"\boxed{5}"], ["5"]) == [1.0]
    math_process._PROCESS.process.kill()
    math_process._PROCESS.process.wait()
    assert accuracy_reward([r"\boxed{5}"], ["5"]) == [1.0]


def test_without_math_verify_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(math_process.importlib.util, "find_spec", lambda name: None)
    for reward in (accuracy_reward, reasoning_accuracy_reward, get_cosine_scaled_reward(10)):
        with pytest.raises(ValueError, match=r"pip install strop\[rewards\]"):
            reward.check()


def test_each_completion_needs_its_solution():
    with pytest.raises(ValueError, match="2 completions but 1 solutions"):
        accuracy_reward(["4", "5"], ["4"])
    with pytest.raises(ValueError, match="max_len=0"):
        get_cosine_scaled_reward(0)
