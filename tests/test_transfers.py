"""Host values arrive on a device as they are, and nobody waits for them."""

from __future__ import annotations

import pytest
import torch

from hf_dsde.transfers import upload

CPU = torch.device("cpu")
VALUES = [
    ([3, 0, -1, 2**40], torch.int64),
    ([7], torch.int64),
    ([True, False, True], torch.bool),
]


@pytest.mark.parametrize(("values", "dtype"), VALUES, ids=str)
def test_values_and_their_kind_are_kept(values: list[int], dtype: torch.dtype) -> None:
    tensor = upload(values, CPU)
    assert tensor.dtype is dtype
    assert tensor.shape == (len(values),)
    assert tensor.tolist() == values
    assert tensor.device == CPU


def test_lists_that_change_later_do_not_matter() -> None:
    values = [1, 2, 3]
    tensor = upload(values, CPU)
    values[0] = 9
    assert tensor.tolist() == [1, 2, 3]


def test_a_tensor_of_a_cpu_is_not_pinned() -> None:
    """Pinning needs a CUDA driver, which a machine without a GPU has not."""
    assert not upload([1, 2], CPU).is_pinned()


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize(("values", "dtype"), VALUES, ids=str)
    def test_values_and_their_kind_are_kept(self, values: list[int], dtype: torch.dtype) -> None:
        tensor = upload(values, torch.device("cuda", 0))
        assert tensor.device == torch.device("cuda", 0)
        assert tensor.dtype is dtype
        assert tensor.tolist() == values

    def test_the_host_does_not_wait_for_the_device(self) -> None:
        device = torch.device("cuda", 0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            upload([1, 2, 3], device)
            upload([True, False], device)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_many_uploads_behind_a_busy_device_keep_their_own_values(self) -> None:
        """Pinned memory is reused: not before the copy out of it has been made."""
        device = torch.device("cuda", 0)
        work = torch.randn(2048, 2048, device=device)
        uploaded = []
        for step in range(200):
            work = (work @ work).clamp_(-1, 1)
            uploaded.append(upload([step, step + 1, -step], device))
        assert torch.stack(uploaded).tolist() == [[step, step + 1, -step] for step in range(200)]
