"""What each role of a model gets that takes the learning rates of its base, in lines."""

from collections import Counter
from collections.abc import Iterator

from torchmars.config import ResolvedConfig
from torchmars.config.transfer import shape_fields
from torchmars.core.tables import table
from torchmars.models import Model
from torchmars.models.base import base_of, factors_of
from torchmars.optim import MARS

SMALL = 256  # a narrower base tells less: Yang et al. 2022, arXiv 2203.03466, section 4
OF_LENGTH = (
    "rates are for the batch and the steps that the base was tuned with: they go about with the",
    "root of the batch under Adam (arXiv 2205.10287), and with tokens^-0.32 (arXiv 2603.28743)",
)
HEADINGS = "role", "tensors", "std at the start", "lr", "weight decay", "eps"


def transferred(config: ResolvedConfig, model: Model, optimizer: MARS) -> list[str]:
    """Return what the tensors of each role get: rates as the optimizer has them; none if off."""
    factors = factors_of(model, config.transfer)
    if factors is None:
        return []
    rows: Counter[tuple[str, ...]] = Counter()
    for group in optimizer.param_groups:
        of_group = (f"{group[name]:.4g}" for name in ("lr", "weight_decay", "eps"))
        settings = tuple(of_group)
        for name in group["param_names"]:
            std = model.init_std(name)
            begins = "ones" if std is None else f"{std * factors.std.get(name, 1.0):.4g}"
            rows[group["role"], begins, *settings] += 1
    roles = [(role, str(count), *rest) for (role, *rest), count in rows.items()]
    return [*table([HEADINGS, *roles]), *OF_LENGTH]


def beyond_family(config: ResolvedConfig, model: Model) -> Iterator[str]:
    """Yield a line for each thing in which a model is no larger one of its base's family."""
    if not config.transfer.named:
        return
    base = base_of(model, config.transfer)
    times = model.width / base.width
    if times < 1 or model.n_layer < base.n_layer:
        yield (
            f"transfer: its base is larger (width {base.width}, {base.n_layer} blocks): rates are "
            "shown to hold from small models to large ones: name a smaller base"
        )
    elif times > 1 and base.width < SMALL:
        yield (
            f"transfer: its base is {base.width} wide: rates of one under {SMALL} hold less well: "
            "tune a wider one if you can"
        )
    if model.head_width != base.head_width:
        yield (
            f"transfer: heads are {model.head_width} wide, the base's {base.head_width}: attention "
            "logits are divided for it, but rates hold better where heads keep their width"
        )
    for name in shape_fields({"": model.settings}):
        own, of_base = getattr(model.args, name), getattr(base.args, name)
        wanted = of_base * times if of_base and name in model.settings.grows else of_base
        if name != "n_layer" and own != wanted and None not in (own, of_base):
            yield (
                f"transfer: model.{name} = {own} where the base's {of_base} would be "
                f"{wanted:g} at this width: rates hold less well across other shapes"
            )
