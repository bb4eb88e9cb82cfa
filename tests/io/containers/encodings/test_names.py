"""Engines find a part of a model that stays in float under its name in the file and in transformers, and no other module."""

import fnmatch
import re

import pytest

from fewbit.io.containers.encodings.names import linear_modules, parts_apart

QUANTIZED = ["language_model.model.layers.0.self_attn.q_proj"]
KEPT = ["language_model.model.norm.weight", "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight"]
INSIDE = [
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
    "model.vision_tower.encoder.layers.0.self_attn.q_proj",
]
OUTSIDE = [*QUANTIZED, "model.language_model.layers.0.self_attn.q_proj"]


def test_modules_to_leave_in_float():
    kept = ["model.embed_tokens.weight", "model.norm.weight", "l.gate.weight", "l.up.bias", "l.gate.bias", "w"]
    assert linear_modules(kept, ["l.up"]) == ["l.gate", "lm_head"]
    assert linear_modules(kept, ["l.up", "lm_head"]) == ["l.gate"]


def test_parts_without_a_quantized_weight():
    assert parts_apart(KEPT, QUANTIZED) == ["vision_tower"]
    assert parts_apart(["model.layers.0.mlp.gate.weight", "lm_head.weight"], ["model.layers.0.mlp.up_proj"]) == []


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("{}.", lambda pattern, name: pattern in name),
        (r"(?:.*\.)?{}", lambda pattern, name: re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name)),
        (r"re:(?:.*\.)?{}\..*", lambda pattern, name: re.match(pattern.removeprefix("re:"), name)),
        ("*{}.*", lambda pattern, name: fnmatch.fnmatch(name, pattern)),
    ],
    ids=["vLLM", "transformers", "compressed-tensors", "ModelOpt"],
)
def test_a_pattern_names_the_part_alone(pattern, matches):
    *modules, found = linear_modules(KEPT, QUANTIZED, [pattern])
    assert modules == [INSIDE[0], "lm_head"]
    assert all(matches(found, name) for name in INSIDE) and not any(matches(found, name) for name in OUTSIDE)
