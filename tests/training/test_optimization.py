"""Learning rates against transformers' schedules."""

import pytest
import torch

from bert_fast.training.optimization import learning_rate_schedule, warmup_steps

NAMES = {"linear": "linear", "cosine": "cosine", "polynomial": "polynomial", "constant": "constant_with_warmup"}


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize(("num_steps", "warmup"), [(20, 0), (20, 5), (20, 0.25), (8, 7), (1, 0), (1000, 0.1)])
def test_as_transformers(schedule, num_steps, warmup) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    ramp = warmup_steps(warmup, num_steps)
    options = {"scheduler_specific_kwargs": {"power": 2.0, "lr_end": 0.0}} if schedule == "polynomial" else {}
    theirs = optimization.get_scheduler(NAMES[schedule], optimizer, ramp, num_steps, **options)
    ours = learning_rate_schedule(schedule, 0.3, num_steps, warmup, power=2.0)
    for step in range(num_steps):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


def test_warmup_is_a_number_of_steps_or_a_share() -> None:
    assert [warmup_steps(warmup, 1000) for warmup in (0, 0.1, 0.0001, 1, 17)] == [0, 100, 1, 1, 17]
