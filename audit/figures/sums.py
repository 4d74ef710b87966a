"""How sums are added: field by field, by one rule for all of them."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

Self = TypeVar("Self", bound="Sums")


Field = TypeVar("Field")
_NO_SUM = object()
NoSum = Annotated[Field, _NO_SUM]
"""The type of a field that is no sum, such as what an engine did last."""


@cache
def _summed(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The names of the fields that are added."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hints[name], "__metadata__", ()) for name in kind.__struct_fields__}
    return tuple(name for name, marked in marks.items() if _NO_SUM not in marked)


class Sums(msgspec.Struct):
    """Base of every struct that holds sums. :meth:`merge` adds another one, field by field.

    Numbers are added, tables key by key, lists one after the other, and sums by their own rule. A field that
    is None is not known, and stays so. A field with another meaning has the type :data:`NoSum`: it stays as
    it is, unless the struct says by a ``merge`` of its own what becomes of it.
    """

    def merge(self, more: Any) -> None:
        """Add another one of this type."""
        for name in _summed(type(self)):
            setattr(self, name, added(getattr(self, name), getattr(more, name)))

    def __add__(self: Self, more: Any) -> Self:
        both = self.copy()
        both.merge(more)
        return both

    def copy(self: Self) -> Self:
        """An independent copy."""
        return msgspec.structs.replace(
            self, **{name: _copied(getattr(self, name)) for name in self.__struct_fields__}
        )


def added(one: Any, more: Any) -> Any:
    """The sum of two values of one field; what is not known (None) makes the sum not known."""
    if one is None or more is None:
        return None
    if isinstance(one, dict):
        for key, value in more.items():
            one[key] = added(one[key], value) if key in one else _copied(value)
        return one
    if isinstance(one, Sums):
        one.merge(more)
        return one
    return one + more


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, Sums):
        return value.copy()
    return list(value) if isinstance(value, list) else value


def add_tokens(table: dict[str, int], key: str, tokens: int) -> None:
    """Add tokens to one cause of a table."""
    table[key] = table.get(key, 0) + tokens


def merge_tokens(into: dict[str, int], table: dict[str, int]) -> None:
    """Add a table of tokens by cause to another."""
    for key, tokens in table.items():
        into[key] = into.get(key, 0) + tokens
