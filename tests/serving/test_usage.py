"""What a real server told its clients, beside the ledger: calls are equal, or differ for a known cause."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serving.chat_model import word, write_tokenizer
from tests.serving.processes import BLOCK_TOKENS, Engine
from tests.time_limits import RUN_HANGS

pytestmark = pytest.mark.serving

PLAIN, SAMPLED, BATCHED, STREAMED, GIVEN_UP, REPEATED = 24, 10, 10, 6, 2, 2
PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")
IN_WORDS = 3 * len(PATHS)
"""Each path gets a prompt, the same again, and the same as a stream."""


class LoggedEngine(Engine):
    """A server with prefix caching, the middleware, and no connector."""

    def command(self) -> list[str]:
        command = super().command()
        place = command.index("--kv-transfer-config")
        del command[place : place + 2]
        command[command.index("--num-gpu-blocks-override") + 1] = "256"
        command.remove("--skip-tokenizer-init")
        write_tokenizer(self.folder / "model")
        middleware = "kvledger.exporters.usage_middleware.UsageLog"
        return [*command, "--enable-prompt-tokens-details", "--middleware", middleware]

    def environment(self) -> dict[str, str]:
        return super().environment() | {"KVLEDGER_USAGE_LOG": str(self.folder / "usage.jsonl")}

    def call(self, request_id: str, prompt: Any, **more: Any) -> bytes:
        """The whole body of the answer to one completion."""
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "detokenize": False}
        return self.post("/v1/completions", request_id, asked | more)

    def ask_in_words(self, path: str, request_id: str, text: str, *, stream: bool) -> bytes:
        """The same, of an endpoint that takes words."""
        most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        asked: dict[str, Any] = {"model": "tiny", most: 4, "stream": stream}
        asked |= (
            {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}
        )
        asked |= {"stream_options": {"include_usage": True}} if stream and "chat" in path else {}
        return self.post(path, request_id, asked)

    def post(self, path: str, request_id: str, asked: dict[str, Any]) -> bytes:
        """The whole body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", path, json.dumps(asked), headers)
        with connection.getresponse() as response:
            body = response.read()
            assert 200 == response.status, body
        return body


def tokens(seed: int, blocks: int) -> list[int]:
    """A prompt of whole blocks and seven tokens."""
    return [(seed * 31 + place) % 90 + 3 for place in range(blocks * BLOCK_TOKENS + 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The journals and the log of a server after a mixed load."""
    folder = tmp_path_factory.mktemp("usage")
    engine = LoggedEngine(folder, folder / "journals")
    (folder / "journals").mkdir()
    try:
        engine.start()
        for number in range(PLAIN):
            engine.call(f"plain-{number}", tokens(number % 6, 2))
        for number in range(SAMPLED):
            engine.call(f"sampled-{number}", tokens(100 + number, 2), n=4, temperature=1.0)
        for number in range(BATCHED):
            engine.call(f"batched-{number}", [tokens(number % 6, 2), tokens((number + 1) % 6, 2)])
        for number in range(STREAMED):
            options = {"include_usage": True}
            engine.call(f"streamed-{number}", tokens(number, 2), stream=True, stream_options=options)
        for _ in range(GIVEN_UP):
            engine.give_up(tokens(300, 2), 200)
        for _ in range(REPEATED):
            engine.call("repeated", tokens(400, 2))
        for place, path in enumerate(PATHS):
            text = " ".join(map(word, tokens(500 + place, 2)))
            for number in range(IN_WORDS // len(PATHS)):
                engine.ask_in_words(path, f"words-{place}-{number}", text, stream=number == 2)
        engine.terminate()
        yield folder
    finally:
        engine.kill()


def usage(folder: Path, log: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of ``kvledger check usage``."""
    command = [
        sys.executable,
        "-m",
        "kvledger",
        "check",
        "usage",
        str(folder / "journals"),
        "--log",
        str(log),
        "--format",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_HANGS)
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_every_call_is_equal_or_has_a_cause(folder: Path) -> None:
    code, result = usage(folder, folder / "usage.jsonl")

    assert 0 == code
    calls = PLAIN + SAMPLED + BATCHED + STREAMED + REPEATED + IN_WORDS
    assert calls == sum(result["calls"].values())
    assert {"one-sample": SAMPLED, "one-prompt": BATCHED} == result["causes"]
    assert PLAIN + STREAMED + REPEATED + IN_WORDS == result["calls"]["equal"]
    assert ["aborted"] * GIVEN_UP == [each["outcome"] for each in result["unlogged"]]


def test_messages_chat_and_responses_tell_what_was_read_from_the_cache(folder: Path) -> None:
    """The second and the third call of each endpoint hit both blocks, also as a stream."""
    _, result = usage(folder, folder / "usage.jsonl")
    rows = result["rows"][-IN_WORDS:]

    assert [0, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS] * len(PATHS) == [row["told_cached"] for row in rows]
    assert [row["prompt"] for row in rows] == [row["told_prompt"] for row in rows]


def test_a_changed_figure_is_unexplained(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "usage.jsonl").read_text().splitlines()
    changed = json.loads(lines[0])
    changed["usage"]["prompt_tokens_details"] = {"cached_tokens": 5}
    log = tmp_path / "usage.jsonl"
    log.write_text("\n".join([json.dumps(changed), *lines[1:]]) + "\n")

    code, result = usage(folder, log)

    assert 1 == code
    assert {"one-sample": SAMPLED, "one-prompt": BATCHED, "unexplained cached": 1} == result["causes"]


def test_a_call_is_shown_by_the_id_of_its_response(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "usage.jsonl").read_text().splitlines()]
    sampled = next(line for line in lines if line["x_request_id"] == "sampled-3")
    command = [
        sys.executable,
        "-m",
        "kvledger",
        "show",
        folder / "journals",
        sampled["id"],
        "--format",
        "json",
    ]

    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert [0, 1, 2, 3] == [int(each["request_id"][0]) for each in shown["calls"][0]["requests"]]
    assert sampled["usage"]["completion_tokens"] == shown["calls"][0]["counted_once"]["output_tokens"]
