"""Maximal-update parametrisation: a learning rate found on a narrow network serves a wide one (Yang et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sheepop.core.errors import ConfigError
from sheepop.model.config import ModelConfig
from sheepop.model.initialization import Role, parameter_role

# How long a step is. adaptive: each entry moves by about the rate, whatever its gradient (Adam, Lion). gradient: by the
# rate times its gradient (SGD). relative: by the rate times the size of the parameter (Adafactor). orthogonal: the
# matrix moves by one whose singular values are the rate times the root of its longer side (Muon).
Update = Literal["adaptive", "gradient", "relative", "orthogonal"]

# The power of the width multiplier n by which the rate is multiplied. An update of a matrix changes activations by as
# much at every width when its entries, all in step with its inputs, fall with 1/n (table 8: under Adam the rate has to,
# under SGD the gradient does). What has a size of its own, vectors, embeddings, and the head behind its multiplier 1/n,
# moves by as much at every width. The router's outputs do not grow, and it has no multiplier (table 3, output weights).
# Relative steps fall as initial weights do, with n^-0.5 in matrices and 1/n in the router. Orthogonal ones are right
# when their singular values do not grow with n, and in the router fall with n^-0.5 (Yang et al. 2023, "A spectral
# condition for feature learning"); the root of the longer side grows with n^0.5.
_POWERS: dict[Update, dict[Role, float]] = {
    "adaptive": {"vector": 0, "embedding": 0, "table": 0, "head": 0, "matrix": -1, "router": -1},
    "gradient": {"vector": 1, "embedding": 1, "head": 1, "matrix": 0, "router": -1},
    "relative": {"vector": 0, "embedding": 0, "head": 0, "matrix": -0.5, "router": 0},
    "orthogonal": {"matrix": -0.5, "router": -1},
}


def learning_rate_multiplier(
    name: str, shape: Sequence[int], config: ModelConfig, update: Update = "adaptive"
) -> float:
    """By what the learning rate of a parameter is multiplied; 1 for a network that is not initialised by muP.

    d_ff and the width of all heads together are taken to grow as d_model does. Raises `ConfigError` for a parameter for
    which no rule is known under this kind of update.
    """
    if config.initialization != "mup":
        return 1.0
    role = parameter_role(name, shape)
    power = _POWERS[update].get(role)
    if power is None or (update == "gradient" and _is_per_head(name, config)):
        raise ConfigError(
            f"model.initialization: mup has no rule for {name} under steps of the kind {update}. "
            "Choose training.optimizer: adamw."
        )
    return config.width_multiplier**power


def _is_per_head(name: str, config: ModelConfig) -> bool:
    """Whether a vector's gradient grows with how a width is cut into heads, and not with the width alone."""
    return name.endswith(".sinks") or (config.qk_norm == "head" and (".q_norm." in name or ".k_norm." in name))
