"""The connector's store: who saved KV under which key, and who is promised KV under that key.

A key that requests of several isolation classes have saved proves nothing about the KV that is there now. So
a promise is foreign only if no request of its own classes is known to have saved the key.
"""

from __future__ import annotations

from ... import events as ev
from ...bounded_tables import keep_newest
from .entries import ForeignLoad
from .holdings import Following, Holdings
from .isolation import difference, isolation_below

KEYS_KEPT = 1 << 16
"""How many keys of the store are remembered, the last ones."""

CLASSES_KEPT = 4
"""How many requests of different classes are remembered for a key, the last ones."""


def _saved(holdings: Holdings, event: ev.SavePlanned) -> None:
    """Note under which classes the chunks of a request were saved."""
    request = event.request
    own, account = holdings.isolation.get(request), holdings.account(request)
    if own is None or account is None or request not in holdings.store_keys:
        return
    size, keys = holdings.store_keys[request]
    for place, key in enumerate(keys[: max(0, event.end) // size]):
        end = (place + 1) * size
        classes = isolation_below(own, end)
        if end <= event.start or classes is None:
            continue
        saved = holdings.saved_keys.setdefault(key, [])
        if all(classes != known for known, _ in saved):
            saved.append((classes, account.request_id))
            del saved[:-CLASSES_KEPT]
            keep_newest(holdings.saved_keys, KEYS_KEPT)


def _promised(holdings: Holdings, event: ev.Admitted) -> None:
    """Report promised tokens whose chunks were saved under other classes only."""
    request, start = event.request, event.local_tokens
    stop, own = start + event.external_tokens, holdings.isolation.get(request)
    if own is None or request not in holdings.store_keys or start >= stop:
        return
    size, keys = holdings.store_keys[request]
    tokens, first, writer, differs = 0, -1, "", [""]
    for place, key in enumerate(keys[start // size : -(-stop // size)], start // size):
        end = (place + 1) * size
        classes, saved = isolation_below(own, end) or [], holdings.saved_keys.get(key, [])
        if not saved or any(classes == known for known, _ in saved):
            continue
        if first < 0:
            first, (known, writer) = max(start, end - size), saved[-1]
            differs = difference(known, classes)
        tokens += min(end, stop) - max(start, end - size)
    if first >= 0:
        holdings.report(ForeignLoad(tokens, first, writer, differs), request)


FOLLOWING: Following = {ev.SavePlanned: _saved, ev.Admitted: _promised}
