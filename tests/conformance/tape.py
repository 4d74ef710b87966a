"""Writes down a driven scheduler in the words of the golden histories, one line for each request.

It hooks the scheduler instance that a scenario shows it, and reads the engine's own figures. This
is not kvledger's observer: it is the shortest thing that tells whether a scenario reached its
history.
"""

import inspect
from collections import defaultdict
from typing import Any


class Tape:
    """Attach with `scenario(tape.attach)`; read with `tape.words(request_id)`."""

    def __init__(self) -> None:
        self._words: dict[str, list[str]] = defaultdict(list)
        self._local: dict[str, int] = {}
        self._promised: dict[str, int] = {}
        self._loading_now: set[str] = set()

    def words(self, request_id: str) -> str:
        return " ".join(self._words[request_id])

    def attach(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        bound = inspect.signature(manager.allocate_slots).bind
        allocate_slots, schedule = manager.allocate_slots, scheduler.schedule
        update_from_output, free = scheduler.update_from_output, scheduler._free_request
        preempt, landed = scheduler._preempt_request, scheduler._update_waiting_for_remote_kv

        def allocated(*args: Any, **kwargs: Any) -> Any:
            looked_up = args[0].num_computed_tokens == 0
            blocks = allocate_slots(*args, **kwargs)
            if blocks is not None and looked_up:
                named = bound(*args, **kwargs).arguments
                self._admitted(named, asynchronous=bool(named.get("delay_cache_blocks")))
            return blocks

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for name, positions in output.num_scheduled_tokens.items():
                self._words[name].append(f"s{positions}")
            return output

        def updated(step: Any, answer: Any) -> Any:
            drafts = step.scheduled_spec_decode_tokens
            for name in step.num_scheduled_tokens:
                if name in scheduler.requests:
                    tokens = answer.sampled_token_ids[answer.req_id_to_index[name]]
                    self._answered(name, len(tokens), len(drafts.get(name, ())))
            return update_from_output(step, answer)

        def preempted(request: Any, *args: Any, **kwargs: Any) -> None:
            lost = kwargs.get("drop_stale_output") and request.num_in_flight_tokens
            self._words[request.request_id].append("p" if lost else "P")
            preempt(request, *args, **kwargs)

        def arrived(request: Any) -> None:
            at_arrival = request.num_computed_tokens
            landed(request)
            self._landed(request.request_id, at_arrival, request.num_computed_tokens)

        def freed(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._words[request.request_id].append("F")
            return free(request, *args, **kwargs)

        manager.allocate_slots, scheduler.schedule = allocated, scheduled
        scheduler.update_from_output, scheduler._free_request = updated, freed
        scheduler._preempt_request = preempted
        scheduler._update_waiting_for_remote_kv = arrived

    def _admitted(self, named: dict[str, Any], asynchronous: bool) -> None:
        name = named["request"].request_id
        local = named.get("num_new_computed_tokens", 0)
        external = named.get("num_external_computed_tokens", 0)
        self._local[name], self._promised[name] = local, external
        self._words[name].append(f"A{local}+{external}")
        if external and not asynchronous:
            self._loading_now.add(name)

    def _answered(self, name: str, sampled: int, drafted: int) -> None:
        if name in self._loading_now:
            self._loading_now.remove(name)
            self._words[name].append("L")
        if drafted:
            self._words[name].append(f"o{sampled - 1}/{drafted}")
        else:
            self._words[name].append("o+" if sampled else "o")

    def _landed(self, name: str, at_arrival: int, after: int) -> None:
        loaded = max(0, at_arrival - self._local[name])
        self._words[name].append("L" if loaded == self._promised[name] else f"L{loaded}")
        if after < at_arrival:
            self._words[name].append(f"R{at_arrival - after}")
