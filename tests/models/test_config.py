"""A configuration is valid or refused, and its JSON form reads back."""

import dataclasses
import json

import pytest

from fewbit.errors import QuantError
from fewbit.models import LlamaConfig
from tests.nets.random_llama import CONFIGS, SMALL


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_json_reads_back(config: LlamaConfig):
    assert LlamaConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_json_has_a_closed_schema():
    with pytest.raises(QuantError, match=r"a Llama configuration has no field 'head'; did you mean 'heads'"):
        LlamaConfig.from_json({**SMALL.to_json(), "head": 3})
    with pytest.raises(QuantError, match="lacks the field 'vocab'"):
        LlamaConfig.from_json({k: v for k, v in SMALL.to_json().items() if k not in ("vocab", "hidden")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0, must be a positive whole number"),
        ({"vocab": True}, "vocab is True, must be a positive whole number"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0, must be a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, must be a positive number"),
        ({"rope": "full"}, "rope is 'full', must be one of interleaved, half"),
        ({"kv_heads": 4}, "kv_heads is 4, must divide heads, which is 6"),
        ({"head_dim": 7}, "head_dim is 7, must be even"),
        ({"tied": None}, "tied is None, must be true or false"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_refuses(change: dict, message: str):
    with pytest.raises(QuantError, match=message):
        dataclasses.replace(SMALL, **change)
