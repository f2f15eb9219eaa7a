"""Judges behind a server on this machine: scores, verdicts, retries, and what a server can do wrong."""

import asyncio
import json
import pickle
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from strop.rewards import PairwiseJudge, RewardFunctions, judge_reward
from strop.rewards.endpoint import ChatEndpoint
from strop.rewards.judges import BasePairwiseJudge, score_in, verdict_in


class Server:
    """Answers chat requests by `answer`, a function of the question; or with the (status, headers, body) it returns."""

    def __init__(self):
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.answer = lambda question: "Score: 10"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(request | {"path": self.path})
                outer.headers.append(dict(self.headers))
                found = outer.answer(request["messages"][-1]["content"])
                if isinstance(found, str):
                    found = 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": found}}]})
                status, headers, body = found
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


def asked(endpoint):
    return asyncio.run(endpoint.complete([{"role": "user", "content": "hello"}]))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Good.\nScore: 7", 7),
        ("score: 3. On second thought **Score:** 8/10", 8),
        ("Score: 0.5", 0.5),
        ("Score: 11", None),
        ("Score: -1", None),
        ("A score of seven", None),
        ("", None),
    ],
)
def test_scores_are_read_from_the_end(text, score):
    assert score_in(text, 0, 10) == score


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Better: A", 1),
        ("A is longer.\n**Better: B**", 0),
        ("**Better**: Answer_B.", 0),
        ("better: Tie.", 0.5),
        ("Better: a tie", 0.5),
        ("Better: B\nIt is better. A repeats itself, and is no better, a pity.", 0),
        ("B is better, a joy to read.", None),
        ("Better: Alice", None),
        ("A", None),
    ],
)
def test_verdicts(text, verdict):
    assert verdict_in(text) == verdict


def test_a_judge_is_a_reward_function(server, caplog):
    """10 of 1 to 10 is 1, 1 is 0; an answer without a score is asked for again, and then doesn't apply."""

    def answer(question):
        completion = re.search(r"<answer>\n(.*?)\n</answer>", question, re.S)[1]
        return {"right": "Score: 10", "wrong": "Score: 1"}.get(completion, "I can't say.")

    server.answer = answer
    reward = judge_reward("judge", server.url, rubric="is it right?", timeout=20.0, options={"temperature": 0})
    prompt = [{"role": "user", "content": "What is 1 + 1?"}]
    completions = ["right", [{"role": "assistant", "content": "wrong"}], "odd"]
    scores = RewardFunctions(reward).score([prompt] * 3, completions)
    assert scores.names == ["judge_reward"]
    assert scores.values[:2, 0].tolist() == [1.0, 0.0]
    assert scores.values[2].isnan().all()
    assert "no score for 1 of 3 rows, the first being 2" in caplog.text
    assert len(server.requests) == 4
    assert server.requests[0]["path"] == "/v1/chat/completions"
    assert server.requests[0]["model"] == "judge"
    assert server.requests[0]["temperature"] == 0
    question = server.requests[0]["messages"][0]["content"]
    assert "is it right?" in question
    assert "user: What is 1 + 1?" in question
    assert pickle.loads(pickle.dumps(reward)).endpoint == reward.endpoint


def test_words_of_a_completion_are_no_placeholders(server):
    reward = judge_reward("judge", server.url)
    assert RewardFunctions(reward).score(["{rubric}"], ["{prompt} {0} {x!r}"]).values.tolist() == [[1.0]]
    assert "{prompt} {0} {x!r}" in server.requests[0]["messages"][0]["content"]


def test_requests_are_under_way_together(server):
    """Each of three requests is answered once all are there."""
    barrier = threading.Barrier(3)

    def answer(question):
        barrier.wait(20)
        return "Score: 10"

    server.answer = answer
    assert RewardFunctions(judge_reward("judge", server.url)).score(["p"] * 3, ["c"] * 3).values.sum() == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_asked_again(server, status):
    server.answer = lambda question: "yes" if len(server.requests) > 2 else (status, {"Retry-After": "0"}, "busy")
    assert asked(ChatEndpoint("m", server.url, max_retries=2, pause=60)) == "yes"
    assert len(server.requests) == 3


def test_the_last_try_says_what_the_server_said(server):
    server.answer = lambda question: (503, {}, "too busy for you")
    with pytest.raises(ValueError, match="gave no answer: 503 too busy for you"):
        asked(ChatEndpoint("m", server.url, max_retries=1, pause=0))
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {}, "bad key"), "401 bad key"),
        ((404, {}, "no such model"), "404 no such model"),
        ((302, {"Location": "http://127.0.0.1:1/"}, "elsewhere"), "302 elsewhere"),
        ((200, {}, "<html>"), "no chat completion: '<html>'"),
        ((200, {}, '{"error": "x"}'), "no chat completion"),
    ],
)
def test_what_will_not_pass_is_not_asked_again(server, answer, message):
    server.answer = lambda question: answer
    with pytest.raises(ValueError, match=message):
        asked(ChatEndpoint("m", server.url, pause=0))
    assert len(server.requests) == 1


def test_a_server_that_does_not_answer_or_is_not_there(server):
    release = threading.Event()
    server.answer = lambda question: str(release.wait(20))
    with pytest.raises(ValueError, match="timed out"):
        asked(ChatEndpoint("m", server.url, timeout=0.2, max_retries=0))
    release.set()
    with pytest.raises(ValueError, match="Connection refused"):
        asked(ChatEndpoint("m", "http://127.0.0.1:9/v1", max_retries=0))


def test_the_key_is_that_of_the_environment(server, monkeypatch):
    asked(ChatEndpoint("m", server.url))
    assert "Authorization" not in server.headers[0]
    monkeypatch.setenv("MY_KEY", "word")
    endpoint = ChatEndpoint("m", server.url, api_key_variable="MY_KEY")
    asked(endpoint)
    assert server.headers[1]["Authorization"] == "Bearer word"
    assert "word" not in repr(endpoint)


def good_is_better(question):
    first, second = re.findall(r"<answer_[AB]>\n(.*?)\n</answer_[AB]>", question, re.S)
    return f"Better: {'tie' if first == second else 'A' if first == 'good' else 'B'}"


PAIRS = [["good", "bad"], ["bad", "good"], ["bad", "bad"]]


@pytest.mark.parametrize("options", [{"shuffle_order": False}, *({"seed": seed} for seed in range(4))])
@pytest.mark.parametrize("both_orders", [False, True])
def test_the_better_one_of_two_whichever_is_shown_first(server, both_orders, options):
    server.answer = good_is_better
    judge = PairwiseJudge("judge", server.url, both_orders=both_orders)
    assert judge.judge(["p"] * 3, PAIRS, **options) == [0, 1, -1]
    assert judge.judge(["p"] * 3, PAIRS, return_scores=True, **options) == [1.0, 0.0, 0.5]


def test_a_judge_that_looks_at_the_place_only(server):
    """Shown once it prefers whatever is first; shown both ways it says tie."""
    server.answer = lambda question: "Better: A"
    assert PairwiseJudge("judge", server.url).judge(["p"], [["a", "b"]], shuffle_order=False) == [0]
    both = PairwiseJudge("judge", server.url, both_orders=True)
    assert both.judge(["p"], [["a", "b"]], return_scores=True) == [0.5]
    many = PairwiseJudge("judge", server.url).judge(["p"] * 20, [["a", "b"]] * 20, seed=0)
    assert 4 < sum(many) < 16


def test_no_verdict_is_neither(server):
    server.answer = lambda question: "Hm."
    judge = PairwiseJudge("judge", server.url)
    assert judge.judge(["p"], [["a", "b"]], seed=1) == [-1]
    assert judge.judge(["p"], [["a", "b"]], return_scores=True) == [None]


def test_a_judge_of_ones_own():
    class Longer(BasePairwiseJudge):
        def compare(self, prompts, pairs, flipped):
            return [float(len(first) > len(second)) for first, second in pairs]

    assert Longer().judge(["p", "p"], [["aa", "b"], ["a", "bb"]]) == [0, 1]
    with pytest.raises(ValueError, match=r"2 completions for each of 1 prompts, but there are 1 groups of .3."):
        Longer().judge(["p"], [["a", "b", "c"]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: judge_reward("m", low=1, high=1), "low must be below high"),
        (lambda: judge_reward("m", attempts=0), "attempts=0"),
        (lambda: PairwiseJudge("m", attempts=0), "attempts=0"),
        (lambda: judge_reward("m", "localhost:8000"), "must begin with http"),
        (lambda: judge_reward("m", timeout=0), "timeout=0 must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
