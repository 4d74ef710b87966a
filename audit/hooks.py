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
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

PATIENCE = 5
"""Failures of one hook after which it removes itself."""

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


class Clock:
    """While ``on``, ``nanoseconds`` grows by what observers take; the host's own time is not in it."""

    __slots__ = ("nanoseconds", "on")

    def __init__(self) -> None:
        self.on = False
        self.nanoseconds = 0


class Dispatcher:
    """A method of a class, replaced by one that asks whether *this* instance is watched.

    Nothing is set on the instance: touching its ``__dict__`` would cost every later attribute access
    of it (CPython 3.11 and later keep attributes inline until then), and an engine step makes
    thousands. The class gets its own attribute back when its last watched instance is let go.
    """

    installed: ClassVar[dict[tuple[type, str], Dispatcher]] = {}

    def __init__(self, cls: type, name: str) -> None:
        self.cls = cls
        self.name = name
        self.watched: dict[int, list[Callable[..., Any]]] = {}
        """Wrappers of one instance, by its id; the last one is called."""
        self.let_go: list[Callable[..., Any]] = []
        """Wrappers that passed away beneath others, which still call through them."""
        self._raw = cls.__dict__.get(name)
        self.original: Callable[..., Any] = getattr(cls, name)
        original, watched = self.original, self.watched

        @functools.wraps(original)
        def dispatch(instance: Any, *args: Any, **kwargs: Any) -> Any:
            wrappers = watched.get(id(instance))
            if wrappers:
                return wrappers[-1](*args, **kwargs)
            return original(instance, *args, **kwargs)

        self.method = dispatch
        setattr(cls, name, dispatch)

    @classmethod
    def of(cls, owner: Any, name: str) -> Dispatcher | None:
        """The dispatcher of a live object's method; None if the attribute is the object's own."""
        kind = type(owner)
        method = getattr(owner, name)
        found = getattr(kind, name, None)
        if not (inspect.ismethod(method) and method.__self__ is owner and method.__func__ is found):
            return None
        known = cls.installed.get((kind, name))
        if known is None or known.method is not found:
            known = cls.installed[kind, name] = Dispatcher(kind, name)
        return known

    def release(self) -> None:
        """Give the class its attribute back, once nobody is watched through it."""
        if self.watched or self.cls.__dict__.get(self.name) is not self.method:
            return
        Dispatcher.installed.pop((self.cls, self.name), None)
        if self._raw is None:
            delattr(self.cls, self.name)
        else:
            setattr(self.cls, self.name, self._raw)


class Wrapping:
    """One method of one live object, observed; the object is held until :meth:`undo`."""

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        self.owner = owner
        self.name = name
        self._dispatcher = Dispatcher.of(owner, name)
        if self._dispatcher is None:
            self._raw = vars(owner).get(name)
            self.wrapper = make(getattr(owner, name))
            setattr(owner, name, self.wrapper)
        else:
            wrappers = self._dispatcher.watched.setdefault(id(owner), [])
            inner = wrappers[-1] if wrappers else self._dispatcher.original.__get__(owner)
            self.wrapper = make(inner)
            wrappers.append(self.wrapper)

    def undo(self) -> bool:
        """Take it off; False if somebody has wrapped it again since (ours then passes through)."""
        if self._dispatcher is None:
            if vars(self.owner).get(self.name) is not self.wrapper:
                return False
            setattr(self.owner, self.name, self._raw)
            return True
        watched = self._dispatcher.watched
        wrappers = watched.get(id(self.owner), [])
        on_top = bool(wrappers) and wrappers[-1] is self.wrapper
        self._dispatcher.let_go.append(self.wrapper)
        while wrappers and wrappers[-1] in self._dispatcher.let_go:
            self._dispatcher.let_go.remove(wrappers.pop())
        if not wrappers:
            watched.pop(id(self.owner), None)
            self._dispatcher.release()
        return on_top


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
        self.clock = Clock()
        self.live: list[str] = []
        self._failed = failed
        self._boundary = boundary
        self._observer = observer
        self._wrappings: dict[str, Wrapping] = {}
        self._silenced: list[Wrapping] = []
        self._asleep: dict[str, tuple[Hook, Any]] = {}
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

    def remove(self) -> None:
        """Put every wrapped attribute back. What cannot be put back becomes a pass-through."""
        self._asleep.clear()
        for name in list(self._wrappings):
            self._wrappings.pop(name).undo()
        for wrapping in self._silenced:
            wrapping.undo()
        self._silenced.clear()
        self.live.clear()

    def _observed(
        self, name: str, hook: Hook, observer: object, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        before: Observer | None = getattr(observer, hook.before) if hook.before else None
        after: Observer | None = getattr(observer, hook.after) if hook.after else None
        boundary = self._boundary if hook.boundary else None
        wrappings, clock = self._wrappings, self.clock

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if name not in wrappings:
                return original(*args, **kwargs)
            began = time.perf_counter_ns() if clock.on else 0
            token = None
            if before is not None:
                try:
                    token = before(*args, **kwargs)
                except Exception as error:  # an observer must never stop the engine
                    self._fail(name, error)
            if began:
                clock.nanoseconds += time.perf_counter_ns() - began
            result = original(*args, **kwargs)
            began = time.perf_counter_ns() if clock.on else 0
            if after is not None and name in wrappings:
                try:
                    after(token, result, *args, **kwargs)
                except Exception as error:  # an observer must never stop the engine
                    self._fail(name, error)
            if began:
                clock.nanoseconds += time.perf_counter_ns() - began
            if boundary is not None:
                boundary()
            return result

        return observed

    def _fail(self, name: str, error: Exception) -> None:
        try:
            count = self.failures[name] = self.failures.get(name, 0) + 1
            removed = count >= PATIENCE
            if removed:
                wrapping = self._wrappings.pop(name, None)
                if wrapping is not None:
                    wrapping.undo()
                    self.live.remove(name)
            self._failed(name, error, removed)
        except Exception:  # nothing leaves a hook, not even this
            self._silenced += self._wrappings.values()
            self._wrappings.clear()


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
