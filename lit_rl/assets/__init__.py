"""The embedded model and task: what every example runs on without a download, and the code that makes it."""
