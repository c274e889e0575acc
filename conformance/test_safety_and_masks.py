"""safe_merge and emr: what their authors' code computes with torch, written here in other words.

SafeMERGE: github.com/aladinD/SafeMERGE; EMR-Merging: github.com/harveyhuang18/EMR_Merging.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cosine_similarity

from mstore import MergeRequest, Store
from mstore.store.objects.plan import Plan

Tensors = dict[str, torch.Tensor]
RANK, SHAPES = 8, {"q_proj": (96, 96), "up_proj": (160, 96), "down_proj": (96, 160)}
EDGE = 1e-4
"""The authors compute in float32, and round to five places."""


def factors(seed: int) -> Tensors:
    """A LoRA adapter by the names that PEFT gives its tensors."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (rows, columns) in SHAPES.items():
        for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            key = f"base_model.model.{name}.lora_{part}.weight"
            found[key] = torch.randn(shape, generator=generator) * 0.1
    return found


def model(seed: int, near: Tensors | None = None, rank: int = 12) -> Tensors:
    """Matrices; near: others that they differ from by a product of this rank."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (rows, columns) in SHAPES.items():
        if near is None:
            found[f"{name}.weight"] = torch.randn((rows, columns), generator=generator)
        else:
            left = torch.randn((rows, rank), generator=generator)
            right = torch.randn((rank, columns), generator=generator)
            found[f"{name}.weight"] = near[f"{name}.weight"] + 0.02 * left @ right
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """An unaligned model, the aligned one that is the base, and two adapters of it."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("safe")
    unaligned = model(1)
    models = {"unaligned": unaligned, "aligned": model(2, unaligned)}
    adapters = {"tuned": factors(3), "safe": factors(4)}
    with Store.init(root / "store", block_size=1 << 16) as made:
        for name, tensors in (models | adapters).items():
            own = root / name
            own.mkdir()
            is_adapter = name in adapters
            file = "adapter_model.safetensors" if is_adapter else "model.safetensors"
            save_file({one: array.contiguous() for one, array in tensors.items()}, own / file)
            if is_adapter:
                (own / "adapter_config.json").write_text(
                    f'{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {RANK}}}'
                )
            made.add(own, name=name)
        yield made


def judged(name: str) -> float:
    """The cosine of their code: the left factor is projected, the product compared."""
    unaligned = model(1)
    towards = model(2, unaligned)[f"{name}.weight"] - unaligned[f"{name}.weight"]
    projection = towards @ towards.T / torch.linalg.norm(towards)
    adapter = factors(3)
    left, right = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "BA")
    sides = ((projection @ left) @ right).view(1, -1), (left @ right).view(1, -1)
    return round(cosine_similarity(*sides, dim=1).item(), 5)


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_is_mixed_where_their_code_mixes_it(name: str, store: Store) -> None:
    """The threshold that decides is their cosine; below it 0.8 of the one adapter and 0.2 of the
    other are what the layer has."""
    cosine = judged(name)
    assert 0.1 < cosine < 0.9
    request = MergeRequest(
        base="aligned",
        experts=["tuned", "safe"],
        method="safe_merge",
        companions={"aligned": "aligned", "unaligned": "unaligned"},
        dtype="float32",
    )
    for gap, shares in ((-EDGE, (1.0, 0.0)), (EDGE, (0.8, 0.2))):
        plan = store.plan(replace(request, parameters={"threshold": cosine + gap}))
        tensors = {one.name: one for one in store._catalog.record(Plan, plan.plan).tensors}
        mixture = tensors[f"{name}.weight"].mixture
        assert mixture is not None
        assert mixture.experts == pytest.approx(shares)
        store.merge(plan, name="merged")
        wanted = model(2, model(1))[f"{name}.weight"].clone()
        for seed, share in zip((3, 4), shares, strict=True):
            own = factors(seed)
            left, right = (own[f"base_model.model.{name}.lora_{part}.weight"] for part in "BA")
            wanted += share * (left @ right)
        found = torch.from_numpy(store["merged"].tensor(f"{name}.weight").copy())
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def elected(deltas: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One vector of all, and what of it each has, as their loop makes it."""
    sign = torch.where(torch.stack(deltas).mean(0) > 0, 1.0, -1.0)
    masks = [one * sign > 0 for one in deltas]
    agreeing = [torch.where(mask, one.abs(), 0.0) for mask, one in zip(masks, deltas, strict=True)]
    return torch.stack(agreeing).max(0).values * sign, masks


def test_a_model_is_theirs(tmp_path: Path) -> None:
    """Of one tensor, where their mean of tensors is the sum of the paper: the vector of all, each
    mask, each number, and each model."""
    generator = torch.Generator().manual_seed(5)
    base = torch.randn((300, 200), generator=generator)
    deltas = [0.1 * torch.randn((300, 200), generator=generator) for _ in range(4)]
    deltas[1][:40] = -deltas[0][:40]
    models = {"base": base, **{f"e{k}": base + one for k, one in enumerate(deltas)}}
    deltas = [models[f"e{k}"] - base for k in range(4)]
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, weight in models.items():
            save_file({"w": weight}, tmp_path / f"{name}.safetensors")
            store.add(tmp_path / f"{name}.safetensors", name=name)
        report = store.emr(
            MergeRequest(base="base", experts=["e0", "e1", "e2", "e3"], method="emr"), name="all"
        )
        vector, masks = elected(deltas)
        shared = torch.from_numpy(store["all/shared"].tensor("w").copy())
        torch.testing.assert_close(shared - base, vector, rtol=0, atol=1e-6)
        for one, delta, mask in zip(report.models, deltas, masks, strict=True):
            number = delta.abs().mean() / (vector * mask).abs().mean()
            assert one.rescale == pytest.approx(number.item(), rel=1e-5)
            assert torch.equal(torch.from_numpy(store[one.mask].tensor("w").copy()) != 0, mask)
            found = torch.from_numpy(store[one.name].tensor("w").copy())
            torch.testing.assert_close(found, base + vector * mask * number, rtol=0, atol=1e-5)
