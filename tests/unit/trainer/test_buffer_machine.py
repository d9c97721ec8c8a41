"""What `GroupBuffer` promises under any order of events that `AsyncSource` may bring about."""

import copy
import pickle
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlpost.trainer.buffer import GroupBuffer
from rlpost.trainer.limits import Limits, OnStale
from tests.unit.trainer.rollouts import finish, prompt


@st.composite
def any_limits(draw):
    sync_every = draw(st.integers(1, 3))
    return Limits(
        groups_per_step=draw(st.integers(1, 3)),
        sync_every=sync_every,
        staleness_threshold=draw(st.sampled_from([0.0, 0.34, 0.5, 1.0, 2.5])),
        max_staleness=draw(st.sampled_from([None, sync_every - 1, sync_every])),
        on_stale=draw(st.sampled_from(OnStale)),
        max_running=draw(st.none() | st.integers(1, 4)),
    )


class Book:
    """What happened so far, as seen from outside."""

    def __init__(self):
        self.num_prompts = 0
        self.place: dict[str, int] = {}  # prompt -> its present place in the order of issue
        self.num_issued = 0
        self.handed_out = -1  # place of the last group that was taken
        self.step_groups: list = []  # kept for the step that is being taken, or was taken last
        self.trained: list[str] = []  # before that step
        self.lost: list[str] = []  # dropped by filter or failure


class BufferMachine(RuleBasedStateMachine):
    """Drives a buffer as `AsyncSource` may; between steps anything may happen that can happen between steps."""

    @initialize(limits=any_limits())
    def start(self, limits):
        self.buffer, self.book = GroupBuffer(limits), Book()
        self.taking = True  # else: the step is being trained
        self.fresh = None  # the group just taken
        self.zombies: list = []  # slots of groups that may still arrive though nobody waits for them
        self.ceiling, self.always_whole = limits.capacity, True
        self.counts: Counter[str] = Counter()
        self.saved = None

    @property
    def limits(self):
        return self.buffer.limits

    def between_steps(self):
        return not self.taking or (not self.book.step_groups and self.fresh is None)

    def due(self):
        return self.buffer.step - 1 - self.buffer.version >= self.limits.sync_every

    def running(self):
        return [slot for slot in self.buffer.slots if slot.running]

    # --- rollout ---

    @rule(num=st.integers(1, 6))
    def start_groups(self, num):
        for _ in range(num):
            self.start_one(self.buffer)

    def start_one(self, buffer):
        """Start one more, if that is allowed."""
        if (slot := buffer.waiting()) is not None:
            buffer.restart(slot)
            assert slot.version == buffer.version
        elif buffer.blocked() is None:
            chosen = buffer.reissued()
            if chosen is None:
                chosen = prompt(self.book.num_prompts)
                self.book.num_prompts += 1
            self.book.place[chosen.id] = self.book.num_issued
            self.book.num_issued += 1
            buffer.issue(chosen)
        else:
            return
        assert self.limits.max_running is None or buffer.num_running <= self.limits.max_running

    @precondition(lambda self: self.running())
    @rule(data=st.data(), held_back=st.booleans())
    def finish_groups(self, data, held_back):
        """Some, in any order; they began to sample at once or, held back by their engine, under the present weights."""
        for slot in data.draw(st.lists(st.sampled_from(self.running()), min_size=1, unique=True)):
            self.finish(slot, held_back)

    def finish(self, slot, held_back=False):
        first = self.buffer.version if held_back else slot.version
        finish(self.buffer, slot, range(first, self.buffer.version + 1))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), drop=st.booleans())
    def fail_group(self, data, drop):
        slot = data.draw(st.sampled_from(self.running()))
        self.buffer.fail(slot, drop=drop)
        self.counts["failed_dropped" if drop else "failed_reissued"] += 1
        if drop:
            self.book.lost.append(slot.prompt.id)

    @precondition(lambda self: self.zombies)
    @rule(fails=st.booleans())
    def something_arrives_for_a_slot_that_is_gone(self, fails):
        slot = self.zombies.pop()
        if fails:
            self.buffer.fail(slot, drop=True)
        else:
            finish(self.buffer, slot)

    # --- a step ---

    @precondition(lambda self: self.taking)
    @rule(num=st.integers(1, 4), filter_drops=st.booleans())
    def take_groups(self, num, filter_drops):
        for _ in range(num):
            if len(self.book.step_groups) < self.limits.groups_per_step:
                self.take()
        if filter_drops and self.fresh is not None:
            self.buffer.put_back()
            assert self.book.step_groups.pop() is self.fresh
            self.book.lost.append(self.fresh.id)
            self.fresh = None

    def take(self):
        buffer, book = self.buffer, self.book
        finished = [slot.group for slot in buffer.slots]
        got = self.fresh = buffer.take()
        dropped = len(finished) - len(buffer.slots) - (got is not None)
        self.counts["dropped_stale"] += dropped

        def age(g):
            return buffer.step - 1 - min(int(v) for t in g.trajectories for v in t.versions if v >= 0)

        assert all(age(g) > self.limits.bound for g in finished[:dropped])
        head = finished[dropped] if dropped < len(finished) else None
        assert got is head
        if got is not None:
            assert age(got) <= self.limits.bound
            assert book.place[got.id] > book.handed_out
            book.handed_out = book.place[got.id]
            book.step_groups.append(got)
        if self.limits.on_stale is OnStale.WAIT and self.always_whole:
            assert not dropped

    @precondition(lambda self: self.taking and self.book.step_groups)
    @rule(short=st.integers(0, 4))
    def end_step(self, short):
        """Now and then with fewer groups than it should have, as where dynamic sampling ran dry."""
        if len(self.book.step_groups) < self.limits.groups_per_step:
            if short:
                return
            self.always_whole = False
        self.buffer.end_step()
        self.taking, self.fresh = False, None

    @rule()
    def whole_step(self):
        """If what runs finishes and the trainer goes on, the step gets its groups: nothing is stuck, ever."""
        if not self.taking:
            if self.due():
                self.publish()
            self.next_step()
        for _ in range(200):
            if len(self.book.step_groups) == self.limits.groups_per_step:
                break
            self.start_groups(self.ceiling)
            for slot in self.running()[:1]:
                self.finish(slot)
            self.take()
        else:
            raise AssertionError(f"stuck with {self.buffer.in_flight} in flight under {self.limits}")
        self.end_step(1)

    @precondition(lambda self: not self.taking and not self.due())
    @rule()
    def next_step(self):
        self.book.trained += [g.id for g in self.book.step_groups]
        self.book.step_groups = []
        self.taking = True

    @precondition(lambda self: self.between_steps())
    @rule()
    def publish(self):
        """The weights of the last step; also when it is not due yet, as before a validation."""
        self.sync(self.buffer.step - 1)
        assert self.buffer.in_flight == len(self.buffer.slots)

    @precondition(lambda self: self.between_steps())
    @rule()
    def publish_again(self):
        in_flight, reissued = self.buffer.in_flight, self.num_reissued()
        self.sync(self.buffer.version)
        assert self.buffer.in_flight == in_flight + reissued - self.num_reissued()

    def num_reissued(self):
        return len(self.buffer.state_dict()["reissued"])

    def sync(self, version):
        before, running = self.buffer.slots, self.running()
        cut_off = self.buffer.publish(version)
        self.zombies += cut_off
        assert self.buffer.version == version
        after = self.buffer.slots
        gone = [slot for slot in before if slot not in after]
        assert cut_off == [slot for slot in running if slot in gone] and all(slot.gone for slot in gone)
        self.counts += Counter(aborted_stale=len(cut_off), dropped_stale=len(gone) - len(cut_off))
        assert not gone or self.limits.on_stale is OnStale.ABORT
        if self.limits.on_stale is OnStale.ABORT:
            for slot in before:
                ahead = len([other for other in before[: before.index(slot)] if other in after])
                turn = self.buffer.step + ahead // self.limits.groups_per_step
                too_old = turn - 1 - slot.first_version > self.limits.bound
                assert (slot in gone) == (too_old and not slot.waiting)

    # --- what else happens between steps ---

    @precondition(lambda self: self.between_steps())
    @rule(limits=any_limits())
    def change_limits(self, limits):
        self.buffer.limits = Limits(
            groups_per_step=self.limits.groups_per_step,
            sync_every=limits.sync_every,
            staleness_threshold=limits.staleness_threshold,
            max_staleness=limits.max_staleness,
            on_stale=limits.on_stale,
            max_running=limits.max_running,
        )
        self.ceiling = max(self.limits.capacity, self.buffer.in_flight)
        self.always_whole = False  # what was started under others may be too old under these
        if self.due():
            self.publish()

    @precondition(lambda self: not self.taking and self.buffer.version < self.buffer.step - 1)
    @rule()
    def rewind(self):
        """The step is sampled anew."""
        groups, self.book.step_groups = self.book.step_groups, []
        in_flight = self.buffer.in_flight
        self.buffer.rewind([g.prompt for g in groups])
        assert self.buffer.in_flight == in_flight
        self.book.handed_out = self.book.place[groups[0].id] - 1
        self.taking = True

    @precondition(lambda self: self.between_steps())
    @rule()
    def rerun(self):
        self.zombies += self.running()
        self.buffer.rerun()
        assert all(slot.waiting for slot in self.buffer.slots)

    @precondition(lambda self: self.between_steps())
    @rule()
    def save(self):
        state = pickle.dumps(self.buffer.state_dict())
        self.saved = state, copy.deepcopy(self.book), self.taking, self.always_whole

    @precondition(lambda self: self.saved is not None)
    @rule(into_new=st.booleans())
    def restore(self, into_new):
        """All that happened since the checkpoint did not happen; the engines hold the checkpoint's weights."""
        self.zombies += self.running()
        if into_new:  # another process
            self.buffer, self.zombies, self.counts = GroupBuffer(self.limits), [], Counter()
        state, book, self.taking, whole = self.saved
        self.buffer.load_state_dict(pickle.loads(state))
        self.book, self.fresh, self.always_whole = copy.deepcopy(book), None, self.always_whole and whole
        self.ceiling = max(self.limits.capacity, self.buffer.in_flight)
        assert not self.running()
        self.publish()

    # --- what holds at any time ---

    @invariant()
    def never_over_capacity(self):
        assert self.buffer.in_flight <= self.ceiling
        self.ceiling = max(self.limits.capacity, min(self.ceiling, self.buffer.in_flight))

    @invariant()
    def every_prompt_is_in_one_place(self):
        state, book = self.buffer.state_dict(), self.book
        here = [slot.prompt.id for slot in self.buffer.slots] + [p.id for p in state["reissued"]]
        gone = book.trained + [g.id for g in book.step_groups] + book.lost
        assert sorted(here + gone) == sorted(prompt(i).id for i in range(book.num_prompts))

    @invariant()
    def slots_stand_in_the_order_of_issue(self):
        places = [self.book.place[slot.prompt.id] for slot in self.buffer.slots]
        assert places == sorted(set(places))

    @invariant()
    def running_groups_are_counted(self):
        assert self.buffer.num_running == len(self.running())

    @invariant()
    def drops_are_counted_with_their_reason(self):
        assert self.buffer.counts == self.counts

    def teardown(self):
        if hasattr(self, "buffer"):
            for _ in range(3):
                self.whole_step()


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
