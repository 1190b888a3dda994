"""Bugs of moves between replicas, injected one at a time. The worlds of drained replicas must detect every one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from chairlift.core.request import Request
from chairlift.engine.core_outputs import CoreOutputs, MoveReport, renamed
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.kv_moves import KVMoves, MoveOrder
from chairlift.engine.kv_store import files, record, store
from chairlift.fleet import moves
from chairlift.fleet.member import Member
from chairlift.fleet.moves import Moves
from tests.simulation.mutants import Patch

__all__ = ["MOVE_MUTANTS"]

MOVE_MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MOVE_MUTANTS[plant.__name__] = plant
    return plant


@mutant
def source_does_not_pause(patch: Patch) -> None:
    def wrong(self: KVMoves, order: MoveOrder) -> None:
        self._reports.append(MoveReport(order.sequence_id, "pause", generation=order.generation))

    patch(KVMoves, "_pause", wrong)


@mutant
def results_of_the_former_owner_are_used(patch: Patch) -> None:
    arrived = Moves.arrived

    def wrong(self: Moves, member: Member, outputs: CoreOutputs) -> CoreOutputs:
        member.former.clear()
        return arrived(self, member, outputs)

    patch(Moves, "arrived", wrong)


@mutant
def results_before_the_switch_are_used(patch: Patch) -> None:
    """The destination's results count although the source goes on."""
    withdraw = Moves._withdraw

    def wrong(self: Moves, move: Any) -> None:
        member, wire = move.destination, move.wire
        withdraw(self, move)
        if member is not None and move.stage == "switch":
            member.former.discard(wire)
            move.job.wire, move.job.member = wire, member
            member.guests[wire] = move.job.key

    patch(Moves, "_withdraw", wrong)


@mutant
def first_token_of_the_destination_is_lost(patch: Patch) -> None:
    arrived = Moves.arrived

    def wrong(self: Moves, member: Member, outputs: CoreOutputs) -> CoreOutputs:
        pending = [each.wire for each in self._of(destination=member) if each.stage == "switch"]
        found = arrived(self, member, outputs)
        owned = {self._jobs[key].key: None for wire, key in member.guests.items() if wire in pending}
        return renamed(found, owned) if owned else found

    patch(Moves, "arrived", wrong)


@mutant
def last_token_of_the_source_is_computed_again(patch: Patch) -> None:
    as_known = Moves._as_known

    def wrong(self: Moves, move: Any) -> PreparedRequest:
        request = as_known(self, move)
        return dataclasses.replace(request, answer_token_ids=request.answer_token_ids[:-1])

    patch(Moves, "_as_known", wrong)


@mutant
def tokens_since_the_fetch_are_forgotten(patch: Patch) -> None:
    switch, fetch, known = Moves._switch, Moves._fetch, dict[str, PreparedRequest]()

    def remember(self: Moves, move: Any) -> None:
        known[move.wire] = self._as_known(move)
        fetch(self, move)

    def wrong(self: Moves, move: Any) -> None:
        as_known = Moves._as_known
        if move.wire in known:
            self._as_known = lambda _: known[move.wire]  # type: ignore[method-assign]
        switch(self, move)
        self._as_known = as_known.__get__(self)  # type: ignore[method-assign]

    patch(Moves, "_fetch", remember)
    patch(Moves, "_switch", wrong)


@mutant
def blocks_used_before_they_are_verified(patch: Patch) -> None:
    def wrong(payload: bytes, key: bytes, slot: int, generation: int) -> bytes:
        return record.payload_checksum(b"", key, slot, generation)

    patch(files, "payload_checksum", wrong)
    patch(store, "payload_checksum", wrong)


@mutant
def source_freed_before_the_destination_confirmed(patch: Patch) -> None:
    switch = Moves._switch

    def wrong(self: Moves, move: Any) -> None:
        switch(self, move)
        if move.stage == "switch" and move.source.core is not None:
            move.source.former.add(move.job.wire)
            move.source.core.abort([move.job.wire])

    patch(Moves, "_switch", wrong)


@mutant
def source_does_not_go_on(patch: Patch) -> None:
    follow = KVMoves.follow
    patch(KVMoves, "follow", lambda self, order: None if order.stage == "resume" else follow(self, order))


@mutant
def fall_back_forgets_the_sampling_position(patch: Patch) -> None:
    make = PreparedRequest.make_sequences

    def wrong(self: PreparedRequest) -> list[Request]:
        sequences = make(self)
        row: Any = sequences[0].sampling
        known = row.num_prompt_tokens + len(self.answer_token_ids)
        sequences[0].sampling = dataclasses.replace(row, num_prompt_tokens=known)
        return sequences

    patch(PreparedRequest, "make_sequences", wrong)


@mutant
def request_of_a_dead_source_is_also_computed_again(patch: Patch) -> None:
    lost = Moves.lost

    def wrong(self: Moves, member: Member) -> None:
        for move in self._of(source=member):
            if move.stage == "switch":
                del self._moves[move.job.key]
        lost(self, member)

    patch(Moves, "lost", wrong)


@mutant
def destination_keeps_what_was_taken_back(patch: Patch) -> None:
    patch(Moves, "_withdraw", lambda self, move: None)


@mutant
def moves_wait_without_an_end(patch: Patch) -> None:
    patch(moves, "_SECONDS", {})
