"""What the records that tests make by hand have in common."""

from typing import Any


def record_of(key: str, notebook: str, layers: list[dict], *, cpu: str = "a CPU", **parts: Any) -> dict:
    """A record with these parts, of one run on two cores."""
    return {
        "schema_version": 1,
        "run": {
            "key": key,
            "notebook": notebook,
            "started": "2026-01-02T10:00:00+00:00",
            "duration_s": 100.0,
            "parameters": {},
        },
        "calibration": None,
        "kernels": {},
        "layers": [{"shape": [8, 8], "seconds": 0.1, "notes": [], "rtn_error": None} | layer for layer in layers],
        "samples": [
            {
                "prompt": "Why?",
                "texts": {"baseline": "Because.", "compressed": "Since."},
                "first_difference": {"compressed": 0},
            }
        ],
        "provenance": {
            "commit": "f" * 40,
            "dirty": False,
            "versions": {"torch": "2.13.0"},
            "threads": 2,
            "device": "cpu",
            "hardware": {
                "cpu": cpu,
                "cpu_capability": "AVX512",
                "cores": 2,
                "memory_bytes": 2**34,
                "gpus": [],
                "system": "Linux",
            },
            "dtype": "float32",
            "deploy_dtype": "bfloat16",
            "flags": {"deterministic": False},
            "command": f"workbench run {key}",
        },
    } | parts
