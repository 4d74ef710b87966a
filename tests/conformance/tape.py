"""Records what a driven scheduler does, in the words of the golden histories, one line for each request.

The tape hooks the scheduler instance that a scenario passes to it, and reads the engine's own figures. The
tape is independent of kvledger's observer: it is the shortest check that a scenario reproduces its history.
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
        preempt, finish_load = scheduler._preempt_request, scheduler._update_waiting_for_remote_kv

        def allocated(*args: Any, **kwargs: Any) -> Any:
            first_slots = args[0].num_computed_tokens == 0
            blocks = allocate_slots(*args, **kwargs)
            if blocks is not None and first_slots:
                arguments = bound(*args, **kwargs).arguments
                self._admitted(arguments, asynchronous=bool(arguments.get("delay_cache_blocks")))
            return blocks

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for request_id, positions in output.num_scheduled_tokens.items():
                self._words[request_id].append(f"s{positions}")
            return output

        def updated(step: Any, model_output: Any) -> Any:
            drafts = step.scheduled_spec_decode_tokens
            for request_id in step.num_scheduled_tokens:
                if request_id in scheduler.requests:
                    tokens = model_output.sampled_token_ids[model_output.req_id_to_index[request_id]]
                    self._delivered(request_id, len(tokens), len(drafts.get(request_id, ())))
            return update_from_output(step, model_output)

        def preempted(request: Any, *args: Any, **kwargs: Any) -> None:
            dropped = kwargs.get("drop_stale_output") and request.num_in_flight_tokens
            self._words[request.request_id].append("p" if dropped else "P")
            preempt(request, *args, **kwargs)

        def arrived(request: Any) -> None:
            at_arrival = request.num_computed_tokens
            finish_load(request)
            self._loaded(request.request_id, at_arrival, request.num_computed_tokens)

        def freed(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._words[request.request_id].append("F")
            return free(request, *args, **kwargs)

        manager.allocate_slots, scheduler.schedule = allocated, scheduled
        scheduler.update_from_output, scheduler._free_request = updated, freed
        scheduler._preempt_request = preempted
        scheduler._update_waiting_for_remote_kv = arrived

    def _admitted(self, arguments: dict[str, Any], asynchronous: bool) -> None:
        request_id = arguments["request"].request_id
        local = arguments.get("num_new_computed_tokens", 0)
        external = arguments.get("num_external_computed_tokens", 0)
        self._local[request_id], self._promised[request_id] = local, external
        self._words[request_id].append(f"A{local}+{external}")
        if external and not asynchronous:
            self._loading_now.add(request_id)

    def _delivered(self, request_id: str, sampled: int, drafted: int) -> None:
        if request_id in self._loading_now:
            self._loading_now.remove(request_id)
            self._words[request_id].append("L")
        if drafted:
            self._words[request_id].append(f"o{sampled - 1}/{drafted}")
        else:
            self._words[request_id].append("o+" if sampled else "o")

    def _loaded(self, request_id: str, at_arrival: int, after: int) -> None:
        loaded = max(0, at_arrival - self._local[request_id])
        self._words[request_id].append("L" if loaded == self._promised[request_id] else f"L{loaded}")
        if after < at_arrival:
            self._words[request_id].append(f"R{at_arrival - after}")
