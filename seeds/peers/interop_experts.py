"""Small models with experts, compressed and saved by the workbench, in transformers and in vLLM: which are the same?

    make interop-experts INTEROP="--write reports/published/interop-experts.md"        # half an hour on two cores
    python seeds/peers/interop_experts.py --families mixtral --schemes W4A16

The models are random. Saving loads each checkpoint again, by transformers where it reads it, and compares every
weight and the logits. vLLM loads it in an environment of its own (`make interop` makes the same one), and each of its
parameters is compared with the checkpoint's tensors, bit by bit. Where vLLM has a kernel for the experts on this
processor, it also continues a prompt. Each family is also read as transformers itself saves it, without compression:
where vLLM writes another text for that one as well, the workbench is not the cause. The exit code is 1 if anything
else differs.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from interop_environments import ENVIRONMENTS, READERS, environment_variables, ready
from readers.shared import Answer, Task
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from compress import apply, save_compressed
from compress.checkpoint.save_format import Verification
from compress.checkpoint.shards import Shards
from compress.recipe import parse_recipe
from eval.machine.hardware import hardware

SIZE = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
GROUPED = {**SIZE, "num_key_value_heads": 2, "head_dim": 64}
LATENT = {
    **SIZE, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 8, "moe_intermediate_size": 128, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "topk_group": 1,
}  # fmt: skip
FAMILIES = {
    "mixtral": {**GROUPED, "num_local_experts": 8},
    "qwen2_moe": {**GROUPED, "num_experts": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {**GROUPED, "num_experts": 8, "moe_intermediate_size": 128, "norm_topk_prob": True},
    "olmoe": {**GROUPED, "num_experts": 8},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 128, "n_group": 2, "topk_method": "noaux_tc"},
    "gpt_oss": {**GROUPED, "num_local_experts": 8, "sliding_window": 64},
}
SCHEMES = {
    "W4A16": "rtn(bits=4, group_size=64)",
    "FP8": "fp8",
    "INT8 (W8A8)": "int8",
    "16 bits, pruned": "magnitude(ratio=0.5)",
}
CONTROL = "16 bits, uncompressed, saved by transformers"
PROMPT, NEW_TOKENS = 24, 16
# Linears that vLLM keeps in one parameter, one below the other, by the name of that parameter.
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(\w+)")
HALVES = {"w1": ("w13", 0), "gate_proj": ("w13", 0), "w3": ("w13", 1), "up_proj": ("w13", 1)}


@dataclass
class ExpertsRow:
    """One family and scheme. refused: the reason of the workbench. problems: why it is not the same model."""

    family: str
    scheme: str
    refused: str = ""
    transformers: str = ""
    vllm: str = ""
    same_tokens: int = NEW_TOKENS
    problems: Sequence[str] = ()


def main() -> int:
    options = arguments()
    place = ready(options.environments, "vllm")
    pairs = [(family, scheme) for family in options.families for scheme in (*options.schemes, CONTROL)]
    new = [pair for pair in pairs if options.again or not row_file(options, *pair).is_file()]
    saved = {pair: save(options, *pair) for pair in tqdm(new, unit="checkpoint")}
    ask(
        options,
        place,
        [options.work / family / folder_name(scheme) for (family, scheme), row in saved.items() if not row.refused],
    )
    for (family, scheme), row in saved.items():
        if not row.refused:
            read(options, row)
        row_file(options, family, scheme).write_text(json.dumps(asdict(row)))
    rows = judged([ExpertsRow(**json.loads(row_file(options, *pair).read_text())) for pair in pairs])
    text = table(rows)
    print(text)
    if options.write:
        options.write.write_text(text)
    return 1 if any(row.problems for row in rows if row.scheme != CONTROL) else 0


def save(options: argparse.Namespace, family: str, scheme: str) -> ExpertsRow:
    """Compress and save, which compares with transformers, and write vLLM's task."""
    row, folder = ExpertsRow(family, scheme), options.work / family / folder_name(scheme)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    model = random_model(family).to(dtype_of(scheme))
    if scheme == CONTROL:
        model.save_pretrained(folder)
        row.transformers = "its own file"
    else:
        compress_and_save(model, folder, row)
    if row.refused:
        return row
    prompt = [3 + i * 7919 % (SIZE["vocab_size"] - 3) for i in range(PROMPT)]  # `generate` masks padding tokens
    ours = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=[])
    Path(f"{folder}.ours.json").write_text(json.dumps(ours[0, PROMPT:].tolist()))
    dtype, weights = str(model.dtype).removeprefix("torch."), str(Path(f"{folder}.vllm.safetensors").absolute())
    task = Task(str(folder.absolute()), dtype, options.threads, [prompt], NEW_TOKENS, weights=weights, longest=128)
    Path(f"{folder}.vllm.task").write_text(json.dumps(asdict(task)))
    return row


def compress_and_save(model: nn.Module, folder: Path, row: ExpertsRow) -> None:
    """Compress the model, save it as compressed-tensors, and note in the row what transformers reads or why not."""
    result = apply(parse_recipe(SCHEMES[row.scheme]), model, [])
    try:
        save_compressed(result, folder, save_format="compressed-tensors")
    except ValueError as reason:
        row.refused = str(reason).partition(": ")[2].partition("; ")[0]
        return
    verification = Verification.read(folder)
    unread = any("transformers 5.23 refuses it" in remark for remark in verification.remarks)
    row.transformers = f"{'does not read it; decoded: ' if unread else ''}{verification.agreement.partition('; ')[0]}"


def ask(options: argparse.Namespace, place: Path, folders: list[Path]) -> None:
    """Let vLLM do the tasks of all checkpoints, in one process."""
    files = []
    for folder in folders:
        Path(f"{folder}.vllm.json").unlink(missing_ok=True)
        files += [f"{folder}.vllm.task", f"{folder}.vllm.json"]
    if not files:
        return
    command = [(place / "bin" / "python").absolute(), READERS / "in_vllm_experts.py", *files]
    with (options.work / "vllm.log").open("a") as log:
        how = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment_variables(place, options.threads)}
        subprocess.run(command, timeout=options.limit_s, **how)


def read(options: argparse.Namespace, row: ExpertsRow) -> None:
    """Compare what vLLM answered."""
    folder = options.work / row.family / folder_name(row.scheme)
    if not Path(f"{folder}.vllm.json").is_file():
        row.problems = (f"vLLM fails: see {options.work / 'vllm.log'}",)
        return
    answer = Answer(**json.loads(Path(f"{folder}.vllm.json").read_text()))
    row.vllm = "loaded, not run" if answer.not_run else "run"
    if row.scheme != CONTROL:
        compared, row.problems = compare(folder, load_file(f"{folder}.vllm.safetensors"))
        row.vllm += f": {compared} tensors equal"
    if answer.tokens:
        pairs = list(zip(json.loads(Path(f"{folder}.ours.json").read_text()), answer.tokens[0], strict=True))
        row.same_tokens = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), NEW_TOKENS)
        row.vllm += f", {row.same_tokens} of {NEW_TOKENS} greedy tokens the same"


def judged(rows: list[ExpertsRow]) -> list[ExpertsRow]:
    """Another text in vLLM is a problem of ours where vLLM writes transformers' text for the uncompressed model."""
    control = {row.family: row.same_tokens for row in rows if row.scheme == CONTROL}
    for row in rows:
        if row.scheme != CONTROL and row.same_tokens < NEW_TOKENS == control[row.family]:
            row.problems = (*row.problems, f"vLLM's text differs from token {row.same_tokens}")
    return rows


def dtype_of(scheme: str) -> torch.dtype:
    """bfloat16, which vLLM's kernels for codes take; without codes float32, in which every token is the same."""
    return torch.float32 if scheme.startswith("16 bits") else torch.bfloat16


def row_file(options: argparse.Namespace, family: str, scheme: str) -> Path:
    return options.work / family / f"{folder_name(scheme)}.row.json"


def folder_name(scheme: str) -> str:
    return re.sub(r"\W+", "-", scheme).strip("-").lower()


def random_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():  # initial weights are so small that experts hardly differ
        if parameter.dim() > 1:
            parameter.mul_(4)
    return model


def compare(folder: Path, parameters: dict[str, Tensor]) -> tuple[int, tuple[str, ...]]:
    """Compare all tensors of a checkpoint with vLLM's parameters; their number, and what differs or is left over."""
    shards = Shards(folder)
    stored = {name: shards.read(name) for name in shards.names() if not name.endswith(".weight_shape")}
    problems, used = [], set()
    for name, tensor in stored.items():
        place, part = where(name, stored, parameters)
        used.add(place)
        if place not in parameters:
            problems.append(f"{name} of the checkpoint has no place in vLLM")
        elif part(parameters[place]).flatten().tolist() != tensor.flatten().tolist():
            problems.append(f"{name} differs in vLLM")
    own = re.compile(r".*(\.attn\.\w+|\.mla_attn\.\w+|weight_shape)$")  # of vLLM's cache, and of its loader
    tied = {"lm_head.weight"}
    left = sorted(name for name in parameters.keys() - used - tied if not own.match(name))
    return len(stored), (*problems[:3], *(f"{name} of vLLM was not loaded" for name in left[:3]))


def where(name: str, stored: dict[str, Tensor], parameters: dict[str, Tensor]) -> tuple[str, Callable]:
    """The parameter of vLLM that holds a tensor of a checkpoint, and a function that takes the tensor out of it."""
    if match := EXPERT.fullmatch(name):
        owner, expert, linear, key = match.groups()
        kind, half = HALVES.get(linear, ("w2", None))
        return f"{owner}.routed_experts.{kind}_{key}", partial(of_expert, expert=int(expert), half=half)
    owner, linear, key = (["", *name.rsplit(".", 2)])[-3:]
    for joined, linears in JOINED.items():
        if linear in linears and f"{owner}.{joined}.{key}" in parameters:
            rows = [len(stored[f"{owner}.{one}.{key}"]) for one in linears]
            return f"{owner}.{joined}.{key}", partial(of_joined, rows=rows, at=linears.index(linear))
    return name, lambda whole: whole


def of_expert(whole: Tensor, expert: int, half: int | None) -> Tensor:
    return whole[expert] if half is None else whole[expert].chunk(2)[half]


def of_joined(whole: Tensor, rows: list[int], at: int) -> Tensor:
    return whole.split(rows)[at]


INTRODUCTION = """\
# Models with experts in other libraries

This page is written by `make interop-experts INTEROP="--write reports/published/interop-experts.md"`. A
`compressed-tensors` checkpoint holds the experts of a mixture one by one, with gate and up projection apart, under the
names of the model's original checkpoint: transformers and vLLM read these. The names are taken from transformers' own
conversion, so that every family can be saved whose experts transformers itself writes one by one; others are refused
before any work.

- **transformers** multiplies by dequantised experts: it does not round their activations. It does not read experts in
  int8, with a scale per block or with zero points, or experts in 16 bits beside packed linears: it refuses such a
  checkpoint with an error. The workbench then lets the compressed-tensors library dequantise the file, puts the
  weights into transformers' model, and compares that; the card names vLLM as the only reader. A cell gives the tokens
  and logits of that comparison.
- **vLLM** takes one scheme for all experts, and activations rounded per token. Its kernels for quantised experts on
  CPUs need AMX. "Loaded, not run": vLLM has no kernel for the scheme on this processor; it loads the checkpoint, and
  each tensor of the checkpoint is compared with the parameter into which vLLM puts it, bit by bit.
- **Another text** in vLLM although all tensors are equal: the last row of each family is the uncompressed model,
  saved by transformers itself. Where vLLM's text differs in that row as well, the export is not the cause.
- **Routing** is not continuous: where two experts have nearly equal scores, rounding chooses. For the comparison of
  logits the tokens of the loaded model follow the choices of the model in memory, and its own choices are compared by
  themselves.
- **Experts that calibration never reached** are rounded without knowing their inputs. The layer's record has a note,
  and the card gives their number.

The models are small and random: 2 layers, 8 experts, 256 channels. {machine}

| family | scheme | transformers {transformers}, compressed-tensors {compressed} | vLLM {vllm} |
| --- | --- | --- | --- |
"""


def table(rows: Sequence[ExpertsRow]) -> str:
    """The page: what was measured, and one row for each checkpoint."""
    machine = hardware()
    processor = machine if isinstance(machine, str) else machine.get("cpu", str(machine))
    introduction = INTRODUCTION.format(
        machine=f"They were read on {time.strftime('%Y-%m-%d')} on {processor}.",
        transformers=version("transformers"),
        compressed=version("compressed-tensors"),
        vllm=next(package.partition("==")[2] for package in ENVIRONMENTS["vllm"].installs[0] if "vllm" in package),
    )
    return introduction + "".join(f"| {row.family} | {row.scheme} | {' | '.join(cells(row))} |\n" for row in rows)


def cells(row: ExpertsRow) -> tuple[str, str]:
    if row.refused:
        return f"refused by the workbench: {row.refused}", "–"
    return row.transformers, "; ".join(filter(None, (row.vllm, *row.problems)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-s", type=int, default=3600, help="seconds that vLLM may take for all checkpoints")
    parser.add_argument("--again", action="store_true", help="measure rows again that are in the folder of checkpoints")
    parser.add_argument("--environments", type=Path, default=Path(".venv-interop"), help="folder of the environments")
    parser.add_argument("--work", type=Path, default=Path("runs/interop-experts"), help="folder of the checkpoints")
    parser.add_argument("--write", type=Path, help="file for the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
