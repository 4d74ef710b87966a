#!/usr/bin/env bash
# LiteLLM in front of vLLM: /v1/messages tells another `input_tokens` than vLLM's own /v1/messages does.
#
# Versions: litellm 1.110.2 (PyPI), on usage in the form of vLLM 0.32.0's chat completions.
# Behaviour: in Anthropic's form all input is `input_tokens` + `cache_read_input_tokens` +
# `cache_creation_input_tokens`. vLLM's chat completions tell the tokens written to the cache as
# `prompt_tokens_details.created_cache_tokens`, and vLLM's own /v1/messages
# (vllm/entrypoints/anthropic/serving.py) subtracts them: of 1,000 prompt tokens, 900 read and 96 written,
# `input_tokens` is 4. LiteLLM's adapter from chat completions to messages knows the written tokens by another name
# only (`cache_creation_tokens`) and drops vLLM's field without a word: `input_tokens` is 100, and nothing was
# written. Both add up to 1,000, so a sum does not show it; whoever prices written tokens apart bills 96 tokens of
# this call otherwise than behind the engine itself.
#
# Output seen (2026-11-28):
#   cached_tokens 900, created_cache_tokens 96: input_tokens 100, read 900, written None
#   cached_tokens 900, cache_creation_tokens 96: input_tokens 4, read 900, written 96
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install --quiet --quiet --disable-pip-version-check --target "$folder" litellm==1.110.2 2>/dev/null
LITELLM_LOCAL_MODEL_COST_MAP=True PYTHONPATH="$folder" "$python" - <<'PYTHON'
from litellm.llms.anthropic.messages.adapters.transformation import LiteLLMAnthropicMessagesAdapter
from litellm.types.utils import Choices, Message, ModelResponse, PromptTokensDetailsWrapper, Usage


def told(**details):
    usage = Usage(
        prompt_tokens=1000,
        completion_tokens=10,
        total_tokens=1010,
        prompt_tokens_details=PromptTokensDetailsWrapper(**details),
    )
    choices = [Choices(message=Message(content="a"), finish_reason="stop")]
    response = ModelResponse(id="chatcmpl-1", model="own", choices=choices, usage=usage)
    found = LiteLLMAnthropicMessagesAdapter().translate_openai_response_to_anthropic(response)["usage"]
    figures = tuple(
        found.get(name)
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )
    words = ", ".join(f"{name} {count}" for name, count in details.items())
    print("{}: input_tokens {}, read {}, written {}".format(words, *figures))
    return figures


vllm = told(cached_tokens=900, created_cache_tokens=96)
other = told(cached_tokens=900, cache_creation_tokens=96)
assert vllm == (100, 900, None) and other == (4, 900, 96), "the behaviour has changed"
PYTHON
