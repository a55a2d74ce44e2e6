"""What a terminal shows while a run goes on: progress, loss, how full the tiers are, what the drives do, the waits.

It fits the width that it finds each time it is drawn. Rates and tiers are sampled while a step is under way, so long
steps show life too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from infinity.cli.records import Counters, StepRecord
from infinity.cli.sparks import BLOCKS, PLAIN, Glyphs, bar, sparkline
from infinity.sizes import format_nbytes

_WINDOW_S = 2.0  # rates are means over about this long
_N_LOSSES = 512  # of which the sparkline shows means
_N_TIMED = 20  # steps that the time left is reckoned from
_NARROW, _WIDE = 60, 100  # columns
_TIERS = ("device", "host", "nvme")
_STYLES = {"device": "cyan", "host": "bright_blue", "nvme": "magenta"}


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at a moment."""

    at_s: float
    counters: Counters


class LiveView:
    """A rich renderable. The training thread calls `step`; the thread of the display draws.

    What they share is replaced whole or appended to, never changed in place.

    Args:
        n_steps: how many steps the run is to have.
        counters: gives the engine's counters as they stand, from any thread.
        drives: names of the drives, in the order of their counters.
        now_s: a clock.
    """

    def __init__(
        self,
        n_steps: int,
        counters: Callable[[], Counters],
        drives: Sequence[str] = (),
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._n_steps = n_steps
        self._counters = counters
        self._drives = tuple(drives)
        self._now_s = now_s
        self._begun_s = self._ended_s = now_s()
        self._n_done = 0
        self._last: StepRecord | None = None
        self._losses: deque[float] = deque(maxlen=_N_LOSSES)
        self._seconds: deque[float] = deque(maxlen=_N_TIMED)
        self._samples: deque[Sample] = deque()  # the display's own

    def step(self, record: StepRecord) -> None:
        """A step is over."""
        self._losses.append(record.loss)
        if self._n_done == 1:
            self._seconds.clear()  # the first step fills caches; it says little about the others
        self._seconds.append(record.seconds)
        self._ended_s = self._now_s()
        self._last = record
        self._n_done += 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width - 1, 10)  # the last column is left free: some terminals wrap when it is written
        glyphs = PLAIN if options.ascii_only else BLOCKS
        sample = self._take()
        lines = [self._progress(width, glyphs), *self._loss(width, glyphs)]
        lines += [self._tier(tier, sample.counters, width, glyphs) for tier in self._tiers(sample.counters)]
        lines += [*self._drive_rates(sample), *self._waits(width)]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
            yield line

    # Time ------------------------------------------------------------------------------------------------------

    def _progress(self, width: int, glyphs: Glyphs) -> Text:
        now_s, done = self._now_s(), self._n_done
        share = done / self._n_steps if self._n_steps else 1.0
        left_s = self.left_s(now_s)
        left = "" if left_s is None else f"{clock(left_s)} left"
        before = f"step {done}/{self._n_steps} " if width >= _NARROW else f"{done}/{self._n_steps} "
        after = f" {share:4.0%}"
        if width >= _NARROW:
            after += f"  {clock(now_s - self._begun_s)} gone"
        after += f"  {left}" if left else ""
        room = max(width - len(before) - len(after), 4)
        return Text.assemble(before, (bar(share, room, glyphs), "green"), after)

    def left_s(self, now_s: float) -> float | None:
        """Seconds to the end, as far as the last steps tell; None before the first."""
        seconds = list(self._seconds)
        if not seconds:
            return None
        mean_s = sum(seconds) / len(seconds)
        return max((self._n_steps - self._n_done) * mean_s - min(now_s - self._ended_s, mean_s), 0.0)

    # What the last step gave -----------------------------------------------------------------------------------

    def _loss(self, width: int, glyphs: Glyphs) -> list[Text]:
        record = self._last
        if record is None:
            return [Text("first step: nothing has been read ahead yet", style="dim")]
        before = f"loss {record.loss:.4f} "
        facts = [f"{record.seconds:.3f} s/step", f"{record.tokens_per_second:,.0f} tokens/s"]
        if record.grad_norm is not None:
            facts.append(f"norm {record.grad_norm:.3f}")
        after = "  " + "  ".join(facts)
        if width < _NARROW:
            second = Text("  ".join(facts))
            return [
                Text.assemble(before, (sparkline(list(self._losses), width - len(before), glyphs), "yellow")),
                second,
            ]
        room = min(max(width - len(before) - len(after), 8), 60)
        return [Text.assemble(before, (sparkline(list(self._losses), room, glyphs), "yellow"), after)]

    def _waits(self, width: int) -> list[Text]:
        record = self._last
        if record is None:
            return []
        total_s = record.moved("stall/total_s")
        causes = sorted(record.stalls().items(), key=lambda item: -item[1])
        text = Text(f"waited {total_s / record.seconds:.0%} of the step ({total_s:.2f} s)")
        named = [f"{cause.replace('_', ' ')} {seconds:.2f} s" for cause, seconds in causes if seconds >= 0.005]
        if named:
            text.append(": " + ", ".join(named[: 1 if width < _NARROW else 4]))
        return [text]

    # What is sampled -------------------------------------------------------------------------------------------

    def _take(self) -> Sample:
        """The counters now; older ones are kept for as long as rates need them."""
        sample = Sample(self._now_s(), self._counters())
        while len(self._samples) > 1 and self._samples[1].at_s <= sample.at_s - _WINDOW_S:
            self._samples.popleft()
        self._samples.append(sample)
        return sample

    def _rate(self, name: str) -> float:
        """Growth of a counter per second over the last moments."""
        first, last = self._samples[0], self._samples[-1]
        elapsed_s = last.at_s - first.at_s
        return (last.counters.get(name, 0.0) - first.counters.get(name, 0.0)) / elapsed_s if elapsed_s else 0.0

    def _tiers(self, counters: Counters) -> list[str]:
        """The tiers that this run uses."""
        return [tier for tier in _TIERS if counters.get(f"{tier}/{'capacity' if tier == 'nvme' else 'budget'}_bytes")]

    def _tier(self, tier: str, counters: Counters, width: int, glyphs: Glyphs) -> Text:
        if tier == "nvme":
            limit = counters["nvme/capacity_bytes"]
            used = sum(counters.get(f"nvme/drive{number}/held_bytes", 0.0) for number in range(len(self._drives)))
        else:
            limit, used = counters[f"{tier}/budget_bytes"], counters[f"{tier}/held_bytes"]
        share = used / limit if limit else 0.0
        after = f" {format_nbytes(int(used))} of {format_nbytes(int(limit))}"
        if width >= _WIDE and tier != "nvme":
            after += f", at most {format_nbytes(int(counters.get(f'{tier}/peak_bytes', 0.0)))}"
        room = max(min(width - 7 - len(after), 40), 4)
        return Text.assemble(f"{tier:7}", (bar(share, room, glyphs), _STYLES[tier]), after)

    def _drive_rates(self, sample: Sample) -> list[Text]:
        lines = []
        for number, name in enumerate(self._drives):
            read, write = (self._rate(f"nvme/drive{number}/{way}_bytes") for way in ("read", "write"))
            shown = name if len(name) <= 24 else f"…{name[-23:]}"
            rates = f"read {format_nbytes(int(read))}/s  write {format_nbytes(int(write))}/s"
            lines.append(Text.assemble(f"{shown}  ", rates))
        return lines


def clock(seconds: float) -> str:
    """Seconds as 1:23, 1:02:03 or 2 d 3 h."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
