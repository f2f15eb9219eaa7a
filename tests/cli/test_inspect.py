"""The command shows what the trainer's own preparation and collator make of the rows, and loads no weights."""

import json

import pytest
from datasets import Dataset

from strop.cli.inspect import main
from strop.data.collate import SupervisedCollator
from strop.data.prepare import prepare
from strop.trainer.config import SFTConfig


@pytest.fixture
def rows_file(tmp_path, chat_rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in chat_rows))
    return file


@pytest.fixture
def command(tiny_folder, rows_file):
    """The words that every command needs; the folder has no weights to load."""
    for weights in tiny_folder.glob("*.safetensors"):
        weights.unlink()
    return ["--model", str(tiny_folder), "--data", str(rows_file)]


def shown_as_json(capsys, words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def masks_of(rows, tokenizer, **settings):
    """(input_ids, completion_mask) of the rows as a trainer with these settings prepares and collates them."""
    args = SFTConfig(output_dir="unused", use_cpu=True, **settings)
    prepared, _ = prepare(Dataset.from_list(rows), tokenizer, args, packing=args.packing)
    collator = SupervisedCollator(tokenizer.pad_token_id, "packed")
    masks = []
    for row in prepared:
        mask, lengths = collator([row])["completion_mask"].tolist(), row.get("seq_lengths") or [len(row["input_ids"])]
        masks.append([on for line, length in zip(mask, lengths, strict=True) for on in line[:length]])
    return prepared["input_ids"][:], masks


@pytest.mark.parametrize(
    "settings",
    [
        {"assistant_only_loss": True},
        {"assistant_only_loss": True, "train_on_turns": "expand"},
        {"packing": True, "max_length": 128},
        {"packing": True, "max_length": 64, "packing_strategy": "wrapped"},
    ],
)
def test_json_equals_the_trainers_batch(command, chat_rows, bpe_tokenizer, capsys, settings):
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value).lower())]
    rows = shown_as_json(capsys, [*command, *words, "--n", "10"])["rows"]
    input_ids, masks = masks_of(chat_rows, bpe_tokenizer, **settings)
    assert [row["input_ids"] for row in rows] == input_ids
    assert [row["trained"] for row in rows] == masks


def test_options_come_from_a_config_file_too(command, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("assistant_only_loss: true\nlearning_rate: 1e-4\nnum_processes: 2\n")
    by_file = shown_as_json(capsys, [*command, "--config", str(tmp_path / "run.yaml")])
    assert by_file == shown_as_json(capsys, [*command, "--assistant_only_loss"])
    assert by_file["rows"] != shown_as_json(capsys, command)["rows"]


def test_one_row_and_the_report(command, chat_rows, capsys):
    document = shown_as_json(capsys, [*command, "--row", "1"])
    assert [row["index"] for row in document["rows"]] == [1]
    assert document["rows"][0]["raw"] == chat_rows[1]
    assert document["report"]["rows_in"] == document["report"]["rows_out"] == 3


def test_plain_text_ends_with_the_report(command, capsys):
    main([*command, "--n", "1", "--assistant_only_loss"])
    text = capsys.readouterr().out
    assert "  trained  The·sky·is·blue.<|im_end|>\n" in text
    assert "stop token trained" in text.splitlines()[0]
    assert text.splitlines()[-1].startswith("train: 3 rows in, 3 out")
    assert "\x1b" not in text


def test_colour_and_html_on_demand(command, tmp_path, capsys):
    main([*command, "--n", "1", "--color"])
    assert "\x1b[1;32m" in capsys.readouterr().out
    main([*command, "--n", "1", "--html", str(tmp_path / "new/page.html")])
    assert capsys.readouterr().out == ""
    assert (tmp_path / "new/page.html").read_text().count('class="trained"') > 10


def test_streamed_rows_are_shown_as_they_come(command, capsys):
    streamed = shown_as_json(capsys, [*command, "--dataset_streaming", "--max_steps", "1", "--n", "2"])["rows"]
    whole = shown_as_json(capsys, [*command, "--n", "2"])["rows"]
    assert [row["input_ids"] for row in streamed] == [row["input_ids"] for row in whole]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--row", "3"], "there is no row 3: the data set has 3 rows, 0 to 2"),
        (["--n", "0"], "n=0 shows nothing"),
        (["--json", "--tokens"], "json prints every token"),
        (["--max_lenght", "5"], "max_length"),
    ],
)
def test_what_cannot_be_shown_is_refused(command, words, message):
    with pytest.raises(ValueError, match=message):
        main([*command, *words])
