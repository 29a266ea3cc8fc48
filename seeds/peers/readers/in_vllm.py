"""A checkpoint read by vLLM on a CPU."""

import os
from importlib.metadata import version

from shared import Answer, Task, rates, serve

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


def read(task: Task) -> Answer:
    os.environ.update(SETTINGS)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{task.threads - 1}"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=task.checkpoint,
        dtype=task.dtype,
        max_model_len=task.longest,
        max_num_seqs=1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
    )

    def generate(prompt: list[int], new_tokens: int, **more: int) -> object:
        how = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **more)
        return llm.generate({"prompt_token_ids": prompt}, how, use_tqdm=False)[0]

    answer = Answer(f"vLLM {version('vllm-cpu')}", task.dtype)
    answer.tokens = [list(generate(p, task.new_tokens).outputs[0].token_ids) for p in task.prompts]
    for window in task.windows:
        given = generate(window, 1, prompt_logprobs=0).prompt_logprobs
        answer.token_nll.append([-given[i][window[i]].logprob for i in range(1, len(window))])
    if task.speed_prompt:
        rate = rates(lambda n: generate(task.speed_prompt, n), task)
        answer.decode_tokens_per_s, answer.prefill_tokens_per_s = rate
    return answer


if __name__ == "__main__":
    serve(read)
