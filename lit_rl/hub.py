"""Uploads to a Hugging Face hub; which one is the environment's business (`HF_ENDPOINT`, `HF_TOKEN`)."""

from pathlib import Path

from huggingface_hub import HfApi

from lit_rl.errors import StorageError


def push(
    folder: Path,
    repo: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Upload model",
    path_in_repo: str | None = None,
) -> str:
    """Upload a folder's files in one commit, to a repository that is made when missing.

    Args:
        folder: what is uploaded.
        repo: `name`, in the token's own namespace, or `owner/name`.
        token: None = the environment's.
        private: of a new repository; None = the owner's default.
        revision: branch, made when missing; None = main.
        message: of the commit.
        path_in_repo: folder there; None = its root.

    Returns:
        The repository's full name.

    Raises:
        StorageError: the hub cannot be reached, or refuses.
    """
    try:
        api = HfApi(token=token)
        full_name = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(full_name, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=full_name,
            folder_path=folder,
            path_in_repo=path_in_repo,
            commit_message=message,
            revision=revision,
        )
    except Exception as error:  # of the client, of the network, of the hub
        raise StorageError(
            f"{repo!r} cannot be pushed to the hub: {type(error).__name__}: {error}."
        ) from error
    return full_name
