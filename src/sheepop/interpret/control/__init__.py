"""The network and its loops as a control system: gains, influence, controllability, closed loops, stability."""
