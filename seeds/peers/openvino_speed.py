"""How fast an OpenVINO model reads and decodes on a CPU; runs in the environment of OpenVINO and prints JSON.

    ENVIRONMENT/bin/python seeds/peers/openvino_speed.py OUT/openvino-w4g64/saved/model.xml --threads 2

The model is compiled for latency, and otherwise with OpenVINO's defaults, by which it rounds the cache and, in 4-bit
products, the activations to 8 bits. Other settings have not been tried. As in openvino-genai, the head sees the last
position of a prompt only.
"""

import argparse
import json
import statistics
import time

import numpy as np
import openvino as ov
from openvino import opset13


def last_position_only(model: ov.Model) -> None:
    """Restrict the product that computes the logits to the last position.

    Raises:
        ValueError: the model's first output does not come from a product.
    """
    node = model.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() in ("Convert", "Add"):
        node = node.input_value(0).get_node()
    if node.get_type_name() != "MatMul":
        raise ValueError(f"the logits come from {node.get_type_name()}, and not from a product")
    hidden = node.input_value(0)  # [batch, tokens, hidden]
    begin, end, step, axis = (opset13.constant(np.array([x], np.int64)) for x in (-1, np.iinfo(np.int64).max, 1, 1))
    node.input(0).replace_source_output(opset13.slice(hidden, begin, end, step, axis).output(0))
    model.validate_nodes_and_infer_types()


class OpenVinoDecoder:
    """A compiled model with its state."""

    def __init__(self, path: str, threads: int) -> None:
        core = ov.Core()
        model = core.read_model(path)
        last_position_only(model)
        how = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        self.request = core.compile_model(model, "CPU", how).create_infer_request()
        self.seen = 0

    def reset(self) -> None:
        """Reset the state, without any tokens."""
        self.request.reset_state()
        self.seen = 0

    def feed(self, ids: np.ndarray) -> np.ndarray:
        """Read ids [batch, tokens] and return the most likely next ones, [batch, 1]."""
        batch, count = ids.shape
        positions = np.tile(np.arange(self.seen, self.seen + count), (batch, 1))
        self.seen += count
        given = {"input_ids": ids, "attention_mask": np.ones((batch, self.seen), np.int64), "position_ids": positions}
        out = self.request.infer({**given, "beam_idx": np.arange(batch, dtype=np.int32)})
        return out["logits"][:, -1].argmax(-1)[:, None]


def serve(decoder: OpenVinoDecoder, prompt: np.ndarray, new_tokens: int) -> tuple[float, float]:
    """Seconds until the first token, and median seconds of each of the tokens after it."""
    decoder.reset()
    start = time.perf_counter()
    ids = decoder.feed(prompt)
    first, later = time.perf_counter() - start, []
    for _ in range(new_tokens):
        start = time.perf_counter()
        ids = decoder.feed(ids)
        later.append(time.perf_counter() - start)
    return first, statistics.median(later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model.xml")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    given = parser.parse_args()
    decoder = OpenVinoDecoder(given.model, given.threads)
    prompt = np.random.default_rng(0).integers(10, 1000, (given.batch, given.prompt_tokens))
    serve(decoder, prompt, 4)  # the first pass allocates
    first, later = serve(decoder, prompt, given.new_tokens)
    print(json.dumps({"prefill": given.batch * given.prompt_tokens / first, "decode": given.batch / later}))


if __name__ == "__main__":
    main()
