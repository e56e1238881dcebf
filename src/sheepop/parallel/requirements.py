"""What layouts require of a network: sizes that divide, and kinds of layers that ranks can share."""

from __future__ import annotations

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig
from sheepop.parallel.config import ParallelConfig

_CAPABILITY = (8, 0)  # Ampere, the first GPUs that FlashAttention supports
_MULTIPLE, _WIDEST = 8, 256  # the head dimensions that FlashAttention supports
_WHOLE = ("sliding_head_dim", "sliding_num_kv_heads", "shared_kv_layers", "layer_d_ff", "layer_inputs")


def check_network(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network that ranks cannot share as `parallel` says."""
    check_split(config, parallel.tensor)
    check_context(config, parallel)
    check_experts(config, parallel.expert)
    check_ring(config, parallel)
    check_pipeline(config, parallel)


def check_split(config: ModelConfig, count: int, *, writes: bool = False) -> None:
    """Raises `ConfigError` if `count` ranks cannot split the matrices, for training or with `writes` for generation."""
    if count == 1:
        return
    sizes = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads, "d_ff": config.ffn_size}
    if config.experts is not None and (config.experts.shared or writes):
        sizes["experts.d_ff"] = config.experts.d_ff or config.ffn_size
    for name, size in sizes.items():
        if size % count:
            raise ConfigError(
                f"Matrices cannot be split over {count} ranks, because {count} does not divide model.{name} = {size}. "
                "Use a divisor."
            )
    refused = {
        "model.qk_norm = width, which is over all heads": config.qk_norm == "width",
        "an encoder": config.architecture != "decoder",
        "layers without attention": any(map(config.mixer, range(config.num_layers))),
        "model.experts.shared_gate": getattr(config.experts, "shared_gate", False),
        "model.experts.own_norms": getattr(config.experts, "own_norms", False),
        "model.layer_factor": config.layer_factor,
        **{f"model.{name}": bool(getattr(config, name)) for name in _WHOLE},
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(f"Matrices are split over ranks for a decoder, and not for one with {name}.")


def check_context(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network whose rows cannot be split over `parallel.context` ranks."""
    if parallel.context == 1:
        return
    needed, sizes = parallel.context * parallel.tensor, {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads}
    sizes["sliding_num_kv_heads"] = config.sliding_num_kv_heads or config.kv_heads
    for name, size in sizes.items():
        if size % needed and parallel.context_method == "ulysses":
            with_tensor = f" times parallel.tensor = {parallel.tensor}" if parallel.tensor > 1 else ""
            raise ConfigError(
                f"parallel.context = {parallel.context}{with_tensor} does not divide model.{name} = {size}, of which "
                "every rank has a part in attention. Use a divisor, or parallel.context_method=ring."
            )
    if config.architecture != "decoder":
        raise ConfigError("parallel.context splits the rows of decoders. Use parallel.context=1.")
    if config.gated_delta_net is not None:
        raise ConfigError(
            "parallel.context splits rows, and a Gated DeltaNet (model.gated_delta_net) needs the state of all tokens "
            "before a rank's own. Use parallel.context=1."
        )
    if config.dropout:
        raise ConfigError(
            "parallel.context needs model.dropout = 0: ranks that have parts of a row would drop the same positions of "
            "each part."
        )


def check_experts(config: ModelConfig, count: int) -> None:
    """Raises `ConfigError` for a network whose experts cannot be divided among `count` ranks."""
    if count == 1:
        return
    if config.experts is None:
        raise ConfigError(f"parallel.expert = {count} shares experts, and the network has none (model.experts).")
    if config.experts.count % count:
        raise ConfigError(
            f"parallel.expert = {count} does not divide model.experts.count = {config.experts.count}. Use a divisor."
        )


def check_ring(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network whose attention a ring does not compute."""
    if parallel.context_method != "ring":
        return
    refused = {
        "model.position_encoding = alibi": config.position_encoding == "alibi",
        "model.sliding_window": config.sliding_window is not None,
        "model.attention_soft_cap": config.attention_soft_cap is not None,
        "model.attention_sinks": config.attention_sinks,
        "a model.value_head_dim of its own": config.value_size != config.head_size,
        f"model.attention_backend = {config.attention_backend}": config.attention_backend not in ("auto", "sdpa"),
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(
            f"parallel.context_method = ring is for plain causal attention, and not for {name}. Leave that out, or use "
            "parallel.context_method=ulysses."
        )


def check_ring_here(config: ModelConfig, parallel: ParallelConfig, device: str, precision: str) -> None:
    """Raises `ConfigError` if the flash attention of `device` does not compute this network in `precision`."""
    if parallel.context_method != "ring" or device == "cpu":
        return
    if (refused := _lacking(config, device, precision)) is not None:
        raise ConfigError(
            "parallel.context_method = ring is computed by FlashAttention, which needs an NVIDIA GPU (Ampere or "
            f"newer), 16-bit numbers, and a head dimension that is a multiple of {_MULTIPLE} up to {_WIDEST}. It has "
            f"nothing for {refused}. Use parallel.context_method=ulysses."
        )


def _lacking(config: ModelConfig, device: str, precision: str) -> str | None:
    if device != "cuda":
        return f"device = {device}"
    if precision == "fp32":
        return "training.precision = fp32"
    if config.head_size % _MULTIPLE or config.head_size > _WIDEST:
        return f"model.head_dim = {config.head_size}"
    import torch

    return "this GPU" if torch.cuda.get_device_capability() < _CAPABILITY else None


def check_pipeline(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network that cannot be cut into the stages of `parallel`."""
    if parallel.pipeline == 1:
        return
    if config.num_layers < parallel.num_stages:
        raise ConfigError(
            f"model.num_layers = {config.num_layers} are too few for {parallel.num_stages} stages: "
            f"parallel.pipeline = {parallel.pipeline} with parallel.schedule = {parallel.schedule}. Use fewer."
        )
    refused = {
        "an encoder": config.architecture != "decoder",
        "model.shared_kv_layers, whose keys and values other stages have": config.shared_kv_layers > 0,
        "model.layer_inputs, of which every stage needs some": config.layer_inputs is not None,
        "model.dropout, which stages would draw otherwise than one device": config.dropout > 0,
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(f"parallel.pipeline is for a decoder, and not for one with {name}.")
    if parallel.zero >= 2:
        raise ConfigError(
            f"parallel.zero = {parallel.zero} does not go with parallel.pipeline: a stage keeps its weights and "
            "gradients whole during a step, while micro-batches come and go. Use parallel.zero=1."
        )
