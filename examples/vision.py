"""Train ResNet-18 or a small ViT on CIFAR-10 or CIFAR-100 with any rule of MARS, in a plain loop.

The settings are those of the CIFAR runs of the MARS repository: docs/extending.md. Of the weight of
a convolution [out, in, height, width], the matrix rules (mars-m, mars-shampoo, muon) orthogonalise
the matrix [out, in height width]. The other rules work on elements.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmars.core.errors import missing_package
from torchmars.optim import MARS, param_groups

# Learning rates: those of mars-adamw and adamw are the repository's, the others ours to begin with.
RATES = {"mars-adamw": 3e-3, "mars-lion": 3e-4, "mars-shampoo": 2e-2, "mars-m": 3e-3}
RATES |= {"adamw": 6e-4, "lion": 1e-4, "muon": 3e-3}
VECTOR_RATES = dict.fromkeys(("mars-adamw", "mars-lion", "mars-shampoo"), {"lr_1d": 3e-3})
# By classes: bytes before the pixels of an image, the last of them its label; files of the splits.
FILES = {10: (1, "data_batch_*.bin", "test_batch.bin"), 100: (2, "train.bin", "test.bin")}
STATISTICS = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # mean, deviation by channel

PARSER = argparse.ArgumentParser(description="MARS on CIFAR: see docs/extending.md.")
PARSER.add_argument("--data", type=Path, required=True, help="folder of CIFAR's binary files")
PARSER.add_argument("--download", action="store_true", help="fetch it there by torchvision")
PARSER.add_argument("--classes", type=int, choices=FILES, default=10)
PARSER.add_argument("--model", choices=["resnet18", "vit"], default="resnet18")
PARSER.add_argument("--width", type=int, default=64, help="take 192 for vit")
PARSER.add_argument("--rule", choices=RATES, default="mars-adamw")
PARSER.add_argument("--lr", type=float, help="default: one for the rule, not tuned")
PARSER.add_argument("--epochs", type=int, default=200)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution and its norm."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut (He et al. 2016, arXiv 1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3)
        skip = [] if inputs == outputs else [convolution(inputs, outputs, 1, stride)]
        self.shortcut = nn.Sequential(*skip)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet18(classes: int, width: int) -> nn.Module:
    """Return ResNet-18 for small images: the first convolution is 3 x 3, without pooling."""
    layers, inputs = [convolution(3, width, 3), nn.ReLU()], width
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers)


class ViT(nn.Module):
    """A vision transformer of 6 layers on 4 x 4 patches (Dosovitskiy et al. 2021)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, stride=4)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 64, width))
        form = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, **form) for _ in range(6))
        self.blocks = nn.Sequential(*layers, nn.LayerNorm(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.blocks(x).mean(dim=1))


def read_split(folder: Path, classes: int, train: bool, download: bool) -> tuple[Tensor, Tensor]:
    """Return the images [n, 3, 32, 32], as bytes, and the labels [n] of CIFAR's binary files."""
    if download:
        try:
            from torchvision import datasets
        except ImportError:
            PARSER.exit(2, f"error: {missing_package('torchvision', '--download', 'vision')}\n")
        data = getattr(datasets, f"CIFAR{classes}")(str(folder), train=train, download=True)
        return torch.tensor(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets)
    before, *names = FILES[classes]
    files = sorted(folder.glob(names[0] if train else names[1]))
    if not files:
        PARSER.exit(2, f"error: --data {folder} has no {names[not train]}: see --help\n")
    rows = torch.tensor(np.concatenate([np.fromfile(file, np.uint8) for file in files]))
    rows = rows.view(-1, before + 3 * 32 * 32)
    return rows[:, before:].reshape(-1, 3, 32, 32), rows[:, before - 1].long()


def augmented(images: Tensor) -> Tensor:
    """Return each image [n, 3, 32, 32] flipped by chance, and cut at random from a black rim."""
    flip = torch.rand(len(images), 1, 1, 1) < 0.5
    padded = F.pad(torch.where(flip, images.flip(3), images), (4, 4, 4, 4))
    rows, cols = torch.randint(9, (2, len(images), 1)) + torch.arange(32)
    image = torch.arange(len(images))[:, None, None]
    return padded[image, :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)


def normalized(images: Tensor) -> Tensor:
    """Return bytes as floats of mean 0 and deviation 1 for each channel."""
    mean, std = torch.tensor(STATISTICS).view(2, 3, 1, 1)
    return (images.float() / 255 - mean) / std


def main(words: list[str] | None = None) -> None:
    """Train and test the model that the command line asks for."""
    args = PARSER.parse_args(words)
    torch.manual_seed(0)
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    images, labels = read_split(args.data, args.classes, True, args.download)
    test_images, test_labels = read_split(args.data, args.classes, False, args.download)
    model = (resnet18 if args.model == "resnet18" else ViT)(args.classes, args.width)
    rates = {"lr": args.lr or RATES[args.rule]} | VECTOR_RATES.get(args.rule, {})
    optimizer = MARS(param_groups(model, args.rule, weight_decay=5e-4, **rates))
    drop = torch.optim.lr_scheduler.MultiStepLR(optimizer, [args.epochs // 2, args.epochs * 3 // 4])
    for epoch in range(1, args.epochs + 1):
        losses = []
        model.train()
        for index in torch.randperm(len(images)).split(128):
            loss = F.cross_entropy(model(normalized(augmented(images[index]))), labels[index])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        drop.step()
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(normalized(each)) for each in test_images.split(1000)])
        loss, test_loss = torch.stack(losses).mean(), F.cross_entropy(logits, test_labels)
        line = f"epoch {epoch} | loss {loss:.4f} | test loss {test_loss:.4f} | accuracy "
        print(f"{line}{(logits.argmax(1) == test_labels).float().mean():.2%}")


if __name__ == "__main__":
    main()
