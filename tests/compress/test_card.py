"""The model card of a checkpoint: what a hub reads of it, and what a person does."""

import pytest
import yaml

from compress import METHODS, apply, load_compressed, save_compressed
from compress.checkpoint import save
from compress.checkpoint.card import add_scores, license_of
from compress.checkpoint.workbench import Workbench
from compress.recipe import parse_recipe

RECORD = {
    "scores": {
        "baseline": {"perplexity_wiki": 20.5, "perplexity_wiki_stderr": 0.25, "stored_bytes": 4000000},
        "compressed": {"perplexity_wiki": 21.25, "perplexity_wiki_stderr": 0.5, "stored_bytes": 1000000},
    },
    "provenance": {"command": "papermill notebooks/gptq.ipynb out.ipynb -p bits 4", "commit": "abc123"},
}


def sections(path):
    text = (path / "README.md").read_text()
    front, _, body = text.removeprefix("---\n").partition("---\n")
    parts = body.split("\n## ")[1:]
    return yaml.safe_load(front), {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def test_a_card_says_what_was_done_and_how_to_load_it(tiny, tokens, tmp_path):
    model = tiny("qwen3_moe", tie_word_embeddings=True)
    model.name_or_path = "owner/name"
    recipe = parse_recipe("wanda(pattern='2:4', skip='*.o_proj'), gptq(bits=3, group_size=16, min_tokens=8)")
    path = save_compressed(apply(recipe, model, tokens()), tmp_path / "small")
    front, parts = sections(path)
    assert front["base_model"] == "owner/name" and "license" not in front
    assert {"compressed", "wanda", "gptq", "3-bit", "workbench", "qwen3_moe"} <= set(front["tags"])
    assert 'load_model("small"' in parts["How to load it"] and "PATH" not in parts["How to load it"]
    assert "group_size=16" in parts["Method"] and "6 samples of 24 tokens" in parts["Method"]
    weights = parts["What was done to each weight"]
    for why in ("TopKRouter); rounding it", "(Embedding)", "RMSNorm)", "shares the weight of the embedding"):
        assert why in weights
    assert "sparse24" in weights and "int_group" in weights
    assert "no scores" in parts["Scores"] and "parse_recipe" in parts["How to make it again"]
    assert "load_model('owner/name', dtype='float32')" in parts["How to make it again"]
    assert "the model in memory: every logit is the same, to the last bit." in parts["Verified"]


def test_scores_come_from_the_record_and_leave_the_checkpoint_valid(tiny, tmp_path):
    path = save_compressed(apply(parse_recipe("rtn(group_size=16)"), tiny("llama")), tmp_path / "out")
    before = sections(path)[1]
    for _ in range(2):
        add_scores(path, RECORD)
        parts = sections(path)[1]
        assert "| perplexity_wiki | 20.5 ± 0.25 | 21.25 ± 0.5 |" in parts["Scores"]
        assert "stderr" not in parts["Scores"] and "| stored_bytes | 4,000,000 | 1,000,000 |" in parts["Scores"]
        assert "-p bits 4" in parts["How to make it again"] and "abc123" in parts["How to make it again"]
        changed = ("Scores", "How to make it again")
        assert list(parts) == list(before) and all(
            parts[name] == before[name] for name in before if name not in changed
        )
    load_compressed(path)
    (path / "README.md").write_text("mine")
    add_scores(path, RECORD)
    assert (path / "README.md").read_text() == "mine"


class WithoutCaches(Workbench):
    name = "plain"
    holds_caches = False


def test_a_format_without_methods_of_the_cache_says_so(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(save.SAVE_FORMATS, "plain", WithoutCaches())
    result = apply(parse_recipe("rtn(group_size=16), knorm(budget=0.5)"), tiny("llama"))
    with pytest.warns(UserWarning, match=r"plain checkpoints hold no methods of the KV cache: knorm\(budget=0.5\)"):
        path = save_compressed(result, tmp_path / "out", save_format="plain")
    assert "knorm(budget=0.5) is not part of this one" in sections(path)[1]["Verified"]


def test_licenses_are_found_where_they_are_named(tmp_path):
    assert license_of("smollm2-135m") == "apache-2.0"
    assert license_of("owner/name") == license_of(str(tmp_path)) == license_of("tiny") == ""
    (tmp_path / "README.md").write_text("---\ntags: [x]\nlicense: mit\n---\nlicense: other\n")
    assert license_of(str(tmp_path)) == "mit"


def test_card_says_how_asymmetric_weights_load(tiny):
    """transformers takes them only where they are dequantised on the way in."""
    plain, asymmetric = (
        apply([METHODS["rtn"](group_size=16, symmetric=s)], tiny("llama")).model for s in (True, False)
    )
    writer = save.format_named("compressed-tensors")
    assert "CompressedTensorsConfig" not in writer.how_to_load(plain)
    lines = writer.how_to_load(asymmetric).replace("PATH", "x").split("```python\n")[1].split("```")[0].splitlines()
    assert lines[0].startswith("from transformers import") and "CompressedTensorsConfig" in lines[0]
    assert "quantization_config=CompressedTensorsConfig(dequantize=True)" in lines[2]
