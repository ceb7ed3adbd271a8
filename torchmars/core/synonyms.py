"""Names of other programs for ours: nanoGPT's, torchtitan's, transformers' and plain words."""

# Ours, and theirs. What has a section is a setting; it is meant in that section, and in another one
# unless the word stands for several. What has none is meant wherever that name is. The first wins.
SYNONYMS = {
    # Commands, options and values.
    "generate": "sample",
    "evaluate": "eval",
    "prepare": "tokenize",
    "export": "convert",
    "bench": "benchmark",
    "train": "resume finetune",
    "plan": "dry_run",
    "prompt": "start",
    "bfloat16": "bf16",
    "float32": "fp32",
    "mars-adamw": "mars",
    # Sections.
    "run": "job",
    "training": "trainer",
    "schedule": "scheduler lr_scheduler",
    "profiler": "profiling",
    "parallelism": "parallel distributed",
    "metrics": "log logging",
    # Settings.
    "run.name": "name run_name wandb_run_name",
    "run.folder": "folder dir path out_dir output_dir dump_folder",
    "model.name": "type model_type arch architecture family",
    "model.size": "flavor",
    "model.n_layer": "layers n_layers num_layers num_hidden_layers depth",
    "model.n_head": "heads n_heads num_heads num_attention_heads",
    "model.n_kv_head": "kv_heads n_kv_heads num_key_value_heads",
    "model.n_embd": "dim d_model hidden hidden_size hidden_dim embed_dim width",
    "model.n_inner": "d_ff ffn ffn_dim mlp_dim intermediate_size",
    "model.tied": "tie_word_embeddings weight_tying enable_weight_tying",
    "model.n_expert": "experts num_experts num_local_experts",
    "model.n_expert_used": "top_k num_experts_per_tok",
    "data.source": "dataset dataset_name dataset_path name type kind url",
    "data.path": "folder dir data_dir",
    "data.validation_fraction": "val_fraction val_split",
    "training.steps": "steps max_steps max_iters iters iterations num_steps total_steps epochs "
    "epoch num_epochs num_train_epochs max_epochs lr_decay_iters",
    "training.global_batch_size": "batch_size batch gradient_accumulation_steps accumulation_steps "
    "grad_accum_steps",
    "training.microbatch_size": "micro_batch_size local_batch_size per_device_train_batch_size",
    "training.seq_len": "block_size context_length context_size max_seq_len sequence_length "
    "max_length n_ctx n_positions max_position_embeddings",
    "training.max_grad_norm": "grad_clip clip clip_grad clip_grad_norm gradient_clipping max_norm",
    "training.dtype": "precision mixed_precision amp bf16 fp16 mixed_precision_param",
    "optimizer.name": "rule type kind optimizer optimizer_name mars_type",
    "optimizer.rule": "name type",  # of a group
    "optimizer.lr": "learning_rate max_lr peak_lr learn",
    "optimizer.betas": "momentum beta beta1 beta2",
    "optimizer.eps": "epsilon",
    "optimizer.weight_decay": "wd decay",
    "optimizer.mode": "is_approx exact",
    "schedule.name": "type kind decay decay_type decay_lr scheduler lr_scheduler_type schedule",
    "schedule.warmup_steps": "warmup warmup_iters warmup_ratio warmup_fraction num_warmup_steps",
    "schedule.decay_steps": "cooldown cooldown_steps decay_ratio",
    "schedule.min_lr": "final_lr end_lr lr_min eta_min min_lr_factor",
    "parallelism.dp_replicate": "dp ddp data_parallel_replicate_degree",
    "parallelism.dp_shard": "fsdp data_parallel_shard_degree",
    "parallelism.tp": "tensor_parallel tensor_parallel_degree",
    "parallelism.cp": "context_parallel context_parallel_degree",
    "parallelism.ep": "expert_parallel expert_parallel_degree",
    "parallelism.pp": "pipeline_parallel pipeline_parallel_degree",
    "activation_checkpoint.mode": "type gradient_checkpointing grad_checkpointing",
    "checkpoint.folder": "dir path save_dir checkpoint_dir",
    "checkpoint.interval": "save_every save_steps save_interval checkpoint_interval",
    "checkpoint.keep_last": "keep max keep_latest_k save_total_limit",
    "checkpoint.init_from": "source load load_path initial_load_path pretrained",
    "checkpoint.async_save": "async_mode",
    "validation.windows": "steps iters batches eval_iters",
    "validation.interval": "eval_interval eval_steps eval_every val_every",
    "metrics.log_interval": "interval every steps freq log_every log_freq logging_steps",
    "metrics.wandb": "enable_wandb wandb_log use_wandb",
    "interval": "every steps freq frequency period",
}
# A section whose settings have the names of another one's.
ALIKE = {"transfer": "model"}
# Settings of these names say little without their section.
GENERIC = {"decay", "every", "files", "folder", "interval", "limit", "memory", "mode", "name"}
GENERIC |= {"attention", "path", "size", "source", "start", "steps", "verify"}


def spelled_plainly(name: str) -> str:
    """Return a name without what spellings differ in: case, - and _."""
    return name.replace("-", "_").strip("_").lower()


def ours(name: str) -> list[str]:
    """Return the names here for one of another program, the likeliest first."""
    return [own for own, theirs in SYNONYMS.items() if spelled_plainly(name) in theirs.split()]
