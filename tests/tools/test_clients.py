"""docs/integrations.md says what `tools/clients.sh` recorded. CI runs one client by `tools/clients.sh --ci`."""

from __future__ import annotations

import pytest
from clients.__main__ import CLIENTS
from clients.client import CONFIGS
from clients.page import PAGE, ROWS, STAGES, page, read_rows

from ds_zo.config import backend_of


def test_the_page_is_made_from_the_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(CLIENTS, read_rows(ROWS), text)


@pytest.mark.parametrize("name", CLIENTS)
def test_every_case_of_a_client_has_passed(name: str) -> None:
    client = CLIENTS[name]
    rows = {(row["task"], row["backend"]): row for row in read_rows(ROWS) if row["client"] == name}
    for case in client.cases():
        assert rows[case]["version"] == client.version
        assert {rows[case][stage] for stage in STAGES if stage in rows[case]} == {"passed"}, case


@pytest.mark.parametrize("name", CLIENTS)
def test_an_environment_is_pinned(name: str) -> None:
    requires = CLIENTS[name].requires
    assert [line for line in requires if "==" not in line] == []
    assert any(line.startswith("torch==") for line in requires), "another torch may bring gigabytes of CUDA libraries"


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("backend", CONFIGS)
def test_a_json_names_its_backend(name: str, backend: str) -> None:
    assert backend_of(CLIENTS[name].config(backend)) == backend
