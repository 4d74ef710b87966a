"""Wraps methods of a live object, and restores them exactly as they were.

Nothing here is specific to an engine; the object is called the host. A :class:`Hook` is one row of an
adapter's table. Before anything is wrapped, the signatures of all rows are compared with the host's. If one
differs, nothing is wrapped (:class:`EngineMismatch`) and the host runs on unobserved. A method that overrides
one with a fitting signature fits if it can be called like it, as a subclass with ``*args, **kwargs`` can.

Every wrapper (:data:`WRAPPER`) calls ``before``, the host's own method, and ``after``. It catches and counts
what ``before`` or ``after`` raises; a hook that has failed ``MAX_FAILURES`` times is removed. The host's
method is called exactly once. An exception of the host's method is reported to ``raised`` and passes through
unchanged. Only ``boundary``, which strict mode sets, may raise.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, cast

MAX_FAILURES = 5
"""A hook that has failed this many times is removed."""

TIMED_STEPS = 128
"""Steps from one timing of the observers, which lasts a few steps, to the next."""

Observer = Callable[..., Any]


class EngineMismatch(Exception):
    """The host is not what the adapter was written for; the message names what differs."""


class Hook(NamedTuple):
    """One wrapped method, and what the observer does with a call.

    ``owner``: dotted path from the root object, "" for the root itself. ``parameters``: the signatures that
    fit, as parameter names without ``self``; () if any signature fits. ``before`` and ``after`` name methods
    of the observer: ``before`` gets the call's arguments, under the names in ``parameters``; ``after`` gets
    what ``before`` returned (None if it raised), the call's result and the arguments. ``optional``: a host
    without the owner or the method is no mismatch. ``boundary``: the boundary function runs after the call.
    ``deferred``: the method is checked with the others, but wrapped only when :meth:`Hooks.activate` is
    called. ``listed``: a parameter that may be an iterator, which can be read only once; the host and the
    observer get a list instead.
    """

    owner: str
    method: str
    parameters: tuple[tuple[str, ...], ...]
    before: str = ""
    after: str = ""
    optional: bool = False
    boundary: bool = False
    deferred: bool = False
    listed: str = ""


class Wrapping:
    """One method of one live object, replaced by an attribute of the object itself until :meth:`undo`.

    The object's ``__dict__`` is not accessed, because CPython would then give up the object's inline
    attributes, of which an engine step reads thousands. Raises :class:`EngineMismatch` if the attribute
    can't be set.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        self.owner = owner
        """The object whose method is wrapped."""
        self.name = name
        """The name of the method."""
        self._covered = getattr(owner, name)
        self.wrapper = make(self._covered)
        """What the object has in its place."""
        try:
            setattr(owner, name, self.wrapper)
        except (AttributeError, TypeError) as error:  # TypeError: a frozen dataclass with slots
            raise EngineMismatch(f"{type(owner).__name__} can't be given a {name}") from error

    def undo(self) -> bool:
        """Remove the wrapper; False if the method was wrapped again since (then it passes calls through)."""
        if getattr(self.owner, self.name, None) is not self.wrapper:
            _removed_below[self.wrapper] = self._covered
            return False
        covered = self._covered
        while covered in _removed_below:  # another wrapper of kvledger, removed before this one
            covered = _removed_below.pop(covered)
        delattr(self.owner, self.name)
        if getattr(self.owner, self.name, None) != covered:  # an attribute of the object, not of its class
            setattr(self.owner, self.name, covered)
        return True


_removed_below: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Removed wrappers that another wrapper still calls, and the method that each of them wraps."""


WRAPPER = """
def make(original, before, after, boundary, slow, failed, raised, listed):
    is_slow = removed = False

    def {name}({parameters}):{listed}
        if is_slow:
            return slow({parameters}){before}
        try:
            result = original({parameters})
        except Exception as error:
            raised(error)
            raise{after}{boundary}
        return result

    def set_slow(whether, for_good=False):
        nonlocal is_slow, removed
        is_slow, removed = whether, for_good

    return {name}, set_slow
"""
"""A wrapper with the same parameters as its method: ``*args, **kwargs`` would cost more than all the rest.

``slow`` is called instead while observers are timed, and once the hook is removed."""

LISTED = """
        {listed} = list({listed})"""

ANY_LISTED = """
        args, kwargs = listed(args, kwargs)"""

BEFORE = """
        try:
            token = before({parameters})
        except Exception as error:
            token = None
            failed(error)"""

AFTER = """
        if not removed:
            try:
                after({token}, result, {parameters})
            except Exception as error:
                failed(error)"""

BOUNDARY = """
        boundary()"""

WRAPPER_NAMES = frozenset(
    (
        *("after", "before", "boundary", "failed", "list", "listed", "original", "raised", "slow"),
        *("error", "is_slow", "removed", "result", "token"),
    )
)
"""Names that a wrapper uses itself; a parameter with such a name can't be written out."""

ANY = "*args, **kwargs"
"""Parameters of a wrapper if those of the host's method can't be written out."""


@functools.cache
def _template(name: str, parameters: str, listed: str, parts: tuple[bool, bool, bool]) -> Callable[..., Any]:
    """The function ``make`` of :data:`WRAPPER`, with these of its parts."""
    before, after, boundary = parts
    as_list = ANY_LISTED if parameters == ANY else LISTED.format(listed=listed)
    source = WRAPPER.format(
        name=name,
        parameters=parameters,
        listed=as_list if listed else "",
        before=BEFORE.format(parameters=parameters) if before else "",
        after=AFTER.format(token="token" if before else "None", parameters=parameters) if after else "",
        boundary=BOUNDARY if boundary else "",
    )
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, f"<kvledger: {name}>", "exec"), namespace)
    return cast("Callable[..., Any]", namespace["make"])


def _written_out(method: Callable[..., Any]) -> tuple[str, tuple[Any, ...]]:
    """A method's parameters as a wrapper lists them, and the defaults of the last ones."""
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.signature(method).parameters.values()
    if any(each.kind is not plain or each.name in WRAPPER_NAMES for each in signature):
        return ANY, ()
    defaults = tuple(each.default for each in signature if each.default is not each.empty)
    return ", ".join(each.name for each in signature), defaults


class Arguments:
    """The arguments of calls of a method, under the names of the signature that it fits.

    The method may take them under other names, or pass on what it gets.
    """

    def __init__(self, method: Callable[..., Any], fitting: Callable[..., Any]) -> None:
        own, theirs = (list(inspect.signature(each).parameters.values()) for each in (method, fitting))
        placed = [each for each in own if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        pairs = zip(theirs, [*placed, *theirs[len(placed) :]], strict=False)
        self._names = [(each.name, its.name, its.default) for each, its in pairs]
        """For each argument: its name, the method's own name for it, and what it is if a call omits it."""

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of one call, in the order of the names."""
        omitted = self._names[len(args) :]
        named = (kwargs.get(name, kwargs.get(own, default)) for name, own, default in omitted)
        return (*args[: len(self._names)], *named)

    def observer(self, observe: Observer, given: int) -> Observer:
        """``observe``, called with the arguments of :meth:`of`; the first ``given`` are not the call's."""
        return lambda *args, **kwargs: observe(*args[:given], *self.of(args[given:], kwargs))


def _listed(place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call with the one of this place or name made a list."""
    if place < len(args):
        return (*args[:place], list(args[place]), *args[place + 1 :]), kwargs
    return args, kwargs | {name: list(kwargs[name])} if name in kwargs else kwargs


class Hooks:
    """The hooks of one observed object.

    ``observer`` has the methods that the table names. ``failed(hook, error, removed)`` is called for every
    failure. ``boundary()``, if given, runs after each hook with ``boundary``; what it raises is not caught.
    ``raised(hook, error)``, if given, is called for each exception that leaves a hooked method of the host.
    """

    def __init__(
        self,
        table: tuple[Hook, ...],
        root: Any,
        observer: object,
        failed: Callable[[str, Exception, bool], None],
        boundary: Callable[[], None] | None = None,
        raised: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.failures: dict[str, int] = {}
        """How often each hook has failed."""
        self.timed = False
        """Whether the observers are being timed."""
        self.nanoseconds = 0
        """Time that observers took while they were timed, without the host's own."""
        self.live: list[str] = []
        """The hooks that are wrapped now."""
        self._timed_from = 0
        self._timed_steps = 0
        """Timed steps since the last call of ``time_taken``."""
        self._failed = failed
        self._boundary = boundary
        """Called after each hook with ``boundary``."""
        self._raised = raised
        """Called for each exception of the host."""
        self._observer = observer
        self._wrappings: dict[str, Wrapping] = {}
        """The present wrappings, by hook."""
        self._silenced: list[Wrapping] = []
        """Wrappers that pass calls through, because handling a failure has failed."""
        self._deferred: dict[str, tuple[Hook, Any]] = {}
        """Hooks that are not wrapped yet, with their owners."""
        self._set_slow: dict[str, Callable[..., None]] = {}
        """By hook, the function that switches its wrapper between fast and slow."""
        rows = check(table, root)
        try:
            for hook, owner in rows:
                name = f"{hook.owner}.{hook.method}".lstrip(".")
                if hook.deferred:
                    self._deferred[name] = hook, owner
                else:
                    self._wrap(name, hook, owner)
        except Exception:
            self.remove()
            raise

    def activate(self, name: str) -> None:
        """Wrap a deferred hook. Does nothing if it is wrapped, was removed, or is not in the host."""
        if name in self._deferred:
            self._wrap(name, *self._deferred.pop(name))

    def _wrap(self, name: str, hook: Hook, owner: Any) -> None:
        make = functools.partial(self._wrapper, name, hook, owner, self._observer)
        self._wrappings[name] = Wrapping(owner, hook.method, make)
        self.live.append(name)
        self._set_slow[name](self.timed)

    def _unwrap(self, name: str) -> None:
        """Remove a hook. A caller that still holds the wrapper calls the host's method and no observer."""
        self._set_slow.pop(name)(True, for_good=True)
        self._wrappings.pop(name).undo()

    def time_some(self, step: int) -> None:
        """Called at rest after a ``step``: at times, begin to time the observers, until the next call."""
        if self.timed:
            self._timed_steps += step - self._timed_from
            self.time(False)
        elif not step % TIMED_STEPS:
            self._timed_from = step
            self.time(True)

    def time_taken(self) -> tuple[int, int]:
        """Microseconds in observers since the last call, -1 if no step was timed, and the timed steps."""
        if not self._timed_steps:
            return -1, 0
        taken = self.nanoseconds // 1000, self._timed_steps
        self.nanoseconds = self._timed_steps = 0
        return taken

    def time(self, whether: bool) -> None:
        """Time the observers from now on, or stop timing them."""
        self.timed = whether
        for set_slow in self._set_slow.values():
            set_slow(whether)

    def remove(self) -> None:
        """Restore every wrapped attribute. A wrapper that can't be removed passes calls through."""
        self._deferred.clear()
        for name in list(self._wrappings):
            self._unwrap(name)
        for wrapping in self._silenced:
            wrapping.undo()
        self._silenced.clear()
        self.live.clear()

    def _wrapper(
        self, name: str, hook: Hook, owner: Any, observer: object, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        before: Observer | None = attrgetter(hook.before)(observer) if hook.before else None
        after: Observer | None = attrgetter(hook.after)(observer) if hook.after else None
        boundary = self._boundary if hook.boundary else None
        parts = before is not None, after is not None, boundary is not None
        names, defaults = _written_out(original)
        fitting = _fitting(hook, owner, original) or original
        if fitting is not original:
            names, defaults, arguments = ANY, (), Arguments(original, fitting)
            before, after = before and arguments.observer(before, 0), after and arguments.observer(after, 2)
        place = parameters(fitting).index(hook.listed) if hook.listed else -1
        listed = functools.partial(_listed, place, hook.listed)
        failed = functools.partial(self._count_failure, name)
        raised = functools.partial(self._host_raised, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            """The wrapper with the observers timed; only the host's method if this hook was removed."""
            if name not in self._wrappings:
                return original(*args, **kwargs)
            began, token = time.perf_counter_ns(), None
            if before is not None:
                try:
                    token = before(*args, **kwargs)
                except Exception as error:  # an observer must never stop the engine
                    failed(error)
            self.nanoseconds += time.perf_counter_ns() - began
            try:
                result = original(*args, **kwargs)
            except Exception as error:
                raised(error)
                raise
            began = time.perf_counter_ns()
            if after is not None and name in self._wrappings:
                try:
                    after(token, result, *args, **kwargs)
                except Exception as error:  # an observer must never stop the engine
                    failed(error)
            self.nanoseconds += time.perf_counter_ns() - began
            if boundary is not None:
                boundary()
            return result

        wrapper, self._set_slow[name] = _template(hook.method, names, hook.listed, parts)(
            original, before, after, boundary, slow, failed, raised, listed
        )
        wrapper.__defaults__ = defaults
        return functools.update_wrapper(wrapper, original)

    def _host_raised(self, name: str, error: Exception) -> None:
        """An exception leaves the host's method."""
        if self._raised is not None and name in self._wrappings:
            try:
                self._raised(name, error)
            except Exception as failure:  # an observer must never stop the engine
                self._count_failure(name, failure)

    def _count_failure(self, name: str, error: Exception) -> None:
        try:
            count = self.failures[name] = self.failures.get(name, 0) + 1
            removed = count >= MAX_FAILURES
            if removed and name in self._wrappings:
                self._unwrap(name)
                self.live.remove(name)
            self._failed(name, error, removed)
        except Exception:  # no exception leaves a hook, not even one of ``failed``
            self._silenced += self._wrappings.values()
            self._wrappings.clear()
            for set_slow in self._set_slow.values():
                set_slow(True, for_good=True)
            self._set_slow.clear()


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
        if hook.parameters and _fitting(hook, owner, method) is None:
            wanted = " or ".join(f"({', '.join(each)})" for each in hook.parameters)
            differences.append(f"{name} takes ({', '.join(parameters(method))}), not {wanted}")
            continue
        rows.append((hook, owner))
    if differences:
        raise EngineMismatch(f"{type(root).__name__} is not as expected: {'; '.join(differences)}")
    return rows


def _fitting(hook: Hook, owner: Any, method: Callable[..., Any]) -> Callable[..., Any] | None:
    """The method whose signature fits: the object's own, or one that it overrides; None if none fits."""
    names = parameters(method)
    if not hook.parameters or names in hook.parameters:
        return method
    for class_ in type(owner).__mro__:
        declared: Any = vars(class_).get(hook.method)
        below = declared.__get__(owner, class_) if hasattr(declared, "__get__") else declared
        if callable(below) and parameters(below) in hook.parameters:
            return below if _can_be_called(method, parameters(below)) else None
    return None


def _can_be_called(method: Callable[..., Any], names: tuple[str, ...]) -> bool:
    """Whether a method takes these arguments, the first ones by place and the others by name."""
    signature = inspect.signature(method)
    for place in range(len(names), -1, -1):
        try:
            signature.bind(*names[:place], **dict.fromkeys(names[place:]))
        except TypeError:
            continue
        return True
    return False


def parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a callable's parameters, without a bound ``self``."""
    return tuple(inspect.signature(method).parameters)


def _resolve(root: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        root = getattr(root, name, None)
        if root is None:
            return None
    return root
