import json
from pathlib import Path

import pytest
from support.admission import MODELS


@pytest.fixture
def folder(tmp_path: Path):
    def write(architecture: str = "LlamaForCausalLM", **more: object) -> str:
        values = MODELS[architecture] | {"architectures": [architecture], "torch_dtype": "bfloat16"} | more
        (tmp_path / "config.json").write_text(json.dumps(values))
        return str(tmp_path)

    return write
