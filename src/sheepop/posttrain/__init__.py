"""Post-training: fine-tuning, preference optimisation, reward models and reinforcement learning from rewards."""
