"""Maximal-update parametrisation: a learning rate tuned on a narrow network fits a wide one (Yang et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sheepop.core.errors import ConfigError
from sheepop.model.config import ModelConfig
from sheepop.model.initialization import Role, parameter_role

# The size of an optimizer step. adaptive: each entry moves by about the rate, whatever its gradient (Adam, Lion).
# gradient: by the rate times its gradient (SGD). relative: by the rate times the size of the parameter (Adafactor).
# orthogonal: all singular values of a matrix's update are the rate times the root of its longer side (Muon).
Update = Literal["adaptive", "gradient", "relative", "orthogonal"]

# The rate is multiplied by this power of the width multiplier n. The update of a matrix changes activations equally at
# every width if its entries, which correlate with its inputs, fall with 1/n (table 8: under Adam the rate must fall,
# under SGD the gradient does). Vectors, embeddings, and the head, whose input is divided by n, move equally at every
# width. The router has a fixed number of outputs and no such divisor (table 3, output weights). Relative steps scale
# like initial weights, with n^-0.5 in matrices and 1/n in the router. For orthogonal steps the singular values must not
# grow with n, and in the router must fall with n^-0.5 (Yang et al. 2023, "A spectral condition for feature learning");
# the root of the longer side grows with n^0.5.
_POWERS: dict[Update, dict[Role, float]] = {
    "adaptive": {"vector": 0, "embedding": 0, "table": 0, "head": 0, "matrix": -1, "router": -1},
    "gradient": {"vector": 1, "embedding": 1, "head": 1, "matrix": 0, "router": -1},
    "relative": {"vector": 0, "embedding": 0, "head": 0, "matrix": -0.5, "router": 0},
    "orthogonal": {"matrix": -0.5, "router": -1},
}


def learning_rate_multiplier(
    name: str, shape: Sequence[int], config: ModelConfig, update: Update = "adaptive"
) -> float:
    """The factor of a parameter's learning rate; 1 unless the network is initialised with muP.

    Assumes that d_ff and the width of all heads together grow like d_model. Raises `ConfigError` for a parameter
    without a rule for this kind of update.
    """
    if config.initialization != "mup":
        return 1.0
    power = _POWERS[update].get(parameter_role(name, shape))
    if power is None or (update == "gradient" and _is_per_head(name, config)):
        raise ConfigError(
            f"model.initialization: mup has no rule for {name} with updates of the kind {update}. "
            "Choose training.optimizer: adamw."
        )
    return config.width_multiplier**power


def _is_per_head(name: str, config: ModelConfig) -> bool:
    """Whether a vector's gradient depends on how the width is split into heads, and not on the width alone."""
    return name.endswith((".sinks", ".mixer.decay", ".mixer.decay_bias", ".mixer.norm.weight")) or (
        config.qk_norm == "head" and (".q_norm." in name or ".k_norm." in name)
    )
