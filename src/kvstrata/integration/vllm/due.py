"""Which requests may have completed a block in a step, without looking at every one of them."""

import heapq

__all__ = ["DueRequests"]


class DueRequests:
    """Requests that are to be looked at when they may have so many tokens more than now.

    Time is counted in tokens: a step takes as many as its longest share. No request gets further
    than that in a step, so none is looked at too late, and one that decodes once a block.
    """

    def __init__(self) -> None:
        self._now = 0
        self._due: dict[str, int] = {}
        self._queue: list[tuple[int, str]] = []  # with entries that do not count any more

    def look(self, request_id: str, in_tokens: int = 0) -> None:
        """Look at *request_id* in the step that brings it *in_tokens*, and not before."""
        due = self._due[request_id] = self._now + in_tokens
        heapq.heappush(self._queue, (due, request_id))

    def take(self, longest: int) -> list[str]:
        """In a step that gives *longest* tokens to a request: those to be looked at, once."""
        self._now += longest
        found = []
        while self._queue and self._queue[0][0] <= self._now:
            due, request_id = heapq.heappop(self._queue)
            if self._due.get(request_id) == due:
                del self._due[request_id]
                found.append(request_id)
        return found

    def forget(self, request_id: str) -> None:
        self._due.pop(request_id, None)
