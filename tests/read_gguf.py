"""Logits of llama.cpp for a prompt: `python tests/read_gguf.py FILE.gguf '[5, 9, ...]' LOGITS.json`, by a Python that
imports llama_cpp."""

import json
import sys

import llama_cpp

file, ids, answer = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
size = {"n_ctx": 64, "n_batch": 64, "n_ubatch": 64}
llm = llama_cpp.Llama(file, **size, n_threads=1, logits_all=True, verbose=False)
llm.eval(ids)
with open(answer, "w") as out:
    json.dump(llm.scores[: len(ids)].tolist(), out)
