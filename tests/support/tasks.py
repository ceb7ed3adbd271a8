"""Tasks of lm_eval in files: rows of one's own, whose answers, last words or texts are scored."""

import json
from pathlib import Path

KINDS = {
    "multiple_choice": {
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    },
    "loglikelihood": {"doc_to_text": "{{context}}", "doc_to_target": " {{word}}"},
    "loglikelihood_rolling": {"doc_to_text": "", "doc_to_target": "{{text}}"},
    "generate_until": {
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{word}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_task(folder: Path, name: str, kind: str, rows: list[dict], **settings: str) -> str:
    """Write a task of a kind with its rows; return its file. `settings` win, `!function` too."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "test_split": "test",
        "fewshot_config": {"split": "test"},
        "output_type": kind,
        **KINDS[kind],
    }
    # Each line is YAML, since JSON is.
    lines = [f"{key}: {json.dumps(value)}" for key, value in task.items() if key not in settings]
    lines += [f"{key}: {value}" for key, value in settings.items()]
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n")
    return str(folder / f"{name}.yaml")


def foxes(count: int) -> list[dict]:
    """Return rows for each kind, about what `tests.support.tiny.write_text` tells."""
    return [
        {
            "context": f"The old fox number {n} went over the",
            "choices": ["hill. The", "zZzZ"][:: 1 - 2 * (n % 2)],
            "answer": n % 2,
            "word": "hill",
            "text": f"The old fox number {n} went over the hill. " * (1 + n % 4),
        }
        for n in range(count)
    ]
