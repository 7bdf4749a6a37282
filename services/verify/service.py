"""The verify service: one thread that runs target steps for the sessions of all streams."""

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from services.engine.transfer import to_block
from services.speculation.budget import Offer
from services.telemetry.spans import Sink, Trace, unix_ns
from services.types.configuration import VerifyLimits
from services.types.errors import ErrorCode, WealdError, incompatible
from services.types.messages import (
    Close,
    Failure,
    FeatureBlock,
    Features,
    Load,
    Open,
    Proposal,
    Proposals,
    Replies,
    Reply,
    Request,
    Response,
    StepTimings,
)
from services.types.outcome import Outcome
from services.verify.grammar import Grammar
from services.verify.scheduler import NO_TREE, Link, Scheduler, Seat, Step
from services.verify.tracing import spans_of, traced
from services.verify.verifier import Stepped, Verifier
from services.verify.warmup import warm_up

BEAT_S = 1.0
"""An idle service looks after its pages and its ranks this often, in seconds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The grammar of a session that waits for it, or why there is none."""

    seat: Seat
    grammar: Grammar | WealdError


class VerifyService:
    """Owns the verifier: everything happens in its thread; `submit` hands in what the streams bring."""

    def __init__(
        self, verifier: Verifier, limits: VerifyLimits, fingerprint: bytes, sink: Sink | None = None
    ) -> None:
        """Serve a verifier; spans of sessions that are traced go to `sink`.

        Raises:
            WealdError: `INVALID_ARGUMENT` when its pages cannot hold even one session of full length.
        """
        self.verifier = verifier
        self.limits = limits
        self.fingerprint = fingerprint
        self._sink = sink
        self.draining = False
        """Whether this replica goes away: it takes no new sessions."""
        self.loop_lag_ns = 0
        self.failed: WealdError | None = None
        """Why the service ended by itself."""
        self.step_began: float | None = None
        """When the present step began, `time.monotonic()`; None between steps."""
        self._scheduler = Scheduler(verifier, limits)
        self._inbox: queue.SimpleQueue[tuple[Link, Request | None, float] | _Prepared] = queue.SimpleQueue()
        # Compiling a schema can take seconds, in which steps go on.
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._thread = threading.Thread(target=self._run, name="verify", daemon=True)
        self._beat = 0.0
        self._stopped = threading.Event()
        self._ended: Callable[[], object] = lambda: None
        pool = verifier.pool
        needed = -(-verifier.max_model_len // pool.page_size)
        if pool.num_pages < needed:
            raise WealdError(
                ErrorCode.INVALID_ARGUMENT,
                f"the KV cache holds {pool.num_pages * pool.page_size} tokens and one session can have "
                f"{verifier.max_model_len}; give --kv-cache-memory more, or lower --max-model-len",
            )

    def start(self, ended: Callable[[], object]) -> None:
        """Begin serving; `ended` is called, in the service's thread, when it ends by itself."""
        self._ended = ended
        self._thread.start()

    def submit(self, link: Link, request: Request | None) -> None:
        """Hand in what a stream brought, from any thread; None when the stream has ended."""
        self._inbox.put((link, request, time.monotonic()))

    def drain(self, timeout_s: float) -> bool:
        """Refuse new sessions and wait for the running ones to end or leave; whether all did in time."""
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self._attended() and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._attended()

    def stop(self) -> None:
        """End the thread after its present step."""
        self._stopped.set()
        self._thread.join()
        self._compiler.shutdown(cancel_futures=True)

    def warm_up(self) -> None:
        """Measure what steps take, before the service starts."""
        warm_up(self.verifier, self._scheduler.budget.cost, self.limits.max_num_batched_tokens)

    def cost(self) -> dict[int, float]:
        """T(N): seconds of a step, by the tokens in it."""
        return dict(self._scheduler.budget.cost.curve())

    def rate(self) -> float:
        """λ: what a second is worth, in tokens."""
        return self._scheduler.budget.rate

    def load(self) -> Load:
        """How busy the service is."""
        scheduler = self._scheduler
        return Load(len(scheduler), len(scheduler.waiting), self.verifier.pool.free_pages)

    def counters(self) -> dict[str, int]:
        """Since the start: steps, trees verified, stale and missed, preemptions, prefix hits, and so on.

        Of the nanoseconds in steps (`step_ns`: forming, computing, replying) those not in the target's
        forward (`forward_ns`) are what the model waits for Python; `loop_lag_ns` is the longest that the
        event loop was late, as it would be if it waited for the model.
        """
        verifier = self.verifier
        return dict(self._scheduler.counters) | {
            "tokens_forwarded": verifier.tokens_forwarded,
            "tokens_prefilled": verifier.tokens_prefilled,
            "loop_lag_ns": self.loop_lag_ns,
        }

    def _attended(self) -> bool:
        """Whether a session has a drafter; those that are parked have nobody to finish for."""
        return any(seat.link for seat in list(self._scheduler.seats.values()))

    def _run(self) -> None:
        try:
            step: Step | None = None
            while not self._stopped.is_set():
                now = time.monotonic()
                self._receive(0.0 if step else min(BEAT_S, self._scheduler.patience(now)))
                began = time.perf_counter_ns()
                step = self._scheduler.form(time.monotonic())
                if step:
                    self.step_began = time.monotonic()
                    self._serve(step)
                    self.step_began = None
                    self._scheduler.counters["steps"] += 1
                    self._scheduler.counters["step_ns"] += time.perf_counter_ns() - began
                if now > self._beat + BEAT_S:
                    self._beat = now
                    self._look_after(now)
        except Exception as error:
            _log.exception("the verify service ends")
            self.failed = error if isinstance(error, WealdError) else _internal("the target step")
            self._end(list(self._scheduler.seats.values()), self.failed)
            self._ended()

    def _receive(self, patience_s: float) -> None:
        """Take in everything that has arrived; wait for the first only so long."""
        try:
            item = self._inbox.get(timeout=patience_s) if patience_s else self._inbox.get_nowait()
            while True:
                if isinstance(item, _Prepared):
                    self._constrain(item)
                else:
                    self._take(*item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, link: Link, request: Request | None, now: float) -> None:
        match request:
            case Open():
                self._open(link, request)
            case Proposals():
                for proposal in request.proposals:
                    self._offer(link, proposal, now)
            case Close():
                seat = self._scheduler.seats.get(request.session)
                if seat and seat.request.epoch <= request.epoch:
                    self._end([seat], None)
            case None:
                lost = [seat for seat in self._scheduler.seats.values() if seat.link is link]
                self._end([seat for seat in lost if seat in self._scheduler.waiting], None)
                for seat in lost:
                    seat.link, seat.expires = None, now + self.limits.expiry_s

    def _open(self, link: Link, request: Open) -> None:
        session, epoch = request.session, request.epoch
        try:
            self._check(request)
            if seat := self._scheduler.seats.get(session.id):
                self._end([seat], _stale(session.id, seat.request.epoch, epoch))
            self._scheduler.make_room()
            finished = self.verifier.admit(session)
        except WealdError as error:
            link.post([Failure(session.id, epoch, error)])
            return
        if finished:
            reply = Reply(session.id, epoch, 0, len(session.tokens), finished, 0, False, None, 0)
            link.post([Replies((reply,), StepTimings(), self.load())])
            return
        seat = self._scheduler.enqueue(request, link)
        trace = Trace.parse(request.traceparent) if self._sink else None
        seat.trace = trace if trace and trace.sampled else None
        if session.params.json_schema is not None:
            seat.preparing = True
            self._compiler.submit(self._prepare, seat)

    def _prepare(self, seat: Seat) -> None:
        """Compile the grammar of a session, in the compiler's thread."""
        if self._scheduler.seats.get(seat.id) is not seat:
            return
        grammar: Grammar | WealdError
        try:
            grammar = self.verifier.grammar(seat.request.session)
        except WealdError as error:
            grammar = error
        except BaseException:  # a panic of llguidance is no Exception
            _log.exception("compiling a json_schema failed")
            grammar = _internal("compiling json_schema")
        self._inbox.put(_Prepared(seat, grammar))

    def _constrain(self, prepared: _Prepared) -> None:
        """Let a session go on that waited for its grammar, if it is still there."""
        seat, grammar = prepared.seat, prepared.grammar
        if self._scheduler.seats.get(seat.id) is not seat:
            return
        if isinstance(grammar, WealdError):
            self._end([seat], grammar)
        else:
            self.verifier.constrain(seat.id, grammar)
            seat.preparing = False

    def _check(self, request: Open) -> None:
        if self.draining:
            raise WealdError(
                ErrorCode.UNAVAILABLE, "this verify replica is shutting down; open the session at another"
            )
        if request.fingerprint != self.fingerprint:
            raise incompatible(
                f"the drafter's target has the fingerprint {request.fingerprint.hex()}, this one "
                f"{self.fingerprint.hex()}; start both services with the same --model"
            )
        seat = self._scheduler.seats.get(request.session.id)
        if seat and request.epoch <= seat.request.epoch:
            raise _stale(request.session.id, request.epoch, seat.request.epoch)

    def _offer(self, link: Link, proposal: Proposal, now: float) -> None:
        id, epoch = proposal.session, proposal.epoch
        seat = self._scheduler.seats.get(id)
        if seat is None or epoch > seat.request.epoch:
            unknown = WealdError(ErrorCode.UNKNOWN_SESSION, f"session {id} is not open here; open it first")
            link.post([Failure(id, epoch, unknown)])
        elif epoch < seat.request.epoch:
            link.post([Failure(id, epoch, _stale(id, epoch, seat.request.epoch))])
        else:
            try:
                self.verifier.know(proposal.tree.tokens)
            except WealdError as error:
                self._end([seat], error)
            else:
                self._scheduler.offer(proposal, now)

    def _serve(self, step: Step) -> None:
        seats = {id: self._scheduler.seats[id] for id in (*step.trees, *step.chunks)}
        arrived = [seat.arrived for seat in seats.values() if seat.proposal]
        queued = time.monotonic() - min(arrived) if arrived else 0.0
        began = time.monotonic()
        try:
            stepped = self.verifier.step(step.trees, step.chunks)
        except Exception as error:
            if isinstance(error, WealdError) and error.code is ErrorCode.UNAVAILABLE:
                raise
            _log.exception("a target step failed")
            failure = error if isinstance(error, WealdError) else _internal("the target step")
            self._end(seats.values(), failure)
            return
        for id, failure in stepped.failures.items():
            self._end([seats.pop(id)], failure)
        rounds, sessions = traced(seats, step), len(seats)
        offers = self._scheduler.settle(step, stepped.outcomes, began, time.monotonic())
        sent = self._reply(step, stepped, seats, offers, int(queued * 1e9))
        if self._sink and rounds:
            for span in spans_of(rounds, stepped.timings, int(began * 1e9), int(sent * 1e9), sessions):
                self._sink(span)

    def _reply(
        self,
        step: Step,
        stepped: Stepped,
        seats: Mapping[str, Seat],
        offers: Mapping[str, Offer],
        queued_ns: int,
    ) -> float:
        """Answer every stream once, with the features its drafter lacks where a tree is wanted; when."""
        wanted = {id for id, offer in offers.items() if offer.wanted}
        prefilling = seats.keys() & step.chunks.keys() - stepped.outcomes.keys()
        soon = {id for id in prefilling if self._scheduler.tree_or_plain(seats[id]).wanted}
        blocks = self._features(seats, wanted | soon)
        now, load = time.monotonic(), self.load()
        timings = replace(stepped.timings, queue=queued_ns)
        self._scheduler.counters["forward_ns"] += timings.forward
        responses: dict[Link, list[Response]] = defaultdict(list)
        replies: dict[Link, list[Reply]] = defaultdict(list)
        for id, seat in seats.items():
            outcome, block = stepped.outcomes.get(id), blocks.get(id)
            if outcome:
                offer = offers.get(id, NO_TREE)
                reply = self._settle(seat, outcome, step.nodes.get(id, (0,)), offer, block, now)
                if seat.link:
                    replies[seat.link].append(reply)
            elif block and seat.link:
                responses[seat.link].append(Features(id, seat.request.epoch, block))
        for link, settled in replies.items():
            responses[link].append(Replies(tuple(settled), timings, load))
        for link, said in responses.items():
            link.post(said)
        return now

    def _features(self, seats: Mapping[str, Seat], ids: Iterable[str]) -> dict[str, FeatureBlock]:
        spans = {}
        for id in ids:
            seat, end = seats[id], self.verifier.computed(id)
            if seat.request.speculative and seat.sent < end:
                spans[id] = seat.sent, end
                seat.sent = end
        features = self.verifier.features(spans)
        return {id: to_block(spans[id][0], rows) for id, rows in features.items()}

    def _settle(
        self,
        seat: Seat,
        outcome: Outcome,
        nodes: tuple[int, ...],
        offer: Offer,
        block: FeatureBlock | None,
        now: float,
    ) -> Reply:
        """The reply to one session, which then waits for a tree, goes on, or is over."""
        scheduler = self._scheduler
        proposal, seat.proposal, seat.held_until = seat.proposal, None, 0.0
        scheduler.counters["trees_verified" if len(nodes) > 1 else "plain_steps"] += 1
        scheduler.counters["draft_tokens"] += len(nodes) - 1
        scheduler.counters["accepted_tokens"] += len(outcome.accepted)
        scheduler.counters.update(f"accepted_at_{depth}" for depth in range(len(outcome.accepted)))
        round, seat.round = seat.round, seat.round + 1
        accepted = replace(outcome, accepted=tuple(nodes[n] for n in outcome.accepted))
        seat.committed += len(outcome.tokens)
        reply = Reply(
            session=seat.id,
            epoch=seat.request.epoch,
            round=round,
            position=seat.committed - len(outcome.tokens),
            outcome=accepted,
            nodes=sum(1 << node for node in nodes),
            wanted=offer.wanted,
            features=block,
            turnaround_ns=int((now - seat.arrived) * 1e9) if proposal else 0,
            arrived_unix_ns=unix_ns(int(seat.arrived * 1e9)) if proposal and seat.trace else 0,
            price=offer.price,
            pace=offer.pace,
        )
        if outcome.finish:
            scheduler.remove(seat.id)
        elif offer.wanted:
            scheduler.hold(seat, round, now)
        return reply

    def _end(self, seats: Iterable[Seat], error: WealdError | None) -> None:
        """Close sessions and free what they hold; their drafters are told why, if there is an error."""
        for seat in list(seats):
            self._scheduler.remove(seat.id)
            self.verifier.close(seat.id)
            if error and seat.link:
                seat.link.post([Failure(seat.id, seat.request.epoch, error)])

    def _look_after(self, now: float) -> None:
        expired = [s for s in self._scheduler.seats.values() if s.link is None and s.expires <= now]
        self._scheduler.counters["expired_sessions"] += len(expired)
        self._end(expired, None)
        self.verifier.target.beat()
        if not self._scheduler.seats:
            self.verifier.check()


def _stale(id: str, epoch: int, current: int) -> WealdError:
    return WealdError(
        ErrorCode.STALE_EPOCH,
        f"session {id} has been taken over: epoch {epoch} is not above {current}; stop working on it",
    )


def _internal(what: str) -> WealdError:
    return WealdError(ErrorCode.INTERNAL, f"{what} failed; the log of the verify service says why")
