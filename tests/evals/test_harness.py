"""Tasks of lm-eval, here a module of that name that answers as the package does."""

import sys
import types

import pytest

from strop.evals import harness
from strop.evals.evaluate import evaluate
from strop.evals.statistics import Total, proportion, sign_test


class Calls(list):
    """What the module was asked, and what it says."""

    def __init__(self):
        super().__init__()
        self.answers = {}

    def simple_evaluate(self, **asked):
        self.append(asked)
        correct = self.answers[id(asked["model"].pretrained)]
        if asked["tasks"] == ["unknown"]:
            raise KeyError("unknown")
        mean = sum(correct) / len(correct)
        results = {
            "alias": "sums",
            "acc,none": mean,
            "acc_stderr,none": 0.1,
            "size,strict": 7.0,
            "size_stderr,strict": 1.0,
        }
        samples = [{"doc_id": i, "filter": "none", "acc": value} for i, value in enumerate(correct)]
        return {"results": {"sums": results}, "samples": {"sums": samples}, "n-samples": {"sums": {"effective": 4}}}


@pytest.fixture
def lm_eval(monkeypatch):
    calls = Calls()

    class HFLM:
        def __init__(self, pretrained, tokenizer, batch_size):
            self.pretrained, self.tokenizer, self.batch_size = pretrained, tokenizer, batch_size

    modules = {name: types.ModuleType(name) for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface")}
    modules["lm_eval"].simple_evaluate = calls.simple_evaluate
    modules["lm_eval"].__spec__ = object()
    modules["lm_eval.models.huggingface"].HFLM = HFLM
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_a_task_is_run_on_the_model_as_it_is(lm_eval, tiny_llama, bpe_tokenizer):
    lm_eval.answers[id(tiny_llama)] = [1.0, 0.0, 1.0, 1.0]
    found = evaluate(tiny_llama, tokenizer=bpe_tokenizer, tasks=["sums"], num_fewshot=2, limit=4)
    (asked,) = lm_eval
    assert (asked["tasks"], asked["num_fewshot"], asked["limit"]) == (["sums"], 2, 4)
    assert asked["apply_chat_template"]
    accuracy = found["sums/acc"]
    assert (accuracy.value, accuracy.model.num_prompts) == (0.75, 4)
    assert accuracy.model == proportion([Total(1.0)] * 3 + [Total(0.0)])
    size = found["sums/size,strict"].model
    assert (size.low, size.value, size.high) == pytest.approx((7 - 1.96, 7.0, 7 + 1.96), abs=1e-4)


def test_two_models_are_compared_question_by_question(lm_eval, tiny_llama, bpe_tokenizer):
    import copy

    other = copy.deepcopy(tiny_llama)
    lm_eval.answers |= {id(tiny_llama): [1.0, 1.0, 1.0, 0.0], id(other): [0.0, 1.0, 0.0, 0.0]}
    found = evaluate(
        tiny_llama, tokenizer=bpe_tokenizer, baseline=other, baseline_tokenizer=bpe_tokenizer, tasks=["sums"]
    )
    accuracy, size = found["sums/acc"], found["sums/size,strict"]
    assert accuracy.difference.value == 0.5
    assert accuracy.difference.num_prompts == 4
    assert accuracy.p_value == sign_test(2, 0)
    assert (size.difference.value, size.p_value) == (0.0, 1.0)
    assert size.difference.high == pytest.approx(1.96 * 2**0.5, abs=1e-2)


def test_what_lm_eval_refuses_is_told_with_its_words(lm_eval, tiny_llama, bpe_tokenizer):
    lm_eval.answers[id(tiny_llama)] = [1.0]
    with pytest.raises(ValueError, match="lm-eval can't run unknown: 'unknown'"):
        evaluate(tiny_llama, tokenizer=bpe_tokenizer, tasks=["unknown"])


def test_without_the_package_the_install_command_is_told(tiny_llama, bpe_tokenizer, monkeypatch):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"isn't installed\. Install it with: pip install 'lm-eval"):
        evaluate(tiny_llama, tokenizer=bpe_tokenizer, tasks=["sums"])
    with pytest.raises(ValueError, match="num_fewshot=2 has no effect without tasks"):
        evaluate(tiny_llama, tokenizer=bpe_tokenizer, num_fewshot=2)
