"""Price messages that pass one network card at once."""

from __future__ import annotations

from typing import Dict, Iterable, List, Literal, Mapping, Sequence, Tuple

import numpy as np

from hwaware.cluster import Device, SharedCard

Role = Literal["send", "receive"]
ROLES: Tuple[Role, Role] = ("send", "receive")
# Source, target, and what part of the n bytes goes from one to the other.
Transfer = Tuple[str, str, float]


def card_bytes_per_s(card: SharedCard, role: Role, transfers: int) -> float:
    """Return the rate of k transfers at once through a card, all together.

        C(k) = k r_k, interpolated between the measured k and constant beyond them

    Without measured k, and for all that a card receives, C is the card's rate in that direction.

    Example:
        >>> from hwaware.cluster import ConcurrentRate
        >>> rates = (ConcurrentRate(k=1, bytes_per_s=1e9), ConcurrentRate(k=3, bytes_per_s=5e8))
        >>> card = SharedCard(host="a", devices=("a:0", "a:1"), send_bytes_per_s=1.5e9, receive_bytes_per_s=1e9,
        ...                   concurrent=rates)
        >>> [card_bytes_per_s(card, "send", k) / 1e9 for k in (1, 2, 3, 4)], card_bytes_per_s(card, "receive", 2) / 1e9
        ([1.0, 1.25, 1.5, 1.5], 1.0)
    """
    if role == "receive":
        return card.receive_bytes_per_s
    if not card.concurrent:
        return card.send_bytes_per_s
    measured = sorted((rate.k, rate.k * rate.bytes_per_s) for rate in card.concurrent)
    return float(np.interp(transfers, [k for k, _ in measured], [total for _, total in measured]))


class Cards:
    """Find the shared cards of a cluster's devices, and price transfers through them."""

    def __init__(self, cards: Sequence[SharedCard], devices: Mapping[str, Device]) -> None:
        self._cards = cards
        self._devices = devices
        self._of: Dict[str, Tuple[int, ...]] = {}
        for number, card in enumerate(cards):
            for name in card.devices:
                self._of[name] = (*self._of.get(name, ()), number)

    def __bool__(self) -> bool:
        return bool(self._cards)

    def of(self, device: str) -> Tuple[int, ...]:
        """Return the numbers of the cards that a device uses."""
        return self._of.get(device, ())

    def crowd_s_per_byte(self, role: Role, device: str, transfers: int, part: float) -> float:
        """Return `seconds_per_byte` of that many transfers of equal parts through the cards of one device."""
        if transfers < 2:
            return 0.0
        cards = (self._cards[number] for number in self.of(device))
        return max((transfers * part / card_bytes_per_s(card, role, transfers) for card in cards), default=0.0)

    def seconds_per_byte(self, transfers: Iterable[Transfer]) -> float:
        """Return the time that the slowest card takes per byte of a message, split among simultaneous transfers.

            max over cards of  sum of x_m / C(k),     k transfers m of part x_m through the card, each between two hosts

        One transfer alone counts nothing, because its link was measured through the card.

        Example:
            >>> from hwaware.cluster import ClusterProfile
            >>> devices = {device.id: device for device in ClusterProfile.uniform(devices_per_host=2).devices}
            >>> card = SharedCard(host="h0", devices=("h0:0", "h0:1"), send_bytes_per_s=1e9, receive_bytes_per_s=2e9)
            >>> cards = Cards([card], devices)
            >>> cards.seconds_per_byte([("h0:0", "h1:0", 0.5), ("h0:1", "h1:1", 0.5)])
            1e-09
            >>> cards.seconds_per_byte([("h0:0", "h1:0", 1.0)]), cards.seconds_per_byte([("h0:0", "h0:1", 1.0)] * 2)
            (0.0, 0.0)
        """
        crowds: Dict[Tuple[Role, int], List[float]] = {}
        for source, target, part in transfers:
            if self._devices[source].host != self._devices[target].host:
                for role, device in zip(ROLES, (source, target)):
                    for number in self.of(device):
                        crowds.setdefault((role, number), []).append(part)
        crowded = ((self._cards[number], role, parts) for (role, number), parts in crowds.items() if len(parts) > 1)
        seconds = (sum(parts) / card_bytes_per_s(card, role, len(parts)) for card, role, parts in crowded)
        return max(seconds, default=0.0)
