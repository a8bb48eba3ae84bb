"""lm-evaluation-harness on the folders that `ds-zo export` makes."""

from __future__ import annotations

from clients.client import Client

CLIENT = Client(
    title="lm-evaluation-harness",
    requires=(
        "lm_eval[hf]==0.4.13",
        "accelerate==1.15.0",
        "datasets==5.2.0",
        "peft==0.21.2",
        "torch==2.13.0",
        "transformers==5.22.2",
    ),
    commands={
        "evaluate": "lm_eval run --model hf --model_args pretrained=exported,dtype=float32 --include_path . "
        "--tasks choices --log_samples --output_path results",
    },
    files={
        "choices.yaml": """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: data/dpo/train.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{[chosen, rejected]}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    },
    cpu_only="--device cpu",
    about="An exported folder is a model like any other: the harness needs neither ds_zo nor DeepSpeed.",
    trains=False,
)
