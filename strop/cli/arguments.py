"""Options of the training commands that belong to no trainer: data, launch, what to print instead of training."""

from dataclasses import dataclass
from typing import Any


@dataclass
class ScriptArguments:
    """Which rows are trained and evaluated on."""

    dataset_name: str | None = None
    """A data set on the hub, a folder, or a .jsonl, .json, .csv or .parquet file."""

    dataset_config: str | None = None
    """Configuration of a data set on the hub that has several."""

    dataset_train_split: str = "train"
    """Split to train on."""

    dataset_test_split: str = "test"
    """Split to evaluate on; read only if eval_strategy asks for evaluation."""

    dataset_columns: dict[str, str] | None = None
    """New names of columns, e.g. {"question": "prompt", "answer": "completion"}."""

    dataset_as_chat: bool = False
    """Take plain prompts and completions (or pairs of them) for what a user asks and an assistant answers, so that the
    model's chat template renders them."""

    dataset_streaming: bool = False
    """Read rows while training instead of preparing them all before; needs max_steps."""

    ignore_bias_buffers: bool = False
    """Leave buffers of type bool out of the exchange between processes, which some models need."""


@dataclass
class ReferenceModelArguments:
    """The policy that training is compared with."""

    ref_model_name_or_path: str | None = None
    """Model to take for the reference: a hub id or a folder. Not set, it is the model as it is before training."""

    def trainer_arguments(self) -> dict[str, Any]:
        return {"ref_model": self.ref_model_name_or_path}


@dataclass
class ValueModelArguments:
    """What expects rewards."""

    value_model_name_or_path: str | None = None
    """Model that estimates values, a hub id or a folder, e.g. the value_model of an earlier run. Not set, see
    value_function."""

    def trainer_arguments(self) -> dict[str, Any]:
        return {"value_model": self.value_model_name_or_path}


@dataclass
class RewardFunctionArguments:
    """What completions are worth."""

    reward_funcs: list[str] | None = None
    """Reward functions by name: accuracy, reasoning_accuracy, think_format, one with options like
    "cosine_scaled(max_len=256)", the import path of one of yours (my_rewards.short), or a reward model."""

    reward_model_name_or_path: str | None = None
    """Reward model whose scores are a reward too: a hub id or a folder."""

    @property
    def names(self) -> list[str]:
        model = self.reward_model_name_or_path
        return [*(self.reward_funcs or []), *([model] if model else [])]

    def check(self, reward_model: str | None = None) -> None:
        """Raise ValueError where no reward is named, here or as the trainer's `reward_model`, or a name that there
        isn't."""
        from strop.rewards.resolve import CHOICES, resolve_reward

        if not self.names and not reward_model:
            raise ValueError(f"there is nothing to learn without a reward; name one with --reward_funcs: {CHOICES}.")
        for name in self.reward_funcs or []:
            if "/" not in name:
                resolve_reward(name)

    def trainer_arguments(self) -> dict[str, Any]:
        from strop.rewards.resolve import resolve_reward

        return {"reward_funcs": [resolve_reward(name) for name in self.names]}


@dataclass
class JudgeArguments(RewardFunctionArguments):
    """What completions are worth, or who compares them."""

    judge: str | None = None
    """Chat model that compares completions, in the place of rewards: its name at the endpoint judge_url."""

    judge_url: str = "https://api.openai.com/v1"
    """OpenAI-compatible endpoint of the judge."""

    judge_rubric: str | None = None
    """What the judge goes by; how correct, helpful and clear an answer is if not set."""

    def check(self, reward_model: str | None = None) -> None:
        """As for rewards, of which there are none beside a judge."""
        if self.judge is None:
            if self.judge_rubric is not None:
                raise ValueError(f"judge_rubric={self.judge_rubric!r} has no effect without a judge; set judge.")
            super().check(reward_model)

    def trainer_arguments(self) -> dict[str, Any]:
        if self.judge is None:
            return super().trainer_arguments()
        from strop.rewards.judges import QUALITY, PairwiseJudge

        judge = PairwiseJudge(self.judge, self.judge_url, self.judge_rubric or QUALITY)
        return {**super().trainer_arguments(), "judge": judge}


@dataclass
class LaunchArguments:
    """How many processes run, and on what. With any of these `accelerate launch` starts the command."""

    accelerate_config: str | None = None
    """A shipped configuration (single_gpu, multi_gpu, fsdp1, fsdp2, deepspeed_zero1, deepspeed_zero2, deepspeed_zero3)
    or the path of one written by `accelerate config`."""

    num_processes: int | None = None
    """Processes in all, one a GPU."""

    num_machines: int | None = None
    """Machines in all."""

    machine_rank: int | None = None
    """This machine's number, from 0."""

    main_process_ip: str | None = None
    """Address of machine 0."""

    main_process_port: int | None = None
    """Port that the processes meet at."""

    gpu_ids: str | None = None
    """GPUs to use on this machine, e.g. "0,2"."""


@dataclass
class CommandArguments:
    """What the command does."""

    config: str | None = None
    """YAML file with the same names as these options. The command line wins over it, and it over the defaults."""

    dump_config: bool = False
    """Print every value that would be used and where it was said, and stop."""

    dry_run: bool = False
    """Print what would run, and stop."""
