"""A random workload: shared prefixes, priorities, a small pool, and updates with and without a reset."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from .subject import Result, Subject, text

OPTIONS: dict[str, Any] = {
    "scheduling_policy": "priority",
    "num_gpu_blocks_override": 24,
    "max_model_len": 320,
    "max_num_seqs": 6,
}
WAYS = ("reload_weights", "apply_model", "update_weights", "model.load_weights")
SEEDS = 40
"""Different weights; equal ones come back."""


def serve(folder: Path, tokens: int, seed: int) -> tuple[Result, dict[str, int]]:
    """Serve random requests until so many output tokens came; counts of what happened."""
    choose = random.Random(seed)
    subject = Subject(folder, **OPTIONS, weight_transfer_config={"backend": "folder"})
    counts = {"requests": 0, "steps": 0, "updates": 0, "resets": 0, "refused": 0, "preemptions": 0}
    prefixes = [text(-number, 160) for number in range(1, 6)]
    while sum(len(one.tokens) for one in subject.served.values()) < tokens:
        while subject.live.get_num_unfinished_requests() < 9:
            own = [choose.randrange(2, 512) for _ in range(choose.randrange(1, 60))]
            prompt = choose.choice(prefixes)[: choose.choice((0, 32, 64, 96, 160))] + own
            subject.add(prompt, choose.randrange(4, 70), choose.randrange(3))
            counts["requests"] += 1
        subject.step()
        counts["steps"] += 1
        if choose.random() < 1 / 40:
            subject.update(choose.randrange(SEEDS), choose.choice(WAYS))
            counts["updates"] += 1
            if choose.random() < 0.6:
                running = choose.random() < 0.7
                subject.reset(reset_running_requests=running)
                counts["resets"] += 1
    subject.run()
    counts["refused"] = subject.refused
    result = subject.result()
    counts["preemptions"] = subject.audit.totals.preemptions
    return result, counts
