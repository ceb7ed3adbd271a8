"""torchmars from Python, cell by cell: train, look, load, sample, measure, plan.

    python examples/notebook.py

Editors that know `# %%` run it cell by cell, as a notebook. It takes two minutes on two CPU cores.
"""

# %% Train the quickstart with a few settings of our own. Called again it goes on, or is done.
import torchmars

run = torchmars.run_training(
    "quickstart.toml",
    run={"name": "notebook"},
    training={"steps": 200},
    optimizer={"name": "mars-m", "lr": 2e-2},
)

# %% Its curves, as arrays of numpy.
loss = run.series["train/loss"]
print(f"loss {loss.values[0]:.3f} in step {loss.steps[0]}, {loss.values[-1]:.3f} at the end")

# %% The same curves of any run, also of one that still trains.
validation = torchmars.read_run(run.folder).series["validation/loss"]
print("validation loss", dict(zip(validation.steps.tolist(), validation.values.round(3).tolist())))

# %% Sample from it. Several prompts are continued together.
model = torchmars.load(run.folder)
print(model.generate("def ", max_tokens=100, temperature=0.6))
print(model.generate(["import ", "class "], max_tokens=20, temperature=0))

# %% What the model expects after a text: its five likeliest tokens.
logits = model.logits("for number in ran")
for token in logits[-1].topk(5).indices.tolist():
    print(repr(model.tokenizer.decode([token])), f"{logits[-1].softmax(-1)[token]:.3f}")

# %% Its loss on a text: this one.
print(model.evaluate(text=__file__))

# %% The same model on eight GPUs, before one has them.
plan = torchmars.make_plan("quickstart.toml", world_size=8)
print(f"{plan.peak / 2**20:.1f} MiB at the peak of the fullest rank")
print(plan)
