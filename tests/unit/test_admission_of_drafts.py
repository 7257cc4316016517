import pytest
from support.admission import NGRAM, UNIQUE, drafted, engine_config, refusal

from vllm_sparse_plugin.attention.plan import is_of_draft


@pytest.mark.parametrize("how", ["dense", "sparse"])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_draft_has_the_backend_of_the_model(folder, method, how):
    model = folder()
    config = engine_config(model, **drafted(model, method, how))
    assert config.speculative_config.attention_backend.name == "UNIQUE"


REFUSED_DRAFTS = {
    "another backend": (
        {"attention_backend": "CPU_ATTN"},
        {},
        "speculative attention_backend: got cpu_attn, {}none: a draft uses that of the model",
    ),
    "another cache": (
        {"kv_cache_dtype": "bfloat16"},
        {},
        "speculative kv_cache_dtype: got bfloat16, {}none: a draft uses that of the model",
    ),
    "several tokens in one pass": (
        {"parallel_drafting": True},
        {},
        "speculative parallel_drafting: got true, {}false",
    ),
    "sparse where nothing is selected": (
        {"how": "sparse"},
        {"attention_backend": "dense"},
        "sparse_attention.speculation.draft: got sparse with policy dense, {}dense",
    ),
    "sparse where every page may be read": (
        {"how": "sparse"},
        {"attention_backend": "art"},
        "sparse_attention.speculation.draft: got sparse with policy dense, {}dense",
    ),
}


@pytest.mark.parametrize("case", REFUSED_DRAFTS)
def test_refused_drafts(case, folder):
    changes, arguments, sentence = REFUSED_DRAFTS[case]
    model = folder()
    backend = arguments.get("attention_backend", "unique")
    allowed = f"allowed with attention backend {backend}: "
    assert refusal(model, **drafted(model, **changes), **arguments) == sentence.format(allowed)


def test_a_draft_of_ours_alone_is_refused(folder):
    model = folder()
    draft = drafted(model, attention_backend="unique")["speculative_config"]
    assert refusal(model, attention_backend=None, speculative_config=draft) == (
        f"speculative attention_backend: got unique, {UNIQUE}none: a draft uses that of the model"
    )


@pytest.mark.parametrize("arguments", [{}, NGRAM], ids=["no speculation", "n-gram"])
def test_a_sparse_draft_needs_a_draft(folder, arguments):
    settings = {"sparse_attention": {"speculation": {"draft": "sparse"}}}
    assert refusal(folder(), additional_config=settings, **arguments) == (
        f"sparse_attention.speculation.draft: got sparse, {UNIQUE}dense without a draft"
    )


@pytest.mark.parametrize(
    ("name", "of_draft"),
    [
        ("model.layers.1.self_attn.attn", False),
        ("model.layers.2.self_attn.attn", True),
        ("language_model.model.layers.0.self_attn.attn", False),
        ("draft_model.model.layers.0.self_attn.attn", True),
        ("mtp.layers.0.self_attn.attn", True),
        ("model.layers.2.mtp_block.self_attn.attn", True),
    ],
)
def test_the_layers_of_a_draft_are_known_by_their_names(folder, name, of_draft):
    model = folder()
    assert is_of_draft(name, engine_config(model, **drafted(model, "eagle"))) == of_draft
    assert not is_of_draft(name, engine_config(model, **NGRAM))
