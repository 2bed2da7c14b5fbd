"""Settings with a call: small frozen dataclasses, each a block of the configuration.

Each checks its ranges when it is built, holds plain values, and calls the pure functions of
`lit_rl.functional`.
"""
