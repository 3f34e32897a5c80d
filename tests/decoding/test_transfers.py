"""Values arrive as they are on the other side, and nobody waits longer for them than for what they are made of."""

from __future__ import annotations

import pytest
import torch

from hf_dsde.utils.transfers import Download, upload

CPU = torch.device("cpu")
VALUES = [([3, 0, -1, 2**40], torch.int64), ([7], torch.int64), ([True, False, True], torch.bool)]


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


def test_vectors_come_back_as_they_were_whatever_their_kind() -> None:
    vectors = [torch.tensor([3, 0, 2**40]), torch.tensor([True, False, True]), torch.tensor([1, 2, 3]).int()]
    block = torch.tensor([[5, 2**41], [0, -1], [7, 8]])
    distances = torch.tensor([[0.5], [-2.0], [1e-9]])
    values, on_host, others = Download(vectors, block, [distances, distances[:, 0]]).wait()
    assert [other.tolist() for other in others] == [distances.tolist(), distances[:, 0].tolist()]
    assert values == [[3, 0, 2**40], [1, 0, 1], [1, 2, 3]]
    assert on_host.tolist() == block.tolist()
    assert on_host.dtype is torch.int64
    assert on_host.device == CPU


def test_what_is_written_later_is_not_downloaded() -> None:
    vector, block, other = torch.tensor([1, 2, 3]), torch.tensor([[4], [5], [6]]), torch.tensor([0.5])
    download = Download([vector], block, [other])
    for tensor in (vector, block, other):
        tensor.zero_()
    values, on_host, others = download.wait()
    assert values == [[1, 2, 3]]
    assert others[0].tolist() == [0.5]
    assert on_host.tolist() == [[4], [5], [6]]


@pytest.mark.gpu
# Said once per process when the mode is switched on.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
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
            vectors = [upload([True, False], device), upload([4, 5], device)]
            download = Download(vectors, upload([6, 7, 8, 9], device).view(2, 2), [upload([0.5], device)])
            values, on_host, others = download.wait()
            assert others[0].tolist() == [0.5]
            assert values == [[1, 0], [4, 5]]
            assert on_host.device == CPU
            assert on_host.tolist() == [[6, 7], [8, 9]]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_many_uploads_to_a_busy_device_keep_their_own_values(self) -> None:
        """Pinned memory is reused: not before the copy out of it has been made."""
        device = torch.device("cuda", 0)
        work = torch.randn(2048, 2048, device=device)
        uploaded = []
        for step in range(200):
            work = (work @ work).clamp_(-1, 1)
            uploaded.append(upload([step, step + 1, -step], device))
        assert torch.stack(uploaded).tolist() == [[step, step + 1, -step] for step in range(200)]

    def test_a_download_does_not_wait_for_what_was_asked_for_after_it(self) -> None:
        device = torch.device("cuda", 0)
        work = torch.randn(4096, 4096, device=device)
        vector = upload([7, 8, 9], device)
        work @ work  # chooses its kernel
        torch.cuda.synchronize()
        download = Download([vector], vector[:, None])
        after = torch.cuda.Event()
        for _ in range(100):
            work = (work @ work).clamp_(-1, 1)
        after.record()
        assert download.wait()[0] == [[7, 8, 9]]
        assert not after.query(), "the host has waited for the products as well"
        torch.cuda.synchronize()

    def test_a_download_holds_what_the_device_wrote_before_it_and_nothing_later(self) -> None:
        device = torch.device("cuda", 0)
        work = torch.randn(2048, 2048, device=device)
        vector = torch.zeros(3, dtype=torch.long, device=device)
        downloads = []
        for step in range(50):
            work = (work @ work).clamp_(-1, 1)
            vector.fill_(step)
            downloads.append(Download([vector, vector + 1], vector.expand(2, 3).T))
        vector.fill_(-1)
        for step, download in enumerate(downloads):
            values, on_host, _ = download.wait()
            assert values == [[step] * 3, [step + 1] * 3]
            assert on_host.tolist() == [[step] * 2] * 3
