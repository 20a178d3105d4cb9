import torch

from flipgrad.data import Split, digits, shift


def test_digits_are_stratified_scaled_and_always_the_same():
    data, again = digits(), digits()
    assert data.train.x.shape == (1437, 1, 8, 8)
    assert data.test.x.shape == (360, 1, 8, 8)
    assert data.train.x.min() == data.background == -1
    assert data.train.x.max() == 1
    assert torch.equal(data.test.x, again.test.x)
    counts = torch.bincount(data.test.y, minlength=data.classes)
    assert counts.min() >= 34
    assert counts.max() <= 38


def test_digits_test_images_are_not_among_the_training_images():
    data = digits()
    seen = {image.numpy().tobytes() for image in data.train.x}
    assert not any(image.numpy().tobytes() in seen for image in data.test.x)


def test_batches_cover_every_example_once_in_an_order_that_the_seed_decides():
    split = Split(torch.arange(10.0), torch.arange(10))

    def order(seed):
        return torch.cat([b.y for b in split.batches(4, generator=torch.Generator().manual_seed(seed))])

    assert [len(b) for b in split.batches(4)] == [4, 4, 2]
    assert torch.equal(torch.cat([b.y for b in split.batches(4)]), split.y)
    assert torch.equal(order(0).sort().values, split.y)
    assert torch.equal(order(0), order(0))
    assert not torch.equal(order(0), order(1))
    assert all(torch.equal(b.x, b.y.float()) for b in split.batches(3, generator=torch.Generator().manual_seed(0)))


def test_shift_moves_whole_images_by_every_offset_and_fills_with_the_background():
    images = torch.arange(1.0, 13.0).reshape(1, 1, 3, 4).repeat(400, 2, 1, 1)
    moved = shift(images, 1, -7.0, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(images[:1], (1, 1, 1, 1), value=-7.0)
    crops = {padded[0, :, r : r + 3, c : c + 4].numpy().tobytes() for r in range(3) for c in range(3)}
    assert moved.shape == images.shape
    # All nine offsets appear, with 400 draws missing one has probability 9 * (8/9)**400 < 1e-19.
    assert {image.contiguous().numpy().tobytes() for image in moved} == crops
    assert torch.equal(shift(images, 0, -7.0), images)
