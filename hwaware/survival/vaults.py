"""Start the vaults of a program, one a host, and ask them what they have."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import Any, Collection, Dict, List, NamedTuple, Set, Tuple

from hwaware import greeting, ray_cluster
from hwaware.runtime import settings as runtime
from hwaware.runtime.checkpoints import Box
from hwaware.runtime.heartbeat import end_process, on_host
from hwaware.survival.pieces import Name, Piece
from hwaware.survival.vault import Drained, Vault
from hwaware.transport import Address

# A block of an array.
Block = Tuple[Name, Box]
# Vaults have names in Ray, by which `hwaware drain` finds them.
NAMESPACE, PREFIX = "hwaware", "vault"
# Environment variable with the path of a file that appears on a host that is about to be taken away.
NOTICE = "HWAWARE_PREEMPTION_FILE"
START_LIMIT_S, _ANSWER_LIMIT_S = 60.0, 10.0
# A vault that is silent for so long does not answer any more, for example because its process is stopped.
SILENCE_LIMIT_S = 60.0


class _Up(NamedTuple):
    """A vault that is up."""

    actor: Any
    mailbox: Address
    pid: int


class Vaults:
    """The vaults of one program, by their hosts' addresses.

    Attributes:
        up: The vaults that take copies.
        held: The blocks that each has of the committed point.
        epoch: Number of recoveries; messages of earlier ones are dropped.
        secret, digests: Secret by which workers and vaults know each other; True if messages carry keyed digests.
        asked: The hosts and devices that the program is asked to leave, and has not answered about.
        avoided: Addresses of hosts that take no new copies.
        kept: Serial of the newest committed order for which each vault dropped older points.
    """

    def __init__(self) -> None:
        self.up: Dict[str, _Up] = {}
        self.held: Dict[str, Set[Block]] = {}
        self.epoch = 0
        self.secret = greeting.new_secret()
        self.digests = runtime.current().message_digests
        self.asked: Set[str] = set()
        self.avoided: Set[str] = set()
        self.kept: Dict[str, int] = {}
        self._token = secrets.token_hex(4)
        # Vaults that are not up yet: the actor, the call for its address, and the call for its process.
        self._starting: Dict[str, Tuple[Any, Any, Any]] = {}
        self._start_s: Dict[str, float] = {}  # when the newest vault of each host was started
        # The question to each vault that it has not answered yet, and when it was asked.
        self._asked: Dict[str, Tuple[Any, float]] = {}

    def start(self, hosts: Collection[str]) -> None:
        """Start a vault on every host that has none."""
        import ray

        for host in sorted(set(hosts) - set(self.up) - set(self._starting)):
            node = {f"node:{host}": 0.001}
            actor = ray.remote(num_cpus=0, resources=node, max_restarts=0)(Vault)
            name = f"{PREFIX} {self._token} {host} {secrets.token_hex(4)}"
            named = actor.options(name=name, namespace=NAMESPACE)
            started = named.remote(host, self.secret, self.digests, os.environ.get(NOTICE) or None)
            self._start_s[host] = time.monotonic()
            self._starting[host] = (started, started.mailbox_address.remote(), started.process_id.remote())

    def late(self) -> Set[str]:
        """Return the hosts whose vault should have started by now, and has not."""
        return {host for host in self._starting if time.monotonic() - self._start_s[host] > START_LIMIT_S}

    def use_started(self, limit_s: float) -> None:
        """Use the vaults that have started, or that start within a limit."""
        import ray

        calls = {process: host for host, (_, _, process) in self._starting.items()}  # a vault answers it last
        for process in ray.wait(list(calls), num_returns=len(calls), timeout=limit_s)[0] if calls else ():
            host = calls[process]
            actor, mailbox, _ = self._starting.pop(host)
            with contextlib.suppress(ray.exceptions.RayError):  # it, or its host, has ended already
                self.up[host] = _Up(actor, *ray.get([mailbox, process], timeout=_ANSWER_LIMIT_S))
                self.held[host] = set()
                if self.epoch:  # the first copies of the first epoch may overtake this call
                    actor.begin.remote(self.epoch, ())

    def drop(self, hosts: Collection[str]) -> None:
        """Go on without the vaults of these hosts."""
        for host in hosts:
            del self.up[host], self.held[host]
            self._asked.pop(host, None)
            self.kept.pop(host, None)

    def marks(self) -> Tuple[Dict[str, Set[Tuple[int, str]]], List[str]]:
        """Return the marks of vaults that have answered meanwhile, and the hosts whose vault is lost.

        Every vault always owes one answer, so this never waits.
        """
        import ray

        found, lost = {}, []
        for host, vault in self.up.items():
            asked, asked_s = self._asked.get(host, (None, 0.0))
            if asked is not None and ray.wait([asked], timeout=0)[0]:
                try:
                    found[host], drains, self.kept[host] = ray.get(asked)
                    self.asked |= drains
                except ray.exceptions.RayError:
                    lost.append(host)
                    continue
                asked = None
            if asked is None:
                self._asked[host] = (vault.actor.news.remote(), time.monotonic())
            elif time.monotonic() - asked_s > SILENCE_LIMIT_S:
                on_host(host, end_process, vault.pid)  # a stopped process cannot even be told to end
                lost.append(host)
        return found, lost

    def tell(self, what: str, outcome: Drained) -> None:
        """Tell every vault how the program has left a host or a device."""
        for vault in self.up.values():
            vault.actor.tell.remote(what, outcome)
        self.asked.discard(what)
        self._asked.clear()  # older answers would ask again

    def forget(self, whats: Collection[str]) -> None:
        """Forget that the program was asked to leave these hosts and devices: a host has come back."""
        self.asked -= set(whats)
        for vault in self.up.values():
            vault.actor.forget.remote(whats)
        self._asked.clear()  # older answers would ask again

    def keep(self, number: int, serial: int, names: Set[Name], sent: Dict[str, Set[Block]]) -> None:
        """Let every vault drop what a committed point does not need; `sent` is what it got by the order `serial`."""
        for host, vault in self.up.items():
            blocks = self.held[host] | sent.get(host, set())
            self.held[host] = {block for block in blocks if block[0] in names}
            vault.actor.keep.remote(names, number, serial)

    def listings(self) -> Dict[str, List[Piece]]:
        """Return what each vault that answers has; the others are given up."""
        import ray

        calls = {vault.actor.listing.remote(): host for host, vault in self.up.items()}
        arrived, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_LIMIT_S) if calls else ([], [])
        found: Dict[str, List[Piece]] = {}
        for call in arrived:
            with contextlib.suppress(ray.exceptions.RayError):  # it is given up below
                found[calls[call]] = ray.get(call)
        self.drop(set(self.up) - set(found))
        return found

    def begin(self, listings: Dict[str, List[Piece]], names: Set[Name]) -> None:
        """Begin another epoch, in which vaults keep these arrays and take no late messages."""
        self.epoch += 1
        for vault in self.up.values():
            vault.actor.begin.remote(self.epoch, names)
        self.held = {
            host: {(piece.name, Box(piece.start, piece.shape)) for piece in pieces if piece.name in names}
            for host, pieces in listings.items()
        }

    def end(self, hosts: Collection[str]) -> None:
        """End the vaults of these hosts, also those that are not up yet."""
        import ray

        for host in set(hosts) & set(self._starting):
            ray.kill(self._starting.pop(host)[0])
        for host in set(hosts) & set(self.up):
            ray.kill(self.up[host].actor)
            self.drop([host])

    def close(self) -> None:
        """End the vaults."""
        actors = [vault.actor for vault in self.up.values()] + [actor for actor, _, _ in self._starting.values()]
        self.up, self._starting = {}, {}
        ray_cluster.end_actors(actors)
