"""When a partition's recordings are computed: after three captures that came out as computed.

They are of sizes that are made up (Note [Lessons] in `pgraph.runtime.lessons`), or else of the program's
own. Of these the first capture may stay the only one, so it is compared when there is a second. Until then
its recording is kept, and stand-ins for its arguments (`pgraph.compute.first`): what was captured holds no
memory of the program's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch

from pgraph import compat
from pgraph.capture.failures import may_pass
from pgraph.compute.compare import ENOUGH, difference
from pgraph.compute.errors import LaunchedOtherwiseError, NotComputableError
from pgraph.compute.evaluate import evaluate
from pgraph.compute.first import First, kept, without_memory
from pgraph.compute.host_memory import mapped
from pgraph.compute.library_call import LibraryCall
from pgraph.compute.pieces import Proved, Tools
from pgraph.compute.script import CallLibrary, LaunchKernel, Script, is_foreign
from pgraph.compute.sites import Sites
from pgraph.compute.skeleton import Latest
from pgraph.compute.trace import traced
from pgraph.drivers.interface import Driver
from pgraph.drivers.operands import HostOperand
from pgraph.template.recording import NodeRecord, Recording
from pgraph.template.template import Slot

__all__ = ["Computer", "result_types"]

log = logging.getLogger(__name__)

_PATIENCE: Final = 8
"""Attempts in a row that come to nothing, after which there is none any more. A size may be tried twice: at
its first call, and before it is captured."""

_AGAIN: Final = 3
"""Times that it is learned anew how kernels are launched."""

_DIFFERENT: Final = 4
"""Samples of one kernel that others are compared with."""

_ALIGNED: Final = 16
"""Bytes. Inductor's code makes copies of inputs that are aligned to less."""


class _ToldError(Exception):
    """Library calls that are not known were told."""


class Computer:
    """Of one partition. Called with its lock held, and with the driver's capture lock but for `covers`.

    Sizes are computed that lie where captures were compared: each number that the code depends on must have
    had this value, or `ENOUGH` others. And the inputs must be aligned as they were.

    Args:
        driver: where the partition is captured.
        code: the partition's code; takes one list and empties it.
        checking: nothing is computed; each further capture is compared with what would have been.

    Attributes:
        latest: what was in the way of the last recording that was tried in vain.
    """

    def __init__(self, driver: Driver, code: Any, *, checking: bool = False) -> None:
        self._driver = driver
        self._code = compat.generated_code(code)
        self._checking = checking
        self._script: Script | None = None
        self._hopeless: str | None = None if self._code is not None else "the code is not Inductor's alone"
        self._samples: dict[int, NodeRecord] = {}  # of launches of generated kernels, by their numbers
        self._alike: dict[int, int] = {}  # for each launch the first one with a sample like its own
        self._firsts: dict[str, list[int]] = {}  # these, by the names of kernels
        self._seen: list[set[int]] = []  # for each number among the arguments: values that were compared
        self._aligned: set[tuple[int, ...]] = set()
        self._compared = self._captures = self._failures = self._again = 0
        self._threads: set[int] = set()  # that have captured: library handles belong to threads
        self._sites = Sites(driver)
        self._settings: dict[Hashable, int] = {}  # each has a number
        self._types: dict[int, Any] = {}  # of results of library calls
        self._latest = Latest()
        self._first: First | None = None  # as long as there was one capture
        self.latest: str | None = None

    @property
    def learning(self) -> bool:
        """Whether too few captures were compared so far for anything to be computed."""
        return self._hopeless is None and self._compared < ENOUGH

    @property
    def reason(self) -> str | None:
        """Why nothing is computed, and never will be."""
        return self._hopeless

    @property
    def after_a_run(self) -> bool:
        """Whether no size may be recorded that has never run: a custom op may make something at its first
        call with a size, and keep it. In a capture that would be ghost memory."""
        return self._script is not None and self._script.foreign

    def covers(self, inputs: Sequence[Any], alignments: Sequence[int]) -> bool:
        """Whether these arguments are computed, by all that is known before it is tried."""
        if self._checking or threading.get_ident() not in self._threads:
            return False
        return self._compared_enough(inputs, alignments)

    def recording(self, inputs: Sequence[Any], alignments: Sequence[int]) -> Proved | None:
        """The recording that a capture of these arguments would make, and its slots; None if that has to be
        captured to be known.
        """
        script = self._script
        if script is None or not self.covers(inputs, alignments):
            return None
        try:
            found = self._evaluated(script, inputs, alignments, self._node)
        except Exception as e:  # whatever it was: a capture does without
            self._failed(e)
            return None
        self._failures, self.latest = 0, None
        self._sites.evaluated()
        return found

    def look_ahead(self, cases: Sequence[tuple[Sequence[Any], Sequence[int]]]) -> None:
        """Record the library calls of several sizes in one capture, as far as they can be told: to begin and
        end one takes as long as the calls of a size.

        Args:
            cases: inputs and their alignments.
        """
        script = self._script
        if script is None or self.learning:
            return
        missing: list[LibraryCall] = []
        try:
            for inputs, alignments in cases:
                with contextlib.suppress(_ToldError):
                    self._evaluated(script, inputs, alignments, self._node, told=missing)
            if missing:
                self._sites.record(missing)
                self._sites.expect(len(cases))
        except Exception as e:  # each size is tried by itself
            log.debug("no calls were recorded ahead: %s: %s", type(e).__name__, str(e))

    def begin(self, inputs: Sequence[Any]) -> bool:
        """Follow the code, at a call of the program's; else that is done when there are two captures.

        Returns:
            Whether there is anything to learn from sizes that have never run.
        """
        if self._checking or self._hopeless is not None or self._captures:
            return False
        try:
            return not self._follow(inputs).foreign
        except Exception as e:
            self._failed(e)
            return False

    def _follow(self, inputs: Sequence[Any]) -> Script:
        if self._script is None:
            assert self._code is not None
            self._script = traced(self._code, inputs, self._driver.device, self._driver.kernel_names)
            self._seen = [set() for _ in self._script.tape.arguments]
        return self._script

    def learn(
        self, recording: Recording, slots: Sequence[Slot], inputs: Sequence[Any], alignments: Sequence[int]
    ) -> None:
        """Compare a capture with what is computed for the same arguments."""
        self._captures += 1
        self._threads.add(threading.get_ident())
        done = not self._checking and self._compared_enough(inputs, alignments)
        copied = min(alignments, default=_ALIGNED) < _ALIGNED
        if self._hopeless is not None or done or copied:
            return
        if self._captures == 1 and self._script is None:
            self._first = kept(recording, slots, inputs, alignments, self._driver.device)
            return
        first, self._first = self._first, None
        try:
            self._compare(recording, slots, inputs, alignments)
            if first is not None and self._hopeless is None and first.settings == compat.library_settings():
                self._compare(first.recording, first.slots, first.inputs, first.alignments)
        except Exception as e:
            self._failed(e)

    def _failed(self, error: Exception) -> None:
        """This size is captured. So are all others, unless they may do better or the failure may pass."""
        log.debug("not computed: %s: %s", type(error).__name__, str(error))  # its frames hold ghosts
        expected = isinstance(error, NotComputableError)
        self.latest = str(error) if expected else f"{type(error).__name__}: {error}"
        self._failures += 1
        anew = isinstance(error, LaunchedOtherwiseError) and self._again < (_AGAIN if self._compared else 1)
        another = (expected and self._compared > 0) or may_pass(error) or anew
        if not another or self._failures >= _PATIENCE:
            self._give_up(self.latest)
        elif anew:  # kernels may have been tuned anew
            self._again += 1
            self._forget()

    def _compare(
        self, recording: Recording, slots: Sequence[Slot], inputs: Sequence[Any], alignments: Sequence[int]
    ) -> None:
        script = self._follow(inputs)

        def node(position: int, event: LaunchKernel, arguments: Sequence[Any]) -> tuple[NodeRecord, Any]:
            if position < len(recording.nodes):
                self._samples.setdefault(event.number, recording.nodes[position])
            made = self._node(position, event, arguments)
            if event.number not in self._alike:
                self._alike[event.number] = self._first_like(event, arguments, made[0])
            return made

        # Each launch is compared with its own sample; later what is served.
        alone = self._compared < ENOUGH
        for attempt in range(2):
            computed = self._evaluated(script, inputs, alignments, node, alone=alone)
            told = self._difference(computed, recording, slots)
            if told is None:
                break
            if not attempt:  # padding that was the same in two captures, perhaps
                self._sites.again()
        if told is not None:
            trusted = self._checking and self._compared >= ENOUGH
            log.log(
                logging.ERROR if trusted else logging.DEBUG,
                "a computed recording is not the captured one: %s",
                told,
            )
            self._give_up(f"a computed recording is not the captured one: {told}")
            return
        self._compared += 1
        for source, seen in zip(script.tape.arguments, self._seen, strict=True):
            seen.add(source.of(inputs))
        self._aligned.add(tuple(alignments))

    def _difference(self, computed: Proved, recording: Recording, slots: Sequence[Slot]) -> str | None:
        padding = self._sites.padding
        told = difference(*computed, recording, slots, padding)
        if told is not None:  # seldom, and the list of what is mapped is long
            told = difference(*computed, recording, slots, padding, mapped())
        return told

    def _give_up(self, reason: str) -> None:
        log.debug("sizes are captured, never computed: %s", reason)
        self._hopeless, self._script, self._first = reason, None, None
        self._samples.clear()
        self._alike.clear()
        self._firsts.clear()
        self._latest = Latest()
        self._sites = Sites(self._driver)

    def _forget(self) -> None:
        """What captures showed holds no longer: learn from the next ones. The code does what it did."""
        for known in (self._samples, self._alike, self._firsts, self._aligned):
            known.clear()
        self._seen = [set() for _ in self._seen]
        self._compared = self._captures = 0
        self._latest = Latest()

    def _compared_enough(self, inputs: Sequence[Any], alignments: Sequence[int]) -> bool:
        if self._compared < ENOUGH or self._script is None or tuple(alignments) not in self._aligned:
            return False
        pairs = zip(self._script.tape.arguments, self._seen, strict=True)
        return all(source.of(inputs) in seen or len(seen) >= ENOUGH for source, seen in pairs)

    def _node(self, position: int, event: LaunchKernel, arguments: Sequence[Any]) -> tuple[NodeRecord, Any]:
        sample = self._samples.get(event.number)
        made = self._driver.kernel_node(event.kernel, sample, arguments) if sample is not None else None
        if made is None:
            other = sample.name if sample is not None and sample.name != event.name else None
            told = f", or {other} was captured in its place" if other else ""
            raise LaunchedOtherwiseError(f"{event.name} is launched in a way that cannot be computed{told}")
        return made

    def _first_like(self, event: LaunchKernel, arguments: Sequence[Any], made: NodeRecord) -> int:
        """The first launch of a kernel whose sample gives this node, too.

        Then it gives the node of this launch for other arguments, too: see `Driver.kernel_node`.
        """
        firsts = self._firsts.setdefault(event.name, [])
        for number in firsts:
            other = self._driver.kernel_node(event.kernel, self._samples[number], arguments)
            if other is not None and other[0] == made:
                return number
        if len(firsts) < _DIFFERENT:
            firsts.append(event.number)
        return event.number

    def _evaluated(
        self,
        script: Script,
        inputs: Sequence[Any],
        alignments: Sequence[int],
        node: Any,
        *,
        alone: bool = False,
        told: list[LibraryCall] | None = None,
    ) -> Proved:
        """What a script gives; library calls that were not known are recorded.

        Args:
            alone: each event is evaluated, however like another one it is.
            told: is given these calls in the place of that.

        Raises:
            NotComputableError: see `evaluate`.
            _ToldError: there are such calls, and they were told.
        """
        settings = self._settings.setdefault(compat.library_settings(), len(self._settings))
        missing: list[LibraryCall] = []
        self._sites.begin()

        def site(event: CallLibrary, arguments: Sequence[Any]) -> Proved | None:
            call = LibraryCall(event, tuple(arguments), settings)
            found = self._sites.get(call)
            if found is None:
                missing.append(call)
            return found

        def record() -> list[Proved | None]:
            if told is not None:
                told.extend(missing)
                raise _ToldError
            self._sites.record(missing, whole=self._checking or self.learning)
            found = [self._sites.get(call) for call in missing]
            missing.clear()
            return found

        sample = None if alone else lambda event: self._alike.get(event.number)
        offsets = script.offsets or self._driver.tells_offsets
        tools = Tools(node, site, self._types, sample, offsets, record, result_types)
        return evaluate(script, inputs, alignments, tools, self._latest)


def result_types(event: CallLibrary, arguments: Sequence[Any]) -> list[Any]:
    """Types of a call's results, as PyTorch tells them for tensors without memory; none if it does not.

    Args:
        arguments: an `Operand` for each tensor of the device, or a value.
    """
    if is_foreign(event.function) or any(isinstance(a, HostOperand | torch.device) for a in arguments):
        return []
    call = LibraryCall(event, tuple(arguments), 0)
    try:
        made = call.run([without_memory(o.dtype, o.size, o.stride, 0) for o in call.operands])
    except Exception:  # an op need not know such tensors
        return []
    types = [getattr(result, "dtype", None) for result in made]
    return types if len(types) == len(event.results) else []
