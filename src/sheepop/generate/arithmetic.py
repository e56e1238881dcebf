"""Networks that compute otherwise than usual: each text apart from the others, or with rounded inputs of products."""

from __future__ import annotations

from sheepop.adapt.lora import adapted_layers
from sheepop.adapt.native_products import can_be_batch_invariant, wants_native_kernels, with_native_products
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.errors import UsageError
from sheepop.core.native import say_once
from sheepop.generate.config import Activations
from sheepop.generate.native_block import with_native_blocks
from sheepop.generate.runner import is_led
from sheepop.model import Transformer


def computing(model: Transformer, *, batch_invariant: bool = False, activations: Activations = "exact") -> Transformer:
    """Returns `model` itself, or a copy over the same weights that computes in the way that is asked for.

    A batch-invariant one has kernels whose result for a row does not depend on the other rows. Whether a network rounds
    stays with its copies. Raises `UsageError` for a network that cannot compute so.
    """
    if batch_invariant:
        _require_invariance(model)
    if activations == "rounded" and is_led(model):
        raise UsageError(
            "activations = rounded does not work with a model that is split over several processes. Leave one of them "
            "out."
        )
    rounded = activations == "rounded" and wants_native_kernels(model)
    if rounded or batch_invariant:
        model = with_native_blocks(with_native_products(model, always=batch_invariant, rounded=rounded).eval())
    if activations == "rounded" and not rounds_inputs(model):
        say_once(
            "activations = rounded has no effect here: SheepOp has no kernels on this device that round the inputs of "
            "products with these weights and are faster than the exact ones."
        )
    return model


def rounds_inputs(model: Transformer) -> bool:
    """Whether some products of a network round their inputs."""
    return any(isinstance(weight, StoredWeight) and weight.rounds_inputs for weight in model.parameters())


def _require_invariance(model: Transformer) -> None:
    """Raises `UsageError` for a network whose result for a row depends on the other rows."""
    if is_led(model):
        raise UsageError(
            "batch_invariant does not work with a model that is split over several processes, because its matrix "
            "products depend on the other rows. Leave one of them out."
        )
    if adapted_layers(model):
        raise UsageError(
            "batch_invariant does not work with an unmerged adapter, because its matrix products depend on the "
            "other rows. Leave it out, or merge the adapter."
        )
    if model.config.gated_delta_net is not None:
        raise UsageError(
            "batch_invariant does not work with a Gated DeltaNet, whose results depend on the chunks in which a "
            "text was read. Leave it out."
        )
    if model.config.architecture != "decoder" or not can_be_batch_invariant(model):
        raise UsageError(
            "batch_invariant needs a decoder without latent attention, whose matrices have rows of a multiple of "
            "16, on a CPU for which there are native kernels (see sheepop doctor). Leave it out."
        )
