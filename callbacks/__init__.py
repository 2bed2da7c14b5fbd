"""Callbacks: when to generate, sync, save and show. Imported as `lit_rl.callbacks`; `lit_rl` never imports
them.
"""
