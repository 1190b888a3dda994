"""docs/features.md agrees with the parameters, flags and fields of the interfaces."""

from __future__ import annotations

from tools import interface_table, markdown


def test_the_table_of_interfaces_is_current() -> None:
    page = interface_table.PAGE.read_text(encoding="utf-8")
    made = markdown.replaced(page, interface_table.BEGIN, interface_table.interface_table())
    assert made == page, "run tools/interface_table.py"


def test_every_feature_is_offered_somewhere_and_every_interface_offers_something() -> None:
    """So no name in the table is misspelt."""
    offered = set().union(*interface_table.interfaces().values())
    unknown = {name for names in interface_table.FEATURES.values() for name in names} - offered
    assert not unknown
    features = {name for names in interface_table.FEATURES.values() for name in names}
    assert all(names & features for names in interface_table.interfaces().values())
