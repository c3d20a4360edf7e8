import torch

from lit_efficient.models.networks.condition import Condition


def everything(count, length=3, fill=1.0):
    return Condition(
        labels=torch.arange(count),
        text=torch.full((count, length, 4), fill),
        mask=torch.ones(count, length, dtype=torch.bool),
        pooled=torch.full((count, 5), fill),
    )


def test_all_parts_of_a_sample_are_hidden_together():
    null = Condition(torch.tensor([10]), torch.zeros(1, 3, 4), torch.tensor([[True, False, False]]), torch.zeros(1, 5))
    hidden = torch.tensor([True, False, True])
    dropped = everything(3).dropped(hidden, null)
    assert dropped.labels.tolist() == [10, 1, 10]
    assert dropped.text.flatten(1).sum(1).tolist() == [0, 12, 0]
    assert dropped.mask.sum(1).tolist() == [1, 3, 1]
    assert dropped.pooled.sum(1).tolist() == [0, 5, 0]


def test_a_shorter_text_is_padded_with_tokens_that_are_not_seen():
    null = Condition(torch.tensor([10]), torch.full((1, 5, 4), 7.0), None, torch.zeros(1, 5))
    dropped = everything(2).dropped(torch.tensor([True, False]), null)
    assert dropped.text.shape == (2, 5, 4)
    assert dropped.mask.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert (dropped.text[0] == 7).all()
    assert (dropped.text[1, 3:] == 0).all()


def test_one_batch_follows_another_and_one_sample_stands_for_many():
    both = everything(2).followed_by(everything(1, fill=3.0).repeated(2))
    assert both.labels.tolist() == [0, 1, 0, 0]
    assert both.pooled[:, 0].tolist() == [1, 1, 3, 3]
    assert both.parts == {"labels", "text", "pooled"}
    assert Condition(labels=torch.arange(2)).parts == {"labels"}


def test_sizes_stay_with_their_samples_whatever_is_hidden():
    sizes = torch.arange(12.0).view(2, 6)
    known = Condition(text=torch.ones(2, 3, 4), sizes=sizes)
    null = Condition(text=torch.zeros(1, 5, 4))
    assert torch.equal(known.dropped(torch.tensor([True, False]), null).sizes, sizes)
    assert torch.equal(known.followed_by(null.repeated(2)).sizes, torch.cat([sizes, sizes]))
    assert known.parts == {"text"}
