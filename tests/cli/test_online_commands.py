"""`strop online_dpo`, `strop xpo`, `strop nash_md`: rewards by name, or a judge behind an endpoint."""

import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from strop.cli.main import main

QUIET = "--use_cpu --max_steps 1 --disable_tqdm true --max_new_tokens 4 --per_device_train_batch_size 2"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Is {w} hot ?"}) + "\n" for w in "abc"))
    (tmp_path / "my_pair_rewards.py").write_text(
        "def short(completions, **_):\n    return [-len(c) for c in completions]\n"
    )
    return tmp_path


@pytest.fixture
def endpoint(monkeypatch):
    """Always prefers what it is shown first."""
    for name in ("http_proxy", "HTTP_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Better: A"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def strop(line, capsys):
    code = main(shlex.split(line))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def written(folder):
    (file,) = (folder / "out" / "rollouts").iterdir()
    return [json.loads(text) for text in file.read_text().splitlines()]


@pytest.mark.parametrize(("command", "other"), [("online_dpo", "policy"), ("xpo", "reference"), ("nash_md", "mixture")])
def test_rewards_by_name(command, other, here, capsys, tiny_folder):
    line = f"{command} --model {tiny_folder} --data prompts.jsonl --output_dir out {QUIET} --beta 0.1 0.2"
    code, printed = strop(f"{line} --reward_funcs my_pair_rewards.short", capsys)
    assert code == 0, printed
    rows = written(here)
    assert [row["writer"] for row in rows] == ["policy", other] * 2
    for one, two in zip(rows[::2], rows[1::2], strict=True):
        assert (one["preference"] > 0.5) == (one["short"] > two["short"])
        assert one["preference"] + two["preference"] == pytest.approx(1)


def test_a_judge_behind_an_endpoint(here, capsys, tiny_folder, endpoint):
    line = f"online_dpo --model {tiny_folder} --data prompts.jsonl --output_dir out {QUIET}"
    code, printed = strop(f"{line} --judge any --judge_url {endpoint}", capsys)
    assert code == 0, printed
    assert {row["preference"] for row in written(here)} == {0.0, 1.0}
    code, printed = strop(f"{line} --judge any --reward_funcs my_pair_rewards.short", capsys)
    assert code == 2
    assert "there are both a judge" in printed
    code, printed = strop(f"{line} --judge_rubric truth --reward_funcs my_pair_rewards.short", capsys)
    assert code == 2
    assert "has no effect without a judge" in printed


def test_prompts_are_shown_as_they_are_cut(here, capsys, tiny_folder, bpe_tokenizer):
    line = f"inspect online_dpo --model {tiny_folder} --data prompts.jsonl --json --max_new_tokens 4 --max_length 8"
    assert main(shlex.split(line)) == 0
    first, *_ = json.loads(capsys.readouterr().out)["rows"]
    assert first["input_ids"] == bpe_tokenizer("Is a hot ?").input_ids[-4:]
