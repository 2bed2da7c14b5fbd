"""The configuration groups that `train.py` composes; a package so that they install beside the code."""
