#!/usr/bin/env bash
# SGLang with n > 1: the prompt is computed by one more request that no client sees, so a cold prompt is told as cached.
#
# Versions: sglang 0.5.23 (PyPI wheel, no dependencies), msgspec 0.20.0, numpy 2.3.5, pydantic 2.12.5.
# Expected: n samples of a prompt are n requests of the engine. The first finds nothing in an empty cache, and the usage
# (with --enable-cache-report), which has the first sample's `cached_tokens`, says 0.
# Behaviour: the tokenizer manager sends the prompt once more before the samples, with `max_new_tokens` 0 and an id of
# its own, waits for it, and drops its answer. It is this request that computes the prompt. So for n = 3 and 1,000
# tokens the engine has 4 requests with 4,000 prompt tokens, and the usage of the cold prompt has 999 of 1,000 tokens
# cached; the same prompt with n = 1 has 0.
# So a bill that discounts cached tokens discounts a prompt that was just computed, and a hit rate from usage is near 1
# for traffic that never repeats a prompt. The engine counts one request for each such prompt that no client knows of,
# and in its request ids nothing says which.
#
# SGLang's own are the requests' normalisation, the tokenizer manager's batches, the radix cache and the usage. The
# engine between them is short: it looks all tokens but the last one up, as SGLang's does, and keeps the prompt.
#
# Output seen (2026-11-28):
#   n = 1, the engine has 1 request
#     max_new_tokens 8: 1000 prompt tokens, 0 cached
#     usage: prompt_tokens 1000, cached_tokens 0
#   n = 3, the engine has 4 requests
#     max_new_tokens 0: 1000 prompt tokens, 0 cached
#     max_new_tokens 8: 1000 prompt tokens, 999 cached
#     max_new_tokens 8: 1000 prompt tokens, 999 cached
#     max_new_tokens 8: 1000 prompt tokens, 999 cached
#     usage: prompt_tokens 1000, cached_tokens 999
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install --quiet --quiet --disable-pip-version-check --no-warn-conflicts --target "$folder/lib" \
    msgspec==0.20.0 numpy==2.3.5 pydantic==2.12.5
"$python" -m pip download --quiet --quiet --disable-pip-version-check --no-deps --dest "$folder" sglang==0.5.23
"$python" -m zipfile -e "$folder"/sglang-0.5.23-*.whl "$folder/sglang"
PYTHONPATH="$folder/lib" "$python" - "$folder/sglang" <<'PYTHON'
import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from array import array
from pathlib import Path

OWN = """
    beam_search.types disaggregation.kv_events entrypoints.openai.usage_processor lora.lora_registry
    managers.embed_types managers.io_struct managers.kv_hints managers.tokenizer_manager mem_cache.base_prefix_cache
    mem_cache.cache_init_params mem_cache.events mem_cache.evict_policy mem_cache.radix_cache mem_cache.utils
    sampling.sampling_mask sampling.sampling_params utils.msgpack_utils utils.msgspec_utils utils.weight_versions
""".split()
OWN = {f"sglang.srt.{name}" for name in OWN}
ABSENT = {"sglang", "fastapi", "psutil", "pybase64", "requests", "torch", "uvloop", "zmq"}


def stub(name):
    return Stub(name, (), {"__init__": lambda self, *args, **kwargs: None})


class Stub(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Module(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """SGLang's own modules from the wheel; all others, and the packages they need, can be imported and named."""

    def find_spec(self, name, path=None, target=None):
        if name in OWN:
            file = Path(sys.argv[1], *name.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.partition(".")[0] in ABSENT:
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
import uvloop

uvloop.EventLoopPolicy = asyncio.DefaultEventLoopPolicy
torch.tensor = lambda values, **_: Tensor(values)

import sglang.srt.entrypoints.openai.usage_processor as usage_processor
import sglang.srt.managers.io_struct as io_struct
import sglang.srt.managers.tokenizer_manager as tokenizer_manager
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

# Four helpers of modules that are not loaded.
io_struct.get_return_hidden_states_mode = lambda value: False
tokenizer_manager.get_bool_env_var = lambda name: False
usage_processor.UsageInfo = usage_processor.PromptTokensDetails = types.SimpleNamespace


class Manager(tokenizer_manager.TokenizerManager):
    """SGLang's, with an engine behind it that keeps what it computed."""

    def __init__(self):
        self.cache = RadixCache.create_simulated()
        self.rid_to_state = {}
        self.sent = []
        self.answers = {}

    def _init_req_state(self, obj, request=None):
        for name in [obj.rid] if isinstance(obj.rid, str) else obj.rid:
            self.rid_to_state[name] = tokenizer_manager.ReqState(
                [], False, asyncio.Event(), obj, types.SimpleNamespace(set_finished_time=lambda: None)
            )

    def _should_use_batch_tokenization(self, size, requests):
        return False

    async def _tokenize_one_request(self, obj):
        parameters = SamplingParams(**obj.sampling_params)
        return types.SimpleNamespace(
            rid=obj.rid, input_ids=array("q", obj.input_ids), sampling_params=parameters, stream=False
        )

    async def _send_one_request(self, sent):
        prompt = RadixKey(sent.input_ids)
        reach = RadixKey(sent.input_ids, limit=len(prompt) - 1)
        cached = self.cache.match_prefix(MatchPrefixParams(key=reach)).device_prefix_len
        self.cache.insert(InsertParams(key=prompt))
        outputs = sent.sampling_params.max_new_tokens
        self.sent.append((outputs, len(prompt), cached))
        figures = {"prompt_tokens": len(prompt), "cached_tokens": cached, "completion_tokens": outputs}
        self.answers[sent.rid] = {"meta_info": figures}

    async def _wait_one_response(self, obj, request=None):
        yield self.answers[obj.rid]


async def generate(n):
    manager = Manager()
    asked = io_struct.GenerateReqInput(input_ids=[list(range(1000))], sampling_params=[{"n": n, "max_new_tokens": 8}])
    asked.normalize_batch_and_arguments()
    manager._init_req_state(asked)
    states = dict(manager.rid_to_state)
    answers = [answer async for answer in manager._handle_batch_request(asked, None, states)][0]
    usage = usage_processor.UsageProcessor.calculate_response_usage(answers, n, enable_cache_report=True)
    count = len(manager.sent)
    print(f"n = {n}, the engine has {count} request{'s' * (count > 1)}")
    for outputs, length, cached in manager.sent:
        print(f"  max_new_tokens {outputs}: {length} prompt tokens, {cached} cached")
    told = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
    print("  usage: prompt_tokens {}, cached_tokens {}".format(*told))
    return manager.sent, told


found = [asyncio.run(generate(n)) for n in (1, 3)]
sample = (8, 1000, 999)
assert found == [
    ([(8, 1000, 0)], (1000, 0)),
    ([(0, 1000, 0), sample, sample, sample], (1000, 999)),
], "the behaviour has changed"
PYTHON
