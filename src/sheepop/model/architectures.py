"""Which class builds which architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from sheepop.model.config import Architecture, ModelConfig
from sheepop.model.encoder_decoder import EncoderDecoder
from sheepop.model.transformer import Transformer

ARCHITECTURES: dict[Architecture, type[Transformer]] = {
    network.architecture: network for network in (Transformer, EncoderDecoder)
}
_DRAWS = frozenset({nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_})


def blank_model(config: ModelConfig) -> Transformer:
    """The network of `config`, with weights that are not set yet; see `sheepop.model.initialization`.

    Norms scale by 1 and shift by 0; what PyTorch would draw at random is left as it lies in memory.
    """
    with _Undrawn():
        return ARCHITECTURES[config.architecture](config)


class _Undrawn(TorchFunctionMode):
    """Leaves out the random numbers that modules begin with, which are overwritten.

    They take time, and on the meta device PyTorch loads its whole compiler to draw none.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Any:
        settings = settings or {}
        if function in _DRAWS:
            return settings["tensor"] if "tensor" in settings else arguments[0]
        return function(*arguments, **settings)
