"""An evaluation says of rows what training and generation would, and of two models what sets them apart."""

import copy
import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from strop.evals import answers as answering
from strop.evals import held_out
from strop.evals.evaluate import evaluate
from strop.evals.results import EvalResults
from strop.rewards.judges import BasePairwiseJudge
from strop.rewards.verdicts import BaseBinaryJudge

PAIRS = [
    {"prompt": "What is ice ?", "chosen": " Ice is cold .", "rejected": " Hot ."},
    {"prompt": "Is fire cold ?", "chosen": " No .", "rejected": " Yes , it is cold ."},
    {"prompt": "Is the sky blue ?", "chosen": " It is .", "rejected": " No , it is green ."},
]


@pytest.fixture
def questions():
    return [{"prompt": [{"role": "user", "content": text}], "word": word} for text, word in
            [("What is ice?", "e"), ("How many legs?", "a"), ("Is fire hot?", "i"), ("The sky?", "o")]]  # fmt: skip


@pytest.fixture
def other(tiny_llama):
    """A model that says other things."""
    model = copy.deepcopy(tiny_llama)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def says(completions, word, **columns):
    """1 for answers with the row's letter in them."""
    return [float(letter in completion[-1]["content"]) for completion, letter in zip(completions, word, strict=True)]


def length(completion_ids, **columns):
    return [len(ids) / 2 for ids in completion_ids]


def by_hand(model, tokenizer, row):
    """Nats and tokens of the completion of a plain row, by the model's own cross entropy."""
    prompt, whole = (tokenizer(text).input_ids for text in (row["prompt"], row["prompt"] + row["completion"]))
    ids = torch.tensor([[*whole, tokenizer.eos_token_id]])
    with torch.no_grad():
        logps = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    return -logps[len(prompt) - 1 :].sum().item(), ids.shape[1] - len(prompt)


def test_the_loss_is_a_token_s_over_all_rows(tiny_llama, bpe_tokenizer, prompt_completion_rows, monkeypatch):
    monkeypatch.setattr(held_out, "PIECE", 2)
    expected = [by_hand(tiny_llama.eval(), bpe_tokenizer, row) for row in prompt_completion_rows]
    found = evaluate(tiny_llama, prompt_completion_rows, "loss", tokenizer=bpe_tokenizer, batch_size=2)
    nats, tokens = map(sum, zip(*expected, strict=True))
    assert found["loss"].value == pytest.approx(nats / tokens, rel=1e-5)
    assert found["perplexity"].value == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert [row["loss"] for row in found.rows] == pytest.approx([nats / tokens for nats, tokens in expected], rel=1e-5)
    assert [row["num_tokens"] for row in found.rows] == [tokens for _, tokens in expected]
    assert found["loss"].model.low < found["loss"].value < found["loss"].model.high
    assert found["perplexity"].model.high == pytest.approx(math.exp(found["loss"].model.high))


@pytest.mark.parametrize("assistant_only", [False, True])
def test_the_loss_is_that_of_training(assistant_only, tiny_llama, bpe_tokenizer, chat_rows, tmp_path):
    from strop import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, assistant_only_loss=assistant_only, max_length=None
    )
    trainer = SFTTrainer(
        model=tiny_llama, args=config, train_dataset=chat_rows, eval_dataset=chat_rows, processing_class=bpe_tokenizer
    )
    expected = trainer.evaluate()["eval_loss"]
    found = evaluate(
        tiny_llama, chat_rows, ["loss"], tokenizer=bpe_tokenizer, assistant_only_loss=assistant_only, batch_size=2
    )
    assert found["loss"].value == pytest.approx(expected, rel=1e-5)
    assert found["loss"].model.num_prompts == 3


def test_answers_are_the_same_in_pieces_and_of_fewer_rows(tiny_llama, bpe_tokenizer, questions, monkeypatch):
    def words(**more):
        found = evaluate(tiny_llama, questions, says, tokenizer=bpe_tokenizer, num_samples=2, max_new_tokens=6, **more)
        return [[answer.completion[0]["content"] for answer in several] for several in found.answers]

    whole = words()
    assert words(limit=2) == whole[:2]
    assert words(seed=1) != whole
    assert len({text for several in whole for text in several}) > 4
    monkeypatch.setattr(answering, "PIECE", 3)
    assert words(max_rows=2) == whole


def test_one_answer_is_the_likeliest_one(tiny_llama, bpe_tokenizer, questions):
    found = evaluate(tiny_llama, questions[:1], says, tokenizer=bpe_tokenizer, max_new_tokens=5)
    ids = bpe_tokenizer.apply_chat_template(questions[0]["prompt"], add_generation_prompt=True, return_dict=False)
    expected = list(ids)
    while len(expected) < len(ids) + 5:
        expected.append(int(tiny_llama(torch.tensor([expected])).logits[0, -1].argmax()))
    ((answer,),) = found.answers
    assert answer.completion[0]["content"] == bpe_tokenizer.decode(expected[len(ids) :], skip_special_tokens=True)
    assert (answer.num_tokens, answer.finish_reason) == (5, "length")


def test_rewards_become_means_and_pass_at_k(tiny_llama, bpe_tokenizer, questions):
    found = evaluate(
        tiny_llama, questions, [says, length], tokenizer=bpe_tokenizer, num_samples=4, k=[1, 2, 4], max_new_tokens=5
    )
    rewards = [[answer.rewards["says"] for answer in several] for several in found.answers]
    assert found["says"].value == pytest.approx(sum(map(sum, rewards)) / 16)
    assert found["pass@1/says"].value == pytest.approx(found["says"].value)
    assert found["pass@4/says"].value == sum(map(any, rewards)) / 4
    assert found["pass@1/says"].value <= found["pass@2/says"].value <= found["pass@4/says"].value
    assert 0 < found["says"].model.low < found["says"].model.high < 1
    assert found["length"].value == found["answer_tokens"].value / 2
    assert "pass@1/length" not in found.metrics
    assert found.notes == ["length has values other than 0 and 1, so pass@k of it needs a threshold"]


def test_a_threshold_makes_any_reward_pass_or_fail(tiny_llama, bpe_tokenizer, questions):
    found = evaluate(
        tiny_llama, questions, length, tokenizer=bpe_tokenizer, num_samples=2, threshold=2.5, max_new_tokens=5
    )
    full = [[answer.num_tokens == 5 for answer in several] for several in found.answers]
    assert found["pass@2/length"].value == sum(map(any, full)) / 4


def test_a_model_is_no_better_than_itself(tiny_llama, bpe_tokenizer, questions, prompt_completion_rows):
    same = {"tokenizer": bpe_tokenizer, "baseline": tiny_llama, "baseline_tokenizer": bpe_tokenizer}
    found = evaluate(tiny_llama, questions, [says, length], num_samples=2, max_new_tokens=5, **same)
    assert [one.completion for some in found.answers for one in some] == [
        one.completion for some in found.baseline_answers for one in some
    ]
    for name in ("says", "length", "pass@2/says"):
        assert (found[name].difference.value, found[name].p_value) == (0.0, 1.0)
    assert (found["win_rate/length"].value, found["win_rate/length"].p_value) == (0.5, 1.0)
    loss = evaluate(tiny_llama, prompt_completion_rows, "loss", **same)["loss"]
    assert (loss.difference.value, loss.p_value) == (0.0, 1.0)


def test_two_models_are_compared_on_the_same_rows(tiny_llama, other, bpe_tokenizer, prompt_completion_rows):
    both = {"baseline": other, "baseline_tokenizer": bpe_tokenizer, "tokenizer": bpe_tokenizer}
    found = evaluate(tiny_llama, prompt_completion_rows, "loss", **both)["loss"]
    alone = [
        evaluate(model, prompt_completion_rows, "loss", tokenizer=bpe_tokenizer)["loss"].value
        for model in (tiny_llama, other)
    ]
    assert found.difference.value == pytest.approx(alone[0] - alone[1])
    assert found.baseline.value == alone[1]
    assert found.difference.low < found.difference.value < found.difference.high
    assert 0 <= found.p_value <= 1


class Longer(BasePairwiseJudge):
    """Finds the longer answer better, and has no verdict on the last pair."""

    def compare(self, prompts, pairs, flipped):
        texts = [[words[0]["content"] for words in pair] for pair in pairs]
        return [0.5 + (len(a) > len(b)) / 2 - (len(a) < len(b)) / 2 for a, b in texts[:-1]] + [None]


def test_a_judge_says_whose_answer_is_better(tiny_llama, other, bpe_tokenizer, questions):
    both = {"baseline": other, "baseline_tokenizer": bpe_tokenizer, "tokenizer": bpe_tokenizer}
    found = evaluate(tiny_llama, questions, judge=Longer(), max_new_tokens=5, **both)
    texts = [
        [several[0].completion[0]["content"] for several in answers[:-1]]
        for answers in (found.answers, found.baseline_answers)
    ]
    wins = [(len(a) > len(b)) + (len(a) == len(b)) / 2 for a, b in zip(*texts, strict=True)]
    assert found["win_rate/judge"].value == pytest.approx(sum(wins) / 3)
    assert found["win_rate/judge"].model.num_prompts == 3
    assert found.notes == ["the judge gave no verdict on 1 of 4 pairs of answers"]
    assert [row["verdicts"] for row in found.rows] == [*([win] for win in wins), [None]]


class Ends(BaseBinaryJudge):
    def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
        return [int(words[-1]["content"].endswith("e")) for words in completions]


def test_judges_of_any_kind_are_asked(tiny_llama, other, bpe_tokenizer, questions):
    both = {"baseline": other, "baseline_tokenizer": bpe_tokenizer, "tokenizer": bpe_tokenizer}
    found = evaluate(tiny_llama, questions, judge=Ends(), max_new_tokens=2, **both)
    passed = [
        [several[0].completion[0]["content"].endswith("e") for several in answers]
        for answers in (found.answers, found.baseline_answers)
    ]
    assert [row["verdicts"] for row in found.rows] == [[(1 + a - b) / 2] for a, b in zip(*passed, strict=True)]


def test_pairs_are_told_apart_by_the_log_probability(tiny_llama, other, bpe_tokenizer):
    def margins(model):
        sides = [
            [-by_hand(model.eval(), bpe_tokenizer, {**row, "completion": row[side]})[0] for row in PAIRS]
            for side in ("chosen", "rejected")
        ]
        return [chosen - rejected for chosen, rejected in zip(*sides, strict=True)]

    both = {"baseline": other, "baseline_tokenizer": bpe_tokenizer, "tokenizer": bpe_tokenizer}
    found = evaluate(tiny_llama, PAIRS, **both)
    ours, theirs = margins(tiny_llama), margins(other)
    assert found["pairs"].value == sum(margin > 0 for margin in ours) / 3
    assert found["pairs"].baseline.value == sum(margin > 0 for margin in theirs) / 3
    moved = [a > b for a, b in zip(ours, theirs, strict=True)]
    assert found["pairs/implicit"].value == sum(moved) / 3
    assert [row["margin"] for row in found.rows] == pytest.approx(ours, abs=1e-4)
    assert [row["baseline_margin"] for row in found.rows] == pytest.approx(theirs, abs=1e-4)


def test_what_is_found_is_on_disk(tiny_llama, bpe_tokenizer, questions, tmp_path):
    found = evaluate(
        tiny_llama, questions, says, tokenizer=bpe_tokenizer, max_new_tokens=5, output_dir=tmp_path, num_samples=2
    )
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved == json.loads(json.dumps(found.to_dict()))
    assert saved["metrics"]["says"]["model"]["value"] == found["says"].value
    assert saved["settings"]["metrics"] == ["says"]
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(line["row"], line["sample"]) for line in lines] == [(i, j) for i in range(4) for j in range(2)]
    assert lines[3]["completion"] == found.answers[1][1].completion
    assert sum(line["rewards"]["says"] for line in lines) / 8 == found["says"].value
    assert "pass@2/says" in str(found)
    again = EvalResults.load(tmp_path)
    assert (again.metrics, again.settings, str(again)) == (found.metrics, found.settings, str(found))
    assert not (tmp_path / "rows.jsonl").exists()
    loss = evaluate(tiny_llama, PAIRS, tokenizer=bpe_tokenizer, output_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert lines == loss.rows == [{"row": i, "margin": loss.rows[i]["margin"]} for i in range(3)]
    with pytest.raises(ValueError, match=r"there is no results\.json in"):
        EvalResults.load(tmp_path / "nowhere")


def test_rows_to_which_a_reward_does_not_apply_do_not_count(tiny_llama, bpe_tokenizer, questions):
    def sometimes(completions, word, **columns):
        return [1.0 if letter in "ea" else None for letter in word]

    def never(completions, **columns):
        return [None] * len(completions)

    found = evaluate(tiny_llama, questions, [sometimes, never], tokenizer=bpe_tokenizer, max_new_tokens=3)
    assert (found["sometimes"].value, found["sometimes"].model.num_prompts) == (1.0, 2)
    assert found.notes == ["never applies to no row"]
    with pytest.raises(KeyError, match="no metric 'never'"):
        found["never"]


def test_prompts_are_found_in_conversations_and_pairs(tiny_llama, bpe_tokenizer, chat_rows):
    found = evaluate(tiny_llama, chat_rows, length, tokenizer=bpe_tokenizer, max_new_tokens=3)
    assert [answers[0].prompt for answers in found.answers] == [row["messages"][:-1] for row in chat_rows]
    found = evaluate(tiny_llama, PAIRS, length, tokenizer=bpe_tokenizer, max_new_tokens=3)
    assert [answers[0].prompt for answers in found.answers] == [row["prompt"] for row in PAIRS]
    assert isinstance(found.answers[0][0].completion, str)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no answer to take the loss of"),
        ({"metrics": "loss"}, "no text to train on in the columns"),
        ({"metrics": "pairs"}, "pairs are in columns chosen and rejected"),
        ({"metrics": "loss", "num_samples": 2}, "num_samples=2 has no effect: the model answers nothing"),
        ({"metrics": says, "max_length": 8}, "max_length=8 has no effect: the loss is not asked for"),
        ({"metrics": says, "num_samples": 4, "temperature": 0.0}, "all the same at temperature=0"),
        ({"metrics": says, "k": [2]}, "pass@2 is of 2 samples, but num_samples=1"),
        ({"metrics": says, "top_p": 0.9}, "top_p=0.9 has no effect at temperature=0"),
        ({"metrics": says, "confidence": 95.0}, "confidence=95.0 is the chance"),
        ({"metrics": "acuracy"}, "there is no reward 'acuracy'.* Did you mean 'accuracy'"),
        ({"metrics": says, "judge": Longer()}, "name the other as baseline"),
        ({"metrics": says, "limit": 0}, "limit=0 leaves nothing"),
        ({"metrics": says, "train_on_turns": "last"}, "train_on_turns='last' has no effect: the loss is not asked for"),
    ],
)
def test_what_can_not_be_measured_is_refused(options, message, tiny_llama, bpe_tokenizer, questions):
    with pytest.raises(ValueError, match=message):
        evaluate(tiny_llama, questions, tokenizer=bpe_tokenizer, **options)


def test_rows_without_prompts_and_models_without_tokenizers_are_refused(tiny_llama, bpe_tokenizer):
    with pytest.raises(ValueError, match=r"row 0 has .*, but no prompt to answer"):
        evaluate(tiny_llama, [{"question": "What?"}], says, tokenizer=bpe_tokenizer)
    with pytest.raises(ValueError, match="needs 'word', which the rows lack"):
        evaluate(tiny_llama, [{"prompt": "What?"}], says, tokenizer=bpe_tokenizer)
    with pytest.raises(ValueError, match="its tokenizer must be given too"):
        evaluate(tiny_llama, [{"prompt": "What?"}], length)
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        evaluate(tiny_llama, [], tokenizer=bpe_tokenizer)


def test_numbers_that_are_none_are_refused(tiny_llama, bpe_tokenizer, prompt_completion_rows):
    tiny_llama.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match=r"the model says nan of row \d: its weights hold numbers that aren't finite"):
        evaluate(tiny_llama, prompt_completion_rows, "loss", tokenizer=bpe_tokenizer)
    with pytest.raises(ValueError, match="the model says nan of row 0"):
        evaluate(tiny_llama, PAIRS, tokenizer=bpe_tokenizer)


def test_a_model_that_says_hardly_anything_has_no_perplexity(tiny_llama, bpe_tokenizer, prompt_completion_rows):
    tiny_llama.lm_head.weight.data *= 1e5
    found = evaluate(tiny_llama, prompt_completion_rows, "loss", tokenizer=bpe_tokenizer)
    assert found["loss"].value > 1000
    assert "perplexity" not in found.metrics
    assert "perplexity is left out" in found.notes[0]


def test_what_is_wrong_with_the_second_model_is_said_before_the_first_is_measured(tiny_llama, bpe_tokenizer, questions):
    def never(completions, **columns):
        raise AssertionError

    scorer = AutoModelForSequenceClassification.from_config(copy.deepcopy(tiny_llama.config))
    for baseline, message in (
        (scorer, "is a reward model, which scores answers"),
        ("./nowhere", "no folder ./nowhere"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(tiny_llama, questions, never, tokenizer=bpe_tokenizer, baseline=baseline)


def test_prompts_without_room_for_an_answer_are_named_before_any_is_answered(bpe_tokenizer, questions, monkeypatch):
    shape = GPT2Config(vocab_size=len(bpe_tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=64)
    long = {"prompt": [{"role": "user", "content": "word " * 60}], "word": "a"}
    monkeypatch.setattr(answering, "PIECE", 1)

    def never(completions, **columns):
        raise AssertionError

    with pytest.raises(
        ValueError, match=r"row 4 has \d+ tokens, with max_new_tokens=3 beyond the 64 positions of GPT2"
    ):
        evaluate(GPT2LMHeadModel(shape), [*questions, long], never, tokenizer=bpe_tokenizer, max_new_tokens=3)


def test_a_metric_has_one_name(tiny_llama, bpe_tokenizer, questions):
    def perplexity(completions, **columns):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="the reward 'perplexity' has the name of another metric"):
        evaluate(tiny_llama, questions, perplexity, tokenizer=bpe_tokenizer)
    found = evaluate(tiny_llama, questions, [says, says], tokenizer=bpe_tokenizer, max_new_tokens=2)
    assert [name for name in found.metrics if "says" in name] == ["says"]


def test_losses_of_other_tokens_are_not_compared(tiny_llama, bpe_tokenizer, word_tokenizer, prompt_completion_rows):
    both = {"baseline": tiny_llama, "tokenizer": bpe_tokenizer, "baseline_tokenizer": word_tokenizer}
    found = evaluate(tiny_llama, prompt_completion_rows, "loss", **both)
    assert found["loss"].difference is None
    assert "the tokenizers cut the rows into other tokens" in found.notes[0]
