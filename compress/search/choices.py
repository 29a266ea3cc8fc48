"""The methods among which a search chooses, for each layer."""

from compress.weights.mixed import Mixed

_TABLE = "bits=4, group_size=32, grid=iq4_nl"
_TYPES = f"gptq({_TABLE}, scale_dtype=float16); gptq(bits={{5,8}}, group_size=32, scale_dtype=float16); "
STANDARD = {  # by the format in which the model is saved
    "workbench": (
        f"gptq(bits=3, group_size=64); gptq({_TABLE}, scale_dtype=int6); gptq(bits={{4,8}}, group_size=32); "
        f"rtn({_TABLE}, scale_dtype=int6, where=embedding); rtn(bits=8, group_size=32, scale=search, where=embedding)"
    ),
    "gguf": (
        f"{_TYPES}rtn({_TABLE}, scale_dtype=float16, where=embedding); "
        "rtn(bits=8, group_size=32, scale_dtype=float16, where=embedding)"
    ),
    "compressed-tensors": "gptq(bits={4,8}, group_size=64)",
}
ANY_LOSS = 1e3  # the loss is not limited while it is measured


def search_method(choices: str = "", *, skip: str = "", tokens: int = 1024, save_format: str = "workbench") -> Mixed:
    """`mixed` with these choices, which only measures their losses.

    Args:
        choices: as in `mixed(choices=...)`; "": a standard set, whose models this format can hold.
        skip: name patterns of linears that stay in 16 bits.
        tokens: calibration tokens on which the losses are measured.

    Raises:
        ValueError: a choice is not known, or is no single method that stores weights; or there is no standard set.
    """
    if not choices.strip() and save_format not in STANDARD:
        raise ValueError(
            f"`choices` must be given for `save_format` (={save_format!r}); there are standard ones for "
            f"{', '.join(STANDARD)}"
        )
    return Mixed(
        choices=choices.strip() or STANDARD[save_format], skip=skip, loss="kl_scaled", tokens=tokens, max_loss=ANY_LOSS
    )
