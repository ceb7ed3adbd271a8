"""Exact mode: whose gradients correct."""

from torch.nn import functional as F

from tests.support.order import place_of_sample
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tables, train_here, write_text
from torchmars.models import build_model

STEPS, BATCH = 4, 16


def compared(tables):
    """Train, and return how far each gradient that corrects is from a plain model's, as a part."""
    apart = []

    def watch(trainer):
        optimizer, loader, config = trainer.optimizer, trainer.loader, trainer.config
        look_ahead = optimizer.look_ahead

        def ahead():
            """Take the gradients of the batch after the one that the step takes."""
            first, lengths = trainer.state.position, loader.windows.lengths
            places = [
                place_of_sample(sample, loader.shares, lengths, config.run.seed)
                for sample in range(first, first + BATCH)
            ]
            plain = build_model(config.model, trainer.model.whole.vocab_rows, 32)
            plain.load_state_dict(trainer.model.weights, strict=False)
            tokens = loader.windows.batch(places)
            logits = plain.head(plain(tokens[:, :-1]))
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            for name, wanted in plain.named_parameters():
                error = (trainer.model.weights[name].grad - wanted.grad).norm()
                apart.append(float(error / wanted.grad.norm()))
            look_ahead()

        optimizer.look_ahead = ahead

    train_here(tables, change=watch)
    return apart


def test_the_gradient_of_the_next_batch_corrects(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(
        tmp_path,
        training={"steps": STEPS, "microbatch_size": 4, "dtype": "float32"},
        optimizer={"name": "mars-m", "mode": "exact", "matrix_dtype": "float32"},
    )
    [apart] = run_ranks(compared, 1, tables)
    assert max(apart) < 1e-5 and len(apart) > 2 * STEPS
