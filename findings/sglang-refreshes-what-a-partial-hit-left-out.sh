#!/usr/bin/env bash
# SGLang: a request that hits ten tokens of a cached prompt makes all of that prompt recently used.
#
# Versions: sglang 0.5.13 and 0.5.23 (PyPI wheels, no dependencies), numpy 2.3.5; RadixCache, LRU, page size 1. The
# first release serves a plain model from this class by default.
# Expected: the radix cache is LRU by prefix. Who hits the first 10 of 1,000 tokens uses these. The other 990 keep the
# age that they have, and go before a prompt that was stored after them.
# Behaviour: a match sets the time of a node before it looks how much of it matches, and the split that follows leaves
# the new time on the part that doesn't. Prompt A is stored, then B, then a request comes that has only A's first 10
# tokens. When 990 tokens are needed, B is evicted, all 1,000 of it, and A's 990 stay, for which nobody has asked since.
# If another request had split A at these 10 tokens before B came, the same traffic evicts A's 990.
# So the age of a token is not the time since a request used it. A short shared beginning (a system prompt) renews a
# whole conversation, but only when the conversation is split there for the first time. A replay of the log with an LRU
# over tokens or blocks tells other hits than the engine had, and the time since an evicted token's last use depends on
# who split the prompt before.
# 0.5.23 makes another class (UnifiedRadixCache) for plain models, with a core in Rust or Python. By its source the
# split of the one in Python sets the time of the rest, too. Neither is run here, and nothing is said of the one in
# Rust, which is the default.
#
# Output seen (2026-11-28):
#   0.5.13, A is one node:         evicted 0 tokens of A, 1000 of B
#   0.5.13, A was split before B:  evicted 990 tokens of A, 0 of B
#   0.5.23, A is one node:         evicted 0 tokens of A, 1000 of B
#   0.5.23, A was split before B:  evicted 990 tokens of A, 0 of B
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install --quiet --quiet --disable-pip-version-check --no-warn-conflicts --target "$folder/lib" \
    numpy==2.3.5
for release in 0.5.13 0.5.23; do
    "$python" -m pip download --quiet --quiet --disable-pip-version-check --no-deps --dest "$folder" "sglang==$release"
    "$python" -m zipfile -e "$folder"/sglang-"$release"-*.whl "$folder/$release"
    PYTHONPATH="$folder/lib" "$python" - "$folder/$release" "$release" <<'PYTHON'
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from array import array
from pathlib import Path

root, release = Path(sys.argv[1]), sys.argv[2]
OWN = {
    f"sglang.srt.mem_cache.{name}"
    for name in ("base_prefix_cache", "cache_init_params", "events", "evict_policy", "radix_cache", "utils")
}


def stub(name):
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


class Module(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The radix cache's own modules from the wheel; all others, and torch, can be imported and named."""

    def find_spec(self, name, path=None, target=None):
        if name in OWN:
            return importlib.util.spec_from_file_location(name, root.joinpath(*name.split(".")).with_suffix(".py"))
        if name.partition(".")[0] in {"sglang", "torch"}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


class Tensor(list):
    """What the radix cache needs of a tensor."""

    def __getitem__(self, place):
        found = super().__getitem__(place)
        return Tensor(found) if isinstance(place, slice) else found

    def clone(self):
        return Tensor(self)


sys.meta_path.insert(0, Finder())
import torch

torch.tensor = lambda values, **_: Tensor(values)
torch.empty = lambda *_, **__: Tensor()
torch.cat = lambda tensors: Tensor(one for tensor in tensors for one in tensor)

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


class Allocator:
    """It is given the slots of what is evicted. A token's slot has the token's number."""

    device = "cpu"

    def __init__(self):
        self.freed = []

    def free(self, slots):
        self.freed += slots

    def free_segment(self, slots, start_pos=0):
        self.freed += slots


def prompt(first, *more):
    return RadixKey(array("q", [*range(first, first + 10), *more]))


def evicted(split):
    allocator = Allocator()
    cache = RadixCache.create_simulated(mock_allocator=allocator)
    cache.insert(InsertParams(key=prompt(0, *range(10, 1000))))  # A
    if split:
        cache.match_prefix(MatchPrefixParams(key=prompt(0, 5000)))
    cache.insert(InsertParams(key=prompt(2000, *range(2010, 3000))))  # B
    cache.match_prefix(MatchPrefixParams(key=prompt(0, 6000)))
    cache.evict(EvictParams(num_tokens=990))
    return sum(slot < 1000 for slot in allocator.freed), sum(slot >= 2000 for slot in allocator.freed)


seen = []
for words, split in (("A is one node:       ", False), ("A was split before B:", True)):
    seen.append(evicted(split))
    print("{}, {}  evicted {} tokens of A, {} of B".format(release, words, *seen[-1]))
assert seen == [(0, 1000), (990, 0)], "the behaviour has changed"
PYTHON
done
