"""Wrapping and giving back, on plain Python objects: no engine is needed to break a hook."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvledger.audit.hooks import MAX_FAILURES, EngineMismatch, Hook, Hooks


class Host:
    """A stand-in engine."""

    def __init__(self) -> None:
        self.part = Part()

    def run(self, tokens: int, fast: bool = False) -> int:
        """Doubles."""
        return tokens * 2


class Part:
    def load(self, name: str) -> str:
        return name.upper()


class Watcher:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before(self, *args: Any, **kwargs: Any) -> str:
        return f"before {args}"

    def after(self, token: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append((token, result, args, kwargs))

    def raises(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("a broken observer")


RUN = Hook("", "run", (("tokens", "fast"),), "before", "after")
LOAD = Hook("part", "load", (("name",),), after="after")


def hooks(table: tuple[Hook, ...], host: Host, watcher: Watcher, failed: list[Any] | None = None) -> Hooks:
    heard = [] if failed is None else failed
    return Hooks(table, host, watcher, lambda *what: heard.append(what))


def test_an_observer_sees_arguments_and_result_and_the_caller_its_own_result() -> None:
    host, watcher = Host(), Watcher()
    hooks((RUN, LOAD), host, watcher)

    assert host.run(3, fast=True) == 6
    assert host.part.load("a") == "A"
    assert [("before (3, True)", 6, (3, True), {}), (None, "A", ("a",), {})] == watcher.seen


def test_removing_leaves_no_trace() -> None:
    host, watcher = Host(), Watcher()
    before = dict(vars(host)), dict(vars(host.part))
    hooks((RUN, LOAD), host, watcher).remove()

    assert before == (vars(host), vars(host.part))
    assert host.run(3) == 6
    assert watcher.seen == []


def test_an_attribute_that_the_instance_had_itself_is_put_back() -> None:
    host = Host()

    def mine(tokens: int, fast: bool = False) -> int:
        return tokens

    host.run = mine  # type: ignore[method-assign]
    hooks((RUN,), host, Watcher()).remove()

    assert vars(host)["run"] is mine


def test_a_wrapper_put_over_ours_stays_and_ours_passes_through() -> None:
    host, watcher = Host(), Watcher()
    ours = hooks((RUN,), host, watcher)
    inner = host.run
    host.run = lambda tokens, fast=False: inner(tokens, fast) + 1  # type: ignore[method-assign]
    ours.remove()

    assert host.run(3) == 7
    assert watcher.seen == []


def test_wrappers_may_be_taken_off_in_any_order() -> None:
    host, watcher = Host(), Watcher()
    first, second, third = (hooks((RUN,), host, watcher) for _ in range(3))
    first.remove()
    second.remove()
    assert host.run(3) == 6
    assert 1 == len(watcher.seen)

    third.remove()
    assert "run" not in vars(host)


def test_what_the_caller_leaves_out_is_seen_as_it_is() -> None:
    host, watcher = Host(), Watcher()
    hooks((RUN,), host, watcher)
    host.run(tokens=3)

    assert [("before (3, False)", 6, (3, False), {})] == watcher.seen


@pytest.mark.parametrize("how", [{"tokens": 3, "fast": True}, {"tokens": 3}])
def test_parameters_that_cant_be_written_out_are_handed_on(how: dict[str, Any]) -> None:
    class Strict(Host):
        def run(self, *, tokens: int, fast: bool = False) -> int:  # type: ignore[override]
            return tokens + fast

    host, watcher = Strict(), Watcher()
    hooks((RUN,), host, watcher)

    assert host.run(**how) == 3 + how.get("fast", 0)
    assert how == watcher.seen[0][3]


@pytest.mark.parametrize("name", ["token", "result", "failed"])
def test_a_parameter_may_have_any_name(name: str) -> None:
    host, watcher = Host(), Watcher()
    made: dict[str, Any] = {}
    exec(f"def run({name}): return {name} * 2", made)
    host.run = made["run"]  # type: ignore[method-assign]
    hooks((RUN._replace(parameters=()),), host, watcher)

    assert host.run(3) == 6
    assert [("before (3,)", 6, (3,), {})] == watcher.seen


def test_an_object_that_takes_no_attribute_is_refused() -> None:
    class Closed:
        __slots__ = ()

        def run(self, tokens: int, fast: bool = False) -> int:
            return tokens

    with pytest.raises(EngineMismatch, match="Closed can't be given a run"):
        Hooks((RUN,), Closed(), Watcher(), lambda *_: None)


def test_the_wrapper_keeps_name_doc_and_signature() -> None:
    import inspect

    host = Host()
    signature = inspect.signature(host.run)
    hooks((RUN,), host, Watcher())

    assert ("run", "Doubles.", signature) == (
        host.run.__name__,
        host.run.__doc__,
        inspect.signature(host.run),
    )


def test_a_failing_observer_never_reaches_the_caller_and_removes_itself() -> None:
    host, failed = Host(), list[Any]()
    ours = hooks((RUN._replace(before="raises"), LOAD), host, Watcher(), failed)

    assert [host.run(n) for n in range(MAX_FAILURES + 3)] == [2 * n for n in range(MAX_FAILURES + 3)]
    assert [removed for _, _, removed in failed] == [False] * (MAX_FAILURES - 1) + [True]
    assert {"run": MAX_FAILURES} == ours.failures
    assert ["part.load"] == ours.live
    assert "run" not in vars(host)


@pytest.mark.parametrize("timed", [False, True])
def test_an_observer_may_begin_or_end_the_timing_of_what_it_sees(timed: bool) -> None:
    class Timing(Watcher):
        def before(self, *args: Any, **kwargs: Any) -> str:
            ours.time(not timed)
            return super().before(*args, **kwargs)

    host, watcher = Host(), Timing()
    ours = hooks((RUN,), host, watcher)
    ours.time(timed)

    assert host.run(3) == 6
    assert [("before (3, False)", 6, (3, False), {})] == watcher.seen


@pytest.mark.parametrize("timed", [False, True])
def test_an_observer_that_fails_for_the_last_time_is_not_told_of_the_end(timed: bool) -> None:
    class Failing(Watcher):
        def before(self, *args: Any, **kwargs: Any) -> str:
            raise RuntimeError("a broken observer")

    host, watcher = Host(), Failing()
    ours = hooks((RUN,), host, watcher)
    ours.time(timed)
    for _ in range(MAX_FAILURES + 1):
        host.run(3)

    assert MAX_FAILURES - 1 == len(watcher.seen)


@pytest.mark.parametrize("timed", [False, True])
def test_what_an_observer_saw_begin_it_does_not_see_end_once_it_is_removed(timed: bool) -> None:
    class Removing(Host):
        def run(self, tokens: int, fast: bool = False) -> int:
            ours.remove()
            return tokens

    host, watcher = Removing(), Watcher()
    ours = hooks((RUN,), host, watcher)
    ours.time(timed)

    assert host.run(3) == 3
    assert [] == watcher.seen


def test_a_failing_failure_handler_does_not_reach_the_caller_either() -> None:
    host = Host()

    def worse(*_: Any) -> None:
        raise RuntimeError("worse")

    Hooks((RUN._replace(after="raises"),), host, Watcher(), worse)

    assert host.run(1) == 2


def test_the_hosts_own_exception_passes_unchanged() -> None:
    class Failing(Host):
        def run(self, tokens: int, fast: bool = False) -> int:
            raise KeyError("the host's own")

    host, watcher = Failing(), Watcher()
    hooks((RUN,), host, watcher)

    with pytest.raises(KeyError, match="the host's own"):
        host.run(1)
    assert watcher.seen == []


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (Hook("", "run", (("tokens",),)), r"run takes \(tokens, fast\), not \(tokens\)"),
        (Hook("", "walk", ((),)), "walk is missing"),
        (Hook("engine", "load", ((),)), "engine.load is missing"),
    ],
)
def test_a_host_that_differs_is_refused_whole(hook: Hook, says: str) -> None:
    host = Host()
    with pytest.raises(EngineMismatch, match=says):
        hooks((RUN, LOAD, hook), host, Watcher())

    assert "run" not in vars(host)
    assert "load" not in vars(host.part)


def test_an_optional_hook_may_be_missing() -> None:
    host = Host()
    ours = hooks((RUN, Hook("connector", "load", (), optional=True)), host, Watcher())

    assert ["run"] == ours.live


def test_a_hook_that_sleeps_is_put_on_when_it_is_woken() -> None:
    host, watcher = Host(), Watcher()
    ours = hooks((RUN._replace(deferred=True), LOAD), host, watcher)
    host.run(1)
    assert ([], ["part.load"]) == (watcher.seen, ours.live)

    ours.activate("run")
    ours.activate("run")
    host.run(1)
    assert 1 == len(watcher.seen)


def test_a_hook_that_sleeps_is_checked_with_the_others_and_removed_with_them() -> None:
    host, watcher = Host(), Watcher()
    with pytest.raises(EngineMismatch, match="walk is missing"):
        hooks((Hook("", "walk", ((),), deferred=True),), host, watcher)

    ours = hooks((RUN._replace(deferred=True),), host, watcher)
    ours.remove()
    ours.activate("run")
    host.run(1)
    assert [] == watcher.seen


def test_only_a_boundary_may_raise() -> None:
    host = Host()

    def boundary() -> None:
        raise AssertionError("strict")

    Hooks((RUN._replace(boundary=True),), host, Watcher(), lambda *_: None, boundary)

    with pytest.raises(AssertionError, match="strict"):
        host.run(1)


def test_only_the_observers_time_is_taken() -> None:
    class Slow(Host):
        def run(self, tokens: int, fast: bool = False) -> int:
            time.sleep(0.05)
            return tokens

    class Watching(Watcher):
        def before(self, *args: Any, **kwargs: Any) -> str:
            time.sleep(0.001)
            return ""

    host = Slow()
    watched = hooks((RUN,), host, Watching())
    host.run(1)
    untimed = watched.nanoseconds
    watched.time(True)
    host.run(1)

    assert 0 == untimed
    assert 1_000_000 <= watched.nanoseconds < 50_000_000
