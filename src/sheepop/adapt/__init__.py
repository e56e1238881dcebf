"""Changes applied to a finished model from outside: LoRA, quantised weights, and weights read by native kernels."""
