"""Which connections end when there are too many, for sequences of events that a generator makes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.serve.connections import GRACE_S, Connections

LIMIT, RESERVE = 4, 2
EVENTS = st.lists(
    st.tuples(st.sampled_from(["add", "idle", "slow", "busy", "discard", "wait"]), st.integers(0, 30)), max_size=60
)


class Client:
    """A connection that only notes whether it was ended."""

    has_ended = False

    def __init__(self, clock):
        self.state, self.since = "idle", clock()

    def end(self):
        self.has_ended = True


class Clock:
    """A clock that only a test moves."""

    now = 0.0

    def __call__(self):
        return self.now


def apply(registry, clients, clock, event, number):
    """Applies one event; those but ``add`` are about one of the clients that are there."""
    present = [client for client in clients if not client.has_ended]
    if event == "wait":
        clock.now += number * GRACE_S / 10
    elif event == "add" or not present:
        clients.append(Client(clock))
        registry.add(clients[-1])
        return clients[-1]
    elif event == "discard":
        clients.remove(present[number % len(present)])
        registry.discard(present[number % len(present)])
    else:
        client = present[number % len(present)]
        if client.state != event:
            client.state, client.since = event, clock()
        getattr(registry, f"set_{event}")(client)
    return None


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_only_clients_that_are_waited_for_end_and_new_ones_find_room(events):
    clock = Clock()
    registry, clients = Connections(LIMIT, RESERVE, clock), []
    for event, number in events:
        before = [client for client in clients if not client.has_ended]
        added = apply(registry, clients, clock, event, number)
        present = [client for client in clients if not client.has_ended]
        ended = [client for client in before if client.has_ended]

        assert len(present) <= LIMIT + RESERVE
        busy = [client for client in present if client.state == "busy"]
        assert sum(not registry.is_surplus(client) for client in busy) <= LIMIT
        assert any(not registry.is_surplus(client) for client in present) or not present or len(busy) >= LIMIT
        if added is not None and len(present) > LIMIT:
            assert all(client in busy or client.since > clock() - GRACE_S for client in present)
        assert all(client.state != "busy" for client in ended)
        # A new client ends only if the server works for all others.
        if added is not None and added.has_ended:
            assert all(client.state == "busy" for client in before)


def test_idle_ones_end_before_slow_ones_and_the_longest_waiting_first():
    clock = Clock()
    registry, clients = Connections(3, RESERVE, clock), [Client(clock) for _ in range(3)]
    for client in clients:
        registry.add(client)
    registry.set_slow(clients[0])
    registry.set_idle(clients[1])  # as before: it keeps its place
    clock.now += GRACE_S
    order, newest = [], None
    for _ in range(4):
        newest = Client(clock)
        registry.add(newest)
        registry.set_busy(newest)
        order.append([number for number, client in enumerate(clients) if client.has_ended])
    assert order == [[1], [1, 2], [0, 1, 2], [0, 1, 2]]
    assert registry.is_surplus(newest)
