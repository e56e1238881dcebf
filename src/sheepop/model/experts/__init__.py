"""Feed-forward layers of many experts: the router, the products of all experts in one call, the layer."""

from sheepop.model.experts.layer import MixtureOfExperts
from sheepop.model.experts.router import Routing

__all__ = ["MixtureOfExperts", "Routing"]
