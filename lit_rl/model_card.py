"""The README.md of an exported model: what it is, how it was trained, on what, and how that went."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from lit_rl.curves import draw

BODY = """---
{fields}
---

# {title}

{sentence} Trained with lit_rl by **{algorithm}** for {step} steps from `{base}`.

## Data

| split | files | rows |
| --- | --- | --- |
| train | `{train_files}` | {rows} |
| validation | `{val_files}` | |

## Results

{results}

{curves}

## Command

```
{command}
```

Seed {seed}, {num_processes} process(es), torch {torch}.

## Configuration

<details>

```yaml
{configuration}
```

</details>
"""


def write_card(
    folder: Path,
    *,
    part: str,
    manifest: dict[str, Any],
    state: dict[str, Any],
    config_text: str,
    config: dict[str, Any],
    fields: dict[str, Any] | None = None,
) -> None:
    """Write README.md, and curves.png where the checkpoint holds the numbers.

    Args:
        folder: of the exported model.
        part: policy, teacher, ref or critic.
        manifest: of the checkpoint.
        state: "state" of the checkpoint, as read.
        config_text: the run's configuration as yaml.
        config: the same as a tree.
        fields: more metadata, such as license, language, tags; goes over ours.
    """
    callbacks = state.get("callbacks", {})
    history = callbacks.get("Curves", {}).get("history", {})
    if history:
        draw(history, folder / "curves.png")
    data, base = config["data"], config["model"]["path"]
    text = BODY.format(
        fields=_metadata(base, manifest["algorithm"], fields or {}),
        title=f"{config.get('experiment_name', 'model')}: {part} at step {manifest['step']}",
        sentence=f"The {part} of a reinforcement learning run.",
        algorithm=manifest["algorithm"],
        step=manifest["step"],
        base=base,
        train_files=data["train_files"],
        val_files=data["val_files"],
        rows=_rows(state),
        results=_results(callbacks.get("RunSummary", {})),
        curves="![curves](curves.png)" if history else "",
        command=manifest["command"],
        seed=manifest["seed"],
        num_processes=manifest["num_processes"],
        torch=manifest["torch"],
        configuration=config_text.strip(),
    )
    (folder / "README.md").write_text(text, "utf-8")


def _metadata(base: str, algorithm: str, fields: dict[str, Any]) -> str:
    known = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["lit_rl", "reinforcement-learning", algorithm.lower()],
    }
    is_hub_id = base.count("/") == 1 and not Path(base).exists()
    if is_hub_id:
        known["base_model"] = base
    return ModelCardData(**{**known, **fields}).to_yaml()


def _rows(state: dict[str, Any]) -> str:
    """As the place in the data says it; nothing where none of our loaders was saved."""
    loader = state.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    return str(loader[0].get("data.train_files", "")).partition(" ")[0] if loader else ""


def _results(summary: dict[str, Any]) -> str:
    """Accuracy by data source at the start and last; a sentence where none was measured."""
    last = summary.get("val_end") or {}
    if not last:
        return "No validation numbers are in the checkpoint."
    first = summary.get("val_start") or {}
    lines = ["| data source | accuracy at step 0 | accuracy last validated |", "| --- | --- | --- |"]
    for name, value in sorted(last.items()):
        start = f"{first[name]:.3f}" if name in first else ""
        lines.append(f"| {name} | {start} | {value:.3f} |")
    return "\n".join(lines)
