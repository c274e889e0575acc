"""`--recipe` on the command line: models as refs and directories, and what is refused."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest
import small_layers
from cli_runs import Program

from mstore import Store

TIES = """\
models:
  - model: {base}
  - model: {math}
    parameters: {{weight: [0.2, 0.8], density: 0.5}}
  - model: {code}
    parameters: {{weight: 0.3, density: 0.5}}
merge_method: ties
base_model: {base}
parameters: {{normalize: true, int8_mask: true}}
dtype: bfloat16
"""


def build(root: Path) -> None:
    """Three models, and a store that has them as refs."""
    small_layers.write(root / "models")
    program = Program(root / "store")
    program.succeed("init")
    for name in ("base", "math", "code"):
        base = ["--base", "org/base"] if name != "base" else []
        program.succeed("add", root / "models" / name, "--name", f"org/{name}", *base)


@pytest.fixture
def checkpoints(template: Path) -> Path:
    return template / "models"


@pytest.fixture
def mstore(tmp_path: Path) -> Program:
    """An empty store."""
    program = Program(tmp_path / "store")
    program.succeed("init")
    return program


@pytest.fixture
def filled(template: Path, tmp_path: Path) -> Program:
    """A copy of that store."""
    return Program(shutil.copytree(template / "store", tmp_path / "store"))


def write(folder: Path, text: str, **models: str) -> Path:
    names = {name: models.get(name, f"org/{name}") for name in ("base", "math", "code")}
    (folder / "recipe.yml").write_text(text.format(**names))
    return folder / "recipe.yml"


def test_plan_and_merge(filled: Program, tmp_path: Path) -> None:
    """`plan` and `merge` take a recipe and other options; equal requests give equal plans."""
    recipe = write(tmp_path, TIES)
    whole = filled.succeed("plan", "--recipe", recipe, "--json").document
    assert whole["method"] == "ties"
    assert whole["experts"] == [["org/math", pytest.approx(0.2)], ["org/code", pytest.approx(0.3)]]
    planned = filled.succeed("plan", "--recipe", recipe, "--budget", "50%", "--json").document
    assert 0 < planned["planned_expert_bytes"] <= whole["full_expert_bytes"] / 2
    budget = ["--budget", "50%", "--virtual", "-m", "why"]
    merged = filled.succeed("merge", "--recipe", recipe, "--name", "m", *budget, "--json").document
    assert merged["plan"] == planned["plan"]
    out = tmp_path / "plan.json"
    filled.succeed("plan", "--recipe", recipe, "-o", out, "--skip", "lm_head*")
    assert '"skip"' in out.read_text()
    swept = filled.succeed("plan", "--recipe", recipe, "--sweep", "-q").lines
    assert len(swept) > 3


def test_notes_are_told(filled: Program, tmp_path: Path) -> None:
    """Remarks on the recipe name its file and line."""
    recipe = write(tmp_path, TIES.replace("true}}", "true, t: 1}}"))
    told = filled.succeed("plan", "--recipe", recipe).err
    assert f"remark: {recipe}, line 9: t has no effect with ties" in told


def test_revisions_of_the_hub(filled: Program, checkpoints: Path, tmp_path: Path) -> None:
    """Of `model: NAME@REVISION`, NAME is the model where it is a ref or a directory; a warning
    says that the revision is ignored, and --strict refuses it."""
    shutil.copytree(checkpoints / "code", tmp_path / "code")
    recipe = write(tmp_path, TIES, math="org/math@main", code="./code@v1")
    done = filled("plan", "--recipe", recipe, "--strict")
    assert (done.status, "line 3: the revision of org/math@main" in done.err) == (2, True)
    done = filled.succeed("plan", "--recipe", recipe)
    told = "is not looked up: the model is that of this store"
    assert f"warning: {recipe}, line 3: the revision of org/math@main {told}" in done.err
    assert f"the revision of ./code@v1 {told}" in done.err
    assert f"remark: {tmp_path}/code is org/code" in done.err or "as code" in done.err


def test_ids_of_models_elsewhere(filled: Program, tmp_path: Path) -> None:
    """The id of a model that this store does not have is no name to add a directory under."""
    id = "b0c1" * 16
    done = filled("plan", "--recipe", write(tmp_path, TIES, math=f'"{id}"'))
    assert f"{id} is the id of a model that this store does not have" in done.err
    assert "mstore add" not in done.err
    assert "run the recipe that made it, or clone a store that has it" in done.err


def test_standard_input(filled: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads the recipe from standard input."""
    recipe = write(tmp_path, TIES)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(recipe.read_bytes())))
    piped = filled.succeed("plan", "--recipe", "-", "-q").lines
    assert piped == filled.succeed("plan", "--recipe", recipe, "-q").lines


def test_directories_are_added_once(mstore: Program, checkpoints: Path, tmp_path: Path) -> None:
    """Directories, relative to the recipe, are added under their names, and found again; one of
    another content with the same name gets another ref."""
    shutil.copytree(checkpoints, tmp_path / "models")
    places = {name: f"./models/{name}" for name in ("base", "math")}
    recipe = write(tmp_path, TIES, code="models/code", **places)
    done = mstore.succeed("merge", "--recipe", recipe, "--name", "merged")
    assert f"remark: added {tmp_path}/models/base as base" in done.err
    names = ["base", "code", "math", "merged"]
    assert sorted(mstore.succeed("refs", "-q").lines) == names
    done = mstore.succeed("merge", "--recipe", recipe, "--name", "merged")
    assert f"remark: {tmp_path}/models/code is code of this store" in done.err
    assert "nothing new" in done.out
    assert sorted(mstore.succeed("refs", "-q").lines) == names
    shutil.copytree(checkpoints / "math", tmp_path / "models" / "code", dirs_exist_ok=True)
    done = mstore.succeed("merge", "--recipe", recipe, "--name", "other")
    assert f"remark: added {tmp_path}/models/code as code-2" in done.err


def test_nothing_is_added_for_a_bad_recipe(
    mstore: Program, checkpoints: Path, tmp_path: Path
) -> None:
    """A recipe that is refused leaves the store as it was."""
    places = {name: str(checkpoints / name) for name in ("base", "math", "code")}
    for change in (("ties", "arcee_fusion"), ("normalize", "normalise"), ("bfloat16", "int4")):
        recipe = write(tmp_path, TIES.replace(*change), **places)
        assert mstore("merge", "--recipe", recipe, "--strict", "--name", "m").status == 2
    assert mstore.succeed("refs", "-q").lines == []


def test_unknown_models(filled: Program, tmp_path: Path) -> None:
    """A model that is nowhere is refused with the command that adds it, and by line."""
    recipe = write(tmp_path, TIES, code="mistralai/Mistral-7B-v0.1", math="./nowhere")
    done = filled("plan", "--recipe", recipe)
    assert done.status == 1
    assert f"error: {recipe}, line 3: no directory ./nowhere" in done.err
    assert "add hf://mistralai/Mistral-7B-v0.1 --name mistralai/Mistral-7B-v0.1" in done.err


@pytest.mark.parametrize("verb", [["plan"], ["merge", "--name", "m"]])
@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--base", "a"], "--base"),
        (["--expert", "a", "--method", "ties"], "--expert, --method"),
        (["--param", "density=1"], "--param"),
    ],
)
def test_a_recipe_excludes_options(
    verb: list[str], extra: list[str], told: str, filled: Program, tmp_path: Path
) -> None:
    """What the recipe says is not said again by options."""
    done = filled(*verb, "--recipe", write(tmp_path, TIES), *extra)
    assert done.status == 2
    assert f"leave out {told}\n" in done.err


def test_files_that_are_no_recipes(filled: Program, tmp_path: Path) -> None:
    """A missing, binary or huge file is an error that names it; a plan excludes a recipe."""
    recipe = tmp_path / "r.yml"
    assert "no such file" in filled("plan", "--recipe", recipe).err
    recipe.write_bytes(b"\xff\xfe")
    assert "not a text file" in filled("plan", "--recipe", recipe).err
    recipe.write_bytes(b"#" * (1 << 20) + b"\n")
    assert "at most 1048576 bytes" in filled("plan", "--recipe", recipe).err
    done = filled("merge", "--plan", "abcd", "--recipe", recipe, "--name", "m")
    assert "--plan already says what to merge" in done.err


STACK = """\
merge_method: passthrough
slices:
- sources: [{{model: {base}, layer_range: [0, 4]}}]
- sources: [{{model: {math}, layer_range: [1, 2]}}]
dtype: {dtype}
"""


@pytest.mark.rest
def test_a_stack_of_directories(mstore: Program, checkpoints: Path, tmp_path: Path) -> None:
    """Models of fewer layers than the first are added, too; explain says whose layers they are."""
    short = tmp_path / "short"
    names = [name for name in small_layers.NAMES if ".layers.3." not in name]
    own = {name: small_layers.member(1)[name] for name in names}
    small_layers.write_checkpoint(short, own)
    models = {"base": str(checkpoints / "base"), "math": str(short), "code": ""}
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(STACK.format(dtype="bfloat16", **models))
    done = mstore.succeed("merge", "--recipe", recipe, "--name", "tall")
    assert "layers" not in done.err
    told = mstore.succeed("explain", "tall").out
    assert "model.layers.4      model.layers.1 of short" in told
    assert "model.layers.3      model.layers.3 of base" in told
    assert "lm_head of short" in told
    assert "NORM" not in told
    one = mstore.succeed("explain", "tall", "model.norm.weight").lines
    assert one[-1].split() == ["model.norm.weight", "model.norm.weight", "of", "short"]
    plan = mstore.succeed("plan", "--recipe", recipe).lines
    assert "layers   5: base [0, 4], short [1, 2]" in plan
    recipe.write_text(STACK.format(dtype="float16", **models))
    mstore.succeed("merge", "--recipe", recipe, "--name", "half")
    with Store.open(mstore.store) as store:
        assert {one.dtype for one in store.tensors("half")} == {"F16"}


STEPS = """\
name: first
merge_method: linear
models:
  - model: {math}
    parameters: {{weight: 0.5}}
  - model: {code}
    parameters: {{weight: 0.5}}
dtype: float32
out_dtype: bfloat16
---
merge_method: task_arithmetic
base_model: {base}
models:
  - model: first
    parameters: {{weight: 0.5}}
dtype: float32
out_dtype: bfloat16
"""


CIRCLE = """\
{{name: first, merge_method: linear, models: [{{model: third, parameters: {{weight: 1}}}}]}}
---
{{name: third, merge_method: linear, models: [{{model: first, parameters: {{weight: 1}}}}]}}
"""


@pytest.mark.rest
def test_recipes_of_one_file_run_in_order(
    filled: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later recipe takes the merge of an earlier one by its name, which is a branch of its own;
    the result is that of two files; from standard input, too; `plan` refuses them."""
    recipe = write(tmp_path, STEPS)
    told = filled.succeed("merge", "--recipe", recipe, "--name", "org/all")
    assert "remark: merged first as org/all.first" in told.err
    text = recipe.read_text()
    for name, part in zip(("one", "two"), text.split("---\n"), strict=True):
        (tmp_path / "part.yml").write_text(part.replace("model: first", "model: one"))
        filled.succeed("merge", "--recipe", tmp_path / "part.yml", "--name", name)
    assert filled.succeed("diff", "org/all.first", "one", "-q").lines == []
    assert filled.succeed("diff", "org/all", "two", "-q").lines == []
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    again = filled.succeed("merge", "--recipe", "-", "--name", "org/all", "--json").document
    assert again["new_snapshot"] is False
    refused = filled("plan", "--recipe", recipe)
    assert refused.status
    assert "several recipes" in refused.err


def test_recipes_of_one_file_run_as_they_need_each_other(filled: Program, tmp_path: Path) -> None:
    """The order of recipes in a file means nothing; a file that is run again makes what changed."""
    one, two = STEPS.split("---\n")
    # That without a name is the result, also where another is the last that is needed by none.
    turned = "---\n".join([two, one, one.replace("first", "unneeded")])
    for name, text in (("org/all", STEPS), ("org/turned", turned)):
        filled.succeed("merge", "--recipe", write(tmp_path, text), "--name", name)
    assert filled.succeed("diff", "org/all", "org/turned", "-q").lines == []
    before = filled.succeed("show", "org/all.first", "-q").lines
    changed = write(
        tmp_path,
        STEPS.replace(
            "model: first\n    parameters: {{weight: 0.5",
            "model: first\n    parameters: {{weight: 0.25",
        ),
    )
    filled.succeed("merge", "--recipe", changed, "--name", "org/all")
    assert filled.succeed("show", "org/all.first", "-q").lines == before
    assert filled.succeed("diff", "org/all", "org/turned", "-q").lines != []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (STEPS.replace("name: first\n", ""), "each recipe of a file but one has a name"),
        (STEPS.replace("{math}", "first"), "line 4: recipes that need each other: first, first"),
        (CIRCLE, "line 3: recipes that need each other: first, third, first"),
        (STEPS.replace("model: first", "model: second"), "second is neither a ref"),
        (STEPS.replace("task_arithmetic", "nobody"), "unknown method 'nobody'"),
        (f"{STEPS.partition('---')[0]}---\n{STEPS}", "two recipes of the file are called first"),
    ],
)
def test_a_mistake_in_any_recipe_is_told_first(
    filled: Program, tmp_path: Path, text: str, what: str
) -> None:
    """Whatever is wrong with a file of recipes is told before one of them is merged."""
    done = filled("merge", "--recipe", write(tmp_path, text), "--name", "org/all")
    assert done.status
    assert what in done.err
    assert filled("show", "org/all.first").status


def test_a_shuffle_is_piped_to_merge(
    filled: Program, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shuffle` prints a recipe that `merge --recipe -` takes; its JSON has the same text; options
    of mergekit-layershuffle and directories have a hint."""
    asked = ("shuffle", "--expert", "org/math", "--expert", "org/code=2", "--seed", "4")
    text = filled.succeed(*asked).out
    assert filled.succeed(*asked, "--json").document == {"recipe": text}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    done = filled.succeed("merge", "--recipe", "-", "--name", "org/drawn", "--json").document
    assert (done["method"], done["planned_expert_bytes"]) == ("passthrough", 0)
    assert "--expert org/math" in filled("shuffle", "--model", "org/math").err
    directory = checkpoints / "math"
    told = filled("shuffle", "--expert", directory).err
    assert f"add {directory} --name math" in told


def test_a_recipe_of_bakllama(filled: Program, tmp_path: Path) -> None:
    """Its slices are a stack, and `scale` is that of the down projections."""
    text = (
        "layer_slices:\n- {{model: {base}, start: 0, end: 3}}\n"
        "- {{model: {math}, start: 1, end: 4}}\n"
    )
    filled.succeed("merge", "--recipe", write(tmp_path, text), "--name", "sliced")
    assert "layers   6: org/base [0, 3], org/math [1, 4]" in (
        filled.succeed("explain", "sliced").lines
    )
