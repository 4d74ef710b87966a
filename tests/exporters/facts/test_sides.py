"""A tenant is one thing in rows and in accounts."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events

from kvledger.audit import text
from kvledger.audit.events import Event, RequestAdded, RequestLabels
from kvledger.audit.figures.labels import BY_NAME
from kvledger.audit.replay.parallel import here
from kvledger.audit.replay.windows import EVERYTHING
from kvledger.audit.text import tenant_of
from kvledger.exporters.facts.sides import TENANT, side_at

LABELS = (
    None,
    RequestLabels(),
    RequestLabels(group="acme"),
    RequestLabels(salt_class=-5),
    RequestLabels(group="acme", salt_class=-5),
)


@pytest.mark.parametrize("order", [text.TENANT, text.TENANT[::-1]])
def test_rows_and_accounts_name_the_same_tenants(
    order: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "TENANT", order)
    stream: list[Event] = []
    for number, labels in enumerate(LABELS):
        of_one = events(100, "A0+0 s100 o+ F", request=number)
        stream += [
            replace(each, labels=labels) if isinstance(each, RequestAdded) else each for each in of_one
        ]
    folder = journals.write(tmp_path / "engine-0", stream)

    expected: dict[str, int] = {}
    for labels in LABELS:
        tenant = tenant_of(labels) or BY_NAME["group"].none
        expected[tenant] = expected.get(tenant, 0) + 1
    found = side_at([folder], EVERYTHING, here).labels[TENANT]
    assert expected == {tenant: figures["requests"] for tenant, figures in found.items()}
