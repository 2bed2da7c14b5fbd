"""Rows in, token ids out: files, chat rendering, order, loaders.

`parquet.py` reads rows, `order.py` decides which row comes when, `chat.py` turns a row's messages into ids,
`loader.py` serves batches and remembers its place, `prompts.py` and `sft.py` are the datamodules.
"""
