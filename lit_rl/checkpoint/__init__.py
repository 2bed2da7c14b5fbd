"""Checkpoints as folders of JSON and safetensors: written whole or not at all, read without running code.

```
checkpoints/step_00000008/
  manifest.json                       format, step, who wrote it, what is in it, size and sha256 of every file
  model.json      model.safetensors       the policy (and a critic)
  optimizer.json  optimizer.safetensors   moments and parameter groups
  state.json      state.safetensors       counters, schedule, data position, callbacks, moving copies
  config.yaml                         the run's configuration, secrets masked
  hf/                                 the policy as `from_pretrained` reads it, when asked for
```

A .json holds the structure and every plain value, and names the tensors in the .safetensors beside it
(`codec.py`). The folder is written under a temporary name and renamed at the end, so a name that starts with
`step_` is a finished checkpoint (`folder.py`). What each part means to the trainer stands in `io.py`;
`remote.py` copies folders to and from any fsspec URL, `background.py` writes beside training, `lock.py` keeps
a second process out.
"""

from lit_rl.checkpoint.codec import decode_tree, encode_tree
from lit_rl.checkpoint.folder import list_checkpoints, newest_complete, remove_folder, step_folder, verify
from lit_rl.checkpoint.io import PARTS, FolderCheckpointIO

__all__ = [
    "PARTS",
    "FolderCheckpointIO",
    "decode_tree",
    "encode_tree",
    "list_checkpoints",
    "newest_complete",
    "remove_folder",
    "step_folder",
    "verify",
]
