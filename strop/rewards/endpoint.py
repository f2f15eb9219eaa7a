"""Chat models behind an OpenAI-compatible endpoint, asked side by side."""

import asyncio
import json
import logging
import os
import random
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPException
from typing import Any

logger = logging.getLogger(__name__)

AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
"""Answers of a server that may be another one a moment later."""
LONGEST_PAUSE = 60.0
"""Seconds between two tries at most."""


@dataclass(frozen=True)
class ChatEndpoint:
    """A model at `base_url` (which ends before /chat/completions), asked by `complete`.

    The key is that of the environment variable `api_key_variable`, if it is set; it is never stored. `max_retries`
    tries follow a failure that may pass: no connection, no answer within `timeout` seconds, too many requests, an error
    of the server; pauses double from `pause` seconds on, or are what the server asks for. `concurrency` requests are
    under way at a time. `options` go into each request, e.g. {"temperature": 0, "max_tokens": 512}.
    """

    model: str
    base_url: str = "https://api.openai.com/v1"
    api_key_variable: str = "OPENAI_API_KEY"
    timeout: float = 60.0
    max_retries: int = 3
    pause: float = 1.0
    concurrency: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={self.base_url!r} must begin with http:// or https://.")
        if self.timeout <= 0 or self.max_retries < 0 or self.pause < 0 or self.concurrency < 1:
            raise ValueError(
                f"timeout={self.timeout} must be above 0, max_retries={self.max_retries} and pause={self.pause} at "
                f"least 0, concurrency={self.concurrency} at least 1."
            )

    async def complete(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The text that the model answers with.

        Raises ValueError, with what the server said, if the request is refused or the last try fails.
        """
        body = json.dumps({"model": self.model, "messages": list(messages), **self.options, **options}).encode()
        for attempt in range(self.max_retries + 1):
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, body)
            except Refused as error:
                if not error.may_pass or attempt == self.max_retries:
                    raise ValueError(f"{self.url} ({self.model}) gave no answer: {error}") from error
                pause = self.pause * 2**attempt * (0.5 + random.random() / 2) if error.wait is None else error.wait
                logger.info(f"{self.url}: {error}; asked again in {pause:.1f} s")
                await asyncio.sleep(min(pause, LONGEST_PAUSE))
        raise AssertionError("the last try answers or raises")

    @property
    def url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.concurrency, thread_name_prefix="strop-endpoint")

    def _ask(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key_variable):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, body, headers)
        try:
            with OPENER.open(request, timeout=self.timeout) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")[:500]
            raise Refused(
                f"{error.code} {text}", error.code in AGAIN, _seconds(error.headers.get("Retry-After"))
            ) from error
        except (OSError, HTTPException) as error:
            raise Refused(f"{type(error).__name__}: {error}", may_pass=True) from error
        return _content(answer)

    def __getstate__(self) -> dict[str, Any]:
        """Without the threads, which don't travel to other processes."""
        return {name: value for name, value in vars(self).items() if name != "_threads"}


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected question would arrive without its body, and the key at a stranger's; the answer is an error then."""

    def redirect_request(self, *args: Any) -> None:
        return None


OPENER = urllib.request.build_opener(NoRedirect)


class Refused(Exception):
    """A request without an answer; `wait` are the seconds after which the server wants to be asked again."""

    def __init__(self, message: str, may_pass: bool, wait: float | None = None):
        super().__init__(message)
        self.may_pass, self.wait = may_pass, wait


def _seconds(header: str | None) -> float | None:
    """Retry-After in seconds; None if it is a date, or missing."""
    try:
        return max(float(header), 0.0) if header else None
    except ValueError:
        return None


def _content(answer: bytes) -> str:
    try:
        content = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        text = answer[:300].decode("utf-8", "replace")
        raise Refused(f"this is no chat completion: {text!r}", may_pass=False) from error
    return content or ""
