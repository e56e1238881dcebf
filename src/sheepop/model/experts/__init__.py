"""Mixtures of experts: the router, the matrix products of all experts in one call, and the layer."""

from sheepop.model.experts.layer import Experts, MixtureOfExperts
from sheepop.model.experts.router import Router, Routing

__all__ = ["Experts", "MixtureOfExperts", "Router", "Routing"]
