"""Hints for settings that the user writes with another tool's name: Holdfast's name for the same setting."""

from collections.abc import Mapping
from typing import Any

# For each setting of Holdfast, other tools' names for the setting (in lower case, dashes as underscores).
FOREIGN: dict[str, str] = {
    "recipe": "model target entrypoint trainer train_fn",
    "run": "run_name name experiment experiment_name job_name run_id",
    "store": "checkpoint.dir checkpoint.path checkpoint.folder checkpoint.store checkpoint_dir checkpoint_path "
    "output_dir save_dir default_root_dir dirpath work_dir logdir root output",
    "epochs": "num_train_epochs max_epochs num_epochs n_epochs total_epochs max_steps num_steps total_steps",
    "seed": "random_seed manual_seed rng_seed data_seed",
    "chunk.steps": "save_steps save_every save_interval save_freq checkpoint.every checkpoint.interval "
    "checkpoint.steps checkpoint.every_steps checkpoint_every checkpoint_interval checkpointing_steps "
    "every_n_train_steps",
    "chunk.epochs": "save_strategy save_epochs checkpoint.epochs checkpoint.every_epochs every_n_epochs",
    "retention": "checkpoint.retention checkpoint.keep retention_policy",
    "retention.keep_last": "save_total_limit keep_last checkpoint.keep_last max_to_keep checkpoint.max_to_keep "
    "retention.last retention.keep keep_last_n keep_n",
    "retention.keep_best": "save_top_k load_best_model_at_end metric_for_best_model keep_best checkpoint.keep_best "
    "monitor",
    "init_from.run": "init_checkpoint load_from pretrained finetune_from weights load_weights",
    "compute.ranks": "devices num_devices num_processes nproc_per_node world_size num_gpus gpus n_gpu",
    "compute.loader_workers": "num_workers dataloader_num_workers workers",
    "compute.device": "device accelerator",
    "compute.mixed_precision": "mixed_precision precision dtype fp16 bf16 amp",
    "determinism.mode": "deterministic full_determinism use_deterministic_algorithms benchmark reproducibility "
    "cudnn_deterministic cudnn_benchmark",
    "determinism.threads": "threads num_threads",
    "log.every": "logging_steps log_every log_interval log_every_n_steps logging.steps",
    "log.folder": "log_dir logging_dir logs",
    "settings.lr": "lr learning_rate base_lr optimizer.lr optimizer.learning_rate optim.lr",
    "settings.weight_decay": "weight_decay optimizer.weight_decay optim.weight_decay",
    "settings.batch_size": "batch_size per_device_train_batch_size train_batch_size micro_batch_size data.batch_size",
    "settings.grad_accum": "grad_accum gradient_accumulation_steps accumulate_grad_batches grad_accum_steps",
    "settings.clip_norm": "clip_norm max_grad_norm gradient_clip_val grad_clip clip_grad_norm",
    "settings.schedule": "scheduler scheduler.type scheduler.name lr_scheduler lr_scheduler.type lr_scheduler_type "
    "schedule schedule.type schedule.name",
    "settings.schedule_epochs": "scheduler.epochs schedule.epochs schedule_epochs",
    "settings.warmup_steps": "warmup_steps scheduler.warmup_steps num_warmup_steps lr_scheduler.warmup_steps",
    "settings.final_lr_scale": "final_lr_scale scheduler.final_lr_scale min_lr_ratio",
}
RESUMES = [
    "resume_from",
    "resume_from_checkpoint",
    "resume_from_epoch",
    "ckpt_path",
    "checkpoint.resume",
    "checkpoint.resume_from",
    "auto_resume",
    "overwrite_output_dir",
    "resume.from",
    "resume.checkpoint",
]
MEANT = {foreign: own for own, names in FOREIGN.items() for foreign in names.split()}


def hint_for(name: str, value: Any) -> str:
    """Return the hint for another tool's name of a setting; empty if the name is unknown.

    Args:
        name: the dotted name of an unknown setting or table.
        value: the setting's value. If the value is a table, the table's first key counts as part of the name.
    """
    names = [name.lower().replace("-", "_")]
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        names.append(f"{names[-1]}.{str(key).lower().replace('-', '_')}")
    # Try the whole name, then the key without its tables (other tools name tables differently), then the tables alone.
    for each in (names[-1], names[-1].rpartition(".")[2], *reversed(names[:-1])):
        if each in RESUMES:
            return "leave it out: the same command continues the run from its last verified checkpoint"
        if each in MEANT:
            return f"did you mean {MEANT[each]}?"
    return ""
