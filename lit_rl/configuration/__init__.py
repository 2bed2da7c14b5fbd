"""From a command line to a checked configuration: compose, validate, rules between keys, plan, errors.

The only package that knows dotted keys. It hands plain values to constructors; nothing else reads a
configuration.
"""
