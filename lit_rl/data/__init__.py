"""Rows in, token ids out: files, chat rendering, order, loaders.

`parquet.py` reads rows, from a copy where they are remote (`remote.py`) or lie in too large row groups
(`regroup.py`); `custom.py` makes your own dataset class. `order.py` and `mix.py` decide which row comes when,
`chat.py` turns a row's messages into ids, `loader.py` serves batches and remembers its place, `prompts.py`
and `sft.py` are the datamodules.
"""
