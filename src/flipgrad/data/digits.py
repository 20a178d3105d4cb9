"""The 8x8 handwritten digits that come with scikit-learn: 1,797 images, no download."""

from __future__ import annotations

import torch

from flipgrad.data.sets import DataSet, Split

TEST_IMAGES = 360


def digits() -> DataSet:
    """1,437 training and 360 test images [1, 8, 8] with values in [-1, 1]; the split is stratified and always the same.

    Alpaydin, Kaynak. Optical Recognition of Handwritten Digits. UCI Machine Learning Repository, 1998.

    >>> len(digits().train), len(digits().test)
    (1437, 360)
    """
    # Its import takes half a second, which other data sets need not wait for.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    raw = load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.tensor(raw.target)
    train, test = train_test_split(range(len(y)), test_size=TEST_IMAGES, stratify=raw.target, random_state=0)
    return DataSet("digits", Split(x[train], y[train]), Split(x[test], y[test]), classes=10, background=-1.0)
