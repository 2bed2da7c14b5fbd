"""Engines that write completions, one per file; the interface is `engine.py`, the settings `sampling.py`."""
