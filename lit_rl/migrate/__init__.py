"""From a TRL or verl configuration to an experiment of ours, with a line of report for every key.

| file | what it holds |
| --- | --- |
| `parameters.csv` | every documented parameter of the three, our key for it, and how it leads there |
| `rows.py` | that table, read |
| `sources.py` | reads JSON, YAML, a command line, or a Python call |
| `trl.py`, `verl.py` | what is computed: batch arithmetic, periods, choices |
| `draft.py` | what was found, checked against the composed configuration; yaml and report |
"""
