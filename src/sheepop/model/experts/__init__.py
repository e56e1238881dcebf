"""Feed-forward layers of many experts: the router, the products of all experts in one call, the layer."""

from sheepop.model.experts.layer import Experts, MixtureOfExperts
from sheepop.model.experts.router import Router, Routing

__all__ = ["Experts", "MixtureOfExperts", "Router", "Routing"]
