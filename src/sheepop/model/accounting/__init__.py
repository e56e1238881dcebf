"""The cost of a network: parameters, operations, memory."""
