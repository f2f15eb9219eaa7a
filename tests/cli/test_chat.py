"""Answers come from the model alone, stop where it was taught to stop, and a conversation is remembered."""

import io
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

from strop.cli.chat import AnswerArguments, Answerer, Chat, generate_main, main, read_prompts

USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def greedy(model, ids, stop_ids, at_most):
    """The likeliest continuation, one whole forward pass a token."""
    ids, prompt = list(ids), len(ids)
    with torch.no_grad():
        while len(ids) - prompt < at_most:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in stop_ids:
                break
    return ids[prompt:]


def lines_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_answers_are_the_greedy_ones_of_the_rendered_prompt_alone_or_in_a_batch(
    tiny_folder, tiny_llama, bpe_tokenizer, capsys
):
    prompts = ["How many legs?", "Ice is"]
    assert generate_main([str(tiny_folder), "--prompt", *prompts, "--max_new_tokens", "6"]) == 0
    for line, prompt in zip(lines_of(capsys), prompts, strict=True):
        ids = bpe_tokenizer(USER.format(prompt))["input_ids"]
        expected = greedy(tiny_llama.eval(), ids, {2}, 6)
        assert line["prompt"] == prompt
        assert line["completion"] == bpe_tokenizer.decode(expected, skip_special_tokens=True)
        assert line["num_tokens"] == len(expected)


def stops_at_once(model, token):
    """Biases the model so that it says `token` whatever came before."""
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    with torch.no_grad():
        head.bias[token] = 1.0
    model.lm_head = head


def test_the_templates_end_of_turn_stops_although_it_is_not_the_end_of_sequence(tmp_path, tiny_llama, bpe_tokenizer):
    tiny_llama.save_pretrained(tmp_path)
    bpe_tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    config = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    answerer = Answerer(AnswerArguments(model=str(tmp_path), max_new_tokens=5))
    stops_at_once(answerer.model, 2)
    (answer,) = answerer.answers([[5, 6]])
    assert (answer.text, answer.num_tokens, answer.finish_reason) == ("", 1, "stop")
    stops_at_once(answerer.model, 40)
    (answer,) = answerer.answers([[5, 6]])
    assert (answer.num_tokens, answer.finish_reason) == (5, "length")


def test_options_may_be_in_a_file(tmp_path, tiny_folder, capsys):
    (tmp_path / "answer.yaml").write_text(f"model: {tiny_folder}\nprompt: [Ice is]\nmax_new_tokens: 9\n")
    assert generate_main(["--config", str(tmp_path / "answer.yaml"), "--max_new_tokens", "3"]) == 0
    assert lines_of(capsys)[0]["num_tokens"] == 3


def test_sampling_follows_the_seed(tiny_folder, capsys):
    def draw(seed):
        words = ["--prompt", "Ice is", "--temperature", "1.5", "--seed", str(seed), "--max_new_tokens", "8"]
        generate_main([str(tiny_folder), *words])
        return lines_of(capsys)[0]["completion"]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.fixture
def adapter(tmp_path, tiny_folder, tiny_llama):
    """A LoRA folder whose adapter changes what the model says."""
    model = get_peft_model(tiny_llama, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = str(tiny_folder)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", model.eval()


def test_an_adapter_is_put_on_its_base(adapter, bpe_tokenizer, capsys):
    folder, model = adapter
    generate_main([str(folder), "--prompt", "Ice is", "--plain", "true", "--max_new_tokens", "6"])
    expected = greedy(model, bpe_tokenizer("Ice is")["input_ids"], {2}, 6)
    with model.disable_adapter():
        assert greedy(model, bpe_tokenizer("Ice is")["input_ids"], {2}, 6) != expected
    assert lines_of(capsys)[0]["completion"] == bpe_tokenizer.decode(expected, skip_special_tokens=True)


def test_a_base_that_moved_can_be_named(adapter, tiny_folder, capsys):
    folder, _ = adapter
    moved = tiny_folder.rename(tiny_folder.parent / "moved")
    with pytest.raises(ValueError, match=r"--base_model"):
        generate_main([str(folder), "--prompt", "Ice is"])
    assert generate_main([str(folder), "--prompt", "Ice is", "--base_model", str(moved), "--max_new_tokens", "2"]) == 0
    with pytest.raises(ValueError, match="is a whole model"):
        generate_main([str(moved), "--prompt", "Ice is", "--base_model", str(moved)])


class Recorder(Answerer):
    """Answers "a1", "a2", ... and keeps what it was asked."""

    def __init__(self, tokenizer, is_chat=True, system=None):
        self.tokenizer, self.is_chat, self.asked = tokenizer, is_chat, []
        self.args = AnswerArguments(model="none", system=system)

    def render(self, prompt):
        self.asked.append(prompt)
        return [0]

    def answers(self, prompts, streamer=None):
        streamer.put(torch.tensor([0]))
        streamer.put(torch.tensor(self.tokenizer(f"a{len(self.asked)}")["input_ids"]))
        streamer.end()


def converse(tokenizer, lines, **how):
    answerer, out, notes = Recorder(tokenizer, **how), io.StringIO(), io.StringIO()
    Chat(answerer, out, notes).run(line + "\n" for line in lines)
    return (
        [prompt if isinstance(prompt, str) else [m["content"] for m in prompt] for prompt in answerer.asked],
        out,
        notes,
    )


def test_a_chat_remembers_until_it_is_told_to_forget(bpe_tokenizer):
    lines = ["one", "two", "/reset", "", "three", "/system Be brief.", "four", "/reset", "five", "/system", "six"]
    asked, out, _ = converse(bpe_tokenizer, [*lines, "/exit", "seven"])
    assert asked == [
        ["one"],
        ["one", "a1", "two"],
        ["three"],
        ["Be brief.", "four"],
        ["Be brief.", "five"],
        ["six"],
    ]
    assert out.getvalue() == "a1\na2\na3\na4\na5\na6\n"


def test_a_system_message_may_be_there_from_the_start(bpe_tokenizer):
    assert converse(bpe_tokenizer, ["one", "/reset", "two"], system="S")[0] == [["S", "one"], ["S", "two"]]


def test_a_base_model_continues_each_line(bpe_tokenizer):
    assert converse(bpe_tokenizer, ["one", "/path/x", "two"], is_chat=False)[0] == ["one", "/path/x", "two"]


def test_help_goes_where_notes_go(bpe_tokenizer):
    asked, out, notes = converse(bpe_tokenizer, ["/help"])
    assert (asked, out.getvalue()) == ([], "")
    assert "/reset" in notes.getvalue()


def test_a_chat_reads_a_pipe(tiny_folder, tiny_llama, bpe_tokenizer, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Ice is\n/exit\n"))
    assert main([str(tiny_folder), "--max_new_tokens", "4"]) == 0
    expected = greedy(tiny_llama.eval(), bpe_tokenizer(USER.format("Ice is"))["input_ids"], {2}, 4)
    assert capsys.readouterr().out == bpe_tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_a_prompt_without_room_is_refused_and_the_chat_goes_on(tiny_folder):
    out, notes = io.StringIO(), io.StringIO()
    answerer = Answerer(AnswerArguments(model=str(tiny_folder), max_new_tokens=2040))
    chat = Chat(answerer, out, notes)
    chat.run(["Ice is cold, fire is hot\n", "/help\n"])
    assert "the model reads at most 2048" in notes.getvalue()
    assert chat.history == []


def test_prompt_files(tmp_path):
    asked = [{"role": "user", "content": "b"}]
    rows = ["a", {"prompt": "b"}, {"prompt": asked}, {"messages": [*asked, {"role": "assistant", "content": "c"}]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_prompts(str(file)) == ["a", "b", asked, asked]
    file.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2 has neither `prompt` nor `messages` .* \['question'\]"):
        read_prompts(str(file))
    file.write_text("{]\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1 is no line of JSON"):
        read_prompts(str(file))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a", "--top_p", "0.9"], "top_p=0.9 has no effect at temperature=0"),
        (["--prompt", "a", "--temperature", "-1"], "temperature=-1.0"),
        ([], "give either prompts"),
        (["--prompt", "a", "--plain", "true", "--system", "s"], "system needs the chat template"),
        (["--prompt", "a", "--temprature", "1"], "temperature"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        generate_main(["nowhere", *words])
