"""Hooks wrap methods of plain Python objects and restore them; these tests need no engine."""

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
    failures = [] if failed is None else failed
    return Hooks(table, host, watcher, lambda *failure: failures.append(failure))


def test_the_observer_gets_arguments_and_result_and_the_caller_its_result() -> None:
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


def test_an_attribute_of_the_instance_itself_is_restored() -> None:
    host = Host()

    def instance_run(tokens: int, fast: bool = False) -> int:
        return tokens

    host.run = instance_run  # type: ignore[method-assign]
    hooks((RUN,), host, Watcher()).remove()

    assert vars(host)["run"] is instance_run


def test_a_wrapper_around_a_hook_stays_and_the_removed_hook_passes_calls_through() -> None:
    host, watcher = Host(), Watcher()
    ours = hooks((RUN,), host, watcher)
    inner = host.run
    host.run = lambda tokens, fast=False: inner(tokens, fast) + 1  # type: ignore[method-assign]
    ours.remove()

    assert host.run(3) == 7
    assert watcher.seen == []


def test_wrappers_may_be_removed_in_any_order() -> None:
    host, watcher = Host(), Watcher()
    first, second, third = (hooks((RUN,), host, watcher) for _ in range(3))
    first.remove()
    second.remove()
    assert host.run(3) == 6
    assert 1 == len(watcher.seen)

    third.remove()
    assert "run" not in vars(host)


def test_the_observer_gets_the_defaults_of_omitted_arguments() -> None:
    host, watcher = Host(), Watcher()
    hooks((RUN,), host, watcher)
    host.run(tokens=3)

    assert [("before (3, False)", 6, (3, False), {})] == watcher.seen


@pytest.mark.parametrize("how", [{"tokens": 3, "fast": True}, {"tokens": 3}])
def test_keyword_only_parameters_are_passed_on(how: dict[str, Any]) -> None:
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
    namespace: dict[str, Any] = {}
    exec(f"def run({name}): return {name} * 2", namespace)
    host.run = namespace["run"]  # type: ignore[method-assign]
    hooks((RUN._replace(parameters=()),), host, watcher)

    assert host.run(3) == 6
    assert [("before (3,)", 6, (3,), {})] == watcher.seen


def test_an_object_that_accepts_no_attributes_is_refused() -> None:
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


def test_a_failing_observer_never_reaches_the_caller_and_is_removed() -> None:
    host, failed = Host(), list[Any]()
    ours = hooks((RUN._replace(before="raises"), LOAD), host, Watcher(), failed)

    assert [host.run(n) for n in range(MAX_FAILURES + 3)] == [2 * n for n in range(MAX_FAILURES + 3)]
    assert [removed for _, _, removed in failed] == [False] * (MAX_FAILURES - 1) + [True]
    assert {"run": MAX_FAILURES} == ours.failures
    assert ["part.load"] == ours.live
    assert "run" not in vars(host)


@pytest.mark.parametrize("timed", [False, True])
def test_an_observer_may_start_or_stop_the_timing_of_its_own_call(timed: bool) -> None:
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
def test_after_is_not_called_when_before_failed_for_the_last_time(timed: bool) -> None:
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
def test_after_is_not_called_when_the_hook_was_removed_during_the_call(timed: bool) -> None:
    class Removing(Host):
        def run(self, tokens: int, fast: bool = False) -> int:
            ours.remove()
            return tokens

    host, watcher = Removing(), Watcher()
    ours = hooks((RUN,), host, watcher)
    ours.time(timed)

    assert host.run(3) == 3
    assert [] == watcher.seen


def test_a_failure_handler_that_raises_does_not_reach_the_caller() -> None:
    host = Host()

    def worse(*_: Any) -> None:
        raise RuntimeError("worse")

    Hooks((RUN._replace(after="raises"),), host, Watcher(), worse)

    assert host.run(1) == 2


def test_the_exception_of_the_host_passes_unchanged() -> None:
    class Failing(Host):
        def run(self, tokens: int, fast: bool = False) -> int:
            raise KeyError("the host's own")

    host, watcher = Failing(), Watcher()
    hooks((RUN,), host, watcher)

    with pytest.raises(KeyError, match="the host's own"):
        host.run(1)
    assert watcher.seen == []


@pytest.mark.parametrize("timed", [False, True])
def test_an_exception_of_the_host_is_reported_and_passes_unchanged(timed: bool) -> None:
    error = KeyError("the host's own")

    class Failing(Host):
        def run(self, tokens: int, fast: bool = False) -> int:
            raise error

    host, raised = Failing(), list[Any]()
    ours = Hooks((RUN,), host, Watcher(), lambda *_: None, raised=lambda *seen: raised.append(seen))
    ours.time(timed)

    with pytest.raises(KeyError) as caught:
        host.run(1)
    assert [("run", error)] == raised
    assert caught.value is error and error.__cause__ is error.__context__ is None


@pytest.mark.parametrize("timed", [False, True])
def test_a_report_of_an_exception_that_raises_does_not_reach_the_caller(timed: bool) -> None:
    class Failing(Host):
        def run(self, tokens: int, fast: bool = False) -> int:
            raise KeyError("the host's own")

    def worse(*_: Any) -> None:
        raise RuntimeError("worse")

    host, failed = Failing(), list[Any]()
    ours = Hooks((RUN,), host, Watcher(), lambda *failure: failed.append(failure), raised=worse)
    ours.time(timed)

    with pytest.raises(KeyError, match="the host's own"):
        host.run(1)
    assert ["run"] == [name for name, _, _ in failed]


@pytest.mark.parametrize("leaving", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_exception_of_the_host(leaving: type[BaseException]) -> None:
    class Interrupted(Host):
        def run(self, tokens: int, fast: bool = False) -> int:
            raise leaving

    host, raised = Interrupted(), list[Any]()
    Hooks((RUN,), host, Watcher(), lambda *_: None, raised=lambda *seen: raised.append(seen))

    with pytest.raises(leaving):
        host.run(1)
    assert [] == raised


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (Hook("", "run", (("tokens",),)), r"run takes \(tokens, fast\), not \(tokens\)"),
        (Hook("", "walk", ((),)), "walk is missing"),
        (Hook("engine", "load", ((),)), "engine.load is missing"),
    ],
)
def test_a_host_that_differs_is_refused_with_nothing_wrapped(hook: Hook, message: str) -> None:
    host = Host()
    with pytest.raises(EngineMismatch, match=message):
        hooks((RUN, LOAD, hook), host, Watcher())

    assert "run" not in vars(host)
    assert "load" not in vars(host.part)


class Adding(Host):
    def run(self, tokens: Any, fast: bool = False) -> int:  # type: ignore[override]
        return sum(tokens)


class AddingByName(Host):
    def run(self, *, tokens: Any, fast: bool = False) -> int:  # type: ignore[override]
        return sum(tokens)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize(
    ("host", "seen"), [(Adding, (([1, 2], False), {})), (AddingByName, ((), {"tokens": [1, 2]}))]
)
def test_a_listed_parameter_that_is_an_iterator_reaches_host_and_observer(
    host: type[Any], seen: tuple[Any, ...], timed: bool
) -> None:
    adding, watcher = host(), Watcher()
    ours = hooks((RUN._replace(before="", listed="tokens"),), adding, watcher)
    ours.time(timed)

    assert adding.run(tokens=iter([1, 2])) == 3
    assert [(None, 3, *seen)] == watcher.seen


class Forwards(Host):
    def run(self, *args: Any, **kwargs: Any) -> int:
        return super().run(*args, **kwargs)


class ForwardsTheRest(Host):
    def run(self, tokens: int, *args: Any, **kwargs: Any) -> int:
        return super().run(tokens, *args, **kwargs)


class ForwardsByName(Host):
    def run(self, tokens: int, **kwargs: Any) -> int:
        return super().run(tokens, **kwargs)


class TakesMore(Host):
    def run(self, tokens: int, fast: bool = False, why: str = "") -> int:
        return super().run(tokens, fast)


class TakesMoreByName(Host):
    def run(self, tokens: int, fast: bool = False, *, why: str = "") -> int:
        return super().run(tokens, fast)


class NamesItOtherwise(Host):
    def run(self, n: int, quick: bool = False) -> int:  # type: ignore[override]
        return super().run(n, quick)


class Wrapped(Host):
    def __init__(self) -> None:
        super().__init__()
        below = self.run
        self.run = lambda *args, **kwargs: below(*args, **kwargs)  # type: ignore[method-assign]


class ForwardsTwice(Forwards):
    def run(self, *args: Any, **kwargs: Any) -> int:
        return super().run(*args, **kwargs)


OVERRIDES = (Forwards, ForwardsTheRest, TakesMore, TakesMoreByName, NamesItOtherwise, Wrapped, ForwardsTwice)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_that_can_be_called_like_what_it_overrides_is_observed(
    override: type[Host], timed: bool
) -> None:
    host, watcher = override(), Watcher()
    ours = hooks((RUN,), host, watcher)
    ours.time(timed)

    assert [host.run(3), host.run(3, True)] == [6, 6]
    assert [(3, False), (3, True)] == [args for _, _, args, _ in watcher.seen]
    ours.remove()
    assert host.run(3) == 6
    assert 2 == len(watcher.seen)


@pytest.mark.parametrize(
    "override", [Forwards, ForwardsTheRest, ForwardsByName, TakesMore, TakesMoreByName, Wrapped]
)
def test_the_observer_of_an_override_gets_arguments_that_were_given_by_name(override: type[Host]) -> None:
    host, watcher = override(), Watcher()
    hooks((RUN._replace(listed=""),), host, watcher)
    host.run(tokens=3, fast=True)

    assert [("before (3, True)", 6, (3, True), {})] == watcher.seen


def test_an_argument_that_only_the_override_has_reaches_the_host_and_not_the_observer() -> None:
    host, watcher = TakesMore(), Watcher()
    hooks((RUN,), host, watcher)

    assert host.run(3, why="because") == 6
    assert host.run(3, False, "because") == 6
    assert [(3, False), (3, False)] == [args for _, _, args, _ in watcher.seen]


def test_an_override_may_forward_a_listed_parameter() -> None:
    class ForwardsIt(Adding):
        def run(self, *args: Any, **kwargs: Any) -> int:  # type: ignore[override]
            return super().run(*args, **kwargs)

    host, watcher = ForwardsIt(), Watcher()
    hooks((RUN._replace(before="", listed="tokens"),), host, watcher)

    assert host.run(iter([1, 2])) == 3
    assert host.run(tokens=iter([1, 2])) == 3
    assert [([1, 2], False), ([1, 2], False)] == [args for _, _, args, _ in watcher.seen]


def test_an_override_that_needs_another_argument_is_refused() -> None:
    class NeedsMore(Host):
        def run(self, tokens: int, fast: bool, why: str) -> int:  # type: ignore[override]
            return tokens

    with pytest.raises(EngineMismatch, match=r"run takes \(tokens, fast, why\), not \(tokens, fast\)"):
        hooks((RUN,), NeedsMore(), Watcher())


def test_an_optional_hook_may_be_missing() -> None:
    host = Host()
    ours = hooks((RUN, Hook("connector", "load", (), optional=True)), host, Watcher())

    assert ["run"] == ours.live


def test_a_deferred_hook_is_wrapped_when_it_is_activated() -> None:
    host, watcher = Host(), Watcher()
    ours = hooks((RUN._replace(deferred=True), LOAD), host, watcher)
    host.run(1)
    assert ([], ["part.load"]) == (watcher.seen, ours.live)

    ours.activate("run")
    ours.activate("run")
    host.run(1)
    assert 1 == len(watcher.seen)


def test_a_deferred_hook_is_checked_with_the_others_and_removed_with_them() -> None:
    host, watcher = Host(), Watcher()
    with pytest.raises(EngineMismatch, match="walk is missing"):
        hooks((Hook("", "walk", ((),), deferred=True),), host, watcher)

    ours = hooks((RUN._replace(deferred=True),), host, watcher)
    ours.remove()
    ours.activate("run")
    host.run(1)
    assert [] == watcher.seen


def test_only_a_boundary_raises_into_the_host() -> None:
    host = Host()

    def boundary() -> None:
        raise AssertionError("strict")

    Hooks((RUN._replace(boundary=True),), host, Watcher(), lambda *_: None, boundary)

    with pytest.raises(AssertionError, match="strict"):
        host.run(1)


def test_only_the_time_of_observers_is_measured() -> None:
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
