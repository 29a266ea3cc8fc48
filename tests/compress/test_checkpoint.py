"""Saved means: reloaded, compared, and there by one rename."""

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from compress import METHODS, apply, load_compressed, save_compressed
from compress.checkpoint import shards
from compress.checkpoint.checksums import write_checksums
from compress.checkpoint.load import FORMAT_VERSION
from compress.checkpoint.save import export_checkpoint
from compress.checkpoint.save_format import CheckpointInfo
from compress.dropped import dropped_parts
from compress.kv import CompressedCache
from compress.kv.attach import attached_methods
from compress.linear import compressed_linears
from compress.transforms import TRANSFORMS, Transform
from compress.transforms.stream import stream_of
from eval.machine.size import size

CHECKPOINTS = Path(__file__).parent / "checkpoints"


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "bits, symmetric, dtype",
    [(4, True, torch.float32), (3, False, torch.bfloat16)]
    + [pytest.param(8, True, torch.bfloat16, marks=pytest.mark.slow)],
)
def test_every_architecture_comes_back_bit_for_bit(any_model, tokens, tmp_path, bits, symmetric, dtype):
    any_model.to(dtype)
    result = apply([METHODS["rtn"](bits=bits, group_size=16, symmetric=symmetric)], any_model)
    path = save_compressed(result, tmp_path / "out")
    again = load_compressed(path)
    ids = torch.cat(tokens(2, 9))
    assert torch.equal(again(ids).logits, any_model(ids).logits)
    assert again.dtype == dtype and not again.training
    stored = json.loads((path / "compression.json").read_text())
    assert stored["recipe"][0]["method"] == "rtn" and len(stored["layers"]) == len(result.layers)


def test_file_holds_what_was_counted(tiny, tmp_path):
    result = apply([METHODS["rtn"](bits=4, group_size=16)], tiny("llama", tie_word_embeddings=True))
    path = save_compressed(result, tmp_path / "out")
    tensors = load_file(path / "model.safetensors")
    stored = sum(tensor.nbytes for key, tensor in tensors.items() if not key.startswith("computed:"))
    assert "lm_head.weight" not in tensors, "tied weights are stored once"
    assert stored == size(result.model).stored_bytes
    again = load_compressed(path)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_saved_class_is_a_causal_language_model(tiny, tmp_path):
    path = save_compressed(apply([METHODS["rtn"](group_size=16)], tiny("llama")), tmp_path / "out")
    layout = json.loads((path / "workbench.json").read_text())
    (path / "workbench.json").write_text(json.dumps(layout | {"class": "Trainer"}))
    write_checksums(path)
    with pytest.raises(ValueError, match="'Trainer' in workbench.json, which is not a causal language model"):
        load_compressed(path)


def test_generates_after_loading(tiny, tokens, tmp_path):
    result = apply([METHODS["gptq"](group_size=16, min_tokens=8)], tiny("llama"), tokens())
    again = load_compressed(save_compressed(result, tmp_path / "out"))
    ids = tokens(1)[0]
    expected, found = (
        m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (result.model, again)
    )
    assert torch.equal(expected, found)


def test_an_existing_folder_is_not_overwritten(tiny, tmp_path):
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("data")
    with pytest.raises(ValueError, match="exists already"):
        save_compressed(result, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "precious").exists()


def test_a_wrong_copy_is_not_called_saved(tiny, tmp_path, monkeypatch):
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    from compress.checkpoint import workbench

    write = workbench._tensors
    monkeypatch.setattr(
        workbench,
        "_tensors",
        lambda model: {k: (v + 1 if k.endswith("norm.weight") else v) for k, v in write(model).items()},
    )
    with pytest.raises(RuntimeError, match="other logits"):
        save_compressed(result, tmp_path / "out")
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_folders_that_are_not_compressed_models(tmp_path):
    with pytest.raises(ValueError, match="is not a compressed model"):
        load_compressed(tmp_path / "nowhere")
    (tmp_path / "workbench.json").write_text('{"format_version": 99}')
    with pytest.raises(ValueError, match="format version 99"):
        load_compressed(tmp_path)
    (tmp_path / "workbench.json").write_text('{"format_ver')
    with pytest.raises(ValueError, match="workbench.json is damaged"):
        load_compressed(tmp_path)


def test_a_class_that_transformers_lacks_is_refused_before_anything_is_written(tiny, tmp_path):
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    result.model.__class__ = type("RemoteForCausalLM", (type(result.model),), {})
    with pytest.raises(ValueError, match="RemoteForCausalLM, which is not a class of transformers"):
        save_compressed(result, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", [1, 2, 3, FORMAT_VERSION])
def test_checkpoints_of_every_version_load(version, tmp_path):
    """Stored ones: tests/compress/checkpoints/<version>; `expected.json` holds the logits that they gave."""
    folder = CHECKPOINTS / f"version-{version}"
    expected = json.loads((folder / "expected.json").read_text())
    model = load_compressed(folder).float()
    assert len(dropped_parts(model)) == 1 and len(compressed_linears(model)) == 11 + (version >= 3)  # the head, too
    assert (stream_of(model) is not None) == (version == 4)
    logits = model(torch.tensor([expected["ids"]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), atol=2e-4, rtol=1e-4)
    assert CheckpointInfo.read(folder).recipe[0]["method"] == "layer_drop"
    copied = export_checkpoint(folder, tmp_path / "now", "workbench")
    assert json.loads((copied / "workbench.json").read_text())["format_version"] == max(version, 2)


def test_methods_of_the_cache_travel(tmp_path):
    stored = CHECKPOINTS / "version-2"
    model = load_compressed(stored)
    assert [str(method) for method in attached_methods(model)] == ["knorm(budget=0.5)", "kv_int(bits=8, group_size=64)"]
    ids = torch.arange(20)[None]
    cache = model(ids, use_cache=True).past_key_values
    assert isinstance(cache, CompressedCache) and cache.policy.budget == 0.5
    assert not attached_methods(load_compressed(stored, caches=False))
    with pytest.raises(ValueError, match=r"snapkv\(.* cannot be attached beside knorm\(budget=0.5\): one policy"):
        apply([METHODS["snapkv"]()], model)
    layout = json.loads((stored / "workbench.json").read_text())
    layout["caches"][0]["method"] = "os.system"
    shutil.copytree(stored, tmp_path / "other")
    (tmp_path / "other" / "workbench.json").write_text(json.dumps(layout))
    write_checksums(tmp_path / "other")
    with pytest.raises(ValueError, match="'os.system' is not a method of the cache"):
        load_compressed(tmp_path / "other")


def test_weights_lie_in_shards_with_an_index(tiny, tokens, tmp_path):
    result = apply([METHODS["rtn"](group_size=16)], tiny("qwen2"))
    path = save_compressed(result, tmp_path / "out", shard_bytes=20_000)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert all(sum(t.nbytes for t in load_file(path / name).values()) <= 24_576 for name in files), "one embedding"
    ids = tokens(1)[0]
    assert torch.equal(load_compressed(path)(ids).logits, result.model(ids).logits)


class Doubled(Transform):
    """x times a stored vector, twice."""

    name = "doubled"

    def __init__(self, by):
        super().__init__()
        self.register_buffer("by", by)

    def forward(self, x):
        return 2 * x * self.by

    def spec(self):
        return {"transform": self.name}

    @classmethod
    def from_tensors(cls, spec, tensors):
        return cls(tensors["by"])


def test_a_transform_of_the_input_is_saved(tiny, tokens, tmp_path, monkeypatch):
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    result.model.model.layers[0].mlp.up_proj.transform = Doubled(torch.rand(64))
    monkeypatch.setitem(TRANSFORMS, "doubled", Doubled)
    path = save_compressed(result, tmp_path / "out")
    ids = tokens(1)[0]
    assert torch.equal(load_compressed(path)(ids).logits, result.model(ids).logits)
    monkeypatch.delitem(TRANSFORMS, "doubled")
    with pytest.raises(ValueError, match="transform 'doubled' is not known"):
        load_compressed(path)


def _cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage, said", [(Path.unlink, "lacks"), (_cut, "bytes, and was"), (_flip, "content of")])
@pytest.mark.parametrize("name", ["model-00002-of-*.safetensors", "workbench.json", "config.json"])
def test_a_damaged_file_is_named(name, damage, said, tmp_path):
    shutil.copytree(CHECKPOINTS / "version-2", tmp_path / "out")
    (file,) = (tmp_path / "out").glob(name)
    damage(file)
    with pytest.raises(ValueError, match=f"{said}.*{file.name}|{file.name}.*{said}"):
        load_compressed(tmp_path / "out")


def test_a_full_disk_is_said_with_numbers_and_leaves_nothing(tiny, tmp_path, monkeypatch):
    result = apply([METHODS["rtn"](group_size=16)], tiny("llama"))
    needed = size(result.model).stored_bytes

    def write(*args):
        raise OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as patched:
        patched.setattr(shards, "write_tensors", write)
        with pytest.raises(OSError, match=rf"needs {needed} bytes .* has \d+ free") as raised:
            save_compressed(result, tmp_path / "out")
    assert raised.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(OSError, match=f"needs {needed} bytes .* has {needed - 1} free"):
        save_compressed(result, tmp_path / "out")
    assert not list(tmp_path.iterdir())
