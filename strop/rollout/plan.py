"""How many prompts, completions and optimizer steps a round of generation has.

    block            what is generated at once: batch_size x processes x steps_per_generation completions
    micro-batch      batch_size of them on each process
    optimizer step   gradient_accumulation_steps micro-batches

A block is trained `num_iterations` times. Its prompts come num_generations times each. The last block of an epoch has
the prompts that are left, so that every prompt is used once an epoch; it may have fewer micro-batches.
"""

from dataclasses import dataclass

STRIDE = 12
"""Choices that an error lists at most."""


@dataclass(frozen=True)
class BatchPlan:
    """The sizes of a run. Raises ValueError where a block is no whole number of groups, with choices that are."""

    batch_size: int
    """Completions that a process trains at a time (per_device_train_batch_size)."""
    num_processes: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    """Micro-batches in a block."""
    num_generations: int
    """Completions a prompt: a group."""
    num_iterations: int = 1
    num_prompts: int | None = None
    """Rows of the data set; None for a stream."""
    full_blocks: bool = False
    """Fill a block with prompts of the next epoch where this one has too few, instead of a smaller block."""

    def __post_init__(self):
        if self.completions_per_block % self.num_generations:
            raise ValueError(self._no_whole_groups())

    @property
    def completions_per_batch(self) -> int:
        """In a micro-batch of all processes."""
        return self.batch_size * self.num_processes

    @property
    def completions_per_block(self) -> int:
        return self.completions_per_batch * self.steps_per_generation

    @property
    def completions_per_step(self) -> int:
        """In an optimizer step."""
        return self.completions_per_batch * self.gradient_accumulation_steps

    @property
    def prompts_per_block(self) -> int:
        return self.completions_per_block // self.num_generations

    def batches(self, num_prompts: int) -> int:
        """Micro-batches in which a block of `num_prompts` is trained once."""
        return -(-num_prompts * self.num_generations // self.completions_per_batch)

    @property
    def blocks_per_epoch(self) -> int | None:
        return None if self.num_prompts is None else -(-self.num_prompts // self.prompts_per_block)

    @property
    def leftover_prompts(self) -> int:
        """Prompts of an epoch's last block, if that is smaller; else 0."""
        return 0 if self.num_prompts is None or self.full_blocks else self.num_prompts % self.prompts_per_block

    @property
    def batches_per_epoch(self) -> int | None:
        """Micro-batches, all iterations counted."""
        if self.num_prompts is None:
            return None
        if self.full_blocks:
            blocks = -(-self.num_prompts // self.prompts_per_block)
            return blocks * self.steps_per_generation * self.num_iterations
        full = self.num_prompts // self.prompts_per_block * self.steps_per_generation
        return (full + self.batches(self.leftover_prompts)) * self.num_iterations

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps."""
        batches = self.batches_per_epoch
        return None if batches is None else -(-batches // self.gradient_accumulation_steps)

    @property
    def is_on_policy(self) -> bool:
        """Whether a block is used up in the optimizer step it was generated for."""
        return self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0

    def __str__(self) -> str:
        uses = "once" if self.num_iterations == 1 else f"{self.num_iterations} times"
        lines = [
            f"one generation: {_count(self.prompts_per_block, 'prompt')} x {self.num_generations} = "
            f"{_count(self.completions_per_block, 'completion')} ({self.batch_size} a device x {self.num_processes} "
            f"processes x {self.steps_per_generation} steps_per_generation), trained {uses}",
            f"one optimizer step: {_count(self.completions_per_step, 'completion')} ({self.batch_size} a device x "
            f"{self.num_processes} processes x {self.gradient_accumulation_steps} gradient_accumulation_steps)",
        ]
        if self.num_prompts is None:
            return "\n".join([*lines, "one epoch: as many prompts as the stream gives"])
        left = f", the last one of {_count(self.leftover_prompts, 'prompt')}" if self.leftover_prompts else ""
        return "\n".join(
            [
                *lines,
                f"one epoch: {_count(self.num_prompts, 'prompt')} in {_count(self.blocks_per_epoch, 'generation')}"
                f"{left}, {_count(self.steps_per_epoch, 'optimizer step')}",
            ]
        )

    def _no_whole_groups(self) -> str:
        block, group, each = self.completions_per_block, self.num_generations, self.completions_per_batch
        divisors = [n for n in range(2, block + 1) if block % n == 0]
        shown = ", ".join(map(str, divisors[:STRIDE])) or "none above 1"
        follows = self.steps_per_generation == self.gradient_accumulation_steps
        name, unit = ("gradient_accumulation_steps", "step") if follows else ("steps_per_generation", "generation")
        steps = next(
            n for n in range(self.steps_per_generation, self.steps_per_generation + group) if n * each % group == 0
        )
        fitting = max((n for n in divisors if n <= group), default=None)
        other = "" if fitting is None else f" or num_generations={fitting}"
        return (
            f"{_count(block, 'completion')} per {unit}; need a multiple of {group}; e.g. {name}={steps}{other}. "
            f"num_generations={group} completions of a prompt are compared with each other, so a group can't be torn "
            f"apart, and {self.batch_size} per_device_train_batch_size x {self.num_processes} processes x "
            f"{self.steps_per_generation} {name} are what is generated at a time. It is a whole number of groups with "
            f"num_generations among {shown}."
        )


def settled_steps(
    batch_size: int, num_processes: int, accumulation: int, steps: int | None, generation_batch_size: int | None
) -> int:
    """steps_per_generation, from itself or from generation_batch_size; gradient_accumulation_steps if neither is set.

    Raises ValueError for two that contradict each other, and for a generation batch that is no whole number of
    micro-batches.
    """
    each = batch_size * num_processes
    if generation_batch_size is None:
        steps = accumulation if steps is None else steps
        if steps < 1:
            raise ValueError(f"steps_per_generation={steps} is out of range; a generation has 1 micro-batch at least.")
        return steps
    if steps is not None and steps * each != generation_batch_size:
        raise ValueError(
            f"generation_batch_size={generation_batch_size} and steps_per_generation={steps} contradict each other: "
            f"{steps} x {each} completions ({batch_size} a device x {num_processes} processes) are {steps * each}. "
            "Set one of them."
        )
    if generation_batch_size < 1 or generation_batch_size % each:
        near = max(round(generation_batch_size / each), 1) * each
        raise ValueError(
            f"generation_batch_size={generation_batch_size} is no multiple of the {each} completions of a micro-batch "
            f"(per_device_train_batch_size={batch_size} x {num_processes} processes); e.g. {near}."
        )
    return generation_batch_size // each


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
