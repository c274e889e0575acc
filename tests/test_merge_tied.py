"""Tied tensors: which names stand for one tensor."""

from __future__ import annotations

from mstore.ids import TensorId
from mstore.merge.planning.tied import first_names


def _ids(**names: str) -> dict[str, TensorId]:
    return {name: TensorId.of(content.encode()) for name, content in names.items()}


def test_tied_in_every_member() -> None:
    """Names are tied to the first of them where base and all experts agree that they are."""
    base = _ids(embed="E", head="E", ones="1", more="1", other="1")
    experts = [_ids(embed="F", head="F", ones="1", more="1", other="2"), base]
    assert first_names(base, experts) == {
        "embed": "embed",
        "head": "embed",
        "ones": "ones",
        "more": "ones",
        "other": "other",
    }


def test_an_untied_expert_unties() -> None:
    """Names that one expert tells apart, or does not have, are tensors of their own."""
    base = _ids(embed="E", head="E")
    assert first_names(base, [base, _ids(embed="E", head="H")])["head"] == "head"
    assert first_names(base, [base, _ids(head="E")])["head"] == "head"
