import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.admission import (
    CUBIC,
    UNCALIBRATED,
    engine_config,
    refusal,
    routed,
)
from vllm.config import VllmConfig

from vllm_sparse_plugin import compat, registration
from vllm_sparse_plugin.admission import admit, check_layers
from vllm_sparse_plugin.config import fingerprint
from vllm_sparse_plugin.config.fingerprint import fingerprint_of, overridden_fields
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS

ROUTED = "allowed with attention backend sinkrouter: "
CALIBRATE = "the file of vllm-sparse calibrate as config, or routing.accept uncalibrated"
REFUSED_ROUTING = {
    "thresholds of other layers": (
        routed(threshold=[0.5] * 3, **UNCALIBRATED),
        f"sparse_attention.routing.threshold: got a list of 3, {ROUTED}the model's 2 layers",
    ),
    "thresholds of other heads": (
        routed(threshold=[0.5, [0.5] * 4], **UNCALIBRATED),
        f"sparse_attention.routing.threshold: got a layer's list of 4, {ROUTED}the model's 2 KV heads",
    ),
    "contexts beyond the fit": (
        routed(**CUBIC, **UNCALIBRATED),
        f"max_model_len: got 512, {ROUTED}up to 256, the longest context of the cubic "
        "(sparse_attention.routing.longest)",
    ),
    "another model": (
        routed(**CUBIC, model="Llama-3.1-8B", fingerprint="1234", recommended=True) | {"max_model_len": 256},
        f"model: got FOLDER with fingerprint DIGITS, {ROUTED}Llama-3.1-8B with fingerprint 1234, the model of "
        "the thresholds",
    ),
    "a preset that is not calibrated": (
        {"attention_backend": "sinkrouter"},
        f"sparse_attention.routing.threshold: got a value that is not calibrated for this model, {ROUTED}{CALIBRATE}",
    ),
    "a name of a model alone": (
        routed(**CUBIC, model="FOLDER") | {"max_model_len": 256},
        f"sparse_attention.routing.cubic: got a value that is not calibrated for this model, {ROUTED}{CALIBRATE}",
    ),
    "thresholds beside a policy": (
        {"additional_config": {"sparse_attention": {"routing": {"threshold": 0.5}}}},
        "sparse_attention.routing.threshold: got a value that is not calibrated for this model, allowed with attention "
        f"backend unique: {CALIBRATE}",
    ),
    "a verdict against routing": (
        routed(**CUBIC, fingerprint="DIGITS", recommended=False) | {"max_model_len": 256},
        "sparse_attention.routing.recommended: got false, since vllm-sparse calibrate advises against routing, "
        f"{ROUTED}another backend, or routing.accept not_recommended",
    ),
    "no verdict": (
        routed(**CUBIC, fingerprint="DIGITS") | {"max_model_len": 256},
        "sparse_attention.routing.recommended: got false, since vllm-sparse calibrate advises against routing, "
        f"{ROUTED}another backend, or routing.accept not_recommended",
    ),
    "another model that is not recommended": (
        routed(**CUBIC, fingerprint="1234", accept="not_recommended") | {"max_model_len": 256},
        f"model: got FOLDER with fingerprint DIGITS, {ROUTED}one with fingerprint 1234, the model of the thresholds",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ROUTING)
def test_refused_routing(case, folder):
    arguments, sentence = REFUSED_ROUTING[case]
    model = folder()
    names = {"FOLDER": Path(model).name, "DIGITS": fingerprint_of(model)}
    given, expected = json.dumps(arguments), sentence
    for name, stands_for in names.items():
        given, expected = given.replace(name, stands_for), expected.replace(name, stands_for)
    assert refusal(model, **json.loads(given)) == expected


def test_refused_routing_of_learned_sinks(folder, monkeypatch):
    config = engine_config(folder(), **routed(threshold=0.5, **UNCALIBRATED))
    monkeypatch.setattr(config.model_config.hf_config, "model_type", "gpt_oss")
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert (
        str(caught.value)
        == f"model: got gpt_oss with learned attention sinks, {ROUTED}models without them, or no routing"
    )


@pytest.mark.parametrize(
    "others",
    [
        {"compaction": {"method": "snapkv", "sink_tokens": 0}},
        {"selection": {"policy": "streaming_llm", "sink_pages": 0}, "compaction": {"method": "streaming_llm"}},
    ],
)
def test_routing_needs_the_first_token_in_its_place(folder, others):
    def given(others: dict) -> dict:
        routing = {"routing": {"threshold": 0.5, **UNCALIBRATED}}
        return {"attention_backend": "sinkrouter", "additional_config": {"sparse_attention": routing | others}}

    sentence = f"sparse_attention.compaction.sink_tokens: got 0 with routing, which reads the first token, {ROUTED}"
    assert refusal(folder(), **given(others)) == f"{sentence}at least 1"
    of_text, alone = {"compaction": {"method": "snapkv", "sink_tokens": 1}}, {"compaction": None}
    for good in (of_text, others | alone):
        assert engine_config(folder(), **given(good))


@pytest.mark.parametrize("method", ["snapkv", "streaming_llm", "h2o"])
def test_a_threshold_by_length_needs_the_length_of_the_text(folder, method):
    def given(routing: dict, compaction: dict | None) -> dict:
        sections = {"routing": routing | UNCALIBRATED, "compaction": compaction}
        additional = {"additional_config": {"sparse_attention": sections}}
        return {"attention_backend": "sinkrouter", "max_model_len": 256, **additional}

    sentence = "sparse_attention.routing.cubic: got a threshold by length with compaction, which shortens it, "
    assert refusal(folder(), **given(CUBIC, {"method": method})) == (
        f"{sentence}{ROUTED}null with routing.threshold, or no compaction"
    )
    for routing, compaction in ((CUBIC, None), ({"threshold": 0.5, "cubic": None}, {"method": method})):
        assert engine_config(folder(), **given(routing, compaction))


def test_thresholds_are_those_of_one_model_wherever_it_lies(folder, tmp_path):
    model = folder()
    calibrated = routed(threshold=0.5, fingerprint=fingerprint_of(model), recommended=True)
    assert engine_config(model, **calibrated)
    moved = shutil.copytree(model, tmp_path / "elsewhere" / "renamed")
    assert engine_config(str(moved), **calibrated)
    accepted = routed(threshold=0.5, fingerprint=fingerprint_of(model), recommended=False, accept="not_recommended")
    assert engine_config(model, **accepted)
    folder(rope_theta=5e5)
    assert refusal(model, **calibrated).startswith(f"model: got {Path(model).name} with fingerprint ")


@pytest.mark.parametrize("overrides", [{"rope_theta": 5e5}, lambda config: config], ids=["fields", "function"])
def test_thresholds_are_not_those_of_a_model_with_other_fields(folder, overrides):
    model = folder()
    calibrated = routed(threshold=0.5, fingerprint=fingerprint_of(model), recommended=True)
    got = "a function" if callable(overrides) else "rope_theta"
    assert refusal(model, **calibrated, hf_overrides=overrides) == (
        f"hf_overrides: got {got}, so that the model is another one, {ROUTED}none of these beside thresholds of the "
        "model as it is"
    )
    assert engine_config(model, **calibrated, hf_overrides={"use_cache": False})
    nested = {"eos_token_id": 3, "text_config": {"rope_scaling": None, "use_cache": False}}
    assert overridden_fields(nested | {"rms_norm_eps": 8}) == ["rms_norm_eps", "rope_scaling"]


def test_thresholds_are_not_those_of_a_model_that_is_changed_as_it_is_loaded(folder, tmp_path):
    model = folder()
    calibrated = routed(threshold=0.5, fingerprint=fingerprint_of(model), recommended=True)
    other = shutil.copytree(model, tmp_path / "other")
    changes = {
        "enable_lora": True, "quantization": "fp8", "hf_config_path": str(other), "load_format": "dummy",
    }  # fmt: skip
    for field, got in changes.items():
        shown = "true" if got is True else got
        assert refusal(model, **calibrated, **{field: got}) == (
            f"{field}: got {shown}, so that the model is another one, {ROUTED}the default beside thresholds of the "
            "model as it is"
        )
        assert engine_config(model, **routed(threshold=0.5, **UNCALIBRATED), **{field: got})
    assert engine_config(model, **calibrated, hf_config_path=model)
    updated = {"weight_transfer_config": {"backend": "ipc"}}
    assert refusal(model, **calibrated, **updated) == (
        f"weight_transfer_config: got one, so that the model is another one, {ROUTED}the default beside thresholds of "
        "the model as it is"
    )
    assert engine_config(model, **routed(threshold=0.5, **UNCALIBRATED), **updated)


@pytest.mark.parametrize("settings", ["thresholds", "anchors"])
def test_weights_of_a_running_server_are_not_replaced_beside_what_was_found_for_them(folder, settings, monkeypatch):
    model, calls = folder(), []
    found = {"fingerprint": fingerprint_of(model)}
    tied = routed(threshold=0.5, recommended=True, **found) if settings == "thresholds" else {
        "additional_config": {"sparse_attention": {"selection": found | {"anchor_layers": [0]}}}
    }  # fmt: skip

    class Runner:
        def __init__(self, config: VllmConfig) -> None:
            self.vllm_config = config

        def reload_weights(self, *args: object) -> None:
            calls.append(args)

        def sleep(self, level: int = 1) -> None:
            calls.append(level)

    module = SimpleNamespace(GPUModelRunner=Runner, Worker=Runner)
    for name in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu_worker"):
        monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):
        compat.hook_weight_updates(registration.refuse_other_weights_if_chosen)
    runner = Runner(engine_config(model, **tied))
    for call, refused in (("reload_weights", lambda: runner.reload_weights(1)), ("sleep", lambda: runner.sleep(2))):
        with pytest.raises(ConfigurationError) as error:
            refused()
        assert str(error.value).startswith(
            f"{call}: got a call beside {settings} of the model with fingerprint {found['fingerprint']}, allowed with "
        )
    runner.sleep()
    other = Runner(engine_config(model))
    other.reload_weights(1)
    other.sleep(level=2)
    assert calls == [1, (1,), 2]


FITTED = {"cubic": [0.5, 0, 0.25, 0], "shortest": 16, "longest": 512, "score": "max", "dense_layers": 1}


@pytest.mark.parametrize(
    ("beside", "holds"),
    [
        ({}, True),
        ({"score": "max", "dense_layers": 1, "longest": 512}, True),
        ({"score": "mean"}, False),
        ({"dense_layers": 0}, False),
        ({"longest": 1024}, False),
        ({"shortest": 8}, False),
        ({"cubic": [0.25, 0, 0.25, 0]}, False),
        ({"threshold": 0.1}, False),
        ({"dense_layers": 0, "recommended": True}, False),
    ],
)
def test_a_verdict_holds_for_the_settings_that_were_measured(folder, tmp_path, beside, holds):
    """A longer `longest` stretches the cubic, another score or layer has other thresholds."""
    model, file = folder(), tmp_path / "calibrated.yaml"
    file.write_text(json.dumps({"routing": FITTED | {"fingerprint": fingerprint_of(model), "recommended": True}}))
    settings = {"config": str(file), "routing": beside}
    given = {"attention_backend": "sinkrouter", "additional_config": {"sparse_attention": settings}}
    if holds:
        assert engine_config(model, **given)
    else:
        assert f"got a value that is not calibrated for this model, {ROUTED}{CALIBRATE}" in refusal(model, **given)
        assert engine_config(model, **given | {"additional_config": {"sparse_attention": settings | {
            "routing": beside | UNCALIBRATED}}})  # fmt: skip


def test_a_model_of_the_hub_is_compared_once_it_is_loaded(folder, monkeypatch):
    model = folder()
    calibrated = routed(threshold=0.5, fingerprint="1234", recommended=True)
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    config = engine_config(model, **calibrated)
    monkeypatch.undo()
    chosen = config.attention_config.backend.get_class()
    layer = SimpleNamespace(get_attn_backend=lambda: chosen)
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: {"layer": layer})
    with pytest.raises(
        ConfigurationError, match=r"^model: got .* with fingerprint [0-9a-f]{16}, allowed .* 1234, the "
    ):
        check_layers(config, BACKENDS)


def test_the_thresholds_beside_the_witness_are_its_own(model):
    witness = Path(model).parent / "witness-6m"
    given = {
        "attention_backend": "sinkrouter",
        "max_model_len": 8192,
        "additional_config": {"sparse_attention": {"config": str(witness / "sinkrouter.yaml")}},
    }
    assert engine_config(str(witness), **given)
    assert refusal(str(witness), **given | {"max_model_len": 16384}).startswith("max_model_len: got 16384")
    digits = [fingerprint_of(folder) for folder in (model, str(witness))]
    assert refusal(model, **given) == (
        f"model: got needle-8m with fingerprint {digits[0]}, {ROUTED}witness-6m with fingerprint {digits[1]}, the "
        "model of the thresholds"
    )


def test_a_fingerprint_is_of_contents(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "transformers_version": "5.0", "_name_or_path": "/a"}

    def write(weights: bytes, name: str = "model.safetensors", **changes: object) -> str | None:
        (folder / "config.json").write_text(json.dumps(config | changes))
        (folder / name).write_bytes(weights)
        return fingerprint_of(folder)

    first = write(b"0" * 10_000)
    assert write(b"0" * 10_000, transformers_version="6", _name_or_path="/b", text_config=None) == first
    assert write(b"0" * 10_000, "optimizer.bin") == first
    others = {write(b"1" * 10_000), write(b"0" * 9_999), write(b"0" * 10_000, hidden_size=65), write(b"")}
    others.add(write(b"0" * 9_990 + b"1" * 10))
    # Every byte and every field counts, also of a part of the configuration and of a later piece of a file.
    for place in (0, 1, 4_321, 5_000, 9_999):
        others.add(write(b"0" * place + b"1" + b"0" * (9_999 - place)))
    for field in ("rms_norm_eps", "attn_logit_softcapping", "max_position_embeddings", "partial_rotary_factor"):
        others |= {write(b"0" * 10_000, **{field: 0.5}), write(b"0" * 10_000, text_config={field: 0.5})}
    assert len(others - {first}) == 18
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 1000)
    assert len({write(b"0" * place + b"1" + b"0" * (9_999 - place)) for place in (0, 1000, 4_321, 9_999)}) == 4
    (folder / "config.json").write_text("[")
    assert fingerprint_of(folder) is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert fingerprint_of("meta-llama/Llama-3.1-8B", cache=str(tmp_path)) is None
    cached = tmp_path / "models--a--b" / "snapshots" / "abc"
    shutil.copytree(folder, cached)
    (cached / "config.json").write_text(json.dumps(config))
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("abc")
    assert fingerprint_of("a/b", cache=str(tmp_path)) == fingerprint_of(cached) is not None
