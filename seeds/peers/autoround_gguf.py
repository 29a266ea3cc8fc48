"""A GGUF file by AutoRound, on the calibration tokens of our recipes, for seeds/bytes_and_loss.py.

    python3.11 -m venv /tmp/autoround
    /tmp/autoround/bin/pip install torch==2.13.0 auto-round==0.16.1 gguf
    python seeds/peers/prepare.py /tmp/autoround/work
    /tmp/autoround/bin/python seeds/peers/autoround_gguf.py /tmp/autoround/work q4_k_m --iters 0
    python seeds/bytes_and_loss.py --others /tmp/autoround/work/AutoRound-q4_k_m-0.gguf

`--iters 0` is AutoRound's optimised rounding (opt_rtn); more are its tuning, 200 its default.
Only AutoRound's environment imports it; none of it is a dependency.
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
from auto_round import AutoRound
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path, help="the folder written by `prepare.py`")
parser.add_argument("kind", help="type of llama.cpp, such as q4_0 or q4_k_m")
parser.add_argument("--iters", type=int, default=200)
parser.add_argument("--samples", type=int, default=128)
parser.add_argument("--batch", type=int, default=8)
options = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(options.folder / "model")
ids = torch.load(options.folder / "calibration.pt")[: options.samples]
windows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
start = time.perf_counter()
rounding = AutoRound(
    model,
    tokenizer,
    scheme=f"gguf:{options.kind}",
    dataset=DataLoader(windows, batch_size=options.batch),
    iters=options.iters,
    nsamples=len(windows),
    seqlen=ids.shape[1],
    batch_size=options.batch,
    device_map="cpu",
)
out = options.folder / f"AutoRound-{options.kind}-{options.iters}"
rounding.quantize_and_save(str(out), format=f"gguf:{options.kind}")
(file,) = out.rglob("*.gguf")
shutil.move(file, out.with_suffix(".gguf"))
print(f"{out}.gguf: {time.perf_counter() - start:.0f} s")
