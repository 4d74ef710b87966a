"""Wrapping a method of a live object, and giving it back exactly as it was.

Knows nothing of any engine. A :class:`Hook` is a row of an adapter's literal table. Before anything
is wrapped every row's signature is compared; a host that differs is refused whole
(:class:`EngineMismatch`) and runs on unobserved.

An observer must never stop the engine: its body is guarded, its failures are counted, and after
``PATIENCE`` of them it removes itself. Only ``boundary``, which strict mode sets, may raise.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, cast

PATIENCE = 5
"""Failures of one hook after which it removes itself."""

TIMED_STEPS = 128
"""Of so many steps some are timed, to say what the hooks cost."""

Observer = Callable[..., Any]


class EngineMismatch(Exception):
    """The host is not what the adapter was written for; the message names what differs."""


class Hook(NamedTuple):
    """One wrapped method.

    ``owner``: dotted path from the root object, "" for the root itself. ``parameters``: the
    signatures that fit, as parameter names without ``self``; () when any will do. ``before`` sees
    the call's arguments and its result is handed to ``after``, which sees (that, or None where it
    raised; the call's result; the arguments). ``optional``: a host without owner or method is no mismatch.
    ``asleep``: it is checked with the others, and put on when :meth:`Hooks.wake` is called for it.
    """

    owner: str
    method: str
    parameters: tuple[tuple[str, ...], ...]
    before: str = ""
    after: str = ""
    optional: bool = False
    boundary: bool = False
    asleep: bool = False


class Wrapping:
    """One method of one live object, replaced by an attribute of the object itself until :meth:`undo`.

    The object's ``__dict__`` is not touched: CPython would give up its inline attributes then, and an
    engine step reads thousands. Raises :class:`EngineMismatch` where the object takes no attribute.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        self.owner = owner
        self.name = name
        self._covered = getattr(owner, name)
        self.wrapper = make(self._covered)
        try:
            setattr(owner, name, self.wrapper)
        except AttributeError as error:
            raise EngineMismatch(f"{type(owner).__name__} can't be given a {name}") from error

    def undo(self) -> bool:
        """Take it off; False if somebody has wrapped it again since (ours then passes through)."""
        if getattr(self.owner, self.name, None) is not self.wrapper:
            _let_go[self.wrapper] = self._covered
            return False
        covered = self._covered
        while covered in _let_go:  # another of ours, that was to go before this one
            covered = _let_go.pop(covered)
        delattr(self.owner, self.name)
        if getattr(self.owner, self.name, None) != covered:  # it was the object's own, not its class's
            setattr(self.owner, self.name, covered)
        return True


_let_go: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Wrappers that are still called through, and what each covers."""


WRAPPER = """
def make(original, before, after, boundary, aside, failed):
    stands_aside = gone = False

    def {name}({parameters}):
        if stands_aside:
            return aside({parameters}){before}
        result = original({parameters}){after}{boundary}
        return result

    def stand_aside(whether, for_good=False):
        nonlocal stands_aside, gone
        stands_aside, gone = whether, for_good

    return {name}, stand_aside
"""
"""A wrapper with the parameters of what it wraps: to gather them anew costs more than all the rest of it."""

BEFORE = """
        try:
            token = before({parameters})
        except Exception as error:
            token = None
            failed(error)"""

AFTER = """
        if not gone:
            try:
                after({token}, result, {parameters})
            except Exception as error:
                failed(error)"""

BOUNDARY = """
        boundary()"""

WORDS = frozenset(
    (
        *("after", "aside", "before", "boundary", "failed", "original"),  # what it is made of
        *("error", "gone", "result", "stands_aside", "token"),
    )
)
"""What a wrapper itself uses, so that no parameter of it may be named so."""

ANY = "*args, **kwargs"
"""Parameters of a wrapper whose host's can't be written out."""


@functools.cache
def _template(name: str, listed: str, parts: tuple[bool, bool, bool]) -> Callable[..., Any]:
    """The function ``make`` of :data:`WRAPPER`, with these of its parts."""
    before, after, boundary = parts
    source = WRAPPER.format(
        name=name,
        parameters=listed,
        before=BEFORE.format(parameters=listed) if before else "",
        after=AFTER.format(token="token" if before else "None", parameters=listed) if after else "",
        boundary=BOUNDARY if boundary else "",
    )
    made: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, f"<kvledger: {name}>", "exec"), made)
    return cast("Callable[..., Any]", made["make"])


def _written_out(method: Callable[..., Any]) -> tuple[str, tuple[Any, ...]]:
    """A method's parameters as a wrapper lists them, and the defaults of the last."""
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = inspect.signature(method).parameters.values()
    if any(each.kind is not plain or each.name in WORDS for each in found):
        return ANY, ()
    defaults = tuple(each.default for each in found if each.default is not each.empty)
    return ", ".join(each.name for each in found), defaults


class Hooks:
    """The hooks of one observed object.

    ``observer`` has the methods that the table names. ``failed(hook, error, removed)`` is told of
    every failure. ``boundary()``, if given, runs after each hook marked so, unguarded.
    """

    def __init__(
        self,
        table: tuple[Hook, ...],
        root: Any,
        observer: object,
        failed: Callable[[str, Exception, bool], None],
        boundary: Callable[[], None] | None = None,
    ) -> None:
        self.failures: dict[str, int] = {}
        self.timed = False
        self._timed_from = 0
        self._timed_steps = 0
        self.nanoseconds = 0
        """Taken by observers while they were timed; the host's own time is not in it."""
        self.live: list[str] = []
        self._failed = failed
        self._boundary = boundary
        self._observer = observer
        self._wrappings: dict[str, Wrapping] = {}
        self._silenced: list[Wrapping] = []
        self._asleep: dict[str, tuple[Hook, Any]] = {}
        self._aside: dict[str, Callable[..., None]] = {}
        rows = check(table, root)
        try:
            for hook, owner in rows:
                name = f"{hook.owner}.{hook.method}".lstrip(".")
                if hook.asleep:
                    self._asleep[name] = hook, owner
                else:
                    self._put_on(name, hook, owner)
        except Exception:
            self.remove()
            raise

    def wake(self, name: str) -> None:
        """Put on a hook that slept; nothing where it is on, was removed, or the host has not got it."""
        if name in self._asleep:
            self._put_on(name, *self._asleep.pop(name))

    def _put_on(self, name: str, hook: Hook, owner: Any) -> None:
        make = functools.partial(self._observed, name, hook, self._observer)
        self._wrappings[name] = Wrapping(owner, hook.method, make)
        self.live.append(name)
        self._aside[name](self.timed)

    def _take_off(self, name: str) -> None:
        """Whoever calls the wrapper still is led past the observer."""
        self._aside.pop(name)(True, for_good=True)
        self._wrappings.pop(name).undo()

    def time_some(self, step: int) -> None:
        """At rest after a ``step``: time the observers until it is asked for again, once in a while."""
        if self.timed:
            self._timed_steps += step - self._timed_from
            self.time(False)
        elif not step % TIMED_STEPS:
            self._timed_from = step
            self.time(True)

    def time_taken(self) -> tuple[int, int]:
        """Microseconds in observers, -1 if none were timed, and in how many steps, since the last time."""
        if not self._timed_steps:
            return -1, 0
        told = self.nanoseconds // 1000, self._timed_steps
        self.nanoseconds = self._timed_steps = 0
        return told

    def time(self, whether: bool) -> None:
        """Time the observers from now on, or no more."""
        self.timed = whether
        for stand_aside in self._aside.values():
            stand_aside(whether)

    def remove(self) -> None:
        """Put every wrapped attribute back. What cannot be put back becomes a pass-through."""
        self._asleep.clear()
        for name in list(self._wrappings):
            self._take_off(name)
        for wrapping in self._silenced:
            wrapping.undo()
        self._silenced.clear()
        self.live.clear()

    def _observed(
        self, name: str, hook: Hook, observer: object, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        before: Observer | None = attrgetter(hook.before)(observer) if hook.before else None
        after: Observer | None = attrgetter(hook.after)(observer) if hook.after else None
        boundary = self._boundary if hook.boundary else None
        parts = before is not None, after is not None, boundary is not None
        names, defaults = _written_out(original)
        failed = functools.partial(self._fail, name)

        def aside(*args: Any, **kwargs: Any) -> Any:
            """The same, timed; or the host's own alone, where this hook was removed."""
            if name not in self._wrappings:
                return original(*args, **kwargs)
            began, token = time.perf_counter_ns(), None
            if before is not None:
                try:
                    token = before(*args, **kwargs)
                except Exception as error:  # an observer must never stop the engine
                    self._fail(name, error)
            self.nanoseconds += time.perf_counter_ns() - began
            result = original(*args, **kwargs)
            began = time.perf_counter_ns()
            if after is not None and name in self._wrappings:
                try:
                    after(token, result, *args, **kwargs)
                except Exception as error:  # an observer must never stop the engine
                    self._fail(name, error)
            self.nanoseconds += time.perf_counter_ns() - began
            if boundary is not None:
                boundary()
            return result

        observed, self._aside[name] = _template(hook.method, names, parts)(
            original, before, after, boundary, aside, failed
        )
        observed.__defaults__ = defaults
        return functools.update_wrapper(observed, original)

    def _fail(self, name: str, error: Exception) -> None:
        try:
            count = self.failures[name] = self.failures.get(name, 0) + 1
            removed = count >= PATIENCE
            if removed and name in self._wrappings:
                self._take_off(name)
                self.live.remove(name)
            self._failed(name, error, removed)
        except Exception:  # nothing leaves a hook, not even this
            self._silenced += self._wrappings.values()
            self._wrappings.clear()
            for stand_aside in self._aside.values():
                stand_aside(True, for_good=True)
            self._aside.clear()


def check(table: tuple[Hook, ...], root: Any) -> list[tuple[Hook, Any]]:
    """The rows of ``table`` that apply, each with its owner.

    Raises :class:`EngineMismatch`, one sentence naming every difference.
    """
    rows = []
    differences = []
    for hook in table:
        name = f"{hook.owner}.{hook.method}".lstrip(".")
        owner = _resolve(root, hook.owner)
        method = getattr(owner, hook.method, None) if owner is not None else None
        if method is None:
            if not hook.optional:
                differences.append(f"{name} is missing")
            continue
        found = parameters(method)
        if hook.parameters and found not in hook.parameters:
            wanted = " or ".join(f"({', '.join(names)})" for names in hook.parameters)
            differences.append(f"{name} takes ({', '.join(found)}), not {wanted}")
            continue
        rows.append((hook, owner))
    if differences:
        raise EngineMismatch(f"{type(root).__name__} is not as expected: {'; '.join(differences)}")
    return rows


def parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a callable's parameters, without a bound ``self``."""
    return tuple(inspect.signature(method).parameters)


def _resolve(root: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        root = getattr(root, name, None)
        if root is None:
            return None
    return root
