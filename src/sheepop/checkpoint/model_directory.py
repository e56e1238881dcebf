"""A model on disk, complete in itself: configuration, weights, tokenizer, provenance, checksums."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sheepop.adapt.lora import merged
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.scalar_head import REWARD_HEAD, add_scalar_head, is_of_values
from sheepop.adapt.stored_weight import GROUP, StoredWeight
from sheepop.checkpoint.card_text import EVALUATIONS, model_card
from sheepop.checkpoint.changes import put_changes
from sheepop.checkpoint.expected_tensors import expected_tensors, tensor_problems
from sheepop.checkpoint.generation_settings import GENERATION, end_ids, read_generation
from sheepop.checkpoint.lazy_tensor import ForeignModel, LazyTensor, Shape
from sheepop.checkpoint.run_directory import CARD, damaged_model, resolve_model_directory
from sheepop.checkpoint.vocabulary import require_fit
from sheepop.checkpoint.weight_files import WEIGHTS, listed, open_weights, read_all_weights, write_weights
from sheepop.core.config import Config, validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.core.files import atomic_directory, read_json, write_atomic, write_json
from sheepop.model import ModelConfig, Transformer, blank_model
from sheepop.model.config import ACTIVATION_NAMES
from sheepop.tokenizer import Tokenizer, load_tokenizer

FORMAT = "sheepop-model"
FORMAT_VERSION = 4
"""Of a reward model. With a change beside its weights a directory is of version 3, with quantised weights alone of 2,
and all others are of 1."""
ADAPTER = "adapter.safetensors"
PROVENANCE = "provenance.json"
_SCALE = "_scale"  # behind the name of a weight of integers


@dataclass(frozen=True)
class LoadedModel:
    """A model read back from disk, in evaluation mode, with the tokenizer it was trained with.

    `end_ids` are tokens that end a text beside the tokenizer's own.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    provenance: dict[str, Any]
    directory: Path
    end_ids: tuple[int, ...]


def write_model(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    provenance: Mapping[str, Any],
) -> None:
    """Writes the files of a model directory into `directory`, which the caller makes durable and checksums.

    `weights` are what `unique_weights` gives.
    """
    plain = {name: tensor.cpu().contiguous() for name, tensor in _plain(weights).items()}
    save_file(plain, directory / WEIGHTS, metadata={"format": "pt"})
    judges = f"{REWARD_HEAD}.weight" in weights
    describe_model(directory, config, tokenizer, provenance, _quantization(weights), has_reward_head=judges)


def write_foreign_model(
    directory: Path, model: ForeignModel, provenance: Mapping[str, Any], max_shard_bytes: int
) -> None:
    """`write_model` for a model that came from elsewhere, one tensor in memory at a time.

    Weights beyond `max_shard_bytes` are divided over several files with an index.
    """
    write_weights(directory, model.tensors, max_shard_bytes)
    describe_model(directory, model.config, model.tokenizer, provenance)
    if model.generation:
        write_json(directory / GENERATION, dict(model.generation))


def save_model(
    target: str | Path,
    model: Transformer,
    tokenizer: Tokenizer,
    provenance: Mapping[str, Any],
    *,
    replace: bool = False,
) -> None:
    """Writes a model directory atomically; raises `CheckpointError` when `target` exists and `replace` is false.

    Scores in `provenance` are left out: they were measured with the weights of another directory.
    """
    target = Path(target)
    if target.exists() and not replace:
        raise CheckpointError(f"{target} already exists. Choose another directory or remove it.")
    made = {key: value for key, value in provenance.items() if key != EVALUATIONS}
    with atomic_directory(target, replace=replace) as directory:
        write_model(directory, model.config, unique_weights(model), tokenizer, made)


def load_model(
    path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None, *, merge: bool = True
) -> LoadedModel:
    """Reads and verifies the model that `path` means (see `resolve_model_directory`).

    A change of low rank that lies beside the weights is merged into them, unless they are integers or `merge` is false;
    then it stays beside them.

    The parameters have the dtype in which they are stored, or `dtype`; the network computes in it. Where several are
    stored, such as norms in float32 beside matrices in bfloat16, all take the one that holds every number. Raises
    `CheckpointError` naming the file that is missing, damaged, foreign or of a newer format.
    """
    directory, config, tokenizer = _verified(path)
    with torch.device("meta"):
        model = blank_model(config)
    adapter = read_adapter_config(directory)
    if has_reward_head(directory) and adapter is None:
        add_scalar_head(model, REWARD_HEAD)
    weights = read_all_weights(directory)
    if torch.device(device).type == "cpu":
        # Out of the map of the file: in large pages of memory a token takes 3 to 6 percent less time, and what becomes
        # of the file does not matter any more.
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    if (quantization := read_quantization(directory)) is not None:
        weights = quantization.assembled(weights, dtype, directory)
    load_weights(model, weights, directory)
    stored = [parameter.dtype for parameter in model.parameters()]
    _set_dtype(model, dtype or functools.reduce(torch.promote_types, stored))
    if adapter is not None:
        put_changes(model, adapter, read_weights(directory / ADAPTER), directory / ADAPTER)
        model = merged(model) if merge and quantization is None else model
    return LoadedModel(
        model.to(device).eval(),
        tokenizer,
        config,
        read_json(directory / PROVENANCE),
        directory,
        end_ids(read_generation(directory), config.vocabulary, str(directory / GENERATION)),
    )


def open_model(path: str | Path) -> ForeignModel:
    """The verified model that `path` means with its weights unread, for writing it in another format."""
    directory, config, tokenizer = _verified(path)
    if config.architecture != "decoder":
        raise CheckpointError(f"{directory} is an encoder-decoder, which none of SheepOp's export formats can express.")
    if has_reward_head(directory):
        raise CheckpointError(f"{directory} is a reward model, which no format that SheepOp exports can express.")
    if (quantization := read_quantization(directory)) is not None:
        raise CheckpointError(
            f"{directory} holds {quantization.weights} weights, which SheepOp does not export. Export the model that "
            "it was made from."
        )
    tensors = open_weights(directory)
    if read_adapter_config(directory) is not None:
        weights = unique_weights(load_model(directory).model)
        tensors = {name: LazyTensor.of(tensor) for name, tensor in weights.items()}
    expected = expected_tensors(config)
    _check_fit({name: tensor.shape for name, tensor in tensors.items()}, expected, directory)
    return ForeignModel(
        config,
        {name: tensors[name] for name in expected},
        tokenizer,
        read_generation(directory),
        read_json(directory / PROVENANCE),
    )


def _verified(path: str | Path) -> tuple[Path, ModelConfig, Tokenizer]:
    """The directory that `path` means, its configuration and its tokenizer, after every file's checksum was right."""
    directory = resolve_model_directory(path)
    config = read_model_config(directory)
    problems = damaged_model(directory)
    if problems:
        raise CheckpointError(f"The model in {directory} cannot be used: {'; '.join(problems)}.")
    tokenizer = load_tokenizer(directory)
    require_fit(tokenizer, config, directory)
    return directory, config, tokenizer


def describe_model(
    directory: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    provenance: Mapping[str, Any],
    quantization: Quantization | None = None,
    adapter: LoraConfig | None = None,
    *,
    has_reward_head: bool = False,
) -> None:
    """Writes everything but the weights; `adapter` describes the change that lies beside them."""
    found: dict[str, Any] = {"format": FORMAT, "format_version": 1, "model": config.model_dump(mode="json")}
    if quantization is not None:
        found |= {"format_version": 2, "quantization": quantization.model_dump(mode="json")}
    if adapter is not None:
        found |= {"format_version": 3, "adapter": adapter.model_dump(mode="json")}
    if has_reward_head:
        found |= {"format_version": FORMAT_VERSION, "reward_head": True}
    write_json(directory / "config.json", found)
    tokenizer.save(directory)
    write_json(directory / PROVENANCE, dict(provenance))
    write_atomic(directory / CARD, model_card(config, tokenizer, provenance, stored=found))


def _set_dtype(model: Transformer, dtype: torch.dtype) -> None:
    """Converts the parameters; tables of positions and the like keep their precision."""
    for parameter in model.parameters():
        if not isinstance(parameter, StoredWeight):
            parameter.data = parameter.data.to(dtype)


class Quantization(Config):
    """What the matrices of a directory are stored as, and the data type that they had before."""

    weights: Literal["int8", "int4", "fp8"]
    dtype: Literal["float32", "bfloat16", "float16"]

    def assembled(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None, directory: Path) -> dict[str, Tensor]:
        """The weights with their scales; they compute in `dtype`, or in the one that they had."""
        kinds = {
            "int8": (torch.int8, torch.float32),
            "int4": (torch.uint8, torch.bfloat16),
            "fp8": (torch.float8_e4m3fn, torch.float32),
        }[self.weights]
        whole: dict[str, Tensor] = {}
        for name, values in weights.items():
            scales = weights.get(name + _SCALE)
            if scales is None:
                if not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in weights):
                    whole[name] = values
                continue
            per_row = (values.shape[-1] * 2 // GROUP,) if self.weights == "int4" else ()
            shape = (*values.shape[:-1], *per_row)
            if (values.dtype, scales.dtype) != kinds or values.ndim not in (2, 3) or scales.shape != shape:
                raise CheckpointError(f"{name} in {directory} is not a matrix of {self.weights} with its scales.")
            made = StoredWeight(self.weights, values, scales, dtype or getattr(torch, self.dtype))
            whole[name] = nn.Parameter(made, requires_grad=False)
        return whole


def read_quantization(directory: Path) -> Quantization | None:
    """How the matrices of a model directory are stored, where they are integers."""
    found = read_json(directory / "config.json").get("quantization")
    try:
        return None if found is None else validate(Quantization, found)
    except ConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'} is not valid: {error}") from None


def read_adapter_config(directory: Path) -> LoraConfig | None:
    """The change that a model directory holds beside its weights, if it holds one."""
    found = read_json(directory / "config.json").get("adapter")
    try:
        return None if found is None else validate(LoraConfig, found)
    except ConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'} is not valid: {error}") from None


def has_reward_head(directory: Path) -> bool:
    """Whether the model of a directory judges answers instead of writing them."""
    return read_json(directory / "config.json").get("reward_head") is True


def _quantization(weights: Mapping[str, Tensor]) -> Quantization | None:
    stored = {(weight.stored, weight.dtype) for weight in weights.values() if isinstance(weight, StoredWeight)}
    if not stored:
        return None
    ((form, dtype),) = stored
    return validate(Quantization, {"weights": form, "dtype": str(dtype).removeprefix("torch.")})


def _plain(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain tensors, as a file holds them."""
    plain: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not isinstance(weight, StoredWeight):
            plain[name] = weight
            continue
        plain[name] = weight.numbers
        if weight.scales is not None:
            plain[name + _SCALE] = weight.scales
    return plain


def read_model_config(directory: Path) -> ModelConfig:
    """The configuration of a model directory, after checking that its format is ours and not newer."""
    found = read_json(directory / "config.json")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory / 'config.json'} does not describe a SheepOp model. Import a model of another program "
            "first: sheepop import DIR --output MODEL"
        )
    version = found.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has model format version {version}; this SheepOp reads up to {FORMAT_VERSION}. "
            "Install a newer SheepOp."
        )
    model = found.get("model", {})
    try:
        return validate(ModelConfig, model)
    except ConfigError as error:
        own = isinstance(model, dict) and model.get("activation") not in (None, *ACTIVATION_NAMES)
        advice = ". If a plugin of yours adds it, give that file with --plugin." if own else ""
        raise CheckpointError(f"{directory / 'config.json'} is not valid: {error}{advice}") from None


def unique_weights(model: Transformer) -> dict[str, Tensor]:
    """The state dict without the second name of tied weights, and without what judges a policy beside it."""
    state = model.state_dict()
    if model.config.tie_weights:
        del state["lm_head.weight"]
    return {name: tensor.detach() for name, tensor in state.items() if not is_of_values(name)}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file; raises `CheckpointError` when it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None


def load_weights(model: Transformer, weights: dict[str, Tensor], source: Path) -> None:
    """Puts `weights` into `model`; names every tensor that is missing, unexpected or of another shape."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if not is_of_values(name)}
    if model.config.tie_weights:
        del expected["lm_head.weight"]
    _check_fit({name: tuple(tensor.shape) for name, tensor in weights.items()}, expected, source)
    model.load_state_dict(weights, strict=False, assign=any(tensor.is_meta for tensor in model.parameters()))
    model.tie()


def _check_fit(found: Mapping[str, Shape], expected: Mapping[str, Shape], source: Path) -> None:
    if problems := tensor_problems(found, expected):
        raise CheckpointError(f"The weights in {source} do not fit their configuration: {listed(problems)}.")
