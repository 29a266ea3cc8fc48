"""Models and text by name; the embedded model is off its file's grid and still itself."""

import copy
import hashlib
import json
import os
import shutil
import stat
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from compress import METHODS, apply, calibration, held_out, load_model, save_compressed
from compress.checkpoint.gguf.embedded import EMBEDDED
from compress.inputs import gguf
from compress.inputs.calibration import beginning
from compress.inputs.corpus import CORPORA, PARTS, apart, check_corpus, load_text, local_file, shared_data, sources
from compress.inputs.gguf import shuffle
from compress.inputs.text_files import documents_of
from compress.walk.identity import weights_sha256
from eval.writing.generation import encode_prompt
from kernels.support import user_cache


def test_code_of_a_model_is_never_executed(tmp_path, monkeypatch):
    """transformers asks on the console whether to execute it; nobody is asked here."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "config.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Own: pass")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "config.Own"}, "architectures": ["Own"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot be read"):
        load_model(str(tmp_path))
    assert not (tmp_path / "executed").exists()


def test_the_cache_folder_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    folder = user_cache.cache_folder("native")
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, folder.parent)] == [0o700, 0o700]
    monkeypatch.setattr(user_cache.os, "getuid", lambda: 12345)
    with pytest.raises(ValueError, match="belongs to user id .*, not to you"):
        user_cache.cache_folder("native")


def test_compiled_code_goes_to_the_users_folder_although_torch_names_another(tmp_path, monkeypatch):
    """Importing torch's compiler names a folder in the shared temporary one, and makes it; a user's own choice stays."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    own, by_torch = str(tmp_path / "cache" / "inductor"), tmp_path / "torchinductor_someone"
    for content in ((), ("code",)):
        by_torch.mkdir(exist_ok=True)
        for name in content:
            (by_torch / name).touch()
        monkeypatch.setenv(user_cache.COMPILED, str(by_torch))
        user_cache.compile_in_cache()
        assert os.environ[user_cache.COMPILED] == own and by_torch.exists() == bool(content), "others' code stays"
    for given, taken in (("", own), (str(tmp_path / "mine"), str(tmp_path / "mine"))):
        monkeypatch.setenv(user_cache.COMPILED, given)
        user_cache.compile_in_cache()
        assert os.environ[user_cache.COMPILED] == taken


def test_embedded_model_speaks_english(real):
    model, tokenizer = real
    assert model.dtype == torch.float32 and sum(p.numel() for p in model.parameters()) == 134_515_008
    out = model.generate(
        **tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=4, do_sample=False
    )
    assert "Paris" in tokenizer.decode(out[0])


@pytest.mark.slow
def test_embedded_model_is_the_files_function_off_the_files_grid(real):
    model, tokenizer = real
    path = EMBEDDED["smollm2-135m"]()
    original = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = tokenizer("Perplexity is the exponential of the average loss per token.", return_tensors="pt").input_ids
    with torch.no_grad():
        a, b = original(ids).logits, model(ids).logits
    assert (a - b).abs().max() / a.abs().max() < 1e-4

    def error(W):
        """Of rounding in the file's own way: 16 steps from the least to the largest of each 32 weights."""
        groups = W.view(len(W), -1, 32)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        step = (high - low) / 15
        return ((((groups - low) / step).round() * step + low - groups).norm() / W.norm()).item()

    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        on_grid = error(original.get_submodule(f"model.layers.3.{name}").weight)
        off_grid = error(model.get_submodule(f"model.layers.3.{name}").weight)
        assert on_grid < 1e-3, "the file's own groups make 4 bits lossless"
        assert off_grid > 0.05


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text"])
def test_shuffling_changes_weights_and_not_the_function(tiny, tokens, architecture):
    model, ids = tiny(architecture), tokens(1, 30)[0]
    before, old = model(ids).logits, weights_sha256(model)
    assert shuffle(model, seed=0)
    assert torch.allclose(model(ids).logits, before, atol=1e-4 * before.abs().max().item())
    assert weights_sha256(model) != old


def test_shuffling_leaves_other_architectures_alone(tiny):
    model = tiny("gpt2")
    old = weights_sha256(model)
    assert not shuffle(model, seed=0) and weights_sha256(model) == old


def test_local_folders_load(tiny, real, tmp_path):
    _, tokenizer = real
    tiny("qwen2").save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    model, _ = load_model(str(tmp_path / "m"), dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and not model.training and not any(p.requires_grad for p in model.parameters())


def test_real_float32_model_loads(stories):
    model, tokenizer = load_model(str(stories))
    out = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=20, do_sample=False)
    assert len(tokenizer.decode(out[0]).split()) > 10


@pytest.mark.parametrize(
    "name, message",
    [
        ("", "must be a name"),
        ("no-such-model", "is not there or cannot be read.*it can be smollm2-135m"),
        ("/no/such/folder", "no such file or folder"),
        ("missing.gguf", "there is no such file"),
        ("nobody/no-such-model", "is not there or cannot be read"),
    ],
)
def test_models_that_are_not_there(name, message):
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        load_model(name)
    assert time.monotonic() - start < 15


def test_a_folder_that_is_not_there_is_no_matter_of_connections(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"there is no folder of this name, and without a connection the hub cannot"):
        load_model("models/not-written")


def test_models_that_are_not_decoders(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ValueError, match="is not a decoder: its architecture is BertForMaskedLM"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    )
    with pytest.raises(ValueError, match="is not a decoder"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="folder without config.json"):
        load_model(str(tmp_path))


def test_dtype_must_exist():
    with pytest.raises(ValueError, match=r"`dtype` \(='int4'\)"):
        load_model("tiny", dtype="int4")


def test_embedded_corpus_is_english_and_its_parts_do_not_overlap():
    parts = {part: "\n\n".join(load_text("pydocs", part)) for part in ("calibration", "evaluation")}
    assert len(parts["calibration"]) > 250_000 and len(parts["evaluation"]) > 50_000
    paragraphs = [{p.strip() for p in text.split("\n\n") if p.strip()} for text in parts.values()]
    assert not paragraphs[0] & paragraphs[1]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_files_are_corpora(tmp_path, suffix, real):
    from datasets import Dataset

    documents = [f"Document number {i} has a few words of its own, and {i * i} more." for i in range(40)]
    path = tmp_path / f"text{suffix}"
    if suffix == ".txt":
        path.write_text("\n\n".join(documents))
    elif suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"id": i, "text": d}) for i, d in enumerate(documents)))
    else:
        Dataset.from_dict({"content": documents, "n": list(range(40))}).to_parquet(path)
    calibration_part, evaluation_part = load_text(str(path), "calibration"), load_text(str(path), "evaluation")
    assert len(evaluation_part) == sum(
        hashlib.sha256(document.lower().encode()).digest()[0] % 4 == 3 for document in documents
    )
    assert sorted(calibration_part + evaluation_part) == sorted(documents)
    batches = calibration(real[1], corpus=str(path), samples=4, seqlen=16)
    assert all(b.shape == (1, 16) for b in batches)


def test_several_corpora_are_taken_together(tmp_path, monkeypatch):
    """Each keeps its own parts; a run knows all files; one that is missing is named."""
    for name in "ab":
        rows = [json.dumps({"text": f"{name} document {i} " + "word " * 20}) for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    a, b = (str(tmp_path / f"{name}.jsonl") for name in "ab")
    assert load_text(f"{a} + {b}", "calibration") == load_text(a, "calibration") + load_text(b, "calibration")
    assert load_text(f"{a} + {a}", "calibration") == load_text(a, "calibration")
    for check in (load_text, check_corpus):  # the first windows would be those of the first corpus
        with pytest.raises(ValueError, match="for calibration alone"):
            check(f"{a} + {b}", "evaluation")
    (tmp_path / "a + b.txt").write_text("One file. " * 100)
    assert "One file." in load_text(str(tmp_path / "a + b.txt"), "calibration")[0]
    assert [path.name for path in sources(f"{a} + {b}").files] == ["a.jsonl", "b.jsonl"]
    assert local_file(a).name == "a.jsonl" and local_file(f"{a} + {b}") is None
    check_corpus(f"{a} + {b}", "calibration")
    for broken in (f"{a} + nothing.jsonl", f"{a} + ", "c4+essays"):
        with pytest.raises(ValueError, match="`corpus`"):
            check_corpus(broken, "calibration")
    assert apart(f"{a} + {b}", a)[1] == 0, "the parts of one corpus do not overlap"


def test_articles_that_are_scored_are_left_out_of_wikipedia(data, monkeypatch):
    documents, left_out = apart("wikipedia", "wikitext2")
    assert len(documents) > 1000 and left_out == 0
    page = documents_of(shared_data() / "wikitext2_raw" / "test_pages.parquet")[
        3
    ]  # a page that is scored, line by line
    monkeypatch.setitem(CORPORA, "wikipedia", lambda part: [*documents, f"An article.\n\n{page}"])
    for corpus in ("wikipedia", "essays + wikipedia"):
        assert apart(corpus, "wikitext2")[1] == 1


def test_calibration_is_seeded_and_knows_itself(real):
    tokenizer = real[1]
    a, b, c = (calibration(tokenizer, samples=5, seqlen=32, seed=s) for s in (0, 0, 1))
    assert a.identity == b.identity and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert a.identity["sha256"] != c.identity["sha256"]
    assert a.identity | {"sha256": ""} == {
        "corpus": "pydocs",
        "samples": 5,
        "seqlen": 32,
        "seed": 0,
        "sha256": "",
        "overlap": 0,
    }
    assert len({tuple(x[0].tolist()) for x in a}) == 5, "windows do not overlap"
    assert "5 × 32 tokens" in a._repr_html_()


@pytest.mark.parametrize("single", ["<|endoftext|> $A", "<|endoftext|> $A <|endoftext|>"])
def test_special_tokens_at_the_beginning(real, single, monkeypatch):
    """Those at the end, which some tokenizers add too, neither hide those at the beginning nor end a prompt."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = real[1]
    assert beginning(tokenizer) == []
    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    template = TemplateProcessing(single=single, special_tokens=[("<|endoftext|>", bos)])
    old, tokenizer.backend_tokenizer.post_processor = tokenizer.backend_tokenizer.post_processor, template
    try:
        assert beginning(tokenizer) == [bos]
        batches = calibration(tokenizer, samples=3, seqlen=16)
        assert all(b.shape == (1, 16) and b[0, 0] == bos and (b[0, 1:] != bos).all() for b in batches)
        assert held_out(tokenizer)[0, 0] != bos
        monkeypatch.setattr(tokenizer, "chat_template", None)
        prompt = encode_prompt(tokenizer, "Once upon a time")
        assert prompt[0, 0] == bos and (prompt[0, 1:] != bos).all() and prompt.shape[1] > 1
    finally:
        tokenizer.backend_tokenizer.post_processor = old


def test_bad_text_requests(real, tmp_path):
    tokenizer = real[1]
    with pytest.raises(
        ValueError, match=r"`samples` \(=100000\) x `seqlen` \(=512\) needs 51200000 tokens.*at most \d+ samples"
    ):
        calibration(tokenizer, samples=100_000)
    with pytest.raises(ValueError, match=r"`samples` \(=0\)"):
        calibration(tokenizer, samples=0)
    with pytest.raises(ValueError, match=r"`corpus` \(='pydoc'\) is not known; it can be pydocs"):
        calibration(tokenizer, corpus="pydoc")
    with pytest.raises(ValueError, match="there is no such file"):
        load_text(str(tmp_path / "no.txt"), "calibration")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_text("nobody/no-such-set", "evaluation")
    (tmp_path / "numbers.jsonl").write_text('{"a": 1}\n{"a": 2}')
    with pytest.raises(ValueError, match="needs a column named text, or messages with chats; it has a"):
        load_text(str(tmp_path / "numbers.jsonl"), "calibration")
    (tmp_path / "empty.txt").write_text("  \n\n ")
    with pytest.raises(ValueError, match="has no text"):
        load_text(str(tmp_path / "empty.txt"), "calibration")


def test_wikitext2_is_the_classic_file(data, real):
    text = load_text("wikitext2", "evaluation")
    assert len(text) == 4358
    assert held_out(real[1], corpus="wikitext2").shape == (1, 304986)


@pytest.mark.parametrize("splits", [["train"], ["validation"], ["train", "test"]])
def test_parts_of_hub_data_sets_never_overlap(splits, monkeypatch):
    import datasets

    from compress.inputs import corpus

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: splits)
    monkeypatch.setattr(corpus, "_load", lambda *_, split, **__: [f"{split} {i}" for i in range(20)])
    one, two = (set(load_text("owner/name", part)) for part in corpus.PARTS)
    assert one and two and not one & two


def test_copies_of_a_document_are_in_one_part(tmp_path, real):
    """However often a file holds a document, and under whatever name: no text is both calibrated on and scored."""
    texts = [
        f"Document number {i // 2} has a few words of its own, which are enough to count as a text." for i in range(400)
    ]
    twice, copy, other = (tmp_path / name for name in ("twice.jsonl", "copy.txt", "other.txt"))
    twice.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    copy.write_text("\n\n".join(text.upper().replace(" ", "  ") for text in reversed(texts[::2])))
    words = [{" ".join(d.split()).lower() for d in load_text(str(f), part)} for f in (twice, copy) for part in PARTS]
    assert words[0] == words[2] and words[1] == words[3] and not words[0] & words[1]
    few = tmp_path / "few.txt"
    few.write_text("\n\n".join(["The same words, which are said twice."] * 2))
    parts = [load_text(str(few), part)[0] for part in PARTS]
    assert "".join(parts) == "The same words, which are said twice.", "a text that is said twice is cut as said once"
    other.write_text("\n\n".join(texts[:300] + [f"{text} There is more to it." for text in texts]))
    kept, dropped = apart(str(other), "")
    known = set(load_text(str(twice), "evaluation"))
    left, count = apart(str(other), str(twice))
    assert not known & set(left) and count == len(kept) - len(left) == sum(d in known for d in kept) and dropped == 0
    batches = calibration(real[1], corpus=str(other), samples=2, seqlen=16, scored=str(twice))
    assert batches.identity["overlap"] == count and (not count or batches.identity["scored"] == str(twice))


def test_nothing_is_calibrated_on_the_test_set(data, tmp_path, real):
    """A copy of wikitext2's test set, as a file of the user, has only its short lines for calibration."""
    copy = tmp_path / "copy.parquet"
    shutil.copy(data / "wikitext2_raw/test.parquet", copy)
    assert not {d for d in load_text(str(copy), "calibration") if len(d) >= 64}
    with pytest.raises(ValueError, match=r"has \d+ without the \d+ documents that are scored, too"):
        calibration(real[1], corpus=str(copy))


@pytest.mark.parametrize("name", ["a[1].txt", "a*.txt", "a?.jsonl", "a[1].parquet"])
def test_names_of_files_are_no_patterns(tmp_path, name):
    from datasets import Dataset

    for neighbour in ("a1", "ab", "a"):
        for suffix, text in ((".txt", "wrong\n\n" * 9), (".jsonl", '{"text": "wrong"}\n' * 9)):
            (tmp_path / f"{neighbour}{suffix}").write_text(text)
        Dataset.from_dict({"text": ["wrong"] * 9}).to_parquet(tmp_path / f"{neighbour}.parquet")
    path, texts = tmp_path / name, [f"right {i}" for i in range(9)]
    if path.suffix == ".parquet":
        Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "temporary")
        (tmp_path / "temporary").rename(path)
    else:
        path.write_text(
            "\n\n".join(texts) if path.suffix == ".txt" else "\n".join(json.dumps({"text": t}) for t in texts)
        )
    assert sorted(d for part in PARTS for d in load_text(str(path), part)) == texts


def chats(count):
    return [
        [{"role": "user", "content": f"What is {i} plus {i}?"}, {"role": "assistant", "content": f"It is {2 * i}."}]
        for i in range(count)
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_chats_are_written_by_the_template(tmp_path, suffix, real):
    from datasets import Dataset

    path, (_, tokenizer) = tmp_path / f"chats{suffix}", real
    Dataset.from_dict({"id": list(range(40)), "messages": chats(40)}).to_parquet(tmp_path / "temporary")
    if suffix == ".parquet":
        (tmp_path / "temporary").rename(path)
    else:
        path.write_text("\n".join(json.dumps({"id": i, "messages": chat}) for i, chat in enumerate(chats(40))))
    parts = [load_text(str(path), part) for part in PARTS]
    assert len(parts[0]) + len(parts[1]) == 40 and not set(parts[0]) & set(parts[1])
    written = tokenizer.decode(held_out(tokenizer, corpus=str(path))[0])
    assert written == "".join(tokenizer.apply_chat_template(d.messages, tokenize=False) for d in parts[1])
    (batch,) = calibration(tokenizer, corpus=str(path), samples=1, seqlen=64)
    assert "<|im_start|>" in tokenizer.decode(batch[0])
    (tmp_path / "plain.txt").write_text("A plain sentence. " * 200)
    together = f"{tmp_path / 'plain.txt'} + {path}"
    every = calibration(tokenizer, corpus=together, samples=1, seqlen=64).further(1000)
    said = tokenizer.decode(torch.cat(every, 1)[0])
    assert "plain sentence" in said and "<|im_start|>" in said


def test_chats_that_cannot_be_written(tmp_path, real):
    path, (_, own) = tmp_path / "chats.jsonl", real

    def refused(rows, template=own.chat_template):
        path.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
        tokenizer = copy.deepcopy(own)
        tokenizer.chat_template = template
        with pytest.raises(ValueError) as caught:
            calibration(tokenizer, corpus=str(path), samples=1, seqlen=8)
        return str(caught.value)

    assert "must be a list of turns" in refused([["Hello"]] * 9)
    assert "must be a list of turns" in refused([[{"role": "user", "content": [{"type": "image"}]}]] * 9)
    assert f"`corpus` (={str(path)!r}) has 2 chats; it needs at least 4" in refused(chats(2))
    assert "the chat template of this tokeniser does not write" in refused(chats(20), None)
    assert "no roles here" in refused(chats(20), "{{ raise_exception('no roles here') }}")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_encodings_are_decoded_or_refused(tmp_path, suffix):
    texts = [f"Ça va très bien, {i} fois, et l’été aussi." for i in range(9)]
    path = tmp_path / f"text{suffix}"
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    content = "\n\n".join(texts) if suffix == ".txt" else "\n".join(rows)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_bytes(content.encode(encoding))
        assert sorted(d for part in PARTS for d in load_text(str(path), part)) == texts, encoding
    for encoding, message in (
        ("cp1252", "is not UTF-8: byte .* is 0xc7"),
        ("utf-16-le", "holds bytes of 0|is not UTF-8"),
    ):
        path.write_bytes(content.encode(encoding))
        with pytest.raises(ValueError, match=message):
            load_text(str(path), "calibration")


def test_a_cache_that_cannot_be_written_is_named(monkeypatch):
    import datasets

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "/home/nobody/.cache/huggingface")

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match="the cache of data sets cannot be written: .*nobody.*HF_HOME"):
        load_text("owner/unwritable", "calibration")


def test_compressed_folders_load_as_what_they_are(tiny, real, tmp_path, monkeypatch):
    """A folder that the workbench saved gives the compressed model, not random weights in its config's shapes."""
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    save_compressed(result, tmp_path / "m", real[1])
    model, _ = load_model(str(tmp_path / "m"))
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, result.model(ids).logits)
    assert model.name_or_path == str(tmp_path / "m")
    assert load_model(str(tmp_path / "m"), dtype="bfloat16")[0].model.layers[0].mlp.up_proj.dtype == torch.bfloat16
    config = AutoConfig.from_pretrained(tmp_path / "m")
    monkeypatch.setattr("compress.inputs.model.decoder_config", lambda name, folder: config)
    monkeypatch.setattr("compress.inputs.model._local", lambda folder: tmp_path / "m")  # downloaded from a hub
    assert torch.equal(load_model("owner/compressed")[0](ids).logits, result.model(ids).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_missing_or_unexpected(tiny, real, tmp_path, tied):
    folder = tmp_path / "m"
    tiny("llama", tie_word_embeddings=tied).save_pretrained(folder)
    real[1].save_pretrained(folder)
    load_model(str(folder))  # a tied head is not missing
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 of the weights: model.norm.weight"):
        load_model(str(folder))
    tensors |= {"model.norm.weight": norm, "more": norm.clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"\(LlamaForCausalLM\) does not use 1 of the weights: more"):
        load_model(str(folder))


def test_a_conversion_is_kept_by_the_code_that_made_it(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    file, made = tmp_path / "m.gguf", []
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(gguf, "_convert", lambda path, target: made.append((target / "weights").write_text("w")))
    assert gguf.converted(file) == gguf.converted(file) and len(made) == 1
    monkeypatch.setattr(gguf, "code_sha256", lambda path: "other code")
    gguf.converted(file)
    assert len(made) == 2 and len(list((tmp_path / "cache").iterdir())) == 2
