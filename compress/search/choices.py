"""The methods among which a search chooses, for each layer."""

from compress.weights.mixed import Mixed

_TABLE = "bits=4, group_size=32, grid=iq4_nl"
_OWN = (  # at each number of bits those that lose least in their bytes
    "gptq(bits={3,5}, group_size={16,32}, scale_dtype=int6); gptq(bits=6, group_size=32, scale_dtype=int6); "
    "gptq(bits=4, group_size={16,32}, grid=iq4_nl, scale_dtype=int6); gptq(bits=8); "
    f"rtn({_TABLE}, scale_dtype=int6, where=embedding); rtn(bits=8, scale=search, where=embedding); "
    "rtn(bits={5,6}, group_size=32, scale_dtype=int6, scale=search, where=embedding)"
)
_TYPES = f"gptq({_TABLE}, scale_dtype=float16); gptq(bits={{5,8}}, group_size=32, scale_dtype=float16); "
STANDARD = {  # by the format in which the model is saved; trellis: `workbench` with codes that decode more slowly
    "workbench": _OWN,
    "trellis": f"qtip(bits={{2,3,4}}, states=12); {_OWN}",
    "gguf": (
        f"{_TYPES}rtn({_TABLE}, scale_dtype=float16, where=embedding); "
        "rtn(bits={5,8}, group_size=32, scale_dtype=float16, where=embedding)"
    ),
    "compressed-tensors": "gptq(bits={4,8}, group_size=64)",
}
ANY_LOSS = 1e3  # the loss is not limited while it is measured


def search_method(choices: str = "workbench", *, skip: str = "", tokens: int = 1024) -> Mixed:
    """`mixed` with these choices, which only measures their losses.

    Args:
        choices: as in `mixed(choices=...)`; or a key of STANDARD, whose standard set is meant.
        skip: name patterns of linears that stay in 16 bits.
        tokens: calibration tokens on which the losses are measured.

    Raises:
        ValueError: a choice is not known, or is no single method that stores weights; or there are none.
    """
    choices = STANDARD.get(choices.strip(), choices.strip())
    if not choices:
        raise ValueError(f"`choices` (='') must name methods, or a standard set: {', '.join(STANDARD)}")
    method = Mixed(choices=choices, skip=skip, loss="kl_scaled", tokens=tokens, max_loss=ANY_LOSS)
    if both := next((text for text, one in method.methods.items() if len(one.places) > 1), ""):
        raise ValueError(
            f"`choices`: {both} is for blocks and for the embedding at once, so that its time cannot be told apart; "
            "give one choice without `where`, and one with where=embedding"
        )
    return method
