"""The training loop: steps, evaluations, the best state, checkpoints."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from ds_zo.checkpoint.preemption import Preemption
from ds_zo.config import backend_of
from ds_zo.config.stock import lookup
from ds_zo.records.environment import host_peak_gb
from ds_zo.records.run_summary import Best, Point
from ds_zo.tasks import Evaluator, HeadTask, Score, pad_token_id
from ds_zo.tasks.data import Split
from ds_zo.tasks.encoding import num_label_positions, position_ids
from ds_zo.tasks.scoring import accepts_argument, needs_position_ids, num_reserved_positions
from ds_zo.training.arguments import DTYPES, EMBEDDED_STEPS, EMBEDDED_TASK
from ds_zo.training.data import TrainingBatches, rows_digest, task_of
from ds_zo.training.engine import make_engine, ranks_per_batch, samples_per_step
from ds_zo.training.errors import UserError
from ds_zo.training.json_config import model_dtype
from ds_zo.training.model import add_lora, load_model, save_model
from ds_zo.training.objectives import objective_of
from ds_zo.training.progress import Progress, RunCheckpoints

LOSS_EVERY = 10
"""Steps between two readings of the loss or the score: each reading waits for the device."""


class TrainingLoop:
    """Trains one engine on one task, and saves in one folder."""

    def __init__(self, args: argparse.Namespace, config: dict[str, Any]) -> None:
        self.args = args
        self.config = config
        self.dtype = model_dtype(config)
        self.task = task_of(args)
        self.objective = objective_of(args, self.task)
        model = self._load_model()
        self.pad_token_id = pad_token_id(self.tokenizer)
        most = getattr(model.config, "max_position_embeddings", None)
        self.max_length = min(args.max_length, most - num_reserved_positions(model)) if most else args.max_length
        if args.lora_rank is not None:
            model = add_lora(model, args)
        if args.gradient_checkpointing:
            # Only the non-reentrant kind calls LOMO's hooks on each gradient, and works with a frozen embedding.
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        sequences = self.task.sequences("train", self.tokenizer, max_length=self.max_length)
        if self.objective is not None:
            self.objective.prepare(self.tokenizer, max_length=self.max_length)
        self.engine = make_engine(model, config)
        self.engine.train()  # `from_pretrained` leaves dropout off, and a run may begin without an evaluation
        self.batches = TrainingBatches(
            sequences,
            task=self.task,
            args=args,
            pad_token_id=self.pad_token_id,
            batch_size=self.engine.train_micro_batch_size_per_gpu(),
        )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        sharing = ranks_per_batch(self.engine)
        self.batch_index, self.num_batches = self.rank // sharing, self.world_size // sharing
        """The index of this rank's micro-batch among those of all ranks, and the number of these."""
        alone = self.world_size == 1 and not isinstance(self.task, HeadTask)
        self.keeps_answers = alone and accepts_argument(self.engine, "logits_to_keep")
        """Whether the head computes logits only at the positions of labels. Several ranks may share one batch and must
        agree on its shape, so that they compute all logits."""
        data = f"{len(sequences)} training examples of rows {rows_digest(self.task)}"
        self.checkpoints = RunCheckpoints(self.engine, args, data=data, writes=self.rank == 0)
        self.model_folder: Path | None = None
        """The folder of the saved model; None: no model has been saved."""
        self.progress = Progress()

    def _stores_base_narrow(self) -> bool:
        """Whether the frozen base of adapters is stored in fewer bits, so that it need not exist in its own dtype."""
        return lookup(self.config, "ds_zo.stream.frozen_dtype") not in (None, "auto")

    def _load_model(self) -> Any:
        """Returns the model, and keeps its tokenizer."""
        args, has_head = self.args, isinstance(self.task, HeadTask)
        model, self.tokenizer = load_model(
            args.model,
            dtype=DTYPES[self.dtype],
            lazily=backend_of(self.config) is not None and (args.lora_rank is None or self._stores_base_narrow()),
            num_labels=self.task.num_labels if isinstance(self.task, HeadTask) else None,
        )
        if has_head and args.padding_side == "left" and self.tokenizer.cls_token_id is not None:
            raise UserError(f"the head of {args.model} reads the first token, not padding: right (--padding-side)")
        return model

    @property
    def samples_per_step(self) -> int:
        return samples_per_step(self.engine)

    def num_steps(self) -> int:
        if self.args.steps is not None:
            return int(self.args.steps)
        if self.args.epochs is None and self.args.task == EMBEDDED_TASK:
            return EMBEDDED_STEPS
        epochs = 1.0 if self.args.epochs is None else self.args.epochs
        return max(1, round(epochs * len(self.batches) / self.samples_per_step))

    def evaluate(self, split: Split) -> Score:
        evaluator = Evaluator(
            self.engine,
            device=self.engine.device,
            pad_token_id=self.pad_token_id,
            batch_size=self.args.eval_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            padding_side=self.args.padding_side,
        )
        self.engine.eval()
        score = self.task.evaluate(
            evaluator, split, self.tokenizer, max_length=self.max_length, num_examples=self.args.num_eval
        )
        self.engine.train()
        if self.world_size == 1:  # a process group of one rank would take seconds to set up
            return score
        sums = torch.tensor(score.sums, dtype=torch.float64, device=self.engine.device)
        dist.all_reduce(sums)
        return score.with_sums(sums.tolist())

    def resume(self, folder: Path) -> None:
        """Continues from the newest checkpoint of a folder."""
        self.progress = self.checkpoints.resume(folder)
        model_folder = self.args.output_dir / "model"
        if self.progress.best is None or self.args.no_save:
            return
        if model_folder.is_dir():
            self.model_folder = model_folder
        elif self.rank == 0:
            print(
                f"the best model so far, of step {self.progress.best.step}, is not in {model_folder}, which gets one "
                "only if a later model is better: keep the first run's, or resume with its --output-dir",
                flush=True,
            )

    def train(self, preemption: Preemption) -> bool:
        """Makes all steps. Returns False if SIGTERM came first, and a checkpoint was saved instead."""
        args, progress, num_steps = self.args, self.progress, self.num_steps()
        bar = tqdm(
            total=num_steps, initial=progress.step, desc="train", unit="step", disable=self.rank != 0, mininterval=0.5
        )
        shown = progress.num_tokens, progress.train_s
        with bar:
            while progress.step < num_steps:
                point = self._timed_step(num_steps)
                if point is not None:
                    bar.set_postfix_str(self._progress_text(point, *shown), refresh=False)
                    shown = progress.num_tokens, progress.train_s
                bar.update()
                over = args.max_seconds is not None and self._any_rank(progress.train_s >= args.max_seconds)
                ends = over or progress.step == num_steps
                if self._is_due(args.eval_every) or (args.eval_every and ends):
                    self._keep_best(bar)
                preempted = preemption.requested()
                if preempted or self._is_due(args.save_every):
                    self.checkpoints.save(progress)
                if preempted or over:
                    return ends
        return True

    def _is_due(self, every: int) -> bool:
        """Whether an action that is made every so many steps, 0 for never, follows the last step."""
        return bool(every) and self.progress.step % every == 0

    def _timed_step(self, num_steps: int) -> Point | None:
        """Makes one step and adds its time. Returns the new point of the curve if the loss or the score was read."""
        progress, start = self.progress, time.perf_counter()
        value = self._step()
        is_last = progress.step == num_steps
        point = None
        if self._is_due(LOSS_EVERY) or progress.step == 1 or is_last:
            point = Point(progress.step, 0.0)
            if self.objective is None:
                point.loss = value.item()
            else:
                point.score = value.item()
        if is_last or self._is_due(self.args.eval_every) or self._is_due(self.args.save_every):
            get_accelerator().synchronize()  # work still queued on the device belongs to the training time
        progress.train_s += time.perf_counter() - start
        if point is not None:
            point.train_s = round(progress.train_s, 3)
            progress.curve.append(point)
        return point

    def _step(self) -> torch.Tensor:
        """Makes one optimizer step. Returns the mean loss or score of its micro-batches, on the device."""
        found = []
        for _ in range(self.engine.gradient_accumulation_steps()):
            size = self.batches.batch_size
            position = self.progress.num_seen + self.batch_index * size
            self.progress.num_seen += size * self.num_batches
            found.append(self._loss_step(position) if self.objective is None else self._score_step(position))
        self.progress.step += 1
        return torch.stack(found).mean()

    def _loss_step(self, position: int) -> torch.Tensor:
        """Trains on the micro-batch that begins at a position of the order. Returns its loss."""
        batch = self.batches.at(position)
        num_positions = num_label_positions(batch["labels"]) if self.keeps_answers else None
        loss: torch.Tensor = self.engine(**self._model_inputs(batch, num_positions)).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def _score_step(self, position: int) -> torch.Tensor:
        """Trains on the score of the micro-batch that begins at a position of the order. Returns the score."""
        assert self.objective is not None
        batch = self.objective.batch_at(self.batches, position)
        score: torch.Tensor = self.engine.zo_step(self._model_inputs(batch.inputs, batch.num_positions), batch.score)
        return score

    def _model_inputs(self, batch: dict[str, torch.Tensor], num_positions: int | None) -> dict[str, Any]:
        """The model's keywords, on the device. `num_positions`: only these last positions need logits, if the model can
        leave out the others; None: all need them."""
        self.progress.num_tokens += int(batch["attention_mask"].sum()) * self.num_batches
        inputs: dict[str, Any] = {} if isinstance(self.task, HeadTask) else {"use_cache": False}
        if self.keeps_answers and num_positions is not None:
            inputs["logits_to_keep"] = num_positions
            if "labels" in batch:
                batch["labels"] = batch["labels"][:, -num_positions:]
        inputs |= {name: tensor.to(self.engine.device) for name, tensor in batch.items()}
        if self.args.padding_side == "left" and needs_position_ids(self.engine):
            inputs["position_ids"] = position_ids(inputs["attention_mask"])
        return inputs

    def _progress_text(self, point: Point, num_tokens: int, train_s: float) -> str:
        """The loss or score, the rate of all ranks' tokens since the given counts, and this rank's memory peaks."""
        rate = (self.progress.num_tokens - num_tokens) / max(self.progress.train_s - train_s, 1e-9)
        memory = f"host {host_peak_gb():.1f} GB"
        if get_accelerator().device_name() != "cpu":
            memory = f"GPU {get_accelerator().max_memory_allocated() / 1e9:.1f} GB, {memory}"
        value = f"loss {point.loss:.3f}" if self.objective is None else f"score {point.score:.3f}"
        return f"{value}, {rate:,.0f} tokens/s, {memory}"

    def _any_rank(self, flag: bool) -> bool:
        """Returns whether any rank's flag is set: clocks differ, and one rank past the limit stops all ranks."""
        if self.world_size == 1:
            return flag
        found = torch.tensor(int(flag), device=self.engine.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def _keep_best(self, bar: Any) -> None:
        """Scores dev. If the score is the best so far, scores test and saves the model."""
        progress, score = self.progress, self.evaluate("dev")
        progress.curve.append(Point(progress.step, round(progress.train_s, 3), dev=score.values))
        better = score.is_better_than(progress.best.value if progress.best else None)
        if better:
            test = self.evaluate("test")
            progress.best = Best(progress.step, score.metric, score.values, test.values, test.metric)
            if not self.args.no_save:
                self.save_model()
        self.checkpoints.note(progress)
        if self.rank == 0:
            bar.write(f"step {progress.step}: dev {score}{', the best so far' if better else ''}")

    def save_model(self) -> None:
        """Writes the model's folder, `model` in the output folder."""
        folder = self.args.output_dir / "model"
        save_model(
            self.engine, folder, tokenizer=self.tokenizer, train_base=self.args.train_base, writes=self.rank == 0
        )
        dist.barrier()
        self.model_folder = folder
