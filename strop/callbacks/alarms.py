"""What a run's log gives away before its user sees it."""

import logging

from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class PreferenceAlarm(TrainerCallback):
    """Warns, once each, when `patience` logs in a row show a run that has nothing to learn, or nothing left."""

    def __init__(self, patience: int = 5):
        self.patience = patience
        self.idle = 0
        """Logs in a row with margins of exactly 0."""
        self.saturated = 0
        """Logs in a row with accuracy 1, where pairs have one, and a loss below 1e-3."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs or "rewards/margins" not in logs:
            return
        self.idle = self.idle + 1 if logs["rewards/margins"] == 0 and logs.get("learning_rate") != 0 else 0
        is_saturated = logs.get("rewards/accuracies") == 1 and logs["loss"] < 1e-3
        self.saturated = self.saturated + 1 if is_saturated else 0
        if not state.is_world_process_zero:
            return
        if self.idle == self.patience:
            logger.warning(
                "step %d: rewards/margins were exactly 0 in %d logs in a row: the policy is still its reference. Look "
                "whether good and bad completions differ (strop inspect), whether any weight is trained, whether the "
                "learning rate (%g) is too small for the dtype, and whether ref_model is a model of its own",
                state.global_step, self.patience, args.learning_rate,
            )  # fmt: skip
        if self.saturated == self.patience:
            logger.warning(
                "step %d: accuracy 1 and a loss below 1e-3 in %d logs in a row: nothing is left to learn from these "
                "pairs, and likelihoods go on falling. Stop here, or raise beta (%g), lower learning_rate, or look "
                "for what gives the rejected away (length, markup, a truncated end)",
                state.global_step, self.patience, args.beta,
            )  # fmt: skip


class RolloutAlarm(TrainerCallback):
    """Warns, once, when `patience` logs in a row show rollouts that are cut off and all worth the same."""

    def __init__(self, patience: int = 3):
        self.patience = patience
        self.dead = 0
        """Logs in a row with nine of ten completions cut off at least, and no difference in reward."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs or "completions/clipped_ratio" not in logs:
            return
        is_dead = logs["completions/clipped_ratio"] >= 0.9 and not logs.get("reward_std")
        self.dead = self.dead + 1 if is_dead else 0
        if self.dead == self.patience and state.is_world_process_zero:
            logger.warning(
                "step %d: in %d logs in a row completions/clipped_ratio was %.2g and reward_std 0: almost every "
                "completion is cut off before its end and earns the same, so nothing is learnt. Raise "
                "max_completion_length (%d), or ask for shorter answers",
                state.global_step, self.patience, logs["completions/clipped_ratio"], args.max_completion_length,
            )  # fmt: skip
