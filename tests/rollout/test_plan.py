"""A person can predict how many prompts, completions and steps a run has."""

import pytest

from strop.rollout.plan import BatchPlan, settled_steps


def plan(**sizes) -> BatchPlan:
    """One completion at a time on one process, 8 a step."""
    defaults = {"batch_size": 1, "num_processes": 1, "gradient_accumulation_steps": 8, "num_generations": 8}
    sizes = defaults | sizes
    return BatchPlan(**{"steps_per_generation": sizes["gradient_accumulation_steps"]} | sizes)


def test_a_group_may_be_a_step_of_single_completions():
    assert plan().prompts_per_block == 1


def test_torn_groups_are_refused_with_the_numbers_and_what_would_do():
    with pytest.raises(ValueError, match="num_generations among 3") as told:
        plan(batch_size=3, gradient_accumulation_steps=1, num_generations=4)
    wanted = "3 completions per step; need a multiple of 4; e.g. gradient_accumulation_steps=4 or num_generations=3"
    assert str(told.value).startswith(wanted)
    with pytest.raises(ValueError, match=r"^6 completions per generation; .* of 4; e\.g\. steps_per_generation=2 or n"):
        plan(batch_size=6, gradient_accumulation_steps=8, steps_per_generation=1, num_generations=4)
    with pytest.raises(ValueError, match=r"^1 completion per step; .* e\.g\. gradient_accumulation_steps=2\. "):
        plan(gradient_accumulation_steps=1, num_generations=2)


def test_24_prompts_are_asked_in_two_rounds():
    sizes = plan(batch_size=6, gradient_accumulation_steps=1, steps_per_generation=4, num_generations=2, num_prompts=24)
    assert sizes.completions_per_block == 24
    assert (sizes.prompts_per_block, sizes.blocks_per_epoch) == (12, 2)
    assert sizes.batches_per_epoch == sizes.steps_per_epoch == 8
    again = plan(
        batch_size=6,
        gradient_accumulation_steps=1,
        steps_per_generation=4,
        num_generations=2,
        num_prompts=24,
        num_iterations=2,
    )
    assert again.batches_per_epoch == 16


def test_a_prompt_that_is_left_over_has_a_block_of_its_own():
    sizes = plan(batch_size=6, gradient_accumulation_steps=1, steps_per_generation=4, num_generations=2, num_prompts=25)
    assert sizes.leftover_prompts == 1
    assert sizes.batches_per_epoch == 8 + 1  # 2 completions are one micro-batch, not four
    assert "25 prompts in 3 generations, the last one of 1 prompt, 9 optimizer steps" in str(sizes)


def test_full_blocks_borrow_from_the_next_epoch():
    sizes = plan(batch_size=8, gradient_accumulation_steps=1, num_generations=4, num_prompts=5, full_blocks=True)
    assert (sizes.blocks_per_epoch, sizes.batches_per_epoch, sizes.leftover_prompts) == (3, 3, 0)


def test_ranks_share_a_block():
    sizes = plan(batch_size=4, num_processes=2, gradient_accumulation_steps=2, num_generations=8, num_prompts=4)
    assert (sizes.completions_per_step, sizes.prompts_per_block, sizes.steps_per_epoch) == (16, 2, 2)


def test_on_policy_means_used_up_in_one_step():
    assert plan().is_on_policy
    assert plan(num_generations=4, steps_per_generation=4).is_on_policy
    assert not plan(num_iterations=2).is_on_policy
    assert not plan(steps_per_generation=16).is_on_policy


def test_the_size_of_a_generation_has_two_names():
    assert settled_steps(2, 2, 4, None, None) == 4  # gradient_accumulation_steps
    assert settled_steps(2, 2, 4, None, 8) == 2
    assert settled_steps(2, 2, 4, 3, None) == 3
    assert settled_steps(2, 2, 4, 2, 8) == 2
    with pytest.raises(ValueError, match=r"generation_batch_size=8 and steps_per_generation=3 .* are 12"):
        settled_steps(2, 2, 4, 3, 8)
    with pytest.raises(ValueError, match=r"generation_batch_size=10 is no multiple of the 4 .* e\.g\. 8"):
        settled_steps(2, 2, 4, None, 10)
    with pytest.raises(ValueError, match="steps_per_generation=0"):
        settled_steps(2, 2, 4, 0, None)
