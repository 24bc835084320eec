"""All-reduces between meshes: everybody gets the same bits, whatever the number of workers a mesh has."""

import threading

import numpy as np
import pytest

from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials, new_secret
from hwaware.runtime.reductions import Reducer
from hwaware.runtime.transfers import Transfers
from hwaware.transport import Mailbox

group_name = pytest.importorskip("hwaware.compiler.programs").group_name
CREDENTIALS = Credentials(new_secret(), "test")


def workers_of(meshes):
    """Reducers of one group; `meshes` says how many workers each mesh has."""
    ranks = iter(range(sum(meshes)))
    by_mesh = [[next(ranks) for _ in range(count)] for count in meshes]
    mailboxes = [Mailbox("127.0.0.1", CREDENTIALS) for _ in range(sum(meshes))]
    addresses = [("127.0.0.1", mailbox.port) for mailbox in mailboxes]
    reducers = []
    for rank, mailbox in enumerate(mailboxes):
        transfers = Transfers(mailbox, CREDENTIALS, lambda sentence: None)
        reducers.append(Reducer(transfers))
        reducers[-1].join(group_name([0, 1]), rank, by_mesh, addresses)
    return reducers, by_mesh


def reduced(reducers, by_mesh, operation, values):
    results = [None] * len(reducers)

    def run(rank):
        mesh = next(index for index, ranks in enumerate(by_mesh) if rank in ranks)
        results[rank] = reducers[rank].reduce(group_name([1, 0]), operation, values[mesh])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(reducers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.mark.parametrize("meshes", [(1,), (1, 1), (1, 1, 1, 1), (2, 1, 3)])
def test_everybody_gets_the_same_bits(meshes):
    reducers, by_mesh = workers_of(meshes)
    generator = np.random.default_rng(0)
    for _ in range(20):
        values = [generator.standard_normal(dtype=np.float32) for _ in meshes]
        results = reduced(reducers, by_mesh, "add", [np.asarray(value) for value in values])
        assert len({np.asarray(result).tobytes() for result in results}) == 1
        assert results[0] == pytest.approx(np.sum(values, dtype=np.float64), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("operation", "expected"), [("and", False), ("or", True)])
def test_truth_values(operation, expected):
    reducers, by_mesh = workers_of((1, 1, 1))
    results = reduced(reducers, by_mesh, operation, [np.asarray(value) for value in (True, False, True)])
    assert [bool(result) for result in results] == [expected] * 3


def test_a_group_that_was_never_formed():
    reducer = Reducer(Transfers(Mailbox("127.0.0.1", CREDENTIALS), CREDENTIALS, lambda sentence: None))
    with pytest.raises(MeasurementError, match=r"reduce 3\$.*never formed.*To fix:"):
        reducer.reduce(group_name([3]), "add", np.ones(()))


def test_a_mesh_that_fails_ends_the_others_wait():
    reducers, _ = workers_of((1, 1))
    threading.Timer(0.2, lambda: reducers[1]._transfers.tell_failure("out of memory")).start()
    with pytest.raises(MeasurementError, match="out of memory"):
        reducers[0].reduce(group_name([0, 1]), "add", np.ones(()))
