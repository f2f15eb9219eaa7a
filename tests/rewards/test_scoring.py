"""Reward functions side by side: totals, time, failures, what they log."""

import asyncio
import logging
import math
import threading
from functools import partial

import pytest
import torch

from strop.rewards.scoring import RewardFunctions

FOUR = {"prompts": ["p"] * 4, "completions": ["a", "bb", "ccc", "dddd"]}
NAN = math.nan


def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


async def async_lengths(completions, **kwargs):
    return lengths(completions)


def test_rows_to_which_nothing_applies_have_no_total():
    """The example of None: f = [1, 0, -, -], g = [-, -, 2, -] give 1, 0, 2 and nothing."""

    def f(completions):
        return [1, 0, None, None]

    def g(completions):
        return [None, None, 2, None]

    functions = RewardFunctions([f, g], weights=[1, 2])
    scores = functions.score(**FOUR)
    torch.testing.assert_close(scores.values, torch.tensor([[1, NAN], [0, NAN], [NAN, 2], [NAN, NAN]]), equal_nan=True)
    torch.testing.assert_close(scores.total(functions.weights), torch.tensor([1, 0, 4, NAN]), equal_nan=True)
    assert scores.covered.tolist() == [True, True, True, False]
    assert scores.names == ["f", "g"]
    assert scores.seconds.keys() == {"f", "g"}


def test_functions_see_columns_but_not_the_prompt_and_completion_columns():
    seen = {}

    def spy(**kwargs):
        seen.update(kwargs)
        return [0] * 4

    columns = {"answer": list("wxyz"), "prompt": list("0000"), "completion": list("1111"), "completion_ids": [[0]] * 4}
    RewardFunctions(spy).score(**FOUR, completion_ids=[[1], [2], [3], [4]], columns=columns, trainer_state="state")
    assert seen.keys() == {
        *("prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric")
    }
    assert seen["completion_ids"] == [[1], [2], [3], [4]]
    assert seen["answer"] == list("wxyz")
    assert seen["trainer_state"] == "state"


@pytest.mark.parametrize("name", ["prompts", "completions", "trainer_state", "log_extra", "log_metric"])
def test_a_column_of_a_name_that_means_something_else_is_refused(name):
    with pytest.raises(ValueError, match=f"column '{name}' has the name of something else"):
        RewardFunctions(lengths).score(**FOUR, columns={name: [1] * 4})


def test_equal_names_get_numbers():
    assert RewardFunctions([lambda completions: [1] * 4] * 2).score(**FOUR).names == ["<lambda>", "<lambda>_2"]


def test_asynchronous_functions_wait_together():
    """Each ends only once the other has begun."""
    begun = [asyncio.Event(), asyncio.Event()]

    async def first(completions):
        begun[0].set()
        await asyncio.wait_for(begun[1].wait(), 10)
        return [1] * 4

    async def second(completions):
        begun[1].set()
        await asyncio.wait_for(begun[0].wait(), 10)
        return [2] * 4

    assert RewardFunctions([first, second]).score(**FOUR).values[0].tolist() == [1, 2]


def test_workers_run_functions_side_by_side_and_without_them_each_has_the_callers_thread():
    barrier = threading.Barrier(2)

    def meeting(completions):
        barrier.wait(10)
        return [1] * 4

    assert RewardFunctions([meeting, meeting], workers=2).score(**FOUR).values.sum() == 8
    thread = threading.current_thread()
    assert RewardFunctions(lambda completions: [threading.current_thread() is thread] * 4).score(**FOUR).values.all()


def stuck_on_bb(completions):
    while "bb" in completions:
        pass
    return lengths(completions)


async def async_stuck_on_bb(completions):
    while "bb" in completions:
        await asyncio.sleep(0.01)
    return lengths(completions)


@pytest.mark.parametrize("function", [stuck_on_bb, async_stuck_on_bb])
def test_a_row_that_takes_too_long_does_not_apply_and_is_named(function, caplog):
    caplog.set_level(logging.WARNING, "strop")
    scores = RewardFunctions([function, lengths], timeout=0.3).score(**FOUR)
    torch.testing.assert_close(scores.values[:, 0], torch.tensor([1, NAN, 3, 4]), equal_nan=True)
    assert scores.values[:, 1].tolist() == [1, 2, 3, 4]
    assert f"{function.__name__} took longer than 0.3 s" in caplog.text
    assert "no answer for 1 of 4 rows (1)" in caplog.text


def test_a_function_that_is_stuck_is_stopped():
    before = threading.active_count()
    RewardFunctions(stuck_on_bb, timeout=0.1).score(**FOUR)
    for thread in threading.enumerate():
        if "(run)" in thread.name:
            thread.join(10)
    assert threading.active_count() <= before + 1  # the pool's own thread


def test_an_asynchronous_function_that_blocks_the_loop_is_named():
    release = threading.Event()

    async def blocking(completions):
        release.wait(30)
        return [1] * 4

    with pytest.raises(ValueError, match=r"blocking could not be stopped after .* something blocks the event loop"):
        RewardFunctions(blocking, timeout=0.01).score(**FOUR)
    release.set()


def fails_on_ccc(completions, **kwargs):
    if "ccc" in completions:
        raise KeyError("no such thing")
    return lengths(completions)


async def async_fails_on_ccc(completions, **kwargs):
    return fails_on_ccc(completions)


@pytest.mark.parametrize("function", [fails_on_ccc, async_fails_on_ccc])
@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"timeout": 20}])
def test_an_exception_names_function_and_row_and_keeps_its_traceback(function, options):
    with pytest.raises(ValueError, match=rf"{function.__name__} failed on row 2 \('ccc'\): KeyError") as caught:
        RewardFunctions([lengths, function], **options).score(**FOUR)
    assert isinstance(caught.value.__cause__, KeyError)
    assert any(
        entry.name == "fails_on_ccc" for entry in pytest.ExceptionInfo.from_exception(caught.value.__cause__).traceback
    )


async def async_waits_for_ever(completions):
    await asyncio.Event().wait()


def waits(release, completions):
    release.wait(30)
    return [0] * 4


def test_a_failure_does_not_wait_for_what_hangs():
    with pytest.raises(ValueError, match="fails_on_ccc failed on row 2"):
        RewardFunctions([async_waits_for_ever, async_fails_on_ccc]).score(**FOUR)
    release = threading.Event()
    with pytest.raises(ValueError, match="fails_on_ccc failed on row 2"):
        RewardFunctions([partial(waits, release), fails_on_ccc], workers=2).score(**FOUR)
    release.set()


def test_a_function_that_is_cancelled_from_inside_is_named():
    async def gives_up(completions):
        raise asyncio.CancelledError

    for timeout in (None, 5):
        with pytest.raises(ValueError, match=r"gives_up failed .* cancelled, but not by its timeout"):
            RewardFunctions(gives_up, timeout=timeout).score(**FOUR)


def test_a_function_that_ends_the_program_fails():
    def leaves(completions):
        raise SystemExit(3)

    async def async_leaves(completions):
        raise SystemExit(3)

    for function in (leaves, async_leaves, async_leaves):
        for timeout in (None, 5):
            with pytest.raises(ValueError, match=r"leaves failed on row 0 .*SystemExit: 3"):
                RewardFunctions(function, timeout=timeout).score(**FOUR)


def test_what_a_function_does_to_its_lists_is_not_seen_by_others():
    def spoils(completions, answer, **kwargs):
        completions.clear()
        answer[0] = None
        return [0] * 4

    def reads(completions, answer):
        return [float(completion == text) for completion, text in zip(completions, answer, strict=True)]

    scores = RewardFunctions([spoils, reads]).score(**FOUR, columns={"answer": FOUR["completions"]})
    assert scores.values[:, 1].tolist() == [1] * 4


def test_an_exception_that_is_no_single_rows_says_so():
    def compares(completions):
        """Alone a row fails otherwise, which explains nothing."""
        if len(completions[0]) != len(completions[1]):
            raise KeyError("not the same length")

    def counts(completions):
        assert len(completions) < 4, "too many"
        return lengths(completions)

    with pytest.raises(ValueError, match=r"compares failed on 4 rows, but on no single one .* same length"):
        RewardFunctions(compares).score(**FOUR)
    with pytest.raises(ValueError, match=r"counts failed on 4 rows, but on no single one .* too many"):
        RewardFunctions(counts).score(**FOUR)


def test_generators_fail_as_functions_do():
    def generator(completions):
        for completion in completions:
            yield 1 / (len(completion) - 2)

    with pytest.raises(ValueError, match=r"generator failed on row 1 .*ZeroDivisionError"):
        RewardFunctions(generator).score(**FOUR)


def test_what_functions_log_is_kept_and_checked():
    def logs(completions, log_extra, log_metric):
        log_extra("seen", (completion.upper() for completion in completions))
        log_metric("mean", 2)
        log_metric("mean", torch.tensor(3.0))
        return [0] * 4

    scores = RewardFunctions([logs]).score(**FOUR)
    assert scores.columns == {"seen": ["A", "BB", "CCC", "DDDD"]}
    assert scores.metrics == {"mean": [2.0, 3.0]}

    def wrong(completions, log_extra):
        log_extra("seen", ["one"])
        return [0] * 4

    with pytest.raises(ValueError, match=r"wrong failed .* log_extra\('seen'\) got 1 values for 4 completions"):
        RewardFunctions([wrong]).score(**FOUR)


def test_a_row_is_searched_without_logging_twice():
    def logs(completions, log_metric):
        log_metric("calls", len(completions))
        assert "bb" not in completions
        return [0]

    functions = RewardFunctions([logs])
    with pytest.raises(ValueError, match="row 1"):
        functions.score(**FOUR)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "there is no reward function"),
        ((lengths, [1, 2]), r"2 weights for 1 reward functions \(lengths\)"),
        ((lengths, [math.inf]), "must be finite"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RewardFunctions(*arguments)
    with pytest.raises(ValueError, match="workers=-1"):
        RewardFunctions(lengths, workers=-1)
    with pytest.raises(ValueError, match="timeout=0"):
        RewardFunctions(lengths, timeout=0)


def test_names_count_as_functions():
    functions = RewardFunctions("think_format")
    assert functions.names == ["think_format_reward"]
    assert functions.score(["p"], ["<think></think>"]).values.tolist() == [[1.0]]
    with pytest.raises(ValueError, match="Choices: accuracy"):
        RewardFunctions("thnk")


def test_a_tokenizer_needs_its_reward_model():
    with pytest.raises(ValueError, match="which is no reward model; its place must hold None"):
        RewardFunctions([lengths], tokenizers=object())
    with pytest.raises(ValueError, match="1 tokenizers for 2 reward functions"):
        RewardFunctions([lengths, lengths], tokenizers=[None])


def test_rows_of_different_number_are_refused_and_none_are_scored():
    with pytest.raises(ValueError, match="there are 4 completions but 1 answer"):
        RewardFunctions(lengths).score(**FOUR, columns={"answer": ["a"]})
    assert RewardFunctions(lengths).score([], []).values.shape == (0, 1)
