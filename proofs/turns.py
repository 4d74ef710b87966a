"""Runs agent chats with planted causes on two real servers, and compares what kvledger says of each turn.

    make proof NAME=turns ARGS="[--sessions 300] [--folder FOLDER] [--write]"

Each word of the model's vocabulary has three letters, so the client knows the tokens of every prompt and
answer. What a turn must miss is computed from them, and from the cached tokens that the server reports.
FOLDER has each server's journals.
The clients think for some time and ask again, up to thirty times. Planted are: a time in the system prompt,
tools in another order, a changed tool, a rewritten history, an answer that comes back shorter, a turn on the
other server, a reset of the prefix cache, and a pause in which other requests take the blocks. Most sessions
have nothing planted. ``--write`` puts the table into docs/turns.md.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.page import put_between
from tests.serving.processes import Engine

from kvledger.audit.analysis.turns import Turn
from kvledger.audit.client_ids import part_of
from kvledger.audit.replay.request_traces import block_turns
from kvledger.exporters.facts.kept_blocks import recorded_blocks
from kvledger.exporters.reports.turns import turns

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "turns.md"
BEGIN, END = "<!-- make proof NAME=turns ARGS=--write -->", "<!-- end -->"
BLOCK = 32
WORDS = ["".join(letters) for letters in product("bdfgklmn", "aeiouy", "bdfgklmnprs")][:507]
MARKS = ["<S>", "<U>", "<A>", "<T>", "<E>"]
TEMPLATE = (
    "{% for tool in tools or [] %}<T>{{ tool.function.description }}{% endfor %}"
    "{% for m in messages %}{{ '<S>' if m.role == 'system' else '<U>' if m.role == 'user' else '<A>' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"
)
QUIET, STAMPED, ORDER, TOOL, COMPACT, STRIPPED, ELSEWHERE, RESET, PAUSED = (
    "nothing", "a time in the system prompt", "tools in another order", "a changed tool",
    "a rewritten history", "an answer that comes back shorter", "a turn on the other server",
    "a reset of the prefix cache", "a pause beyond retention",
)  # fmt: skip
CAUSES = {
    QUIET: "", STAMPED: "diverged", ORDER: "diverged", TOOL: "diverged", COMPACT: "diverged",
    STRIPPED: "answer", ELSEWHERE: "other_engine", RESET: "cache_reset", PAUSED: "evicted",
}  # fmt: skip


class Chats(Engine):
    """A server with a chat template, without a connector."""

    def __init__(self, folder: Path, journals: Path, name: str, blocks: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, journals)
        write_tokenizer(folder / "model")
        self.name, self.blocks = name, blocks

    def command(self) -> list[str]:
        words = [word for word in super().command() if word != "--skip-tokenizer-init"]
        place = words.index("--kv-transfer-config")
        del words[place : place + 2]
        for option, value in {
            "block-size": BLOCK,
            "num-gpu-blocks-override": self.blocks,
            "max-model-len": 6_000,
            "max-num-seqs": 16,
            "max-num-batched-tokens": 2_048,
        }.items():
            words[words.index(f"--{option}") + 1] = str(value)
        return [*words, "--enable-prompt-tokens-details"]

    def environment(self) -> dict[str, str]:
        more = {
            "KVLEDGER_LEVEL": "blocks",
            "KVLEDGER_NAME": self.name,
            "VLLM_CPU_KVCACHE_SPACE": "2",
        }
        return super().environment() | more

    def chat(self, name: str, body: dict[str, Any], output: int) -> tuple[str, int]:
        """The answer to a chat, and the cached tokens that the server reports."""
        asked = body | {
            "model": "tiny", "max_tokens": output, "temperature": 0, "ignore_eos": True,
            "tool_choice": "none", "skip_special_tokens": False,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
        response = connection.getresponse()
        told = json.loads(response.read())
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"The server answered {response.status}: {told}")
        details = told["usage"].get("prompt_tokens_details") or {}
        return told["choices"][0]["message"]["content"], int(details.get("cached_tokens") or 0)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words of three letters, and the chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate([*MARKS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("..."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8_192}))


def text(dice: random.Random, count: int) -> str:
    """So many words."""
    return "".join(dice.choice(WORDS) for _ in range(count))


def prompt_of(body: dict[str, Any]) -> list[str]:
    """The tokens of a chat's prompt."""
    marks = {"system": "<S>", "user": "<U>", "assistant": "<A>"}
    whole = "".join(f"<T>{tool['function']['description']}" for tool in body.get("tools", ()))
    whole += "".join(f"{marks[one['role']]}{one['content']}" for one in body["messages"]) + "<A>"
    return words_of(whole)


def words_of(whole: str) -> list[str]:
    """The tokens of a text."""
    return [whole[at : at + 3] for at in range(0, len(whole), 3)]


@dataclass
class Sent:
    """One turn as the client knows it. ``planted``: the change that this turn has; "": none."""

    name: str
    prompt: list[str]
    sequence: list[str]
    cached: int
    planted: str


@dataclass
class Session:
    """One agent: what is planted in it and when."""

    name: str
    kind: str
    turns: int
    at: int
    """The turn with the planted change, from 2."""
    dice: random.Random
    sent: list[Sent] = field(default_factory=list)

    def run(self, home: Chats, other: Chats) -> None:
        """Chat to the end."""
        dice = self.dice
        tools = [(f"t{place}", text(dice, dice.randrange(12, 40))) for place in range(4)]
        body: dict[str, Any] = {
            "session_id": self.name,
            "messages": [
                {"role": "system", "content": text(dice, dice.randrange(40, 120))},
                {"role": "user", "content": text(dice, dice.randrange(8, 40))},
            ],
        }
        for number in range(1, self.turns + 1):
            planted = self._plant(number, body, tools)
            body["tools"] = [
                {"type": "function", "function": {"name": name, "description": words}}
                for name, words in tools
            ]
            server = other if planted == ELSEWHERE else home
            if planted == RESET:
                server.reset_cache()
            if planted == PAUSED:
                for filler in range(3):
                    self._fill(server, filler)
            asked, output = f"{self.name}-{number}", dice.randrange(6, 48)
            answer, cached = server.chat(asked, body, output)
            prompt = prompt_of(body)
            self.sent.append(Sent(asked, prompt, prompt + words_of(answer), cached, planted))
            stripped = self.kind == STRIPPED and number + 1 == self.at
            kept = answer[: 3 * (len(answer) // 6)] if stripped else answer
            body["messages"] += [
                {"role": "assistant", "content": kept},
                {"role": "user", "content": text(dice, dice.randrange(8, 40))},
            ]

    def _plant(self, number: int, body: dict[str, Any], tools: list[tuple[str, str]]) -> str:
        """Change the chat as planned. Returns what changed in this turn."""
        system = body["messages"][0]
        if self.kind == STAMPED:
            system["content"] = text(self.dice, 4) + system["content"][12:]
            return STAMPED if number > 1 else ""
        if number != self.at or self.kind == QUIET:
            return ""
        if self.kind == ORDER:
            tools[1], tools[3] = tools[3], tools[1]
        elif self.kind == TOOL:
            tools[2] = tools[2][0], text(self.dice, len(tools[2][1]) // 3)
        elif self.kind == COMPACT:
            body["messages"][1:-1] = [{"role": "user", "content": text(self.dice, 30)}]
        return self.kind

    def _fill(self, server: Chats, filler: int) -> None:
        blocks = 6_000 // BLOCK - 8
        body = {
            "session_id": f"{self.name}-filler-{filler}",
            "messages": [{"role": "user", "content": text(self.dice, blocks * BLOCK)}],
        }
        server.chat(f"{self.name}-filler-{filler}", body, 2)


def session(name: str, kind: str, most: int, dice: random.Random) -> Session:
    """A session of five to ``most`` turns."""
    count = dice.randint(5, most)
    return Session(name, kind, count, dice.randint(2, count), random.Random(f"{name} {dice.random()}"))


def expected(before: Sent, turn: Sent) -> dict[str, int]:
    """What a turn must miss of the turn before, by cause."""
    reusable = min(len(before.sequence) - 1, len(turn.prompt) - 1)
    same = next(
        (i for i, (a, b) in enumerate(zip(before.sequence, turn.prompt, strict=False)) if a != b), reusable
    )
    whole, hit, cause = reusable // BLOCK * BLOCK, min(turn.cached, reusable), CAUSES[turn.planted or QUIET]
    if turn.planted == ELSEWHERE:
        return {cause: reusable - hit} if reusable > hit else {}
    found = Counter[str]()
    if same // BLOCK * BLOCK < whole:
        in_prompt = (same // BLOCK + 1) * BLOCK <= len(before.prompt)
        found["diverged" if in_prompt else "answer"] += reusable - hit
    else:
        found[cause] += whole - hit
        found["below_block"] += reusable - whole
    return {each: tokens for each, tokens in found.items() if tokens}


def compare(sessions: Sequence[Session], told: Sequence[Turn]) -> Iterator[str]:
    """The rows of the table: planted changes, those whose cause and tokens are right, and false ones."""
    # by the names that the client gave the requests
    by_name = {part_of(turn.request_id).call.removeprefix("chatcmpl-"): turn for turn in told}
    rows: dict[str, Counter[str]] = {kind: Counter() for kind in CAUSES}
    for session in sessions:
        for number, turn in enumerate(session.sent):
            row, found = rows[turn.planted or QUIET], by_name[turn.name]
            row["turns"] += 1
            row["hit"] += found.hit == turn.cached
            if not number:
                row["right"] += not found.before
                continue
            before = session.sent[number - 1]
            if turn.planted != ELSEWHERE and before.planted == ELSEWHERE:
                must, tokens = {"other_engine"}, found.lost  # the turn after comes back to the first server
                row["right"] += tokens.keys() <= must | {"below_block"}
            else:
                must_miss = expected(before, turn)
                row["right"] += must_miss == found.lost
                row["tokens"] += sum(must_miss.values())
                if must_miss != found.lost:
                    print(
                        f"  {turn.name} ({turn.planted or QUIET}): expected {must_miss}, found {found.lost}"
                    )
    yield "| planted | turns | hits as reported | cause and tokens right | lost tokens |"
    yield "|---|---:|---:|---:|---:|"
    for kind, row in rows.items():
        if row["turns"]:
            yield (f"| {kind} | {row['turns']:,} | {row['hit']:,} | {row['right']:,} | {row['tokens']:,} |")


def inferred(journals: Path) -> str:
    """How well sessions are inferred: by the turn before of each turn, beside that of the given session."""
    given: dict[str, str] = {}
    guessed: dict[str, str] = {}
    for path in sorted(journals.iterdir()):
        if path.is_dir():
            given |= {turn.request_id: turn.before for turn in block_turns(recorded_blocks(path))[0]}
            recorded = recorded_blocks(path)
            for request in recorded.requests:
                request.session = ""
            guessed |= {turn.request_id: turn.before for turn in block_turns(recorded)[0]}
    found = [name for name, before in guessed.items() if before]
    right = sum(guessed[name] == given[name] for name in found)
    later = [name for name, before in given.items() if before]
    known = sum(guessed[name] == given[name] for name in later)
    return (
        f"Without session ids: {len(found):,} turns before were inferred, {right:,} of them right "
        f"({right / len(found):.2%}); of {len(later):,} turns that follow another one {known:,} were found "
        f"({known / len(later):.2%})."
    )


def main() -> None:
    """Run the chats and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kvledger-turns-"))
    dice = random.Random(args.seed)
    kinds = [QUIET] * 4 + [STAMPED, ORDER, TOOL, COMPACT, STRIPPED, ELSEWHERE]
    sessions = [session(f"s{n}", kinds[n % len(kinds)], 30, dice) for n in range(args.sessions - 20)]
    apart = [session(f"p{n}", (RESET, PAUSED)[n % 2], 12, dice) for n in range(20)]
    journals = folder / "journals"
    large = Chats(folder / "large", journals, "large", 40_000)
    small = Chats(folder / "small", journals, "small", 400)
    try:
        for server in (large, small):
            server.start()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda one: one.run(large, small), sessions))
        for one in apart:
            one.run(small, large)
    finally:
        for server in (large, small):
            server.stop()
    every = [*sessions, *apart]
    told = turns([journals]).each
    table = list(compare(every, told))
    print(f"{len(every)} sessions, {sum(len(one.sent) for one in every):,} requests")
    print("\n".join(table))
    print(inferred(journals))
    if args.write:
        put_between(BEGIN, END, [*table, "", inferred(journals)], PAGE)


if __name__ == "__main__":
    main()
