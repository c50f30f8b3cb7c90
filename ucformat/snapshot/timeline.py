"""Steps as they ran: what the planner learns of them, and what the trace shows."""

from __future__ import annotations

from ucformat.snapshot.copying.device_version import LateOutcome
from ucformat.snapshot.copying.version import Taking
from ucformat.snapshot.planner import Planner
from ucformat.snapshot.schedule.clock import Span, StepClock
from ucformat.snapshot.schedule.replay import Track
from ucformat.snapshot.trace import Trace, gaps


class Timeline:
    """Hands on what clocks measured of each step."""

    def __init__(self, clock: StepClock, trace: Trace, planner: Planner) -> None:
        self._clock, self._trace, self._planner = clock, trace, planner

    def end(self, *, on_host: bool) -> Track:
        """Close the step's record. What the host saw of it counts unless a device tells later."""
        track = self._clock.end()
        if on_host:
            self._note(self._clock.spans, self._clock.began, track)
        self._planner.ended()
        return track

    def measured(self, taking: Taking, outcome: LateOutcome) -> None:
        """A step as the device ran it."""
        track, report = outcome.track, taking.report
        if track is None:
            return
        starts, stops = (outcome.began + track.start).tolist(), (outcome.began + track.stop).tolist()
        self._note([Span(*span) for span in zip(taking.names, starts, stops, strict=False)], outcome.began, track)
        report.exposed_ms, report.step_ms = outcome.exposed_s * 1e3, track.seconds * 1e3
        due = outcome.began + track.seconds
        self._trace.add("wait", [Span("deadline", due, due + outcome.exposed_s)])

    def _note(self, spans: list[Span], began: float, track: Track) -> None:
        self._trace.add("compute", spans)
        self._trace.add("idle", gaps(spans, began, began + track.seconds))
        self._planner.measured(tuple(span.name for span in spans), track)
