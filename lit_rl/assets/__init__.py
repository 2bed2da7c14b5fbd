"""The embedded model and task: the files every example runs on without a download, and the code that makes them."""
