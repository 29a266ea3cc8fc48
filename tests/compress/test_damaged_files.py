"""Damaged and hostile files: every one gives the same model, another one where no checksum can tell, or one ValueError
that names the folder; no crash, no endless loop, no other error.

A process of its own loads the damaged folders, one after the other, so that a crash is counted and does not end pytest.
"""

import json
import random
import select
import shutil
import struct
import subprocess
import sys
from collections import Counter

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compress import apply, load_compressed, load_model, save_compressed
from compress.checkpoint import checksums
from compress.checkpoint.checksums import CHECKSUMS, NOT_COUNTED, write_checksums
from compress.formats import CsrWeight
from compress.inputs.gguf import _convert, converted
from compress.inputs.model import _from_folder
from compress.inputs.skeleton import skeleton
from compress.recipe import parse_recipe

LIMIT = 60  # seconds for one folder
LINEAR, NORM = "model.layers.0.mlp.up_proj", "model.layers.0.input_layernorm"
OWN = {  # recipes by the format of weights, or the transform, that they store
    "int_group": "rtn(bits=4, group_size=32, symmetric=False)",
    "csr": "rtn(bits=3, group_size=32), outlier_entries(share=0.02)",
    "codebook": "nf4(group_size=32)",
    "bitmap": "magnitude(ratio=0.5), rtn(bits=4, group_size=32)",
    "sparse24": "magnitude(pattern='2:4')",
    "low_rank": "rtn(bits=4, group_size=32), low_rank(rank=4)",
    "eight_bit": "smoothquant, int8",
    "columns": "llm_int8(threshold=2.0)",
    "row_tables": "any_precision(bits=4)",
    "trellis": "qtip(bits=4, states=12, min_tokens=8)",
    "ternary": "qmoe(reach=0.7, min_tokens=8)",
    "sign_stack": "bitstack(rank=4, blocks=3)",
    "rotation": "rotate, rtn(bits=4, group_size=32)",
    "permutation": "gather, rtn(bits=4, group_size=32)",
    "kronecker": "flatquant(steps=2), rtn(bits=4, group_size=32)",
    "embedding": "rtn(bits=4, group_size=32), rtn(bits=8, group_size=32, where=embedding)",
}
OTHERS = {"compressed-tensors": OWN["int_group"], "gptq": OWN["int_group"]}
NUMBERS = [0, -1, 1, 2, 3, 5, 7, 63, 65, 128, 2**31, 2**40, 10**12, "x", None, [], {}, True, 1e300, -(2**63)]
DTYPES = {"BF16": "F16", "F16": "BF16", "F32": "I32", "I32": "F32", "U8": "I8", "I8": "U8", "I16": "F16", "I64": "F64"}


def made(kind, tiny, tokens, folder):
    """A folder of this kind, with a tiny Llama."""
    model = tiny("llama")
    if kind == "transformers":
        model.save_pretrained(folder)
    else:
        recipe, save_format = (OTHERS[kind], kind) if kind in OTHERS else (OWN[kind], "workbench")
        batches = tokens(6, 32)
        save_compressed(apply(parse_recipe(recipe), model, batches), folder, save_format=save_format)
    return folder


def entries(content, place=()):
    """The places of all values in a JSON document."""
    if place:
        yield place
    for key, value in (
        content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    ):
        yield from entries(value, (*place, key))


def of_json(file, rng):
    """Another value at a random place, or none."""
    content = json.loads(file.read_text())
    place = rng.choice(list(entries(content)))
    owner = content
    for key in place[:-1]:
        owner = owner[key]
    if rng.random() < 0.15:
        del owner[place[-1]]
    else:
        owner[place[-1]] = rng.choice(NUMBERS)
    file.write_text(json.dumps(content))


def of_header(file, rng):
    """Another shape, dtype, name or place of a tensor, in the header of a safetensors file."""
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    entry, how = header[name], rng.choice(["shape", "dtype", "swap", "drop", "rename", "place"])
    if how == "shape":
        entry["shape"] = rng.choice([[1, *entry["shape"]], entry["shape"][::-1], [*entry["shape"], 1], [2**40]])
    elif how == "dtype":
        entry["dtype"] = DTYPES.get(entry["dtype"], "U8")
    elif how == "swap":
        header[name], header[other] = header[other], header[name]
    elif how == "drop":
        del header[name]
    elif how == "rename":
        header[f"x.{name}"] = header.pop(name)
    else:
        entry["data_offsets"] = [rng.randrange(2**40), rng.randrange(2**40)]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def of_values(file, rng):
    """Random or extreme bytes in the place of all bytes of one tensor."""
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    bytes_of = tensors[name].reshape(-1).view(torch.uint8)
    fill = rng.choice([0xFF, 0x7F, 0x80, None])
    bytes_of.copy_(torch.tensor([rng.randrange(256) if fill is None else fill for _ in range(len(bytes_of))]))
    save_file(tensors, file, metadata={"format": "pt"})


def of_bytes(file, rng):
    """A file that is cut short, changed, longer, empty or gone."""
    content = bytearray(file.read_bytes())
    how = rng.choice(["cut", "flip", "flip", "insert", "zeros", "double", "empty", "gone"])
    at = rng.randrange(len(content))
    if how == "cut":
        content = content[:at]
    elif how == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif how == "insert":
        content[at:at] = rng.randbytes(rng.choice([1, 8, 100]))
    elif how == "zeros":
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif how == "double":
        content += bytes(content)
    elif how == "empty":
        content = bytearray()
    file.unlink() if how == "gone" else file.write_bytes(bytes(content))


def damage(folder, rng):
    """Damage one file of a folder; returns whether checksums tell, and a description.

    Half of the damage is done by someone who writes the checksums again; folders of others have none.
    """
    files = sorted(f for f in folder.iterdir() if f.name not in NOT_COUNTED and f.suffix in (".json", ".safetensors"))
    hostile = rng.random() < 0.7
    if not hostile:
        how, file = of_bytes, rng.choice(files)
    else:
        how = rng.choice([of_json, of_json, of_header, of_values])
        kind = ".json" if how is of_json else ".safetensors"
        file = rng.choice([f for f in files if f.suffix == kind and f.name != CHECKSUMS])
    how(file, rng)
    if hostile and (folder / CHECKSUMS).is_file():
        write_checksums(folder)
    return not hostile and (folder / CHECKSUMS).is_file(), f"{file.name}: {how.__name__}"


# Loads each folder that it reads from its input, into memory or with its weights on disk, or takes its shapes as a plan
# does, and prints the outcome; errors, and where it hangs, go to stderr.
LOADER = """
import sys, faulthandler, resource, shutil, warnings
warnings.filterwarnings("ignore")
import torch, transformers
transformers.logging.set_verbosity(50)
torch.set_num_threads(1)
from pathlib import Path
from compress.inputs.model import _from_folder
from compress.inputs import gguf
from compress.inputs.skeleton import skeleton
faulthandler.enable()
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
ids = torch.arange(24)[None] * 7 % 96
gguf.converted_folder = lambda path: path.with_suffix("")
expected = None
for line in sys.stdin:
    way, reference, place = line.strip().split("|")
    reference, place = Path(reference), Path(place)
    if reference == place:
        expected = None
    faulthandler.dump_traceback_later(float(sys.argv[1]))
    try:
        if place.suffix == ".gguf":
            shutil.rmtree(place.with_suffix(""), ignore_errors=True)
            model = _from_folder(str(gguf.converted(place)), torch.float32, None)
        elif way == "plan":
            skeleton.cache_clear()
            shapes = [(name, *tensor.shape) for name, tensor in skeleton(str(place)).state_dict().items()]
        else:
            model = _from_folder(str(place), torch.float32, ("cpu", "") if way == "disk" else None)
        y = None
        try:
            with torch.no_grad():
                y = torch.tensor(list(str(shapes).encode())) if way == "plan" else model(ids).logits.float()
        except Exception as error:
            said = f"loaded, the pass raises {type(error).__name__}"
        if y is not None:
            expected = y if expected is None else expected
            said = "same" if y.shape == expected.shape and torch.equal(y, expected) else "another model"
    except ValueError as error:
        named = type(error) is ValueError and str(place.parent) in str(error)
        said = "refused" if named else f"raw {type(error).__name__}"
        print("   ", str(error)[:300], file=sys.stderr)
    except Exception as error:
        said = f"raw {type(error).__name__}"
        print("   ", said, str(error)[:300], file=sys.stderr)
    faulthandler.cancel_dump_traceback_later()
    print(said, flush=True)
"""


class Loader:
    """A process that loads folders; started again after a crash or a hang. `errors` is what it wrote to stderr."""

    def __init__(self, errors):
        self.process, self.reference, self.errors = None, None, errors

    def outcome(self, place, reference, way):
        """The outcome of loading `place`, whose original is `reference`, in a way: "memory", "disk" or "plan"."""
        self.errors.write_text("")
        if self.process is None:
            self.reference = None
            with self.errors.open("a") as errors:  # which the process goes on writing to
                self.process = subprocess.Popen(
                    [sys.executable, "-c", LOADER, str(LIMIT - 5)], text=True, stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=errors,
                )  # fmt: skip
        if self.reference != (reference, way):
            assert self._ask(f"{way}|{reference}|{reference}", 5 * LIMIT) == "same"
            self.reference = reference, way
        said = self._ask(f"{way}|{reference}|{place}", LIMIT)
        if said in ("hang", "crash"):
            self.close()
        return said

    def _ask(self, line, limit):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], limit)[0]:
            return "hang"
        return self.process.stdout.readline().strip() or "crash"

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    one = Loader(tmp_path_factory.mktemp("loader") / "errors.txt")
    yield one
    one.close()


def outcomes(loader, source, work, count, spoil=damage, seed=1, way="memory"):
    """{outcome: number} of `count` damaged copies, and examples; checksums must refuse what they can tell."""
    rng, found, examples = random.Random(seed), Counter(), {}
    place = work / source.name
    for _ in range(count):
        if source.is_dir():
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(source, place)
        else:
            shutil.copy(source, place)
        tells, what = spoil(place, rng)
        said = loader.outcome(place, source, way)
        if tells and way != "plan" and said != "refused":
            said = f"{said}, in spite of its checksum"
        found[said] += 1
        if said.startswith(("raw", "crash", "hang")):
            what += "\n" + loader.errors.read_text(errors="replace")[-2000:]
        examples.setdefault(said, []).append(what)
    return found, examples


def check(found, examples):
    wrong = {said: examples[said][:5] for said in found if said not in ("same", "another model", "refused")}
    wrong = {said: some for said, some in wrong.items() if not said.startswith("loaded, the pass raises")}
    assert not wrong, f"{dict(found)}: {wrong}"


KINDS = [*((kind, "memory") for kind in (*OWN, *OTHERS)), *((kind, "disk") for kind in OWN if kind not in ("embedding", "rotation")),
         *(("transformers", way) for way in ("memory", "disk", "plan")), ("int_group", "plan")]  # fmt: skip
MANY = [pytest.param(*kind, 500, marks=pytest.mark.slow) for kind in KINDS]
FEW = [("csr", "memory", 8), ("transformers", "memory", 8), ("csr", "disk", 8), ("transformers", "plan", 8)]


@pytest.mark.parametrize("kind, way, count", FEW + MANY)
def test_damaged_folders_are_refused_by_name(kind, way, count, loader, tiny, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "sync", lambda path: None)  # a disk would take longer than all the rest
    folder = made(kind, tiny, tokens, tmp_path / "made" / "m")
    (tmp_path / "work").mkdir()
    check(*outcomes(loader, folder, tmp_path / "work", count, way=way))


def of_gguf(file, rng):
    """Flipped bits in the header, a huge number there, another value, type or length, or a file that is cut short."""
    content = bytearray(file.read_bytes())
    header = content.find(b"token_embd.weight") + 800
    how = rng.choice(["cut", "header", "header", "anywhere", "huge", "field", "field"])
    if how == "cut":
        content = content[: rng.randrange(len(content))]
    elif how == "huge":
        at = rng.randrange(8, header)
        content[at : at + 8] = b"\xff" * 7 + b"\x7f"
    elif how == "field":
        key, field = rng.choice(list(gguf.GGUFReader(file).fields.items()))
        at, width = rng.choice(places(key, field))
        value = rng.choice([rng.randrange(14), 2**16, 2**20, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1])
        content[at : at + width] = struct.pack("<Q", value)[:width]
        how = f"{key}: {value} at {at}"
    else:
        for _ in range(rng.choice([1, 2, 4])):
            content[rng.randrange(header if how == "header" else len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(bytes(content))
    return False, how


def places(key, field):
    """Place and width in bytes of a field's type, and of its number; or of its length, and the type of its entries."""
    if key.startswith("GGUF."):  # the version, and the numbers of tensors and of fields
        return [(field.offset, field.parts[0].nbytes)]
    at = field.offset + 8 + len(key)
    if field.types[0] == gguf.GGUFValueType.ARRAY:
        return [(at, 4), (at + 4, 4), (at + 8, 8)]
    return [(at, 4), (at + 4, 8 if field.types[0] == gguf.GGUFValueType.STRING else field.parts[-1].nbytes)]


def tiny_gguf(path):
    """A Llama of one block and its tokenizer, in float32."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in {"block_count": 1, "context_length": 256, "embedding_length": 32, "feed_forward_length": 64,
                       "head_count": 2, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 16,
                       "vocab_size": 96}.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"t01", *(f"t{i}" for i in range(93))])
    writer.add_token_types([1] * 96)
    writer.add_token_merges(["t 0", "t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (96, 32), "output_norm": (32,), "output": (96, 32)}
    inside = {"attn_norm": (32,), "ffn_norm": (32,), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    inside |= {f"attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in inside.items()}).items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy() * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("count", [6, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_gguf_files_are_refused_by_name(count, loader, tmp_path):
    (tmp_path / "work").mkdir()
    check(*outcomes(loader, tiny_gguf(tmp_path / "m.gguf"), tmp_path / "work", count, of_gguf))


@pytest.mark.parametrize("key, place, value, message", [
    ("tokenizer.ggml.token_type", 2, 2**40, "4398046511104 bytes from byte .* are beyond the file's end"),
    ("GGUF.kv_count", 0, 2**40, "beyond the file's end|is of type"),
    ("GGUF.tensor_count", 0, 2**40, "beyond the file's end|dimensions"),
    ("GGUF.version", 0, 0, "header is damaged|version"),
    ("llama.embedding_length", 1, 2**20, r"has `embedding_length` \(=1048576\), and there are \d+ bytes"),
    ("llama.attention.head_count", 1, 2**20, r"has `attention.head_count` \(=1048576\)"),
    ("llama.feed_forward_length", 1, 2**16, "describes a model of 63.* parameters, and there are"),
])  # fmt: skip
def test_a_gguf_header_is_compared_with_its_file_before_anything_is_built(key, place, value, message, tmp_path):
    """The package gguf would read an array of 2**40 numbers one by one, and transformers fill a model of a terabyte."""
    file = tiny_gguf(tmp_path / "m.gguf")
    at, width = places(key, gguf.GGUFReader(file).fields[key])[place]
    content = bytearray(file.read_bytes())
    content[at : at + width] = struct.pack("<Q", value)[:width]
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=message) as refused:
        converted(file)
    assert str(file) in str(refused.value)
    with pytest.raises(ValueError, match=message):
        skeleton(str(file))


def test_a_gguf_file_without_a_tensor_of_the_model_is_refused(tmp_path):
    file = tiny_gguf(tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_uq.weight"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"lacks 1 .*mlp\.up_proj\.weight"):
        _convert(file, tmp_path / "out")


@pytest.mark.parametrize("target", ["{}/elsewhere/w.safetensors", "../elsewhere/w.safetensors", "other.safetensors"])
def test_weights_come_from_listed_files_of_the_folder_only(target, tiny, tmp_path):
    """An index that was added beside a checkpoint names other weights."""
    folder = save_compressed(apply(parse_recipe("rtn(group_size=16)"), tiny("llama")), tmp_path / "m")
    tiny("llama", seed=1).save_pretrained(tmp_path / "hub")
    names = dict.fromkeys(load_file(folder / "model.safetensors"), target.format(tmp_path))
    for one, written in ((folder, True), (tmp_path / "hub", target != "other.safetensors")):
        (one / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        (one / "model.safetensors").rename(one / "other.safetensors") if one != folder else None
        with pytest.raises(ValueError, match="does not list|names '.*'; weights are read from files in the folder only"
                           if written else "lacks"):  # fmt: skip
            _from_folder(str(one), torch.float32, None)
    (folder / "model.safetensors.index.json").unlink()
    load_compressed(folder)
    (folder / "figure.png").write_bytes(b"a file of the user's")
    load_compressed(folder)


@pytest.mark.parametrize("name, change", [("columns", 96), ("columns", -1), ("counts", 1), ("counts", -1)])
def test_indices_are_compared_with_their_range(name, change):
    W = torch.randn(8, 64)
    part = CsrWeight.from_chosen(W, W > 1)
    state = {key: tensor.clone() for key, tensor in part.state_dict().items()}
    assert torch.equal(CsrWeight.from_tensors(part.spec(), state).dequantize(), part.dequantize())
    state[name][3] = change if name == "columns" else state[name][3] + change
    with pytest.raises(ValueError, match=f"`{name}` of a stored weight"):
        CsrWeight.from_tensors(part.spec(), state)


@pytest.mark.parametrize("key, value", [("num_hidden_layers", 10**12), ("hidden_size", 2**40), ("vocab_size", 1e300)])
def test_sizes_of_a_config_are_compared_with_the_files(key, value, tiny, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=rf"config.json has `{key}` .*, and there are \d+"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "key, value", [("architectures", 5), ("architectures", [5]), ("rope_parameters", {"rope_type": 5})]
)
def test_a_plan_names_the_model_whose_config_is_damaged(key, value, tiny, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    for reads in (skeleton, load_model):
        with pytest.raises(ValueError, match=f"`model_name` .='{tmp_path}'"):
            reads(str(tmp_path))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("damaged, message", [
    (lambda layout, tensors: layout["linears"][LINEAR]["parts"][0].update(group_size=5), "`group_size` .=5. of a stored"),
    (lambda layout, tensors: layout["linears"][LINEAR]["parts"][0].pop("symmetric"), "may be damaged"),
    (lambda layout, tensors: tensors[f"{LINEAR}.parts.1.columns"].fill_(99), "`columns` of a stored weight holds"),
    (lambda layout, tensors: tensors.pop(f"{LINEAR}.parts.0.codes"), "`codes` of a stored weight .* is missing"),
    (lambda layout, tensors: tensors.update({f"{NORM}.weight": torch.ones(32)}), "has the shape .* in its file"),
    (lambda layout, tensors: tensors.update({f"{NORM}.bias": torch.ones(64)}), "does not use 1 of the weights"),
])  # fmt: skip
def test_weights_on_disk_are_checked_when_they_are_loaded(damaged, message, tiny, tokens, tmp_path):
    """And not in the middle of a pass, when their block is read."""
    folder = save_compressed(apply(parse_recipe(OWN["csr"]), tiny("llama"), tokens(6, 32)), tmp_path / "m")
    _from_folder(str(folder), torch.float32, ("cpu", tmp_path / "changed"))
    layout = json.loads((folder / "workbench.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    damaged(layout, tensors)
    (folder / "workbench.json").write_text(json.dumps(layout))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_checksums(folder)
    with pytest.raises(ValueError, match=message) as refused:
        _from_folder(str(folder), torch.float32, ("cpu", tmp_path / "changed"))
    assert str(folder) in str(refused.value)


def test_other_libraries_refuse_a_folder_by_name(tiny, tokens, tmp_path):
    """transformers would make a model with random weights of its config."""
    result = apply(parse_recipe("rtn(group_size=16)"), tiny("llama"))
    folder = save_compressed(result, tmp_path / "m")
    for kind in (AutoModelForCausalLM, type(result.model)):
        with pytest.raises(ValueError, match="format of the model compression workbench. Load it with .*load_model"):
            kind.from_pretrained(folder)
    again = load_compressed(folder)
    assert not hasattr(again.config, "quantization_config") and not hasattr(again.config, "transformers_weights")
    for model in (result.model, again):
        with pytest.raises(ValueError, match="cannot write compressed weights"):
            model.save_pretrained(tmp_path / "n")
    folded = apply(parse_recipe("smoothquant"), tiny("llama"), tokens()).model
    folded.save_pretrained(tmp_path / "n")
    assert torch.equal(load_file(tmp_path / "n" / "model.safetensors")["lm_head.weight"], folded.lm_head.weight)


def test_a_decompressed_export_is_refused_with_the_reason(tiny, tmp_path):
    """transformers saves a compressed-tensors model that has run under a config that calls its weights packed."""
    result = apply(parse_recipe("rtn(group_size=16)"), tiny("llama"))
    folder = save_compressed(result, tmp_path / "m", save_format="compressed-tensors")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded(torch.arange(4)[None])
    loaded.save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match="its weights are decompressed and its config calls them quantised"):
        _from_folder(str(tmp_path / "again"), torch.float32, None)
