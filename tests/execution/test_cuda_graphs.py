"""What is recorded is kept by recency, and replays on the device as the body would run."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_dsde.execution import cuda_graphs as graphs
from hf_dsde.execution.cuda_graphs import CapturedPasses, CudaCapture

CUDA = torch.device("cuda", 0)


def fail() -> str:
    raise RuntimeError("this cannot be recorded")


class TestCapturedPasses:
    def test_a_pass_is_recorded_once(self) -> None:
        passes: CapturedPasses[str] = CapturedPasses(4)
        assert passes.get("a", lambda: "first") == "first"
        assert passes.get("a", fail) == "first"
        assert (len(passes), passes.captures) == (1, 1)

    def test_the_one_used_least_recently_goes(self) -> None:
        passes: CapturedPasses[str] = CapturedPasses(2)
        for key in ("a", "b", "a", "c"):
            passes.get(key, lambda key=key: key)
        assert passes.entries() == ["a", "c"]
        assert passes.get("a", fail) == "a"

    def test_another_entry_does_until_that_has_cost_as_much_as_recording(self) -> None:
        passes = CapturedPasses[str](4)
        assert [passes.lend("small", 3, 10) for _ in range(5)] == [True] * 3 + [False] * 2
        assert passes.lend("small", 1, 10), "what is cheaper still does"
        assert not passes.lend("small", 1, 10)
        assert [passes.lend("tiny", 0, 10) for _ in range(50)] == [True] * 50
        assert passes.lend("other", 10, 10), "each is charged for by itself"

    def test_whether_another_would_do_is_asked_for_nothing(self) -> None:
        passes = CapturedPasses[str](4)
        assert [passes.lend("small", 6, 10, used=False) for _ in range(5)] == [True] * 5
        assert passes.lend("small", 6, 10)
        assert not passes.lend("small", 6, 10, used=False)

    def test_the_oldest_is_gone_before_the_next_is_recorded(self) -> None:
        """Both at once might not fit on the device."""
        passes: CapturedPasses[int] = CapturedPasses(1)
        held = [passes.get(key, lambda: len(passes)) for key in ("a", "b", "c")]
        assert held == [0, 0, 0]

    def test_time_is_counted_of_recording_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times = iter([1.0, 3.5, 10.0, 10.25])
        monkeypatch.setattr(graphs.time, "perf_counter", lambda: next(times))
        passes: CapturedPasses[str] = CapturedPasses(4)
        passes.get("a", lambda: "a")
        passes.get("a", fail)
        assert passes.seconds == 2.5
        passes.get("b", lambda: "b")
        assert passes.seconds == 2.75

    def test_what_was_thrown_away_stays_counted(self) -> None:
        passes: CapturedPasses[str] = CapturedPasses(1)
        for key in ("a", "b", "a"):
            passes.get(key, lambda key=key: key)
        passes.clear()
        assert (len(passes), passes.entries(), passes.captures) == (0, [], 3)
        assert passes.seconds > 0
        assert passes.get("a", lambda: "again") == "again"

    def test_a_recording_that_fails_leaves_nothing_behind(self) -> None:
        passes: CapturedPasses[str] = CapturedPasses(2)
        passes.get("a", lambda: "a")
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            passes.get("b", fail)
        assert (passes.entries(), passes.captures) == (["a"], 1)
        assert passes.get("b", lambda: "b") == "b"
        assert passes.entries() == ["a", "b"]

    @given(keys=st.lists(st.integers(0, 6), max_size=40), limit=st.integers(1, 5))
    def test_any_order_of_uses(self, keys: list[int], limit: int) -> None:
        passes: CapturedPasses[tuple[int, int]] = CapturedPasses(limit)
        kept: OrderedDict[int, tuple[int, int]] = OrderedDict()
        recorded = 0
        for use, key in enumerate(keys):
            entry = passes.get(key, lambda use=use, key=key: (key, use))
            if key in kept:
                kept.move_to_end(key)
            else:
                recorded += 1
                kept[key] = (key, use)
                while len(kept) > limit:
                    kept.popitem(last=False)
            assert entry == kept[key]
        assert passes.entries() == list(kept.values())
        assert passes.captures == recorded


def check_device_works() -> None:
    """Compute, allocate, draw and record: what a failed recording could have broken."""
    x = torch.arange(1000.0, device=CUDA)
    assert float(x.sum()) == 499_500.0
    torch.manual_seed(5)
    first = torch.rand(8, device=CUDA)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(8, device=CUDA), first)
    assert int(torch.multinomial(torch.tensor([0.0, 1.0], device=CUDA), 1)) == 1
    replay = CudaCapture(CUDA)(lambda: x * 2)
    x.add_(1)
    replay()
    assert torch.equal(replay.output, (torch.arange(1000.0, device=CUDA) + 1) * 2)
    torch.cuda.synchronize()


@pytest.mark.gpu
class TestCudaCapture:
    @pytest.fixture(autouse=True)
    def no_gradients(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def test_a_replay_sees_what_its_inputs_hold_by_then(self) -> None:
        weight = torch.randn(64, 64, device=CUDA)
        x = torch.randn(8, 64, device=CUDA)
        replay = CudaCapture(CUDA)(lambda: (x @ weight).relu().sum(dim=1))
        output = replay.output
        for _ in range(5):
            x.copy_(torch.randn(8, 64, device=CUDA))
            replay()
            assert replay.output is output
            torch.testing.assert_close(output, (x @ weight).relu().sum(dim=1))

    def test_a_replay_follows_weights_that_change_in_place(self) -> None:
        layer = torch.nn.Linear(16, 16, device=CUDA)
        x = torch.randn(4, 16, device=CUDA)
        replay = CudaCapture(CUDA)(lambda: layer(x))
        layer.weight.mul_(-2)
        replay()
        torch.testing.assert_close(replay.output, layer(x))

    def test_a_body_may_write_into_its_own_tensors(self) -> None:
        """As a pass writes into the cache: once to warm up, never while it is recorded, once per replay."""
        total = torch.zeros(3, device=CUDA)
        step = torch.ones(3, device=CUDA)
        replay = CudaCapture(CUDA)(lambda: total.add_(step) * 1)
        before = total.clone()
        step.fill_(10)
        replay()
        replay()
        assert torch.equal(total, before + 20)
        assert torch.equal(replay.output, total)

    def test_graphs_of_one_pool_do_not_disturb_each_other(self) -> None:
        """Replayed in turns, each one's output read before the next is replayed."""
        capture = CudaCapture(CUDA)
        weights = [torch.randn(256, 256, device=CUDA) for _ in range(3)]
        inputs = [torch.randn(rows, 256, device=CUDA) for rows in (4, 64, 512)]

        def body(number: int) -> torch.Tensor:
            hidden = inputs[number] @ weights[number]
            return (hidden.exp() / (1 + hidden.exp())) @ weights[number].T

        replays = [capture(lambda number=number: body(number)) for number in range(3)]
        for number in (0, 1, 2, 1, 0, 2, 2, 0, 1):
            inputs[number].copy_(torch.randn_like(inputs[number]))
            replays[number]()
            torch.testing.assert_close(replays[number].output.clone(), body(number), rtol=1e-4, atol=1e-3)

    def test_a_graph_that_is_thrown_away_takes_nothing_from_the_others(self) -> None:
        capture = CudaCapture(CUDA)
        x = torch.randn(128, 128, device=CUDA)
        kept, thrown_away = capture(lambda: x @ x), capture(lambda: (x + 1) @ x)
        thrown_away()
        del thrown_away
        later = capture(lambda: (x - 1) @ x)
        for _ in range(3):
            x.copy_(torch.randn(128, 128, device=CUDA))
            kept()
            torch.testing.assert_close(kept.output.clone(), x @ x, rtol=1e-4, atol=1e-3)
            later()
            torch.testing.assert_close(later.output.clone(), (x - 1) @ x, rtol=1e-4, atol=1e-3)

    @pytest.mark.parametrize("waits", ["item", "nonzero", "synchronize"])
    def test_a_body_that_waits_for_the_device_is_refused_and_breaks_nothing(self, waits: str) -> None:
        x = torch.ones(4, device=CUDA)

        def body() -> torch.Tensor:
            y = x + 1
            if waits == "item":
                return y * float(y[0])
            if waits == "nonzero":
                return y[y > 1]
            torch.cuda.synchronize()
            return y

        with pytest.raises(RuntimeError):  # an AcceleratorError is one
            CudaCapture(CUDA)(body)
        check_device_works()

    @pytest.mark.parametrize("waits_first", [False, True])
    def test_a_body_runs_twice_unless_it_waits_the_first_time(self, waits_first: bool) -> None:
        x = torch.ones(4, device=CUDA)
        runs: list[float] = []

        def body() -> torch.Tensor:
            runs.append(float(x[0]) if waits_first and not runs else 0.0)
            return x + 1

        replay = CudaCapture(CUDA)(body)
        assert len(runs) == (3 if waits_first else 2)
        x.fill_(3)
        replay()
        assert replay.output.tolist() == [4.0] * 4

    def test_a_body_that_raises_breaks_nothing(self) -> None:
        x = torch.ones(4, device=CUDA)
        calls = []

        def body() -> torch.Tensor:
            calls.append(x + 1)
            if len(calls) > 1:  # warming up went well
                raise LookupError("no such layer")
            return calls[0]

        with pytest.raises(LookupError, match="no such layer"):
            CudaCapture(CUDA)(body)
        check_device_works()

    def test_a_failed_recording_leaves_the_others_of_its_pool_alone(self) -> None:
        capture = CudaCapture(CUDA)
        x = torch.randn(32, 32, device=CUDA)
        replay = capture(lambda: x @ x)
        with pytest.raises(RuntimeError):
            capture(lambda: x[x > 0])
        x.copy_(torch.randn(32, 32, device=CUDA))
        replay()
        torch.testing.assert_close(replay.output.clone(), x @ x, rtol=1e-4, atol=1e-3)

    def test_a_recording_waits_for_what_its_inputs_are_made_of(self) -> None:
        """Warming up runs on a stream of its own, after everything asked for before."""
        work = torch.randn(2048, 2048, device=CUDA)
        for _ in range(50):
            work = (work @ work).clamp_(-1, 1)
        seen = torch.zeros((), device=CUDA)
        CudaCapture(CUDA)(lambda: seen.copy_(work.abs().amax()) * 1)
        assert float(seen) == float(work.abs().amax())


def test_what_a_failed_body_has_launched_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on without recording may free what it works on."""
    waits: list[tuple[object, object]] = []

    class Stream:
        def __init__(self, *_: object) -> None: ...

        def wait_stream(self, other: object) -> None:
            waits.append((self, other))

    current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    capture = CudaCapture(CUDA)
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        capture(fail)  # type: ignore[arg-type]
    assert waits == [(capture._stream, current), (current, capture._stream)]


WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "branch": lambda x: bool((x > 0).any()),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64)),
    "counts": lambda x: torch.bincount(x.abs().long()),
}


class TestNoWaiting:
    @pytest.mark.parametrize("body", WAITING.values(), ids=WAITING)
    def test_operations_that_wait_raise(self, body: Callable[[torch.Tensor], Any]) -> None:
        x = torch.randn(4)
        body(x)
        with graphs.NoWaiting(), pytest.raises(RuntimeError, match="waits for the device"):
            body(x)

    def test_others_do_not(self) -> None:
        x = torch.randn(4)
        with graphs.NoWaiting():
            x[x > 0] = 1.0
            torch.where(x > 0, x, 0.0)
            x[torch.tensor([0, 2])].repeat_interleave(torch.ones(2, dtype=torch.int64), output_size=2)

    def test_only_this_thread_is_held_to_it(self) -> None:
        seen: list[float] = []
        with graphs.NoWaiting():
            thread = threading.Thread(target=lambda: seen.append(torch.ones(1).item()))
            thread.start()
            thread.join()
        assert seen == [1.0]


class TestWarmUp:
    """What is run before a capture; there is no device, and capturing runs the body."""

    @pytest.fixture
    def capture(self, monkeypatch: pytest.MonkeyPatch) -> CudaCapture:
        for name in ("Stream", "graph_pool_handle", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: MagicMock())
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
        monkeypatch.setattr(graphs, "_waiting_raises", nullcontext)
        monkeypatch.setattr(CudaCapture, "_record", lambda _, body: graphs.CudaReplay(MagicMock(), body()))
        return CudaCapture(CUDA)

    def test_a_shorter_body_is_run_in_the_bodys_place(self, capture: CudaCapture) -> None:
        calls: list[str] = []
        capture(lambda: calls.append("whole"), lambda: calls.append("short"))
        assert calls == ["short", "whole"]
        capture(lambda: calls.append("whole"))
        assert calls == ["short", "whole", "whole", "whole"]

    def test_it_may_not_wait_either(self, capture: CudaCapture) -> None:
        x = torch.ones(3)
        with pytest.raises(RuntimeError, match="waits for the device"):
            capture(lambda: x + 1, lambda: x.sum().item())

    def test_where_it_leaves_something_out_the_body_is_run(self, capture: CudaCapture) -> None:
        calls: list[str] = []

        def whole() -> None:
            calls.append("whole")
            if len(calls) == 2:
                raise RuntimeError("operation not permitted when stream is capturing")

        capture(whole, lambda: calls.append("short"))
        assert calls == ["short", "whole", "whole", "whole"]

    def test_what_cannot_be_recorded_is_tried_twice_at_most(self, capture: CudaCapture) -> None:
        calls: list[str] = []
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            capture(fail, lambda: calls.append("short"))
        assert calls == ["short"]

    def test_memory_that_ran_out_is_no_reason_to_try_again(self, capture: CudaCapture) -> None:
        calls: list[str] = []

        def full() -> None:
            calls.append("whole")
            raise torch.OutOfMemoryError("CUDA out of memory.")

        with pytest.raises(torch.OutOfMemoryError):
            capture(full, lambda: calls.append("short"))
        assert calls == ["short", "whole"]
