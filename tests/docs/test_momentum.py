"""The tables of docs/momentum.md are those that its trials give."""

import pytest

from tests.docs.pages import ROOT
from tests.measurements.momentum_tables import TABLES


@pytest.mark.parametrize("table", TABLES)
def test_the_page_has_the_table(table):
    page = (ROOT / "docs/momentum.md").read_text()
    rows = table()
    assert len(rows) > 3 and "\n".join(["", "", *rows, "", ""]) in page
