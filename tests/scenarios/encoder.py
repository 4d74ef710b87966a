"""Workloads of multimodal requests: what the encoder cache hits, evicts, and loses track of.

As in `tests.scenarios.workloads`, each workload leaves its engine idle. An image has as many embeddings as
positions.
"""

from typing import Any

from tests.scenarios.driving import Attach, Driver, images, start
from tests.scenarios.registry import BOTH, workload


@workload(**BOTH)
def image_of_two_requests(attach: Attach = id, **setup: Any) -> Driver:
    """A second request has the image of the first one at another place, behind other text."""
    driver = start(attach, encoder_tokens=64, **setup)
    driver.add("first", 100, 3, of_request=images(("cat", 16, 32)))
    driver.run()
    driver.add("r", 120, 3, of_request=images(("cat", 48, 32)))
    driver.run()
    return driver


@workload(**BOTH)
def images_evicted_after_use(attach: Attach = id, **setup: Any) -> Driver:
    """Four images of requests one after another in a cache for two; the first comes again."""
    driver = start(attach, encoder_tokens=64, **setup)
    for place, name in enumerate(("cat", "dog", "cow", "hen", "cat")):
        driver.add(f"{name} {place}", 100, 3, of_request=images((name, 16, 32)))
        driver.run()
    return driver


@workload(**BOTH)
def image_in_chunks(attach: Attach = id, **setup: Any) -> Driver:
    """A step ends within an image, and another request has the same image in the same steps."""
    driver = start(attach, encoder_tokens=64, max_batched_tokens=64, **setup)
    driver.add("first", 100, 3, of_request=images(("cat", 16, 48)))
    driver.add("r", 100, 3, of_request=images(("cat", 16, 48)))
    driver.run()
    return driver


@workload(**BOTH)
def image_twice_in_a_prompt(attach: Attach = id, **setup: Any) -> Driver:
    """One step reads an image to its end and begins its second place; then another request needs space.

    Until 0.28 the image loses its reference with its first place, and is evicted (vLLM#54284).
    """
    options = (("long_prefill_token_threshold", 40),)
    driver = start(attach, encoder_tokens=24, max_batched_tokens=128, scheduler_options=options, **setup)
    driver.add("other", 120, 3, of_request=images(("dog", 40, 16)))
    driver.add("r", 120, 3, of_request=images(("cat", 8, 16), ("cat", 32, 16)))
    driver.run()
    return driver


@workload()
def image_of_a_request_preempted_in_its_step(attach: Attach = id, **setup: Any) -> Driver:
    """An urgent request preempts `r` in the step that was to compute its image.

    The image stays in the engine's cache, and no worker computes it. `r` hits it when it is resumed.
    """
    options = (("long_prefill_token_threshold", 32),)
    driver = start(
        attach,
        encoder_tokens=64,
        policy="priority",
        blocks=13,
        scheduler_options=options,
        **setup,
    )
    driver.add("first", 3, 12, priority=0)  # one prefill alone would have no threshold
    driver.add("r", 110, 3, priority=1, of_request=images(("cat", 96, 8)))
    driver.step()
    driver.add("urgent", 120, 3, priority=0)
    driver.run()
    return driver


@workload()
def encoder_decoder(attach: Attach = id, **setup: Any) -> Driver:
    """A model of speech: each decode step credits the encoder cache again (vLLM#55733)."""
    driver = start(
        attach,
        encoder_tokens=100,
        encoder_decoder=True,
        groups=("full", "cross"),
        prefix_caching=False,
        **setup,
    )
    driver.add("r", 20, 6, of_request=images(("speech", 0, 40)))
    driver.run()
    driver.add("later", 20, 3, of_request=images(("more speech", 0, 40)))
    driver.run()
    return driver
