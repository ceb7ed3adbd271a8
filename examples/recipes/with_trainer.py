import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from torchmars.optim import MARS, param_groups

sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
window = {"input_ids": torch.arange(32), "labels": torch.arange(32)}
optimizer = MARS(param_groups(model, "mars-adamw", lr=2e-2), max_grad_norm=1.0)
# The Trainer clips unless its own max_grad_norm is 0. Its learning_rate is not used.
settings = TrainingArguments(max_steps=30, max_grad_norm=0, report_to="none", save_strategy="no")
trainer = Trainer(model, settings, train_dataset=[window] * 64, optimizers=(optimizer, None))
trainer.train()
batch = {name: ids[None].to(model.device) for name, ids in window.items()}
print("loss", model.eval()(**batch).loss.item())
