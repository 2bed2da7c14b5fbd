"""lit_rl: a PyTorch Lightning and Hydra recipe for RL post-training of language models."""
