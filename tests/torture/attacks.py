"""All attacks of a full campaign, with how often each is tried."""

from __future__ import annotations

from torture.attack import Attack
from torture.commands import CommandAttack
from torture.disk import FullDiskAttack, PermissionAttack, WritersAttack
from torture.folders import FolderAttack, NonsenseAttack
from torture.kills import ForkedKills, PlainKills, TorchrunKills
from torture.operators import SampleAttack, SumAttack, WrongTensorAttack
from torture.readers import ReaderAttack

ATTACKS: tuple[Attack, ...] = (
    ForkedKills(160, 5, 8.0),
    PlainKills(24, 4, 45.0),
    TorchrunKills(16, 2, 75.0),
    ReaderAttack("mnist", 4000, 0.005),
    ReaderAttack("mnist-gzip", 4000, 0.005),
    ReaderAttack("cifar10-binary", 3000, 0.005),
    ReaderAttack("cifar10-python", 5000, 0.005),
    ReaderAttack("cifar10-archive", 4000, 0.006),
    ReaderAttack("png", 4000, 0.008),
    ReaderAttack("png-palette", 3000, 0.008),
    ReaderAttack("jpeg", 3000, 0.008),
    SumAttack(18000, 0.011),
    SampleAttack(6000, 0.003),
    WrongTensorAttack(6000, 0.002),
    FolderAttack(16000, 0.07),
    NonsenseAttack(4000, 0.03),
    CommandAttack(20000, 0.09),
    FullDiskAttack(300, 1.0),
    PermissionAttack(28, 0.6),
    WritersAttack(40, 0.7),
)
