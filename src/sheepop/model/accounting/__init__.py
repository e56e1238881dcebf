"""What a network costs: parameters, operations, memory."""
