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
    """Warns, once each: when `patience` logs in a row show rollouts that are cut off and teach nothing, with
    `stop_on_dead_run` ending the run with a checkpoint, and when a correction for another sampler leaves out most."""

    def __init__(self, patience: int = 3):
        self.patience = patience
        self.dead = 0
        """Logs in a row with nine of ten completions cut off at least, and no difference in reward; or all cut off,
        where those aren't trained."""
        self.has_masked = False
        """Whether most completions, or tokens, were seen to be left out."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs:
            return
        self._look_at_masks(args, state, logs.get("sampling/masked_ratio", 0.0))
        cut_off = logs.get("completions/clipped_ratio")
        if cut_off is None:
            return
        is_masked = args.mask_truncated_completions and cut_off == 1
        self.dead = self.dead + 1 if is_masked or (cut_off >= 0.9 and not logs.get("reward_std")) else 0
        if self.dead != self.patience:
            return
        if args.stop_on_dead_run:
            control.should_training_stop = control.should_save = True
        if state.is_world_process_zero:
            logger.warning(
                "step %d: in %d logs in a row completions/clipped_ratio was %.2g and %s: almost every completion is "
                "cut off before its end and %s, so nothing is learnt. Raise max_completion_length (%d), or ask for "
                "shorter answers.%s",
                state.global_step, self.patience, cut_off,
                "mask_truncated_completions is on" if is_masked else "reward_std 0",
                "left out" if is_masked else "earns the same", args.max_completion_length,
                " The run ends here, with a checkpoint, as stop_on_dead_run=True" if args.stop_on_dead_run else "",
            )  # fmt: skip

    def _look_at_masks(self, args, state, masked: float) -> None:
        if self.has_masked or masked < 0.5 or not state.is_world_process_zero:
            return
        self.has_masked = True
        logger.warning(
            "step %d: vllm_importance_sampling_mode=%r leaves out %.0f %% of the completions (or tokens), to which the "
            "sampler gave other probabilities than the model in training. Small differences add up: 300 tokens of "
            "0.01 nats are a ratio of 20. Take \"token_truncate\", or raise vllm_importance_sampling_clip_max (%s); "
            "see sampling/sampling_logp_difference",
            state.global_step, args.vllm_importance_sampling_mode, 100 * masked, args.vllm_importance_sampling_clip_max,
        )  # fmt: skip
