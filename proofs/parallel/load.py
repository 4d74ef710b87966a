"""A mixed load: samples, batches, streams, repeated calls, clients that leave, and tool loops."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.serving.chat_model import word, write_tokenizer
from tests.serving.processes import BLOCK_TOKENS, wait_until
from tests.serving.test_usage import LoggedEngine, tokens

PLAIN, SAMPLED, BATCHED, STREAMED, REPEATED, LEFT, LOOPS, TURNS = 24, 12, 12, 8, 4, 6, 4, 4
ANSWERS = PLAIN + SAMPLED + BATCHED + STREAMED + 2 * REPEATED + LEFT + LOOPS * TURNS
"""How many answers end with a usage. The first attempt of each client that leaves has none."""

BLOCKS = 40
"""Blocks of one engine: too few to keep every prompt of the load."""

CLIENTS = 6

PIPELINE = "--pipeline-parallel-size 2 -cc.mode=2 -cc.backend=eager"
"""With ``--enforce-eager``, vLLM 0.32 on a CPU never allocates what the second stage receives."""

WORKERS = {"--tensor-parallel-size", "--pipeline-parallel-size"}
"""Options with which an engine has workers in processes of their own."""

START_SECONDS = 900.0
"""Up to seven processes import vLLM at once."""


class ParallelServer(LoggedEngine):
    """``vllm serve`` with the given options, and a tokenizer for chats."""

    def __init__(self, folder: Path, options: str, level: str) -> None:
        folder.mkdir(parents=True)
        (folder / "journals").mkdir()
        super().__init__(folder, folder / "journals")
        write_tokenizer(folder / "model")
        self._options, self._level = options, level

    def command(self) -> list[str]:
        python, *rest = super().command()
        left_out = {"--skip-tokenizer-init"}
        if "--pipeline-parallel-size" in self._options:
            left_out.add("--enforce-eager")
        words = [each for each in rest[2:] if each not in left_out]
        place = words.index("--model")
        model = words[place + 1]
        del words[place : place + 2]
        words[words.index("--num-gpu-blocks-override") + 1] = str(BLOCKS)
        if WORKERS.intersection(self._options.split()):
            words[words.index("--distributed-executor-backend") + 1] = "mp"
        return [python, "-m", "tests.serving.vllm_serve", "serve", model, *words, *self._options.split()]

    def start(self) -> None:
        self.launch()
        wait_until(self.answers, START_SECONDS, self.last_words)

    def environment(self) -> dict[str, str]:
        return super().environment() | {"KVLEDGER_LEVEL": self._level}

    def chat(self, request_id: str, messages: list[dict[str, Any]]) -> str:
        """The text of the answer to a chat."""
        asked = {"model": "tiny", "messages": messages, "max_tokens": 12, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
        with connection.getresponse() as response:
            body = response.read()
            assert 200 == response.status, body
        return str(json.loads(body)["choices"][0]["message"]["content"])

    def leave(self, request_id: str, prompt: list[int]) -> None:
        """Send a call, and disconnect after the start of its answer."""
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        connection.getresponse().read(1)
        connection.close()


@contextlib.contextmanager
def running(folder: Path, options: str, level: str) -> Iterator[ParallelServer]:
    """A server, which ends so that its journals are complete."""
    server = ParallelServer(folder, options, level)
    try:
        server.start()
        yield server
        server.stop()
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()


def send(server: ParallelServer) -> None:
    """Send the load, as several clients at once. Fails if an answer is no success."""
    kinds: tuple[tuple[int, Callable[[ParallelServer, int], object]], ...] = (
        (PLAIN, _plain),
        (SAMPLED, _sampled),
        (BATCHED, _batched),
        (STREAMED, _streamed),
        (REPEATED, _repeated),
        (REPEATED, _repeated),
        (LEFT, _left_and_again),
        (LOOPS, _tool_loop),
    )
    most = max(count for count, _ in kinds)
    with ThreadPoolExecutor(CLIENTS) as clients:
        sent = [
            clients.submit(call, server, number)
            for number in range(most)
            for count, call in kinds
            if number < count
        ]
        for each in sent:
            each.result()


def _plain(server: ParallelServer, number: int) -> None:
    """Six prompts, each of several calls."""
    server.call(f"plain-{number}", tokens(number % 6, 2))


def _sampled(server: ParallelServer, number: int) -> None:
    server.call(f"sampled-{number}", tokens(100 + number // 2, 2), n=4, temperature=1.0)


def _batched(server: ParallelServer, number: int) -> None:
    server.call(f"batched-{number}", [tokens(number % 6, 2), tokens(200 + number, 3)])


def _streamed(server: ParallelServer, number: int) -> None:
    server.call(f"streamed-{number}", tokens(number, 2), stream=True, stream_options={"include_usage": True})


def _repeated(server: ParallelServer, number: int) -> None:
    """A gateway repeats a call that takes too long: both have one ``X-Request-Id``, and both are answered."""
    server.call(f"repeated-{number}", tokens(500 + number, 2), max_tokens=24)


def _left_and_again(server: ParallelServer, number: int) -> None:
    """A client leaves, and sends its call again with the same ``X-Request-Id``."""
    server.leave(f"left-{number}", tokens(300 + number, 2))
    server.call(f"left-{number}", tokens(300 + number, 2))


def _tool_loop(server: ParallelServer, number: int) -> None:
    """A chat whose next turn has the earlier turns, the call of a tool, and the tool's result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": _text(400 + number, 2 * BLOCK_TOKENS)}]
    for turn in range(TURNS):
        answer = server.chat(f"loop-{number}-{turn}", messages)
        call = {"id": f"call-{turn}", "type": "function", "function": {"name": "w99", "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": answer, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call-{turn}", "content": _text(450 + turn, 20)},
        ]


def _text(seed: int, words: int) -> str:
    """A text of so many words, each of which is one token."""
    return " ".join(word(token + 10) for token in tokens(seed, -(-words // BLOCK_TOKENS))[:words])
