"""One file per data set, or per family of them; importing this registers all."""

from infssm.data.sets import cifar100, digits, folders, speech, synthetic, text, waves

__all__ = ["cifar100", "digits", "folders", "speech", "synthetic", "text", "waves"]
