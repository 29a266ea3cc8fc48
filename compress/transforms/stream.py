"""A rotation of the whole residual stream: into it before the first block, and back after the last one."""

from typing import Any

from torch import Tensor, nn

from compress.transforms.rotation import Rotation

STREAM = "rotated_stream"  # the name of the module below in a model


class RotatedStream(nn.Module):
    """Keeps a model's residual stream rotated between its first and its last block.

    The embedding, the final norm and the head do not change, so that a head that is tied to the embedding stays
    tied. The weights of the blocks must have been folded for it (`compress.rotations.folds`).

    Args:
        rotation: of the hidden channels.
    """

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.rotation = rotation

    def enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """A forward pre-hook of the first block."""
        if args:
            return (self.rotation(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.rotation(kwargs["hidden_states"])}

    def leave(self, block: nn.Module, args: tuple, output: Tensor | tuple | list) -> Tensor | tuple | list:
        """A forward hook of the last block."""
        if isinstance(output, tuple | list):
            return type(output)([self.rotation.back(output[0]), *output[1:]])
        return self.rotation.back(output)


def rotate_stream(model: nn.Module, blocks: nn.ModuleList, rotation: Rotation) -> None:
    """Rotate the residual stream between a model's blocks from now on."""
    stream = RotatedStream(rotation)
    model.add_module(STREAM, stream)
    blocks[0].register_forward_pre_hook(stream.enter, with_kwargs=True)
    blocks[-1].register_forward_hook(stream.leave)


def stream_of(model: nn.Module) -> RotatedStream | None:
    """The rotation of a model's residual stream; None if it is not rotated."""
    return getattr(model, STREAM, None)
