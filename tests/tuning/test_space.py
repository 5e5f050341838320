"""The YAML of a sweep: what it holds, how its fields depend on one another, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.demo import TARGET_DIR
from paceline.errors import InvalidArgument
from paceline.methods import KNOBS, METHODS
from paceline.plan import resolve
from paceline.tuning.results import Point
from paceline.tuning.space import SPACES_DIR, Space, parse_space, read_space

SHIPPED = sorted(path.stem for path in SPACES_DIR.glob("*.yaml"))


def space(fields: dict[str, Any], **blocks: Any) -> Space:
    return parse_space({"space": fields, **blocks})


def test_the_spaces_that_ship() -> None:
    assert SHIPPED == ["demo", "everything", "exit_layers", "smollm2", "split", "trees", "vllm"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", SHIPPED)
def test_every_point_of_a_shipped_space_can_work(name: str) -> None:
    checked = read_space(name)
    assert checked.points[0].is_ar
    assert len({point.key for point in checked.points}) == len(checked.points) > 50
    for point in checked.points:
        assert resolve(point.speculation).method.lossless
    document = yaml.safe_load((SPACES_DIR / f"{name}.yaml").read_text())
    methods = {point.speculation.method for point in checked.points}
    assert methods == {"ar", *document["space"]["method"]}


def test_a_field_is_part_of_a_point_only_where_its_method_has_it() -> None:
    checked = space({
        "method": ["prompt_lookup", "layer_skip"],
        "exit_layer": [4, 6],
        "ngram_max": [2, 3],
        "num_speculative_tokens": {"min": 2, "max": 4},
    })  # fmt: skip
    by_method: dict[str, list[Point]] = {}
    for point in checked.points:
        by_method.setdefault(point.speculation.method, []).append(point)
    assert {name: len(points) for name, points in by_method.items()} == {
        "ar": 1, "prompt_lookup": 2 * 3, "layer_skip": 2 * 3,
    }  # fmt: skip
    assert {p.speculation.exit_layer for p in by_method["prompt_lookup"]} == {None}
    assert {p.speculation.ngram_max for p in by_method["layer_skip"]} == {None}
    assert {p.speculation.exit_layer for p in by_method["layer_skip"]} == {4, 6}


def test_when_adds_a_condition() -> None:
    checked = space({
        "method": "draft_model",
        "shape": ["chain", "kary"],
        "branching": {"values": [2, 3], "when": {"shape": "kary"}},
        "num_speculative_tokens": 3,
    })  # fmt: skip
    assert sorted((p.speculation.shape, p.speculation.branching) for p in checked.points[1:]) == [
        ("chain", None), ("kary", 2), ("kary", 3),
    ]  # fmt: skip


def test_ar_is_a_point_even_if_not_asked_for() -> None:
    assert [point.label for point in space({"method": "draft_model"}).points] == [
        "ar", "draft_model",
    ]  # fmt: skip


def test_points_that_differ_in_spelling_only_are_one() -> None:
    # 6 is the default of the method, and null leaves the knob to the method.
    default = resolve(space({"method": "draft_model"}).points[1].speculation).config
    checked = space({
        "method": "draft_model", "num_speculative_tokens": [None, default.num_speculative_tokens],
    })  # fmt: skip
    assert len(checked.points) == 2


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", SHIPPED)
def test_a_random_walk_ends_in_a_point_that_says_what_was_chosen(name: str) -> None:
    checked, rng = read_space(name), random.Random(1)
    for _ in range(50):
        values = checked.walk(lambda choice: rng.choice(choice.values))
        try:
            point = checked.point(values)
        except InvalidArgument:
            continue
        again = checked.point(checked.values_of(point))
        assert again.key == point.key


def test_lists_are_choices_and_lists_of_lists_choices_of_lists() -> None:
    checked = space({"method": "draft_model", "shape": "rsd_c", "branching_vector": [[2, 1], [3]]})
    vectors = {point.speculation.branching_vector for point in checked.points[1:]}
    assert vectors == {(2, 1), (3,)}
    with pytest.raises(InvalidArgument, match="a list of lists"):
        space({"method": "draft_model", "shape": "rsd_c", "branching_vector": [2, 1]})


def test_topology_is_a_choice_only_where_the_drafter_can_leave() -> None:
    checked = space({"method": ["draft_model", "eagle"], "topology": ["colocated", "actors"]})
    found = {(point.speculation.method, point.topology) for point in checked.points}
    assert found == {
        ("ar", "colocated"), ("draft_model", "colocated"), ("draft_model", "actors"),
        ("eagle", "colocated"),
    }  # fmt: skip


def test_prompts_come_in_turns_by_category() -> None:
    checked = space({"method": "draft_model"}, workload={"limit": 2})
    categories = [prompt.category for prompt in checked.prompts]
    assert len(set(categories[:4])) == 4
    assert categories[:4] == categories[4:]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "space: got {}"),
        ({"exit_leyer": 3}, r"space\.exit_leyer.*exit_layer"),
        ({"method": "draft_modle"}, r"space\.method.*draft_model"),
        ({"method": []}, r"space\.method.*at least one"),
        ({"method": "ar"}, "some point beside AR"),
        ({"method": "skipdecode_lossy"}, "lossless: false"),
        ({"method": "draft_model", "num_speculative_tokens": 99}, r"space\.num_speculative_tokens"),
        ({"method": "draft_model", "num_speculative_tokens": "six"}, "num_speculative_tokens"),
        ({"method": "draft_model", "num_speculative_tokens": {"min": 4, "max": 2}}, r"\.max"),
        ({"method": "draft_model", "num_speculative_tokens": {"min": 1}}, "min, max, step"),
        (
            {"method": "draft_model", "num_speculative_tokens": {"min": 1, "max": 2, "step": 0}},
            r"\.step",
        ),
        ({"method": "draft_model", "num_speculative_tokens": [3, 3]}, "each value once"),
        ({"method": "prompt_lookup", "exit_layer": 4}, r"space\.exit_layer.*none of prompt_lookup"),
        ({"method": "draft_model", "acceptance": "typical"}, "lossless"),
        ({"method": "draft_model", "allow_lossy": True}, r"constraints\.lossless"),
        ({"method": "draft_model", "topology": "moon"}, r"space\.topology.*colocated"),
        ({"method": "draft_model", "dtype": "int4"}, r"space\.dtype.*bfloat16"),
        (
            {"method": "draft_model", "branching": {"values": [2], "when": {"width": 1}}},
            r"branching\.when\.width.*a field of the space",
        ),
        (
            {
                "method": "draft_model",
                "shape": ["chain"],
                "branching": {"values": [2], "when": {"shape": "kary"}},
            },
            r"branching\.when\.shape.*chain",
        ),
        (
            {
                "method": "draft_model",
                "branching": {"values": [2], "when": {"node_budget": 4}},
                "node_budget": {"values": [4], "when": {"branching": 2}},
            },
            "circle",
        ),
        (
            {
                "method": "draft_model",
                "node_budget": [4, 8],
                "shape": {"values": ["chain"], "when": {"node_budget": 4}},
            },
            r"space\.shape\.when",
        ),
        (
            # Conditions that exclude each other.
            {
                "method": ["draft_model", "prompt_lookup"],
                "ngram_max": {"values": [2], "when": {"method": "draft_model"}},
            },
            r"space\.ngram_max.*never met",
        ),
    ],
)
def test_bad_spaces_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        space(fields)


@pytest.mark.parametrize(
    ("blocks", "named"),
    [
        ({"objective": "speed"}, "objective.*goodput"),
        ({"objective": []}, "objective"),
        ({"objective": ["goodput", "goodput"]}, "each objective once"),
        ({"searching": {}}, "searching.*search"),
        ({"search": {"trials": 0}}, r"search\.trials"),
        ({"search": {"trails": 3}}, r"search\.trails.*trials"),
        ({"search": {"algorithm": "bayes"}}, r"search\.algorithm"),
        ({"search": {"drafters": ["/no/such/folder"]}}, r"search\.drafters"),
        ({"search": {"drafters": ["smollm2", "smollm2"]}}, "each draft model once"),
        (
            {"search": {"drafters": ["smollm2"]}, "model": {"drafter": "smollm2"}},
            r"model\.drafter.*search\.drafters",
        ),
        ({"workload": {"max_tokens": 0}}, r"workload\.max_tokens"),
        ({"model": {"target": "/no/such/folder"}}, r"model\.target"),
        ({"model": {"dtype": "float8"}}, r"model\.dtype"),
        ({"name": "a/b"}, "name"),
        ({"constraints": {"memory_mb": -1}}, r"constraints\.memory_mb"),
    ],
)
def test_bad_blocks_are_refused_by_name(blocks: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        space({"method": "draft_model"}, **blocks)


def test_bad_prompts(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"workload\.categories.*code_completion"):
        _ = space({"method": "draft_model"}, workload={"categories": ["poems"]}).prompts
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"question_id": 1, "category": "c", "turns": ["  "]}\n')
    with pytest.raises(InvalidArgument, match=r"workload\.prompts"):
        _ = space({"method": "draft_model"}, workload={"prompts": str(empty)}).prompts


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="demo, everything"):
        read_space(tmp_path / "nothing.yaml")
    file = tmp_path / "bad.yaml"
    file.write_text("space: [")
    with pytest.raises(InvalidArgument, match="a YAML file"):
        read_space(file)


def test_changes_from_the_command_line() -> None:
    checked = read_space("demo", ["search.trials=3", "space.method=[eagle, layer_skip]"])
    assert checked.document.search.trials == 3
    assert {p.speculation.method for p in checked.points} == {"ar", "eagle", "layer_skip"}
    with pytest.raises(InvalidArgument, match=r"KEY\.PATH=VALUE"):
        read_space("demo", ["search.trials"])


def test_models_are_names_or_lie_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(TARGET_DIR)
    file = tmp_path / "space.yaml"
    for target, checked in (("demo", "demo"), ("mine", str(TARGET_DIR))):
        file.write_text(
            f"model: {{target: {target}, drafter: demo-drafter}}\nspace: {{method: draft_model}}\n"
        )
        model = read_space(file).document.model
        assert (model.target, model.drafter) == (checked, "demo-drafter")
    with pytest.raises(InvalidArgument, match=r"model\.target.*did you mean smollm2"):
        space({"method": "prompt_lookup"}, model={"target": "smollm"})


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"question_id": 7, "category": "mine", "turns": ["def f"]}\n'
    )
    file = tmp_path / "space.yaml"
    file.write_text("workload: {prompts: prompts.jsonl}\nspace: {method: draft_model}\n")
    assert [prompt.text for prompt in read_space(file).prompts] == ["def f"]


def test_a_document_survives_the_way_to_a_worker() -> None:
    checked = read_space("trees")
    again = Space.from_dict(checked.as_dict())
    assert again.choices == checked.choices
    assert [p.key for p in again.points] == [p.key for p in checked.points]


def test_lossy_methods_are_points_where_they_are_allowed() -> None:
    checked = space({"method": ["skipdecode_lossy"]}, constraints={"lossless": False})
    assert [p.speculation.method for p in checked.points] == ["ar", "skipdecode_lossy"]
    assert checked.points[1].speculation.allow_lossy
    assert not METHODS["skipdecode_lossy"].lossless


def test_auto_stands_for_the_values_that_the_part_proposes() -> None:
    space = parse_space({"space": {"method": "prompt_lookup", "ngram_max": "auto"}})
    (choice,) = (c for c in space.choices if c.name == "ngram_max")
    assert choice.values == KNOBS["ngram_max"].search == (2, 3, 4, 5)
    with pytest.raises(InvalidArgument, match=r"space\.exit_layer.*auto.*a list of values"):
        parse_space({"space": {"method": "layer_skip", "exit_layer": "auto"}})


def test_questions_go_through_the_targets_template(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text('{"question_id": 7, "category": "mine", "turns": ["one", "two"]}\n')
    for part in TARGET_DIR.iterdir():
        (tmp_path / part.name).symlink_to(part)

    def is_chat(**workload: Any) -> bool:
        found = space({"method": "draft_model"}, workload=workload).document.workload
        return found.template(tmp_path) is not None

    from_file = {"prompts": str(file)}
    assert not is_chat(**from_file)
    assert is_chat(**from_file, chat=True), "the default template"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    assert is_chat(**from_file)
    assert is_chat(**from_file, chat="auto")
    assert not is_chat(**from_file, chat=False)
    assert not is_chat(), "built-in prompts are beginnings"
    with pytest.raises(InvalidArgument, match=r"workload\.chat"):
        is_chat(chat="sometimes")
